"""The windows of a round, chosen on the device, as two Triton kernels with a program for each row.

The first counts for each draft of a row how many drafts of all rows are worth more; the second adds up lengths.
"""

import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.round.allot import WindowTensors
from peregrine.kernels.runtime.gpu import launch

ROWS = 128  # whose drafts are compared at once


def allot_windows(said: Tensor, odds: Tensor, edges: Tensor, own: WindowTensors, longer: WindowTensors) -> None:
    """See `kernels.round.allot.allot_windows`."""
    rows, depth = said.shape
    launch(
        _rank_drafts,
        (rows,),
        *(said, odds, edges, own.deepest, longer.deepest, said.stride(0), odds.stride(0)),
        *(rows, min(depth, own.width - 1), own.width - 1, len(own.at) - rows),
        RANGES=odds.shape[2],
        DRAFTS=max(2, triton.next_power_of_2(own.width - 1)),
        ROWS=min(ROWS, max(2, triton.next_power_of_2(rows))),
    )
    launch(
        _place_windows,
        (rows,),
        *(own.deepest, own.at, own.row_of, own.starts, own.moved),
        *(longer.at, longer.row_of, longer.starts, longer.moved, rows, own.width),
        NODES=max(2, triton.next_power_of_2(own.width + 1)),
        ROWS=max(2, triton.next_power_of_2(rows)),
    )


@triton.jit
def _chance(said, odds, edges, at, step, alive, said_stride, odds_stride, RANGES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The chance of the drafts at one depth, of rows `at`; 0 where they are not alive."""
    value = tl.load(said + at * said_stride + step, mask=alive, other=0.0)
    place = at * 0
    for edge in tl.static_range(RANGES - 1):
        place += (value >= tl.load(edges + edge)).to(tl.int64)
    return tl.load(odds + at * odds_stride + step * RANGES + place, mask=alive, other=0.0)


@triton.jit(do_not_specialize=["num_rows", "known", "drafts", "taken"])
def _rank_drafts(  # type: ignore[no-untyped-def]
    said,
    odds,
    edges,
    deepest,
    longer_deepest,
    said_stride,
    odds_stride,
    num_rows,
    known,
    drafts,
    taken,
    RANGES: tl.constexpr,
    DRAFTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, DRAFTS)
    own = tl.zeros([DRAFTS], tl.float32)
    level = tl.full([], 1.0, tl.float32)
    for step in range(known):
        level *= _chance(said, odds, edges, row, step, row < num_rows, said_stride, odds_stride, RANGES)
        own = tl.where(column == step, level, own)
    before = tl.zeros([DRAFTS], tl.int32)  # drafts of all rows that come before this row's
    for first in range(0, num_rows, ROWS):
        others = first + tl.arange(0, ROWS).to(tl.int64)
        alive = others < num_rows
        levels = tl.full([ROWS], 1.0, tl.float32)
        for step in range(drafts):
            if step < known:
                levels *= _chance(said, odds, edges, others, step, alive, said_stride, odds_stride, RANGES)
            else:
                levels = tl.zeros([ROWS], tl.float32)
            sooner = (others[:, None] < row) | ((others[:, None] == row) & (step < column[None, :]))
            wins = (levels[:, None] > own[None, :]) | ((levels[:, None] == own[None, :]) & sooner)
            before += tl.sum((wins & alive[:, None]).to(tl.int32), axis=0)
    count = tl.sum(((before < taken) & (column < drafts)).to(tl.int64))
    tl.store(deepest + row, count)
    tl.store(longer_deepest + row, count + 1)


@triton.jit(do_not_specialize=["num_rows", "width"])
def _place_windows(  # type: ignore[no-untyped-def]
    deepest,
    at,
    row_of,
    starts,
    moved,
    longer_at,
    longer_row_of,
    longer_starts,
    longer_moved,
    num_rows,
    width,
    NODES: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, ROWS)
    drafts = tl.load(deepest + rows, mask=rows < num_rows, other=0)
    start = tl.sum(tl.where(rows < row, drafts + 1, 0))
    length = tl.load(deepest + row) + 1
    node = tl.arange(0, NODES)
    tl.store(at + start + node, row * width + node, mask=node < length)
    tl.store(row_of + start + node, row + node * 0, mask=node < length)
    tl.store(starts + row, start)
    tl.store(starts + row + 1, start + length)
    tl.store(moved + row, start - row * width)
    start += row
    tl.store(longer_at + start + node, row * (width + 1) + node, mask=node <= length)
    tl.store(longer_row_of + start + node, row + node * 0, mask=node <= length)
    tl.store(longer_starts + row, start)
    tl.store(longer_starts + row + 1, start + length + 1)
    tl.store(longer_moved + row, start - row * (width + 1))
