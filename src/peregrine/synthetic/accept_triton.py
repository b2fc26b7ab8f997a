"""Simulated acceptance for benchmarks as one Triton kernel, one program per row; see `accept.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.round import Nodes
from peregrine.kernels.runtime.gpu import launch
from peregrine.kernels.runtime.pdl import enter
from peregrine.kernels.sampling.scores_triton import key_of, random_bits


def bend_choices(
    choices: Tensor, nodes: Nodes, past_lens: Tensor, seeds: Tensor, means: Tensor, vocab_size: int
) -> Tensor:
    """Choices [R, T] that accept a drawn number of drafts; see accept.py."""
    num_rows, num_nodes = choices.shape
    bent = torch.empty_like(choices)
    launch(
        _bend_choices,
        (num_rows,),
        *(choices, nodes.tokens, nodes.parents, nodes.depths, nodes.offered, past_lens, seeds, means, bent),
        *(nodes.tokens.stride(0), nodes.parents.stride(0), num_nodes, vocab_size),
        NODES=max(2, triton.next_power_of_2(num_nodes)),
        num_warps=4,
        pdl=True,
    )
    return bent


@triton.jit(do_not_specialize=["token_stride", "link_stride", "num_nodes"])
def _bend_choices(  # type: ignore[no-untyped-def]
    choices,
    tokens,
    parents,
    depths,
    offered,
    past_lens,
    seeds,
    means,
    bent,
    token_stride,
    link_stride,
    num_nodes,
    vocab_size,
    NODES: tl.constexpr,
):
    enter()
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    inside = node < num_nodes
    choice = tl.load(choices + row * num_nodes + node, mask=inside, other=0)
    token = tl.load(tokens + row * token_stride + node, mask=inside, other=-1)
    parent = tl.load(parents + row * link_stride + node, mask=inside, other=0)
    depth = tl.load(depths + row * link_stride + node, mask=inside, other=0)
    on_offer = inside & (node > 0) & (depth <= tl.load(offered + row))
    past = tl.load(past_lens + row)
    seed = tl.load(seeds + row)
    draw = random_bits(key_of(seed, past), past * 0).to(tl.int64)
    mean = tl.load(means + (seed & 1))
    whole = mean.to(tl.int32)
    accept = whole + (draw < ((mean - whole) * 2.0**32).to(tl.int64)).to(tl.int32)
    end = accept * 0  # the path's last node so far
    for length in range(1, num_nodes):
        child = tl.min(tl.where(on_offer & (parent == end), node, NODES))
        go = (child < NODES) & (length < accept)
        said = tl.sum(tl.where(node == child, token, 0))
        choice = tl.where(go & (node == end), said, choice)
        end = tl.where(go, child, end)
    bonus = tl.sum(tl.where(node == end, choice, 0))
    tried = (bonus + node) % vocab_size  # more ids than there are children
    is_child = on_offer & (parent == end)
    taken = tl.sum(((tried[:, None] == token[None, :]) & is_child[None, :]).to(tl.int32), axis=1) > 0
    first = tl.min(tl.where(taken, NODES, node))
    free = tl.sum(tl.where(node == first, tried, 0))
    choice = tl.where((node == end) & (bonus >= 0), free, choice)
    tl.store(bent + row * num_nodes + node, choice, mask=inside)
