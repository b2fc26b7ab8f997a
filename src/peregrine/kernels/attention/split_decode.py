"""Launches `split_decode.cu`: split-KV decode of few rows on Hopper, whose keys are copied ahead of its queries."""

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from peregrine.kernels.attention.plan import BLOCK, HOPPER_COLUMN, TILE, GpuPlan, StoredKV
from peregrine.kernels.runtime.cuda import Kernel, load_kernel, pointer, shared_source, tensor_map

STAGES = 4  # places in the ring: keys and values of two pairs of blocks
WEIGHT_BYTES, TOP_BYTES = 2 * BLOCK * TILE * 2, 2 * TILE * 4 * 4  # of a tile and a pair of blocks
ONES = {torch.bfloat16: 0x3F803F80, torch.float16: 0x3C003C00}
INDEX = {torch.int32: "int", torch.int64: "i64"}


class Sizes(ctypes.Structure):
    """The struct of that name in `split_decode.cu`."""

    _fields_ = [
        ("scale", ctypes.c_float),
        ("query_stride", ctypes.c_int),
        ("num_pages", ctypes.c_int),
        ("max_splits", ctypes.c_int),
    ]


@dataclass(frozen=True, slots=True)
class SplitShape:
    """What the kernel is compiled for."""

    tiles: int  # of a row and KV head
    group: int  # query heads of a KV head
    kv_heads: int
    head_dim: int
    page_size: int
    index: torch.dtype  # of the page table
    dtype: torch.dtype
    stages: int = STAGES

    @property
    def warps(self) -> int:
        """Those of a tile: as many as a program may have."""
        return 8 if self.tiles <= 2 else 4

    @property
    def threads(self) -> int:
        """All tiles', and a warp that copies."""
        return 32 * (self.warps * self.tiles + 1)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program: the ring of keys and values; of each tile queries, then weights, and tops."""
        place = 2 * BLOCK * self.head_dim * 2
        room = max(TILE * (2 * self.head_dim + 16), WEIGHT_BYTES)
        return self.stages * (place + 16) + self.tiles * (room + TOP_BYTES)


def run_split_decode(
    q: Tensor, kv: StoredKV, plan: GpuPlan, tiles: int, programs: int, partials: tuple[Tensor, Tensor], scale: float
) -> None:
    """The states of all splits of q [N, Hq, D] go to `partials`: those that `decode_kernel` stores.

    A row has this many tiles for each KV head, and its keys are shared by this many programs.
    """
    num_rows, num_pages = plan.page_table.shape
    num_kv_heads, head_dim = kv.keys.shape[1:]
    group, index = q.shape[1] // num_kv_heads, plan.page_table.dtype
    shape = SplitShape(tiles, group, num_kv_heads, head_dim, plan.page_size, index, q.dtype)
    stores = (tensor_map(x.flatten(1), min(plan.page_size, BLOCK), HOPPER_COLUMN) for x in (kv.keys, kv.values))
    places = plan.positions, plan.q_starts, plan.past_lens, plan.page_table
    sizes = Sizes(scale, q.stride(0), num_pages, partials[0].shape[1])
    grid = programs, num_kv_heads, num_rows
    kernel_of(shape, q.device).launch(grid, *stores, *map(pointer, (q, *partials, *places)), sizes)


@functools.cache
def kernel_of(shape: SplitShape, device: torch.device) -> Kernel:
    """The kernel of a shape, compiled once."""
    with torch.cuda.device(device):
        return load_kernel(split_source(shape), "split_decode", shape.threads, shape.shared_bytes, cluster=1)


def split_source(shape: SplitShape) -> str:
    """The CUDA C++ of a shape."""
    known = {
        "TILES": shape.tiles,
        "WARPS": shape.warps,
        "STAGES": shape.stages,
        "GROUP": shape.group,
        "KV_HEADS": shape.kv_heads,
        "DIM": shape.head_dim,
        "PAGE": shape.page_size,
        "INDEX": INDEX[shape.index],
        "ONES": f"{ONES[shape.dtype]:#x}u",
    }
    return shared_source(shape.dtype, known) + Path(__file__).with_suffix(".cu").read_text()
