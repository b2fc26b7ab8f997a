"""Fields of a small DeepSeek config for MLA and experts, beyond those of every config."""

from typing import Any

DEEPSEEK_FIELDS: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 32,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
}
