"""What is done for all rows of a round that is planned draft by draft, as a few calls (`engine/draft_rows.py`).

In Python it would take a hundred microseconds a round, and ten more for each row. `table` has a line and `numbers` a
column for each row (`draft_table.py`), `odds` a line for greedy and one for sampled requests (`Odds.line`).
verify, absorb, step [2, n] are sizes and milliseconds (`Costs.curves`). What is called in every round gets the address
of (table, numbers, odds), its `state`, and that of its curves (`kernels/runtime/arrays.py`).
"""

import math

import numpy as np

from peregrine.kernels.round import FINISH_NONE
from peregrine.kernels.runtime.arrays import WORDS
from peregrine.kernels.runtime.host_jit import doubles_at, floats_at, jit_cached, jit_part, longs_at
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
from peregrine.spec.odds import LINE, MEMORY, MOST, OWN_MEMORY
from peregrine.spec.odds_cpu import add, chance_of, factor_of, judge, mean_at
from peregrine.spec.planner_cpu import trim, worth

WON, CORRECT, ENDED = 0, 1, 3  # columns of a verdict

depth_of = jit_part(depth_in)


@jit_part
def doubles_of(arrays, number):  # type: ignore[no-untyped-def]
    """One of the arrays in a list, of float64."""
    words = longs_at(arrays + 8 * WORDS * number, WORDS)
    return doubles_at(words[0], (words[1], words[2]))


@jit_part
def state_at(arrays):  # type: ignore[no-untyped-def]
    """(table, numbers, odds)."""
    words = longs_at(arrays + 8 * WORDS, WORDS)
    numbers, odds = longs_at(words[0], (words[1], words[2])), doubles_of(arrays, 2)
    return doubles_of(arrays, 0), numbers, odds.reshape(-1)


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
def judge_rows(table, numbers, odds, verdicts, correct):  # type: ignore[no-untyped-def]
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


@jit_cached("i8(i8, i8[:,::1], i8[::1])")
def judge_windows(state, verdicts, correct):  # type: ignore[no-untyped-def]
    """`judge_rows` alone."""
    table, numbers, odds = state_at(state)
    return judge_rows(table, numbers, odds, verdicts, correct)


@jit_cached("Tuple((f8, i8))(i8, i8[:,::1], b1, i8, f8, f8, b1)")
def choose_windows(state, verdicts, offers_made, curves, ragged, rate, whole):  # type: ignore[no-untyped-def]
    """How many of the drafts that it is offered each row verifies: what pays, or the `whole` window.

    `offers_made`: it is offered the drafts that were made. Of offered drafts that are not known, the drafter said
    nothing. Verdicts of the round before are taken in first, if there are any. Returns the tokens that the drafts are
    expected to give, and those of the round before.
    """
    table, numbers, odds = state_at(state)
    verify = doubles_of(curves, 0)
    rows, won = len(table), 0.0
    before = judge_rows(table, numbers, odds, verdicts, np.empty(0, np.int64)) if len(verdicts) else 0
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


@jit_part
def add_to_rows(table, numbers, odds, said, first):  # type: ignore[no-untyped-def]
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


@jit_cached("void(i8, i8, b1)")
def add_drafts(state, said, first):  # type: ignore[no-untyped-def]
    """`add_to_rows` alone."""
    table, numbers, odds = state_at(state)
    add_to_rows(table, numbers, odds, said, first)


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


@jit_cached("i8(i8, i8, i8, i8, i8, f8)")
def add_and_want(state, said, curves, depth, tokens, rate):  # type: ignore[no-untyped-def]
    """`add_to_rows`, then `want_drafts`: how many rows get one draft more."""
    table, numbers, odds = state_at(state)
    add_to_rows(table, numbers, odds, said, depth == 1)
    verify, absorb, step = doubles_of(curves, 0), doubles_of(curves, 1), doubles_of(curves, 2)
    return want_drafts(table, odds, verify, absorb, step, depth, tokens, rate)
