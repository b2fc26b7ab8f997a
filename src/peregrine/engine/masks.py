"""Masks of the windows to be judged: computed on the host, uploaded to where rounds read them.

Every row's matcher is walked through the legal nodes of its window and copied at each; then the library's threads
compute masks, without Python's lock: rows at the same time, the nodes of one row in turn, since they share a lexer.
Drafts that the grammar forces are walked by those threads: their masks take little time, the copies would take more.

On a GPU the target verifies meanwhile, and the time of masks matters only if it is longer than that. Most masks take
20 to 100 us, but one near the end of a string with `maxLength` has to try every token of the vocabulary, which takes
milliseconds. So masks are computed by depth, the roots' first, and where one depth takes long, the drafts of deeper
nodes are not offered: a token never depends on drafts. On a CPU nothing runs beside them, and all are computed at once.
"""

import time
from collections import deque
from collections.abc import Sequence
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

Stands = list[tuple[int, Matcher, Stand]]  # the legal nodes of rows


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
        self._is_cuda = self.by_depth = seats.device.type == "cuda"
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
        stands = [
            (row, matcher, at)
            for row, (matcher, window) in enumerate(zip(matchers, windows, strict=True))
            if matcher is not None
            for at in matcher.walk(window, self._words[row], most)
        ]
        deepest = self._compute(stands)
        for row, matcher, at in stands:
            if at.depth > deepest:
                self._rows[row] = deepest + 1
                continue
            matcher.finish(at, self._words[row])
            for behind in range(len(at.drafts) + 1 if at.forced else 0):
                forced = at.forced[behind : behind + most]
                self._forced[row, at.node + behind, : len(forced)] = forced
        self._ranks.note(
            "seats", "set_masks", *(x[:count] for x in (self._rows, self._words.view(np.int32), self._forced))
        )
        if self._is_cuda:
            self._upload(count)

    def _compute(self, stands: Stands) -> int:
        """Compute the masks at these nodes, as deep as time allows; returns how deep."""
        began = before = time.perf_counter()
        if began - self._written < LONGEST_ROUND_S:
            self._rounds.append(began - self._written)
        self._written, round_s = began, min(self._rounds, default=LONGEST_ROUND_S)
        deepest = max((at.depth for _, _, at in stands), default=0)
        if not self.by_depth:
            self._mask(stands)
            return deepest
        for depth in range(deepest):
            self._mask([stand for stand in stands if stand[2].depth == depth])
            now = time.perf_counter()
            took, before = now - before, now
            if took > WORTH_WAITING * round_s and now - began + took > HIDDEN * round_s:
                return depth
        self._mask([stand for stand in stands if stand[2].depth == deepest])
        return deepest

    def _mask(self, stands: Stands) -> None:
        """Compute the masks at these nodes, all at once."""
        seats, nodes, num_words = self._words.shape
        where = self._words.ctypes.data, num_words * WORD_BYTES, seats * nodes
        single = [(at.state, row * nodes + at.node) for row, _, at in stands if not at.drafts]
        chains = [(at.state, row * nodes, at.drafts) for row, _, at in stands if at.drafts]
        if single:
            self._executor.unsafe_compute_mask_ptr(single, *where)
        if chains:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(chains, *where)

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


def pinned(like: torch.Tensor) -> torch.Tensor:
    """A buffer of the same shape in pinned host memory."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
