"""What a drafter misses of rows that rest: it is read before they are drafted for, and known of cached pages, too."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from peregrine.engine import missed
from peregrine.engine.engine import Engine
from peregrine.engine.planning import AnyPlan, WindowPlanner
from peregrine.engine.request import Request
from peregrine.engine.round_costs import RoundCosts
from peregrine.engine.round_plan import RoundPlan
from peregrine.engine.round_times import RoundTimes
from peregrine.engine.rounds import ChunkInputs
from peregrine.sampling import SamplingParams
from peregrine.spec.chain import ChainDrafter
from peregrine.spec.odds import Ints
from peregrine.spec.readers import HeadReader
from spec.harness import Case, build, eagle3_head, run, tokens
from spec.test_identity import plain

COSTS = {1: 1.0, 8: 2.0}
EAGLE3 = {"drafter": str(eagle3_head()), "num_drafts": 3, "max_rows": 2}


def keys_of(engine: Engine, request: Request) -> Tensor:
    """What the head has stored of a running request's tokens before the newest."""
    runner, count = engine.runner, request.num_tokens - 1
    assert isinstance(runner.drafter, ChainDrafter)
    assert isinstance(runner.drafter.reader, HeadReader)
    size = runner.seats.page_size
    slots = [request.pages[place // size] * size + place % size for place in range(count)]
    return runner.drafter.reader.store.keys[:, slots].clone()


class RestingPlanner(WindowPlanner):
    """All rows rest between two numbers of tokens of the first, and are drafted for before and after."""

    def __init__(self, rest: range) -> None:
        super().__init__(3, RoundCosts(dict(COSTS), dict(COSTS), dict(COSTS), 3), looks_up=False)
        self.rest, self.nums_missed, self.stored = rest, list[int](), list[tuple[int, Tensor]]()
        self.engine: Engine

    def rests_with(self, rows: int) -> bool:
        return 3 in self.rest  # tokens of a prompt

    def plan(self, requests: list[Request], offered: Sequence[int]) -> RoundPlan:
        rests, number = requests[0].num_tokens in self.rest, requests[0].num_tokens
        self.nums_missed.append(requests[0].num_missed)
        self.stored.append((number, keys_of(self.engine, requests[0])))
        return RoundPlan(
            self, self.by_draft.rows_of(requests), (1,) * len(requests), [] if rests else list(range(len(requests)))
        )

    def learn(self, plan: AnyPlan, table: Ints, times: RoundTimes | None) -> None:
        """Nothing."""


@pytest.mark.parametrize("at_once", [3, 512])
@pytest.mark.parametrize("first", [3, 12])
def test_who_rested_is_read_before_it_is_drafted_for_again(
    first: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the head has stored, bit for bit, what it stores of requests that never rested; the prompt, too."""
    monkeypatch.setattr(missed, "AT_ONCE", at_once)
    some = [Case((5, 9, 200 + row), SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)) for row in (0, 1)]
    stored = []
    for rest in (range(first, 20), range(0)):
        engine = build(**EAGLE3).engine  # type: ignore[arg-type]
        planner = engine.runner.planner = RestingPlanner(rest)
        planner.engine = engine
        assert tokens(run(engine, some)) == plain(some)
        stored.append(dict(planner.stored))
        assert max(planner.nums_missed) == (0 if not rest else 19 if first == 3 else 8)
        assert planner.nums_missed[-1] == 0
    rested, never = stored
    assert torch.equal(rested[first], never[first]) == (first == 12)
    assert not torch.equal(rested[20], never[20]), "just before it is read, the drafter has missed something"
    for number in range(21, 40):
        assert torch.equal(rested[number], never[number])


@pytest.mark.parametrize("taps", [(1,), ()])
def test_every_rank_reads_what_was_missed(taps: tuple[int, ...]) -> None:
    """Arguments by keyword would stay with rank 0."""
    told: list[tuple[object, ...]] = []

    class Led:
        drafter = SimpleNamespace(taps=taps)

        def read(self, inputs: ChunkInputs, scored: bool, absorbs: bool, /) -> None:
            told.append((inputs.tokens.tolist(), scored, absorbs))

        def absorb(self, inputs: ChunkInputs, /) -> None:
            told.append((inputs.tokens.tolist(),))

    request = Request(0, list(range(12)), SamplingParams(), 0, 99)
    request.pages, request.missed = [1, 2], 7
    missed.read_missed(Led(), [request], page_size=16)  # type: ignore[arg-type]
    assert told == [([7, 8, 9, 10], False, True) if taps else ([7, 8, 9, 10],)]
    assert request.missed is None


def test_a_request_that_rested_ends_at_no_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(**EAGLE3).engine  # type: ignore[arg-type]
    planner = engine.runner.planner = RestingPlanner(range(12, 99))
    planner.engine = engine
    calls: list[object] = []
    monkeypatch.setattr(missed, "read_missed", lambda *args: calls.append(args))
    run(engine, [Case((5, 9, 200), SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))])
    assert planner.nums_missed[-1] > 20
    assert not calls


@torch.inference_mode()
def test_of_cached_pages_it_is_known_whether_the_drafter_has_read_them() -> None:
    """Where rows rest they are used as they are, and otherwise read once more, once."""
    case = Case(tuple(range(5, 45)), SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    engine = build(**EAGLE3, page_size=8).engine  # type: ignore[arg-type]
    planner = engine.runner.planner = RestingPlanner(range(999))
    planner.engine = engine
    cached = {}
    for name, rest in (("first", range(999)), ("rests", range(999)), ("drafts", range(0)), ("again", range(0))):
        planner.rest = rest
        request = engine.prepare(list(case.prompt), case.params)
        engine.enqueue(request)
        while engine.has_work:
            engine.step()
        assert [request.generated] == plain([case])
        cached[name] = request.stats.cached_tokens
        assert engine.ledger.tree is not None
        assert engine.ledger.missed.issuperset(engine.ledger.tree.match(list(case.prompt)).pages) == bool(rest)
    assert cached == {"first": 0, "rests": 32, "drafts": 0, "again": 32}
    fresh = build(**EAGLE3, page_size=8).engine  # type: ignore[arg-type]
    never = fresh.runner.planner = RestingPlanner(range(0))
    never.engine = fresh
    run(fresh, [case])
    assert torch.equal(planner.stored[-1][1], never.stored[-1][1])


def test_requests_that_will_rest_are_not_read_by_the_drafter_until_a_trial_is_due() -> None:
    requests = [Request(i, list(range(6)), SamplingParams(num_drafts=1), 0, 999) for i in range(4)]
    costs = RoundCosts({1: 4.0, 4: 16.0, 8: 26.0}, {1: 0.1, 2: 0.2}, {1: 3.0}, 3)  # drafts pay if nearly all are right
    planner = WindowPlanner(3, costs, looks_up=False)
    assert not planner.rests_with(4), "nothing is known of four rows"
    skipped = []
    for _ in range(1 << 14):
        skipped.append(planner.rests_with(4))
        if planner.repeat(requests) is None and not planner.plan(requests, [0] * 4).rests:
            break
    assert sum(skipped) > 20
    assert not skipped[-1], "who tries another number is known to the drafter"
    assert not planner.rests_with(1)
