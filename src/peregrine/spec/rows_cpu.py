"""What is done for all rows of a round that is planned draft by draft, as a few calls (`engine/draft_rows.py`).

In Python it would take a hundred microseconds a round, and ten more for each row. `table` has a line and `numbers` a
column for each row (`draft_table.py`), `odds` a line for greedy and one for sampled requests (`Odds.line`).
verify, absorb, step [2, n] are sizes and milliseconds (`Costs.curves`).
"""

import math

import numpy as np

from peregrine.kernels.round import FINISH_NONE
from peregrine.kernels.runtime.host_jit import jit_cached, jit_part
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
)
from peregrine.spec.odds import (
    ALIKE,
    DEPTH_MEMORY,
    DEPTH_PRIOR,
    DEPTHS,
    EDGES,
    FIRST_GUESS,
    MEMORY,
    MOST,
    OWN_MEMORY,
    OWN_PRIOR,
    TENTHS,
    counts_in,
    depths_in,
    means_in,
    tenths_in,
)
from peregrine.spec.planner_cpu import trim, worth

WON, CORRECT, ENDED = 0, 1, 3  # columns of a verdict

counts_of, means_of, depths_of, tenths_of = map(jit_part, (counts_in, means_in, depths_in, tenths_in))


@jit_part
def add(count, right, tried, memory):  # type: ignore[no-untyped-def]
    """Count drafts; of more than `memory`, older ones count less."""
    count[0] += right
    count[1] += tried
    if count[1] > memory:
        count[0] /= 2
        count[1] /= 2


@jit_part
def note(odds, chance, tried, right):  # type: ignore[no-untyped-def]
    """Compare a chance with what came of it."""
    tenth = tenths_of(odds)[min(TENTHS - 1, int(chance * TENTHS))]
    tenth[0] += tried
    tenth[1] += chance * tried
    tenth[2] += right


@jit_part
def count_of(odds, depth, said):  # type: ignore[no-untyped-def]
    """The count of drafts of this depth of which this is said."""
    place = 0
    while place < len(EDGES) and said >= EDGES[place]:
        place += 1
    return counts_of(odds)[min(depth, DEPTHS - 1), place]


@jit_part
def chance_of(odds, depth, said):  # type: ignore[no-untyped-def]
    """The chance of a draft, by what is said of it; if nothing is, by its depth (`Odds.chances_by_depth`)."""
    if said == said:
        count = count_of(odds, depth, said)
        return count[0] / count[1]
    depths, chance, weight = depths_of(odds), FIRST_GUESS, DEPTH_PRIOR
    for level in range(min(depth, DEPTHS - 1) + 1):
        chance = (depths[level, 0] + weight * chance) / (depths[level, 1] + weight)
        weight = ALIKE
    return chance


@jit_part
def factor_of(own):  # type: ignore[no-untyped-def]
    """`RequestOdds.factor`."""
    return (own[1] + OWN_PRIOR) / (own[0] + OWN_PRIOR)


@jit_part
def fade(own, rounds):  # type: ignore[no-untyped-def]
    """Rounds have passed: old verdicts count less, so that a request that rests is tried again."""
    kept = OWN_MEMORY**rounds
    own[0] *= kept
    own[1] *= kept


@jit_part
def own_of(row):  # type: ignore[no-untyped-def]
    """The record of a row's request."""
    return row[EXPECTED : RIGHT + 1]


@jit_part
def drafts_of(row, new):  # type: ignore[no-untyped-def]
    """The drafts in a row's window, or the new ones: [K, 3]."""
    size = (len(row) - DRAFTS) // 2
    first = DRAFTS + size if new else DRAFTS
    return row[first : first + size].reshape((size // 3, 3))


@jit_part
def put_guess(row, odds, new, depth, said, counts):  # type: ignore[no-untyped-def]
    """Write down a draft that was made; `counts`: among those of its depth."""
    chance, draft = chance_of(odds, depth, said), drafts_of(row, new)[depth]
    draft[SAID], draft[CHANCE], draft[ENGINE] = said, min(MOST, chance * factor_of(own_of(row))), chance
    if counts:
        add(means_of(odds)[min(depth, DEPTHS - 1)], chance, 1, MEMORY)


@jit_part
def judge(odds, own, depth, said, chance, engine, right):  # type: ignore[no-untyped-def]
    """Count a verdict on a draft all of whose predecessors were right."""
    level = min(depth, DEPTHS - 1)
    if said == said:
        add(count_of(odds, depth, said), right, 1, MEMORY)
    if said != said or level == 0:  # further ones are made only where those before seemed likely
        add(depths_of(odds)[level], right, 1, DEPTH_MEMORY)
    own[0] += engine
    own[1] += right
    note(odds, chance, 1, right)


@jit_cached("f8(f8[:,::1], i8[:,::1], f8[:,::1], f8[:,::1], f8, f8, b1)")
def choose_windows(table, numbers, odds, verify, ragged, rate, whole):  # type: ignore[no-untyped-def]
    """How many of the drafts that it is offered each row verifies: what pays, or the `whole` window.

    Of offered drafts that are not known, the drafter said nothing. Returns the tokens that they are expected to give.
    """
    rows, won = len(table), 0.0
    survivals, most = np.empty((rows, table.shape[1])), np.empty(rows, np.int64)
    for place in range(rows):
        row, held = table[place], numbers[OFFERED, place]
        for depth in range(numbers[HELD, place], held):
            put_guess(row, odds[int(row[KIND])], False, depth, math.nan, True)
        drafts, survival = drafts_of(row, False), 1.0
        for depth in range(held):
            survival *= drafts[depth, CHANCE]
            survivals[place, depth] = survival
            won += survival
        most[place] = min(held, int(max(0.0, min(row[ASKED], row[LEFT]))))
        numbers[HELD, place] = numbers[LENS, place] = held
    if not whole:
        won = trim(survivals, most, verify, ragged, rate, numbers[LENS])
    for place in range(rows):
        numbers[LENS, place] += 1
    return won


@jit_cached("void(f8[:,::1], i8[:,::1], f8[:,::1], f8[::1], b1)")
def add_drafts(table, numbers, odds, said, first):  # type: ignore[no-untyped-def]
    """One more draft of each row that is drafted for, of which this is said; `first`: the first ones of a round.

    Drafts of rows that are not wanted were made because others are; they do not count for the means.
    """
    number, made = 0, numbers[MADE]
    for place in range(len(table)):
        row = table[place]
        if first:
            made[place], row[SURVIVAL], row[WANTED] = 0, 1.0, row[DRAFTED]
        if row[DRAFTED]:
            put_guess(row, odds[int(row[KIND])], True, made[place], said[number], row[WANTED] > 0.0)
            row[SURVIVAL] *= drafts_of(row, True)[made[place], CHANCE]
            made[place] += 1
            number += 1


@jit_part
def want_drafts(table, odds, verify, absorb, step, depth, tokens, rate):  # type: ignore[no-untyped-def]
    """Which rows are worth one draft more, after so many; returns how many they are.

    The next windows have so many tokens until now.
    """
    chances, order, count = np.empty(len(table)), np.empty(len(table), np.int64), 0
    for number in range(len(table)):
        row = table[number]
        row[WANTED] = 0.0
        if row[DRAFTED] and depth < row[ASKED] and depth < row[LEFT]:
            mean = means_of(odds[int(row[KIND])])[min(depth, DEPTHS - 1)]
            chance = row[SURVIVAL] * min(MOST, mean[0] / mean[1] * factor_of(own_of(row)))
            place = count
            while place and chances[place - 1] < chance:  # they are few
                chances[place], order[place] = chances[place - 1], order[place - 1]
                place -= 1
            chances[place], order[place] = chance, number
            count += 1
    taken, _ = worth(chances[:count], verify, absorb, step, tokens, rate)
    for place in range(taken):
        table[order[place], WANTED] = 1.0
    return taken


@jit_cached("i8(f8[:,::1], i8[:,::1], f8[:,::1], f8[::1], b1, f8[:,::1], f8[:,::1], f8[:,::1], i8, i8, f8)")
def add_and_want(  # type: ignore[no-untyped-def]
    table, numbers, odds, said, first, verify, absorb, step, depth, tokens, rate
):
    """`add_drafts`, then `want_drafts`: how many rows get one draft more."""
    add_drafts(table, numbers, odds, said, first)
    return want_drafts(table, odds, verify, absorb, step, depth, tokens, rate)


@jit_cached("i8(f8[:,::1], i8[:,::1], f8[:,::1], i8[:,::1], i8[::1])")
def judge_windows(table, numbers, odds, verdicts, correct):  # type: ignore[no-untyped-def]
    """Count a round's verdicts [R, columns] on the drafts that were verified; then windows have the new drafts.

    Where windows branch, correct [R] are the right drafts of the chains; else it is empty. Returns the round's tokens.
    """
    won = 0
    for place in range(len(table)):
        row, verdict = table[place], verdicts[place]
        own, line, drafts = own_of(row), odds[int(row[KIND])], drafts_of(row, False)
        right = correct[place] if len(correct) else verdict[CORRECT]
        known = right if verdict[ENDED] != FINISH_NONE and right == verdict[CORRECT] else right + 1
        fade(own, 1)
        for depth in range(min(known, numbers[LENS, place] - 1)):
            draft = drafts[depth]
            judge(line, own, depth, draft[SAID], draft[CHANCE], draft[ENGINE], 1.0 if depth < right else 0.0)
        half = (len(row) - DRAFTS) // 2
        for number in range(DRAFTS, DRAFTS + half):
            row[number] = row[number + half]
        numbers[HELD, place], numbers[MADE, place] = numbers[MADE, place], 0
        row[LEFT] -= verdict[WON]
        won += 1 + verdict[CORRECT]
    return won


@jit_cached("void(f8[::1], f8[::1], i8[::1], i8[::1], f8[:,::1], f8[:,::1])")
def judge_chains(odds, own, known, right, read, made):  # type: ignore[no-untyped-def]
    """Count the verdicts of rounds of one request (`Odds.judge_chains`), and the drafts that they made."""
    for number in range(len(known)):
        fade(own, 1)
        factor = factor_of(own)
        for depth in range(known[number]):
            said = read[number, 1 + depth]
            chance = chance_of(odds, depth, said)
            good = 1.0 if depth < right[number] else 0.0
            judge(odds, own, depth, said, min(MOST, chance * factor), chance, good)
        for depth in range(int(made[number, 0])):
            chance = chance_of(odds, depth, made[number, 1 + depth])
            add(means_of(odds)[min(depth, DEPTHS - 1)], chance, 1, MEMORY)


@jit_cached("void(f8[::1], f8[:,::1], i8, i8[:,::1], i8[:,::1])")
def judge_counts(odds, own, rounds, tried, right):  # type: ignore[no-untyped-def]
    """Count the verdicts of many rounds (`Odds.judge_rounds`)."""
    rows, most = tried.shape
    chances = np.empty(most)
    for depth in range(most):
        chances[depth] = chance_of(odds, depth, math.nan)
    for row in range(rows):
        fade(own[row], rounds)
        factor = factor_of(own[row])
        for depth in range(most):
            count, correct = tried[row, depth], right[row, depth]
            own[row, 0] += chances[depth] * count
            own[row, 1] += correct
            note(odds, min(MOST, chances[depth] * factor), count, correct)
    for depth in range(most):
        count, correct = 0, 0
        for row in range(rows):
            count += tried[row, depth]
            correct += right[row, depth]
        add(depths_of(odds)[min(depth, DEPTHS - 1)], correct, count, DEPTH_MEMORY)
