"""Which pairs of (row, place in its choice) a program of the experts' kernels has: a block of them shares an expert.

With few rows no plan is made: all pairs of an expert fit one block, which its program finds in the choice itself. That
saves a launch and three dependent loads, and relies on a row never choosing an expert twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.moe.gather_triton import most_blocks
from peregrine.kernels.runtime.gpu import launch
from peregrine.kernels.runtime.pdl import enter

MAX_RANKED = 4096  # pairs that are sorted by counting, every pair against every other; above it, torch sorts
RANKED = 64  # pairs whose places one program counts
CHUNK = 128  # pairs that it compares them with at a time
FIELDS = tl.constexpr(3)  # of a block: expert, first place in the sorted order, end of the expert's pairs


def plan(experts: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """(order [P], blocks [1 + 3 * most]) of choices [N, choices]: pairs sorted by expert, and how they are cut.

    `blocks` is their number, then for each block its expert, its first place in the order, and its expert's end.
    """
    flat = experts.flatten()
    num_pairs = len(flat)
    ranked = num_pairs <= MAX_RANKED
    order = torch.empty_like(flat) if ranked else flat.sort(stable=True).indices.int()
    most = most_blocks(num_pairs, num_experts, rows)
    blocks = torch.empty(1 + FIELDS.value * most, dtype=torch.int32, device=flat.device)
    grid = (1 + (triton.cdiv(num_pairs, RANKED) if ranked else 0),)
    sizes = {"ROWS": rows, "BINS": triton.next_power_of_2(num_experts + 1), "RANKED": RANKED, "CHUNK": CHUNK}
    launch(plan_kernel, grid, flat, order, blocks, num_pairs, **sizes, num_warps=4, pdl=True)
    return order, blocks


@triton.jit(do_not_specialize=["P"])
def plan_kernel(  # type: ignore[no-untyped-def]
    experts,  # [P] i32
    order,  # [P] i32
    blocks,  # [1 + FIELDS * most] i32
    P,
    ROWS: tl.constexpr,
    BINS: tl.constexpr,
    RANKED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The first program cuts blocks; the others sort, a pair's place being the number of pairs before it."""
    enter()
    if tl.program_id(0) == 0:
        expert = tl.arange(0, BINS)
        count = tl.zeros((BINS,), tl.int32)
        for start in range(0, P, CHUNK):
            other = start + tl.arange(0, CHUNK)
            count += tl.histogram(tl.load(experts + other, mask=other < P, other=BINS - 1), BINS)
        count = tl.where(expert == BINS - 1, 0, count)  # padding past the last pair
        last = tl.cumsum(count)
        needed = (count + ROWS - 1) // ROWS
        place = tl.cumsum(needed) - needed
        tl.store(blocks, tl.sum(needed))
        for step in range(0, tl.max(needed)):
            fields = blocks + 1 + (place + step) * FIELDS
            tl.store(fields, expert, mask=step < needed)
            tl.store(fields + 1, last - count + step * ROWS, mask=step < needed)
            tl.store(fields + 2, last, mask=step < needed)
    else:
        pair = (tl.program_id(0) - 1) * RANKED + tl.arange(0, RANKED)
        own = tl.load(experts + pair, mask=pair < P, other=0)
        before = tl.zeros((RANKED,), tl.int32)
        for start in range(0, P, CHUNK):
            other = start + tl.arange(0, CHUNK)
            theirs = tl.load(experts + other, mask=other < P, other=BINS)[None, :]
            earlier = (theirs < own[:, None]) | ((theirs == own[:, None]) & (other[None, :] < pair[:, None]))
            before += tl.sum(earlier.to(tl.int32), axis=1)
        tl.store(order + before, pair, mask=pair < P)


@triton.jit
def planned_block(order, blocks, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(whether there is one, expert, pairs [ROWS], which of them are live): this program's block, from a plan."""
    block = tl.program_id(1)
    found = block < tl.load(blocks)
    fields = blocks + 1 + block * FIELDS
    expert, first, last = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    places = first + tl.arange(0, ROWS)
    live = (places < last) & found  # past the last block the fields are undefined
    pairs = tl.load(order + places, mask=live, other=0)
    return found, expert.to(tl.int64), pairs, live


@triton.jit
def direct_block(experts, P, CHOICES: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(whether there is one, expert, pairs [ROWS], which are live): this program's block, from the choice [P] itself.

    For at most ROWS rows: the program of an expert's first pair has its block.
    """
    first = tl.program_id(1)
    slot = tl.arange(0, SLOTS)[None, :]
    pair = tl.arange(0, ROWS)[:, None] * CHOICES + slot
    expert = tl.load(experts + first)
    chosen = tl.load(experts + pair, mask=(slot < CHOICES) & (pair < P), other=-1)  # [ROWS, SLOTS]
    pairs = tl.min(tl.where(chosen == expert, pair, P), axis=1)  # P for rows that did not choose it
    return tl.min(pairs) == first, expert.to(tl.int64), pairs, pairs < P
