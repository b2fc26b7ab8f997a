"""Granite 3: Llama with four constants."""

from peregrine.models.checkpoint.folder import Fields
from peregrine.models.config import Scales
from peregrine.models.families.llama import Llama


class Granite(Llama):
    """Dense Granite models."""

    model_type = "granite"
    architectures = ("GraniteForCausalLM",)

    def scales(self, fields: Fields) -> Scales:
        return Scales(
            embedding=fields.number("embedding_multiplier", 1.0),
            residual=fields.number("residual_multiplier", 1.0),
            attention=fields.number("attention_multiplier", 1.0),
            logits=fields.number("logits_scaling", 1.0),
        )
