"""Gemma 2 and 3: gelu, norms around attention and MLP, scaled embeddings, windows in most layers.

Gemma 2 caps attention's scores and the logits; Gemma 3 norms queries and keys, and rotates with two thetas.
"""

from peregrine.models.checkpoint.folder import Fields
from peregrine.models.config import Scales
from peregrine.models.families.family import Biases, Family, attention_bias, even_head_dim, layer_types, require
from peregrine.models.rope_table import Rope, read_rope

NORMS = {
    "input_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "post_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}


class Gemma2(Family):
    """Gemma 2."""

    model_type = "gemma2"
    architectures: tuple[str, ...] = ("Gemma2ForCausalLM",)
    activation = "gelu"
    tied = True
    norm_offset = 1.0
    norms = NORMS
    window_period = 2  # the last of each group of this many layers sees all keys

    def biases(self, fields: Fields) -> Biases:
        return attention_bias(fields)

    def head_dim(self, fields: Fields, hidden_size: int, num_heads: int) -> int:
        return even_head_dim(fields, 256)

    def windows(self, fields: Fields, num_layers: int) -> tuple[int | None, ...]:
        if fields.flag("use_bidirectional_attention", False):
            raise fields.refusal("use_bidirectional_attention", "only causal attention is supported", "set it to false")
        window = fields.whole("sliding_window", 4096)
        return tuple(window if slides else None for slides in self.slides(fields, num_layers))

    def slides(self, fields: Fields, num_layers: int) -> tuple[bool, ...]:
        """Which layers have a window."""
        period = fields.whole("sliding_window_pattern", self.window_period)
        kinds = layer_types(fields, num_layers)
        return tuple(kind == "sliding_attention" for kind in kinds) or tuple(
            (i + 1) % period != 0 for i in range(num_layers)
        )

    def scales(self, fields: Fields) -> Scales:
        require(fields, "hidden_activation", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",))
        return Scales(
            embedding=fields.whole("hidden_size") ** 0.5,
            rounds_embedding=True,
            attention=fields.number("query_pre_attn_scalar", 256) ** -0.5,
            score_cap=cap(fields, "attn_logit_softcapping", 50.0),
            logit_cap=cap(fields, "final_logit_softcapping", 30.0),
        )


class Gemma3(Gemma2):
    """Gemma 3, text alone."""

    model_type = "gemma3_text"
    architectures = ("Gemma3ForCausalLM",)
    qk_norm = True
    window_period = 6

    def scales(self, fields: Fields) -> Scales:
        given = {name: fields.values.get(name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
        return super().scales(Fields(fields.source, fields.values | given))  # no caps where the config has none

    def rope(self, fields: Fields, max_positions: int) -> Rope:
        both, theta = fields.inner("rope_parameters"), {"rope_theta": fields.values.get("rope_theta", 1e6)}
        if "full_attention" in both:
            theta = {"rope_parameters": both.values["full_attention"]}
        return read_rope(Fields(fields.source, fields.values | theta), max_positions)

    def layer_ropes(self, fields: Fields, rope: Rope, num_layers: int) -> tuple[Rope, ...]:
        local = Rope(fields.number("rope_local_base_freq", 10000.0), None)
        both = fields.inner("rope_parameters")
        if "sliding_attention" in both:
            inner = Fields(both.source, {"rope_parameters": both.values["sliding_attention"]})
            local = read_rope(inner, fields.whole("max_position_embeddings", 131072))
        return tuple(local if slides else rope for slides in self.slides(fields, num_layers))


def cap(fields: Fields, name: str, default: float) -> float | None:
    """A cap, the default where the field is absent; null: none."""
    return None if name in fields.values and fields.values[name] is None else fields.number(name, default)
