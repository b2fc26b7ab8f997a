"""The tensors and config fields by which a random checkpoint is a DeepSeek-V3: latent attention, and experts."""

import torch
from torch import Tensor

from peregrine.hardware import DTYPES
from peregrine.synthetic.sizes import OUTPUT_GAIN, QUERY_GAIN, Matrix, RandomShape

LATENT_GAIN = 2.0  # keys and values are made of a normed latent
FEWEST_EXPERTS = 4


def deepseek_attention(sizes: RandomShape, prefix: str, matrix: Matrix) -> dict[str, Tensor]:
    """The tensors of one layer's latent attention."""
    hidden, heads, dtype = sizes.hidden_size, sizes.num_heads, DTYPES[sizes.dtype]
    q_size = heads * (sizes.head_dim + sizes.rope_dim)
    weights = {
        f"{prefix}.kv_a_proj_with_mqa.weight": matrix(sizes.kv_rank + sizes.rope_dim, hidden),
        f"{prefix}.kv_a_layernorm.weight": torch.ones(sizes.kv_rank, dtype=dtype),
        f"{prefix}.kv_b_proj.weight": matrix(2 * heads * sizes.head_dim, sizes.kv_rank, LATENT_GAIN),
        f"{prefix}.o_proj.weight": matrix(hidden, heads * sizes.head_dim, OUTPUT_GAIN),
    }
    if not sizes.q_rank:
        return weights | {f"{prefix}.q_proj.weight": matrix(q_size, hidden, QUERY_GAIN)}
    return weights | {
        f"{prefix}.q_a_proj.weight": matrix(sizes.q_rank, hidden),
        f"{prefix}.q_a_layernorm.weight": torch.ones(sizes.q_rank, dtype=dtype),
        f"{prefix}.q_b_proj.weight": matrix(q_size, sizes.q_rank, QUERY_GAIN),
    }


def deepseek_experts(sizes: RandomShape, prefix: str, matrix: Matrix) -> dict[str, Tensor]:
    """The tensors of one layer's experts, the one that all tokens pass through among them."""
    hidden, inner, count = sizes.hidden_size, sizes.expert_size, sizes.num_experts
    weights = {
        f"{prefix}.gate.weight": matrix(count, hidden),
        f"{prefix}.gate.e_score_correction_bias": matrix(1, count, 0.2)[0].float(),
    }
    for name in [*(f"experts.{i}" for i in range(count)), "shared_experts"]:
        weights |= {
            f"{prefix}.{name}.gate_proj.weight": matrix(inner, hidden),
            f"{prefix}.{name}.up_proj.weight": matrix(inner, hidden),
            f"{prefix}.{name}.down_proj.weight": matrix(hidden, inner, OUTPUT_GAIN),
        }
    return weights


def deepseek_fields(sizes: RandomShape) -> dict[str, object]:
    """The fields of config.json in which it differs from a Llama's."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": sizes.num_heads,
        "head_dim": sizes.rope_dim,
        "kv_lora_rank": sizes.kv_rank,
        "q_lora_rank": sizes.q_rank or None,
        "qk_nope_head_dim": sizes.head_dim,
        "qk_rope_head_dim": sizes.rope_dim,
        "v_head_dim": sizes.head_dim,
        "first_k_dense_replace": 1 if sizes.num_experts else sizes.num_layers,
        "n_routed_experts": sizes.num_experts or FEWEST_EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": sizes.expert_size,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }
