"""Queues rounds on the device and reads their verdicts later."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from peregrine.config import FIXED_DRAFTS
from peregrine.engine.ahead_planner import AheadPlan, AheadPlanner
from peregrine.engine.ahead_rounds import AheadRounds
from peregrine.engine.first_round import FirstRound
from peregrine.engine.graphs import Graphs
from peregrine.engine.host_copy import Rings, event_after
from peregrine.engine.masks import MaskWriter
from peregrine.engine.planning import AnyPlan, WindowPlanner
from peregrine.engine.request import Request
from peregrine.engine.round_plan import RoundPlan
from peregrine.engine.round_result import RoundResult, result_with_extras
from peregrine.engine.round_times import RoundTimes, Stopwatch
from peregrine.engine.rounds import Rounds
from peregrine.engine.steady import SteadyPlan
from peregrine.grammar import Window
from peregrine.kernels.round import Verdict
from peregrine.kernels.runtime.cpu_graph import count_recorded, record_at_once
from peregrine.kernels.sampling import Features
from peregrine.sampling import MAX_LOGPROBS
from peregrine.spec.round import Logprobs, Mark, Verified, no_mark, planned_state
from peregrine.spec.state import Rows
from peregrine.spec.windows import Plan

# The recorded variants of a round, cheapest first. In the last one rows pay for the parts that they use themselves.
VARIANTS = (
    Features(),
    Features(sampled=True),
    Features(sampled=True, filtered=True),
    Features(sampled=True, filtered=True, penalised=True, biased=True, min_len=True, logprobs=MAX_LOGPROBS),
)
# The round of a batch with a grammar, in two parts: the host computes masks while the first one runs.
MASKED = replace(VARIANTS[-1], masked=True)
VERIFY = "verify"
TIMED = 4  # of so many rounds whose verdicts are taken in together, one is timed


@dataclass(frozen=True, slots=True)
class RoundInFlight:
    """A queued round: its requests by seat, and its verdict on the way to the host."""

    requests: list[Request]
    verdict: Tensor  # [R, HEADER + 2 W] i64 on the host, valid after `ready`
    logprobs: tuple[Tensor, Tensor, Tensor] | None
    windows: Tensor | None  # [R, 3, T] i64 on the host: tokens, parents, offered or not; for report_drafts
    ready: torch.cuda.Event | None
    said: Tensor | None  # [R, K] on the host: what the drafter said of the drafts, for plans made ahead
    planned: tuple[AnyPlan, RoundTimes | None] | AheadPlan | None


class Runner:
    """Launches rounds on compact seats and keeps those that have not been read."""

    def __init__(self, rounds: Rounds, graphs: Graphs[Any] | None = None) -> None:
        self.rounds, self.graphs = rounds, graphs
        self.target, self.drafter, self.judge, self.seats = rounds.target, rounds.drafter, rounds.judge, rounds.seats
        self.planner: WindowPlanner | None = None  # plans each round from its drafts; None: it has whole windows, or
        self.ahead: tuple[AheadPlanner, AheadRounds] | None = None  # is planned before they are known
        self.first: FirstRound | None = None  # of a request that runs alone
        self.watch = Stopwatch()
        self._masks: MaskWriter | None = None  # made for the first batch with a grammar
        self.device, offered = rounds.device, rounds.seats.buffers.fields["offered"]
        self._offered = offered.numpy() if offered.device.type == "cpu" else None  # read before each planned round
        self.eager = False  # True: recorded graphs are not used; for benchmarks whose host must see a round's values
        # Besides run_round's stages: "launch", "copy" (results to the host), "launched", "wait", "read"; and where a
        # round has two parts, "windows sent", then "masks" and "settle" between them.
        self.mark: Mark = no_mark
        self.in_flight: deque[RoundInFlight] = deque()
        self.launched = 0  # rounds until now
        self._to_host = Rings().copy

    @property
    def any_planner(self) -> WindowPlanner | AheadPlanner | None:
        """What plans windows; None if they are fixed."""
        return self.planner or (self.ahead and self.ahead[0])

    def skips_prompts(self, rows: int) -> bool:
        """Whether so many requests will rest, so that the drafter need not absorb their prompts now."""
        return self.planner is not None and self.planner.rests_with(rows)

    def record(self, row_sizes: Sequence[int]) -> Iterator[int]:
        """Record the graphs of every batch size and variant; yields the bytes each one took.

        All seats must be pads: the recorded rounds really run once.
        """
        graphs = self.graphs
        assert graphs is not None
        for count in sorted(row_sizes, reverse=True):  # smaller graphs reuse the memory of larger ones
            rows = Rows(count, self.seats.max_places, self.masked_nodes)
            for variant in VARIANTS if self.ahead is None else ():
                yield graphs.record((rows, variant), partial(self._round, rows, variant))
            if self.seats.masks is not None:
                yield graphs.record((rows, VERIFY), partial(self._verify, rows))
                graphs.replay((rows, VERIFY))  # what follows reads its results
                yield graphs.record((rows, MASKED), partial(self._settle, rows, MASKED))
                self.rounds.begun = None
                if self.ahead is not None:
                    graphs.forget((rows, VERIFY))
        if self.ahead is not None:
            yield from self.ahead[1].record(row_sizes, graphs)

    @property
    def masked_nodes(self) -> int | None:
        """Nodes of the windows of a batch with a grammar, where rounds are planned ahead; None: whole windows."""
        if self.ahead is None:
            return None
        depths = self.ahead[1].drafter.depths
        return 1 + (FIXED_DRAFTS if FIXED_DRAFTS in depths else depths[-1])

    def rows(self, count: int, places: Callable[[], int]) -> Rows:
        """The first `count` seats, touching no place at or past `places()`; recorded rounds may touch every place."""
        if self.ahead is not None or (self.graphs is not None and not self.eager):
            return Rows(count, self.seats.max_places, self.masked_nodes)
        return self.seats.rows(count, places())

    def launch(
        self, requests: list[Request], rows: Rows, features: Features, catch_up: Callable[[], None] = lambda: None
    ) -> None:
        """Queue one round for the requests in seats 0 .. len(requests) - 1; rows past them are pads.

        Masks follow from every token before them. So if a request has a grammar, `catch_up` is called when the windows
        are being verified; after it no round is in flight and the matchers know all tokens.
        """
        self.mark("launch")
        self.seats.settle()
        began, recorded = time.perf_counter(), count_recorded()
        planned_at = began
        plan = repeated = windows = None
        if self.planner is not None:
            if self.planner.catches_up and (tokens := self.planner.missed_tokens_now(requests)):
                self.planner.missed.read(self.rounds, requests, self.seats.page_size, tokens)
            repeated = None if features.masked else self.planner.repeat(requests)
            plan = repeated or self._plan(self.planner, requests, rows)
            if repeated is None:
                self._update_drafter(plan)
                planned_at = time.perf_counter()
        ahead = self.ahead
        foreseen = None if ahead is None or features.masked else ahead[0].plan(requests, rows.count)
        said = None if foreseen is None else self.seats.view(rows).said
        said = None if said is None else self._to_host("said", said if said.is_cuda else said.clone())
        first = self.first if self.first and self.first.serves(requests, features) and not self.eager else None
        if features.masked or any(r.params.report_drafts for r in requests):
            if ahead is not None and foreseen is not None:
                ahead[1].clip(foreseen)
            windows = self._to_host("windows", self._windows(rows, plan, foreseen is not None))
        if features.masked and windows is not None:
            if ahead is not None:
                ahead[0].drafted = (self.masked_nodes or 1) - 1
            verdict, logprobs = self._masked_round(requests, windows, rows, features, catch_up, plan)
        elif first is not None:
            foreseen = None if foreseen is None else replace(foreseen, tokens=1, lens=[1])
            verdict, logprobs = first.replay(features, foreseen)
        elif ahead is not None and foreseen is not None:
            verdict, logprobs = ahead[1].run(foreseen, features, None if self.eager else self.graphs)
        elif isinstance(repeated, SteadyPlan):  # as a round with fixed windows
            verdict, logprobs = self._round(repeated.of_fixed(rows), features, lasts=repeated.lasts)
        elif self.graphs is None or self.eager:
            verdict, logprobs = self._round(rows, features, plan)
        else:
            verdict, logprobs = self._replay(rows, features)
        self.mark("copy")
        packed = self._to_host("verdicts", verdict.table)
        values = None
        if logprobs is not None and features.logprobs is not None:  # a recorded round may do more than was asked
            values = self._copied(logprobs)
        ready = event_after(verdict.table)
        planned: tuple[AnyPlan, RoundTimes | None] | AheadPlan | None = foreseen
        if plan is not None and (repeated is None or not repeated.rests):  # else there is nothing to learn
            stamps = plan.stamps if isinstance(plan, RoundPlan) else ()
            timed = self.launched % TIMED == 0 or (isinstance(plan, RoundPlan) and plan.is_unusual)
            usual = count_recorded() == recorded
            planned = plan, self.watch.times(began, planned_at, stamps, usual, timed)
        self.in_flight.append(RoundInFlight(list(requests), packed, values, windows, ready, said, planned))
        self.launched += 1
        self.mark("launched")

    def in_flight_for(self, request: Request) -> int:
        """Rounds in flight that the running request is part of: it takes part in all that are launched."""
        return min(len(self.in_flight), self.launched - request.round_before)

    def _plan(self, planner: WindowPlanner, requests: list[Request], rows: Rows) -> AnyPlan:
        """The windows of the next round."""
        assert self._offered is not None
        held = self._offered[: rows.count].tolist()
        plan = planner.plan(requests, held)
        if plan.offered != held:
            self.seats.offer(plan.offered)
        return plan

    def _update_drafter(self, plan: AnyPlan) -> None:
        """Let the drafter read what it missed of the requests that are drafted for; if all rest, it misses them now."""
        if plan.rests:
            for request in plan.requests:
                if request.missed is None:
                    request.missed = request.num_tokens - 1
        late = [plan.requests[row] for row in plan.drafted if plan.requests[row].missed is not None]
        if late and self.planner is not None:
            self.planner.missed.read(self.rounds, late, self.seats.page_size)

    def _mark(self, stage: str) -> None:
        if stage == "propose":
            self.watch.proposing = time.perf_counter()
        self.mark(stage)

    def _round(
        self, rows: Rows, features: Features, plan: Plan | None = None, lasts: bool = False
    ) -> tuple[Verdict, Logprobs | None]:
        with record_at_once(lasts):
            return self.rounds.run(rows, features, plan, mark=self._mark)

    def _masked_round(
        self,
        requests: list[Request],
        windows: Tensor,
        rows: Rows,
        features: Features,
        catch_up: Callable[[], None],
        plan: Plan | None,
    ) -> tuple[Verdict, Logprobs | None]:
        """A round in two parts: masks are computed while the first one runs."""
        copied = event_after(self.seats.view(rows).past_lens)
        recorded = None if self.eager else self.graphs
        self.mark("windows sent")
        if recorded is None:
            self._verify(rows, plan)
        else:
            recorded.replay((rows, VERIFY))
        self.mark("masks")
        catch_up()
        if copied is not None:
            copied.synchronize()
        if self._masks is None:
            self._masks = MaskWriter(self.seats, self.target.decoder.config.vocab_size)
        of_pads = [None] * (rows.count - len(requests))
        self._masks.write([*(r.matcher for r in requests), *of_pads], [Window(*window) for window in windows.tolist()])
        self.mark("settle")
        if recorded is None:
            return self._settle(rows, features)
        result: tuple[Verdict, Logprobs | None] = recorded.replay((rows, MASKED))
        return result

    def _verify(self, rows: Rows, plan: Plan | None = None) -> Verified:
        self.mark("verify")
        return self.rounds.verify(rows, plan)

    def _settle(self, rows: Rows, features: Features) -> tuple[Verdict, Logprobs | None]:
        return self.rounds.settle(rows, features, mark=self._mark)

    def _replay(self, rows: Rows, features: Features) -> tuple[Verdict, Logprobs | None]:
        """Replay the cheapest recorded variant that covers the features."""
        assert self.graphs is not None
        variant = next(v for v in VARIANTS if v.covers(features))
        result: tuple[Verdict, Logprobs | None] = self.graphs.replay((rows, variant))
        return result

    def read(self) -> RoundResult:
        """Wait for the oldest round in flight; returns what it did, and grammars take its tokens."""
        flight = self.in_flight.popleft()
        self.mark("wait")
        if flight.ready is not None:
            flight.ready.synchronize()
        self.mark("read")
        requests, verdict = flight.requests, flight.verdict.numpy()[: len(flight.requests)]  # pads come last
        if isinstance(flight.planned, AheadPlan) and self.ahead is not None:
            self.ahead[0].learn(flight.planned, verdict, None if flight.said is None else flight.said.numpy())
        elif isinstance(flight.planned, tuple) and self.planner is not None:
            began = time.perf_counter()
            self.planner.learn(flight.planned[0], verdict, flight.planned[1])
            self.watch.learnt = time.perf_counter() - began
        if flight.windows is None and flight.logprobs is None:
            return RoundResult(requests, verdict)
        return result_with_extras(requests, verdict, flight.windows, flight.logprobs)

    def _copied(self, logprobs: Logprobs) -> tuple[Tensor, Tensor, Tensor]:
        copy = self._to_host
        return copy("chosen", logprobs.chosen), copy("top ids", logprobs.top_ids), copy("top", logprobs.top)

    def _windows(self, rows: Rows, plan: Plan | None, whole: bool) -> Tensor:
        """Tokens, parents and offered flags of the windows to be verified, as copies: the round overwrites them.

        `whole`: with all their nodes, also if a batch with a grammar has fewer.
        """
        if whole:
            rows = Rows(rows.count, rows.places)
        branches = plan is not None and plan.branched is not None
        nodes = planned_state(self.seats, rows, plan if branches else None).nodes()
        offered = (nodes.depths > 0) & (nodes.depths <= nodes.offered[:, None])  # [R, T]
        return torch.stack([nodes.tokens, nodes.parents.expand_as(nodes.tokens), offered.long()], dim=1)
