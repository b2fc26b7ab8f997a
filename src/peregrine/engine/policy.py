"""How requests are batched, and which of those that wait is admitted next."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from peregrine.engine.request import Request

OVERTAKEN = 64  # requests at the head of the queue among which a short one is looked for


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """How requests are batched."""

    max_rows: int
    prefill_chunk: int  # most prompt tokens read in one step
    max_stall_s: float | None  # for which reading prompts may hold up rows; None: every chunk may be the largest
    lag: int  # rounds queued before the oldest is read
    row_sizes: tuple[int, ...] | None  # batches are padded to one of these

    def padded(self, num_rows: int) -> int:
        """The rows of a round for this many requests."""
        return num_rows if self.row_sizes is None else min(size for size in self.row_sizes if size >= num_rows)


def next_admitted(
    waiting: deque[Request], reading: Sequence[Request], num_running: int, policy: BatchPolicy
) -> Request | None:
    """The request that goes into prefill next; None while there is no row for any.

    While there are rows it is the oldest. A long prompt holds its row while it is read, but needs it only after that:
    until then a short request, whose prompt is one chunk at most, may have the row. When the long prompt is read, it
    takes the next row that is free, and no short request is admitted before it.
    """
    if not waiting:
        return None
    rows, chunk = policy.max_rows - num_running, policy.prefill_chunk
    if len(reading) < rows:
        return waiting[0]
    if sum(request.num_unread <= chunk for request in reading) >= rows:
        return None
    return next((request for request in islice(waiting, OVERTAKEN) if request.num_tokens <= chunk), None)
