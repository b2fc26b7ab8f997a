"""How the nodes of a window hang together: a chain, a drafter's tree, or chains that branch."""

from collections.abc import Sequence
from dataclasses import dataclass

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
        most, void = max(lens), max(deepest) + 1
        nodes: list[list[list[int]]] = [[], [], [], []]  # lists are faster than arrays here: windows are small
        for chain, more, length in zip(chains, branches, lens, strict=True):
            count, empty = len(chain), most - length
            words = [(2 << place) - 1 for place in range(count)]
            words += [(2 << at) - 1 | 1 << node for node, (at, _) in enumerate(more, count)]
            for lines, line in zip(
                nodes,
                (
                    [*chain, *(token for _, token in more), *[0] * empty],
                    [0, *range(count - 1), *(at for at, _ in more), *[0] * empty],
                    [*range(count), *(at + 1 for at, _ in more), *[void] * empty],
                    [*words, *(1 | 1 << node for node in range(length, most))],
                ),
                strict=True,
            ):
                lines.append(line)
        tokens, *links = torch.tensor(nodes).unbind()
        return Branched(tokens, Links(*links), max(deepest), tuple(deepest), tuple(lens))
