"""The arithmetic both Triton attention kernels share, so that a query gets the same bits from either.

A query reads its keys in order, and the n-th key it reads has index n (see `attention.py`). Key indices are cut
into splits, splits into blocks, both at borders that are a function of the index alone. Blocks of a split are added
in order to a state that starts afresh; the states of splits are merged in order. A block or a split in which a query
sees nothing leaves its state as it was. Rows of a tile never mix, so which tile a query lies in changes nothing.

Kernels must be launched with SAME_BITS: a fused multiply-add where the other kernel has none would round apart.
"""

import triton
import triton.language as tl

from peregrine.kernels.attention.splits_triton import split_of, split_start

SAME_BITS = {"enable_fp_fusion": False, "num_warps": 4}

LOWEST = tl.constexpr(-1e30)  # below any score, yet finite: the difference of two of them is 0 and not NaN
LOG2_E = tl.constexpr(1.4426950408889634)
MASS_COLUMNS = tl.constexpr(16)  # the narrowest product there is


@triton.jit
def sight(  # type: ignore[no-untyped-def]
    positions, limits, tokens, live, past, num_keys, window, TREE: tl.constexpr, WINDOWED: tl.constexpr
):
    """The key indices [low, limit) that each row of a tile sees; a row that is not live sees none."""
    position = tl.load(positions + tokens, mask=live, other=0).to(tl.int32)
    limit = tl.load(limits + tokens, mask=live, other=0) if TREE else position + 1
    limit = tl.where(live, tl.minimum(limit, num_keys), 0)
    low = tl.zeros_like(limit)
    if WINDOWED:
        low = tl.maximum(tl.minimum(position + 1 - window, limit - 1), 0)
        if TREE:
            low = tl.minimum(low, past)  # ancestors are always seen
        low = tl.where(live, low, tl.max(tl.where(live, low, 0)))
    return low, limit


@triton.jit
def load_queries(  # type: ignore[no-untyped-def]
    q, tokens, heads, live, q_stride, D: tl.constexpr, D_PAD: tl.constexpr
):
    """A tile of queries [ROWS, D_PAD]; zeros where there is none."""
    dim = tl.arange(0, D_PAD)
    at = tokens.to(tl.int64) * q_stride + heads * D
    return tl.load(q + at[:, None] + dim[None, :], mask=live[:, None] & (dim < D)[None, :], other=0.0)


@triton.jit
def score_factor(scale, k_scale, SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
    """What turns a product of query and stored key into a power of 2."""
    factor = scale * LOG2_E
    if SCALED:
        factor = factor * tl.load(k_scale)
    return factor


@triton.jit
def store_outputs(  # type: ignore[no-untyped-def]
    out, tokens, heads, live, mass, sums, v_scale, HEADS: tl.constexpr, D: tl.constexpr, SCALED: tl.constexpr
):
    """Divide the sums by their mass and put them where their queries' outputs go: out is [N, HEADS, D]."""
    dim = tl.arange(0, sums.shape[1])
    outputs = sums / tl.where(live, mass, 1.0)[:, None]
    if SCALED:
        outputs = outputs * tl.load(v_scale)
    at = (tokens.to(tl.int64) * HEADS + heads) * D
    mask = live[:, None] & (dim < D)[None, :]
    tl.store(out + at[:, None] + dim[None, :], outputs.to(out.dtype.element_ty), mask=mask)


@triton.jit
def slots_of(  # type: ignore[no-untyped-def]
    start, lowest, farthest, table, path, past, PAGE: tl.constexpr, BLOCK: tl.constexpr, ON_PATH: tl.constexpr
):
    """Where the keys of a block lie; slot 0 or one beside it for those that no row sees."""
    PAGES: tl.constexpr = BLOCK // PAGE if BLOCK > PAGE else 1
    page = start // PAGE + tl.arange(0, PAGES)
    seen = (page * PAGE < farthest) & ((page + 1) * PAGE > lowest)
    first = tl.load(table + page, mask=seen, other=0).to(tl.int64) * PAGE  # [PAGES] the pages' first slots
    if PAGES > 1:
        slot = tl.reshape(first[:, None] + tl.arange(0, PAGE)[None, :], [BLOCK])
    else:
        slot = tl.reshape(first[:, None] + (start % PAGE + tl.arange(0, BLOCK))[None, :], [BLOCK])
    if ON_PATH:
        index = start + tl.arange(0, BLOCK)
        node_slot = tl.load(path + (index - past), mask=(index >= past) & (index < farthest), other=0)
        slot = tl.where(index < past, slot, node_slot)
    return slot


@triton.jit
def add_block(  # type: ignore[no-untyped-def]
    q,
    keys,
    values,
    table,
    path,
    past,
    low,
    limit,
    lowest,
    farthest,
    start,
    scale,
    top,
    mass,
    sums,
    D: tl.constexpr,
    STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    ON_PATH: tl.constexpr,
):
    """The state after one more block; a split's first block starts afresh.

    What no row sees is not even loaded. What only some rows see is hidden from the others by its score, and its value
    is multiplied by 0: stored values are always finite (see attention_slots_gpu.py).
    """
    dim = tl.arange(0, q.shape[1])
    index = start + tl.arange(0, BLOCK)
    seen = (index >= lowest) & (index < farthest)
    slot = slots_of(start, lowest, farthest, table, path, past, PAGE, BLOCK, ON_PATH) * STRIDE
    inside = dim < D
    k_places, v_places = keys + slot[None, :] + dim[:, None], values + slot[:, None] + dim[None, :]
    k = tl.load(k_places, mask=seen[None, :] & inside[:, None], other=0.0).to(q.dtype)  # [D_PAD, BLOCK]
    v = tl.load(v_places, mask=seen[:, None] & inside[None, :], other=0.0).to(q.dtype)  # [BLOCK, D_PAD]
    scores = tl.dot(q, k, input_precision="ieee") * scale  # [ROWS, BLOCK], as powers of 2
    visible = (index[None, :] >= low[:, None]) & (index[None, :] < limit[:, None])
    scores = tl.where(visible, scores, float("-inf"))
    begins = start == split_start(split_of(start))
    top = tl.where(begins, LOWEST, top)
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_top[:, None]).to(q.dtype)
    kept = tl.where(begins, 0.0, tl.exp2(top - new_top))[:, None]
    # The mass is a product, too: a reduction's order would change with the height of the tile.
    ones = tl.full([BLOCK, MASS_COLUMNS], 1.0, q.dtype)
    mass = tl.dot(weights, ones, mass * kept, input_precision="ieee")
    sums = tl.dot(weights, v, sums * kept, input_precision="ieee")
    return new_top, mass, sums


@triton.jit
def attend_run(  # type: ignore[no-untyped-def]
    q,
    keys,
    values,
    table,
    path,
    past,
    low,
    limit,
    live,
    begin,
    stop,
    scale,
    whole_top,
    whole_mass,
    whole_sums,
    part_sums,
    part_stats,
    place,
    D: tl.constexpr,
    STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    ON_PATH: tl.constexpr,
    APART: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Read the keys [begin, stop), a run of splits; a split's state is put aside if APART, else merged into the whole.

    ON_PATH: keys from `past` on are those of `path`.
    """
    ROWS: tl.constexpr = q.shape[0]
    D_PAD: tl.constexpr = q.shape[1]
    top = tl.full([ROWS], LOWEST, tl.float32)
    mass = tl.zeros([ROWS, MASS_COLUMNS], tl.float32)
    sums = tl.zeros([ROWS, D_PAD], tl.float32)
    lowest, farthest = tl.min(low), tl.max(limit)
    for start in tl.range(begin, stop, BLOCK, num_stages=STAGES):
        top, mass, sums = add_block(
            *(q, keys, values, table, path, past, low, limit, lowest, farthest, start, scale),
            *(top, mass, sums, D, STRIDE, PAGE, BLOCK, ON_PATH),
        )
        split = split_of(start)
        if (start + BLOCK == split_start(split + 1)) | (start + BLOCK >= stop):
            if APART:
                put_aside(part_sums, part_stats, place + split * ROWS, live, top, mass, sums)
            else:
                whole_top, whole_mass, whole_sums = merge(
                    whole_top, whole_mass, whole_sums, top, tl.max(mass, axis=1), sums
                )
    if APART and ON_PATH and stop <= begin:  # the path ends before this split
        put_aside(part_sums, part_stats, place + split_of(begin) * ROWS, live, top, mass, sums)
    return whole_top, whole_mass, whole_sums


@triton.jit
def put_aside(part_sums, part_stats, at, live, top, mass, sums):  # type: ignore[no-untyped-def]
    """Leave a split's state for whoever merges."""
    D_PAD: tl.constexpr = sums.shape[1]
    dim = tl.arange(0, D_PAD)
    tl.store(part_sums + at[:, None] * D_PAD + dim[None, :], sums, mask=live[:, None])
    tl.store(part_stats + at * 2, top, mask=live)
    tl.store(part_stats + at * 2 + 1, tl.max(mass, axis=1), mask=live)


@triton.jit
def first_state(sinks, heads, live, D_PAD: tl.constexpr, SINKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The state before any key: nothing, or the sink's own weight."""
    ROWS: tl.constexpr = heads.shape[0]
    if SINKS:
        sink = tl.load(sinks + heads, mask=live, other=0.0).to(tl.float32) * LOG2_E
        top = tl.maximum(sink, LOWEST)
        mass = tl.full([ROWS], 1.0, tl.float32)
    else:
        top = tl.full([ROWS], LOWEST, tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
    return top, mass, tl.zeros([ROWS, D_PAD], tl.float32)


@triton.jit
def merge(top, mass, sums, next_top, next_mass, next_sums):  # type: ignore[no-untyped-def]
    """The state of two runs of keys, the second read after the first."""
    new_top = tl.maximum(top, next_top)
    kept, added = tl.exp2(top - new_top), tl.exp2(next_top - new_top)
    mass = mass * kept + next_mass * added
    sums = sums * kept[:, None] + next_sums * added[:, None]
    return new_top, mass, sums
