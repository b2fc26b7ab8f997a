"""The odds of drafts, as the host's compiled functions read and count them in lines of `Odds` (`odds.py`)."""

import math

import numpy as np

from peregrine.kernels.runtime.host_jit import jit_cached, jit_part
from peregrine.spec.odds import (
    ALIKE,
    ALL,
    COMPARED,
    DEPTH_MEMORY,
    DEPTH_PRIOR,
    DEPTHS,
    EDGES,
    FIRST_GUESS,
    MEANS,
    MEMORY,
    MOST,
    OWN_MEMORY,
    OWN_PRIOR,
    RANGES,
    TENTHS,
)


@jit_part
def add(odds, at, right, tried, memory):  # type: ignore[no-untyped-def]
    """Count drafts; of more than `memory`, older ones count less."""
    odds[at] += right
    odds[at + 1] += tried
    if odds[at + 1] > memory:
        odds[at] /= 2
        odds[at + 1] /= 2


@jit_part
def note(odds, line, chance, tried, right):  # type: ignore[no-untyped-def]
    """Compare a chance with what came of it."""
    tenth = line + COMPARED + 3 * min(TENTHS - 1, int(chance * TENTHS))
    odds[tenth] += tried
    odds[tenth + 1] += chance * tried
    odds[tenth + 2] += right


@jit_part
def count_at(line, depth, said):  # type: ignore[no-untyped-def]
    """Where drafts of this depth are counted of which this is said."""
    place = 0
    for edge in EDGES:
        place += said >= edge
    return line + 2 * (RANGES * min(depth, DEPTHS - 1) + place)


@jit_part
def mean_at(line, depth):  # type: ignore[no-untyped-def]
    """Where the chances of the drafts of this depth are added up."""
    return line + MEANS + 2 * min(depth, DEPTHS - 1)


@jit_part
def depth_at(line, depth):  # type: ignore[no-untyped-def]
    """Where drafts of this depth are counted, whatever is said of them."""
    return line + ALL + 2 * min(depth, DEPTHS - 1)


@jit_part
def chance_of(odds, line, depth, said):  # type: ignore[no-untyped-def]
    """The chance of a draft, by what is said of it; if nothing is, by its depth (`Odds.chances_by_depth`)."""
    if said == said:
        at = count_at(line, depth, said)
        return odds[at] / odds[at + 1]
    chance, weight = FIRST_GUESS, DEPTH_PRIOR
    for level in range(min(depth, DEPTHS - 1) + 1):
        at = depth_at(line, level)
        chance = (odds[at] + weight * chance) / (odds[at + 1] + weight)
        weight = ALIKE
    return chance


@jit_part
def factor_of(expected, right):  # type: ignore[no-untyped-def]
    """`RequestOdds.factor`."""
    return (right + OWN_PRIOR) / (expected + OWN_PRIOR)


@jit_part
def judge(odds, line, depth, said, chance, right):  # type: ignore[no-untyped-def]
    """Count a verdict on a draft all of whose predecessors were right."""
    if said == said:
        add(odds, count_at(line, depth, said), right, 1, MEMORY)
    if said != said or depth == 0:  # further ones are made only where those before seemed likely
        add(odds, depth_at(line, depth), right, 1, DEPTH_MEMORY)
    note(odds, line, chance, 1, right)


@jit_cached("void(f8[::1], f8[::1], i8[::1], i8[::1], f8[:,::1], f8[:,::1])")
def judge_chains(odds, own, known, right, read, made):  # type: ignore[no-untyped-def]
    """Count the verdicts of rounds of one request (`Odds.judge_chains`), and the drafts that they made."""
    for number in range(len(known)):
        own[0] *= OWN_MEMORY
        own[1] *= OWN_MEMORY
        factor = factor_of(own[0], own[1])
        for depth in range(known[number]):
            said, good = read[number, 1 + depth], 1.0 if depth < right[number] else 0.0
            chance = chance_of(odds, 0, depth, said)
            judge(odds, 0, depth, said, min(MOST, chance * factor), good)
            own[0] += chance
            own[1] += good
        for depth in range(int(made[number, 0])):
            chance = chance_of(odds, 0, depth, made[number, 1 + depth])
            add(odds, mean_at(0, depth), chance, 1, MEMORY)


@jit_cached("void(f8[::1], f8[:,::1], i8, i8[:,::1], i8[:,::1])")
def judge_counts(odds, own, rounds, tried, right):  # type: ignore[no-untyped-def]
    """Count the verdicts of many rounds (`Odds.judge_rounds`)."""
    rows, most = tried.shape
    chances, kept = np.empty(most), OWN_MEMORY**rounds
    for depth in range(most):
        chances[depth] = chance_of(odds, 0, depth, math.nan)
    for row in range(rows):
        own[row, 0] *= kept
        own[row, 1] *= kept
        factor = factor_of(own[row, 0], own[row, 1])
        for depth in range(most):
            count, correct = tried[row, depth], right[row, depth]
            own[row, 0] += chances[depth] * count
            own[row, 1] += correct
            note(odds, 0, min(MOST, chances[depth] * factor), count, correct)
    for depth in range(most):
        count, correct = 0, 0
        for row in range(rows):
            count += tried[row, depth]
            correct += right[row, depth]
        add(odds, depth_at(0, depth), correct, count, DEPTH_MEMORY)
