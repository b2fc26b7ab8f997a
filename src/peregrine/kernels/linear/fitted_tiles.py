"""Which linears of more than 64 rows `fitted.cu` computes on Hopper, and in which tiles: those that it is fastest for.

It pays where tiles of a power of two leave multiprocessors idle or read too much: up to 384 rows of a plain weight that
fills the device once, 128 of one whose inputs are in two parts or that is gated. For more the kernels in Gluon were as
fast or faster.
"""

from dataclasses import dataclass

from peregrine.kernels.linear.tiles import (
    LARGE_ALIGNMENT,
    LARGE_DEPTH,
    LARGE_HEIGHT,
    MULTIPROCESSORS,
    ON_H200,
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
) -> FittedPlan | LargePlan | None:
    """The plan of a linear on Hopper for many rows, None where the tables of tiles.py serve; see `large_plan`."""
    parts = split or pick_split(num_outputs, num_inputs, gate)
    fitted = fitted_plan(num_rows, num_outputs, num_inputs, gate, add, parts, num_sms) if nvrtc_ready() else None
    return fitted or large_plan(num_rows, num_outputs, num_inputs, gate, add, num_sms, split)
