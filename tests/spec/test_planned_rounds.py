"""Windows of any lengths and shapes, chosen anew for every row in every round, change no token.

The plans here are random: any part of the drafts is verified, chains branch anywhere, any rows are drafted for, as deep
as it falls out, and rows rest and come back. Plans that the engine makes itself are a case of that.
"""

import math
import random
from bisect import bisect
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peregrine.engine.alone import LonePlan, LoneRounds, lone_rule
from peregrine.engine.build import Built
from peregrine.engine.draft_number import TRIAL, Chosen, DraftNumber
from peregrine.engine.plan_record import PlanRecord
from peregrine.engine.planned_rates import PlannedRate
from peregrine.engine.planning import AnyPlan, WindowPlanner
from peregrine.engine.request import Request
from peregrine.engine.round_costs import RoundCosts
from peregrine.engine.round_plan import RoundPlan
from peregrine.engine.round_times import RoundTimes
from peregrine.engine.rounds import Rounds
from peregrine.engine.steady import SteadyPlan
from peregrine.kernels.round import HEADER, GateRule
from peregrine.kernels.runtime.cpu_graph import records_at_once
from peregrine.kernels.sampling import Features
from peregrine.sampling import SamplingParams
from peregrine.spec.branches import RANKS
from peregrine.spec.links import Branched
from peregrine.spec.odds import DEPTH_PRIOR, DEPTHS, EDGES, HOPE, MIDDLES, Ints, Odds, RequestOdds
from peregrine.spec.planner import Costs, trim_windows, worth_taking
from peregrine.spec.state import Rows
from peregrine.spec.windows import Windows
from spec.block_heads import block_head, calm_model
from spec.expert_models import expert_model, mla_mtp_model
from spec.harness import (
    Case,
    build,
    cases,
    check_pages,
    disturbed,
    eagle3_head,
    mtp_model,
    noisy_model,
    run,
    tiny_model,
    tokens,
)
from spec.test_grammar_identity import MIXED
from spec.test_identity import plain
from spec.verdicts import judge_counts

COSTS = {1: 1.0, 8: 2.0}
SOME = cases(10, max_tokens=48, seed=70)  # every sampling parameter


class RandomPlan(RoundPlan):
    """Goes on for as long as it likes, and none of its rows has drafts past its end."""

    dice: random.Random

    def go_on(self) -> bool:
        caps = [self.known.cap(row) for row in self.drafted]
        return self.known.made[self.drafted[0]] < min(caps) and self.dice.random() < 0.7


class RandomPlanner(WindowPlanner):
    """Plans anything."""

    shuns_ends = False

    def __init__(self, depth: int, dice: random.Random, looks_up: bool, room: int = 0) -> None:
        super().__init__(depth, RoundCosts(dict(COSTS), dict(COSTS), dict(COSTS), depth), looks_up, room)
        self.dice, self.room, self.other_dice = dice, room, random.Random(depth)
        self.rested = self.branches = self.taken = self.steadies = self.lone = 0  # rounds

    def plan(self, requests: Sequence[Request], offered: Sequence[int]) -> AnyPlan:
        self.alone.settle(self.odds)
        self.by_draft.leave()
        style = self.dice.choice(("rest", "rest", "any", "any", "all", "steady"))
        if style == "steady" and not self.looks_up and not any(r.matcher or r.params.tree == "tree" for r in requests):
            most = min([self.depth, *(r.params.num_drafts or 0 for r in requests if r.params.num_drafts is not None)])
            if most and not self._near_an_end(requests):
                if len(requests) == 1 and self.dice.random() < 0.6:
                    return self._any_gates(requests, offered[0], most)
                return self._some_steady(requests, offered, self.dice.randint(1, most))
        lens = tuple(1 + (self.dice.randint(0, count) if style != "rest" else 0) for count in offered)
        able = [row for row, request in enumerate(requests) if self.cap_of(request)]
        drafted = [row for row in able if style == "all" or (style == "any" and self.dice.random() < 0.5)]
        known = self.by_draft.rows_of(requests)
        known.choose(self.costs, offered, self.rate, whole=True)
        branched = self._branch(requests, lens) if style != "rest" and self.room else None
        plan = RandomPlan(self, known, lens, list(range(len(requests))) if self.looks_up else drafted, branched)
        plan.dice, plan.ranks = self.dice, RANKS if self.room else 1
        self._again = None
        self.rested += plan.rests
        return plan

    def rests_with(self, rows: int) -> bool:
        """Any prompt may be skipped."""
        self.catches_up = True
        return self.other_dice.random() < 0.5

    def missed_tokens_now(self, requests: Sequence[Request]) -> int:
        """What was missed may be read at any time, and any part of it."""
        return self.other_dice.choice((0, 0, 1, 5))

    def repeat(self, requests: Sequence[Request]) -> AnyPlan | None:
        if not isinstance(self._again, SteadyPlan) or self._near_an_end(requests) or self.dice.random() > 0.7:
            return None
        return super().repeat(requests)

    def _near_an_end(self, requests: Sequence[Request]) -> bool:
        """Drafts past an end are wrong, however good the drafter."""
        return self.shuns_ends and any(r.limit - r.num_tokens <= 2 * self.depth + 1 for r in requests)

    def _some_steady(self, requests: Sequence[Request], offered: Sequence[int], drafts: int) -> SteadyPlan:
        self._planned, self._due, self._drafts = list(requests), 1 << 30, drafts
        self.steadies += 1
        return self._plan_steady(requests, offered)

    def _any_gates(self, requests: Sequence[Request], offered: int, most: int) -> LonePlan:
        """A round of a request alone that makes and verifies as many drafts as it likes."""
        dice, ranges = self.dice, range(1 + len(EDGES))
        least = (*(dice.random() for _ in range(most - 1)), math.inf)
        spent = tuple(sorted(dice.random() * most for _ in range(1 + most)))
        chances = tuple(tuple(dice.random() for _ in ranges) for _ in range(DEPTHS))
        self.alone.rule = GateRule(EDGES, chances, least, spent)
        self._again = None
        self.lone += 1
        return self.alone.plan(requests, offered)

    def learn(self, plan: AnyPlan, table: Ints, times: RoundTimes | None) -> None:
        for length, line in zip(plan.chains if isinstance(plan, RoundPlan) else (), table.tolist(), strict=False):
            path = line[(HEADER + len(line)) // 2 :]
            self.taken += any(node >= length for node in path[1 : line[1] + 1])
        super().learn(plan, table, times)

    def _branch(self, requests: Sequence[Request], lens: Sequence[int]) -> Branched | None:
        """Let chains of these lengths branch anywhere, as far as there is room; None: nowhere."""
        chains, branches = [], []
        for request, length in zip(requests, lens, strict=True):
            ranked = request.ranked
            places = [(at, token) for at, (tokens, _) in enumerate(ranked[:length]) for token in tokens[1:]]
            room = self.room + 1 - length
            branches.append(self.dice.sample(places, self.dice.randint(0, min(room, len(places)))))
            chains.append([request.tokens[-1], *(tokens[0] for tokens, _ in ranked[: length - 1])])
        whole = all(len(chain) == length for chain, length in zip(chains, lens, strict=True))
        if not whole or not any(branches) or any(request.matcher is not None for request in requests):
            return None
        self.branches += 1
        return Branched.of(chains, branches)


def planned(seed: int, **options: object) -> Built:
    """An engine whose plans are random."""
    built = build(**options)  # type: ignore[arg-type]
    runner = built.engine.runner
    looks_up, shape = options["drafter"] in ("ngram", "suffix"), runner.drafter.shape
    room = 0 if looks_up else shape.span - 1
    runner.planner = RandomPlanner(shape.depth, random.Random(seed), looks_up, room)
    return built


DRAFTERS: dict[str, dict[str, object]] = {
    "noisy model": {"drafter": str(noisy_model()), "num_drafts": 4},
    "itself": {"drafter": str(tiny_model()), "num_drafts": 6},
    "eagle3": {"drafter": str(eagle3_head()), "num_drafts": 3},
    "mtp": {"drafter": "mtp", "model": mtp_model(), "num_drafts": 2},
    "ngram": {"drafter": "ngram", "num_drafts": 5},
    "suffix": {"drafter": "suffix", "num_drafts": 5},
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_any_plan_changes_no_token(name: str) -> None:
    engine = planned(1, **DRAFTERS[name]).engine
    assert tokens(run(engine, SOME, [0, 0, 0, 3, 5, 9, 9, 12, 30, 31])) == plain(SOME)
    planner = engine.runner.planner
    assert isinstance(planner, RandomPlanner)
    assert planner.looks_up or (planner.branches > 10 and planner.steadies > 5)
    assert planner.taken or name not in ("noisy model", "itself"), "a branch that is never right tests nothing"


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name not in ("ngram", "suffix")])
def test_any_plan_of_requests_one_after_the_other_changes_no_token(name: str) -> None:
    """Most of their rounds have one row, with any gates or planned otherwise."""
    engine, some = planned(2, **DRAFTERS[name]).engine, SOME[:4]
    assert tokens(run(engine, some, [0, 60, 120, 180])) == plain(some)
    planner = engine.runner.planner
    assert isinstance(planner, RandomPlanner)
    assert planner.lone > 2


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_any_plan_on_any_schedule(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(DRAFTERS)))
    some = data.draw(st.lists(st.sampled_from(SOME), min_size=1, max_size=4))
    arrivals = [data.draw(st.integers(0, 12)) for _ in some]
    sizes = {"page_size": 8, "num_pages": 90, "max_rows": data.draw(st.integers(1, 4))}
    engine = planned(data.draw(st.integers(0, 99)), **(DRAFTERS[name] | sizes)).engine
    outputs = run(engine, some, arrivals)
    assert tokens(outputs) == plain(some)


def test_preempted_rows_and_prefix_hits() -> None:
    some = [*SOME[:6], *SOME[:2]]
    engine = planned(5, page_size=8, num_pages=40, **DRAFTERS["eagle3"]).engine
    outputs = run(engine, some, [0] * 6 + [60, 61])
    assert sum(output.stats.preemptions for output in outputs) > 0
    assert tokens(outputs) == plain(some)


@pytest.mark.parametrize("name", ["noisy model", "ngram"])
def test_rows_with_grammars(name: str) -> None:
    some = [MIXED[0], MIXED[3], MIXED[4]]
    assert tokens(run(planned(2, **DRAFTERS[name]).engine, some)) == tokens(run(build().engine, some))


class Steady(RoundCosts):
    """Costs that no round changes."""

    def learn_planned(self, *_: object) -> float:
        """The machine's speed plays no part."""
        return 1.0

    def learn_steady(self, *_: object, **__: object) -> float:
        return 1.0


def test_chains_branch_where_that_pays_or_where_a_request_asks_for_it() -> None:
    """By the table of costs; requests that want chains have them beside others that branch."""
    greedy = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    some = [Case((5, 9, 200 + row), greedy) for row in range(2)]
    lengths, expected = {}, plain(some)
    engine = build(**(DRAFTERS["noisy model"] | {"windows": "auto"})).engine  # type: ignore[arg-type]

    def trees(per_token: float, *asked: str) -> int:
        table = {count: 4.0 + per_token * count for count in (1, 64)}
        planner = WindowPlanner(4, Steady(table, {1: 0.1}, {1: 0.1}, 4), False, engine.limits.nodes - 1)
        engine.runner.planner = planner
        outputs = run(engine, [Case(c.prompt, replace(greedy, tree=t)) for c, t in zip(some, asked, strict=True)])
        assert tokens(outputs) == expected
        lengths[per_token, *asked] = [output.stats.accept_length for output in outputs]
        return planner.record.rounds["tree"]

    assert trees(0.0, "auto", "auto") > 10
    assert trees(0.0, "chain", "chain") == 0
    assert sum(lengths[0.0, "auto", "auto"]) > sum(lengths[0.0, "chain", "chain"])
    assert trees(8.0, "auto", "auto") == 0, "a token costs twice what a round does without it"
    assert trees(8.0, "chain", "tree") > 10


@pytest.mark.parametrize("latents", [True, False])
def test_latents_and_experts(latents: bool) -> None:
    model = mla_mtp_model() if latents else expert_model()
    some, drafter = SOME[:5], "mtp" if latents else str(disturbed(model, 0.05))
    engine = planned(6, model=model, drafter=drafter, num_drafts=3).engine
    assert tokens(run(engine, some)) == tokens(run(build(model).engine, some))


@pytest.mark.parametrize(("layout", "markov"), [("z-lab", None), ("deepspec", "vanilla")])
def test_block_heads(layout: str, markov: str | None) -> None:
    some = SOME[:4]
    folder = block_head(layout, markov, confidence=markov is not None)
    expected = tokens(run(build(calm_model()).engine, some))
    engine = planned(3, model=calm_model(), drafter=str(folder), num_drafts=4).engine
    assert tokens(run(engine, some)) == expected


def test_logprobs_under_any_plan() -> None:
    asked = [SamplingParams(temperature=1.0, seed=i, max_tokens=30, logprobs=3) for i in range(3)]
    some = [Case(case.prompt, params) for case, params in zip(SOME, asked, strict=False)]
    wanted = [output.logprobs for output in run(build().engine, some)]
    assert [output.logprobs for output in run(planned(4, **DRAFTERS["noisy model"]).engine, some)] == wanted


def test_a_row_that_rested_drafts_as_if_it_had_not() -> None:
    """What a drafter missed meanwhile is absorbed before it drafts again: a perfect drafter stays perfect.

    Rows rest together or while others draft, and their taps are in order when they come back.
    """
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    for options in (DRAFTERS["itself"], DRAFTERS["eagle3"]):
        engine = planned(7, **options).engine
        planner = engine.runner.planner
        assert isinstance(planner, RandomPlanner)
        planner.room, planner.shuns_ends = 0, True  # a branch off a perfect chain is wrong
        outputs = run(engine, [Case((5, 9, 200 + row), params) for row in range(3)])
        assert planner.rested > 5
        if options is DRAFTERS["itself"]:
            assert all(output.stats.correct == output.stats.drafted > 20 for output in outputs)
    check_pages(engine)


def test_a_probe_drafts_for_rows_of_which_little_was_missed() -> None:
    """It has to be read first; of rows of which as much was missed, all have their turn."""
    requests = [Request(i, list(range(20)), SamplingParams(), 0, 99) for i in range(8)]
    for request in requests[:5]:
        request.missed = 10
    planner = WindowPlanner(3, RoundCosts({1: 1.0, 8: 50.0}, {1: 5.0}, {1: 5.0}, 3), looks_up=False)
    requests[0].matcher = object()  # type: ignore[assignment]  # without a grammar, all rows would be tried at once
    probed = set()
    for _ in range(8):
        planner.probes.due = 0
        plan = planner.plan(requests, [0] * 8)
        assert len(plan.drafted) == 2
        probed |= set(plan.drafted)
    assert probed == {5, 6, 7}


def test_rows_that_rest_are_planned_for_ever_less_often() -> None:
    """Also when requests come and go: a plan takes as long as a twentieth of a small model's round."""
    planner = WindowPlanner(3, Steady({1: 1.0, 8: 50.0}, {1: 5.0}, {1: 5.0}, 3), looks_up=False)
    planned = []
    for drafts in (0, 1, None):  # drafts were compared with none, and can never pay
        planner.measured.periods.begin(None if drafts is None else (4, drafts), goes_on=True)
        for _ in range(16):
            planner.measured.periods.note(60.0 if drafts else 20.0)
    for batch in range(3):
        requests = [Request(4 * batch + i, list(range(6)), SamplingParams(), 0, 99) for i in range(4)]
        fresh = 0
        for _ in range(64):
            if planner.repeat(requests) is None:
                assert planner.plan(requests, [0] * 4).rests
                fresh += 1
        planned.append(fresh)
    assert planned[0] <= 4
    assert planned[2] <= 2


@pytest.mark.parametrize(("per_step", "expected"), [(0.05, 3), (0.6, 2), (3.0, 1)])
def test_one_number_of_drafts_for_all_rows_is_the_best_of_all(per_step: float, expected: int) -> None:
    """By chances of 0.8 and costs of a step; every number is tried here."""
    measured = RoundCosts({1: 1.5, 64: 7.8}, {1: 0.0}, {1: per_step, 8: per_step}, 3)
    requests = [Request(i, list(range(6)), SamplingParams(), 0, 99) for i in range(2)]
    odds = Odds()
    judge_counts(odds, {(3, 2): 80, (1, 0): 20, (3, 3): 100}, RequestOdds())
    chances = [odds.chances_by_depth(1 + depth)[-1] for depth in range(3)]
    chances[0] += HOPE / (200 + DEPTH_PRIOR) ** 0.5  # of so many first drafts
    rates = {}
    for drafts in (1, 2, 3):
        won = 2 * (1 + sum(math.prod(chances[: depth + 1]) for depth in range(drafts)))
        rates[drafts] = won / (1.4 + 0.1 * 2 * (1 + drafts) + drafts * per_step)
    best = max(rates, key=lambda drafts: rates[drafts])
    assert best == expected
    requests[0].missed = 5  # so that no other number is tried
    chosen = DraftNumber(measured).choose(requests, lambda _: odds, 3, 0, goes_on=False)
    plain = 2 / (1.4 + 0.1 * 2)
    assert chosen.rate == pytest.approx(rates[best])
    assert chosen.drafts == (best if rates[best] > plain else 0)
    assert not chosen.trial


@pytest.mark.parametrize("costly", [True, False])
def test_rounds_are_planned_draft_by_draft_while_that_pays(costly: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What such rounds take is measured; where it is too much, one number of drafts is chosen, and repeated."""
    plans: list[object] = []
    usual = WindowPlanner.repeat
    monkeypatch.setattr(WindowPlanner, "repeat", lambda *given: plans.append(usual(*given)) or plans[-1])
    engine = build(**(DRAFTERS["noisy model"] | {"windows": "auto", "max_rows": 2})).engine  # type: ignore[arg-type]
    table = Steady({1: 4.0, 64: 5.0}, {1: 0.0}, {1: 0.1}, 4)
    planner = engine.runner.planner = WindowPlanner(4, table, looks_up=False)
    planner.rates._rates[1, False, False].note(400, 400 * 40.0 if costly else 400 / 4.0)
    greedy = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    some = [Case((5, 9, 200), greedy)]
    assert tokens(run(engine, some)) == plain(some)
    repeated = [plan.drafts for plan in plans if isinstance(plan, SteadyPlan)]
    assert (len(repeated) > 10) == costly
    assert all(repeated)
    assert planner.record.rounds["drafts"] > 10
    assert planner.record.tokens == 60


@pytest.mark.parametrize(("more", "steady"), [(1.1, True), (1.3, False)])
def test_one_number_of_drafts_is_tried_where_rounds_by_draft_give_little_more_than_foreseen(
    more: float, steady: bool
) -> None:
    """Costs may be off by a fifth; what was measured of both ways decides then."""

    def planner_of_two() -> tuple[WindowPlanner, list[Request]]:
        planner = WindowPlanner(3, Steady({1: 4.0, 64: 5.0}, {1: 0.0}, {1: 0.1}, 3), looks_up=False)
        return planner, [Request(i, list(range(6)), SamplingParams(temperature=0.0), 0, 99) for i in range(2)]

    planner, requests = planner_of_two()
    foreseen = planner.number.choose(requests, planner.odds, 3, 0, goes_on=False).rate
    for measured in (None, 0.9 * more * foreseen):
        planner, requests = planner_of_two()
        planner.rates.of(requests).note(400, 400 / (more * foreseen))
        if measured is not None:
            planner.rates.of(requests, steady=True).note(400, 400 / measured)
        plan = planner.plan(requests, [0, 0])
        assert plan.drafted == [0, 1]
        assert isinstance(plan, SteadyPlan) == (steady and measured is None)


@pytest.mark.parametrize("by_draft", [False, True])
def test_a_trial_is_made_whatever_else_pays_and_shortens_no_decision(
    by_draft: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rounds are compared, so they have one number of drafts. Decisions before and after it hold ever longer."""
    planner = WindowPlanner(3, Steady({1: 4.0, 64: 5.0}, {1: 0.0}, {1: 0.1}, 3), looks_up=False)
    requests = [Request(i, list(range(6)), SamplingParams(temperature=0.0), 0, 999) for i in range(2)]
    decided = list[int]()

    def choose(_: DraftNumber, requests: Sequence[Request], *args: object, **kwargs: object) -> Chosen:
        tries = len(decided) == 2
        decided.append(planner._rounds)
        return Chosen(1 if tries else 3, 4.0, 1.0, TRIAL if tries else 0, 3)

    monkeypatch.setattr(DraftNumber, "choose", choose)
    planner.rates.of(requests, steady=True).note(400, 400.0)
    planner.rates.of(requests).note(400, 200.0 if by_draft else 800.0)
    steady = list[bool]()
    while planner._rounds < 150:
        plan = planner.repeat(requests) or planner.plan(requests, [3, 3])
        steady.append(isinstance(plan, SteadyPlan))
    held = [after - before for before, after in pairwise(decided)]
    assert held[2] == TRIAL - 1
    first, last = sum(held[:2]), sum(held[:3])
    assert all(steady[first:last])
    assert all(one != by_draft for one in steady[:first] + steady[last:])
    assert held[3] > 1.9 * held[1] > 3.6 * held[0]


def test_one_number_of_drafts_is_recorded_at_once_where_it_will_be_repeated() -> None:
    """Not where some requests have just ended: others may end soon."""
    planner = WindowPlanner(3, Steady({1: 4.0, 64: 5.0}, {1: 0.0}, {1: 0.1}, 3), looks_up=False)
    requests = [Request(i, list(range(6)), SamplingParams(), 0, 99) for i in range(4)]
    for running, lasts in ((requests, True), (requests[:3], False)):
        assert isinstance(planner.plan(running, [0] * len(running)), SteadyPlan)
        again = planner.repeat(running)
        assert isinstance(again, SteadyPlan)
        assert again.lasts == lasts


def test_a_round_that_lasts_is_recorded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[tuple[bool, bool]]()  # whether a plan is repeated, and recorded at once
    usual = Rounds.run

    def run_round(rounds: Rounds, rows: Rows, features: Features, plan: object = None, **kwargs: object) -> object:
        seen.append((plan is None, records_at_once()))
        return usual(rounds, rows, features, plan, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Rounds, "run", run_round)
    engine = build(**(DRAFTERS["noisy model"] | {"windows": "auto", "max_rows": 2})).engine  # type: ignore[arg-type]
    engine.runner.planner = WindowPlanner(4, Steady({1: 4.0, 64: 5.0}, {1: 0.0}, {1: 0.1}, 4), looks_up=False)
    engine.runner.planner.rates._rates[1, False, False].note(400, 400 * 40.0)
    seen.clear()
    run(engine, [Case((5, 9, 200), SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))])
    assert (True, True) in seen
    assert (False, True) not in seen


def test_packing() -> None:
    windows = Windows.of((2, 1, 3))
    lines = torch.arange(9).view(3, 3)
    assert windows.pack(lines).tolist() == [0, 1, 3, 6, 7, 8]
    assert windows.spread(windows.pack(lines), -1).tolist() == [[0, 1, -1], [3, -1, -1], [6, 7, 8]]
    assert windows.starts.tolist() == [0, 2, 3, 6]
    assert not windows.is_uniform
    assert Windows.of((3, 3)).is_uniform
    assert windows.longer().lens == (3, 2, 4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.03125, 0.96875, width=32), min_size=1, max_size=6), st.floats(0.05, 2.0), st.data())
def test_one_row_follows_the_rule_of_all(said: list[float], rate: float, data: st.DataObject) -> None:
    """Gates stop and verify where the general rule does: by the same costs, odds and rate."""
    parts = [sorted(data.draw(st.lists(st.floats(0.01, 4.0), min_size=n, max_size=n))) for n in (3, 2, 1)]
    verify, absorb, step = (tuple(zip((1, 4, 9), part, strict=False)) for part in parts)
    costs, depth, own = Costs(verify, absorb, step, 6), 6, RequestOdds(3.0, 2.0)
    odds = Odds()
    odds.judge_chains(np.array([3]), np.array([2]), np.array([[3, 0.9, 0.4, 0.7]]), np.zeros((1, 1)), own)
    rule = lone_rule(costs, odds, own, rate, depth)
    plan, survival = LonePlan(rule, 1), 1.0
    for made, value in enumerate(said, 1):
        plan.add(torch.tensor([value]))
        middle = MIDDLES[bisect(EDGES, value)]
        survival *= odds.guess(made - 1, middle, own).chance
        assert plan.survivals[-1] == pytest.approx(survival)
        wanted = [survival * odds.expect(made, own)] if made < depth else []
        count, gain = worth_taking(costs, wanted, 1 + made, rate, made)
        assert plan.go_on() == (count > 0) or abs(gain) < 1e-9
    won = [sum(plan.survivals[:count]) - rule.spent[count] for count in range(1 + len(said))]
    (general,) = trim_windows(costs, [plan.survivals], rate)
    assert won[plan.depths()] == pytest.approx(won[general]) == pytest.approx(max(won))


def test_a_request_alone_is_planned_by_gates_and_beside_others_otherwise() -> None:
    """And what was said of its last drafts goes over from one kind of plan to the other."""
    planner = WindowPlanner(3, Steady({1: 4.0, 64: 5.0}, {1: 0.0}, {1: 0.1}, 3), looks_up=False)
    first, second = (Request(i, list(range(6)), SamplingParams(temperature=0.0), 0, 99) for i in range(2))
    plan = planner.plan([first], [0])
    assert isinstance(plan, LonePlan)
    for chance in (0.95, 0.9):
        plan.add(torch.tensor([chance]))
    planner.learn(plan, np.array([[1, 0, 0, 0]]), RoundTimes(4.0, 0.2, []))
    again = planner.plan([first], [2])
    assert again.windows.lens == (3,)
    assert isinstance(again, LonePlan)
    assert again.read == pytest.approx([2, 0.95, 0.9])
    again.add(torch.tensor([0.6]))
    beside = planner.plan([first, second], [1, 0])
    assert not isinstance(beside, LonePlan)
    said = [guess.said for guess in first.guesses]
    assert said == (pytest.approx([0.6]) if isinstance(beside, RoundPlan) else [])  # others ask for no chances


def test_verdicts_of_a_request_alone_are_counted_when_rounds_are_decided() -> None:
    """One right draft, one wrong, and one without a verdict."""
    measured = RoundCosts({1: 4.0, 64: 5.0}, {1: 0.0}, {1: 0.1}, 3)
    alone, odds, rate = LoneRounds(measured), Odds(), PlannedRate()
    alone.rule = lone_rule(measured.costs(), odds, RequestOdds(), 0.3, 3)
    request = Request(0, list(range(6)), SamplingParams(temperature=0.0), 0, 99)
    plan = alone.plan([request], 0)
    for chance in (0.95, 0.85, 0.75):
        plan.add(torch.tensor([chance]))
    verified = alone.plan([request], 3)
    assert verified.read == pytest.approx([3, 0.95, 0.85, 0.75])
    alone.note(verified, np.array([[2, 1, 0, 0]]), RoundTimes(4.0, 0.2, []))
    assert not odds.tenths[9][0]
    record = PlanRecord()
    alone.learn(lambda _: odds, lambda _: rate, record)
    assert record.ms == pytest.approx(4.2)
    more = odds.counts - Odds().counts
    assert {place: tuple(more[place]) for place in zip(*more[..., 1].nonzero(), strict=True)} == {
        (0, 9): (pytest.approx(1.0), 1.0),
        (1, 8): (pytest.approx(0.0), 1.0),
    }
    assert rate.value(0.1) != rate.value(0.2)
    assert (request.odds.right, odds.num_judged) == (1.0, 2.0)
