"""OLMo 2: norms of what layers add in place of norms of what they read, and of queries and keys over all heads."""

from peregrine.models.checkpoint.folder import Fields
from peregrine.models.families.family import Biases, Family, attention_bias

NORMS = {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}


class Olmo2(Family):
    """OLMo 2."""

    model_type = "olmo2"
    architectures = ("Olmo2ForCausalLM",)
    norm_eps = 1e-5
    qk_norm = whole_qk_norm = True
    norms = NORMS

    def biases(self, fields: Fields) -> Biases:
        return attention_bias(fields)
