"""Queue rounds and read their verdicts later: the only code of the engine that waits for the device."""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from peregrine.engine.request import Request
from peregrine.kernels.choose import Features
from peregrine.kernels.verdict import HEADER
from peregrine.spec.bound import BoundModel
from peregrine.spec.judge import Judge
from peregrine.spec.round import run_round
from peregrine.spec.state import Rows, SeatState
from peregrine.spec.types import Drafter


@dataclass(frozen=True, slots=True)
class RowResult:
    """What one round did for one request, on the host."""

    request: Request
    tokens: list[int]
    correct: int
    drafted: int
    finish: int
    logprobs: list[tuple[float, list[int], list[float]]] | None


@dataclass(frozen=True, slots=True)
class RoundInFlight:
    """A queued round: who sat where, and its verdict on the way to the host."""

    requests: list[Request]
    verdict: Tensor  # [R, HEADER + 2 W] i64 on the host, valid once `ready` has passed
    logprobs: tuple[Tensor, Tensor, Tensor] | None
    ready: torch.cuda.Event | None


class Runner:
    """Launches `run_round` on compact seats and keeps the rounds that have not been read."""

    def __init__(self, target: BoundModel, drafter: Drafter, judge: Judge, seats: SeatState) -> None:
        self.target, self.drafter, self.judge, self.seats = target, drafter, judge, seats
        self.in_flight: deque[RoundInFlight] = deque()

    def launch(self, requests: list[Request], rows: Rows, features: Features) -> None:
        """Queue one round for the requests in seats 0 .. len(requests) - 1; rows past them are pads."""
        verdict, logprobs = run_round(self.target, self.drafter, self.judge, self.seats, rows, features)
        packed = verdict.table
        values = None if logprobs is None else (logprobs.chosen, logprobs.top_ids, logprobs.top)
        ready = None
        if packed.is_cuda:
            packed = packed.to("cpu", non_blocking=True)
            values = None if values is None else tuple(v.to("cpu", non_blocking=True) for v in values)  # type: ignore[assignment]
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        for request in requests:
            request.rounds_in_flight += 1
        self.in_flight.append(RoundInFlight(list(requests), packed, values, ready))

    def read(self) -> list[RowResult]:
        """Wait for the oldest round in flight and say what it did."""
        flight = self.in_flight.popleft()
        if flight.ready is not None:
            flight.ready.synchronize()
        lines = flight.verdict.tolist()
        results = []
        for row, request in enumerate(flight.requests):
            request.rounds_in_flight -= 1
            accept, correct, drafted, finish = lines[row][:HEADER]
            tokens = lines[row][HEADER : HEADER + accept]
            results.append(
                RowResult(request, tokens, correct, drafted, finish, self._logprobs(flight, row, accept))
            )
        return results

    def _logprobs(
        self, flight: RoundInFlight, row: int, accept: int
    ) -> list[tuple[float, list[int], list[float]]] | None:
        if flight.logprobs is None:
            return None
        chosen, ids, top = (values[row, :accept].tolist() for values in flight.logprobs)
        return list(zip(chosen, ids, top, strict=True))
