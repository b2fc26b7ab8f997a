"""Mixtures of experts on a GPU: rows are grouped by expert, and an expert's weights are read once for all of its rows.

    plan       pairs of (row, place in its choice) are cut into blocks that share an expert: see experts_plan_gpu.py
    gate_up    of each block: silu(gate) * up, with the norm's division, as in linear_gpu.py
    down       of each block, times the pair's weight
    combine    a row's answers in the order of its choice, and the residual; the stream is made ready for its next norm

Every output is one chain over its inputs in ascending order, and a row's answers are added in the order of its choice:
neither the tile, nor the way its block was found, nor the company changes a bit. The host knows how many blocks there
can be, but not how many there are: surplus programs leave at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.linear.tiles import Room
from peregrine.kernels.linear.triton import MAX_SQUARE, SQUARE_UNIT
from peregrine.kernels.moe.plan_triton import direct_block, most_blocks, plan, planned_block
from peregrine.kernels.moe.routing_rule import ExpertChoice
from peregrine.kernels.moe.tiles import DIRECT_ROWS, ExpertTile, pick_expert_tiles
from peregrine.kernels.residual import Residual
from peregrine.kernels.runtime.gpu import dense_rows, launch, shared_bytes
from peregrine.kernels.runtime.pdl import enter

MAX_ROWS = 4096  # of one pass; longer inputs are cut, and so is the memory that answers take
COMBINED = 512  # outputs of a program that adds up answers


def join_experts(
    stream: Residual,
    choice: ExpertChoice,
    gate_up: Tensor,
    down: Tensor,
    norm: Tensor | None,
    squares: Tensor,
    stale_squares: Tensor,
) -> tuple[Tensor, Tensor]:
    """(sum, sum * norm) of the experts' answers and the stream's values; the sum's squares are added to `squares`.

    gate_up is [E, 2 I, H] and down [E, H, I]; without a norm only the sum is made.
    """
    residual = stream.values.contiguous()
    out, scaled = torch.empty_like(residual), torch.empty_like(residual)
    for first in range(0, len(residual), MAX_ROWS):
        rows = slice(first, first + MAX_ROWS)
        scale = None if stream.squares is None else (stream.squares[rows], stream.eps)
        own = ExpertChoice(choice.experts[rows].contiguous(), choice.weights[rows].contiguous())
        answers = answer(stream.ready[rows], scale, own, gate_up, down)
        combine(answers, residual[rows], norm, (out[rows], scaled[rows], squares[rows], stale_squares[rows]))
    return out, scaled


def answer(
    x: Tensor,
    scale: tuple[Tensor, float] | None,
    choice: ExpertChoice,
    gate_up: Tensor,
    down: Tensor,
    tiles: tuple[ExpertTile, ExpertTile] | None = None,
) -> Tensor:
    """What each row's experts answer, weighted: [N, H] -> [N * choices, H]. `scale` is (squares, eps)."""
    (num_rows, choices), (num_experts, size, inner_size) = choice.experts.shape, down.shape
    num_pairs = num_rows * choices
    room = Room(shared_bytes(x.device), x.element_size())
    wide, narrow = tiles or pick_expert_tiles(num_pairs, num_experts, size, inner_size, room)
    direct = num_rows <= DIRECT_ROWS
    if direct:
        order, blocks, most = choice.experts, choice.experts, num_pairs  # nobody reads the first two
    else:
        order, blocks = plan(choice.experts, num_experts, wide.rows)
        most = most_blocks(num_pairs, num_experts, wide.rows)
    inner, answers = x.new_empty(num_pairs, inner_size), x.new_empty(num_pairs, size)
    x = dense_rows(x)
    squares, eps = scale or (None, 0.0)
    for tile, source, weight, out in ((wide, x, gate_up, inner), (narrow, inner, down, answers)):
        launch(
            block_kernel,
            (triton.cdiv(out.shape[1], tile.cols), most),
            *(source, weight, out, choice.experts, order, blocks),
            *(out if squares is None else squares, choice.weights),
            *(source.stride(0), num_pairs, eps),
            CHOICES=choices,
            SLOTS=triton.next_power_of_2(choices),
            DIRECT=direct,
            N=out.shape[1],
            K=source.shape[1],
            GATE=weight is gate_up,
            SCALE=squares is not None and weight is gate_up,
            ROWS=tile.rows,
            COLS=tile.cols,
            DEPTH=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
            pdl=True,
        )
    return answers


@triton.jit(do_not_specialize=["P"])
def block_kernel(  # type: ignore[no-untyped-def]
    x,  # [rows, K] of the stream with GATE, [P, K] by pair without
    weight,  # [E, N, K], or [E, 2 N, K] with GATE
    out,  # [P, N] by pair
    experts,  # [P] i32
    order,  # [P] i32
    blocks,  # [1 + 3 * most] i32
    squares,  # [rows] i64 of the stream that x was prepared from
    factors,  # [P] f32 weights of the pairs
    x_stride,
    P,
    eps,
    CHOICES: tl.constexpr,
    SLOTS: tl.constexpr,
    DIRECT: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GATE: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Some outputs of one expert's linear, for one block of its pairs."""
    # Down looks for its block early: gate_up stands before it, and has waited for the choice and the plan.
    if GATE:
        enter()
    if DIRECT:
        found, expert, pairs, live = direct_block(experts, P, CHOICES, SLOTS, ROWS)
    else:
        found, expert, pairs, live = planned_block(order, blocks, ROWS)
    if not found:
        return
    if not GATE:
        enter()
    rows = pairs // CHOICES if GATE else pairs
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    depth = tl.arange(0, DEPTH)
    # As in linear_gpu.py: the weight is the left matrix, and outputs past the last are others', not stored.
    w_places = weight + expert * ((2 if GATE else 1) * N * K) + (cols % N)[:, None] * K + depth[None, :]
    x_places = x + rows.to(tl.int64)[None, :] * x_stride + depth[:, None]
    # What a row is multiplied by is asked for before the loop: after it, everybody would wait for it.
    if SCALE:
        square = tl.load(squares + rows, mask=live, other=0)
    if not GATE:
        factor = tl.load(factors + pairs, mask=live, other=0.0)
    total = tl.zeros((COLS, ROWS), tl.float32)
    up = tl.zeros((COLS, ROWS), tl.float32)
    for start in range(0, K, DEPTH):
        values = tl.load(x_places + start, mask=live[None, :], other=0.0)
        total = tl.dot(tl.load(w_places + start), values, total, input_precision="ieee")
        if GATE:
            up = tl.dot(tl.load(w_places + N * K + start), values, up, input_precision="ieee")
    total, up = tl.trans(total), tl.trans(up)  # [ROWS, COLS]
    if SCALE:
        scale = (1.0 / tl.sqrt_rn(square.to(tl.float32) / (K * SQUARE_UNIT) + eps))[:, None]
        total, up = total * scale, up * scale
    total = total * tl.sigmoid(total) * up if GATE else total * factor[:, None]
    out_places = pairs.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(out + out_places, total.to(out.dtype.element_ty), mask=live[:, None] & (cols < N)[None, :])


def combine(answers: Tensor, residual: Tensor, norm: Tensor | None, made: tuple[Tensor, ...]) -> None:
    """Add up the answers [N * choices, H] of each row and the residual [N, H] into `made`.

    It is (sum, sum * norm, squares, stale squares), as `linear_add` makes them; without a norm the sum alone.
    """
    num_rows, size = residual.shape
    launch(
        combine_kernel,
        (triton.cdiv(size, COMBINED), num_rows),
        *(answers, residual, residual if norm is None else norm, *made),
        H=size,
        CHOICES=len(answers) // num_rows,
        READY=norm is not None,
        BLOCK=COMBINED,
        num_warps=4,
        pdl=True,
    )


@triton.jit
def combine_kernel(  # type: ignore[no-untyped-def]
    answers,  # [N * CHOICES, H]
    residual,  # [N, H]
    norm,  # [H]
    out,  # [N, H]
    scaled,  # [N, H]
    next_squares,  # [N] i64
    stale_squares,  # [N] i64
    H: tl.constexpr,
    CHOICES: tl.constexpr,
    READY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < H
    # What down did not write is read early: it waited for all of that itself.
    before = tl.load(residual + row * H + cols, mask=inside, other=0.0).to(tl.float32)
    if READY:
        norms = tl.load(norm + cols, mask=inside, other=0.0).to(tl.float32)
    enter()
    total = tl.load(answers + row * CHOICES * H + cols, mask=inside, other=0.0).to(tl.float32)
    for place in tl.static_range(1, CHOICES):
        total += tl.load(answers + (row * CHOICES + place) * H + cols, mask=inside, other=0.0).to(tl.float32)
    total += before
    result = total.to(out.dtype.element_ty)
    tl.store(out + row * H + cols, result, mask=inside)
    if READY:
        value = result.to(tl.float32)
        square = value * value
        ready = tl.where(square <= MAX_SQUARE, value * norms, float("nan"))
        tl.store(scaled + row * H + cols, ready.to(out.dtype.element_ty), mask=inside)
        square = tl.where(square <= MAX_SQUARE, square, 0.0) * SQUARE_UNIT
        tl.atomic_add(next_squares + row, tl.sum(square.to(tl.int64)), sem="relaxed")
        if tl.program_id(0) == 0:
            tl.store(stale_squares + row, tl.zeros((), tl.int64))
