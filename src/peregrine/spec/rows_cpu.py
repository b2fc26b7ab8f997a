"""What is done for all rows of a round that is planned draft by draft, as a few calls (`engine/draft_rows.py`).

In Python it would take a hundred microseconds a round, and ten more for each row. `table` has a line and `numbers` a
column for each row (`draft_table.py`), `odds` a line for greedy and one for sampled requests (`Odds.line`).
verify, absorb, step [2, n] are sizes and milliseconds (`Costs.curves`).
"""

import math

import numpy as np

from peregrine.kernels.round import FINISH_NONE
from peregrine.kernels.runtime.host_jit import floats_at, jit_cached, jit_part
from peregrine.spec.draft_table import (
    ASKED,
    CHANCE,
    DRAFTED,
    DRAFTS,
    ENGINE,
    EXPECTED,
    HELD,
    KIND,
    LEFT,
    LENS,
    MADE,
    OFFERED,
    RIGHT,
    SAID,
    SURVIVAL,
    WANTED,
    depth_in,
)
from peregrine.spec.odds import (
    ALIKE,
    ALL,
    COMPARED,
    DEPTH_MEMORY,
    DEPTH_PRIOR,
    DEPTHS,
    EDGES,
    FIRST_GUESS,
    LINE,
    MEANS,
    MEMORY,
    MOST,
    OWN_MEMORY,
    OWN_PRIOR,
    RANGES,
    TENTHS,
)
from peregrine.spec.planner_cpu import trim, worth

WON, CORRECT, ENDED = 0, 1, 3  # columns of a verdict

depth_of = jit_part(depth_in)


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
def line_of(table, row):  # type: ignore[no-untyped-def]
    """Where the odds of a row's request begin."""
    return LINE * int(table[row, KIND])


@jit_part
def put_guess(table, row, odds, first, depth, said, counts):  # type: ignore[no-untyped-def]
    """Write down a draft that was made, where drafts begin at column `first`; `counts`: among those of its depth.

    Returns its chance.
    """
    line, draft = line_of(table, row), first + 3 * depth
    engine = chance_of(odds, line, depth, said)
    chance = min(MOST, engine * factor_of(table[row, EXPECTED], table[row, RIGHT]))
    table[row, draft + SAID], table[row, draft + CHANCE], table[row, draft + ENGINE] = said, chance, engine
    if counts:
        add(odds, mean_at(line, depth), engine, 1, MEMORY)
    return chance


@jit_part
def judge(odds, line, depth, said, chance, right):  # type: ignore[no-untyped-def]
    """Count a verdict on a draft all of whose predecessors were right."""
    if said == said:
        add(odds, count_at(line, depth, said), right, 1, MEMORY)
    if said != said or depth == 0:  # further ones are made only where those before seemed likely
        add(odds, depth_at(line, depth), right, 1, DEPTH_MEMORY)
    note(odds, line, chance, 1, right)


@jit_cached("i8(f8[:,::1], i8[:,::1], f8[::1], i8[:,::1], i8[::1])")
def judge_windows(table, numbers, odds, verdicts, correct):  # type: ignore[no-untyped-def]
    """Count a round's verdicts [R, columns] on the drafts that were verified; then windows have the new drafts.

    Where windows branch, correct [R] are the right drafts of the chains; else it is empty. Returns the round's tokens.
    """
    won, size = 0, 3 * depth_of(table)
    for row in range(len(table)):
        line, right = line_of(table, row), correct[row] if len(correct) else verdicts[row, CORRECT]
        ended = verdicts[row, ENDED] != FINISH_NONE and right == verdicts[row, CORRECT]
        table[row, EXPECTED] *= OWN_MEMORY
        table[row, RIGHT] *= OWN_MEMORY
        for depth in range(min(right if ended else right + 1, numbers[LENS, row] - 1)):
            draft, good = DRAFTS + 3 * depth, 1.0 if depth < right else 0.0
            judge(odds, line, depth, table[row, draft + SAID], table[row, draft + CHANCE], good)
            table[row, EXPECTED] += table[row, draft + ENGINE]
            table[row, RIGHT] += good
        for column in range(DRAFTS, DRAFTS + 3 * numbers[MADE, row]):
            table[row, column] = table[row, column + size]
        numbers[HELD, row], numbers[MADE, row] = numbers[MADE, row], 0
        table[row, LEFT] -= verdicts[row, WON]
        won += 1 + verdicts[row, CORRECT]
    return won


@jit_cached("Tuple((f8, i8))(f8[:,::1], i8[:,::1], f8[::1], i8[:,::1], b1, f8[:,::1], f8, f8, b1)")
def choose_windows(  # type: ignore[no-untyped-def]
    table, numbers, odds, verdicts, offers_made, verify, ragged, rate, whole
):
    """How many of the drafts that it is offered each row verifies: what pays, or the `whole` window.

    `offers_made`: it is offered the drafts that were made. Of offered drafts that are not known, the drafter said
    nothing. Verdicts of the round before are taken in first, if there are any. Returns the tokens that the drafts are
    expected to give, and those of the round before.
    """
    rows, won = len(table), 0.0
    before = judge_windows(table, numbers, odds, verdicts, np.empty(0, np.int64)) if len(verdicts) else 0
    survivals, most = np.empty((rows, depth_of(table))), np.empty(rows, np.int64)
    for row in range(rows):
        held, survival = numbers[HELD if offers_made else OFFERED, row], 1.0
        for depth in range(numbers[HELD, row], held):
            put_guess(table, row, odds, DRAFTS, depth, math.nan, True)
        for depth in range(held):
            survival *= table[row, DRAFTS + 3 * depth + CHANCE]
            survivals[row, depth] = survival
            won += survival
        most[row] = min(held, int(max(0.0, min(table[row, ASKED], table[row, LEFT]))))
        numbers[HELD, row] = numbers[LENS, row] = held
    if not whole:
        won = trim(survivals, most, verify, ragged, rate, numbers[LENS])
    for row in range(rows):
        numbers[LENS, row] += 1
    return won, before


@jit_cached("void(f8[:,::1], i8[:,::1], f8[::1], i8, b1)")
def add_drafts(table, numbers, odds, said, first):  # type: ignore[no-untyped-def]
    """One more draft of each row that is drafted for; `first`: the first ones of a round.

    What is said of them is float32 from the address `said` on. Drafts of rows that are not wanted were made because
    others are; they do not count for the means.
    """
    number, new, values = 0, DRAFTS + 3 * depth_of(table), floats_at(said, len(table))
    for row in range(len(table)):
        if first:
            numbers[MADE, row], table[row, SURVIVAL], table[row, WANTED] = 0, 1.0, table[row, DRAFTED]
        if table[row, DRAFTED]:
            depth, counts = numbers[MADE, row], table[row, WANTED] > 0.0
            table[row, SURVIVAL] *= put_guess(table, row, odds, new, depth, values[number], counts)
            numbers[MADE, row] += 1
            number += 1


@jit_part
def want_drafts(table, odds, verify, absorb, step, depth, tokens, rate):  # type: ignore[no-untyped-def]
    """Which rows are worth one draft more, after so many; returns how many they are.

    The next windows have so many tokens until now.
    """
    chances, order, count = np.empty(len(table)), np.empty(len(table), np.int64), 0
    for row in range(len(table)):
        table[row, WANTED] = 0.0
        if table[row, DRAFTED] and depth < table[row, ASKED] and depth < table[row, LEFT]:
            at, factor = mean_at(line_of(table, row), depth), factor_of(table[row, EXPECTED], table[row, RIGHT])
            chance = table[row, SURVIVAL] * min(MOST, odds[at] / odds[at + 1] * factor)
            place = count
            while place and chances[place - 1] < chance:  # they are few
                chances[place], order[place] = chances[place - 1], order[place - 1]
                place -= 1
            chances[place], order[place] = chance, row
            count += 1
    taken, _ = worth(chances[:count], verify, absorb, step, tokens, rate)
    for place in range(taken):
        table[order[place], WANTED] = 1.0
    return taken


@jit_cached("i8(f8[:,::1], i8[:,::1], f8[::1], i8, f8[:,::1], f8[:,::1], f8[:,::1], i8, i8, f8)")
def add_and_want(  # type: ignore[no-untyped-def]
    table, numbers, odds, said, verify, absorb, step, depth, tokens, rate
):
    """`add_drafts`, then `want_drafts`: how many rows get one draft more."""
    add_drafts(table, numbers, odds, said, depth == 1)
    return want_drafts(table, odds, verify, absorb, step, depth, tokens, rate)


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
