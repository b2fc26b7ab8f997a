"""The host's side of latent attention (MLA) on a GPU: which tiles, how many programs, and the launches.

Nothing here waits for the device, and every shape follows from the host's own numbers, so a captured call can be
repeated with other lengths. `latent_decode_gpu` and `latent_context_gpu` have the law and the twin of
`paged_attention_torch` for keys that begin with their values.
"""

from typing import Any

import torch
from torch import Tensor

from peregrine.kernels.attention.mla import latent_splits
from peregrine.kernels.attention.mla_triton import latent_kernel, latent_merge_kernel
from peregrine.kernels.attention.plan_triton import MERGE_REGISTERS, GpuPlan, checked_queries, padded
from peregrine.kernels.attention.splits_triton import FLOAT32_BLOCK, queries_per_tile, tiles_per_query
from peregrine.kernels.runtime.gpu import is_hopper, launch, multiprocessors

BLOCK = 64  # key indices per product; a divisor of every split's width
# (query, head) pairs that a tile may have, and the warps that share it; more pairs would not fit into registers.
TILES = {16: 4, 32: 4, 64: 8}
CORES_OF_THE_INTERPRETER = 4
HOPPER_COLUMN = 64  # entries of a key that Hopper's kernel takes side by side
HOPPER_REGISTERS = {16: 168, 64: 128}  # of a thread on average, by tile: as many as one program can have
MERGED_COLUMNS = 64  # of an answer, for one program of the merge: two a thread
MERGED_SPLITS = 32  # that such a program asks for at once


def latent_decode_gpu(
    q: Tensor,
    keys: Tensor,
    plan: GpuPlan,
    rank: int,
    scale: float,
    programs: int | None = None,
    tile: int | None = None,
) -> Tensor:
    """Attention of q [R * T, h, rank + rope] over keys [slots, 1, rank + rope], T queries a row. -> [R * T, h, rank]

    `programs` share the keys of each tile of so many (query, head) pairs; None: as fills the device.
    """
    num_rows, num_pages = plan.page_table.shape
    q_len, heads = len(q) // num_rows, q.shape[1]
    asked, on_hopper = tile, tile is None and hopper_takes(q, keys, plan, rank)
    tile = hopper_tile(q_len * heads) if on_hopper else tile or tile_for(q_len * heads, q)
    tiles = -(-q_len // queries_per_tile(heads, tile)) * tiles_per_query(heads, tile)  # of one row
    max_splits = latent_splits(num_pages * plan.page_size)
    if programs is None:
        cores = multiprocessors(q.device, CORES_OF_THE_INTERPRETER)
        programs = max(1, min(max_splits, cores // (num_rows * tiles)))
        if programs == 1:  # who shares with no other need not put splits aside
            return latent_context_gpu(q, keys, plan, rank, scale, asked)
    constants = _constants(q, plan, rank, tile)
    held_sums, held_stats = (
        torch.empty(num_rows * tiles, max_splits, tile, size, dtype=torch.float32, device=q.device)
        for size in (constants["RANK_PAD"], 2)
    )
    out = q.new_empty(*q.shape[:2], rank)
    grid = programs, tiles, num_rows
    launch_it = _launch_hopper if on_hopper else _launch
    launch_it(q, out, keys, plan, scale, grid, (held_sums, held_stats), constants)
    columns, most = min(MERGED_COLUMNS, constants["RANK_PAD"]), 1 << (max_splits - 1).bit_length()
    launch(
        latent_merge_kernel,
        (constants["RANK_PAD"] // columns, heads, len(q)),
        *(out, plan.positions, plan.limits, held_sums, held_stats, q_len, num_pages, max_splits, tiles),
        **{name: constants[name] for name in ("HEADS", "RANK", "RANK_PAD", "PAGE", "ROWS", "TREE")},
        COLUMNS=columns,
        CHUNK=most,
        BATCH=min(MERGED_SPLITS, most),
        enable_fp_fusion=False,
        num_warps=1,
        maxnreg=MERGE_REGISTERS,
        pdl=True,
    )
    return out


def latent_context_gpu(
    q: Tensor, keys: Tensor, plan: GpuPlan, rank: int, scale: float, tile: int | None = None
) -> Tensor:
    """The same for q [N, h, rank + rope] on rows of any lengths. -> [N, h, rank]"""
    num_rows, heads = len(plan.past_lens), q.shape[1]
    on_hopper = tile is None and hopper_takes(q, keys, plan, rank)
    tile = max(HOPPER_REGISTERS) if on_hopper else tile or tile_for(len(q) // num_rows * heads, q)
    constants = _constants(q, plan, rank, tile)
    out = q.new_empty(*q.shape[:2], rank)
    held_sums = torch.empty(*q.shape[:2], constants["RANK_PAD"], dtype=torch.float32, device=q.device)
    places = (len(q) // queries_per_tile(heads, tile) + num_rows) * tiles_per_query(heads, tile)
    launch_it = _launch_hopper if on_hopper else _launch
    launch_it(q, out, keys, plan, scale, (places,), (held_sums, held_sums), constants)
    return out


def tile_for(pairs: int, q: Tensor) -> int:
    """The height of a tile for rows of so many (query, head) pairs; it changes no bit."""
    if q.is_cuda and q.dtype == torch.float32:
        return min(TILES)  # there is no matrix instruction for it: large products take long to compile
    if q.is_cuda:
        return max(TILES)  # lower ones of four warps come out wrong: the compiler's loads overtake each other
    return next((tile for tile in TILES if pairs <= tile), max(TILES))


def hopper_takes(q: Tensor, keys: Tensor, plan: GpuPlan, rank: int) -> bool:
    """Whether Hopper's own kernel serves: causal windows of whole columns. Bits are the same either way."""
    if not is_hopper(q):
        return False
    whole = rank % (2 * HOPPER_COLUMN) == 0 and (q.shape[2] - rank) % HOPPER_COLUMN == 0
    same = keys.dtype == q.dtype and q.dtype in (torch.bfloat16, torch.float16)
    return plan.paths is None and plan.page_size >= 8 and whole and same


def hopper_tile(pairs: int) -> int:
    """The height of a tile of Hopper's kernel for rows of so many pairs."""
    return 16 if pairs <= 16 else 64


def _launch_hopper(
    q: Tensor,
    out: Tensor,
    keys: Tensor,
    plan: GpuPlan,
    scale: float,
    grid: tuple[int, ...],
    held: tuple[Tensor, Tensor],
    constants: dict[str, Any],
) -> None:
    # Imports Gluon, which other devices have no use for.
    from peregrine.kernels.attention.hopper import paged
    from peregrine.kernels.attention.mla_hopper import hopper_latent_kernel

    q = checked_queries(q, plan)
    launch(
        hopper_latent_kernel,
        grid,
        *(q, out, paged(keys, plan.page_size), plan.positions, plan.q_starts, plan.past_lens),
        *(plan.page_table, *held, scale, *_sizes(q, plan, held[0])),
        **{name: constants[name] for name in ("HEADS", "RANK", "ROPE", "PAGE", "ROWS", "num_warps")},
        APART=len(grid) == 3,
        STAGES=2,
        maxnreg=HOPPER_REGISTERS[constants["ROWS"]],
        enable_fp_fusion=False,
        pdl=True,
    )


def _launch(
    q: Tensor,
    out: Tensor,
    keys: Tensor,
    plan: GpuPlan,
    scale: float,
    grid: tuple[int, ...],
    held: tuple[Tensor, Tensor],
    constants: dict[str, Any],
) -> None:
    q = checked_queries(q, plan)
    launch(
        latent_kernel,
        grid,
        *(q, out, keys, plan.positions, plan.q_starts, plan.past_lens, plan.page_table),
        *(plan.limits, plan.paths, *held, scale, *_sizes(q, plan, held[0])),
        **constants,
        APART=len(grid) == 3,
        pdl=True,
    )


def _sizes(q: Tensor, plan: GpuPlan, held_sums: Tensor) -> tuple[int, ...]:
    """Queries of a row, numbers from token to token, rows, pages of a row, splits that have places."""
    num_rows, num_pages = plan.page_table.shape
    return len(q) // num_rows, q.stride(0), num_rows, num_pages, held_sums.shape[1]


def _constants(q: Tensor, plan: GpuPlan, rank: int, tile: int) -> dict[str, Any]:
    """What the kernel is compiled for, and how."""
    rope = q.shape[2] - rank
    return {
        "HEADS": q.shape[1],
        "RANK": rank,
        "RANK_PAD": padded(rank),
        "ROPE": rope,
        "ROPE_PAD": padded(rope),
        "PAGE": plan.page_size,
        "ROWS": tile,
        "BLOCK": FLOAT32_BLOCK if q.is_cuda and q.dtype == torch.float32 else BLOCK,
        "TREE": plan.paths is not None,
        "STAGES": 3,
        "num_warps": TILES[tile],
        "enable_fp_fusion": False,
    }
