"""The linear kernel for Hopper, in Gluon: the law of `linear_gpu.py`, with weights on their way before x is ready.

A program asks for its first tiles of weights as soon as it starts, which may be while the kernel before is still
running: weights depend on nobody. Only then it waits for that kernel, and asks for x. So the memory is kept busy
across launches, where small batches would leave it idle. The tensor memory accelerator copies tiles into a ring of
`STAGES` places; each step multiplies one tile and asks for the one that takes its place.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from peregrine.kernels.linear import tiles as linear_tiles

SQUARE_UNIT, MAX_SQUARE = gl.constexpr(linear_tiles.SQUARE_UNIT), gl.constexpr(linear_tiles.MAX_SQUARE)


def tiled(matrix: Tensor, rows: int, depth: int) -> TensorDescriptor:
    """A matrix as the copy engine sees it: in tiles of rows x depth, zeros past its last row."""
    number = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[matrix.dtype]
    layout = gl.NVMMASharedLayout.get_default_for([rows, depth], number)
    return TensorDescriptor.from_tensor(matrix, [rows, depth], layout)


@gluon.jit
def ask(w_desc, w_tiles, ready, place, col, depth, live, N: gl.constexpr, GATE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Ask for one step's weights: the gate's tile, and with GATE that of the half that is gated."""
    tma.async_copy_global_to_shared(w_desc, [col, depth], ready.index(place), w_tiles.index(place), live)
    if GATE:
        STAGES: gl.constexpr = w_tiles.shape[0] // 2
        beside = w_tiles.index(STAGES + place)
        tma.async_copy_global_to_shared(w_desc, [N + col, depth], ready.index(place), beside, live)


@gluon.jit(do_not_specialize=["M"])
def hopper_kernel(  # type: ignore[no-untyped-def]
    x_desc,  # [M, K] in tiles of ROWS x DEPTH
    w_desc,  # [N, K] or [2 N, K] in tiles of COLS x DEPTH
    bias,
    out,
    squares,
    residual,
    norm,
    scaled,
    next_squares,
    stale_squares,
    partial,
    arrived,
    M,
    eps,
    N: gl.constexpr,
    K: gl.constexpr,
    SCALE: gl.constexpr,
    BIAS: gl.constexpr,
    GATE: gl.constexpr,
    ADD: gl.constexpr,
    SPLIT: gl.constexpr,
    ROWS: gl.constexpr,
    COLS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Arguments as those of `linear_kernel`."""
    STEPS: gl.constexpr = K // SPLIT // DEPTH
    BYTES: gl.constexpr = (COLS * (2 if GATE else 1) + ROWS) * DEPTH * 2
    w_tiles = gl.allocate_shared_memory(w_desc.dtype, [STAGES * (2 if GATE else 1), COLS, DEPTH], w_desc.layout)
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [STAGES, ROWS, DEPTH], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(ready.index(place), count=1)
    fence_async_shared()
    part = gl.program_id(2)
    col, row = gl.program_id(0) * COLS, gl.program_id(1) * ROWS
    begin = part * (K // SPLIT)
    for place in gl.static_range(STAGES):
        live = place < STEPS
        mbarrier.expect(ready.index(place), BYTES, live)
        ask(w_desc, w_tiles, ready, place, col, begin + place * DEPTH, live, N, GATE)
    gdc_launch_dependents()
    gdc_wait()
    for place in gl.static_range(STAGES):
        live = place < STEPS
        tma.async_copy_global_to_shared(
            x_desc, [row, begin + place * DEPTH], ready.index(place), x_tiles.index(place), live
        )
    product: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, ROWS, 16]
    )
    total = gl.zeros((COLS, ROWS), gl.float32, product)
    up = gl.zeros((COLS, ROWS), gl.float32, product)
    for step in range(STEPS):
        here = step % STAGES
        mbarrier.wait(ready.index(here), (step // STAGES) & 1)
        x_tile = x_tiles.index(here).permute((1, 0))
        total = warpgroup_mma(w_tiles.index(here), x_tile, total, is_async=True)
        # While this step is multiplied, the place of the step before, which is done now, is filled again.
        if GATE:
            up = warpgroup_mma(w_tiles.index(STAGES + here), x_tile, up, is_async=True)
            total, up = warpgroup_mma_wait(2, deps=(total, up))
        else:
            total = warpgroup_mma_wait(1, deps=(total,))
        later = step - 1 + STAGES
        depth = begin + later * DEPTH
        more = (step > 0) & (later < STEPS)
        there = later % STAGES
        mbarrier.expect(ready.index(there), BYTES, more)
        ask(w_desc, w_tiles, ready, there, col, depth, more, N, GATE)
        tma.async_copy_global_to_shared(x_desc, [row, depth], ready.index(there), x_tiles.index(there), more)
    total, up = warpgroup_mma_wait(0, deps=(total, up))

    # Outputs lie side by side in memory, and so in a thread.
    near: gl.constexpr = gl.BlockedLayout(
        [4, 1], [COLS // 4 if COLS < 128 else 32, 128 // COLS if COLS < 128 else 1], [1, num_warps], [0, 1]
    )
    total = gl.convert_layout(total, near)
    up = gl.convert_layout(up, near)
    cols = col + gl.arange(0, COLS, gl.SliceLayout(1, near))
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(0, near))
    last = True
    if SPLIT > 1:
        tile = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
        inner = (rows - row)[None, :] * COLS + (cols - col)[:, None]
        gl.store(partial + (tile * SPLIT + part) * ROWS * COLS + inner, total)
        gl.thread_barrier()
        last = gl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1
        gl.thread_barrier()
        if last:
            total = gl.load(partial + tile * SPLIT * ROWS * COLS + inner, cache_modifier=".cg")
            for other in gl.static_range(1, SPLIT):
                total += gl.load(partial + (tile * SPLIT + other) * ROWS * COLS + inner, cache_modifier=".cg")
            gl.store(arrived + tile, 0)
    if last:
        if SCALE:
            mean = gl.load(squares + rows, mask=rows < M, other=0).to(gl.float32) / (K * SQUARE_UNIT)
            scale = (1.0 / gl.sqrt_rn(mean + eps))[None, :]
            total = total * scale
        if BIAS:
            total += gl.load(bias + cols % N).to(gl.float32)[:, None]
        if GATE:
            if SCALE:
                up = up * scale
            if BIAS:
                up += gl.load(bias + N + cols % N).to(gl.float32)[:, None]
            total = total / (1.0 + gl.exp(-total)) * up
        inside = (rows < M)[None, :] & (cols < N)[:, None]
        places = rows.to(gl.int64)[None, :] * N + cols[:, None]
        if ADD:
            total += gl.load(residual + places, mask=inside, other=0.0).to(gl.float32)
        result = total.to(out.dtype.element_ty)
        gl.store(out + places, result, mask=inside)
        if ADD:
            value = gl.where(inside, result.to(gl.float32), 0.0)
            norm_weights = gl.load(norm + cols % N).to(gl.float32)[:, None]
            square = value * value
            prepared = gl.where(square <= MAX_SQUARE, value * norm_weights, float("nan"))
            gl.store(scaled + places, prepared.to(out.dtype.element_ty), mask=inside)
            square = gl.where(square <= MAX_SQUARE, square, 0.0) * SQUARE_UNIT
            gl.atomic_add(next_squares + rows, gl.sum(square.to(gl.int64), axis=0), mask=rows < M, sem="relaxed")
            if gl.program_id(0) == 0:
                gl.store(stale_squares + rows, gl.zeros((ROWS,), gl.int64, gl.SliceLayout(0, near)), mask=rows < M)
