"""What is known of rows that are planned draft by draft, as numbers: the columns of a table with a line for each row.

After these columns come the K drafts in a row's window, then the K that are being made, with three numbers each: what
the drafter said of it (NaN: nothing), the chance with the request's factor, and the chance without it. How many drafts
there are is in another table, of integers, with a column for each row.
"""

import numpy as np
from numpy.typing import NDArray

(
    KIND,  # 1: the request is sampled
    EXPECTED,  # its record: drafts that were expected to be right
    RIGHT,  # and those that were
    ASKED,  # the most drafts it asked for
    LEFT,  # the most that are left to generate
    DRAFTED,  # 1: the row is drafted for
    WANTED,  # 1: its next draft seems to pay
    SURVIVAL,  # of the last draft that was made: the chance that all are right
    DRAFTS,  # where the drafts begin
) = range(9)
SAID, CHANCE, ENGINE = range(3)  # the numbers of a draft
OFFERED, LENS, HELD, MADE = range(4)  # drafts in the window, nodes to verify, drafts that are known, and those made


def width_of(depth: int) -> int:
    """Columns of rows with at most so many drafts."""
    return DRAFTS + 6 * depth


def depth_in(table: NDArray[np.float64]) -> int:
    """The most drafts of a row."""
    return int(table.shape[1] - DRAFTS) // 6
