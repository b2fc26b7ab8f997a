"""How the nodes of a window hang together: a chain, a drafter's tree, or chains that branch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Branch = tuple[int, int]  # a further draft for a place of the chain: how deep, the first being 0, and its token


@dataclass(frozen=True, slots=True)
class Links:
    """The tree of each row's window; node 0 is the root, parents come before children."""

    parents: Tensor  # [R, T] i64, the root's is itself
    depths: Tensor  # [R, T] i64
    ancestors: Tensor  # [R, T] i64 words: own bit and every ancestor's

    @staticmethod
    def chain(nodes: int, device: torch.device) -> "Links":
        """The links of a chain, for one row: [1, T]."""
        order = torch.arange(nodes, device=device)
        words = [(1 << (i + 1)) - 1 for i in range(nodes)]
        signed = [word - (1 << 64) if word >= 1 << 63 else word for word in words]
        return Links(
            parents=(order - 1).clamp(min=0)[None], depths=order[None], ancestors=torch.tensor([signed], device=device)
        )

    def fields(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.parents, self.depths, self.ancestors

    def rows(self, count: int) -> "Links":
        """The first `count` rows (or one row spread over them), without a copy."""
        if self.parents.shape[0] == 1:
            return Links(*(x.expand(count, -1) for x in self.fields()))
        return Links(*(x[:count] for x in self.fields()))


@dataclass(frozen=True, slots=True)
class Branched:
    """The windows of a round in which chains branch: a row's chain first, then further drafts beside its nodes.

    Rows with fewer nodes than others have void ones, deeper than any draft, which are not read.
    """

    tokens: Tensor  # [R, T] i64
    links: Links
    depth: int  # drafts on the longest path
    deepest: tuple[int, ...]  # of each row
    lens: tuple[int, ...]  # nodes of each row's window

    @staticmethod
    def of(chains: Sequence[Sequence[int]], branches: Sequence[Sequence[Branch]]) -> "Branched":
        """Of the newest token and chain of each row, and of what branches off them."""
        lens = [len(chain) + len(more) for chain, more in zip(chains, branches, strict=True)]
        deepest = [
            max([len(chain) - 1, *(at + 1 for at, _ in more)]) for chain, more in zip(chains, branches, strict=True)
        ]
        shape, order = (len(lens), max(lens)), np.arange(max(lens))
        tokens, parents = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        depths = np.full(shape, max(deepest) + 1)
        words = np.broadcast_to(1 | 1 << order, shape).copy()
        for row, (chain, more) in enumerate(zip(chains, branches, strict=True)):
            count, length = len(chain), lens[row]
            tokens[row, :length] = [*chain, *(token for _, token in more)]
            parents[row, 1:length] = [*range(count - 1), *(at for at, _ in more)]
            depths[row, :length] = [*range(count), *(at + 1 for at, _ in more)]
            words[row, :count] = (2 << order[:count]) - 1
            for node, (at, _) in enumerate(more, count):
                words[row, node] = (2 << at) - 1 | 1 << node
        links = Links(*(torch.from_numpy(x) for x in (parents, depths, words)))
        return Branched(torch.from_numpy(tokens), links, max(deepest), tuple(deepest), tuple(lens))
