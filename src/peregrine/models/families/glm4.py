"""GLM-4: half of each head is rotated, in neighbouring pairs; the 0414 models norm what layers add, too."""

from peregrine.models.checkpoint.folder import Fields
from peregrine.models.checkpoint.plan import Plan
from peregrine.models.config import ModelConfig
from peregrine.models.families.family import PRE_NORMS, Biases, Family, even_head_dim
from peregrine.models.families.phi3 import fused_mlp_plan
from peregrine.models.rope_table import Rope, read_rope


class Glm(Family):
    """GLM-4 9B and GLM-Edge."""

    model_type = "glm"
    architectures: tuple[str, ...] = ("GlmForCausalLM",)
    norm_eps = 1.5625e-7
    rotates_part = interleaved = True

    def rope(self, fields: Fields, max_positions: int) -> Rope:
        return half_rotated(fields, max_positions)

    def biases(self, fields: Fields) -> Biases:
        return Biases(qkv=fields.flag("attention_bias", True))

    def head_dim(self, fields: Fields, hidden_size: int, num_heads: int) -> int:
        return even_head_dim(fields, 128)

    def mlp_plan(self, config: ModelConfig, ours: str, stored: str) -> Plan:
        return fused_mlp_plan(config, ours, stored)


class Glm4(Glm):
    """GLM-4-0414 and GLM-Z1."""

    model_type = "glm4"
    architectures = ("Glm4ForCausalLM",)
    norms = PRE_NORMS | {"attention_out_norm": "post_self_attn_layernorm", "mlp_out_norm": "post_mlp_layernorm"}


def half_rotated(fields: Fields, max_positions: int) -> Rope:
    """The rope of a family in which an absent partial_rotary_factor means half of a head."""
    given = fields.number("partial_rotary_factor", 0.5)
    return read_rope(Fields(fields.source, fields.values | {"partial_rotary_factor": given}), max_positions, True)
