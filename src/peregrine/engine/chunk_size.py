"""How many prompt tokens are read between two rounds: as many as running requests may be held up for.

Prompts are read in chunks between rounds, so a chunk's time is added to the gap between two tokens of every running
request (ITL), while small chunks make a prompt wait longer for its first token (TTFT) and read the weights more often.
One knob balances them: the time for which a chunk may hold up running requests. A chunk costs a fixed part and a part
per token, c(n) = f + r n, and r grows with the context. From the last chunk's tokens and time the next chunk is

    n' = n * allowed / c(n)

whose fixed point is c(n) = allowed, whatever f and r are. Sizes are rounded to a few, since windows of a new size cost
more the first time. While nothing runs, chunks are as large as they may be. How prompts are cut changes no token.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from peregrine.engine.prefill import STEP

LEAST_TOKENS = {"cpu": 32, "cuda": 256}  # below it a chunk hardly gets faster; a step never reads less
STEPS = {"cpu": 8, "cuda": STEP}  # sizes are multiples of it; on CUDA a forward of such a size is recorded
MOST_QUEUED = 2  # chunks on a device: what comes meanwhile is not stuck behind more


@dataclass(frozen=True, slots=True)
class TimedChunk:
    """A chunk of this many tokens, between two events on its device."""

    tokens: int
    began: torch.cuda.Event
    ended: torch.cuda.Event


class ChunkSize:
    """The size of prompt chunks, from what the last ones cost. The host waits only for chunks to be queued behind."""

    def __init__(self, most: int, max_stall_s: float | None, device: torch.device) -> None:
        self.most, self.max_stall_s, self._on_cuda = most, max_stall_s, device.type == "cuda"
        self.least, self._step = min(most, LEAST_TOKENS[device.type]), STEPS[device.type]
        self._next = most if max_stall_s is None else self.least  # until a chunk was timed
        self._queued: deque[TimedChunk] = deque()
        self._spare: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # events to be used again

    def tokens(self, running: bool) -> int:
        """The most tokens of the next chunk; `running`: there are requests that it would hold up."""
        while self._queued and self._queued[0].ended.query():  # type: ignore[no-untyped-call]
            self._take_oldest()
        return self._next if running else self.most

    def wait(self) -> None:
        """Wait until another chunk may be queued. Requests that come meanwhile are read with it, not after it."""
        while len(self._queued) >= MOST_QUEUED:
            self._take_oldest()

    def _take_oldest(self) -> None:
        chunk = self._queued.popleft()
        chunk.ended.synchronize()
        self.learn(chunk.tokens, chunk.began.elapsed_time(chunk.ended) / 1e3)
        self._spare.append((chunk.began, chunk.ended))

    def learn(self, tokens: int, seconds: float) -> None:
        """Take in what a chunk cost; a small one that was quick says nothing about larger ones."""
        if self.max_stall_s is None or (tokens < self._next and seconds <= self.max_stall_s):
            return
        allowed, step = int(tokens * self.max_stall_s / max(seconds, 1e-6)), self._step
        rounded = allowed // step * step if allowed <= tokens else -(-allowed // step) * step  # a step up at least
        self._next = max(self.least, min(self.most, rounded))

    @contextmanager
    def timed(self, tokens: int) -> Iterator[None]:
        """Time the chunk that is read, or queued, inside the block."""
        if self._on_cuda:
            chunk = TimedChunk(tokens, *(self._spare.pop() if self._spare else (new_event(), new_event())))
            chunk.began.record()
            yield
            chunk.ended.record()
            self._queued.append(chunk)
        else:
            began = time.perf_counter()
            yield
            self.learn(tokens, time.perf_counter() - began)


def new_event() -> torch.cuda.Event:
    """An event that takes the time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
