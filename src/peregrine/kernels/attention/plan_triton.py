"""What all layers of a forward share on a GPU: where rows begin and lie, and the slots of a tree's ancestors."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.config import MAX_NODES
from peregrine.kernels.attention.blocks import NODES
from peregrine.kernels.attention.plan import GpuPlan
from peregrine.kernels.runtime.gpu import launch


@triton.jit(do_not_specialize=["num_nodes", "num_pages"])
def paths_kernel(  # type: ignore[no-untyped-def]
    ancestors, past_lens, table, limits, paths, num_nodes, num_pages, PAGE: tl.constexpr
):
    """Grid (tokens,): the slots of a node's ancestors by ascending bit, and how many keys the node sees."""
    token = tl.program_id(0)
    row = token // num_nodes
    past = tl.load(past_lens + row).to(tl.int32)
    bit = tl.arange(0, NODES)
    is_ancestor = ((tl.load(ancestors + token) >> bit) & 1).to(tl.int32)
    key = tl.minimum(past + bit, num_pages * PAGE - 1)
    page = tl.load(table + row.to(tl.int64) * num_pages + key // PAGE).to(tl.int64)
    rank = tl.cumsum(is_ancestor) - 1
    tl.store(paths + token * NODES + rank, page * PAGE + key % PAGE, mask=is_ancestor == 1)
    tl.store(limits + token, past + tl.sum(is_ancestor))


def plan_gpu(
    positions: Tensor,
    q_starts: Tensor,
    past_lens: Tensor,
    page_table: Tensor,
    page_size: int,
    ancestors: Tensor | None,
    longest: int | None = None,
) -> GpuPlan:
    """What all layers of a forward share; of a tree, ancestors [R, T] become lists of slots in one launch."""
    page_table = page_table.contiguous()
    if ancestors is None:
        return GpuPlan(positions, q_starts, past_lens, page_table, page_size, None, None, longest)
    num_tokens, num_nodes, num_pages = ancestors.numel(), ancestors.shape[1], page_table.shape[1]
    limits = torch.empty(num_tokens, dtype=torch.int32, device=ancestors.device)
    paths = torch.empty(num_tokens, MAX_NODES, dtype=torch.int64, device=ancestors.device)
    arguments = (ancestors.contiguous(), past_lens, page_table, limits, paths, num_nodes, num_pages)
    launch(paths_kernel, (num_tokens,), *arguments, PAGE=page_size, num_warps=1)
    return GpuPlan(positions, q_starts, past_lens, page_table, page_size, limits, paths, longest)
