"""What a round leaves for the next one, as Triton kernels: drafts, and the accepted path's cache entries."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.round.places_triton import slot_of
from peregrine.kernels.round.verdict import Verdict
from peregrine.kernels.round.verdict_triton import HEADER
from peregrine.kernels.runtime.gpu import launch
from peregrine.kernels.runtime.pdl import enter

MOVE_CHUNK = 512  # elements of a cache entry that one program moves
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # cache entries are moved as plain words of their size


def keep_drafts(
    window_tokens: Tensor,
    offered: Tensor,
    caps: Tensor,
    tokens: Tensor,
    depths: Tensor | int,
    links: Sequence[tuple[Tensor, Tensor]],
) -> None:
    """One program per row; links are a tree's parents, depths and ancestors, or nothing."""
    num_rows, num_nodes = window_tokens.shape
    ends = [end for pair in links for end in pair] or [tokens] * 6
    strides = (links[0][0].stride(0), links[0][1].stride(0)) if links else (0, 0)
    launch(
        _keep_drafts,
        (num_rows,),
        *(window_tokens, offered, caps, tokens, caps if isinstance(depths, int) else depths, *ends),
        *(window_tokens.stride(0), *tokens.stride(), *strides, num_nodes),
        *(depths if isinstance(depths, int) else 0,),
        NODES=max(2, triton.next_power_of_2(num_nodes)),
        SAME_DEPTH=isinstance(depths, int),
        LINKED=bool(links),
        num_warps=1,
        pdl=True,
    )


def move_path(stores: Sequence[Tensor], past_lens: Tensor, said: Verdict, table: Tensor, page_size: int) -> None:
    """A program moves one piece of every entry of a row's path in one layer of keys or values."""
    words = [store.view(WORDS[store.element_size()]).flatten(2) for store in stores]  # [L, slots, X] each
    keys, values = words[0], words[-1]
    num_layers, _, size = keys.shape
    launch(
        _move_path,
        (past_lens.shape[0], len(stores) * num_layers, triton.cdiv(size, MOVE_CHUNK)),
        *(keys, values, past_lens, said.table, table),
        *(said.width, keys.stride(0), table.stride(0), page_size, size),
        WIDTH=max(2, triton.next_power_of_2(said.width)),
        CHUNK=MOVE_CHUNK,
        STORES=len(stores),
    )


@triton.jit(
    do_not_specialize=[
        "window_stride",
        "token_row_stride",
        "token_stride",
        "from_stride",
        "link_stride",
        "num_nodes",
        "same_depth",
    ]
)
def _keep_drafts(  # type: ignore[no-untyped-def]
    window_tokens,
    offered,
    caps,
    tokens,
    depths,
    parents_from,
    parents,
    depths_from,
    node_depths,
    ancestors_from,
    ancestors,
    window_stride,
    token_row_stride,
    token_stride,
    from_stride,
    link_stride,
    num_nodes,
    same_depth,
    NODES: tl.constexpr,
    SAME_DEPTH: tl.constexpr,
    LINKED: tl.constexpr,
):
    enter()
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    inside = node < num_nodes
    is_draft = inside & (node > 0)
    token = tl.load(tokens + row * token_row_stride + (node - 1) * token_stride, mask=is_draft, other=0)
    tl.store(window_tokens + row * window_stride + node, token, mask=is_draft)
    cap = tl.load(caps + row)
    if SAME_DEPTH:
        tl.store(offered + row, tl.minimum(cap, same_depth))
    else:
        tl.store(offered + row, tl.minimum(cap, tl.load(depths + row)))
    if LINKED:
        source, target = row * from_stride + node, row * link_stride + node
        tl.store(parents + target, tl.load(parents_from + source, mask=inside, other=0), mask=inside)
        tl.store(node_depths + target, tl.load(depths_from + source, mask=inside, other=0), mask=inside)
        tl.store(ancestors + target, tl.load(ancestors_from + source, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["width"])
def _move_path(  # type: ignore[no-untyped-def]
    keys,
    values,
    past_lens,
    verdicts,
    table,
    width,
    layer_stride,
    table_stride,
    page_size,
    size,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    STORES: tl.constexpr,
):
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1) // STORES
    store = keys
    if tl.program_id(1) % STORES == 1:
        store = values
    store += layer.to(tl.int64) * layer_stride
    line = verdicts + row * (HEADER + 2 * width)
    place = tl.arange(0, WIDTH)
    node = tl.load(line + HEADER + width + place, mask=place < width, other=0)
    moves = (place < tl.load(line)) & (node != place)  # the root, and often more of the path, is in place already
    past = tl.load(past_lens + row)
    source = slot_of(table + row * table_stride, past + node, page_size, moves)
    target = slot_of(table + row * table_stride, past + place, page_size, moves)
    element = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    inside = moves[:, None] & (element < size)[None, :]
    entries = tl.load(store + source[:, None] * size + element[None, :], mask=inside, other=0)
    tl.debug_barrier()  # one thread's target may be another's source
    tl.store(store + target[:, None] * size + element[None, :], entries, mask=inside)
