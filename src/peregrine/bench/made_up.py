"""A made-up machine: a real engine whose rounds have made-up verdicts and times, by a clock that only they move.

On a real machine two engines that decode plainly differ by some percent, as much as a planner's choices may lose. Here
nothing is noisy, and a turn takes no longer than the host's own work. Admission, requests, seats and the planner are
the engine's own; networks do not run.

Whether a draft is right depends on how hard its place in the text is: the harder the place, the fewer drafters find it,
and deeper drafts find less. What the drafter says of a draft is the chance given a blurred sight of that, so it is
calibrated. Siblings of a draft are never right, so chains that branch do not pay.
"""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any
from unittest.mock import patch

import torch

from peregrine.engine.output import Output
from peregrine.engine.planning import WindowPlanner
from peregrine.engine.request import Request
from peregrine.engine.rounds import ChunkInputs, Rounds
from peregrine.engine.runner import Runner
from peregrine.kernels.round import FINISH_LENGTH, FINISH_NONE, HEADER, Verdict
from peregrine.kernels.runtime.cpu_graph import RECORDED_USE, records_at_once
from peregrine.llm import LLM
from peregrine.sampling import SamplingParams
from peregrine.spec.planner import Costs
from peregrine.spec.replayed import FEW
from peregrine.spec.round import Mark, no_mark
from peregrine.spec.state import Rows
from peregrine.spec.windows import Plan

NORMAL = NormalDist()
BLUR = 2.0  # how far off the drafter's sight of a place is, over how far places differ
ALIKE = 0.3  # how far a place is like the one before it
TOKEN = 300  # all tokens
SPELL = 0.05  # seconds for which an unsteady machine has one speed
PROMPT, TURN = 20, 128  # tokens of a prompt, and of an answer


@dataclass(frozen=True, slots=True)
class Machine:
    """What rounds take, in milliseconds."""

    costs: Costs  # of rounds, as the planner's table will have them
    host_ms: float  # between two rounds
    recording_ms: tuple[float, float, float]  # once for each size: of verification, reading its path, making drafts
    prompt_ms: float  # a token of a prompt
    decision_ms: float  # of the planner, each time that it decides
    ragged_ms: float  # more, if windows differ in length: the round is not one replay then
    off: float = 0.0  # by what share real rounds with drafts take longer than the table says
    unsteady: float = 0.0  # every SPELL seconds its speed changes: all takes longer, at random up to this share
    busy: float = 0.0  # while the table was timed, each size seemed to take longer, at random up to this share


def machine(
    verify: dict[int, float], first: dict[int, float], step: dict[int, float], absorb: float, **others: Any
) -> Machine:
    """One whose drafter reads a token in `absorb` milliseconds and drafts up to eight tokens, a step each."""
    absorbed = ((1, absorb), (2, 2 * absorb))
    costs = Costs(tuple(verify.items()), absorbed, tuple(step.items()), steps=8, first=tuple(first.items()))
    return Machine(costs, **others)


# As measured with merlin on two cores of each.
MACHINES = {
    "cascade-lake": machine(
        verify={1: 3.6, 2: 3.7, 3: 3.8, 4: 4.05, 5: 4.3, 6: 4.4, 8: 5.0, 10: 5.5, 12: 5.9, 16: 7.0, 32: 10.2, 64: 18.0},
        first={1: 0.72, 2: 0.73, 4: 0.75, 8: 1.0, 16: 1.3},
        step={1: 0.4, 2: 0.43, 4: 0.5, 8: 0.75, 16: 1.2},
        absorb=0.01,
        host_ms=0.28,
        recording_ms=(23.0, 4.0, 8.0),
        prompt_ms=0.2,
        decision_ms=1.7,
        ragged_ms=4.5,
    ),
    "sapphire-rapids": machine(
        verify={1: 1.7, 2: 1.8, 3: 2.0, 4: 2.1, 5: 2.4, 6: 2.5, 8: 2.6, 10: 3.4, 12: 3.9, 16: 4.7, 32: 8.3, 64: 15.5},
        first={1: 0.34, 2: 0.36, 4: 0.4, 8: 0.6, 16: 0.95},
        step={1: 0.25, 2: 0.28, 4: 0.33, 8: 0.52, 16: 0.85},
        absorb=0.01,
        host_ms=0.12,
        recording_ms=(12.0, 3.0, 5.0),
        prompt_ms=0.07,
        decision_ms=1.2,
        ragged_ms=2.5,
    ),
}
# How often merlin's drafts are right, by depth, if those before them are.
TEXTS = {"story": (0.69, 0.66, 0.7), "chat": (0.71, 0.69, 0.71), "random": (0.53, 0.57, 0.6)}


@dataclass(eq=False)
class Lab:
    """Rounds on a made-up machine, with drafts that are right with these chances, by depth, if those before are."""

    machine: Machine
    chances: Sequence[float]
    seed: int = 0
    seconds: float = 1000.0  # by the clock
    work_ms: float = 0.0  # what all would have taken at full speed
    is_timing: bool = False  # an engine is being built: rounds cost what the table will say
    _requests: Sequence[Request] = ()  # of the round under way
    _texts: dict[Request, list[float]] = field(default_factory=dict)  # how hard each place is
    _made: dict[Request, int] = field(default_factory=dict)  # drafts in its window
    _seen: dict[tuple[Rounds, int, int, int], int] = field(default_factory=dict)  # rounds of a size that there were

    @contextmanager
    def opened(self) -> Iterator["Lab"]:
        """All engines run here meanwhile."""
        lab, launch, decide = self, Runner.launch, WindowPlanner._decide

        def launched(runner: Runner, requests: list[Request], *args: Any, **kwargs: Any) -> None:
            lab._begin(requests)
            launch(runner, requests, *args, **kwargs)
            lab._requests = ()

        def decided(planner: WindowPlanner, requests: list[Request]) -> None:
            lab.wait(lab.machine.decision_ms)
            decide(planner, requests)

        def ran(
            rounds: Rounds, rows: Rows, _: object, plan: Plan | None = None, *, mark: Mark = no_mark
        ) -> tuple[Verdict, None]:
            return lab.run(rounds, rows, plan, mark), None

        def read(_: Rounds, inputs: ChunkInputs, scored: bool, absorbs: bool, **kwargs: object) -> None:
            lab.wait(lab.machine.prompt_ms * len(inputs.tokens) * (1.15 if absorbs else 1.0))

        with ExitStack() as patches:
            for owner, name, replaced in (
                (Runner, "launch", launched),
                (WindowPlanner, "_decide", decided),
                (Rounds, "run", ran),
                (Rounds, "read", read),
                (time, "perf_counter", lambda: lab.seconds),
                (time, "process_time", lambda: lab.seconds),
                (time, "thread_time", lambda: lab.seconds),
            ):
                patches.enter_context(patch.object(owner, name, replaced))
            yield self

    def wait(self, ms: float) -> None:
        """The machine works so long, at its full speed."""
        self.work_ms += ms
        spell = int(self.seconds / SPELL)
        slower = 1 + self.machine.unsteady * random.Random(f"{self.seed} {spell}").random()
        self.seconds += 1e-3 * ms * (1.0 if self.is_timing else slower)

    def build(self, rows: int, **options: Any) -> LLM:
        """An engine for so many requests at a time."""
        self.is_timing = True
        llm = LLM("merlin", max_rows=rows, num_pages=rows * 48, **options)
        self.is_timing = False
        return llm

    def turn(self, llm: LLM, rows: int, seed: int) -> list[Output]:
        """So many requests together, whose texts follow from the seed."""
        self._texts.clear()
        self._made.clear()
        params = SamplingParams(temperature=0.0, seed=seed, max_tokens=TURN, ignore_eos=True, detokenize=False)
        return llm.generate([[TOKEN] * PROMPT] * rows, params, progress=False)

    def _begin(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self.wait(self.machine.host_ms)
        for request in requests:
            if request not in self._texts:
                dice = random.Random(f"{self.seed} {request.seed} {len(self._texts)}")
                own, place, places = dice.gauss(0, 0.1), dice.gauss(0, 1), list[float]()
                for _ in range(request.limit + len(self.chances)):
                    place = ALIKE * place + (1 - ALIKE**2) ** 0.5 * dice.gauss(0, 1)
                    places.append(own + place)
                self._texts[request], self._made[request] = places, 0

    def run(self, rounds: Rounds, rows: Rows, plan: Plan | None, mark: Mark) -> Verdict:
        """A round: its verdict, after the time that it takes."""
        count, most = rows.count, rounds.drafter.shape.depth
        width = rows.nodes or rounds.seats.shape.nodes
        lens = [width] * count if plan is None else list(plan.windows.lens)
        branched = None if plan is None else plan.branched
        offered = [length - 1 for length in lens] if branched is None else list(branched.deepest)
        tokens, costs = sum(lens), self.machine.costs
        if self.is_timing:
            slower = 1 + self.machine.busy * random.Random(f"{self.seed} {tokens}").random()
        else:
            slower = 1 + self.machine.off * min(1.0, tokens / count - 1)
        mark("verify")
        self.wait(slower * costs.verify_ms(tokens) + self._recording(rounds, 0, count, max(lens), tokens))
        if len(set(lens)) > 1:
            self.wait(slower * self.machine.ragged_ms)
        mark("propose")
        table = torch.zeros(count, HEADER + 2 * rounds.seats.shape.nodes, dtype=torch.int64)
        table[:, HEADER:] = TOKEN
        for row in range(count):
            table[row, :HEADER] = torch.tensor(self._verdict(row, offered[row]))
        made = [0] * count
        if plan is not None and plan.drafts is None:
            if plan.rows is None or len(plan.rows):
                made = self._draft_by_plan(plan, table, most, tokens, slower)
        elif drafts := width - 1 if plan is None else plan.drafts or 0:
            made = [drafts] * count
            steps = costs.absorb_ms(tokens) + costs.steps_ms([count] * drafts)
            self.wait(slower * steps + self._recording(rounds, 1, count, max(lens), tokens))
            self.wait(self._recording(rounds, 2, count, drafts, tokens))
        for request, drafts in zip(self._requests, made, strict=False):
            self._made[request] = drafts
        rounds.seats.view(rows).offered[:count] = torch.tensor(made)
        return Verdict(table)

    def _recording(self, rounds: Rounds, part: int, rows: int, size: int, tokens: int) -> float:
        """Milliseconds that this part takes more, since its size is recorded."""
        key = rounds, part, rows, size
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        is_recorded = seen == (1 if self.is_timing or tokens <= FEW or records_at_once() else RECORDED_USE)
        return self.machine.recording_ms[part] if is_recorded else 0.0

    def _verdict(self, row: int, offered: int) -> tuple[int, int, int, int]:
        """Tokens that the row gets, right drafts, drafts, and whether it ends."""
        if row >= len(self._requests):
            return 1, 0, offered, FINISH_NONE
        request = self._requests[row]
        places, at, left = self._texts[request], request.num_generated, request.limit - request.num_tokens
        right, most = 0, min(offered, self._made[request], left - 1)
        while right < most and places[at + right] < self._threshold(right):
            right += 1
        return right + 1, right, offered, FINISH_LENGTH if right + 1 >= left else FINISH_NONE

    def _threshold(self, depth: int) -> float:
        """How hard a place may be for a draft of this depth to be right."""
        return NORMAL.inv_cdf(self.chances[min(depth, len(self.chances) - 1)])

    def _draft_by_plan(self, plan: Plan, table: torch.Tensor, most: int, tokens: int, slower: float) -> list[int]:
        """Draft as long as the plan wants to, by what is said of the drafts; how many each row has then."""
        rows = list(range(len(table))) if plan.rows is None else plan.rows.tolist()
        costs = self.machine.costs
        for step in range(most):
            absorbed = 0.0 if step else costs.absorb_ms(tokens)
            self.wait(slower * (absorbed + costs.step_ms(len(rows), step)))
            said = torch.tensor([self._said(row, int(table[row, 0]), step) for row in rows])
            ranked = None
            if (ranks := plan.ranks) > 1:
                others = ((1 - said) / ranks)[:, None].expand(-1, ranks - 1)
                ranked = torch.full((len(rows), ranks), TOKEN), torch.cat((said[:, None], others), dim=1)
            plan.add(said, ranked)
            if not plan.go_on():
                break
        depths = plan.depths()
        return [depths] * len(table) if isinstance(depths, int) else depths.tolist()

    def _said(self, row: int, accepted: int, step: int) -> float:
        """The chance of a draft, given a blurred sight of how hard its place is."""
        if row >= len(self._requests):
            return 0.6
        request = self._requests[row]
        at = request.num_generated + accepted + step
        places = self._texts[request]
        sight = places[min(at, len(places) - 1)] + BLUR * random.Random(f"{request.seed} {row} {at}").gauss(0, 1)
        mean, spread = sight / (1 + BLUR**2), BLUR / (1 + BLUR**2) ** 0.5
        return NORMAL.cdf((self._threshold(step) - mean) / spread)
