"""N-gram look-up: find a row's last few tokens earlier in its own text, and return what followed them."""

import torch
from torch import Tensor

from peregrine.kernels.runtime.dispatch import DeviceFile
from peregrine.kernels.runtime.gpu import triton_ready

_triton = DeviceFile("peregrine.kernels.round.ngram_triton")

MAX_GRAM = 4  # the longest run of tokens looked for
MIN_GRAM = 2  # shorter matches are ignored


def find_repeats(history: Tensor, newest: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """What followed the latest of the longest earlier runs that equal the tokens up to `newest`, [R] places.

    history is [R, C] i64. Returns tokens [R, count] i64, and how many of them are text, [R] i64: 0 without a match.
    """
    if triton_ready(history):
        tokens, known = _triton.find_repeats(history, newest, count, MAX_GRAM, MIN_GRAM)
        return tokens, known
    return find_repeats_torch(history, newest, count)


def find_repeats_torch(history: Tensor, newest: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The torch twin of `find_repeats`."""
    last, newest = history.shape[1] - 1, newest[:, None]  # [R, 1]
    places = torch.arange(last + 1, device=history.device)
    # run[r, p]: how many tokens up to p equal those up to the newest one.
    alive = places < newest
    run = torch.zeros_like(history)
    for back in range(MAX_GRAM):
        wanted = history.gather(1, (newest - back).clamp(min=0))  # [R, 1]
        shifted = history.roll(back, dims=1)  # place p holds the token at p - back
        alive = alive & (shifted == wanted) & (places >= back) & (newest >= back)
        run += alive
    # The longest run wins, then the latest place.
    best, place = (run * (last + 1) + places).where(run >= MIN_GRAM, -1).max(dim=1, keepdim=True)
    following = place + 1 + torch.arange(count, device=history.device)  # [R, count]
    known = torch.where(best >= 0, (newest - place).clamp(max=count), 0)[:, 0]
    return history.gather(1, following.clamp(max=last)), known
