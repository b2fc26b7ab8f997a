"""Which tile a linear of a given shape uses on a GPU: a table of what was fastest on an H200.

The number of rows may choose the tile's height, width and depth, because they do not change a bit. It may not choose
the split, which does: that follows from the weight's shape alone. `peregrine bench tiles` measures other shapes.
"""

from dataclasses import dataclass

from peregrine.errors import ConfigError

SQUARE_UNIT = 2.0**24  # sums of squares are whole numbers of 1 / this
# Of one value. A larger one is made NaN, so that its request ends with an error: the sum of a row holds 32 of these.
MAX_SQUARE = 2.0**34
MIN_DEPTH = 16  # of a matrix instruction: inputs must be a multiple of it
# Where there are fewer tiles than processors, programs share the inputs of a tile: up to so many programs in all, each
# with so many inputs or more, in whole steps of so many.
SPLIT_PROGRAMS, SPLIT_INPUTS, SPLIT_DEPTH = 160, 512, 64
SPLIT_COLS = 64  # outputs of a tile that is shared
PROCESSORS = 132  # of an H200
WIDE_OUTPUTS = 32768


@dataclass(frozen=True, slots=True)
class Tile:
    """How much one program computes, and how."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int
    split: int = 1


@dataclass(frozen=True, slots=True)
class Room:
    """What a program has for the tiles on their way."""

    shared_bytes: int
    number_bytes: int  # of one input or weight

    def stages(self, wanted: int, numbers: int) -> int:
        """As many stages of so many numbers as are wanted, or as fit; they change no bit."""
        return max(1, min(wanted, self.shared_bytes // (numbers * self.number_bytes)))

    def half(self) -> "Room":
        """For each of two programs beside each other."""
        return Room(self.shared_bytes // 2, self.number_bytes)


ON_H200 = Room(227 * 1024, 2)
HEIGHTS = (16, 32, 64, 128)  # rows a tile may have
# kind of weight: rows: (cols, depth, warps, stages)
TABLES = {
    "plain": {16: (64, 128, 4, 6), 32: (64, 128, 4, 6), 64: (64, 128, 4, 6), 128: (64, 128, 8, 4)},
    "split": {16: (64, 128, 4, 5), 32: (64, 128, 4, 6), 64: (64, 128, 4, 6), 128: (64, 128, 8, 4)},
    "gated": {16: (64, 128, 4, 3), 32: (64, 128, 4, 4), 64: (64, 64, 4, 6), 128: (128, 64, 8, 4)},
    "wide": {16: (128, 128, 8, 3), 32: (128, 64, 4, 5), 64: (128, 64, 8, 4), 128: (128, 64, 8, 6)},
}
# The same for Hopper's own kernel.
HOPPER_TABLES = {
    "plain": {16: (64, 128, 4, 8), 32: (64, 128, 4, 8), 64: (64, 128, 4, 5), 128: (64, 64, 4, 8)},
    "split": {16: (64, 128, 4, 8), 32: (64, 128, 4, 8), 64: (64, 128, 4, 5), 128: (64, 64, 4, 8)},
    "gated": {16: (64, 128, 4, 4), 32: (64, 128, 4, 4), 64: (64, 128, 4, 4), 128: (64, 64, 4, 3)},
    "wide": {16: (128, 128, 8, 4), 32: (128, 128, 8, 4), 64: (128, 128, 8, 4), 128: (256, 64, 8, 4)},
}


def pick_split(num_outputs: int, num_inputs: int, gate: bool) -> int:
    """How many programs share the inputs of one tile."""
    tiles = -(-num_outputs // SPLIT_COLS)
    most = 1 if gate else min(SPLIT_PROGRAMS // tiles, num_inputs // SPLIT_INPUTS)
    return next((split for split in range(most, 1, -1) if num_inputs % (split * SPLIT_DEPTH) == 0), 1)


def kind_of(num_outputs: int, num_inputs: int, gate: bool) -> str:
    """Which table a weight's tiles are in."""
    if gate:
        return "gated"
    if num_outputs >= WIDE_OUTPUTS:
        return "wide"
    return "split" if pick_split(num_outputs, num_inputs, gate) > 1 else "plain"


def pick_tile(
    num_rows: int, num_outputs: int, num_inputs: int, gate: bool, on_hopper: bool = False, room: Room = ON_H200
) -> Tile:
    """The tile for so many rows of a linear; with `gate` there are twice as many weights as outputs."""
    if num_inputs % MIN_DEPTH:
        raise ConfigError(
            f"a linear of {num_inputs} inputs: GPU kernels take multiples of {MIN_DEPTH}; use device='cpu'"
        )
    rows = next((height for height in HEIGHTS if num_rows <= height), HEIGHTS[-1])
    split = pick_split(num_outputs, num_inputs, gate)
    table = HOPPER_TABLES if on_hopper else TABLES
    cols, depth, warps, stages = table[kind_of(num_outputs, num_inputs, gate)][rows]
    while (num_inputs // split) % depth:
        depth //= 2
    if (
        split > 1 and split * -(-num_outputs // cols) > PROCESSORS
    ):  # short programs: all at once, or some would start too late
        room = room.half()
    stages = room.stages(stages, (rows + cols * (2 if gate else 1)) * depth)
    return Tile(rows, cols, depth, warps, stages, split)
