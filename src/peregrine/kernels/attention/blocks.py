"""Device functions that the Triton attention kernels share, so that a query gets the same bits from each of them.

A query reads its keys in order, and the n-th key it reads has index n (see `reference.py`). Key indices are cut into
splits, splits into blocks, both at borders that are a function of the index alone. The blocks of a split are added in
order to a state (m, l, acc) that starts empty; the states of splits are merged in order. A block or split in which a
query sees nothing leaves its state as it was. Rows of a tile never mix, so the tile of a query changes no bit.

m is the top of the scores so far, l the sum of weights, acc the weighted sum of values; scores are powers of 2. A top
moves only to a score that exceeds it by more than SLACK: weights reach 2**SLACK, and a state is seldom rescaled (by
exactly 1 where no top moved, so a kernel may leave that out). Where products are fused with additions is written out;
kernels must be launched with SAME_BITS: one where another kernel has none would round differently.
"""

import triton
import triton.language as tl

from peregrine.config import MAX_NODES
from peregrine.kernels.attention.plan import split_of_index, start_of_split
from peregrine.kernels.runtime.fence import fence_copies

SAME_BITS = {"enable_fp_fusion": False, "num_warps": 4}

NODES = tl.constexpr(MAX_NODES)
LOWEST = tl.constexpr(-1e30)  # below any score, yet finite: the difference of two of them is 0 and not NaN
SLACK = tl.constexpr(8.0)  # a weight of 2**8 is far from the largest float16, 2**16
LOG2_E = tl.constexpr(1.4426950408889634)
WGMMA_ROWS = tl.constexpr(64)  # of a tile whose products Hopper computes from shared memory
L_COLUMNS = tl.constexpr(16)  # columns of l: the narrowest product there is

split_of = triton.jit(split_of_index)
split_start = triton.jit(start_of_split)


@triton.jit
def row_of_tile(tile, row, GROUP: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(query of its window, head of its group, whether there is such a head) of some rows of a tile."""
    HEADS: tl.constexpr = GROUP if GROUP < ROWS else ROWS
    QUERIES: tl.constexpr = ROWS // HEADS
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    query = (tile // HEAD_TILES) * QUERIES + row // HEADS
    head = (tile % HEAD_TILES) * HEADS + row % HEADS
    return query, head, (row < QUERIES * HEADS) & (head < GROUP)


@triton.jit
def tile_rows(tile, GROUP: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """`row_of_tile` of all rows of a tile."""
    return row_of_tile(tile, tl.arange(0, ROWS), GROUP, ROWS)


def row_queries_fn(q_starts, row):  # type: ignore[no-untyped-def]
    """(first token, how many queries) of a row."""
    q_start = tl.load(q_starts + row).to(tl.int32)
    return q_start, tl.load(q_starts + row + 1).to(tl.int32) - q_start


def find_tile_fn(place, q_starts, num_rows, QUERIES: tl.constexpr, HEAD_TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """(row, first token, queries of the row, tile) of a place: row r's begin at place q_starts[r] // QUERIES + r."""
    row, after = 0, num_rows
    while after - row > 1:
        middle = (row + after) // 2
        starts_before = tl.load(q_starts + middle).to(tl.int32) // QUERIES + middle <= place // HEAD_TILES
        row = tl.where(starts_before, middle, row)
        after = tl.where(starts_before, after, middle)
    q_start = tl.load(q_starts + row).to(tl.int32)
    q_len = tl.load(q_starts + row + 1).to(tl.int32) - q_start
    return row, q_start, q_len, place - (q_start // QUERIES + row) * HEAD_TILES


def power_of_two_fn(exponent):  # type: ignore[no-untyped-def]
    """2 to a whole number that is not above 0, exactly; 0 where that is too small for a normal float32."""
    biased = tl.maximum(exponent, -127.0) + (2.0**23 + 127.0)  # its lowest bits are the biased exponent
    return (biased.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)


def next_top_fn(top, largest):  # type: ignore[no-untyped-def]
    """The top after scores of which this is the largest."""
    return tl.where(largest > top + SLACK, largest, top)


next_top = triton.jit(next_top_fn)
row_queries = triton.jit(row_queries_fn)  # the plain functions are also compiled into the Gluon kernels
find_tile = triton.jit(find_tile_fn)
power_of_two = triton.jit(power_of_two_fn)


@triton.jit
def visible_range(  # type: ignore[no-untyped-def]
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
def slots_of(  # type: ignore[no-untyped-def]
    start, min_low, max_limit, table, path, past, PAGE: tl.constexpr, BLOCK: tl.constexpr, ON_PATH: tl.constexpr
):
    """Slots of the keys of a block; on the scratch page for pages that no row sees.

    ON_PATH: keys from index `past` on are a tree node's ancestors, whose slots are listed in `path`.
    """
    PAGES: tl.constexpr = BLOCK // PAGE if BLOCK > PAGE else 1
    page = start // PAGE + tl.arange(0, PAGES)
    seen = (page * PAGE < max_limit) & ((page + 1) * PAGE > min_low)
    first = tl.load(table + page, mask=seen, other=0).to(tl.int64) * PAGE  # [PAGES] the pages' first slots
    if PAGES > 1:
        slot = tl.reshape(first[:, None] + tl.arange(0, PAGE)[None, :], [BLOCK])
    else:
        slot = tl.reshape(first[:, None] + (start % PAGE + tl.arange(0, BLOCK))[None, :], [BLOCK])
    if ON_PATH:
        index = start + tl.arange(0, BLOCK)
        node_slot = tl.load(path + (index - past), mask=(index >= past) & (index < max_limit), other=0)
        slot = tl.where(index < past, slot, node_slot)
    return slot


@triton.jit
def load_queries(  # type: ignore[no-untyped-def]
    q, tokens, heads, live, q_stride, D: tl.constexpr, D_PAD: tl.constexpr
):
    """A tile of queries [ROWS, D_PAD]; zeros in rows that are not live."""
    dim = tl.arange(0, D_PAD)
    at = tokens.to(tl.int64) * q_stride + heads * D
    return tl.load(q + at[:, None] + dim[None, :], mask=live[:, None] & (dim < D)[None, :], other=0.0)


@triton.jit
def score_factor(scale, k_scale, SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
    """What makes a product of query and stored key a power of 2."""
    factor = scale * LOG2_E
    if SCALED:
        factor = factor * tl.load(k_scale)
    return factor


@triton.jit
def store_outputs(  # type: ignore[no-untyped-def]
    out, tokens, heads, live, l_i, acc, v_scale, HEADS: tl.constexpr, D: tl.constexpr, SCALED: tl.constexpr
):
    """acc / l_i goes to the outputs of the tile's queries: out is [N, HEADS, D]."""
    dim = tl.arange(0, acc.shape[1])
    outputs = acc / tl.where(live, l_i, 1.0)[:, None]
    if SCALED:
        outputs = outputs * tl.load(v_scale)
    at = (tokens.to(tl.int64) * HEADS + heads) * D
    mask = live[:, None] & (dim < D)[None, :]
    tl.store(out + at[:, None] + dim[None, :], outputs.to(out.dtype.element_ty), mask=mask)


@triton.jit
def initial_state(sinks, heads, live, D_PAD: tl.constexpr, SINKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(m_i, l_i, acc) before any key: empty, or the weight of the sink."""
    ROWS: tl.constexpr = heads.shape[0]
    if SINKS:
        sink = tl.load(sinks + heads, mask=live, other=0.0).to(tl.float32) * LOG2_E
        m_i = tl.maximum(sink, LOWEST)
        l_i = tl.full([ROWS], 1.0, tl.float32)
    else:
        m_i = tl.full([ROWS], LOWEST, tl.float32)
        l_i = tl.zeros([ROWS], tl.float32)
    return m_i, l_i, tl.zeros([ROWS, D_PAD], tl.float32)


@triton.jit
def merge(m_i, l_i, acc, next_m, next_l, next_acc):  # type: ignore[no-untyped-def]
    """The state of two runs of keys, the second read after the first."""
    new_m = next_top(m_i, next_m)
    kept, added = tl.exp2(m_i - new_m), tl.exp2(next_m - new_m)
    l_i = tl.fma(next_l, added, l_i * kept)
    acc = tl.fma(next_acc, added[:, None], acc * kept[:, None])
    return new_m, l_i, acc


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
    min_low,
    max_limit,
    start,
    scale,
    m_i,
    l_i,
    acc,
    D: tl.constexpr,
    STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    ON_PATH: tl.constexpr,
):
    """A split's state after one more block; its first block starts from an empty state.

    Keys that no row sees are not loaded. A key that only some rows see has a score of -inf for the others, and its
    value is multiplied by 0: stored values are always finite (see kv_write_triton.py).
    """
    dim = tl.arange(0, q.shape[1])
    index = start + tl.arange(0, BLOCK)
    seen = (index >= min_low) & (index < max_limit)
    slot = slots_of(start, min_low, max_limit, table, path, past, PAGE, BLOCK, ON_PATH) * STRIDE
    inside = dim < D
    k_places, v_places = keys + slot[None, :] + dim[:, None], values + slot[:, None] + dim[None, :]
    k = tl.load(k_places, mask=seen[None, :] & inside[:, None], other=0.0).to(q.dtype)  # [D_PAD, BLOCK]
    v = tl.load(v_places, mask=seen[:, None] & inside[None, :], other=0.0).to(q.dtype)  # [BLOCK, D_PAD]
    if q.shape[0] >= WGMMA_ROWS:
        fence_copies(start)
    scores = tl.dot(q, k, input_precision="ieee")  # [ROWS, BLOCK], not yet times scale
    visible = (index[None, :] >= low[:, None]) & (index[None, :] < limit[:, None])
    scores = tl.where(visible, scores, float("-inf"))
    begins = start == split_start(split_of(start))
    m_i = tl.where(begins, LOWEST, m_i)
    new_m = next_top(m_i, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(tl.fma(scores, scale, -new_m[:, None])).to(q.dtype)
    kept = tl.where(begins, 0.0, tl.exp2(m_i - new_m))[:, None]
    # l_i is a product, too: the order of a reduction would change with the height of the tile.
    ones = tl.full([BLOCK, L_COLUMNS], 1.0, q.dtype)
    l_i = tl.dot(weights, ones, l_i * kept, input_precision="ieee")
    acc = tl.dot(weights, v, acc * kept, input_precision="ieee")
    return new_m, l_i, acc


@triton.jit
def attend_keys(  # type: ignore[no-untyped-def]
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
    total_m,
    total_l,
    total_acc,
    partial_acc,
    partial_ml,
    place,
    D: tl.constexpr,
    STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    ON_PATH: tl.constexpr,
    SPLIT_KV: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Read keys [begin, stop), a run of splits; each split's state is stored if SPLIT_KV, else merged into the total.

    `place` is where each row's first partial is stored.
    """
    ROWS: tl.constexpr = q.shape[0]
    D_PAD: tl.constexpr = q.shape[1]
    m_i = tl.full([ROWS], LOWEST, tl.float32)
    l_i = tl.zeros([ROWS, L_COLUMNS], tl.float32)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    min_low, max_limit = tl.min(low), tl.max(limit)
    for start in tl.range(begin, stop, BLOCK, num_stages=STAGES):
        m_i, l_i, acc = add_block(
            *(q, keys, values, table, path, past, low, limit, min_low, max_limit, start, scale),
            *(m_i, l_i, acc, D, STRIDE, PAGE, BLOCK, ON_PATH),
        )
        split = split_of(start)
        if (start + BLOCK == split_start(split + 1)) | (start + BLOCK >= stop):
            if SPLIT_KV:
                store_partial(partial_acc, partial_ml, place + split * ROWS, live, m_i, l_i, acc)
            else:
                total_m, total_l, total_acc = merge(total_m, total_l, total_acc, m_i, tl.max(l_i, axis=1), acc)
    if SPLIT_KV and ON_PATH and stop <= begin:  # the path ends before this split: an empty partial
        store_partial(partial_acc, partial_ml, place + split_of(begin) * ROWS, live, m_i, l_i, acc)
    return total_m, total_l, total_acc


@triton.jit
def store_partial(partial_acc, partial_ml, at, live, m_i, l_i, acc):  # type: ignore[no-untyped-def]
    """Store a split's state for the merge kernel."""
    D_PAD: tl.constexpr = acc.shape[1]
    dim = tl.arange(0, D_PAD)
    tl.store(partial_acc + at[:, None] * D_PAD + dim[None, :], acc, mask=live[:, None])
    tl.store(partial_ml + at * 2, m_i, mask=live)
    tl.store(partial_ml + at * 2 + 1, tl.max(l_i, axis=1), mask=live)
