"""How many drafts a row alone gets: decided after each of its drafter's steps, without a word from the host.

On a CPU the steps of a chain are replayed as one call (`kernels/runtime/cpu_graph.py`); where the gate closes, the
replay ends.
"""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from peregrine.kernels.runtime.cpu import NUMBA_PRESENT
from peregrine.kernels.runtime.dispatch import DeviceFile

_cpu = DeviceFile("peregrine.kernels.round.cpu")


@dataclass(frozen=True, slots=True)
class GateRule:
    """How many drafts are made, and how many of them are verified.

    The survival of a draft is the chance that it and all before it are right. Drafts deeper than there are levels have
    the chances of the deepest.
    """

    edges: tuple[float, ...]  # between ranges of what the drafter says of a draft
    chances: tuple[tuple[float, ...], ...]  # that it is right if those before it are, by level and range
    least: tuple[float, ...]  # after one draft, two and so on: the survival above which another one is made
    spent: tuple[float, ...]  # tokens that the time to verify no draft, one, two and so on would give elsewhere

    def survivals(self, said: Sequence[float]) -> list[float]:
        """Of drafts of which this is said."""
        survivals, survival = [], 1.0
        for depth, chance in enumerate(said):
            survival *= self.chances[min(depth, len(self.chances) - 1)][bisect(self.edges, chance)]
            survivals.append(survival)
        return survivals

    def verified(self, survivals: Sequence[float]) -> int:
        """How many of a chain's drafts are verified: those that win the most tokens, net of their time."""
        best, count, won = 0.0, 0, 0.0
        for number, survival in enumerate(survivals, 1):
            won += survival
            if won - self.spent[number] > best:
                best, count = won - self.spent[number], number
        return count


class Gate:
    """A rule, and what it let through, in memory that stays in its place."""

    def __init__(self, rule: GateRule, depth: int) -> None:
        self.rule, self.depth, self.num_edges, self.num_levels = rule, depth, len(rule.edges), len(rule.chances)
        with torch.inference_mode(False):  # kept beyond the call
            self.words = torch.tensor(self._words(rule), dtype=torch.float64)
            self.state = torch.zeros(3, dtype=torch.float64)  # the last survival, the sum of all, the best net
            self.passed = torch.zeros(1 + depth, dtype=torch.float64)  # how many drafts, and what is said of each
        self.seen = self.passed.numpy()  # the same memory, for the host, which reads an array faster than a tensor

    def set(self, rule: GateRule) -> None:
        """The rule from now on; it has the same edges and as many levels."""
        if rule is not self.rule:
            self.words.copy_(torch.tensor(self._words(rule), dtype=torch.float64))
            self.rule = rule

    def _words(self, rule: GateRule) -> list[float]:
        """Edges, chances, least survivals and time spent; more drafts than the rule knows are not made."""
        chances = [chance for level in rule.chances for chance in level]
        more = [inf] * (self.depth - len(rule.least))
        return [*rule.edges, *chances, *rule.least, *more, *rule.spent, *more]


def pass_gate(gate: Gate, depth: int, chance: Tensor, offered: Tensor, caps: Tensor) -> None:
    """A draft of this depth was made, of which the drafter says `chance` [1]: offer as many [1] as are worth it.

    More than caps [1] are not offered. If the survival is too small, the gate closes: of recorded calls, those after
    this one are not made, and drafts that are made nevertheless do not count.
    """
    if NUMBA_PRESENT:
        _cpu.pass_gate(gate, depth, chance, offered, caps)
    else:
        pass_gate_torch(gate, depth, chance, offered, caps)


def pass_gate_torch(gate: Gate, depth: int, chance: Tensor, offered: Tensor, caps: Tensor) -> None:
    """The torch twin of `pass_gate`, which ends no replay."""
    rule = gate.rule
    if depth:
        closed = depth > len(rule.least) or not float(gate.state[0]) > rule.least[depth - 1]
        if int(gate.passed[0]) < depth or closed:
            return
    gate.passed[0], gate.passed[1 + depth] = depth + 1, chance[0]
    survivals = rule.survivals([float(said) for said in gate.passed[1 : 2 + depth]])
    gate.state[0] = survivals[-1]
    torch.clamp(caps, max=rule.verified(survivals), out=offered)
