"""Attention over paged keys and values, dense and MLA, for every device."""

from peregrine.kernels.attention.mla import DeferredMLARope, mla_rope
from peregrine.kernels.attention.plan import (
    Gpu,
    GpuPlan,
    Kernel,
    Launch,
    Problem,
    StoredKV,
    context_launch,
    decode_launch,
    gpu_of,
    mla_num_splits,
)
from peregrine.kernels.attention.reference import (
    QueryPlan,
    paged_attention_torch,
    plan_causal,
    plan_tree,
    slots_of_rows,
)

__all__ = [
    "DeferredMLARope",
    "Gpu",
    "GpuPlan",
    "Kernel",
    "Launch",
    "Problem",
    "QueryPlan",
    "StoredKV",
    "context_launch",
    "decode_launch",
    "gpu_of",
    "mla_num_splits",
    "mla_rope",
    "paged_attention_torch",
    "plan_causal",
    "plan_tree",
    "slots_of_rows",
]
