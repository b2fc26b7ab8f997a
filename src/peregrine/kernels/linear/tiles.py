"""Which tile a linear layer uses on a GPU: a table of what was fastest on an H200.

The number of rows may choose the tile's height, width and depth, because they do not change a bit. It may not choose
the split, which does: that follows from the weight's shape alone. `peregrine bench tiles` measures other shapes.
"""

from dataclasses import dataclass

import torch

from peregrine.errors import ConfigError

MIN_DEPTH = 16  # of a matrix instruction: the number of inputs must be a multiple of it
MAX_ROWS = 4096  # of one launch; longer inputs are cut, which bounds the workspace
# Where there are fewer tiles than multiprocessors, several programs share the inputs of a tile: at most SPLIT_PROGRAMS
# in all, each with SPLIT_INPUTS inputs or more, in whole steps of SPLIT_DEPTH.
SPLIT_PROGRAMS, SPLIT_INPUTS, SPLIT_DEPTH = 160, 512, 64
SPLIT_COLS = 64  # outputs of a tile that is shared
MULTIPROCESSORS = 132  # of an H200
BUSY = 0.8  # share of multiprocessors with a tile from which on tiles of many rows are the fastest for up to 128, too
WIDE_OUTPUTS = 32768
# Of narrow tiles, where two groups with whole ones cost 2, and of half a tile, where a whole one costs 1: both copy
# more for each product.
NARROW_COST, HALF_COST = 1.72, 0.6
# Rows that fill tiles of three groups, and the share of cost by which these may be dearer for a gate. Measured at 4,224
# rows of the 8B's: 1,275 us from rest and 1,524 us at the power limit, where two groups take 1,307 and 1,564.
FILLED_ROWS, FILLED_COST = range(22 * 192, 1 << 20, 192), 0.02
# Of Hopper's kernel for many rows: rows of a group of warps, the rest of its tile, what descriptors of outputs need.
LARGE_HEIGHT, LARGE_COLS, LARGE_DEPTH, LARGE_STAGES, LARGE_ALIGNMENT = 64, 256, 64, 4, 8


@dataclass(frozen=True, slots=True)
class Tile:
    """How much one program computes, and with which resources."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int
    split: int = 1  # programs that share the inputs
    tail: int = 0  # rows more, on Hopper: parts of a tile have powers of two, and 192 rows are 128 and 64
    parts: int = 1  # of the inputs, on Hopper: that one program multiplies one after the other

    @property
    def in_halves(self) -> bool:
        """Whether two programs that share the tile can finish a part of its rows each."""
        return self.tail > 0 and self.split == 2

    def constants(self) -> dict[str, int]:
        """Those of the kernels that it sets."""
        sizes = {"SPLIT": self.split, "ROWS": self.rows, "COLS": self.cols, "DEPTH": self.depth}
        return sizes | {"num_warps": self.warps}


@dataclass(frozen=True, slots=True)
class Room:
    """Shared memory that a program has for the tiles it is loading."""

    shared_bytes: int
    element_bytes: int  # of an input or a weight

    def stages(self, wanted: int, elements: int) -> int:
        """The wanted number of pipeline stages of this many elements, or as many as fit; they change no bit."""
        return max(1, min(wanted, self.shared_bytes // (elements * self.element_bytes)))

    def half(self) -> "Room":
        """Room for each of two programs on one multiprocessor."""
        return Room(self.shared_bytes // 2, self.element_bytes)


ON_H200 = Room(227 * 1024, 2)
HEIGHTS = (16, 32, 64, 128)  # rows a tile may have
# kind of weight: rows: (cols, depth, warps, stages)
TABLES = {
    "plain": {16: (64, 128, 4, 6), 32: (64, 128, 4, 6), 64: (64, 128, 4, 6), 128: (64, 128, 8, 4)},
    "split": {16: (64, 128, 4, 5), 32: (64, 128, 4, 6), 64: (64, 128, 4, 6), 128: (64, 128, 8, 4)},
    "gated": {16: (64, 128, 4, 3), 32: (64, 128, 4, 4), 64: (64, 64, 4, 6), 128: (128, 64, 8, 4)},
    "wide": {16: (128, 128, 8, 3), 32: (128, 64, 4, 5), 64: (128, 64, 8, 4), 128: (128, 64, 8, 6)},
}
# For Hopper's own kernel.
HOPPER_TABLES = {
    "plain": {16: (64, 128, 4, 8), 32: (64, 128, 4, 8), 64: (64, 128, 4, 5), 128: (64, 64, 4, 8)},
    "split": {16: (64, 128, 4, 8), 32: (64, 128, 4, 8), 64: (64, 128, 4, 5), 128: (64, 64, 4, 8)},
    "gated": {16: (64, 128, 4, 4), 32: (64, 128, 4, 4), 64: (64, 128, 4, 4), 128: (64, 64, 4, 3)},
    "wide": {16: (128, 128, 8, 4), 32: (128, 128, 8, 4), 64: (128, 128, 8, 4), 128: (256, 64, 8, 4)},
}
# For up to 256 rows all of them may share a tile on Hopper: its (rows, tail), then the entries of a table. Such a
# tile is taken where the device computes all tiles of a weight at once.
TALL_TILES: dict[str, dict[tuple[int, int], tuple[int, int, int, int]]] = {
    "plain": {(128, 64): (64, 64, 4, 6), (128, 128): (64, 64, 4, 5)},
    "split": {(128, 64): (64, 64, 4, 6), (128, 128): (64, 64, 4, 5)},
}
MOST_SHARED = 192  # rows up to which two programs had better have a part of the inputs each
# For more rows of a weight that two programs would share one has both parts of the inputs, one after the other, and two
# tiles have all rows: their (rows, tail), then the entries of a table, and the fewest inputs.
IN_TURN = {(128, 0): (64, 64, 4, 8, 0), (128, 64): (64, 64, 4, 6, 8192)}


def tall_tile(num_rows: int, num_outputs: int, num_inputs: int, gate: bool, split: int) -> Tile | None:
    """Hopper's tile that holds all rows, or half of them, if it is the fastest for so many."""
    kind = kind_of(num_outputs, gate, split)
    for (rows, tail), (cols, depth, warps, stages, fewest) in IN_TURN.items() if split == 2 else ():
        fits = MOST_SHARED < num_rows <= 2 * (rows + tail) and num_inputs >= fewest and num_inputs % (2 * depth) == 0
        if fits and 2 * -(-num_outputs // cols) <= MULTIPROCESSORS:
            return Tile(rows, cols, depth, warps, stages, tail=tail, parts=2)
    for (rows, tail), (cols, depth, warps, stages) in TALL_TILES.get(kind, {}).items():
        if HEIGHTS[-1] < num_rows <= rows + tail and num_inputs % (split * depth) == 0:
            at_once = split * -(-num_outputs // cols) <= MULTIPROCESSORS
            return Tile(rows, cols, depth, warps, stages, split, tail) if at_once else None
    return None


def pick_split(num_outputs: int, num_inputs: int, gate: bool) -> int:
    """How many programs share the inputs of one tile; follows from the weight's shape alone."""
    tiles = -(-num_outputs // SPLIT_COLS)
    most = 1 if gate else min(SPLIT_PROGRAMS // tiles, num_inputs // SPLIT_INPUTS)
    return next((split for split in range(most, 1, -1) if num_inputs % (split * SPLIT_DEPTH) == 0), 1)


def kind_of(num_outputs: int, gate: bool, split: int) -> str:
    """The table that holds a weight's tiles."""
    if gate:
        return "gated"
    if num_outputs >= WIDE_OUTPUTS:
        return "wide"
    return "split" if split > 1 else "plain"


def pick_tile(
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    gate: bool,
    on_hopper: bool = False,
    room: Room = ON_H200,
    split: int | None = None,
) -> Tile:
    """The tile of a linear for this many rows; with `gate` there are two rows of weights per output.

    `split`: that of the whole weight, if this one is a part of its rows.
    """
    check_inputs(f"a linear of {num_inputs} inputs", num_inputs)
    rows = next((height for height in HEIGHTS if num_rows <= height), HEIGHTS[-1])
    split = split or pick_split(num_outputs, num_inputs, gate)
    table = HOPPER_TABLES if on_hopper else TABLES
    cols, depth, warps, stages = table[kind_of(num_outputs, gate, split)][rows]
    if on_hopper and (tall := tall_tile(num_rows, num_outputs, num_inputs, gate, split)) is not None:
        return tall
    tail = 0
    if on_hopper and not gate and HEIGHTS[0] < num_rows < rows:
        # In two parts that begin where all their rows are there: see `hopper_kernel`.
        tail = rows // 4 if 2 * HEIGHTS[0] < num_rows <= 3 * rows // 4 else rows // 2
        rows //= 2
    while (num_inputs // split) % depth:
        depth //= 2
    if split > 1 and split * -(-num_outputs // cols) > MULTIPROCESSORS:
        room = room.half()  # programs are short: all must run at once, or the last ones would start too late
    stages = room.stages(stages, (rows + tail + cols * (2 if gate else 1)) * depth)
    return Tile(rows, cols, depth, warps, stages, split, tail)


@dataclass(frozen=True, slots=True)
class LargePlan:
    """How Hopper's kernel for many rows (`hopper_large.py`) computes a linear."""

    programs: int
    split: int
    in_pairs: bool  # two programs have one part of the inputs each
    groups: int = 2  # of warps, each with LARGE_HEIGHT rows of a tile
    narrow: bool = False  # tiles have three quarters of LARGE_COLS


def large_plan(
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    gate: bool,
    add: bool,
    num_sms: int = MULTIPROCESSORS,
    split: int | None = None,
) -> LargePlan | None:
    """The plan of a linear on Hopper for this many rows, None where the table's tiles serve; it changes no bit.

    `split`: that of the whole weight, if this one is a part of its rows.
    """
    split = split or pick_split(num_outputs, num_inputs, gate)
    aligned = num_outputs % LARGE_ALIGNMENT == 0 and num_inputs % (split * LARGE_DEPTH) == 0
    if num_rows <= LARGE_HEIGHT or not aligned or num_inputs // split < LARGE_DEPTH * LARGE_STAGES:
        return None
    if tall_tile(num_rows, num_outputs, num_inputs, gate, split) is not None:
        return None
    plain = split == 1 and not add
    tiles, three = (
        -(-num_rows // (groups * LARGE_HEIGHT)) * -(-num_outputs // (LARGE_COLS // 2 if gate else LARGE_COLS))
        for groups in (2, 3)
    )
    if num_rows <= HEIGHTS[-1] and not (plain and tiles >= BUSY * -(-tiles // num_sms) * num_sms):
        return None

    def cost(groups: int, tiles: int, half: float = 0.5) -> float:
        whole, left = divmod(tiles, num_sms)
        # Without split inputs or a residual, tiles that would leave half of the programs idle are halved.
        return groups * (whole + (half if plain and 2 * left <= num_sms else 1.0) * (left > 0))

    narrow = -(-num_rows // (2 * LARGE_HEIGHT)) * -(-num_outputs // (LARGE_COLS * 3 // 4))
    others = min(cost(2, tiles, HALF_COST), cost(3, three, HALF_COST))
    if plain and not gate and NARROW_COST * -(-narrow // num_sms) < others:
        return LargePlan(min(num_sms, narrow), split, in_pairs=False, narrow=True)
    # Three groups copy less for each product. Of a gate they were not faster where they cost the same, unless many
    # rows fill their tiles.
    more = 0.5 if not gate else FILLED_COST * cost(2, tiles) if num_rows in FILLED_ROWS else 0.0
    if plain and cost(3, three) - cost(2, tiles) < more:
        return LargePlan(min(num_sms, 2 * three), split, in_pairs=False, groups=3)
    in_pairs = split == 2 and 2 * tiles <= num_sms
    if in_pairs and 4 * tiles <= num_sms and num_rows % HEIGHTS[-1] == 0:
        return None  # half of the device would be idle, and rows fill the table's tiles
    return LargePlan(min(num_sms, (2 if in_pairs or plain else 1) * tiles), split, in_pairs)


def check_inputs(what: str, *sizes: int) -> None:
    """Refuse inputs that do not fill matrix instructions."""
    if any(size % MIN_DEPTH for size in sizes):
        raise ConfigError(f"{what}: GPU kernels take multiples of {MIN_DEPTH}; use device='cpu'")


def workspace_sizes(max_rows: int = MAX_ROWS) -> tuple[int, int]:
    """(float32 partial sums, int32 counters) that programs which share tiles need for this many rows."""
    return SPLIT_PROGRAMS * SPLIT_COLS * max_rows, SPLIT_PROGRAMS // 2 * max_rows // min(HEIGHTS)


def workspace_bytes(device: torch.device) -> int:
    """Memory that linear layers hold on a device from their first launch on, besides weights and results."""
    return 4 * sum(workspace_sizes()) if device.type == "cuda" else 0
