"""Mixtral: Mistral's attention, experts in place of every MLP."""

from peregrine.models.checkpoint.folder import Fields
from peregrine.models.config import ExpertsConfig
from peregrine.models.families.family import ExpertNames, Family, checked_experts, same_window


class Mixtral(Family):
    """Mixtral 8x7B and 8x22B."""

    model_type = "mixtral"
    architectures = ("MixtralForCausalLM",)
    norm_eps, rope_theta = 1e-5, 1e6
    expert_names = ExpertNames("block_sparse_moe", "w1", "w3", "w2")

    def windows(self, fields: Fields, num_layers: int) -> tuple[int | None, ...]:
        window = fields.whole("sliding_window") if "sliding_window" in fields else None
        return same_window(self, fields, num_layers, window)

    def experts(self, fields: Fields, num_layers: int) -> ExpertsConfig:
        experts = ExpertsConfig(
            num_experts=fields.whole("num_local_experts"),
            top_k=fields.whole("num_experts_per_tok"),
            inner_size=fields.whole("intermediate_size"),
            normalise=True,
            layers=(True,) * num_layers,
        )
        return checked_experts(fields, experts)
