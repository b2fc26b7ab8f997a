"""What a round leaves for the next one: drafts in the window, and the accepted path's cache entries at its front."""

from collections.abc import Sequence

import torch
from torch import Tensor

from peregrine.kernels.round.places import slots_of
from peregrine.kernels.round.verdict import Verdict
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT
from peregrine.kernels.runtime.dispatch import DeviceFile
from peregrine.kernels.runtime.gpu import triton_ready

_cpu = DeviceFile("peregrine.kernels.round.cpu")
_triton = DeviceFile("peregrine.kernels.round.drafts_triton")

Copies = Sequence[tuple[Tensor, Tensor]]  # (from, to), both [R, T] i64


def keep_drafts(
    window_tokens: Tensor, offered: Tensor, caps: Tensor, tokens: Tensor, depths: Tensor | int, links: Copies
) -> None:
    """Put drafts [R, T - 1] after the roots of window_tokens [R, T]; offer them as deep as they go and caps allow.

    depths, caps and offered are [R] i64, or depths are one number for all rows. A tree's links are copied along.
    """
    if triton_ready(tokens):
        _triton.keep_drafts(window_tokens, offered, caps, tokens, depths, links)
    elif NUMBA_PRESENT and tokens.is_cpu and isinstance(depths, int) and not links:
        _cpu.keep_drafts(window_tokens, offered, caps, tokens, depths)
    else:
        keep_drafts_torch(window_tokens, offered, caps, tokens, depths, links)


def keep_drafts_torch(
    window_tokens: Tensor, offered: Tensor, caps: Tensor, tokens: Tensor, depths: Tensor | int, links: Copies
) -> None:
    """The torch twin of `keep_drafts`."""
    window_tokens[:, 1:].copy_(tokens)
    if isinstance(depths, int):
        torch.clamp(caps, max=depths, out=offered)
    else:
        torch.minimum(caps, depths, out=offered)
    for source, target in links:
        target.copy_(source)


def move_path(stores: Sequence[Tensor], past_lens: Tensor, verdict: Verdict, table: Tensor, page_size: int) -> None:
    """Move the accepted path's cache entries to the front of the window, where the next round expects them.

    stores are keys and values, or keys that hold their values, each [layers, slots, heads, D]; node i was written at
    place past_lens[r] + i. All of a row's entries are read before any is written.
    """
    if triton_ready(table):
        _triton.move_path(stores, past_lens, verdict, table, page_size)
    else:
        move_path_torch(stores, past_lens, verdict, table, page_size)


def move_path_torch(
    stores: Sequence[Tensor], past_lens: Tensor, verdict: Verdict, table: Tensor, page_size: int
) -> None:
    """The torch twin of `move_path`."""
    order = torch.arange(verdict.width, device=table.device)
    kept = torch.where(order < verdict.accept_lens[:, None], verdict.path, order)  # [R, W]
    if table.is_cpu and torch.equal(kept, order.expand_as(kept)):  # every path is at the front, as chains are
        return
    sources = slots_of(past_lens[:, None] + kept, table, page_size).view(-1)
    targets = slots_of(past_lens[:, None] + order, table, page_size).view(-1)
    for store in stores:
        entries = store.view(torch.uint8) if store.element_size() == 1 else store  # torch moves no float8
        entries.index_copy_(1, targets, entries.index_select(1, sources))
