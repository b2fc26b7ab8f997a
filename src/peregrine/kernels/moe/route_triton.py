"""Routing on a GPU: the router's linear, then one program per row that chooses its experts.

The linear's inputs are shared by as many programs as their number allows, since a router is small and the whole layer
waits for it. Each program writes its part of every logit, and the program that routes a row adds the parts in order.
The number of parts follows from the weight's shape alone; the tile changes no bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.linear.tiles import MIN_DEPTH, check_inputs
from peregrine.kernels.linear.triton import TritonWeight, prefetched_product
from peregrine.kernels.moe.reference import LEAST_SUM, ExpertChoice, RoutingRule
from peregrine.kernels.residual import Residual
from peregrine.kernels.residual.triton import root_mean_square
from peregrine.kernels.runtime.gpu import dense_rows, launch
from peregrine.kernels.runtime.pdl import release, wait
from peregrine.kernels.sampling.scores_triton import order_of

MAX_SPLIT = 8
MIN_SHARE = 256  # inputs that are worth a program
FEW_ROWS = 64
SMALL_TILE, LARGE_TILE = (16, 16, 1), (64, 64, 4)  # rows and experts of a program, and its warps
MAX_DEPTH = 128  # of a step; but a share of MIN_SHARE is taken in one step
LAST = tl.constexpr(0x7FFFFFFF)  # above every expert's number
# Below every score's order: experts that are taken already, and those outside the groups a row has chosen.
TAKEN, OUTSIDE = tl.constexpr(-0x80000000), tl.constexpr(-0x7FFFFFFF)
TINY = tl.constexpr(LEAST_SUM)


def route(residual: Residual, router: TritonWeight, rule: RoutingRule, bias: Tensor | None) -> ExpertChoice:
    """The experts of each row of the normed residual [N, H]."""
    x, scale, weight = dense_rows(residual.normed), residual.scale, router.weight
    num_rows, size = x.shape
    split = pick_split(size)
    parts = torch.empty(split, num_rows, rule.num_experts, dtype=torch.float32, device=x.device)
    experts = torch.empty(num_rows, rule.num_choices, dtype=torch.int32, device=x.device)
    weights = torch.empty(num_rows, rule.num_choices, dtype=torch.float32, device=x.device)
    if num_rows == 0:
        return ExpertChoice(experts, weights)
    rows, cols, warps = SMALL_TILE if num_rows <= FEW_ROWS else LARGE_TILE
    grid = triton.cdiv(rule.num_experts, cols), triton.cdiv(num_rows, rows), split
    sizes = {"E": rule.num_experts, "H": size, "SPLIT": split}
    tile = {"ROWS": rows, "COLS": cols, "DEPTH": pick_depth(size // split)}
    arguments = x, weight, parts, num_rows, x.stride(0)
    launch(logits_kernel, grid, *arguments, **sizes, **tile, num_warps=warps, num_stages=4, pdl=True)
    squares, eps = scale or (parts, 0.0)
    in_group = rule.num_experts // rule.num_groups
    launch(
        route_kernel,
        (num_rows,),
        parts,
        squares,
        parts if bias is None else bias,
        experts,
        weights,
        router.bias,
        num_rows,
        eps,
        rule.scale,
        **sizes,
        SCALE=scale is not None,
        BIAS=bias is not None,
        SIGMOID=rule.sigmoid,
        NORMALISE=rule.normalise,
        NUM_GROUPS=rule.num_groups,
        TOP_GROUPS=rule.top_groups,
        BEST_TWO=rule.best_two,
        TOP_K=rule.top_k,
        CHOICES=rule.num_choices,
        IN_GROUP=in_group,
        GROUPS=triton.next_power_of_2(rule.num_groups),
        WIDTH=triton.next_power_of_2(in_group),
        SLOTS=triton.next_power_of_2(rule.num_choices),
        num_warps=1,
        pdl=True,
    )
    return ExpertChoice(experts, weights, rule.num_shared)


def pick_split(num_inputs: int) -> int:
    """How many programs share the inputs of a router."""
    check_inputs(f"a router of {num_inputs} inputs", num_inputs)
    split = MAX_SPLIT
    while num_inputs // split < MIN_SHARE or num_inputs % (split * MIN_DEPTH):
        if split == 1:
            break
        split //= 2
    return split


def pick_depth(share: int) -> int:
    """How many of its inputs a program takes per step."""
    depth = MIN_SHARE if share == MIN_SHARE else MAX_DEPTH
    while share % depth:
        depth //= 2
    return depth


@triton.jit(do_not_specialize=["N"])
def logits_kernel(  # type: ignore[no-untyped-def]
    x,  # [N, H]
    weight,  # [E, H]
    parts,  # [SPLIT, N, E] f32
    N,
    x_stride,
    E: tl.constexpr,
    H: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One program's part of the logits of some rows for some experts."""
    part = tl.program_id(2)
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    depth = part * (H // SPLIT) + tl.arange(0, DEPTH)
    w_places = weight + (cols % E)[:, None] * H + depth[None, :]
    x_places = x + rows.to(tl.int64)[None, :] * x_stride + depth[:, None]
    total = prefetched_product(w_places, x_places, rows < N, H // SPLIT, DEPTH)
    places = (part * N + rows).to(tl.int64)[None, :] * E + cols[:, None]
    tl.store(parts + places, total, mask=(rows < N)[None, :] & (cols < E)[:, None])


@triton.jit(do_not_specialize=["N"])
def route_kernel(  # type: ignore[no-untyped-def]
    parts,  # [SPLIT, N, E] f32
    squares,  # [N, 2] i64
    bias,  # [E] f32
    experts,  # [N, CHOICES] i32
    weights,  # [N, CHOICES] f32
    logit_bias,  # [E] f32, or None
    N,
    eps,
    scale,
    E: tl.constexpr,
    H: tl.constexpr,
    SPLIT: tl.constexpr,
    SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST_TWO: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    IN_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """One row by the rule of reference.py; its scores lie in a table of groups by experts in a group."""
    release()
    wait()
    row = tl.program_id(0).to(tl.int64)
    group, inner = tl.arange(0, GROUPS), tl.arange(0, WIDTH)
    index = group[:, None] * IN_GROUP + inner[None, :]
    inside = (group < NUM_GROUPS)[:, None] & (inner < IN_GROUP)[None, :]
    logit = tl.load(parts + row * E + index, mask=inside, other=0.0)
    for part in tl.static_range(1, SPLIT):
        logit += tl.load(parts + (part * N + row) * E + index, mask=inside, other=0.0)
    if SCALE:
        logit = logit * (1.0 / root_mean_square(tl.load(squares + 2 * row), tl.load(squares + 2 * row + 1), eps, H))
    if logit_bias is not None:
        logit += tl.load(logit_bias + index, mask=inside, other=0.0)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        logit = tl.where(inside, logit, float("-inf"))
        score = tl.exp(logit - tl.max(logit))
        score = score / tl.sum(score)
    broken = tl.sum((inside & (score != score)).to(tl.int32)) > 0
    choice = score
    if BIAS:
        choice += tl.load(bias + index, mask=inside, other=0.0)
    expert = tl.where(inside, index, LAST)
    # The order of a NaN may be as low as the two marks below all orders.
    order = tl.where(inside, tl.maximum(order_of(choice), OUTSIDE + 1), TAKEN)
    if TOP_GROUPS < NUM_GROUPS:
        of_group = tl.max(tl.where(inside, choice, float("-inf")), axis=1)
        if BEST_TWO:
            first = best_of(order, expert, 1)[:, None]  # [GROUPS, 1]
            of_group += tl.max(tl.where(inside & (expert != first), choice, float("-inf")), axis=1)
        group_order = tl.maximum(order_of(of_group), OUTSIDE + 1)
        group_order = tl.where(group < NUM_GROUPS, group_order, TAKEN)
        kept = group < 0
        for _ in tl.static_range(TOP_GROUPS):
            taken = group == best_of(group_order, group, None)
            kept = kept | taken
            group_order = tl.where(taken, TAKEN, group_order)
        order = tl.where(kept[:, None] | (order == TAKEN), order, OUTSIDE)
    slot = tl.arange(0, SLOTS)
    chosen = E + slot - TOP_K  # shared experts have the last places
    weight = tl.full((SLOTS,), 1.0, tl.float32)
    bits = score.to(tl.int32, bitcast=True)
    total = 0.0
    for place in tl.static_range(TOP_K):
        number = best_of(order, expert, None)
        taken = expert == number
        own = tl.sum(tl.where(taken, bits, 0)).to(tl.float32, bitcast=True)
        total += own
        chosen = tl.where(slot == place, number, chosen)
        weight = tl.where(slot == place, own, weight)
        order = tl.where(taken, TAKEN, order)
    if NORMALISE:
        weight = tl.where(slot < TOP_K, weight / (total + TINY), weight)
    weight = tl.where(slot < TOP_K, tl.where(broken, float("nan"), weight * scale), weight)
    tl.store(experts + row * CHOICES + slot, chosen, mask=slot < CHOICES)
    tl.store(weights + row * CHOICES + slot, weight, mask=slot < CHOICES)


@triton.jit
def best_of(order, number, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number with the largest order, the lowest of them among equals.

    All in i32, which a warp reduces with one instruction; one i64 key for both would take ten shuffles.
    """
    most = tl.max(order, axis=AXIS, keep_dims=True)
    return tl.min(tl.where(order == most, number, LAST), axis=AXIS)
