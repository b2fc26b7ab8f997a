"""The host's side of attention on a GPU: what one forward shares among its layers, and the launches.

Nothing here waits for the device, and every shape follows from the host's own numbers, so a captured call can be
repeated with other lengths. `decode_gpu` and `context_gpu` have the law and the twin of `paged_attention_torch`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peregrine.kernels.attention.blocks_triton import SAME_BITS
from peregrine.kernels.attention.kv_write_triton import paths_kernel, write_kernel
from peregrine.kernels.attention.merge_triton import merge_kernel
from peregrine.kernels.attention.splits_triton import (
    BLOCK,
    FLOAT32_BLOCK,
    MAX_NODES,
    TILE,
    num_splits,
    queries_per_tile,
    tiles_per_query,
)
from peregrine.kernels.attention.triton import context_kernel, decode_kernel
from peregrine.kernels.runtime.gpu import is_hopper, launch, multiprocessors

TALL_TILE = 64  # query rows of a tile of long windows
PROGRAMS_PER_CORE = 2  # decode programs per multiprocessor: more do not fit beside each other
CORES_OF_THE_INTERPRETER = 16
HOPPER_STAGES, HOPPER_REGISTERS = 2, 128  # two programs fit on a multiprocessor, and the next kernel
MERGE_REGISTERS = 168  # of a thread: left alone, the compiler takes 64, and waits for a few loads at a time
DECODE_ONLY = frozenset({"BLOCK", "STAGES", *SAME_BITS})


@dataclass(frozen=True, slots=True)
class StoredKV:
    """One layer's share of a KV store."""

    keys: Tensor  # [slots, Hkv, D]
    values: Tensor  # [slots, Hkv, D]
    k_scale: Tensor | None  # [] f32 what a stored key is multiplied by; None: 1
    v_scale: Tensor | None  # [] f32 the same for values


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """Which keys the queries of one forward see, for all layers."""

    positions: Tensor  # [N] i64
    q_starts: Tensor  # [R + 1] i64
    past_lens: Tensor  # [R] i64
    page_table: Tensor  # [R, P]
    page_size: int
    limits: Tensor | None  # [N] i32 keys that a tree's node sees; None: causal by position
    paths: Tensor | None  # [N, MAX_NODES] i64 slots of a node's ancestors, by ascending bit


def plan_gpu(
    positions: Tensor, q_starts: Tensor, past_lens: Tensor, page_table: Tensor, page_size: int, ancestors: Tensor | None
) -> GpuPlan:
    """What all layers of a forward share; with ancestors [R, T], one launch turns words into lists of slots."""
    page_table = page_table.contiguous()
    if ancestors is None:
        return GpuPlan(positions, q_starts, past_lens, page_table, page_size, None, None)
    num_tokens = ancestors.numel()
    limits = torch.empty(num_tokens, dtype=torch.int32, device=ancestors.device)
    paths = torch.empty(num_tokens, MAX_NODES, dtype=torch.int64, device=ancestors.device)
    num_nodes, num_pages = ancestors.shape[1], page_table.shape[1]
    arguments = (ancestors.contiguous(), past_lens, page_table, limits, paths, num_nodes, num_pages)
    launch(paths_kernel, (num_tokens,), *arguments, PAGE=page_size, num_warps=1)
    return GpuPlan(positions, q_starts, past_lens, page_table, page_size, limits, paths)


def write_gpu(kv: StoredKV, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Put k and v [M, Hkv, D] into one layer's slots [M]; the twin of `KVStore.write`."""
    if not len(slots) == len(k) == len(v):
        raise ValueError(f"k has {len(k)} tokens and v {len(v)}, but slots has {len(slots)}")
    k, v = _whole_heads(k), _whole_heads(v)
    num_heads, head_dim = k.shape[1:]
    launch(
        write_kernel,
        (len(slots), num_heads),
        *(k, v, slots, kv.keys, kv.values, kv.k_scale, kv.v_scale, k.stride(0), v.stride(0)),
        KV_HEADS=num_heads,
        D=head_dim,
        D_PAD=padded(head_dim),
        SCALED=kv.k_scale is not None,
        LARGEST=torch.finfo(kv.keys.dtype).max,
        num_warps=1,
    )


def decode_gpu(
    q: Tensor,
    kv: StoredKV,
    plan: GpuPlan,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    programs: int | None = None,
) -> Tensor:
    """Attention of q [R * T, Hq, D], T queries on every row, by `programs` per tile (None: as fills the device)."""
    q = checked_queries(q, plan)
    num_rows, num_pages = plan.page_table.shape
    if programs is None and hopper_takes(q, kv, plan, window, sinks):
        return hopper_gpu(q, kv, plan, scale)
    q_len = len(q) // num_rows
    constants = _constants(q, kv, plan, window, sinks, TILE)
    max_splits = num_splits(num_pages * plan.page_size)
    group, queries = constants["GROUP"], queries_per_tile(constants["GROUP"], TILE)
    tiles = -(-q_len // queries) * tiles_per_query(group, TILE) * constants["KV_HEADS"]  # of one row
    if programs is None:
        most = max_splits if plan.paths is None else max_splits + 2 * queries
        programs = min(most, _programs_each(num_rows * tiles, q.device))
        if programs == 1:  # a program that shares with no other need not put its parts aside
            return context_gpu(q, kv, plan, scale, window, sinks)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    parts = num_rows * tiles, max_splits, TILE
    part_sums = torch.empty(*parts, constants["D_PAD"], dtype=torch.float32, device=q.device)
    part_stats = torch.empty(*parts, 2, dtype=torch.float32, device=q.device)  # top, mass
    sizes = {"window": window or 0, "q_len": q_len, "num_pages": num_pages, "max_splits": max_splits}
    launch(
        decode_kernel,
        (programs, tiles, num_rows),
        *(q, kv.keys, kv.values, kv.k_scale, plan.positions, plan.past_lens, plan.page_table),
        *(plan.limits, plan.paths, part_sums, part_stats, scale),
        q_stride=q.stride(0),
        **sizes,
        **{name: value for name, value in constants.items() if name != "SINKS"},
        pdl=True,
    )
    launch_merge(out, kv, sinks, plan, (part_sums, part_stats), tiles, sizes, constants)
    return out


def launch_merge(
    out: Tensor,
    kv: StoredKV,
    sinks: Tensor | None,
    plan: GpuPlan,
    parts: tuple[Tensor, Tensor],
    tiles: int,
    sizes: dict[str, int],
    constants: dict[str, Any],
) -> None:
    """Put together what the programs of each tile have put aside."""
    tile = constants["ROWS"]
    merged = 1 if out.is_cuda else tile  # in the interpreter a program costs more than its rows
    launch(
        merge_kernel,
        (tile // merged, tiles, len(plan.past_lens)),
        *(out, kv.v_scale, sinks, plan.positions, plan.past_lens, plan.limits, *parts),
        **sizes,
        **{name: value for name, value in constants.items() if name not in DECODE_ONLY},
        MERGED=merged,
        enable_fp_fusion=False,
        num_warps=1,
        maxnreg=MERGE_REGISTERS,
        pdl=True,
    )


def hopper_gpu(q: Tensor, kv: StoredKV, plan: GpuPlan, scale: float) -> Tensor:
    """Attention of q [R * T, Hq, D], T queries on every row, by one program per tile of Hopper's own kernel."""
    # Imports Gluon, which other devices have no use for.
    from peregrine.kernels.attention.hopper import hopper_decode_kernel, paged

    num_rows, num_pages = plan.page_table.shape
    num_kv_heads, head_dim = kv.keys.shape[1:]
    q_len, group = len(q) // num_rows, q.shape[1] // num_kv_heads
    tile = hopper_tile(q_len, group)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch(
        hopper_decode_kernel,
        (-(-q_len // queries_per_tile(group, tile)) * num_kv_heads, num_rows),
        *(q, out, paged(kv.keys, plan.page_size), paged(kv.values, plan.page_size)),
        *(plan.positions, plan.past_lens, plan.page_table, scale, q_len, q.stride(0), num_pages),
        KV_HEADS=num_kv_heads,
        GROUP=group,
        D=head_dim,
        PAGE=plan.page_size,
        ROWS=tile,
        STAGES=HOPPER_STAGES,
        num_warps=4,
        maxnreg=HOPPER_REGISTERS,
        enable_fp_fusion=False,
        pdl=True,
    )
    return out


def hopper_takes(q: Tensor, kv: StoredKV, plan: GpuPlan, window: int | None, sinks: Tensor | None) -> bool:
    """Whether Hopper's own kernel serves: plain causal windows of the common shapes, and tiles for all processors.

    Bits are the same either way; where programs have to share the keys of a tile, `decode_kernel` was faster.
    """
    group = q.shape[1] // kv.keys.shape[1]
    if not is_hopper(q) or group > TALL_TILE:
        return False
    plain = plan.paths is None and window is None and sinks is None
    same = kv.keys.dtype == q.dtype and q.dtype in (torch.bfloat16, torch.float16)
    num_rows, q_len = len(plan.past_lens), len(q) // len(plan.past_lens)
    tiles = -(-q_len // queries_per_tile(group, hopper_tile(q_len, group))) * kv.keys.shape[1]
    fills = _programs_each(num_rows * tiles, q.device) == 1
    return plain and same and fills and q.shape[2] in (64, 128) and plan.page_size >= 8


def hopper_tile(q_len: int, group: int) -> int:
    """Query rows of a tile of Hopper's kernel: all queries of a row share one read of its keys, up to 64 rows."""
    return min(TALL_TILE, max(TILE, 1 << (q_len * group - 1).bit_length()))


def _programs_each(tiles: int, device: torch.device) -> int:
    """Programs that may share the keys of each of so many tiles: as many as run beside each other, or one."""
    return max(1, PROGRAMS_PER_CORE * multiprocessors(device, CORES_OF_THE_INTERPRETER) // tiles)


def context_gpu(
    q: Tensor,
    kv: StoredKV,
    plan: GpuPlan,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    tile: int | None = None,
) -> Tensor:
    """Attention of q [N, Hq, D] on rows of any lengths, in tiles of so many query rows (None: as the windows fill)."""
    q = checked_queries(q, plan)
    if tile is None:
        rows_each = len(q) // len(plan.past_lens) * (q.shape[1] // kv.keys.shape[1])
        # Low tiles multiply float8 in an order of their own, and bits must not depend on the height: they do it alone.
        is_tall = rows_each >= TALL_TILE and plan.paths is None and kv.k_scale is None
        tile = TALL_TILE if is_tall else TILE
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    constants = _constants(q, kv, plan, window, sinks, tile)
    num_rows, num_pages = plan.page_table.shape
    group = constants["GROUP"]
    places = (len(q) // queries_per_tile(group, tile) + num_rows) * tiles_per_query(group, tile)
    launch(
        context_kernel,
        (places, constants["KV_HEADS"]),
        *(q, out, kv.keys, kv.values, kv.k_scale, kv.v_scale, sinks),
        *(plan.positions, plan.q_starts, plan.past_lens, plan.page_table, plan.limits, plan.paths),
        *(scale, window or 0, num_rows, q.stride(0), num_pages),
        **constants,
        pdl=True,
    )
    return out


def _constants(
    q: Tensor, kv: StoredKV, plan: GpuPlan, window: int | None, sinks: Tensor | None, tile: int
) -> dict[str, Any]:
    """What the kernels are compiled for, and how."""
    num_kv_heads, head_dim = kv.keys.shape[1:]
    return {
        "KV_HEADS": num_kv_heads,
        "GROUP": q.shape[1] // num_kv_heads,
        "D": head_dim,
        "D_PAD": padded(head_dim),
        "PAGE": plan.page_size,
        "ROWS": tile,
        "BLOCK": FLOAT32_BLOCK if q.is_cuda and q.dtype == torch.float32 else BLOCK,
        "TREE": plan.paths is not None,
        "WINDOWED": window is not None,
        "SINKS": sinks is not None,
        "SCALED": kv.k_scale is not None,
        # Of five stages two are for keys and values, the others for finding their pages.
        "STAGES": 5 if head_dim <= 128 and tile < TALL_TILE else 3,
        **SAME_BITS,
    }


def padded(head_dim: int) -> int:
    """The next power of two, as the kernels count."""
    return max(16, 1 << (head_dim - 1).bit_length())


def checked_queries(q: Tensor, plan: GpuPlan) -> Tensor:
    """Queries that the window was planned for, with the heads of a token side by side."""
    if len(q) != len(plan.positions):
        raise ValueError(f"q has {len(q)} tokens, but the window was planned for {len(plan.positions)}")
    return _whole_heads(q)


def _whole_heads(x: Tensor) -> Tensor:
    """x [N, heads, D] with the heads of a token side by side; a view of a fused projection has them so."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
