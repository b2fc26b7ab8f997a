"""The inner loops of `planner.py`, compiled. Costs are sizes and milliseconds, [2, n] each (`Costs.curves`)."""

import numpy as np

from peregrine.kernels.runtime.host_jit import jit_cached, jit_part


@jit_part
def ms_at(points, size):  # type: ignore[no-untyped-def]
    """`planner.ms_at`."""
    last = points.shape[1] - 1
    if last == 0:
        return points[1, 0]
    right = 1
    while right < last and points[0, right] < size:
        right += 1
    low, below, high, above = points[0, right - 1], points[1, right - 1], points[0, right], points[1, right]
    return max(0.0, below + (above - below) * (size - low) / (high - low))


@jit_cached("f8(f8[:,::1], i8[::1], f8[:,::1], f8, f8, i8[::1])")
def trim(survivals, lens, verify, ragged, rate, taken):  # type: ignore[no-untyped-def]
    """`planner.trim_windows` of drafts with these survivals [R, K], of which each row has so many; writes taken [R].

    Returns the tokens that these drafts are expected to give.
    """
    rows, drafts, shortest = len(lens), 0, lens[0]
    for row in range(rows):
        taken[row] = 0
        drafts += lens[row]
        shortest = min(shortest, lens[row])
    verified, order = ms_at(verify, rows), np.empty(drafts, np.int64)
    rate = max(rate, rows / verified)
    best, most, won, gained = 0.0, 0, 0.0, 0.0
    for count in range(drafts):
        likeliest, highest = -1, -1.0  # of the rows' next drafts; of equals the least deep
        for row in range(rows):
            depth = taken[row]
            if depth < lens[row] and (
                survivals[row, depth] > highest or (survivals[row, depth] == highest and depth < taken[likeliest])
            ):
                likeliest, highest = row, survivals[row, depth]
        taken[likeliest] += 1
        order[count] = likeliest
        won += highest
        net = won - rate * (ms_at(verify, rows + count + 1) - verified)
        if net > best:
            best, most, gained = net, count + 1, won
    for count in range(most, drafts):
        taken[order[count]] -= 1
    uneven = False
    for row in range(rows):
        uneven = uneven or taken[row] != taken[0]
    if uneven:  # windows of one length may give more, since they cost less
        best, won = best - rate * ragged, 0.0
        for depth in range(shortest + 1):
            for row in range(rows if depth else 0):
                won += survivals[row, depth - 1]
            net = won - rate * (ms_at(verify, rows * (1 + depth)) - verified)
            if net > best:
                best, gained = net, won
                for row in range(rows):
                    taken[row] = depth
    return gained


@jit_cached("Tuple((i8, f8))(f8[::1], f8[:,::1], f8[:,::1], f8[:,::1], i8, f8)")
def worth(survivals, verify, absorb, step, tokens, rate):  # type: ignore[no-untyped-def]
    """`planner.worth_taking`; `step` is that of the level."""
    best, taken, won = 0.0, 0, 0.0
    before = ms_at(verify, tokens) + ms_at(absorb, tokens)
    for count in range(1, len(survivals) + 1):
        won += survivals[count - 1]
        read = ms_at(verify, tokens + count) + ms_at(absorb, tokens + count)
        net = won - rate * (read - before + ms_at(step, count))
        if net > best:
            best, taken = net, count
    return taken, best
