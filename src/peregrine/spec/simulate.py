"""Simulated acceptance for benchmarks: real drafts, real verify, a drawn verdict.

The number of accepted tokens of each row and round is drawn from a hash of the request's seed and its length, so
that its mean is the one asked for. The text is meaningless; results must say that they were simulated.
"""

import math

import torch
from torch import Tensor

from peregrine.errors import ConfigError
from peregrine.kernels.choose import Features
from peregrine.kernels.noise import random_bits
from peregrine.kernels.verdict import Verdict, settle
from peregrine.spec.judge import Judge, choices
from peregrine.spec.state import RowState


def simulated_judge(accept: float, depth: int) -> Judge:
    """A judge whose acceptance length, bonus included, has the mean `accept`."""
    if not 1.0 <= accept <= depth + 1:
        raise ConfigError(
            f"simulate_accept={accept:g}: a round accepts 1 to {depth + 1} tokens with {depth} drafts, "
            "the bonus counted; choose a value in that range"
        )
    whole, part = math.floor(accept), accept - math.floor(accept)

    def judge(logits: Tensor, past_lens: Tensor, state: RowState, features: Features) -> Verdict:
        links = state.links
        nodes = torch.arange(links.parents.shape[1], device=logits.device)
        chosen = choices(logits, past_lens, state, features)  # the real work
        draws = random_bits(state.law.seeds, past_lens[:, None], nodes[:1])[:, 0, 0]  # [R] in [0, 2^32)
        accept_lens = whole + (draws < part * 2**32).long()
        accept_lens = torch.minimum(accept_lens, torch.minimum(state.draft_depths, state.draft_caps) + 1)
        # The first chain of the tree: from each node to its first child.
        path = [torch.zeros_like(past_lens)]
        for _ in range(state.shape.depth):
            child = (links.parents == path[-1][:, None]) & (nodes > 0)
            first = torch.where(child, nodes, nodes.numel()).amin(dim=1)
            accept_lens = torch.where(first < nodes.numel(), accept_lens, accept_lens.clamp(max=len(path)))
            path.append(torch.where(first < nodes.numel(), first, path[-1]))
        route = torch.stack(path, dim=1)  # [R, K + 1]
        drafted = state.window_tokens.gather(1, route.roll(-1, dims=1))  # token d was drafted at route[d + 1]
        bonus = torch.arange(route.shape[1], device=logits.device) == (accept_lens - 1)[:, None]
        tokens = torch.where(bonus, chosen.gather(1, route), drafted)
        return settle(tokens, route, accept_lens, state.nodes(), state.ends(past_lens))

    return judge
