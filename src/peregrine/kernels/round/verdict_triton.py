"""The verdict as one Triton kernel, a program per row, where the torch twin needs tens of small operations."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.round import verdict
from peregrine.kernels.round.verdict import Ends, Nodes
from peregrine.kernels.runtime.gpu import launch
from peregrine.kernels.runtime.pdl import enter

HEADER = tl.constexpr(verdict.HEADER)
NONE, STOP = tl.constexpr(verdict.FINISH_NONE), tl.constexpr(verdict.FINISH_STOP)
LENGTH, FAULT = tl.constexpr(verdict.FINISH_LENGTH), tl.constexpr(verdict.FINISH_FAULT)


def commit(choices: Tensor, nodes: Nodes, ends: Ends, history: Tensor, depth: int) -> Tensor:
    """The verdict's table [R, HEADER + 2 W]; history, past lengths, done flags and roots are written in place."""
    num_rows, num_nodes = choices.shape
    width = depth + 1
    table = torch.empty(
        num_rows, verdict.HEADER + 2 * width, dtype=torch.int64, device=choices.device
    )  # [R, HEADER + 2 W]
    launch(
        _commit,
        (num_rows,),
        *(choices, nodes.tokens, nodes.parents, nodes.depths, nodes.ancestors, nodes.offered),
        *(ends.past_lens, ends.limits, ends.stop_ids, ends.done.view(torch.uint8), history, table),
        *(nodes.tokens.stride(0), nodes.parents.stride(0), history.stride(0), ends.stop_ids.stride(0)),
        *(num_nodes, width, ends.stop_ids.shape[1]),
        NODES=max(2, triton.next_power_of_2(num_nodes)),
        STOPS=triton.next_power_of_2(ends.stop_ids.shape[1]),
        num_warps=1,  # a row's lengths are read and written: threads of one warp do both in step
        pdl=True,
    )
    return table


@triton.jit(do_not_specialize=["token_stride", "link_stride", "num_nodes", "width", "num_stops"])
def _commit(  # type: ignore[no-untyped-def]
    choices,
    tokens,
    parents,
    depths,
    ancestors,
    offered,
    past_lens,
    limits,
    stop_ids,
    done,
    history,
    table,
    token_stride,
    link_stride,
    history_stride,
    stop_stride,
    num_nodes,
    width,
    num_stops,
    NODES: tl.constexpr,
    STOPS: tl.constexpr,
):
    enter()
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES).to(tl.int64)
    inside = node < num_nodes
    token = tl.load(tokens + row * token_stride + node, mask=inside, other=-2)
    parent = tl.load(parents + row * link_stride + node, mask=inside, other=0)
    depth = tl.load(depths + row * link_stride + node, mask=inside, other=0)
    word = tl.load(ancestors + row * link_stride + node, mask=inside, other=0)
    choice = tl.load(choices + row * num_nodes + node, mask=inside, other=0)
    asked = tl.load(choices + row * num_nodes + parent, mask=inside, other=-1)
    deepest, past = tl.load(offered + row), tl.load(past_lens + row)
    room = tl.load(limits + row) - past - 1
    ended_before = tl.load(done + row) != 0

    # Which nodes are on the path, and at which place; the others follow it in order.
    on_offer = inside & (depth > 0) & (depth <= deepest)
    right = (node == 0) | (on_offer & (token == asked))
    bits = tl.sum(tl.where(right, tl.full([NODES], 1, tl.int64) << node, 0))
    accepted = inside & ((word & bits) == word)
    length = tl.sum(accepted.to(tl.int64))
    spare = inside & ~accepted
    place = tl.where(accepted, tl.cumsum(accepted.to(tl.int64)) - 1, length + tl.cumsum(spare.to(tl.int64)) - 1)
    on_path = inside & (place < width)

    # The first token that ends the row.
    stop = tl.arange(0, STOPS)
    stops = tl.load(stop_ids + row * stop_stride + stop, mask=stop < num_stops, other=-1)
    is_stop = tl.sum((choice[:, None] == stops[None, :]).to(tl.int32), axis=1) > 0
    fault = tl.min(tl.where(accepted & (choice < 0), place, width))
    first = tl.minimum(fault, tl.min(tl.where(accepted & is_stop & (choice >= 0), place, width)))
    is_fault = (first < width) & (fault == first)
    accept = tl.minimum(length, first + 1) - is_fault.to(tl.int64)  # a fault has no token
    finish = tl.where(is_fault, FAULT, tl.where(first < width, STOP, NONE))
    full = (accept > room) | ((accept == room) & (finish != STOP))
    finish = tl.where(ended_before, NONE, tl.where(full, LENGTH, finish)).to(tl.int64)
    accept = tl.where(ended_before, 0, tl.minimum(accept, room))
    drafted = tl.where(ended_before, 0, tl.sum(on_offer.to(tl.int64)))

    line = table + row * (HEADER + 2 * width)
    valid = tl.maximum(choice, 0)
    tl.store(line, accept)
    tl.store(line + 1, tl.minimum(length - 1, accept))
    tl.store(line + 2, drafted)
    tl.store(line + 3, finish)
    tl.store(line + HEADER + place, valid, mask=on_path)
    tl.store(line + HEADER + width + place, node, mask=on_path)

    newest = tl.sum(tl.where(accepted & (place == accept - 1), choice, 0))
    tl.store(history + row * history_stride + past + 1 + place, valid, mask=on_path)
    tl.store(past_lens + row, past + accept)
    tl.store(tokens + row * token_stride, newest, mask=accept > 0)
    tl.store(done + row, (ended_before | (finish != NONE)).to(tl.uint8))
