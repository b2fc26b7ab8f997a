"""N-gram look-up as a Triton kernel, one program per row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.runtime.gpu import launch

TEXT_BLOCK = 4096  # tokens of the history that are compared at once


def find_repeats(history: Tensor, newest: Tensor, count: int, max_gram: int, min_gram: int) -> tuple[Tensor, Tensor]:
    """Tokens [R, count] and how many of them are text [R]; without a match the tokens are those at the start."""
    num_rows, num_places = history.shape
    tokens = torch.empty(num_rows, count, dtype=torch.int64, device=history.device)
    known = torch.empty(num_rows, dtype=torch.int64, device=history.device)
    launch(
        _find_repeats,
        (num_rows,),
        *(history, newest, tokens, known, history.stride(0), num_places, count),
        COUNT=max(2, triton.next_power_of_2(count)),
        MAX_GRAM=max_gram,
        MIN_GRAM=min_gram,
        BLOCK=min(TEXT_BLOCK, triton.next_power_of_2(num_places)),
        num_warps=8,
    )
    return tokens, known


@triton.jit(do_not_specialize=["count"])
def _find_repeats(  # type: ignore[no-untyped-def]
    history,
    newest_places,
    tokens,
    known,
    history_stride,
    num_places,
    count,
    COUNT: tl.constexpr,
    MAX_GRAM: tl.constexpr,
    MIN_GRAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    text = history + row * history_stride
    newest = tl.load(newest_places + row)
    start = newest * 0
    best = start - 1
    while start < newest:
        place = start + tl.arange(0, BLOCK)
        alive = place < newest
        run = tl.zeros([BLOCK], tl.int64)
        for back in tl.static_range(MAX_GRAM):
            wanted = tl.load(text + newest - back, mask=newest >= back, other=0)
            alive = alive & (place >= back) & (newest >= back)
            alive = alive & (tl.load(text + place - back, mask=alive, other=-1) == wanted)
            run += alive.to(tl.int64)
        # The longest run wins, then the latest place.
        best = tl.maximum(best, tl.max(tl.where(run >= MIN_GRAM, run * num_places + place, -1)))
        start += BLOCK
    place = tl.where(best >= 0, best % num_places, 0)
    order = tl.arange(0, COUNT)
    following = tl.minimum(place + 1 + order, num_places - 1)
    tl.store(tokens + row * count + order, tl.load(text + following), mask=order < count)
    tl.store(known + row, tl.where(best >= 0, tl.minimum(newest - place, count), 0))
