"""Mistral: one sliding window for all layers."""

from peregrine.models.checkpoint.folder import Fields
from peregrine.models.families.family import Family, declared_window, same_window


class Mistral(Family):
    """Mistral 7B and later."""

    model_type = "mistral"
    architectures = ("MistralForCausalLM",)

    def windows(self, fields: Fields, num_layers: int) -> tuple[int | None, ...]:
        return same_window(self, fields, num_layers, declared_window(fields))
