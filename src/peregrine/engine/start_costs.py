"""The table of costs: rounds of several sizes are timed when the engine starts.

A part takes what the clock says, or the processor time of all threads where that is less: it is more on a machine that
does nothing else, and the clock's is more on one that is busy.
"""

import time
from collections.abc import Callable, Sequence

from peregrine.engine.round_costs import RoundCosts, middle
from peregrine.engine.round_times import RoundTimes
from peregrine.spec.planner import Costs

BETWEEN = 3, 5, 6, 10, 12  # tokens of rounds that are timed, too
TIME_LIMIT_S = 0.8  # of processor time, for all measurements
PASSES = 8  # over all sizes, at most
TIMED_DRAFTS = 3  # of each row, where a further draft is a step

TimeRound = Callable[[Sequence[int], int], RoundTimes]  # (tokens in each window, drafts that each row gets) -> times


def timed_windows(max_rows: int, longest: int) -> list[list[int]]:
    """The tokens of each row of rounds, in the order in which they are timed; between them costs are straight lines.

    1, 2, 4, ... rows of one token, all rows with 1, 2, 4, ... tokens; then, since kernels take a few rows at a time, so
    that costs rise in steps, sizes between, by as many rows as have as many tokens. No row has more than `longest`.
    Larger sizes are on the line through the last two, which must not lie on one step.
    """
    width = min(longest, 8 if max_rows <= 2 else 4 if max_rows <= 4 else 2)
    fewer = [1 << power for power in range((max_rows - 1).bit_length())]
    sizes = fewer + [max_rows << power for power in range(width.bit_length())]
    windows = list[list[int]]()
    between = [tokens for tokens in BETWEEN if tokens not in sizes and (max_rows <= 2 or 2 * tokens <= sizes[-1])]
    for tokens in sizes + between:
        rows = max(rows for rows in range(1, max_rows + 1) if tokens % rows == 0)
        if tokens // rows <= longest:
            windows.append([tokens // rows] * rows)
    return windows


def measure_costs(time_round: TimeRound, max_rows: int, depth: int, steps: int) -> RoundCosts:
    """Time rounds of several sizes in passes over all of them, as long as the time limit allows; the fastest count.

    All rows are drafted for, as they are in real rounds. A size whose turn never came is interpolated.
    """
    made = min(depth, steps, TIMED_DRAFTS)
    for lens in ([1], [2, 2][:max_rows]):  # on a new machine the first rounds compile kernels, for seconds
        time_round(lens, made)
    began = time.thread_time()
    verify: dict[int, float] = {}
    first: dict[int, float] = {}  # one draft, with what is absorbed
    more: dict[int, float] = {}  # all drafts
    parts = {min(made, 1): first} | ({made: more} if made > 1 else {})
    at_first: list[float] = []  # milliseconds that the first round of a size takes more
    for attempt in range(1 + PASSES):
        for lens in timed_windows(max_rows, depth + 1):
            tokens, late = sum(lens), time.thread_time() - began > TIME_LIMIT_S
            if late and (attempt > 1 or len(verify) > 1):
                break
            for drafts, part in parts.items():
                new = time_round(lens, drafts).ms if tokens not in part else None  # it allocates and records
                times = time_round(lens, drafts)
                if new is not None and part is first:  # of the second part, the verification is known
                    at_first.append(max(0.0, new - times.ms))
                for table, ms in ((verify, times.verify_ms), (part, times.first(steps=1))):
                    table[tokens] = min(table.get(tokens, ms), ms)
    if not steps:
        return RoundCosts(verify, first, {1: 0.0}, steps, recording_ms=middle(at_first))
    # Of the first drafts' time, what each further token of a window adds is absorbing it.
    low, high = min(max_rows, max(first)), max(first)
    slope = max(0.0, first[high] - first[low]) / (high - low) if high > low else 0.0
    firsts = {rows: max(0.0, ms - slope * rows) for rows, ms in first.items() if rows <= low}
    further = {rows: (more[rows] - first[rows]) / (made - 1) for rows in firsts if more.get(rows, 0.0) > first[rows]}
    ragged = 0.0
    if max_rows > 1:  # the first rounds allocate and record
        uneven, even = (min([time_round(lens, 1).ms for _ in range(6)][2:]) for lens in ((2, 1), (2, 2)))
        ragged = max(0.0, uneven - even)  # and more: it has a token less
    return RoundCosts(verify, {1: slope, 2: 2 * slope}, further or firsts, steps, firsts, ragged, middle(at_first))


def branched_ms(time_round: Callable[[], RoundTimes], tokens: int, costs: Costs) -> float:
    """Milliseconds that a round of one row takes more because its window, of so many tokens, is a tree's.

    `time_round` times one that drafts once.
    """
    time_round()  # the first one allocates and records
    return max(0.0, min(time_round().ms for _ in range(4)) - costs.round_ms(tokens, [1]))
