"""Which linears the kernels in CUDA C++ compute on Hopper, and in which tiles: those that they are fastest for.

`clustered.cu` has those of up to 64 rows whose inputs are in parts: programs of a cluster add up their sums faster than
through global memory. `fitted.cu` has more rows, where tiles of a power of two leave multiprocessors idle or read too
much: up to 384 of a plain weight that fills the device once, 128 of one whose inputs are in two parts or that is gated.
For all others the kernels in Gluon were as fast or faster.
"""

from dataclasses import dataclass

from peregrine.kernels.linear.tiles import (
    LARGE_ALIGNMENT,
    LARGE_DEPTH,
    LARGE_HEIGHT,
    MULTIPROCESSORS,
    ON_H200,
    SPLIT_COLS,
    LargePlan,
    large_plan,
    pick_split,
)
from peregrine.kernels.runtime.cuda import nvrtc_ready

STEP = 16  # of a tile's width: gates and ups lie in groups of 8
LEAST_INPUTS = 4096  # of the weights that were measured
MOST_ROWS = {"plain": 384, "split": 128, "gated": 128}
# Widths that were the fastest: narrower tiles read too many rows for their outputs, of wider ones there are too few.
WIDTHS = {"plain": range(48, 145), "split": range(48, 129), "gated": range(64, 225)}
BARRIER_BYTES = 16  # of a place in the ring
# Of clustered tiles: inputs of a step, numbers of rows that there are kernels for, and programs that share a tile.
CLUSTERED_DEPTH, CLUSTERED_WIDTHS, MAX_CLUSTER = 128, (8, 16, 32, 64), 8
CLUSTERABLE = 0.9  # share of the multiprocessors that clusters of more than two can take: the rest is left over
MOST_IN_TWOS = 16  # rows


@dataclass(frozen=True, slots=True)
class FittedPlan:
    """The tiles of a linear: a program has one, or half of the inputs of one."""

    groups: int  # of four warps, each with LARGE_HEIGHT rows of a tile
    cols: int  # rows of the weight in a tile
    split: int = 1  # parts of the inputs: 1 or 2

    @property
    def stages(self) -> int:
        """Places in the ring: as many as fit."""
        return ON_H200.shared_bytes // (self._place_bytes + BARRIER_BYTES)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program."""
        return self.stages * (self._place_bytes + BARRIER_BYTES)

    @property
    def threads(self) -> int:
        """Those that multiply, and a warp that copies."""
        return 128 * self.groups + 32

    @property
    def _place_bytes(self) -> int:
        return (self.groups * LARGE_HEIGHT + self.cols) * LARGE_DEPTH * ON_H200.element_bytes

    def programs(self, num_rows: int, weight_rows: int) -> int:
        """How many there are."""
        return -(-num_rows // (self.groups * LARGE_HEIGHT)) * -(-weight_rows // self.cols) * self.split


@dataclass(frozen=True, slots=True)
class ClusteredPlan:
    """The tiles of a linear whose inputs are in parts: the programs of a cluster have one of these each."""

    width: int  # rows that a program has room for
    split: int
    steps: int  # of a part of the inputs
    alone: bool  # on a multiprocessor; else there are two

    @property
    def cols(self) -> int:
        """Rows of the weight in a tile."""
        return SPLIT_COLS

    @property
    def stages(self) -> int:
        """Places in the ring: as many as fit."""
        room = ON_H200 if self.alone else ON_H200.half()
        return min(self.steps, room.shared_bytes // (self._place_bytes + BARRIER_BYTES))

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program: the ring, and then the sums in its place."""
        return max(self.stages * (self._place_bytes + BARRIER_BYTES), 4 * self.width * (SPLIT_COLS + 4))

    @property
    def threads(self) -> int:
        """Those that multiply, and a warp that copies."""
        return 128 + 32

    @property
    def _place_bytes(self) -> int:
        return (SPLIT_COLS + self.width) * CLUSTERED_DEPTH * ON_H200.element_bytes

    def programs(self, num_rows: int, weight_rows: int) -> int:
        """How many there are."""
        assert num_rows <= self.width
        return -(-weight_rows // SPLIT_COLS) * self.split


CudaPlan = FittedPlan | ClusteredPlan


def clustered_plan(
    num_rows: int, num_outputs: int, num_inputs: int, gate: bool, split: int, num_sms: int = MULTIPROCESSORS
) -> ClusteredPlan | None:
    """The plan for this many rows, None where other kernels serve; it changes no bit.

    All clusters must run at once. Where they do not with a multiprocessor for each program, two share one, which pays
    for few rows only: more places of the ring would be needed.
    """
    whole = num_inputs % (split * CLUSTERED_DEPTH) == 0 and num_outputs % LARGE_ALIGNMENT == 0
    if gate or not whole or not 1 < split <= MAX_CLUSTER or not 0 < num_rows <= CLUSTERED_WIDTHS[-1]:
        return None
    clusters = -(-num_outputs // SPLIT_COLS)
    alone = clusters <= (num_sms // 2 if split == 2 else int(CLUSTERABLE * num_sms) // split)
    if not alone and num_rows > MOST_IN_TWOS:
        return None
    width = next(width for width in CLUSTERED_WIDTHS if num_rows <= width)
    return ClusteredPlan(width, split, num_inputs // (split * CLUSTERED_DEPTH), alone)


def fitted_plan(
    num_rows: int, num_outputs: int, num_inputs: int, gate: bool, add: bool, split: int, num_sms: int = MULTIPROCESSORS
) -> FittedPlan | None:
    """The plan for this many rows, None where other kernels serve; it changes no bit."""
    kind = "gated" if gate else "plain" if split == 1 else "split"
    if split > 2 or not LARGE_HEIGHT < num_rows <= MOST_ROWS[kind] or (add and split == 1):
        return None
    if num_inputs < LEAST_INPUTS or num_inputs % (split * LARGE_DEPTH) or num_outputs % LARGE_ALIGNMENT:
        return None
    groups, weight_rows = 3 if 128 < num_rows <= 192 else 2, num_outputs * (2 if gate else 1)
    heights = -(-num_rows // (groups * LARGE_HEIGHT))
    cols = STEP * -(-weight_rows * heights * split // (STEP * num_sms))
    return FittedPlan(groups, cols, split) if cols in WIDTHS[kind] else None


def hopper_plan(
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    gate: bool,
    add: bool,
    num_sms: int = MULTIPROCESSORS,
    split: int | None = None,
) -> CudaPlan | LargePlan | None:
    """The plan of a linear on Hopper, None where the tables of tiles.py serve; see `large_plan`."""
    parts, ours = split or pick_split(num_outputs, num_inputs, gate), None
    if nvrtc_ready():
        few = clustered_plan(num_rows, num_outputs, num_inputs, gate, parts, num_sms)
        ours = few or fitted_plan(num_rows, num_outputs, num_inputs, gate, add, parts, num_sms)
    return ours or large_plan(num_rows, num_outputs, num_inputs, gate, add, num_sms, split)
