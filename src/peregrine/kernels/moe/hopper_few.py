"""Experts of few rows on Hopper, in Gluon: both linears in one launch, with the bits of `triton.py`.

There is one program for each multiprocessor, and all of them run at once. A tile is 32 gates of an expert with their
ups, or 64 outputs of its down. A program computes its tiles of gate_up, then its tiles of down. Most tiles are dealt
beforehand, so that programs read as much as each other; the last ones of down are drawn by whoever is done.

One warp copies weights by TMA into one ring for all tiles; four multiply, finish and store. So memory stays busy
between two tiles and between the two linears: where a program waits for what others compute of gate_up, its ring fills
with weights of down. Shared experts come first: their weights are copied before the choice of the others is known.

All rows are multiplied with each expert that is chosen, since a matrix instruction for fewer takes no less time; of
down only the rows that chose it are stored.
"""

import functools

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from peregrine.kernels.linear.hopper import tile_layout, tiled
from peregrine.kernels.moe.gather_triton import gated
from peregrine.kernels.moe.hopper_few_work import (
    COLS,
    COUNTERS,
    DEPTH,
    GATES,
    PLACES,
    ROWS,
    copy_weights,
    drawn,
    gate_tile,
    list_experts,
    work_of,
)
from peregrine.kernels.moe.reference import ExpertChoice
from peregrine.kernels.residual.triton import root_mean_square
from peregrine.kernels.runtime.gpu import dense_rows, launch, multiprocessors

STAGES = 8  # steps in the ring


@gluon.constexpr_function
def power_of_two(number):  # type: ignore[no-untyped-def]
    """The lowest one that is not below this number."""
    return 1 << (number - 1).bit_length()


@gluon.jit
def load_rows(x, stride, count, INPUTS: gl.constexpr, PAD: gl.constexpr, MODIFIER: gl.constexpr):  # type: ignore[no-untyped-def]
    """Rows x [count, INPUTS], `stride` apart, as [ROWS, PAD]; the rest is zeros.

    By plain loads: a copy by TMA would come after those of weights that are under way.
    """
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, flat))[:, None]
    col = gl.arange(0, PAD, gl.SliceLayout(0, flat))[None, :]
    return gl.load(x + row * stride + col, mask=(row < count) & (col < INPUTS), other=0.0, cache_modifier=MODIFIER)


@gluon.jit
def keep_rows(x_rows, values):  # type: ignore[no-untyped-def]
    """Store rows [ROWS, PAD] in shared memory, for matrix instructions."""
    x_rows.store(values)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def multiply(x_tiles, ring, i, STEPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """(sums of one tile [COLS, ROWS], steps done so far)."""
    w_tiles, ready, free = ring
    STAGES: gl.constexpr = ready.shape[0]
    product: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    total = gl.zeros((COLS, ROWS), gl.float32, product)
    for step in range(STEPS):
        place = i % STAGES
        mbarrier.wait(ready.index(place), (i // STAGES) & 1)
        for half in gl.static_range(2):
            x_tile = x_tiles.index(2 * step + half).permute((1, 0))
            total = warpgroup_mma(w_tiles.index(2 * place + half), x_tile, total, is_async=True)
        total = warpgroup_mma_wait(2, deps=(total,))
        gl.thread_barrier()
        mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), count=1, pred=step > 0)  # the step before is done
        i += 1
    total = warpgroup_mma_wait(0, deps=(total,))
    gl.thread_barrier()
    mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), count=1)
    return total, i


@gluon.jit
def finish_tiles(  # type: ignore[no-untyped-def]
    pointers,
    sizes,
    x_rows,
    y_rows,
    listed,
    ring,
    EXPERTS: gl.constexpr,
    SHARED: gl.constexpr,
    CHOICES: gl.constexpr,
    PAIRS: gl.constexpr,
    BINS: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    SCALE: gl.constexpr,
):
    """Four warps: multiply, finish and store all tiles."""
    x, squares, experts, factors, inner, out, numbers, done = pointers
    x_stride, M, eps = sizes
    _, ready, _ = ring
    NUMBER: gl.constexpr = x_rows.dtype
    WIDTH: gl.constexpr = x_rows.shape[1]
    DOWN_WIDTH: gl.constexpr = y_rows.shape[1]
    TILES: gl.constexpr = N // GATES
    DOWN_TILES: gl.constexpr = K // COLS
    x_tiles = x_rows._reinterpret(NUMBER, [WIDTH // DEPTH, ROWS, DEPTH], x_rows.layout)
    y_tiles = y_rows._reinterpret(NUMBER, [DOWN_WIDTH // DEPTH, ROWS, DEPTH], y_rows.layout)
    gdc_wait()
    gdc_launch_dependents()
    live = list_experts(experts, M * CHOICES, numbers, EXPERTS, SHARED, PAIRS, BINS)
    mbarrier.arrive(listed, count=1)
    num_gates, first_down, own_downs, _fixed, downs = work_of(live, N, K)
    near: gl.constexpr = gl.BlockedLayout([2, 1], [16, 2], [1, 4], [0, 1])
    row = gl.arange(0, ROWS, gl.SliceLayout(0, near))
    if SCALE:
        coarse = gl.load(squares + 2 * row, mask=row < M, other=0)
        fine = gl.load(squares + 2 * row + 1, mask=row < M, other=0)
        scale = (1.0 / root_mean_square(coarse, fine, eps, K))[None, :]
    keep_rows(x_rows, load_rows(x, x_stride, M, K, WIDTH, ""))
    i = 0
    for n in range(num_gates):
        total, i = multiply(x_tiles, ring, i, K // (2 * DEPTH))
        gate, up = gl.split(gl.permute(gl.reshape(total, [COLS // 16, 2, 8, ROWS]), [0, 2, 3, 1]))
        gate = gl.convert_layout(gl.reshape(gate, [GATES, ROWS]), near)
        up = gl.convert_layout(gl.reshape(up, [GATES, ROWS]), near)
        if SCALE:
            gate, up = gate * scale, up * scale
        item = gate_tile(n)
        place = item // TILES
        col = item % TILES * GATES + gl.arange(0, GATES, gl.SliceLayout(1, near))
        gl.store(inner + (place * ROWS + row)[None, :] * N + col[:, None], gated(gate, up).to(NUMBER))
        gl.thread_barrier()
        gl.atomic_add(done + place, 1, sem="release")
    held, m = -1, 0
    pair = row * 0 - 1
    factor = row.to(gl.float32)
    down = drawn(m, i, first_down, own_downs, numbers, ready)
    while down < downs:
        own = down // DOWN_TILES
        if own != held:
            expert = gl.load(numbers + own)
            pair = row * 0 - 1
            for choice in gl.static_range(CHOICES):
                theirs = gl.load(experts + row * CHOICES + choice, mask=row < M, other=-1)
                pair = gl.where(theirs == expert, row * CHOICES + choice, pair)
            factor = gl.load(factors + pair, mask=pair >= 0, other=0.0)
            while gl.atomic_add(done + own, 0, sem="acquire") < TILES:
                pass
            gl.thread_barrier()
            keep_rows(y_rows, load_rows(inner + own * ROWS * N, N, ROWS, N, DOWN_WIDTH, ".cg"))
            held = own
        sums, i = multiply(y_tiles, ring, i, N // (2 * DEPTH))
        result = gl.convert_layout(sums, near) * factor[None, :]
        out_col = down % DOWN_TILES * COLS + gl.arange(0, COLS, gl.SliceLayout(1, near))
        gl.store(out + pair[None, :] * K + out_col[:, None], result.to(NUMBER), mask=(pair >= 0)[None, :])
        m += 1
        down = drawn(m, i, first_down, own_downs, numbers, ready)


@gluon.jit(do_not_specialize=["M"])
def few_experts_kernel(  # type: ignore[no-untyped-def]
    gate_desc,  # [E * 2 N, K] in tiles of 8 gates, 8 ups, 8 gates and so on
    down_desc,  # [E * K, N] in tiles of COLS x DEPTH
    x,  # [M, K]
    squares,  # [M, 2] i64, with SCALE
    experts,  # [M, CHOICES] i32
    factors,  # [M * CHOICES] f32
    inner,  # [most experts, ROWS, N]
    out,  # [M * CHOICES, K]
    numbers,  # [programs, PLACES] i32
    done,  # [COUNTERS] i32, zeros before
    x_stride,
    M,
    eps,
    EXPERTS: gl.constexpr,
    SHARED: gl.constexpr,
    CHOICES: gl.constexpr,
    PAIRS: gl.constexpr,
    BINS: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    SCALE: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid (programs,), all of them resident: they wait for each other."""
    NUMBER: gl.constexpr = down_desc.dtype
    x_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DEPTH], NUMBER)
    w_tiles = gl.allocate_shared_memory(NUMBER, [2 * STAGES, COLS, DEPTH], down_desc.layout)
    x_rows = gl.allocate_shared_memory(NUMBER, [ROWS, power_of_two(K)], x_layout)
    y_rows = gl.allocate_shared_memory(NUMBER, [ROWS, power_of_two(N)], x_layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    listed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    mbarrier.init(listed, count=1)
    fence_async_shared()
    numbers += gl.program_id(0) * PLACES
    ring = w_tiles, ready, free
    pointers = x, squares, experts, factors, inner, out, numbers, done
    sizes = x_stride, M, eps
    gl.warp_specialize(
        [
            (
                finish_tiles,
                (pointers, sizes, x_rows, y_rows, listed, ring, EXPERTS, SHARED, CHOICES, PAIRS, BINS, N, K, SCALE),
            ),
            (copy_weights, (gate_desc, down_desc, numbers, done, listed, ring, EXPERTS, SHARED, N, K)),
        ],
        [1],
        [40],
    )


def few_outputs(
    x: Tensor, scale: tuple[Tensor, float] | None, choice: ExpertChoice, gate_up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor]:
    """(weighted outputs of each row's experts [N * choices, H], counters that have to be set to zero).

    Arguments as for `expert_outputs`.
    """
    x = dense_rows(x)
    (num_rows, choices), (count, size, inner_size) = choice.experts.shape, down.shape
    num_pairs, bins = num_rows * choices, triton.next_power_of_2(max(count, 128))
    inner = x.new_empty(min(num_pairs, count), ROWS.value, inner_size)
    outputs = x.new_empty(num_pairs, size)
    programs = multiprocessors(x.device, 1)
    numbers = torch.empty(programs, PLACES.value, dtype=torch.int32, device=x.device)
    done, (squares, eps) = counters(x.device), scale or (outputs, 0.0)
    launch(
        few_experts_kernel,
        (programs,),
        *(gate_tiles(gate_up), tiled(down.flatten(0, 1), COLS.value, DEPTH.value)),
        *(x, squares, choice.experts, choice.weights, inner, outputs, numbers, done),
        *(x.stride(0), num_rows, eps),
        EXPERTS=count,
        SHARED=choice.num_shared,
        CHOICES=choices,
        PAIRS=triton.next_power_of_2(ROWS.value * choices),
        BINS=bins,
        N=inner_size,
        K=size,
        SCALE=scale is not None,
        STAGES=STAGES,
        num_warps=4,
        pdl=True,
    )
    return outputs, done


def gate_tiles(gate_up: Tensor) -> TensorDescriptor:
    """The TMA descriptor of gates and ups [E, 2 N, K] in tiles of 8 gates, 8 ups and so on."""
    experts, outputs, inputs = gate_up.shape[0], gate_up.shape[1] // 2, gate_up.shape[2]
    block = [GATES.value // 8, 2, 8, DEPTH.value]
    shape, strides = [(2 * experts - 1) * outputs // 8, 2, 8, inputs], [8 * inputs, outputs * inputs, inputs, 1]
    return TensorDescriptor(gate_up, shape, strides, block, tile_layout(tuple(block), gate_up.dtype))


@functools.cache
def counters(device: torch.device) -> Tensor:
    """`done` of all launches on a device: zeros again after the addition that follows each of them."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)
