"""What the drafter has missed of requests: how long it takes to read, and when that is worth it.

A drafter is not called where all rows rest, so that they cost what plain decoding costs: it absorbs neither their
tokens nor the prompts of requests that will rest. Before a row is drafted for, what was missed has to be read, as a
prompt is, by the target and by the drafter. If that takes long and somebody watches the tokens come, it is read in
parts, between rounds in which rows still rest. Of cached pages, too, it is known whether they were missed
(`PageLedger.missed`).
"""

import math
import time
from collections.abc import Sequence

from peregrine.engine.prefill import PromptChunk, chunk_inputs
from peregrine.engine.request import Request
from peregrine.engine.round_costs import RoundCosts
from peregrine.engine.rounds import Rounds

AT_ONCE = 512  # tokens of one forward, of all requests together


class Missed:
    """Reads what was missed, and knows how long that takes."""

    def __init__(self, measured: RoundCosts, max_stall_ms: float = math.inf) -> None:
        self.measured, self.max_stall_ms = measured, max_stall_ms

    def ms(self, requests: Sequence[Request]) -> float:
        """Milliseconds to read what was missed of these requests."""
        return self.measured.missed_ms(sum([request.num_missed for request in requests]))

    def net(self, requests: Sequence[Request], rates: Sequence[float]) -> list[float]:
        """What rates of drafting come to with the time to read what was missed, over the tokens that are left."""
        left, ms = max(1, sum([request.limit - request.num_tokens for request in requests])), self.ms(requests)
        return [left / (left / rate + ms) for rate in rates]

    def tokens_at_once(self, requests: Sequence[Request]) -> int | None:
        """How many tokens may be read between two rounds, so that nobody who watches is held up; None: all.

        The limit is the one for prompts.
        """
        ms = self.ms(requests)
        if ms <= self.max_stall_ms or not any(request.is_watched for request in requests):
            return None
        return max(1, int(self.max_stall_ms / ms * sum([request.num_missed for request in requests])))

    def read(self, rounds: Rounds, requests: Sequence[Request], page_size: int, most: float = math.inf) -> None:
        """Let the drafter read what was missed, about `most` tokens of all requests together."""
        began = time.perf_counter()
        tokens = read_missed(rounds, requests, page_size, most)
        self.measured.note_missed(tokens, 1e3 * (time.perf_counter() - began))


def read_missed(rounds: Rounds, requests: Sequence[Request], page_size: int, most: float = math.inf) -> int:
    """Let the drafter absorb what it missed, about `most` tokens of all requests together; returns how many.

    A head needs the target's states of these tokens, which nobody kept: the target reads them once more, and stores the
    same keys and values where they are.
    """
    read = 0
    while read < most and (late := [request for request in requests if request.num_missed > 0]):
        chunks, share = [], max(1, int(min(AT_ONCE, most - read)) // len(late))
        for request in late:
            start = request.missed or 0
            request.missed = min(request.num_tokens - 1, start + share)
            chunks.append(PromptChunk(request, start, request.missed))
        inputs = chunk_inputs(chunks, page_size)
        if rounds.drafter.taps:
            rounds.read(inputs, False, True)  # not by keyword: every rank reads them
        else:
            rounds.absorb(inputs)
        read += sum(chunk.num_tokens for chunk in chunks)
    for request in requests:
        if not request.num_missed:
            request.missed = None
    return read
