"""Which tile a linear layer uses on a GPU: a table of what was fastest on an H200.

The number of rows may choose the tile's height, width and depth, because they do not change a bit. It may not choose
the split, which does: that follows from the weight's shape alone. `peregrine bench tiles` measures other shapes.
"""

from dataclasses import dataclass, replace

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
# Of Hopper's kernel for many rows: rows of a group of warps, the rest of its tile, what descriptors of outputs need.
LARGE_HEIGHT, LARGE_COLS, LARGE_DEPTH, LARGE_STAGES, LARGE_ALIGNMENT = 64, 256, 64, 4, 8
LARGE_BOX = LARGE_COLS // 2  # of a copy
# Its tiles, as measured: what one takes, where 1 is a tile of two groups, and a piece of some quarters of its columns.
PIECES = {2: {1: 0.37, 2: 0.5, 3: 0.79}, 3: {1: 0.75, 2: 0.92, 3: 1.2}}  # by groups
THREE_GROUPS = 1.47
# Of split inputs and of residuals: by groups and eighths of the columns; what else parts of the last tiles take.
ADDING_TILES = {(2, 8): 1.0, (2, 5): 0.7, (2, 4): 0.525, (3, 4): 0.76}
PARTS_LATER = 0.03


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
# Rows up to which two programs that finish half of such a tile each are faster than the kernel for many rows.
MOST_IN_HALVES = 192


def tall_tile(num_rows: int, num_outputs: int, num_inputs: int, gate: bool, split: int) -> Tile | None:
    """Hopper's tile that holds all rows, if it is the fastest for so many."""
    kind = kind_of(num_outputs, gate, split)
    if split == 2 and num_rows > MOST_IN_HALVES:
        return None
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
    tiles: int  # that are not cut
    pieces: int = 0  # that the others are cut into, no more than there are programs
    rest: int = 0  # quarters of LARGE_COLS in a piece; 0: it is one of two parts of a tile's inputs
    split: int = 1
    groups: int = 2  # of warps, each with LARGE_HEIGHT rows of a tile
    eighths: int = 8  # of LARGE_COLS in a tile

    @property
    def in_pairs(self) -> bool:
        """Whether the two programs that have the parts of a tile finish it together."""
        return self.pieces > 0 and self.rest == 0

    @property
    def box(self) -> int:
        """Columns of a copy: so many that they make up tiles and pieces."""
        if self.eighths % 2:
            return LARGE_COLS // 8
        return LARGE_BOX // 2 if self.rest % 2 else LARGE_BOX


def large_together(col_tiles: int) -> int:
    """Tiles of rows that share a tile of the weight while it is in L2: a weight far larger is read half as often."""
    return 16 if col_tiles > 64 else 8


def large_plans(
    num_rows: int, num_outputs: int, gate: bool, add: bool, split: int, num_sms: int = MULTIPROCESSORS
) -> dict[LargePlan, float]:
    """The plans that there are, with what they cost: how long the program with the most work takes."""
    cols = LARGE_COLS // 2 if gate else LARGE_COLS
    two, three = (-(-num_rows // (groups * LARGE_HEIGHT)) for groups in (2, 3))  # tiles of rows
    if split == 1 and not add:
        of_two = whole_or_cut(two, -(-num_outputs // cols), num_sms, 2, 1.0)
        return of_two | whole_or_cut(three, -(-num_outputs // cols), num_sms, 3, THREE_GROUPS)
    plans = {}
    for (groups, eighths), cost in ADDING_TILES.items():
        tiles = (two if groups == 2 else three) * -(-num_outputs // (cols * eighths // 8))
        plan = LargePlan(min(num_sms, tiles), tiles, split=split, groups=groups, eighths=eighths)
        plans[plan] = cost * -(-tiles // num_sms)
        rounds, left = divmod(tiles, num_sms)
        if split == 2 and 0 < 2 * left <= num_sms and eighths % 2 == 0:
            plan = replace(plan, programs=num_sms if rounds else 2 * left, tiles=tiles - left, pieces=2 * left)
            plans[plan] = cost * (rounds + 0.5) + (PARTS_LATER if rounds else 0)
    return plans


def whole_or_cut(height: int, col_tiles: int, num_sms: int, groups: int, cost: float) -> dict[LargePlan, float]:
    """Plans of so many tiles of rows and of columns, of which a program takes this long for one."""
    tiles = height * col_tiles
    rounds, left = divmod(tiles, num_sms)
    plans = {LargePlan(min(num_sms, tiles), tiles, groups=groups): cost * -(-tiles // num_sms)}
    for rest, piece_cost in PIECES[groups].items() if left else ():
        cut, pieces = left, left * 4 // rest
        if rest == 3:  # pieces lie across tiles, so that of the last rows whole columns are cut: see `piece_of`
            last = (height - 1) % large_together(col_tiles) + 1
            cut_cols = min(col_tiles, -(-left // last))
            cut, pieces = last * cut_cols, last * -(-4 * cut_cols // 3)
        if left <= cut and pieces <= num_sms:
            plan = LargePlan(num_sms if rounds else pieces, tiles - cut, pieces, rest, groups=groups)
            plans[plan] = cost * rounds + piece_cost
    return plans


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
    if num_rows <= HEIGHTS[-1]:
        tiles = -(-num_outputs // (LARGE_COLS // 2 if gate else LARGE_COLS))
        if split > 1 or add or tiles < BUSY * -(-tiles // num_sms) * num_sms:
            return None
    plans = large_plans(num_rows, num_outputs, gate, add, split, num_sms)
    plan = min(plans, key=plans.__getitem__)
    if plan.in_pairs and 2 * plan.programs <= num_sms and num_rows % HEIGHTS[-1] == 0:
        return None  # half of the device would be idle, and rows fill the table's tiles
    return plan


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
