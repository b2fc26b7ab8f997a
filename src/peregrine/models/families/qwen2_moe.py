"""Qwen2-MoE: Qwen2's attention, and experts beside a shared one that has a gate."""

from peregrine.models.checkpoint.folder import Fields
from peregrine.models.config import ExpertsConfig
from peregrine.models.families.family import Biases, ExpertNames, Family, checked_experts, layer_types


class Qwen2MoE(Family):
    """Qwen1.5-MoE and Qwen2-57B-A14B."""

    model_type = "qwen2_moe"
    architectures = ("Qwen2MoeForCausalLM",)
    expert_names = ExpertNames(shared="shared_expert")

    def biases(self, fields: Fields) -> Biases:
        return Biases(qkv=fields.flag("qkv_bias", True))

    def windows(self, fields: Fields, num_layers: int) -> tuple[int | None, ...]:
        if fields.flag("use_sliding_window", False) or "sliding_attention" in layer_types(fields, num_layers):
            raise fields.refusal("use_sliding_window", "Qwen2-MoE with windows is not supported", "choose another one")
        return (None,) * num_layers

    def experts(self, fields: Fields, num_layers: int) -> ExpertsConfig:
        step, dense = fields.whole("decoder_sparse_step", 1), fields.wholes("mlp_only_layers")
        inner, shared = fields.whole("moe_intermediate_size"), fields.whole("shared_expert_intermediate_size")
        if shared % inner:
            raise fields.refusal(
                "shared_expert_intermediate_size", f"not whole experts of {inner}", "choose another checkpoint"
            )
        experts = ExpertsConfig(
            num_experts=fields.whole("num_experts"),
            top_k=fields.whole("num_experts_per_tok"),
            inner_size=inner,
            shared_size=shared,
            gated_shared=True,
            normalise=fields.flag("norm_topk_prob", False),
            layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
        )
        return checked_experts(fields, experts)
