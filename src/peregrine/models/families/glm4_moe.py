"""GLM-4.5 to 4.7 have experts behind plain attention, GLM-4.7-Flash behind MLA; both route as DeepSeek-V3 does."""

from peregrine.models.checkpoint.folder import Fields
from peregrine.models.config import ExpertsConfig, MLAConfig
from peregrine.models.families.deepseek import DeepseekV3, expert_layers, noaux_experts
from peregrine.models.families.family import Biases, Family
from peregrine.models.families.glm4 import half_rotated
from peregrine.models.rope_table import Rope


class Glm4Moe(Family):
    """GLM-4.5, GLM-4.5-Air, GLM-4.6 and GLM-4.7: half of each head is rotated, in halves."""

    model_type = "glm4_moe"
    architectures = ("Glm4MoeForCausalLM",)
    norm_eps = 1e-5
    rotates_part = True

    def rope(self, fields: Fields, max_positions: int) -> Rope:
        return half_rotated(fields, max_positions)

    def biases(self, fields: Fields) -> Biases:
        return Biases(qkv=fields.flag("attention_bias", False))

    def norms_heads(self, fields: Fields) -> bool:
        return fields.flag("use_qk_norm", False)

    def experts(self, fields: Fields, num_layers: int) -> ExpertsConfig:
        return noaux_experts(fields, expert_layers(fields, num_layers))


# What absent fields of GLM-4.7-Flash mean.
LITE_FIELDS = {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "first_k_dense_replace": 1}


class Glm4MoeLite(DeepseekV3):
    """GLM-4.7-Flash."""

    model_type = "glm4_moe_lite"
    architectures = ("Glm4MoeLiteForCausalLM",)
    norm_eps = 1e-5

    def mla(self, fields: Fields, rope: Rope) -> MLAConfig:
        return super().mla(Fields(fields.source, LITE_FIELDS | fields.values), rope)

    def experts(self, fields: Fields, num_layers: int) -> ExpertsConfig:
        kinds = fields.texts("mlp_layer_types")  # newer configs have it in place of first_k_dense_replace
        if not kinds:
            return super().experts(Fields(fields.source, LITE_FIELDS | fields.values), num_layers)
        if len(kinds) != num_layers or not {*kinds} <= {"dense", "sparse"}:
            raise fields.refusal(
                "mlp_layer_types", f"not dense or sparse for {num_layers} layers", "correct the config"
            )
        return noaux_experts(fields, tuple(kind == "sparse" for kind in kinds))
