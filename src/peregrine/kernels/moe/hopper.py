"""Experts of many rows on Hopper, in Gluon: the arithmetic of `triton.py`, bit for bit. Three steps:

    gather    gives every (row, expert) pair a place and copies its row there; a block of ROWS places has one expert
              (`gather_triton.py`)
    gate_up   a grouped linear over all blocks, with the activation
    down      a grouped linear over all blocks, with the router's weight of each pair

A tile of a linear is one block by COLS outputs of its expert. Programs are persistent: each computes tile after tile,
as in `linear/hopper_ring.py`. One warp copies tiles by TMA; two groups of four warps multiply and store, each one half
of the block's places. The last block of an expert is seldom full. Places without a pair hold undefined values that
nothing reads, and a group whose half holds no pair does not multiply.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from peregrine.kernels.linear.hopper import tiled
from peregrine.kernels.linear.hopper_chunks import in_chunks, pick, store_chunk
from peregrine.kernels.linear.hopper_ring import (
    CHUNK,
    COLS,
    DEPTH,
    HEIGHT,
    multiply,
    new_ring,
    request_inputs,
    request_weights,
    weight_tiles,
)
from peregrine.kernels.moe.gather_triton import gated, gather
from peregrine.kernels.moe.reference import ExpertChoice
from peregrine.kernels.runtime.gpu import launch, multiprocessors
from peregrine.kernels.runtime.layouts import product_layout

ROWS = gl.constexpr(2 * HEIGHT.value)  # of a block: two groups of warps multiply them
NEIGHBOURS = gl.constexpr(4)  # blocks, often of one expert, whose tiles of the same columns follow each other


@gluon.jit
def tile_of(n, num_blocks, COL_TILES: gl.constexpr):  # type: ignore[no-untyped-def]
    """(block, column tile) of a program's n-th tile, ordered so that NEIGHBOURS blocks read a weight tile from L2."""
    item = gl.program_id(0) + n * gl.num_programs(0)
    group, inside = item // (NEIGHBOURS * COL_TILES), item % (NEIGHBOURS * COL_TILES)
    height = gl.minimum(num_blocks - group * NEIGHBOURS, NEIGHBOURS)
    return group * NEIGHBOURS + inside % height, inside // height


@gluon.jit
def num_tiles(blocks, COL_TILES: gl.constexpr):  # type: ignore[no-untyped-def]
    """(number of blocks, number of this program's tiles)."""
    num_blocks = gl.load(blocks)
    programs = gl.num_programs(0)
    return num_blocks, (num_blocks * COL_TILES - gl.program_id(0) + programs - 1) // programs


@gluon.jit
def copy_tiles(  # type: ignore[no-untyped-def]
    x_desc, w_desc, blocks, ring, N: gl.constexpr, STEPS: gl.constexpr, COL_TILES: gl.constexpr, GATE: gl.constexpr
):
    """One warp: copy the inputs and weights of all tiles into the ring."""
    x_tiles, _, ready, free, _ = ring
    STAGES: gl.constexpr = ready.shape[0]
    gdc_wait()
    num_blocks, count = num_tiles(blocks, COL_TILES)
    i = 0
    for n in range(count):
        block, col = tile_of(n, num_blocks, COL_TILES)
        expert = gl.load(blocks + 1 + 2 * block)
        for step in range(STEPS):
            place = i % STAGES
            mbarrier.wait(free.index(place), ((i // STAGES) & 1) ^ 1)
            arrived = ready.index(place)
            mbarrier.expect(arrived, (ROWS + COLS) * DEPTH * 2)
            request_inputs(x_desc, x_tiles, ready, place, block * ROWS, step * DEPTH, num_blocks * ROWS)
            first = expert * (2 * N // 8 if GATE else N)
            request_weights(w_desc, ring, place, first, col * COLS, step * DEPTH, True, COLS, GATE)
            i += 1


@gluon.jit
def finish_tiles(  # type: ignore[no-untyped-def]
    WHICH: gl.constexpr,
    blocks,
    factors,
    out_desc,
    buffers,
    ring,
    STEPS: gl.constexpr,
    COL_TILES: gl.constexpr,
    SCALE: gl.constexpr,
    GATE: gl.constexpr,
):
    """Four warps: multiply half WHICH of the places of every tile, apply factors and activation, and store."""
    _, _, ready, free, lead = ring
    STAGES: gl.constexpr = ready.shape[0]
    OUT_COLS: gl.constexpr = COLS // 2 if GATE else COLS
    product: gl.constexpr = product_layout(CHUNK)
    gdc_wait()
    gdc_launch_dependents()
    num_blocks, count = num_tiles(blocks, COL_TILES)
    if WHICH == 1:
        mbarrier.wait(lead, 0, pred=count > 0)
    i = 0
    for n in range(count):
        block, col = tile_of(n, num_blocks, COL_TILES)
        row = block * ROWS + WHICH * HEIGHT
        if (WHICH == 0) | (gl.load(blocks + 2 + 2 * block) > WHICH * HEIGHT):
            total, _same, i = multiply(ring, i, WHICH, STEPS, COLS, 0)
            chunks, ups = in_chunks(total, GATE)
            if SCALE:
                factor = gl.load(factors + row + gl.arange(0, HEIGHT, gl.SliceLayout(1, product)))[:, None]
            for c in range(len(chunks)):
                chunk, up = pick(chunks, c), pick(ups, c)
                if SCALE:
                    chunk, up = chunk * factor, up * factor
                if GATE:
                    chunk = gated(chunk, up)
                store_chunk(chunk, row, col * OUT_COLS + c * CHUNK, out_desc, buffers.index(c % 2))
        else:
            for _step in range(STEPS):
                mbarrier.wait(ready.index(i % STAGES), (i // STAGES) & 1)
                gl.thread_barrier()
                mbarrier.arrive(free.index(i % STAGES), count=1)
                i += 1
    tma.store_wait(0)


@gluon.jit
def experts_kernel(  # type: ignore[no-untyped-def]
    x_desc,  # [places, K] in tiles of HEIGHT x DEPTH
    w_desc,  # [E * N, K] in tiles of COLS / 2 x DEPTH, or with GATE [E * 2 N, K] in tiles of gates and ups
    out_desc,  # [places, N] in tiles of HEIGHT x CHUNK
    blocks,  # [1 + 2 * most] i32
    factors,  # [places] f32, with SCALE
    N: gl.constexpr,
    K: gl.constexpr,
    SCALE: gl.constexpr,
    GATE: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One linear of all experts. Grid (programs,): program p computes tiles p, p + programs, and so on."""
    STEPS: gl.constexpr = K // DEPTH
    OUT_COLS: gl.constexpr = COLS // 2 if GATE else COLS
    COL_TILES: gl.constexpr = (N + OUT_COLS - 1) // OUT_COLS
    ring = new_ring(x_desc, w_desc, 2, 8, GATE)
    first_buffers = gl.allocate_shared_memory(out_desc.dtype, [2, HEIGHT, CHUNK], out_desc.layout)
    second_buffers = gl.allocate_shared_memory(out_desc.dtype, [2, HEIGHT, CHUNK], out_desc.layout)
    gl.warp_specialize(
        [
            (finish_tiles, (0, blocks, factors, out_desc, first_buffers, ring, STEPS, COL_TILES, SCALE, GATE)),
            (finish_tiles, (1, blocks, factors, out_desc, second_buffers, ring, STEPS, COL_TILES, SCALE, GATE)),
            (copy_tiles, (x_desc, w_desc, blocks, ring, N, STEPS, COL_TILES, GATE)),
        ],
        [4, 1],
        [240, 24],  # registers per thread of the second and third; the first gets the rest, 240 as well
    )


def placed_outputs(
    x: Tensor, scale: tuple[Tensor, float] | None, choice: ExpertChoice, gate_up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor]:
    """(weighted outputs of all pairs [places, H], place of each pair [N * choices] i32).

    Arguments as for `expert_outputs`.
    """
    gathered, factors, blocks, places = gather(x, scale, choice, len(down), ROWS.value)
    inner = x.new_empty(len(gathered), down.shape[2])
    programs = multiprocessors(x.device, 1)
    for source, weight, out, factor in (
        (
            gathered,
            weight_tiles(gate_up.flatten(0, 1), True, len(gate_up)),
            inner,
            factors[0] if scale is not None else None,
        ),
        (inner, weight_tiles(down.flatten(0, 1), False), gathered, factors[1]),
    ):
        launch(
            experts_kernel,
            (programs,),
            *(tiled(source, HEIGHT.value, DEPTH.value), weight, tiled(out, HEIGHT.value, CHUNK.value)),
            *(blocks, factors if factor is None else factor),
            N=out.shape[1],
            K=source.shape[1],
            SCALE=factor is not None,
            GATE=out is inner,
            num_warps=4,
            pdl=True,
        )
    return gathered, places
