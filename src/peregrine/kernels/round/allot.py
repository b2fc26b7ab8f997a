"""Which drafts of all rows a round verifies, chosen on the device: the likeliest, by what the drafter says of each.

What it says of a draft falls into one of B ranges; odds[r, d, b] is the chance of such a draft of row r at depth d if
those before it are right. A draft's worth is the product of the chances down to it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from peregrine.kernels.runtime.dispatch import DeviceFile
from peregrine.kernels.runtime.gpu import triton_ready

_triton = DeviceFile("peregrine.kernels.round.allot_triton")


@dataclass(frozen=True, slots=True)
class WindowTensors:
    """Where windows of R rows and N nodes, in lines of T nodes, are written: see `spec.windows.Windows`."""

    at: Tensor  # [N]
    row_of: Tensor  # [N]
    starts: Tensor  # [R + 1]
    moved: Tensor  # [R]
    deepest: Tensor  # [R]
    width: int  # T


def allot_windows(said: Tensor, odds: Tensor, edges: Tensor, own: WindowTensors, longer: WindowTensors) -> None:
    """Give every row its newest node and the N - R worthiest drafts of all; of equals, the first row's, then depth's.

    said [R, K] and odds [R, K, B] are f32, edges [B - 1] the ranges' borders, rising. `longer` gets the same windows
    with one node more.
    """
    if triton_ready(said):
        _triton.allot_windows(said, odds, edges, own, longer)
    else:
        allot_windows_torch(said, odds, edges, own, longer)


def allot_windows_torch(said: Tensor, odds: Tensor, edges: Tensor, own: WindowTensors, longer: WindowTensors) -> None:
    """The torch twin of `allot_windows`."""
    (rows, depth), drafts = said.shape, own.width - 1
    place = (said[:, :, None] >= edges).sum(dim=2, keepdim=True)
    chances, worth, level = odds.gather(2, place)[:, :, 0], said.new_zeros(rows, drafts), said.new_ones(rows)
    for step in range(min(depth, drafts)):
        level = level * chances[:, step]
        worth[:, step] = level
    taken = worth.flatten().argsort(descending=True, stable=True)[: len(own.at) - rows]
    lens = 1 + torch.zeros_like(own.deepest).index_add_(0, taken // max(1, drafts), torch.ones_like(taken))
    order = torch.arange(rows, device=said.device)
    for windows, more in ((own, 0), (longer, 1)):
        ends = (lens + more).cumsum(0)
        windows.starts[0] = 0
        windows.starts[1:] = ends
        windows.moved.copy_(windows.starts[:-1] - order * windows.width)
        nodes = torch.arange(len(windows.at), device=said.device)
        windows.row_of.copy_(torch.searchsorted(ends, nodes, right=True))
        windows.at.copy_(nodes - windows.moved[windows.row_of])
        windows.deepest.copy_(lens + more - 1)
