"""Which tiles the linear layers of experts use on a GPU, by how many rows an expert can expect; they change no bit."""

from peregrine.kernels.linear.tiles import MULTIPROCESSORS, ON_H200, Room, Tile, check_inputs

# rows of a block: (cols, depth, warps, stages). With few rows three programs fit on a multiprocessor, which is enough
# loads in flight to read weights at the speed of memory.
GATED = {16: (64, 128, 4, 2), 32: (64, 64, 4, 5), 64: (64, 64, 4, 4), 128: (128, 64, 8, 4)}
PLAIN = {16: (64, 128, 4, 3), 32: (64, 128, 4, 4), 64: (64, 128, 4, 3), 128: (128, 64, 8, 4)}
# Used instead of GATED[16] when 3 to 4.5 programs per multiprocessor are needed: four fit, which avoids a tail wave.
CROWDED, AT_ONCE = (64, 64, 4, 3), (3 * MULTIPROCESSORS, 4.5 * MULTIPROCESSORS)
# Of Hopper's own kernel for few rows: rows of a tile, pairs of row and expert, experts, inputs of a step and of a row.
FEW_ROWS, FEW_PAIRS, FEW_EXPERTS, FEW_DEPTH, FEW_INPUTS = 8, 64, 256, 128, 2048
DIRECT_ROWS = min(GATED)  # up to here a block holds all rows of a pass, and no plan is needed


def pick_expert_tiles(
    num_pairs: int, num_experts: int, size: int, inner_size: int, room: Room = ON_H200
) -> tuple[Tile, Tile]:
    """The tiles of gate_up and of down; both have blocks of the same height."""
    check_inputs(f"experts of {size} inputs and inner size {inner_size}", size, inner_size)
    expected = num_pairs / num_experts
    rows = next((height for height in GATED if expected <= height / 2), max(GATED))
    gated = GATED[rows]
    hits = num_experts * (1 - (1 - 1 / num_experts) ** num_pairs)  # experts that are chosen, if pairs choose at random
    if rows == DIRECT_ROWS and AT_ONCE[0] < hits * inner_size / gated[0] < AT_ONCE[1]:
        gated = CROWDED
    return _tile(rows, gated, size, 2, room), _tile(rows, PLAIN[rows], inner_size, 1, room)


def _tile(rows: int, table: tuple[int, int, int, int], num_inputs: int, weights_each: int, room: Room) -> Tile:
    cols, depth, warps, stages = table
    while num_inputs % depth:
        depth //= 2
    stages = room.stages(stages, (rows + cols * weights_each) * depth)
    return Tile(rows, cols, depth, warps, stages)
