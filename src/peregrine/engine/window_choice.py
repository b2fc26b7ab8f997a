"""Decides whether an engine plans its windows and how many drafts they may have; times rounds for its planner."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from peregrine.config import FIXED_DRAFTS, Decision, EngineConfig
from peregrine.engine.ahead_planner import AheadCosts, AheadPlanner, ThresholdPlanner
from peregrine.engine.ahead_rounds import AheadRounds
from peregrine.engine.choices import pick_graphs
from peregrine.engine.planning import WindowPlanner
from peregrine.engine.round_times import FixedPlan, RoundTimes, least, now, times_of
from peregrine.engine.runner import VARIANTS, Runner
from peregrine.engine.start_costs import branched_ms, measure_costs
from peregrine.kernels.runtime.cpu_graph import record_at_once
from peregrine.kernels.sampling import Features
from peregrine.models.config import ModelConfig
from peregrine.models.draft_heads import BlockHead
from peregrine.spec.registry import DRAFTERS, DraftSource
from peregrine.spec.types import Drafter, PartedDrafter

MOST_DRAFTS = 8  # in planned windows, unless num_drafts is given; later drafts are hardly ever reached
AUTO, FIXED, CHAIN = "auto", "fixed", "chain"
Chosen = tuple[str, str]  # what was chosen, and why


def with_windows(
    asked: EngineConfig,
    config: ModelConfig,
    draft: DraftSource,
    device: torch.device,
    take: Callable[[str, tuple[Any, str]], Any],
) -> tuple[EngineConfig, Chosen]:
    """The options with `windows` and `num_drafts` decided, and whether chains branch."""
    windows = take("windows", pick_windows(asked, draft, device))
    tree = pick_tree(asked, config, draft, windows, device)
    take("tree", tree)
    drafts = take("num_drafts", pick_num_drafts(asked, draft, windows))
    return replace(asked, windows=windows, num_drafts=drafts), tree


def pick_tree(
    asked: EngineConfig, config: ModelConfig, draft: DraftSource, windows: str, device: torch.device
) -> tuple[str, str]:
    """Whether drafts are chains, trees of one shape, or chains that branch where it pays, and why."""
    if asked.tree is not None:
        return f"{asked.tree.depth},{asked.tree.width},{asked.tree.nodes}", "asked for, in every round"
    shortest = min((window for window in config.windows if window is not None), default=MOST_DRAFTS + 1)
    for hinders, because in (
        (draft.name == "none", "there is no drafter"),
        (draft.network is None, "drafts are looked up, without second choices"),
        (isinstance(draft.network, BlockHead), "chains of a block head do not branch yet; ask for a tree's shape"),
        (windows == FIXED, "windows are fixed; ask for a tree's shape"),
        (asked.attention == "triton", "this attention backend takes no trees of different shapes"),
        (device.type != "cpu", "rounds are recorded for chains; ask for a tree's shape"),
        (shortest <= (asked.num_drafts or MOST_DRAFTS), f"nodes must see all before them; the window is {shortest}"),
    ):
        if hinders:
            return CHAIN, because
    return AUTO, "chains of drafts branch in rounds where that pays"


def pick_windows(asked: EngineConfig, draft: DraftSource, device: torch.device) -> tuple[str, str]:
    """Whether windows are planned in every round or have a fixed shape, and why."""
    if asked.windows == FIXED:
        return FIXED, "asked for"
    if asked.confidence_threshold:
        return FIXED, f"drafts above confidence_threshold={asked.confidence_threshold:g} are verified, not what pays"
    ahead = pick_graphs(asked, device)[0]
    for hinders, because in (
        (draft.name == "none", "there is no drafter"),
        (asked.tree is not None, "a tree has one shape in every round; leave tree out for planned chains"),
        (device.type != "cpu" and not ahead, "rounds are not recorded"),
        (ahead and not has_parts(draft), "rounds are recorded whole: the drafter has no `read`, `draft` and `depths`"),
        (ahead and asked.tensor_parallel > 1, "other ranks do not follow planned rounds, recorded in parts, yet"),
        (not ahead and bool(asked.lag), f"plans need the last verdict, and lag={asked.lag} leaves it unread"),
        (not ahead and asked.row_sizes is not None, "batches are padded to row_sizes"),
    ):
        if hinders:
            return FIXED, because
    return AUTO, "each round drafts and verifies what pays, by measured costs and learnt odds"


def has_parts(draft: DraftSource) -> bool:
    """Whether reading and drafting can be separate graphs, as they can for every drafter with a network."""
    return draft.network is not None or isinstance(DRAFTERS[draft.name](1, torch.device("cpu")), PartedDrafter)


def pick_num_drafts(asked: EngineConfig, draft: DraftSource, windows: str) -> tuple[int, str]:
    """The most drafts of a round, and why."""
    if asked.tree is not None:
        return asked.tree.depth, "the tree's depth"
    if draft.name == "none":
        return 0, "there is no drafter"
    if asked.num_drafts is not None:
        return asked.num_drafts, "asked for" if windows == FIXED else "asked for, as the most"
    most, because = (
        (MOST_DRAFTS, "the most that is planned") if windows == AUTO else (FIXED_DRAFTS, "windows are fixed")
    )
    network = draft.network
    if isinstance(network, BlockHead) and network.config.max_drafts < most:
        return network.config.max_drafts, "the head's block"
    return most, because


def add_planner(asked: EngineConfig, runner: Runner, draft: DraftSource) -> list[Decision]:
    """Time the runner's rounds, give it a planner, and say what was measured; nothing if windows are fixed."""
    if asked.windows == FIXED:
        return []
    depth, max_rows = runner.drafter.shape.depth, asked.max_rows
    steps = 0 if draft.network is None else 1 if isinstance(draft.network, BlockHead) else depth
    began = time.perf_counter()
    with torch.inference_mode(), record_at_once():
        measured = measure_costs(partial(time_round, runner), max_rows, depth, steps)
    seconds = time.perf_counter() - began
    room = 0
    if pick_tree(asked, runner.target.decoder.config, draft, asked.windows, runner.device)[0] == AUTO:
        room = runner.drafter.shape.span - 1  # as many nodes as a round may write in any case
        with torch.inference_mode(), record_at_once():
            tree = partial(time_round, runner, [min(4, depth + 1)], 1, branches=True)
            measured.branched = branched_ms(tree, min(4, depth + 1), measured.costs())
    runner.planner = WindowPlanner(depth, measured, draft.network is None, room, asked.max_stall_ms)
    costs = runner.planner.costs
    because = (
        f"ms by tokens verified: {written(costs.verify)}; by rows of a drafter's first step: {written(costs.first)}, "
        f"of a further one: {written(costs.step)}"
    )
    return [Decision("costs", f"measured for {len(costs.verify)} sizes", f"{because}; timed in {seconds:.2f} s")]


def plan_ahead(asked: EngineConfig, runner: Runner, draft: DraftSource) -> None:
    """If windows differ in length, let the runner record rounds in parts; `time_ahead` times these afterwards."""
    if not asked.ragged or asked.tensor_parallel > 1:
        return
    rounds = AheadRounds(runner.target, parted(runner.drafter), runner.judge, runner.seats, VARIANTS)
    shape = runner.drafter.shape
    planner = AheadPlanner(shape.depth, AheadCosts({}), draft.network is None, shape.says)
    if asked.windows == FIXED:
        planner = ThresholdPlanner(shape.depth, asked.confidence_threshold)
    runner.ahead = planner, rounds


def parted(drafter: Drafter) -> PartedDrafter:
    """The drafter as a PartedDrafter; `pick_windows` has checked that it is one."""
    assert isinstance(drafter, PartedDrafter), "windows are planned for drafters with parts"
    return drafter


def time_ahead(runner: Runner, row_sizes: Sequence[int]) -> list[Decision]:
    """Time the parts of the runner's rounds, and say what was measured; nothing if windows are fixed."""
    if runner.ahead is None or isinstance(runner.ahead[0], ThresholdPlanner):
        return []
    planner, rounds = runner.ahead
    began = time.perf_counter()
    with torch.inference_mode():
        planner.costs = rounds.measure(row_sizes, runner.graphs)
    seconds = time.perf_counter() - began
    by_rows = planner.costs.by_rows
    because = "; ".join(
        f"{rows} rows: ms by tokens {written(zip(c.sizes, c.verify, strict=True))}, "
        f"by drafts {written(zip(c.depths, c.draft, strict=True))}"
        for rows, c in by_rows.items()
        if rows in (min(by_rows), max(by_rows))
    )
    sizes = sum(len(c.sizes) for c in by_rows.values())
    return [Decision("costs", f"measured for {sizes} sizes", f"{because}; timed in {seconds:.2f} s")]


def written(points: Iterable[tuple[int, float]]) -> str:
    """`size: milliseconds` of each point, as text."""
    return ", ".join(f"{size}: {ms:.2f}" for size, ms in points)


def time_round(runner: Runner, lens: Sequence[int], drafts: int, branches: bool = False) -> RoundTimes:
    """Times of a round with these windows that makes so many drafts for every row, which count as the first.

    All seats must be free, since the round really runs.
    """
    began = proposing = now()

    def mark(stage: str) -> None:
        nonlocal proposing
        if stage == "propose":
            proposing = now()

    rows, plan = runner.seats.rows(len(lens), 1), FixedPlan(lens, drafts, branches)
    runner.rounds.run(rows, Features(), plan, mark=mark)
    done = now()
    by_clock, busy = (times_of(began[i], proposing[i], [done[i]]) for i in (0, 1))
    return least(by_clock, busy)
