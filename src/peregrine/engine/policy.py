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
    prefill_chunk: int  # prompt tokens read in one step
    lag: int  # rounds queued before the oldest is read
    row_sizes: tuple[int, ...] | None  # batches are padded to one of these


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
