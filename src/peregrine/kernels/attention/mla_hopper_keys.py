"""Which queries and keys a program of MLA has on Hopper, and the warp that copies the keys, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from peregrine.kernels.attention import plan
from peregrine.kernels.attention.blocks import find_tile_fn, power_of_two_fn
from peregrine.kernels.attention.hopper import BLOCK, WIDTH, slots_of

split_width = gluon.jit(plan.mla_split_width)
max_keys = gluon.jit(plan.mla_max_keys)
find_tile = gluon.jit(find_tile_fn)
power_of_two = gluon.jit(power_of_two_fn)


@gluon.jit
def rows_of_tile(  # type: ignore[no-untyped-def]
    tile, q_start, q_len, HEADS: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr
):
    """(token, head, whether there is such a pair) of each row of a tile."""
    HEADS_EACH: gl.constexpr = HEADS if HEADS < ROWS else ROWS
    QUERIES: gl.constexpr = ROWS // HEADS_EACH
    HEAD_TILES: gl.constexpr = (HEADS + HEADS_EACH - 1) // HEADS_EACH
    in_tile = gl.arange(0, ROWS, layout)
    query = tile // HEAD_TILES * QUERIES + in_tile // HEADS_EACH
    head = tile % HEAD_TILES * HEADS_EACH + in_tile % HEADS_EACH
    return q_start + query, head, (in_tile < QUERIES * HEADS_EACH) & (head < HEADS) & (query < q_len)


@gluon.jit
def key_limits(positions, tokens, live, num_keys):  # type: ignore[no-untyped-def]
    """How many keys each row sees; none if it is not live."""
    position = gl.load(positions + tokens, mask=live, other=0).to(gl.int32)
    return gl.where(live, gl.minimum(position + 1, num_keys), 0)


@gluon.jit
def num_sides(min_limit, max_limit):  # type: ignore[no-untyped-def]
    """2 if the rows of a tile, which see min_limit to max_limit keys, have splits of two widths, else 1."""
    return 1 + (max_limit > max_keys(split_width(min_limit))).to(gl.int32)


@gluon.jit
def program_splits(side, min_limit, max_limit, program, programs):  # type: ignore[no-untyped-def]
    """A program's part of the splits of one width: (first split, split after its last, their width, keys they hold)."""
    width = split_width(gl.where(side == 0, min_limit, max_limit))
    seen = gl.minimum(max_limit, max_keys(width))
    count = (seen + width - 1) // width
    return count * program // programs, count * (program + 1) // programs, width, seen


@gluon.jit
def copy_keys(  # type: ignore[no-untyped-def]
    keys, table, past, part, ring, PAGE: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr
):
    """One warp: copy block after block as places of the ring become free.

    Keys from before this forward are copied while the previous kernel is still running.
    """
    min_limit, max_limit, program, programs = part
    tiles, ready, free = ring
    PIECE: gl.constexpr = PAGE if PAGE < BLOCK else BLOCK
    i = 0
    for side in range(num_sides(min_limit, max_limit)):
        run, run_end, width, seen = program_splits(side, min_limit, max_limit, program, programs)
        begin, stop = run * width, gl.minimum(run_end * width, seen)
        slots = slots_of(table, begin, max_limit, PAGE, PIECE)
        next_slots = slots_of(table, begin + BLOCK, max_limit, PAGE, PIECE)
        for start in range(begin, stop, BLOCK):
            # Loaded two blocks ahead: behind copies of keys in flight a load takes as long as they do.
            far_slots = slots_of(table, start + 2 * BLOCK, max_limit, PAGE, PIECE)
            place = i % STAGES
            mbarrier.wait(free.index(place), ((i // STAGES) & 1) ^ 1)
            if start + BLOCK > past:  # holds keys of this forward
                gdc_wait()
            mbarrier.expect(ready.index(place), 2 * BLOCK * COLUMNS * WIDTH)
            for piece in gl.static_range(BLOCK // PIECE):
                for c in gl.static_range(COLUMNS):
                    column = tiles.index(place * COLUMNS + c).slice(piece * PIECE, PIECE)
                    tma.async_copy_global_to_shared(keys, [slots[piece], c * WIDTH], ready.index(place), column)
            slots, next_slots = next_slots, far_slots
            i += 1
