"""Types of speculative decoding: the shape of a window, its links, drafts, and what a drafter is given."""

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from torch import Tensor

from peregrine.attention.metadata import AttentionMetadata
from peregrine.kernels.sampling import Features, SamplingTensors
from peregrine.spec.links import Links
from peregrine.spec.row_pages import RowPages
from peregrine.spec.windows import Layout, Plan


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Depth and width of a drafter's trees; fixed for the life of an engine."""

    depth: int  # K: drafts on the longest path; 0 is plain decoding
    width: int  # children a node may have; 1 is a chain
    nodes: int  # T: window width, the root included; a chain has depth + 1
    lookahead: int  # places past the newest token that proposing may write in the draft store
    says: bool = False  # whether the drafter says how likely each draft of a chain is (a confidence head)

    @staticmethod
    def chain(depth: int, lookahead: int, says: bool = False) -> "DraftShape":
        return DraftShape(depth, 1, depth + 1, lookahead, says)

    @property
    def is_chain(self) -> bool:
        return self.width == 1

    @property
    def span(self) -> int:
        """Places past `past_len` that one round may write, in either store."""
        return max(self.nodes, self.depth + 1 + self.lookahead)


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafted tokens. `links` is None for a chain."""

    tokens: Tensor  # [R, T - 1] i64, node 1 first
    depths: Tensor | int  # [R] i64, or one for all rows: drafts deeper than this are void
    links: Links | None
    said: Tensor | None = None  # [R, T - 1] f32 how likely each is right if those before it are


@dataclass(frozen=True, slots=True)
class Seen:
    """What a round gives the drafter: the accepted path, and the state."""

    width: int  # W: nodes of the longest path
    depth: int  # how deep to draft
    taps: Tensor | None  # [R, W, taps * H], or with a layout [N, taps * H]: packed as its windows are
    past_lens: Tensor  # [R]  tokens cached before the round
    new_past_lens: Tensor  # [R]  and after it; also the newest token's position
    history: Tensor  # [R, C]  every token so far by position, the newest at new_past_lens, then valid, meaningless ids
    pages: RowPages
    sampling: SamplingTensors
    features: Features
    forced: Tensor | None = None  # [R, K]  tokens that a grammar forces after the newest; -1: it leaves a choice
    layout: Layout | None = None  # None: every row has its whole window, and all are drafted for
    plan: Plan | None = None  # the layout, if drafts are planned step by step; None: as deep as `depth`

    def drafted(self) -> "Seen":
        """The rows that are drafted for; what was read in this round is left as it is."""
        return self if self.layout is None or self.layout.rows is None else self.only(self.layout.rows)

    def only(self, rows: Tensor) -> "Seen":
        """Some of the rows [n]; what was read in this round is left as it is."""
        return replace(
            self,
            past_lens=self.past_lens.index_select(0, rows),
            new_past_lens=self.new_past_lens.index_select(0, rows),
            pages=self.pages.only(rows),
            sampling=self.sampling.only(rows, Features(sampled=self.features.sampled)),
            forced=None if self.forced is None else self.forced.index_select(0, rows),
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stretch of prompt the target has just read, ragged over rows."""

    tokens: Tensor  # [N]
    next_tokens: Tensor  # [N]
    taps: Tensor | None  # [N, taps * H]
    metadata: AttentionMetadata  # of the target's read; the drafter's stores share its places


class Drafter(Protocol):
    """Drafts tokens. It can only change speed: the target decides every token."""

    shape: DraftShape
    taps: tuple[int, ...]  # the target's hidden states that it reads
    reads_next_token: bool  # its cache at a position depends on the token after it (draft heads)

    def absorb(self, chunk: Chunk) -> None:
        """Read a prompt chunk without drafting."""

    def propose(self, seen: Seen) -> Drafts:
        """Read the round's path and draft past the newest token."""


@runtime_checkable
class PartedDrafter(Drafter, Protocol):
    """A drafter whose two parts can be recorded apart, so that each round may draft as deep as the host asks."""

    depths: tuple[int, ...]  # how deep it can draft; 0 is first

    def read(self, seen: Seen) -> Tensor | None:
        """Read the round's path; what drafting begins with, for each row that is drafted for. [n, H]"""

    def draft(self, seen: Seen, hidden: Tensor | None, depth: int) -> Drafts:
        """Draft so deep for every row; of `seen`, what was read in the round is not used."""
