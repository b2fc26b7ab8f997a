"""Which tiles the linears of experts use on a GPU, by how many rows an expert can expect.

They change no bit, as in linear_tiles.py: every output is one chain over its inputs.
"""

from dataclasses import dataclass

from peregrine.errors import ConfigError
from peregrine.kernels.linear.tiles import MIN_DEPTH, ON_H200, Room


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """How much one program computes, and how."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int


# rows of a block: (cols, depth, warps, stages). With few rows three programs fit on a processor, and hold in flight
# what it takes to read weights at the speed of memory.
GATED = {16: (64, 128, 4, 2), 32: (64, 64, 4, 5), 64: (64, 64, 4, 4), 128: (128, 64, 8, 4)}
PLAIN = {16: (64, 128, 4, 3), 32: (64, 128, 4, 4), 64: (64, 128, 4, 3), 128: (128, 64, 8, 4)}
# Instead of the first of them where three programs on each of an H200's multiprocessors are too few for all to run at
# once, and four, which this leaves room for, are about enough: a few that come later would read with most of it idle.
CROWDED, AT_ONCE = (64, 64, 4, 3), (3 * 132, 4.5 * 132)
DIRECT_ROWS = min(GATED)  # up to here every block holds all rows of a pass, and nobody has to plan blocks


def pick_expert_tiles(
    num_pairs: int, num_experts: int, size: int, inner_size: int, room: Room = ON_H200
) -> tuple[ExpertTile, ExpertTile]:
    """The tiles of gate_up and of down; both have blocks of the same height."""
    if size % MIN_DEPTH or inner_size % MIN_DEPTH:
        raise ConfigError(
            f"experts of {size} inputs and inner size {inner_size}: GPU kernels take multiples of {MIN_DEPTH}; "
            "use device='cpu'"
        )
    expected = num_pairs / num_experts
    rows = next((height for height in GATED if expected <= height / 2), max(GATED))
    gated = GATED[rows]
    hits = num_experts * (1 - (1 - 1 / num_experts) ** num_pairs)  # if pairs choose at random
    if rows == DIRECT_ROWS and AT_ONCE[0] < hits * inner_size / gated[0] < AT_ONCE[1]:
        gated = CROWDED
    return _tile(rows, gated, size, 2, room), _tile(rows, PLAIN[rows], inner_size, 1, room)


def _tile(rows: int, table: tuple[int, int, int, int], num_inputs: int, weights_each: int, room: Room) -> ExpertTile:
    cols, depth, warps, stages = table
    while num_inputs % depth:
        depth //= 2
    stages = room.stages(stages, (rows + cols * weights_each) * depth)
    return ExpertTile(rows, cols, depth, warps, stages)
