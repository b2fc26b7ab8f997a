"""Simulated acceptance for benchmarks: choices are changed so that a drawn number of drafts is accepted."""

import torch
from torch import Tensor

from peregrine.kernels.round import Nodes
from peregrine.kernels.runtime.dispatch import DeviceFile
from peregrine.kernels.runtime.gpu import triton_ready
from peregrine.kernels.sampling import random_bits

_triton = DeviceFile("peregrine.synthetic.accept_triton")


def bend_choices(
    choices: Tensor, nodes: Nodes, past_lens: Tensor, seeds: Tensor, means: Tensor, vocab_size: int
) -> Tensor:
    """Choices [R, T] that accept the first chain of each window: from every node to its first child.

    How far is drawn from a hash of the row's seed and past length, the bonus counted, with the first of the means [2]
    f64 for an even seed and the second for an odd one. The bonus is the choice at the last accepted node, or the next
    id that none of its children has.
    """
    bend = _triton.bend_choices if triton_ready(choices) else bend_choices_torch
    bent: Tensor = bend(choices, nodes, past_lens, seeds, means, vocab_size)
    return bent


def bend_choices_torch(
    choices: Tensor, nodes: Nodes, past_lens: Tensor, seeds: Tensor, means: Tensor, vocab_size: int
) -> Tensor:
    """The torch twin of `bend_choices`."""
    mean = means[seeds % 2][:, None]  # [R, 1]
    whole = mean.floor()
    order = torch.arange(choices.shape[1], device=choices.device)
    draws = random_bits(seeds, past_lens[:, None], order[:1])[:, 0]  # [R, 1] in [0, 2^32)
    accept_lens = whole.long() + (draws < ((mean - whole) * 2.0**32).long()).long()
    on_offer = (order > 0) & (nodes.depths <= nodes.offered[:, None])  # [R, T]
    end = torch.zeros_like(draws)  # [R, 1] the path's last node so far
    for length in range(1, choices.shape[1]):
        children = on_offer & (nodes.parents == end)  # [R, T]
        go = children.any(dim=1, keepdim=True) & (length < accept_lens)
        child = children.long().argmax(dim=1, keepdim=True)  # the first of equals
        said = torch.where(go, nodes.tokens.gather(1, child), choices.gather(1, end))
        choices = choices.scatter(1, end, said)
        end = torch.where(go, child, end)
    bonus = choices.gather(1, end)
    tried = (bonus + order) % vocab_size  # [R, T]: more ids than there are children
    children = on_offer & (nodes.parents == end)
    taken = ((tried[:, :, None] == nodes.tokens[:, None]) & children[:, None]).any(dim=2)
    free = tried.gather(1, taken.long().argmin(dim=1, keepdim=True))
    return choices.scatter(1, end, torch.where(bonus < 0, bonus, free))
