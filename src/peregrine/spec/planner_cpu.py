"""The inner loops of `planner.py`, compiled. Costs are sizes and milliseconds, [2, n] each (`Costs.curves`)."""

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
    rows, drafts, shortest, depths = len(lens), 0, lens[0], [0] * len(lens)
    for row in range(rows):
        taken[row] = 0
        drafts += lens[row]
        shortest = min(shortest, lens[row])
    verified = ms_at(verify, rows)
    rate = max(rate, rows / verified)
    best, won, gained, uneven = 0.0, 0.0, 0.0, False
    for count in range(1, drafts + 1):
        likeliest, highest = -1, -1.0  # of the rows' next drafts; of equals the least deep
        for row in range(rows):
            depth = depths[row]
            if depth < lens[row] and (
                survivals[row, depth] > highest or (survivals[row, depth] == highest and depth < depths[likeliest])
            ):
                likeliest, highest = row, survivals[row, depth]
        depths[likeliest] += 1
        won += highest
        net = won - rate * (ms_at(verify, rows + count) - verified)
        if net > best:
            best, gained, uneven = net, won, False
            for row in range(rows):
                taken[row] = depths[row]
                uneven = uneven or depths[row] != depths[0]
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
