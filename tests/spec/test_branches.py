"""Which chains branch: against brute force, and what must hold of every choice; and how such windows are laid out."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peregrine.kernels.round import Ends, Nodes
from peregrine.kernels.round.verdict import judge_nodes
from peregrine.spec.branches import Place, RankOdds, branch_windows, net_of, whole_tree
from peregrine.spec.links import Branched
from peregrine.spec.planner import Costs, trim_windows
from spec.test_planner import falling, straight_costs

Chances = list[tuple[float, list[float]]]  # by depth: of the draft, and of further choices for its place


@st.composite
def drafts(draw: st.DrawFn) -> Chances:
    """The chances of a row's drafts; those for one place add up to one at most."""
    made = []
    for _ in range(draw(st.integers(0, 2))):
        parts = draw(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=4))
        first, *others = (part / sum(parts) for part in parts)
        made.append((first, others[:-1]))
    return made


rows = st.lists(drafts(), min_size=1, max_size=2)


def net(
    costs: Costs, lines: Sequence[Chances], depths: Sequence[int], places: Sequence[list[Place]], rate: float
) -> float:
    """What windows are expected to win, less what their time would give elsewhere; computed from the chances."""
    survivals = falling([[first for first, _ in line] for line in lines])
    won, nodes = 0.0, 0
    for line, survival, depth, branches in zip(lines, survivals, depths, places, strict=True):
        assert all(at <= depth for at, _ in branches), "a branch hangs at a node of the window"
        won += sum(survival[:depth])
        won += sum((survival[at - 1] if at else 1.0) * line[at][1][further] for at, further in branches)
        nodes += depth + len(branches)
    ms = costs.verify_ms(len(lines) + nodes) - costs.verify_ms(len(lines))
    ms += costs.branched if any(places) else costs.ragged * (min(depths) < max(depths))
    return won - rate * ms


def every_window(line: Chances, room: int) -> Iterator[tuple[int, list[Place]]]:
    """All trees of a row."""
    for depth in range(len(line) + 1):
        open_places = [(at, i) for at, (_, others) in enumerate(line[: depth + 1]) for i in range(len(others))]
        for count in range(len(open_places) + 1):
            for places in combinations(open_places, count):
                if depth + count <= room:
                    yield depth, list(places)


@settings(max_examples=80, deadline=None)
@given(straight_costs(), rows, st.floats(0.05, 2), st.floats(0, 0.3), st.floats(0, 0.3))
def test_branches_are_as_good_as_brute_force(
    costs: Costs, lines: list[Chances], faster: float, branched: float, ragged: float
) -> None:
    costs, room = replace(costs, branched=branched, ragged=ragged), 6
    survivals, seconds = falling([[a for a, _ in line] for line in lines]), [[b for _, b in line] for line in lines]
    rate = (1 + faster) * len(lines) / costs.verify_ms(len(lines))
    chains = trim_windows(costs, survivals, rate)
    depths, places = branch_windows(costs, survivals, seconds, rate, room, chains)
    every = (zip(*windows, strict=True) for windows in product(*(every_window(line, room) for line in lines)))
    best = max(net(costs, lines, *map(list, windows), rate) for windows in every)  # type: ignore[arg-type]
    assert net(costs, lines, depths, places, rate) == pytest.approx(best, rel=1e-6, abs=1e-9)
    assert net_of(costs, survivals, chains, rate) <= best + 1e-9


steps_up = st.lists(st.floats(0.01, 5), min_size=3, max_size=12)


@settings(max_examples=60, deadline=None)
@given(steps_up, rows, st.floats(0, 3), st.integers(1, 4), st.floats(0, 2))
def test_no_tree_is_expected_to_be_slower_than_its_chain(
    verify: list[float], lines: list[Chances], rate: float, room: int, branched: float
) -> None:
    """Whatever the costs, and whatever room there is: nor slower than plain decoding."""
    points = tuple((size, sum(verify[: size + 1])) for size in range(1, len(verify)))
    costs = Costs(points, points, points, 3, branched=branched)
    survivals, seconds = falling([[a for a, _ in line] for line in lines]), [[b for _, b in line] for line in lines]
    chains = trim_windows(costs, survivals, rate)
    depths, places = branch_windows(costs, survivals, seconds, rate, room, chains)
    least = max(rate, len(lines) / costs.verify_ms(len(lines)))
    won = net(costs, lines, depths, places, least)
    assert won >= net_of(costs, survivals, chains, least) - 1e-9
    assert won >= -1e-9
    if any(places):
        assert all(depth + len(own) <= room for depth, own in zip(depths, places, strict=True))


def test_trees_are_taken_where_nodes_cost_little() -> None:
    survivals, seconds = falling([[0.6, 0.6]]), [[[0.3, 0.05], [0.3, 0.05]]]
    free = Costs(verify=((1, 1.0), (9, 1.01)), absorb=((1, 0.0),), step=((1, 0.0),), steps=8)
    assert branch_windows(free, survivals, seconds, 1.0, 8, [2]) == ([2], [[(0, 0), (1, 0), (0, 1), (1, 1)]])
    assert branch_windows(free, survivals, seconds, 1.0, 3, [2]) == ([2], [[(0, 0)]]), "there is room for three"
    dear = replace(free, verify=((1, 1.0), (9, 3.6)))  # 0.325 tokens for each node
    assert branch_windows(dear, survivals, seconds, 1.0, 8, [2]) == ([2], [[]])
    assert branch_windows(replace(free, branched=0.6), survivals, seconds, 1.0, 8, [2]) == ([2], [[]])
    assert whole_tree(survivals[0], seconds[0], 3) == (2, [(0, 0)])


def test_odds_of_further_choices_are_learnt_by_rank_and_by_what_the_drafter_says() -> None:
    odds = RankOdds()
    assert odds.chances([0.3, 0.1], 0.6) == pytest.approx([0.3, 0.1]), "at first what the drafter says"
    assert odds.chances([0.3, 0.1], 0.35) == pytest.approx([0.3, 0.05]), "no more than the draft leaves"
    for number in range(400):
        odds.judge([0.3, 0.1], (0, None, None, None)[number % 4])
        odds.judge([0.01], None)
    first, second = odds.chances([0.3, 0.1], 1.0)
    assert first == pytest.approx(0.25, abs=0.02)
    assert second == pytest.approx(0.0, abs=0.01)


def test_windows_that_branch() -> None:
    """A chain, then its branches; rows with fewer nodes have void ones, which are never accepted."""
    windows = Branched.of([[9, 1, 2], [8], [7, 5]], [[(0, 3), (2, 4), (1, 6)], [(0, 1)], []])
    assert windows.lens == (6, 2, 2)
    assert windows.deepest == (3, 1, 1)
    assert windows.tokens.tolist()[0] == [9, 1, 2, 3, 4, 6]
    assert windows.links.parents.tolist()[0] == [0, 0, 1, 0, 2, 1]
    assert windows.links.depths.tolist() == [[0, 1, 2, 1, 3, 2], [0, 1, 4, 4, 4, 4], [0, 1, 4, 4, 4, 4]]
    assert windows.links.ancestors.tolist()[0] == [0b1, 0b11, 0b111, 0b1001, 0b10111, 0b100011]
    choices = torch.tensor([[1, 2, 4, 0, 5, 0], [1, 3, -1, -1, -1, -1], [0, 0, -1, -1, -1, -1]])
    nodes = Nodes(windows.tokens, *windows.links.fields(), torch.tensor(windows.deepest))
    ends = Ends(torch.zeros(3, dtype=torch.int64), torch.full((3,), 99), torch.full((3, 1), -1), torch.zeros(3).bool())
    verdict = judge_nodes(choices, nodes, ends, windows.depth)
    assert verdict.correct_lens.tolist() == [3, 1, 0]
    assert verdict.path.tolist()[0] == [0, 1, 2, 4]
    assert verdict.tokens[0].tolist() == [1, 2, 4, 5]
    assert verdict.table[:, 2].tolist() == [5, 1, 1], "drafts that were offered"
