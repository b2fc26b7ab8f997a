"""Mixtures of experts on a GPU: rows are grouped by expert, and an expert's weights are read once for all of its rows.

    plan       pairs of (row, place in its choice) are cut into blocks that share an expert (`plan_triton.py`)
    gate_up    of each block: silu(gate) * up or another gated activation, with the norm's division
    down       of each block, times the pair's weight
    combine    a row's expert outputs in the order of its choice, and the residual; first half of the next norm

Every output is one chain over its inputs in ascending order, and a row's expert outputs are added in the order of its
choice: neither the tile, nor the way its block was found, nor the batch changes a bit. The host knows how many blocks
there can be, but not how many there are: surplus programs return at once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.activation import STEEPNESS as PLAIN_STEEPNESS
from peregrine.kernels.linear.tiles import LARGE_DEPTH, Room, Tile
from peregrine.kernels.moe.combine_triton import combine
from peregrine.kernels.moe.gather_triton import gated, most_blocks
from peregrine.kernels.moe.plan_triton import direct_block, plan, planned_block
from peregrine.kernels.moe.reference import ExpertChoice, ExpertFormat, ExpertShare
from peregrine.kernels.moe.tiles import (
    DIRECT_ROWS,
    FEW_DEPTH,
    FEW_EXPERTS,
    FEW_INPUTS,
    FEW_PAIRS,
    FEW_ROWS,
    pick_expert_tiles,
)
from peregrine.kernels.residual import Norm, Residual, splits_norm, start_residual
from peregrine.kernels.residual.triton import root_mean_square
from peregrine.kernels.runtime.fence import fence_copies
from peregrine.kernels.runtime.gpu import dense_rows, is_hopper, launch, shared_bytes
from peregrine.kernels.runtime.pdl import enter

MAX_ROWS = 4096  # of one pass; longer inputs are cut, which bounds the memory of expert outputs
HOPPER_PAIRS = 32  # pairs of an expert on average, above which Hopper's own kernels serve
STEEPNESS = tl.constexpr(PLAIN_STEEPNESS)


@dataclass(frozen=True, slots=True)
class TritonExperts(ExpertFormat):
    """One dense tensor on a GPU."""

    weight: Tensor  # [E, O, I]
    bias: Tensor | None = None  # [E, O]
    limit: float | None = None  # of gate_up: its activation is `clamped_mul`

    @property
    def shape(self) -> tuple[int, int, int]:
        """(experts, outputs, inputs)."""
        experts, outputs, inputs = self.weight.shape
        return experts, outputs, inputs

    @property
    def num_bytes(self) -> int:
        """Size of all experts' weights in memory."""
        return self.weight.nbytes

    def add(
        self,
        down: ExpertFormat,
        residual: Residual,
        choice: ExpertChoice,
        norm: Norm | None,
        share: ExpertShare | None = None,
    ) -> Residual:
        """The residual plus its experts' outputs, prepared for the norm that comes next."""
        assert isinstance(down, TritonExperts)
        scale, before = residual.scale, residual.values.contiguous()
        values, scaled = torch.empty_like(before), torch.empty_like(before)
        squares, stale = residual.take_sums()
        for first in range(0, len(before), MAX_ROWS):
            rows = slice(first, first + MAX_ROWS)
            parts = choice.experts[rows].contiguous(), choice.weights[rows].contiguous()
            own = ExpertChoice(*parts, choice.num_shared)
            own_scale = None if scale is None else (scale[0][rows], scale[1])
            x, weights, places, counters = residual.normed[rows], (self.weight, down.weight), None, None
            if share is None and self.bias is None and hopper_takes_few(self.weight, *own.experts.shape):
                from peregrine.kernels.moe.hopper_few import few_outputs  # imports Gluon

                outputs, counters = few_outputs(x, own_scale, own, *weights)
            elif share is None and self.bias is None and hopper_takes_experts(self.weight, own.experts.numel()):
                from peregrine.kernels.moe.hopper import placed_outputs  # imports Gluon

                outputs, places = placed_outputs(x, own_scale, own, *weights)
            else:
                biases = self.bias, down.bias
                outputs = expert_outputs(x, own_scale, own, *weights, None, biases, self.limit, share)
                outputs = outputs if share is None else share.merge(outputs)
            made = values[rows], scaled[rows], squares[rows], stale[rows]
            weight = norm.weight if splits_norm(norm, before) else None
            combine(outputs, before[rows], weight, made, places, counters)
        if splits_norm(norm, before):
            return Residual(values, scaled, squares, stale, norm.eps)
        return start_residual(values, norm)


def expert_outputs(
    x: Tensor,
    scale: tuple[Tensor, float] | None,
    choice: ExpertChoice,
    gate_up: Tensor,
    down: Tensor,
    tiles: tuple[Tile, Tile] | None = None,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    limit: float | None = None,
    share: ExpertShare | None = None,
) -> Tensor:
    """The weighted outputs of each row's experts: [N, H] -> [N * choices, H]. `scale` is (squares, eps).

    Outputs of experts that are not in this share are zero.
    """
    (num_rows, choices), (held, size, inner_size) = choice.experts.shape, down.shape
    num_pairs, total = num_rows * choices, held if share is None else share.total
    experts, numbers = numbered_here(choice.experts, held, share)
    room = Room(shared_bytes(x.device), x.element_size())
    wide, narrow = tiles or pick_expert_tiles(num_pairs, total, size, inner_size, room)
    is_direct = num_rows <= DIRECT_ROWS
    if is_direct:
        order, blocks, most = experts, experts, num_pairs  # the first two are not read
    else:
        order, blocks = plan(experts, numbers, wide.rows)
        most = most_blocks(num_pairs, numbers, wide.rows)
    inner = x.new_empty(num_pairs, inner_size)
    outputs = x.new_empty(num_pairs, size) if share is None else x.new_zeros(num_pairs, size)
    x = dense_rows(x)
    squares, eps = scale or (None, 0.0)
    layers = (wide, x, gate_up, biases[0], inner), (narrow, inner, down, biases[1], outputs)
    for tile, source, weight, bias, out in layers:
        is_gate = weight is gate_up
        pointers = source, weight, out, experts, order, blocks, out if squares is None else squares
        launch(
            block_kernel,
            (triton.cdiv(out.shape[1], tile.cols), most),
            *pointers,
            choice.weights,
            bias,
            source.stride(0),
            num_pairs,
            eps,
            CHOICES=choices,
            SLOTS=triton.next_power_of_2(choices),
            DIRECT=is_direct,
            HELD=None if share is None else held,
            N=out.shape[1],
            K=source.shape[1],
            GATE=is_gate,
            LIMIT=limit if is_gate else None,
            SCALE=squares is not None and is_gate,
            ROWS=tile.rows,
            COLS=tile.cols,
            DEPTH=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
            pdl=True,
        )
    return outputs


def numbered_here(experts: Tensor, held: int, share: ExpertShare | None) -> tuple[Tensor, int]:
    """(choices [N, choices], how many numbers there are), counted from the share's first expert.

    The number after its last one stands for all experts that are elsewhere.
    """
    if share is None:
        return experts, held
    here = experts - share.first
    return torch.where((here >= 0) & (here < held), here, held), held + 1


@triton.jit(do_not_specialize=["P"])
def block_kernel(  # type: ignore[no-untyped-def]
    x,  # [rows, K] of the residual with GATE, [P, K] by pair without
    weight,  # [E, N, K], or [E, 2 N, K] with GATE
    out,  # [P, N] by pair
    experts,  # [P] i32
    order,  # [P] i32
    blocks,  # [1 + 3 * most] i32
    squares,  # [rows, 2] i64 of the residual, with SCALE
    factors,  # [P] f32 weights of the pairs
    bias,  # [E, N], or [E, 2 N] with GATE; or None
    x_stride,
    P,
    eps,
    CHOICES: tl.constexpr,
    SLOTS: tl.constexpr,
    DIRECT: tl.constexpr,
    HELD: tl.constexpr,  # experts with a weight here, if there are others; or None
    N: tl.constexpr,
    K: tl.constexpr,
    GATE: tl.constexpr,
    LIMIT: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Some outputs of one expert's linear, for one block of its pairs: gate_up with GATE, down without."""
    tl.static_assert(K % DEPTH == 0)
    # Down finds its block before it waits: gate_up runs before it, and has waited for the choice and the plan.
    if GATE:
        enter()
    if DIRECT:
        found, expert, pairs, live = direct_block(experts, P, CHOICES, SLOTS, ROWS)
    else:
        found, expert, pairs, live = planned_block(order, blocks, ROWS)
    if HELD is not None:
        found = found & (expert < HELD)
    if not found:
        return
    if not GATE:
        enter()
    rows = pairs // CHOICES if GATE else pairs
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    depth = tl.arange(0, DEPTH)
    # As in `linear_kernel`: the weight is the left matrix; outputs past the last one repeat others and are not stored.
    w_places = weight + expert * ((2 if GATE else 1) * N * K) + (cols % N)[:, None] * K + depth[None, :]
    x_places = x + rows.to(tl.int64)[None, :] * x_stride + depth[:, None]
    # What a row is multiplied by is loaded before the loop; after it, every program would wait for the load.
    if SCALE:
        coarse = tl.load(squares + 2 * rows, mask=live, other=0)
        fine = tl.load(squares + 2 * rows + 1, mask=live, other=0)
    if not GATE:
        factor = tl.load(factors + pairs, mask=live, other=0.0)
    total = tl.zeros((COLS, ROWS), tl.float32)
    up = tl.zeros((COLS, ROWS), tl.float32)
    for start in range(0, K, DEPTH):
        values = tl.load(x_places + start, mask=live[None, :], other=0.0)
        weights = tl.load(w_places + start)
        ups = tl.load(w_places + N * K + start) if GATE else weights
        fence_copies(start)
        total = tl.dot(weights, values, total, input_precision="ieee")
        if GATE:
            up = tl.dot(ups, values, up, input_precision="ieee")
    total, up = tl.trans(total), tl.trans(up)  # [ROWS, COLS]
    if SCALE:
        scale = (1.0 / root_mean_square(coarse, fine, eps, K))[:, None]
        total, up = total * scale, up * scale
    if bias is not None:
        own = bias + expert * ((2 if GATE else 1) * N) + cols % N
        total += tl.load(own)[None, :]
        if GATE:
            up += tl.load(own + N)[None, :]
    if LIMIT is not None:  # comparisons, since a minimum would lose NaN
        total = tl.where(total > LIMIT, LIMIT, total)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        total = total * tl.sigmoid(STEEPNESS * total) * (up + 1.0)
    else:
        total = gated(total, up) if GATE else total * factor[:, None]
    out_places = pairs.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(out + out_places, total.to(out.dtype.element_ty), mask=live[:, None] & (cols < N)[None, :])


def hopper_takes_experts(gate_up: Tensor, num_pairs: int) -> bool:
    """Whether Hopper's own kernels serve: experts have rows for high tiles, and whole steps of inputs."""
    num_experts, outputs, size = gate_up.shape
    fits = size % LARGE_DEPTH == 0 and outputs % (2 * LARGE_DEPTH) == 0 and min(size, outputs // 2) >= 4 * LARGE_DEPTH
    is_half = gate_up.dtype in (torch.bfloat16, torch.float16)
    return fits and is_half and is_hopper(gate_up) and num_pairs > HOPPER_PAIRS * num_experts


def hopper_takes_few(gate_up: Tensor, num_rows: int, choices: int) -> bool:
    """Whether Hopper's own kernel for few rows serves: they fit its tile and its lists, and inputs are whole steps."""
    num_experts, outputs, size = gate_up.shape
    few = num_rows <= FEW_ROWS and num_rows * choices <= FEW_PAIRS and num_experts <= FEW_EXPERTS
    fits = size % FEW_DEPTH == 0 and outputs % (2 * FEW_DEPTH) == 0 and max(size, outputs // 2) <= FEW_INPUTS
    is_half = gate_up.dtype in (torch.bfloat16, torch.float16)
    return few and fits and is_half and is_hopper(gate_up)
