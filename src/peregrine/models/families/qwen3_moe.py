"""Qwen3-MoE: Qwen3's attention, experts in place of most MLPs."""

from peregrine.models.checkpoint.folder import Fields
from peregrine.models.config import ExpertsConfig
from peregrine.models.families.family import (
    Biases,
    Family,
    attention_bias,
    checked_experts,
    declared_window,
    same_window,
)


class Qwen3MoE(Family):
    """Qwen3-30B-A3B and its like."""

    model_type = "qwen3_moe"
    architectures = ("Qwen3MoeForCausalLM",)
    qk_norm = True

    def biases(self, fields: Fields) -> Biases:
        return attention_bias(fields)

    def windows(self, fields: Fields, num_layers: int) -> tuple[int | None, ...]:
        window = declared_window(fields) if fields.flag("use_sliding_window", False) else None
        return same_window(self, fields, num_layers, window)

    def experts(self, fields: Fields, num_layers: int) -> ExpertsConfig:
        step, dense = fields.whole("decoder_sparse_step", 1), fields.wholes("mlp_only_layers")
        # Published configs and newer writers name the count differently.
        count = "num_local_experts" if "num_local_experts" in fields else "num_experts"
        experts = ExpertsConfig(
            num_experts=fields.whole(count),
            top_k=fields.whole("num_experts_per_tok"),
            inner_size=fields.whole("moe_intermediate_size"),
            normalise=fields.flag("norm_topk_prob", False),
            layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
        )
        return checked_experts(fields, experts)
