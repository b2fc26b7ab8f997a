"""Attention over paged keys and values: dense and MLA, for every device."""

from peregrine.kernels.attention.mla import DeferredMLARope, latent_splits, turn_latent
from peregrine.kernels.attention.reference import (
    QueryPlan,
    paged_attention_torch,
    plan_causal,
    plan_tree,
    slots_of_rows,
)

__all__ = [
    "DeferredMLARope",
    "QueryPlan",
    "latent_splits",
    "paged_attention_torch",
    "plan_causal",
    "plan_tree",
    "slots_of_rows",
    "turn_latent",
]
