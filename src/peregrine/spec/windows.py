"""Windows of different lengths in one round, packed without padding, and what a plan tells a round.

Row r has the first lens[r] nodes of its window: the newest token and lens[r] - 1 drafts. Buffers have lines of T nodes,
the longest; a forward reads the N nodes that are in some window, one row's after the other. Where rounds are recorded,
which nodes these are is data on the device (`WindowBuffer`): a graph serves all windows of R rows and N nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peregrine.attention.metadata import AttentionMetadata
from peregrine.attention.window import Window
from peregrine.kernels.round import GateRule, WindowTensors
from peregrine.spec.links import Branched
from peregrine.spec.row_pages import RowPages


@dataclass(frozen=True, slots=True)
class Windows:
    """Which nodes of each row's window a round reads."""

    window: Window  # R rows, N nodes, at most T in a row
    at: Tensor  # [N] i64 where a packed node lies in [R, T]
    row_of: Tensor  # [N] i64
    starts: Tensor  # [R + 1] i64 where a row begins among packed nodes
    moved: Tensor  # [R] i64 from a row's place in [R, T] to its place among packed nodes
    deepest: Tensor  # [R] i64 drafts in a row's window
    lens: tuple[int, ...] = ()  # as far as the host knows them
    wider: "Windows | None" = None  # the same windows with one node more, where the device alone knows the lengths

    @staticmethod
    @lru_cache(maxsize=512)
    def of(lens: tuple[int, ...]) -> "Windows":
        """Windows of these lengths; kept for the next round that has the same."""
        with torch.inference_mode(False):  # kept beyond the call
            return windows_in(torch.from_numpy(places_of(lens, max(lens))), Window.ragged(lens), lens)

    @property
    def is_uniform(self) -> bool:
        """Whether all rows have one length, so that nothing has to be packed."""
        return self.window.q_len is not None

    @property
    def width(self) -> int:
        return self.window.max_q_len

    @property
    def tensors(self) -> WindowTensors:
        """What the device may write, where it chooses windows itself."""
        return WindowTensors(self.at, self.row_of, self.starts, self.moved, self.deepest, self.width)

    def longer(self) -> "Windows":
        """The same windows with one node more."""
        return self.wider or Windows.of(tuple(length + 1 for length in self.lens))

    def pack(self, values: Tensor) -> Tensor:
        """[R, T] or [R * T] -> [N]."""
        return values.reshape(-1).index_select(0, self.at)

    def spread(self, values: Tensor, empty: float) -> Tensor:
        """[N, ...] -> [R, T, ...], with `empty` where no window reaches."""
        rows, rest = self.window.num_rows, values.shape[1:]
        lines = values.new_full((rows * self.width, *rest), empty)
        return lines.index_copy_(0, self.at, values).view(rows, self.width, *rest)

    def metadata(
        self, pages: RowPages, positions: Tensor, past_lens: Tensor, slots: Tensor, ancestors: Tensor | None = None
    ) -> AttentionMetadata:
        """Metadata of a forward over the packed nodes: positions, slots, ancestors [N]."""
        return AttentionMetadata(
            window=self.window,
            positions=positions,
            q_starts=self.starts,
            past_lens=past_lens,
            page_table=pages.table,
            page_size=pages.page_size,
            slots=slots,
            ancestors=ancestors,
        )


def places_of(lens: Sequence[int], width: int) -> NDArray[np.int64]:
    """The tensors of `Windows` one after the other, for lines of `width` nodes."""
    lengths = np.asarray(lens, dtype=np.int64)
    rows = np.arange(len(lengths))
    starts = np.concatenate(([0], lengths.cumsum()))
    row_of = np.repeat(rows, lengths)
    moved = starts[:-1] - rows * width
    at = np.arange(starts[-1]) - moved[row_of]
    return np.concatenate((at, row_of, starts, moved, lengths - 1))


def windows_in(buffer: Tensor, window: Window, lens: tuple[int, ...] = (), wider: Windows | None = None) -> Windows:
    """Windows whose tensors lie in a buffer as `places_of` has them."""
    rows, tokens = window.num_rows, window.num_tokens
    sizes = [tokens, tokens, rows + 1, rows, rows]
    at, row_of, starts, moved, deepest = torch.split(buffer[: sum(sizes)], sizes)
    return Windows(window, at, row_of, starts, moved, deepest, lens, wider)


class WindowBuffer:
    """Windows of R rows and N nodes on the device; their lengths are written before each round that has others."""

    def __init__(self, rows: int, tokens: int, width: int, device: torch.device) -> None:
        self.rows, self.tokens, self.width = rows, tokens, width
        size = 2 * (tokens + rows) + 3 * rows + 1
        self._buffer = torch.zeros(2, size + size % 2, dtype=torch.int64, device=device)  # lines begin at even places
        own, longer = self._buffer
        same = 1 if width == 1 else None  # windows of the newest token alone are uniform
        wider = windows_in(longer, Window(rows, tokens + rows, width + 1, same and 2))
        self.windows = windows_in(own, Window(rows, tokens, width, same), wider=wider)
        # Windows may be chosen on the device instead (`allot_windows`), which writes these.
        self.tensors = self.windows.tensors, wider.tensors
        self._lens: Sequence[int] = ()

    def write(self, lens: Sequence[int]) -> None:
        """Set the lengths, which add up to N; the rounds queued from now on have them. Nothing waits."""
        if lens != self._lens:
            both = np.zeros(self._buffer.shape, dtype=np.int64)
            for line, more in zip(both, (0, 1), strict=True):
                places = places_of([length + more for length in lens], self.width + more)
                line[: len(places)] = places
            values = torch.from_numpy(both)
            self._buffer.copy_(values.pin_memory() if self._buffer.is_cuda else values, non_blocking=True)
            self._lens = lens


def paths_of(windows: Windows, branched: Branched | None) -> Windows:
    """The windows themselves, or of windows that branch one path of each row, all as long as the longest."""
    return windows if branched is None else Windows.of((branched.depth + 1,) * len(branched.lens))


class Layout(Protocol):
    """Which nodes of the windows a round reads, and which rows are drafted for next."""

    windows: Windows
    branched: Branched | None  # the nodes themselves, if chains branch in this round
    rows: Tensor | None  # [n] i64; None: all
    rests: bool  # no row is drafted for, and all windows are the newest token alone

    @property
    def paths(self) -> Windows:
        """What the drafter reads: the windows, or of windows that branch one path of each row."""


class Offered:
    """A layout in which every row has the drafts that were offered, and all are drafted for."""

    rows: Tensor | None = None
    branched: Branched | None = None
    rests = False

    def __init__(self, lens: tuple[int, ...]) -> None:
        self.windows = self.paths = Windows.of(lens)


class Ruled(Protocol):
    """A plan of one row that need not be asked between the drafter's steps."""

    rule: GateRule

    def take(self, passed: NDArray[np.float64]) -> None:
        """Drafts were made: how many, and what the drafter says of each [1 + K]. It will be overwritten."""


class Plan(Layout, Protocol):
    """What the host chose for one round. A drafter reports its drafts to it, and asks it before every further step."""

    ranks: int  # how many of the likeliest tokens of each step it wants to know; 1: the draft's chance alone
    drafts: int | None  # all rows get so many, and nothing is asked of it; None: it is asked before every further step

    @property
    def ruled(self) -> Ruled | None:
        """Itself, if a row alone gets drafts by a rule that is known before the round."""

    def add(self, chances: Tensor, ranked: tuple[Tensor, Tensor] | None = None) -> None:
        """One more draft for every row that is drafted for; chances [n] are the drafter's own.

        With it the likeliest tokens [n, ranks], of which the draft is the first, and the chance of each.
        """

    def go_on(self) -> bool:
        """Whether these rows get one draft more."""

    def depths(self) -> Tensor | int:
        """How many drafts each row got: [R], or one for all rows."""

    def force(self, forced: Tensor) -> None:
        """Note the drafts that grammars leave no choice about, [R, K]; -1: they do."""
