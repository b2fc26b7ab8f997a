"""What the host decides about attention on a GPU: where splits and tiles begin, and which kernel serves a window.

Everything is a pure function of sizes that the host knows, so nothing waits for the device and a captured launch can be
repeated with other lengths. This file imports no Triton; the functions marked "host and device" are compiled into the
kernels as well (`triton.jit(split_of_index)`).
"""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from peregrine.kernels.runtime.cuda import nvrtc_ready
from peregrine.kernels.runtime.gpu import is_hopper, multiprocessors

TILE = 16  # query rows (query, head of one KV head) of a tile: the lowest matrix instruction
TALL_TILE = 64  # query rows of a tile of long windows
PROMPT_TILE = 128  # query rows of a tile of Hopper's own kernel for long windows
BLOCK = 64  # key indices per product; a divisor of every split's width
FLOAT32_BLOCK = 16  # float32 has no matrix instruction: the product is unrolled, and a large one takes long to compile
PROGRAMS_PER_SM = 2  # split-KV programs that fit on a multiprocessor beside each other
INTERPRETED_SMS = 16  # multiprocessors that the interpreter pretends to have
MLA_MAX_SPLITS = 132  # one for each multiprocessor of an H200; fixed for every device, since splits decide bits
MLA_WARPS = {16: 4, 32: 4, 64: 8}  # by rows of an MLA tile; the acc of a higher one would not fit into registers
MAX_RAGGED_DECODE = 16  # longest row of a ragged window that the decode kernel takes; prompts are longer
HOPPER_COLUMN = 64  # entries that the copy engine and the matrix unit of Hopper take side by side
HOPPER_MIN_PAGE = 8  # tokens of the smallest page that the copy engine takes
# Of Hopper's own kernel for split-KV: the most tiles of a row and KV head, the fewest programs that share their keys.
HOPPER_SPLIT_TILES, HOPPER_SPLIT_PROGRAMS = 4, 4


@dataclass(frozen=True, slots=True)
class StoredKV:
    """One layer's part of a KV store."""

    keys: Tensor  # [slots, Hkv, D]
    values: Tensor  # [slots, Hkv, D]
    k_scale: Tensor | None  # [] f32 factor of every stored key; None: 1
    v_scale: Tensor | None  # [] f32 factor of every stored value; None: 1


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """Which keys the queries of one forward see; shared by all layers."""

    positions: Tensor  # [N] i64
    q_starts: Tensor  # [R + 1] i64
    past_lens: Tensor  # [R] i64
    page_table: Tensor  # [R, P]
    page_size: int
    limits: Tensor | None  # [N] i32 keys that a tree's node sees; None: causal by position
    paths: Tensor | None  # [N, MAX_NODES] i64 slots of a node's ancestors, by ascending bit
    longest: int | None = None  # queries on the longest row, or more; None: all rows have the same number

    @property
    def max_q_len(self) -> int:
        return self.longest or len(self.positions) // len(self.past_lens)


def dense_heads(x: Tensor) -> Tensor:
    """x [N, heads, D] with each token's heads side by side in memory; a view of a fused projection has them so."""
    if x.is_contiguous():
        return x
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


# Dense splits have 128 keys up to index 4k, then a 32nd of the index or more: 256 up to 8k, 512 up to 16k, 1024 up to
# 32k, 2048 beyond. A program's part of the keys is never much smaller than a split; a long context has few partials.
def split_of_index(index: int) -> int:
    """The dense split that a key index lies in. Host and device."""
    near = min(index, 4096) // 128 + max(min(index, 8192) - 4096, 0) // 256
    far = max(min(index, 16384) - 8192, 0) // 512 + max(min(index, 32768) - 16384, 0) // 1024
    return near + far + max(index - 32768, 0) // 2048


def start_of_split(split: int) -> int:
    """The first key index of a dense split. Host and device."""
    near = min(split, 32) * 128 + max(min(split, 48) - 32, 0) * 256
    far = max(min(split, 64) - 48, 0) * 512 + max(min(split, 80) - 64, 0) * 1024
    return near + far + max(split - 80, 0) * 2048


def num_splits(num_keys: int) -> int:
    """How many dense splits this many keys touch."""
    return split_of_index(num_keys - 1) + 1


# MLA has one KV head, so splits must be narrow for all multiprocessors to find work in one row; but a split's partial
# is as large as the latents of a hundred keys. So a query has up to MLA_MAX_SPLITS splits of 128 keys or more.
def mla_split_width(num_keys: int, max_splits: int = MLA_MAX_SPLITS, block: int = BLOCK) -> int:
    """Keys per split for a query that sees this many keys; one block if it sees none. Host and device."""
    blocks = (num_keys + (max_splits * block - 1)) // (max_splits * block)
    return (blocks + (blocks < 2)) * block


def mla_max_keys(width: int, max_splits: int = MLA_MAX_SPLITS) -> int:
    """The most keys that are cut into MLA splits of this width. Host and device."""
    return width * max_splits


def mla_num_splits(num_keys: int) -> int:
    """How many splits a query that sees this many keys or fewer has at most."""
    return min(MLA_MAX_SPLITS, -(-num_keys // (2 * BLOCK)))


def queries_per_tile(group: int, rows: int) -> int:
    """Whole queries, with all heads of their group, in one tile; 1 if a group fills the tile or more."""
    return max(1, rows // group)


def tiles_per_query(group: int, rows: int) -> int:
    """Tiles that one query's group of heads is spread over; 1 unless the group is larger than a tile."""
    return -(-group // rows)


def tiles_of_row(q_len: int, group: int, rows: int) -> int:
    """Tiles of one row's q_len queries for one KV head."""
    return -(-q_len // queries_per_tile(group, rows)) * tiles_per_query(group, rows)


def max_tiles(num_tokens: int, num_rows: int, group: int, rows: int) -> int:
    """Upper bound of the tiles of rows of any lengths for one KV head: each row may leave one unfilled."""
    return (num_tokens // queries_per_tile(group, rows) + num_rows) * tiles_per_query(group, rows)


class Kernel(Enum):
    """The two kinds of attention kernel."""

    DECODE = "decode"  # short windows: programs share the keys of a tile, or Hopper's own dense kernel
    CONTEXT = "context"  # any window: one program reads all keys of a tile


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel and how it is launched. Every launch gives the same bits."""

    kernel: Kernel
    on_hopper: bool  # Hopper's own kernel, else Triton's
    tile: int  # query rows of a tile
    programs: int  # that share the keys of a tile; each split's state is stored and merged. 0: one program alone


@dataclass(frozen=True, slots=True)
class Problem:
    """The sizes of one layer's attention in one forward: all that decides which kernel serves it."""

    num_rows: int
    num_tokens: int
    q_len: int | None  # queries on every row; None: rows differ
    max_q_len: int  # queries on the longest row
    num_keys: int  # places in a row of the page table
    page_size: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    is_mla: bool  # values are the first part of their keys
    dtype: torch.dtype
    kv_dtype: torch.dtype
    is_tree: bool
    has_window: bool  # a sliding window
    has_sinks: bool

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def suits_hopper(self) -> bool:
        """Whether keys can be copied and multiplied as Hopper's own kernels do: causal, 16 bit, pages that fit."""
        same = self.kv_dtype == self.dtype and self.dtype in (torch.bfloat16, torch.float16)
        return same and not self.is_tree and self.page_size >= HOPPER_MIN_PAGE


@dataclass(frozen=True, slots=True)
class Gpu:
    """What is asked of a device."""

    is_cuda: bool  # False: the interpreter
    is_hopper: bool
    num_sms: int
    compiles_cuda: bool  # CUDA C++, by NVRTC


def gpu_of(tensor: Tensor) -> Gpu:
    """The device that this tensor lies on."""
    hopper = is_hopper(tensor)
    num_sms = multiprocessors(tensor.device, INTERPRETED_SMS)
    return Gpu(tensor.is_cuda, hopper, num_sms, compiles_cuda=hopper and nvrtc_ready())


def context_launch(problem: Problem, gpu: Gpu) -> Launch:
    """How the context kernel serves this problem."""
    query_rows = problem.num_tokens // problem.num_rows * problem.group  # of an average row
    if problem.is_mla:
        on_hopper = gpu.is_hopper and _hopper_takes_mla(problem)
        return Launch(Kernel.CONTEXT, on_hopper, TALL_TILE if on_hopper else _mla_tile(query_rows, problem, gpu), 0)
    if gpu.is_hopper and _hopper_takes_dense(problem) and query_rows >= PROMPT_TILE:
        return Launch(Kernel.CONTEXT, True, PROMPT_TILE, 0)
    # Low tiles multiply float8 in an order of their own, and bits must not depend on the height: float8 has no others.
    is_tall = query_rows >= TALL_TILE and not problem.is_tree and problem.kv_dtype != torch.float8_e4m3fn
    return Launch(Kernel.CONTEXT, False, TALL_TILE if is_tall else TILE, 0)


def decode_launch(problem: Problem, gpu: Gpu, max_q_len: int) -> Launch | None:
    """How the decode kernel serves this problem; None if it cannot, or if no two programs would share a tile's keys.

    Where tiles alone fill the device, a program that leaves partials only does more than the context kernel.
    """
    if problem.max_q_len > (max_q_len if problem.q_len else min(max_q_len, MAX_RAGGED_DECODE)):
        return None
    if not problem.is_mla:
        return _dense_decode(problem, problem.max_q_len, gpu)
    if problem.q_len is None:
        return None
    pairs = problem.q_len * problem.num_heads
    on_hopper = gpu.is_hopper and _hopper_takes_mla(problem)
    tile = _mla_hopper_tile(pairs) if on_hopper else _mla_tile(pairs, problem, gpu)
    tiles = problem.num_rows * tiles_of_row(problem.q_len, problem.num_heads, tile)
    programs = min(mla_num_splits(problem.num_keys), gpu.num_sms // tiles)
    return Launch(Kernel.DECODE, on_hopper, tile, programs) if programs > 1 else None


def _dense_decode(problem: Problem, q_len: int, gpu: Gpu) -> Launch | None:
    group, rows = problem.group, problem.num_rows * problem.num_kv_heads
    if gpu.is_hopper and _hopper_takes_dense(problem) and (own := _hopper_dense_decode(problem, q_len, gpu)):
        return own
    most = num_splits(problem.num_keys) + (2 * queries_per_tile(group, TILE) if problem.is_tree else 0)
    mean = -(-problem.num_tokens // problem.num_rows)  # tiles past a row's end are empty and leave at once
    programs = min(most, _programs_per_tile(rows * tiles_of_row(mean, group, TILE), gpu))
    return Launch(Kernel.DECODE, False, TILE, programs) if programs > 1 else None


def _hopper_dense_decode(problem: Problem, q_len: int, gpu: Gpu) -> Launch | None:
    """One program for each tile where tiles alone fill the device; else some that share the keys of a row and KV head.

    With few of these for each, split-KV in Triton, which has two on a multiprocessor, was as fast.
    """
    group, rows = problem.group, problem.num_rows * problem.num_kv_heads
    tile = hopper_tile(q_len, group)
    if _programs_per_tile(rows * tiles_of_row(q_len, group, tile), gpu) == 1:
        return Launch(Kernel.DECODE, True, tile, 0)
    at_once = (2 if problem.key_dim <= HOPPER_COLUMN else 1) * gpu.num_sms // rows  # of small heads two fit
    programs = min(num_splits(problem.num_keys), at_once)
    fits = tiles_of_row(q_len, group, TILE) <= HOPPER_SPLIT_TILES and at_once >= HOPPER_SPLIT_PROGRAMS
    return Launch(Kernel.DECODE, True, TILE, programs) if gpu.compiles_cuda and fits and programs > 1 else None


def _programs_per_tile(tiles: int, gpu: Gpu) -> int:
    """Programs that can share the keys of each of this many tiles and all run at once; at least one."""
    return max(1, PROGRAMS_PER_SM * gpu.num_sms // tiles)


def hopper_tile(q_len: int, group: int) -> int:
    """Query rows of a tile of Hopper's dense kernel: all queries of a row share one read of its keys, up to 64 rows."""
    return min(TALL_TILE, max(TILE, 1 << (q_len * group - 1).bit_length()))


def _hopper_takes_dense(problem: Problem) -> bool:
    """Whether heads are one or two columns, whole groups of them fit a tile, and keys are only cut by position."""
    plain = problem.suits_hopper and not problem.has_window and not problem.has_sinks
    return plain and problem.key_dim in (HOPPER_COLUMN, 2 * HOPPER_COLUMN) and problem.group <= TALL_TILE


def _hopper_takes_mla(problem: Problem) -> bool:
    """Whether latents and rotated parts are whole columns: eight warps add two columns of latents at a time.

    Partials are merged in rows of a power of two, and the keys of a larger latent would not fit in shared memory.
    """
    rank, rope = problem.value_dim, problem.key_dim - problem.value_dim
    whole = rank % (2 * HOPPER_COLUMN) == 0 and rope % HOPPER_COLUMN == 0
    return problem.suits_hopper and whole and rank & (rank - 1) == 0 and problem.key_dim <= 9 * HOPPER_COLUMN


def hopper_takes_mla_prompt(rank: int, rope: int) -> bool:
    """Whether Hopper's MLA kernel for prompts takes latents of this rank: two groups of warps have pairs of columns.

    The weights of a block take the place of its rotated part.
    """
    return rank in (4 * HOPPER_COLUMN, 8 * HOPPER_COLUMN) and rope == HOPPER_COLUMN


def _mla_hopper_tile(pairs: int) -> int:
    return TILE if pairs <= TILE else TALL_TILE


def _mla_tile(pairs: int, problem: Problem, gpu: Gpu) -> int:
    """Rows of a tile of the Triton MLA kernel for rows of this many (query, head) pairs."""
    if gpu.is_cuda:
        # 16 bit: tiles of 16 and 32 rows, compiled by Triton 3.6, gave other results from run to run on an H200, and
        # illegal accesses at long contexts; the interpreter has them right. float32: large products compile slowly.
        return min(MLA_WARPS) if problem.dtype == torch.float32 else max(MLA_WARPS)
    return next((tile for tile in MLA_WARPS if pairs <= tile), max(MLA_WARPS))
