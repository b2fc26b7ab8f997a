"""Where the pieces of attention on a GPU begin: tiles of query rows, splits and blocks of key indices.

Borders of splits and blocks are a function of the key index alone, never of a length, a batch or a window.
"""

import triton
import triton.language as tl

TILE = 16  # query rows per tile, as many as the smallest matrix instruction takes
BLOCK = 64  # key indices per product; a divisor of every split's width
FLOAT32_BLOCK = 16  # float32 has no matrix instruction: a product is written out, and large ones take long to compile
MAX_NODES = 64  # bits of an ancestor word


def num_splits(num_keys: int) -> int:
    """How many splits so many keys touch: the host's bound, from the width of the page table."""
    return split_of_index(num_keys - 1) + 1


# 128 keys each up to 4k, then a 32nd of the context or more: 256 up to 8k, 512 up to 16k, 1024 up to 32k, 2048 beyond.
# A program's share is never much smaller than a split, and a long context has few states to merge.
def split_of_index(index: int) -> int:
    """The split that a key index lies in; works on the host and on the device."""
    near = min(index, 4096) // 128 + max(min(index, 8192) - 4096, 0) // 256
    far = max(min(index, 16384) - 8192, 0) // 512 + max(min(index, 32768) - 16384, 0) // 1024
    return near + far + max(index - 32768, 0) // 2048


def start_of_split(split: int) -> int:
    """The first key index of a split; works on the host and on the device."""
    near = min(split, 32) * 128 + max(min(split, 48) - 32, 0) * 256
    far = max(min(split, 64) - 48, 0) * 512 + max(min(split, 80) - 64, 0) * 1024
    return near + far + max(split - 80, 0) * 2048


split_of = triton.jit(split_of_index)
split_start = triton.jit(start_of_split)


def queries_per_tile(group: int, rows: int) -> int:
    """Whole queries, with all heads of their group, in one tile; 1 if a group fills the tile or more."""
    return max(1, rows // group)


def tiles_per_query(group: int, rows: int) -> int:
    """Tiles one query's group of heads is spread over; 1 unless the group is larger than a tile."""
    return -(-group // rows)


@triton.jit
def row_of_tile(tile, row, GROUP: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(query of its window, head of its group, whether there is such a head) of some rows of a tile."""
    HEADS: tl.constexpr = GROUP if GROUP < ROWS else ROWS
    QUERIES: tl.constexpr = ROWS // HEADS
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    query = (tile // HEAD_TILES) * QUERIES + row // HEADS
    head = (tile % HEAD_TILES) * HEADS + row % HEADS
    return query, head, (row < QUERIES * HEADS) & (head < GROUP)


@triton.jit
def tile_rows(tile, GROUP: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same of all rows of a tile."""
    return row_of_tile(tile, tl.arange(0, ROWS), GROUP, ROWS)
