"""Masks of the windows to be judged: computed on the host, uploaded to where rounds read them.

The matchers of all rows go through the legal nodes of their windows together, depth by depth. At each one the library's
threads compute masks, without Python's lock: rows at the same time, each by the matcher that stands there, since a copy
of a matcher takes as long as most masks. Where a token is forced there is nothing to compute.

On a GPU the target verifies meanwhile, and the time of masks matters only if it is longer than that. Most masks take
20 to 100 us, but one near the end of a string with `maxLength` has to try every token of the vocabulary, which takes
milliseconds. So where one depth takes long, the drafts of deeper nodes are not offered: a token never depends on
drafts. On a CPU nothing runs beside them, and all depths are computed.
"""

import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from peregrine.grammar import Matcher, Window
from peregrine.grammar.matcher import Stand
from peregrine.kernels.sampling import Masks
from peregrine.spec.state import SeatState
from peregrine.threads import usable_cores

WORD_BYTES = 4
ROUNDS = 16  # the fastest of so many says what a round takes
LONGEST_ROUND_S = 0.1
# Of a round's time: what verifying hides of the masks' time, and for how long the device may wait for one more depth.
HIDDEN, WORTH_WAITING = 1 / 2, 1 / 8


@dataclass(frozen=True, slots=True)
class Walk:
    """The way of one row's matcher through its window."""

    row: int
    matcher: Matcher
    nodes: Generator[Stand]
    at: Stand  # where it stands


class MaskWriter:
    """Writes masks and forced tokens for the first rows of the seats.

    One host buffer is enough: a round's verdict is read before the next round's masks are written, and by then the
    copy of the masks before it is done.
    """

    def __init__(self, seats: SeatState, vocab_size: int) -> None:
        from llguidance import LLExecutor

        if seats.masks is None:
            seats.hold_masks(vocab_size)
        assert seats.masks is not None
        assert seats.forced is not None
        self._ranks, self._device = seats.ranks, (seats.masks, seats.forced)
        self._is_cuda = self.bounded = seats.device.type == "cuda"
        self._host = self._device
        if self._is_cuda:
            rows, words, forced = (pinned(x) for x in (seats.masks.rows, seats.masks.words, seats.forced))
            self._host = Masks(rows, words), forced
            self._stream = torch.cuda.Stream(seats.device)  # type: ignore[no-untyped-call]
        masks, forced = self._host  # as arrays: writing a few entries of a tensor takes several times as long
        self._rows, self._words, self._forced = masks.rows.numpy(), masks.words.numpy().view(np.uint32), forced.numpy()
        self._executor: Any = LLExecutor(usable_cores())  # this thread waits meanwhile
        self._written, self._rounds = 0.0, deque[float](maxlen=ROUNDS)  # when the last one was; seconds of each

    def write(self, matchers: Sequence[Matcher | None], windows: Sequence[Window]) -> None:
        """Masks and forced tokens of the rows that have a matcher; the round queued next reads them."""
        count, (_, nodes, drafts) = len(windows), self._forced.shape
        self._rows[:count] = [0 if matcher is None else nodes for matcher in matchers]
        self._forced[:count] = -1
        most = drafts if drafts > 1 else 0
        self._go(
            stepped(
                (row, matcher, matcher.walk(window, self._words[row], most))
                for row, (matcher, window) in enumerate(zip(matchers, windows, strict=True))
                if matcher is not None
            )
        )
        self._ranks.note(
            "seats", "set_masks", *(x[:count] for x in (self._rows, self._words.view(np.int32), self._forced))
        )
        if self._is_cuda:
            self._upload(count)

    def _go(self, walks: list[Walk]) -> None:
        """Compute the masks along these walks, as deep as time allows."""
        began = before = time.perf_counter()
        if began - self._written < LONGEST_ROUND_S:
            self._rounds.append(began - self._written)
        self._written, round_s, depth = began, min(self._rounds, default=LONGEST_ROUND_S), 0
        while walks:
            here = [walk for walk in walks if walk.at.depth == depth]
            if here:
                self._mask(here)
                for walk in here:
                    self._forced[walk.row, walk.at.node, : len(walk.at.forced)] = walk.at.forced
                further = stepped((walk.row, walk.matcher, walk.nodes) for walk in here)
                walks = [walk for walk in walks if walk.at.depth > depth] + further
                continue
            now = time.perf_counter()
            took, before = now - before, now
            if self.bounded and took > WORTH_WAITING * round_s and now - began + took > HIDDEN * round_s:
                for walk in walks:
                    self._rows[walk.row] = depth + 1
                    walk.nodes.close()
                return
            depth += 1

    def _mask(self, walks: list[Walk]) -> None:
        """Compute the masks where these walks stand, all at once."""
        seats, nodes, num_words = self._words.shape
        size, first = num_words * WORD_BYTES, self._words.ctypes.data
        asked = [(walk.matcher.state, walk.row * nodes + walk.at.node) for walk in walks]
        if len(asked) == 1:  # no other thread need be woken
            state, place = asked[0]
            state.unsafe_compute_mask_ptr(first + place * size, size)
        else:
            self._executor.unsafe_compute_mask_ptr(asked, first, size, seats * nodes)
        for walk in walks:
            walk.matcher.finish(walk.at.node, self._words[walk.row])

    def _upload(self, count: int) -> None:
        (masks, forced), (on_device, forced_on_device) = self._host, self._device
        with torch.cuda.stream(self._stream):
            for source, target in (
                (masks.rows, on_device.rows),
                (masks.words, on_device.words),
                (forced, forced_on_device),
            ):
                target[:count].copy_(source[:count], non_blocking=True)
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def stepped(rows: Iterable[tuple[int, Matcher, Generator[Stand]]]) -> list[Walk]:
    """The walks that go on, each one node further."""
    return [Walk(row, matcher, nodes, at) for row, matcher, nodes in rows if (at := next(nodes, None)) is not None]


def pinned(like: torch.Tensor) -> torch.Tensor:
    """A buffer of the same shape in pinned host memory."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
