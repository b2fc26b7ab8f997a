"""Where chains of drafts branch: the drafter's second and third choice for a place is verified beside the first.

A branch is one node that hangs at the chain: it needs no step of the drafter, since each step ranks all tokens, and it
gives one token more if the chain goes wrong there and this choice is right. So trees are chosen by the rule of chains:
the likeliest drafts are verified as far as they pay. Everything here is a pure function of costs and odds, but for the
counts of `RankOdds`.
"""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from peregrine.spec.odds import MEMORY, PRIOR
from peregrine.spec.planner import Costs

RANKS = 3  # tokens of a step that may be verified, the draft itself included
EDGES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)  # of ranges of the drafter's own probability of a further choice

Survivals = Sequence[Sequence[float]]  # [row][depth]: the chance that the chain is right up to there
Seconds = Sequence[Sequence[Sequence[float]]]  # [row][depth][i]: of the i-th further choice, if all before are right
Place = tuple[int, int]  # depth and i of a further choice


@dataclass(slots=True)
class Count:
    """How many drafts were right, of how many."""

    right: float
    tried: float

    @property
    def chance(self) -> float:
        return self.right / self.tried

    def add(self, right: bool) -> None:
        self.right += right
        self.tried += 1.0
        if self.tried > MEMORY:
            self.right, self.tried = self.right / 2, self.tried / 2


@dataclass(slots=True)
class RankOdds:
    """How often the drafter's further choices were the target's token, by rank and by the drafter's own probability.

    The target's token is known wherever all drafts before are right, whether a branch was verified there or not.
    """

    counts: dict[tuple[int, int], Count] = field(default_factory=dict)

    def chances(self, said: Sequence[float], left: float) -> list[float]:
        """The chance of each further choice; together no more than is left by the first."""
        found = []
        for rank, share in enumerate(said):
            found.append(min(left, self._count(rank, share).chance))
            left -= found[-1]
        return found

    def judge(self, said: Sequence[float], right: int | None) -> None:
        """Count which of the further choices was right, if any."""
        for rank, share in enumerate(said):
            self._count(rank, share).add(rank == right)

    def _count(self, rank: int, said: float) -> Count:
        place = rank, bisect(EDGES, said)
        if place not in self.counts:
            self.counts[place] = Count(said * PRIOR, PRIOR)
        return self.counts[place]


def net_of(costs: Costs, survivals: Survivals, depths: Sequence[int], rate: float) -> float:
    """Tokens that chains of these depths are expected to win, less those that their time would give elsewhere."""
    rows = len(depths)
    won = sum(sum(line[:depth]) for line, depth in zip(survivals, depths, strict=True))
    ms = costs.verify_ms(rows + sum(depths)) - costs.verify_ms(rows)
    return won - rate * (ms + costs.ragged * (min(depths) < max(depths)))


def branch_windows(
    costs: Costs, survivals: Survivals, seconds: Seconds, rate: float, room: int, chains: list[int]
) -> tuple[list[int], list[list[Place]]]:
    """How many drafts of each row's chain to verify, and which further choices; only `chains` if they give as much.

    Windows have at most `room` drafts. A chain's branches are never likelier than what they hang at, so the likeliest
    nodes of all rows are trees.
    """
    rows = len(survivals)
    verified = costs.verify_ms(rows)
    rate = max(rate, rows / verified)
    best, taken = net_of(costs, survivals, chains, rate), 0
    won, used, branches, nodes = 0.0, [0] * rows, 0, []
    for node in ranked_nodes(survivals, seconds):
        chance, _, further, row = node
        if used[row] == room:
            continue
        used[row] += 1
        nodes.append(node)
        won, branches = won + chance, branches + (further >= 0)
        net = won - rate * (costs.verify_ms(rows + len(nodes)) - verified + costs.branched)
        if branches and net > best:
            best, taken = net, len(nodes)
    return as_windows(nodes[:taken], rows) if taken else (chains, [[] for _ in survivals])


def whole_tree(survivals: Sequence[float], seconds: Sequence[Sequence[float]], room: int) -> tuple[int, list[Place]]:
    """The `room` likeliest nodes of one row, whether they pay or not."""
    (depth,), (places,) = as_windows(ranked_nodes([survivals], [seconds])[:room], 1)
    return depth, places


def ranked_nodes(survivals: Survivals, seconds: Seconds) -> list[tuple[float, int, int, int]]:
    """(chance, depth, -1 in the chain or number of the further choice, row) of all nodes, the likeliest first.

    Of equals the less deep come first, so that no node comes before what it hangs at.
    """
    nodes = []
    for row, (line, further) in enumerate(zip(survivals, seconds, strict=True)):
        before = 1.0
        for depth, survival in enumerate(line):
            nodes.append((survival, depth, -1, row))
            if depth < len(further):
                nodes += [(before * chance, depth, i, row) for i, chance in enumerate(further[depth])]
            before = survival
    nodes.sort(key=lambda node: (-node[0], *node[1:]))
    return nodes


def as_windows(nodes: Sequence[tuple[float, int, int, int]], rows: int) -> tuple[list[int], list[list[Place]]]:
    """The chain's depth and the further choices of each row."""
    depths: list[int] = [0] * rows
    places: list[list[Place]] = [[] for _ in range(rows)]
    for _, depth, further, row in nodes:
        if further < 0:
            depths[row] += 1
        else:
            places[row].append((depth, further))
    return depths, places
