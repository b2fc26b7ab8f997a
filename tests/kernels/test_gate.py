"""The gate of a row alone: kernel and twin against the rule itself, and a replay that ends there."""

import math
import random

import pytest
import torch
from torch import Tensor

from peregrine.kernels.norm.reference import rms_norm
from peregrine.kernels.round.gate import Gate, GateRule, pass_gate, pass_gate_torch
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT
from peregrine.kernels.runtime.cpu_graph import CpuGraph

EDGES = (0.1, 0.5, 0.9)
needs_numba = pytest.mark.skipif(not NUMBA_PRESENT, reason="needs numba")


def any_rule(dice: random.Random, drafts: int) -> GateRule:
    chances = tuple(tuple(0.5 + dice.random() / 2 for _ in range(4)) for _ in range(2))
    least = *(dice.random() for _ in range(drafts - 1)), math.inf
    return GateRule(EDGES, chances, least, tuple(sorted(1.5 * dice.random() for _ in range(1 + drafts))))


def drafts_of(rule: GateRule, said: list[float]) -> tuple[int, int]:
    """How many are made and how many verified, by the rule's own words."""
    survivals, nets = [1.0], [0.0]
    for depth, chance in enumerate(said):
        level = rule.chances[min(depth, 1)]
        survivals.append(survivals[-1] * level[sum(chance >= edge for edge in EDGES)])
        nets.append(sum(survivals[1:]) - rule.spent[depth + 1])
        if not survivals[-1] > rule.least[depth]:
            return depth + 1, max(range(depth + 2), key=nets.__getitem__)
    raise AssertionError("the last draft that a rule knows closes the gate")


@pytest.mark.parametrize("function", [pass_gate_torch, pytest.param(pass_gate, marks=needs_numba)])
def test_drafts_pass_while_their_survival_is_above_the_least(function) -> None:
    dice, depth = random.Random(3), 5
    gate, counts = Gate(any_rule(dice, depth), depth), set()
    for _ in range(500):
        rule = any_rule(dice, dice.randint(1, depth))  # a request may have fewer drafts than fit
        said = [dice.choice((0.1, 0.5, 0.9, dice.random())) for _ in range(depth)]
        said = torch.tensor(said).tolist()  # as a float32 holds them
        offered, cap = torch.tensor([-1]), torch.tensor([dice.randint(0, depth)])
        gate.set(rule)
        for step, chance in enumerate(said):  # all of them, as when they are recorded
            function(gate, step, torch.tensor([chance]), offered, cap)
        made, verified = drafts_of(rule, said)
        assert gate.passed[: 1 + made].tolist() == [made, *said[:made]]
        assert offered.item() == min(verified, cap.item())
        counts.add((made, verified))
    assert {made for made, _ in counts} == set(range(1, depth + 1))
    assert {verified for _, verified in counts} == set(range(depth + 1))


@needs_numba
def test_a_replay_ends_at_a_closed_gate() -> None:
    rule = GateRule((), ((0.5,),), (0.4, 0.3, math.inf), (0.0,) * 4)  # survivals 0.5, 0.25
    gate, offered, cap, weight = Gate(rule, 3), torch.zeros(1).long(), torch.tensor([9]), torch.ones(8)
    outputs: list[Tensor] = []

    def step(x: Tensor, chance: Tensor) -> tuple[Tensor, ...]:
        for depth in range(3):
            x = rms_norm(x, weight, 1e-5)
            outputs.append(x)
            pass_gate(gate, depth, chance, offered, cap)
        return ()

    graph = CpuGraph(step, (torch.randn(1, 8), torch.ones(1)))
    assert graph.complete
    for least, made in (((0.4, 0.3, math.inf), 2), ((0.6, 0.3, math.inf), 1), ((0.1, 0.1, math.inf), 3)):
        gate.set(GateRule((), ((0.5,),), least, (0.0,) * 4))
        for output in outputs:
            output.zero_()
        graph(*graph.inputs)
        assert [bool(output.any()) for output in outputs] == [depth < made for depth in range(3)]
        assert (gate.passed[0].item(), offered.item()) == (made, made)
