"""Qwen2 and Qwen2.5: biases on q, k and v, and sliding windows by layer. MiMo is a Qwen2 with prediction layers."""

from peregrine.models.checkpoint.folder import Fields
from peregrine.models.families.family import Biases, Family, window_by_layer


class Qwen2(Family):
    """Qwen2, Qwen2.5 and MiMo."""

    model_type = "qwen2"
    architectures = ("Qwen2ForCausalLM", "MiMoForCausalLM")

    def biases(self, fields: Fields) -> Biases:
        return Biases(qkv=True)  # whatever `attention_bias` says

    def windows(self, fields: Fields, num_layers: int) -> tuple[int | None, ...]:
        return window_by_layer(fields, num_layers)
