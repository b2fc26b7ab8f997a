"""What a program of Hopper's latent attention reads: the rows of its tile, its share of their keys, and who asks."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from peregrine.kernels.attention.hopper_blocks import BLOCK, WIDTH, slots_of
from peregrine.kernels.attention.mla_blocks_triton import latent_reach, latent_width

width_of = gluon.jit(latent_width)
reach_of = gluon.jit(latent_reach)


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
def num_sides(nearest, farthest):  # type: ignore[no-untyped-def]
    """2 if the rows of a tile, which see from `nearest` to `farthest` keys, have splits of different widths, else 1."""
    return 1 + (farthest > reach_of(width_of(nearest))).to(gl.int32)


@gluon.jit
def share_of(side, nearest, farthest, program, programs):  # type: ignore[no-untyped-def]
    """What a program reads on one side: (first split, the split behind its last, their width, keys seen there)."""
    width = width_of(gl.where(side == 0, nearest, farthest))
    seen = gl.minimum(farthest, reach_of(width))
    count = (seen + width - 1) // width
    return count * program // programs, count * (program + 1) // programs, width, seen


@gluon.jit
def ask_for_latents(  # type: ignore[no-untyped-def]
    keys,
    table,
    past,
    nearest,
    farthest,
    program,
    programs,
    tiles,
    ready,
    free,
    PAGE: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One warp: asks for keys, block by block, as places become free; those from before this forward come early."""
    PIECE: gl.constexpr = PAGE if PAGE < BLOCK else BLOCK
    i = 0
    for side in range(num_sides(nearest, farthest)):
        run, run_end, width, seen = share_of(side, nearest, farthest, program, programs)
        begin, stop = run * width, gl.minimum(run_end * width, seen)
        slots = slots_of(table, begin, farthest, PAGE, PIECE)
        next_slots = slots_of(table, begin + BLOCK, farthest, PAGE, PIECE)
        for start in range(begin, stop, BLOCK):
            # Read long before they are needed: behind a flood of keys they take as long as these.
            far_slots = slots_of(table, start + 2 * BLOCK, farthest, PAGE, PIECE)
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
