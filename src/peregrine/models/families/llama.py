"""Llama 2 and 3: the plain decoder, with biases where the config asks for them."""

from dataclasses import replace

from peregrine.models.checkpoint.folder import Fields
from peregrine.models.families.family import Biases, Family, attention_bias


class Llama(Family):
    """Llama and its clones."""

    model_type = "llama"
    architectures = ("LlamaForCausalLM",)

    def biases(self, fields: Fields) -> Biases:
        return replace(attention_bias(fields), mlp=fields.flag("mlp_bias", False))
