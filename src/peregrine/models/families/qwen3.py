"""Qwen3: norms on every head's queries and keys, heads of 128, sliding windows by layer."""

from peregrine.models.checkpoint.folder import Fields
from peregrine.models.families.family import Biases, Family, attention_bias, even_head_dim, window_by_layer


class Qwen3(Family):
    """Dense Qwen3."""

    model_type = "qwen3"
    architectures = ("Qwen3ForCausalLM",)
    qk_norm = True

    def biases(self, fields: Fields) -> Biases:
        return attention_bias(fields)

    def head_dim(self, fields: Fields, hidden_size: int, num_heads: int) -> int:
        return even_head_dim(fields, 128)

    def windows(self, fields: Fields, num_layers: int) -> tuple[int | None, ...]:
        return window_by_layer(fields, num_layers)
