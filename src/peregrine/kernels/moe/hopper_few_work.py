"""Which tiles a program of `hopper_few.py` has, and the warp that copies their weights, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from peregrine.kernels.moe import tiles

ROWS = gl.constexpr(tiles.FEW_ROWS)
DEPTH = gl.constexpr(tiles.FEW_DEPTH // 2)  # inputs of a tile in shared memory; a step has two
COLS = gl.constexpr(64)  # weight rows of a tile: what a matrix instruction takes
GATES = gl.constexpr(32)  # outputs of gate_up that they are
FIXED = gl.constexpr(13)  # sixteenths of the tiles of down that are dealt beforehand
# A program's numbers: experts that are chosen, tiles of down that it has drawn, how many experts there are.
LISTED = gl.constexpr(tiles.FEW_PAIRS)
LIVE = gl.constexpr(2 * tiles.FEW_PAIRS)
PLACES = gl.constexpr(3 * tiles.FEW_PAIRS)
# The counters of all programs: tiles of gate_up that are finished, by the expert's place in the list; tiles drawn.
QUEUE = gl.constexpr(tiles.FEW_PAIRS)
COUNTERS = 2 * tiles.FEW_PAIRS


@gluon.jit
def plus(a, b):  # type: ignore[no-untyped-def]
    """Of two numbers, for `associative_scan`."""
    return a + b


@gluon.jit
def list_experts(  # type: ignore[no-untyped-def]
    experts, count, numbers, EXPERTS: gl.constexpr, SHARED: gl.constexpr, PAIRS: gl.constexpr, BINS: gl.constexpr
):
    """Write the numbers of the experts that `count` pairs chose: shared ones, then the others; returns how many."""
    wide: gl.constexpr = gl.BlockedLayout([PAIRS, 1], [1, 32], [1, 4], [0, 1])  # a thread has all pairs
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    pair = gl.arange(0, PAIRS, gl.SliceLayout(1, wide))
    chosen = gl.load(experts + pair, mask=pair < count, other=-1)
    hit = gl.max((chosen[:, None] == gl.arange(0, BINS, gl.SliceLayout(0, wide))[None, :]).to(gl.int32), axis=0)
    hit = gl.convert_layout(hit, line)
    number = gl.arange(0, BINS, line)
    place = gl.associative_scan(hit, 0, plus) - 1 + SHARED
    place = gl.where(number < EXPERTS - SHARED, place, number - (EXPERTS - SHARED))
    gl.store(numbers + place, number, mask=hit > 0)
    live = gl.sum(hit, axis=0)
    gl.store(numbers + LIVE, live)
    gl.thread_barrier()
    return live


@gluon.jit
def gate_tile(n):  # type: ignore[no-untyped-def]
    """A program's n-th tile of gate_up. The last programs have one more than the first, and later tiles of down."""
    return gl.num_programs(0) - 1 - gl.program_id(0) + n * gl.num_programs(0)


@gluon.jit
def draw_tile(m, first_down, own_downs, fixed, numbers, done):  # type: ignore[no-untyped-def]
    """A program's m-th tile of down: its own come first, then those that no program has drawn; noted for `drawn`."""
    tile = first_down + m
    if m >= own_downs:
        tile = fixed + gl.atomic_add(done + QUEUE, 1, sem="relaxed")
        gl.store(numbers + LISTED + (m - own_downs) % LISTED, tile)
    return tile


@gluon.jit
def drawn(m, i, first_down, own_downs, numbers, ready):  # type: ignore[no-untyped-def]
    """What `draw_tile` has returned for m: it is there when the tile's first weights, step i of all, are."""
    STAGES: gl.constexpr = ready.shape[0]
    tile = first_down + m
    if m >= own_downs:
        mbarrier.wait(ready.index(i % STAGES), (i // STAGES) & 1)
        tile = gl.load(numbers + LISTED + (m - own_downs) % LISTED)
    return tile


@gluon.jit
def downs_before(program, live, fixed, N: gl.constexpr, K: gl.constexpr):  # type: ignore[no-untyped-def]
    """How many tiles of down the programs before this one have: who has fewer tiles of gate_up has more of them."""
    STEPS: gl.constexpr = K // (2 * DEPTH)
    DOWN_STEPS: gl.constexpr = N // (2 * DEPTH)
    programs = gl.num_programs(0)
    gates = live * (N // GATES)
    total = gates * STEPS + fixed * DOWN_STEPS
    before = program * (gates // programs) + gl.maximum(program + gates % programs - programs, 0)
    even = (program * total - before * STEPS * programs) // (programs * DOWN_STEPS)
    is_fair = total >= (gates + programs - 1) // programs * STEPS * programs
    return gl.where(is_fair, even, program * fixed // programs)


@gluon.jit
def work_of(live, N: gl.constexpr, K: gl.constexpr):  # type: ignore[no-untyped-def]
    """This program's part if so many experts are chosen, and what all programs share.

    (tiles of gate_up, first tile of down, tiles of down; tiles of down that are not drawn, all tiles of down)
    """
    program = gl.program_id(0)
    downs = live * (K // COLS)
    fixed = downs * FIXED // 16
    first_down = downs_before(program, live, fixed, N, K)
    own_downs = downs_before(program + 1, live, fixed, N, K) - first_down
    num_gates = (live * (N // GATES) + program) // gl.num_programs(0)
    return num_gates, first_down, own_downs, fixed, downs


@gluon.jit
def request(desc, row, depth, place, w_tiles, ready, GATE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start the copies of one step's weights, two tiles."""
    mbarrier.expect(ready.index(place), 2 * COLS * DEPTH * 2)
    for half in gl.static_range(2):
        tile = w_tiles.index(2 * place + half)
        if GATE:
            tile = tile._reinterpret(desc.dtype, desc.block_shape, desc.layout)
            tma.async_copy_global_to_shared(desc, [row, 0, 0, depth + half * DEPTH], ready.index(place), tile)
        else:
            tma.async_copy_global_to_shared(desc, [row, depth + half * DEPTH], ready.index(place), tile)


@gluon.jit
def copy_weights(  # type: ignore[no-untyped-def]
    gate_desc,
    down_desc,
    numbers,
    done,
    listed,
    ring,
    EXPERTS: gl.constexpr,
    SHARED: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
):
    """One warp: copy the weights of all tiles into the ring, and draw tiles of down when the program has no more.

    If the first tile is one of a shared expert, its copies start while the previous kernel is still running.
    """
    w_tiles, ready, free = ring
    STAGES: gl.constexpr = ready.shape[0]
    STEPS: gl.constexpr = K // (2 * DEPTH)
    DOWN_STEPS: gl.constexpr = N // (2 * DEPTH)
    TILES: gl.constexpr = N // GATES
    DOWN_TILES: gl.constexpr = K // COLS
    i, first = 0, 0
    if SHARED and gate_tile(0) < SHARED * TILES:
        first = 1
        shared_row = (EXPERTS - SHARED) * (2 * N // 8) + gate_tile(0) // TILES * (2 * N // 8)
        shared_row += gate_tile(0) % TILES * (GATES // 8)
        for shared_step in range(STEPS):
            mbarrier.wait(free.index(i % STAGES), ((i // STAGES) & 1) ^ 1)
            request(gate_desc, shared_row, 2 * shared_step * DEPTH, i % STAGES, w_tiles, ready, True)
            i += 1
    gdc_wait()
    mbarrier.wait(listed, 0)
    num_gates, first_down, own_downs, fixed, downs = work_of(gl.load(numbers + LIVE), N, K)
    for n in range(first, num_gates):
        item = gate_tile(n)
        row = gl.load(numbers + item // TILES) * (2 * N // 8) + item % TILES * (GATES // 8)
        for step in range(STEPS):
            mbarrier.wait(free.index(i % STAGES), ((i // STAGES) & 1) ^ 1)
            request(gate_desc, row, 2 * step * DEPTH, i % STAGES, w_tiles, ready, True)
            i += 1
    m = 0
    down = draw_tile(m, first_down, own_downs, fixed, numbers, done)
    while down < downs:
        down_row = gl.load(numbers + down // DOWN_TILES) * K + down % DOWN_TILES * COLS
        for down_step in range(DOWN_STEPS):
            mbarrier.wait(free.index(i % STAGES), ((i // STAGES) & 1) ^ 1)
            request(down_desc, down_row, 2 * down_step * DEPTH, i % STAGES, w_tiles, ready, False)
            i += 1
        m += 1
        down = draw_tile(m, first_down, own_downs, fixed, numbers, done)
    mbarrier.wait(free.index(i % STAGES), ((i // STAGES) & 1) ^ 1)
    mbarrier.arrive(ready.index(i % STAGES), count=1)  # for the tile that is none
