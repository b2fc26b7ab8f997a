"""Windows of different lengths in one round, packed without padding, and what a plan tells a round.

Row r has the first lens[r] nodes of its window: the newest token and lens[r] - 1 drafts. Buffers have lines of T nodes,
the longest; a forward reads the N nodes that are in some window, one row's after the other. Windows of one length need
no packing: such a round is an ordinary one with fewer drafts.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from peregrine.attention.metadata import AttentionMetadata
from peregrine.attention.window import Window
from peregrine.spec.row_pages import RowPages


@dataclass(frozen=True, slots=True)
class Windows:
    """How many nodes of each row's window a round reads, on the CPU."""

    lens: tuple[int, ...]
    width: int  # T: the longest
    at: Tensor  # [N] i64 where a packed node lies in [R, T]
    row_of: Tensor  # [N] i64
    starts: Tensor  # [R + 1] i64 where a row begins among packed nodes
    moved: Tensor  # [R] i64 from a row's place in [R, T] to its place among packed nodes

    @staticmethod
    @lru_cache(maxsize=512)
    def of(lens: tuple[int, ...]) -> "Windows":
        """Windows of these lengths; kept for the next round that has the same."""
        width, starts = max(lens), list(accumulate(lens, initial=0))
        pairs = [(row, node) for row, length in enumerate(lens) for node in range(length)]
        with torch.inference_mode(False):  # kept beyond the call
            return Windows(
                lens=lens,
                width=width,
                at=torch.tensor([row * width + node for row, node in pairs]),
                row_of=torch.tensor([row for row, _ in pairs]),
                starts=torch.tensor(starts),
                moved=torch.tensor([start - row * width for row, start in enumerate(starts[:-1])]),
            )

    @property
    def is_uniform(self) -> bool:
        """Whether all rows have one length, so that nothing has to be packed."""
        return min(self.lens) == self.width

    def longer(self, by: int) -> "Windows":
        """The same windows with more nodes."""
        return Windows.of(tuple(length + by for length in self.lens))

    def pack(self, values: Tensor) -> Tensor:
        """[R, T] or [R * T] -> [N]."""
        return values.reshape(-1).index_select(0, self.at)

    def spread(self, values: Tensor, empty: float) -> Tensor:
        """[N, ...] -> [R, T, ...], with `empty` where no window reaches."""
        rest = values.shape[1:]
        lines = values.new_full((len(self.lens) * self.width, *rest), empty)
        return lines.index_copy_(0, self.at, values).view(len(self.lens), self.width, *rest)

    def metadata(self, pages: RowPages, positions: Tensor, past_lens: Tensor, slots: Tensor) -> AttentionMetadata:
        """Metadata of a forward over the packed nodes: positions, slots [N]."""
        return AttentionMetadata(
            window=Window.ragged(self.lens),
            positions=positions,
            q_starts=self.starts,
            past_lens=past_lens,
            page_table=pages.table,
            page_size=pages.page_size,
            slots=slots,
            ancestors=None,
        )


class Plan(Protocol):
    """What the host chose for one round. A drafter reports its drafts to it, and asks it before every further step."""

    windows: Windows
    rows: Tensor | None  # [n] i64 rows that are drafted for; None: all
    rests: bool  # no row is, and all windows are the newest token alone

    def add(self, chances: Tensor) -> None:
        """One more draft for every row still drafted for; chances [n] are the drafter's own."""

    def go_on(self) -> Tensor | None:
        """The rows that get one draft more, as places [m] among those that got the last; None: all of them."""

    def depths(self) -> Tensor:
        """How many drafts each row got: [R]."""

    def hold(self, taps: Tensor | None) -> None:
        """Keep what the drafter has not absorbed, [R, taps * H]."""

    def force(self, forced: Tensor) -> None:
        """Note the drafts that grammars leave no choice about, [R, K]; -1: they do."""
