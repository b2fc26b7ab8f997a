"""Rows of a mixture of experts, grouped by expert on a GPU for the linears that read them.

    count, place   give each (row, chosen expert) pair a place; places come in blocks, and a block has one expert
    gather         copies a row to the places of its pairs, and its factors beside it

Each expert begins a new block, and its last block is seldom full; places without a pair hold undefined values. Device
functions that several kernels of experts use are here, too.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.moe.reference import ExpertChoice
from peregrine.kernels.residual.triton import root_mean_square
from peregrine.kernels.runtime.gpu import dense_rows, launch
from peregrine.kernels.runtime.pdl import enter

COUNTED = 256  # pairs of one program that counts
AT_ONCE = 16  # such programs whose counts are read at a time
RANKED = tl.constexpr(32)  # pairs that others are compared with at a time
COPIED = 2048  # most entries of a row that are copied at a time


@triton.jit(do_not_specialize=["P"])
def count_kernel(  # type: ignore[no-untyped-def]
    experts,  # [P] i32
    counts,  # [programs, BINS] i32
    P,
    BINS: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """How often each expert is chosen by COUNTED pairs."""
    enter()
    pair = tl.program_id(0) * COUNTED + tl.arange(0, COUNTED)
    count = tl.histogram(tl.load(experts + pair, mask=pair < P, other=0), BINS, mask=pair < P)
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), count)


@triton.jit(do_not_specialize=["P"])
def place_kernel(  # type: ignore[no-untyped-def]
    experts,  # [P] i32
    counts,  # [programs, BINS] i32
    bases,  # [programs, BINS] i32: where the pairs of a program begin
    places,  # [P] i32
    blocks,  # [1 + 2 * most] i32: their number, then the expert and the pairs of each
    P,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    COUNTED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """The places of COUNTED pairs; the first program writes the blocks."""
    enter()
    own, programs = tl.program_id(0), tl.cdiv(P, COUNTED)
    expert = tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.int32)
    for first in range(0, programs, AT_ONCE):
        other = first + tl.arange(0, AT_ONCE)
        count = tl.load(counts + other[:, None] * BINS + expert[None, :], mask=(other < programs)[:, None], other=0)
        total += tl.sum(count, axis=0)
        before += tl.sum(tl.where((other < own)[:, None], count, 0), axis=0)
    needed = (total + ROWS - 1) // ROWS
    first_block = tl.cumsum(needed) - needed
    tl.store(bases + own * BINS + expert, first_block * ROWS + before)
    tl.debug_barrier()  # other threads read what this one wrote
    pair = own * COUNTED + tl.arange(0, COUNTED)
    chosen = tl.load(experts + pair, mask=pair < P, other=0)
    rank = tl.zeros((COUNTED,), tl.int32)
    for step in range(COUNTED // RANKED):
        at = own * COUNTED + step * RANKED + tl.arange(0, RANKED)
        theirs = tl.load(experts + at, mask=at < P, other=-1)
        earlier = (theirs[None, :] == chosen[:, None]) & (at[None, :] < pair[:, None])
        rank += tl.sum(earlier.to(tl.int32), axis=1)
    base = tl.load(bases + own * BINS + chosen, mask=pair < P, other=0)
    tl.store(places + pair, base + rank, mask=pair < P)
    if own == 0:
        tl.store(blocks, tl.sum(needed))
        for step in range(0, tl.max(needed)):
            fields = blocks + 1 + 2 * (first_block + step)
            tl.store(fields, expert, mask=step < needed)
            tl.store(fields + 1, tl.minimum(total - step * ROWS, ROWS), mask=step < needed)


@triton.jit
def gather_kernel(  # type: ignore[no-untyped-def]
    x,  # [rows, H]
    places,  # [P] i32
    squares,  # [rows, 2] i64, with SCALE
    weights,  # [P] f32
    gathered,  # [places, H]
    factors,  # [2, places] f32: what gate and up are multiplied with, the weights of pairs
    x_stride,
    factor_stride,
    eps,
    H: tl.constexpr,
    CHOICES: tl.constexpr,
    SLOTS: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows,): a row is copied to the places of its pairs."""
    enter()
    row = tl.program_id(0)
    slot = tl.arange(0, SLOTS)
    own = tl.load(places + row * CHOICES + slot, mask=slot < CHOICES, other=0)
    weight = tl.load(weights + row * CHOICES + slot, mask=slot < CHOICES, other=0.0)
    tl.store(factors + factor_stride + own, weight, mask=slot < CHOICES)
    if SCALE:
        scale = 1.0 / root_mean_square(tl.load(squares + 2 * row), tl.load(squares + 2 * row + 1), eps, H)
        tl.store(factors + own, tl.zeros((SLOTS,), tl.float32) + scale, mask=slot < CHOICES)
    for start in tl.static_range(0, H, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        values = tl.load(x + row.to(tl.int64) * x_stride + cols, mask=cols < H, other=0.0)
        for choice in tl.static_range(CHOICES):
            place = tl.load(places + row * CHOICES + choice).to(tl.int64)
            tl.store(gathered + place * H + cols, values, mask=cols < H)


@triton.jit
def gated(total, up):  # type: ignore[no-untyped-def]
    """silu(total) * up, as all kernels of experts round it."""
    return total * tl.sigmoid(total) * up


def most_blocks(num_pairs: int, num_experts: int, rows: int) -> int:
    """The largest possible number of blocks: all full ones, and one with the rest for each expert that has pairs."""
    return min(num_experts, num_pairs) + num_pairs // rows


def places_of(experts: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """(place of each pair [P], blocks [1 + 2 * most]) of choices [N, choices], in blocks of this many rows."""
    flat = experts.flatten()
    num_pairs, bins = len(flat), triton.next_power_of_2(num_experts)
    programs = triton.cdiv(num_pairs, COUNTED)
    counts, bases = torch.empty(2, programs, bins, dtype=torch.int32, device=flat.device).unbind()
    blocks = torch.empty(1 + 2 * most_blocks(num_pairs, num_experts, rows), dtype=torch.int32, device=flat.device)
    places = torch.empty_like(flat)
    sizes = {"BINS": bins, "COUNTED": COUNTED}
    launch(count_kernel, (programs,), flat, counts, num_pairs, **sizes, num_warps=4, pdl=True)
    pointers = flat, counts, bases, places, blocks
    sizes |= {"ROWS": rows, "AT_ONCE": AT_ONCE}
    launch(place_kernel, (programs,), *pointers, num_pairs, **sizes, num_warps=4, pdl=True)
    return places, blocks


def gather(
    x: Tensor, scale: tuple[Tensor, float] | None, choice: ExpertChoice, num_experts: int, rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x at the places [most * rows, H], factors [2, most * rows], blocks, places) of the choice of each row of x.

    Factors are what the products of gate and up are multiplied with (`scale` is (squares, eps)), and the weights.
    """
    x = dense_rows(x)
    (num_rows, size), choices = x.shape, choice.experts.shape[1]
    places, blocks = places_of(choice.experts, num_experts, rows)
    gathered = x.new_empty(len(blocks) // 2 * rows, size)
    factors = torch.empty(2, len(gathered), dtype=torch.float32, device=x.device)
    squares, eps = scale or (None, 0.0)
    launch(
        gather_kernel,
        (num_rows,),
        *(x, places, factors if squares is None else squares, choice.weights, gathered, factors),
        *(x.stride(0), factors.stride(0), eps),
        H=size,
        CHOICES=choices,
        SLOTS=triton.next_power_of_2(choices),
        SCALE=squares is not None,
        BLOCK=min(triton.next_power_of_2(size), COPIED),
        num_warps=4,
        pdl=True,
    )
    return gathered, factors, blocks, places
