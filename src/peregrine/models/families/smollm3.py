"""SmolLM3: Llama in which every fourth layer has no positions."""

from dataclasses import replace

from peregrine.models.checkpoint.folder import Fields
from peregrine.models.families.family import layer_types
from peregrine.models.families.llama import Llama
from peregrine.models.rope_table import Rope


class SmolLM3(Llama):
    """SmolLM3."""

    model_type = "smollm3"
    architectures = ("SmolLM3ForCausalLM",)
    tied = True
    rope_theta = 2e6

    def windows(self, fields: Fields, num_layers: int) -> tuple[int | None, ...]:
        if fields.flag("use_sliding_window", False) or "sliding_attention" in layer_types(fields, num_layers):
            raise fields.refusal("use_sliding_window", "SmolLM3 with windows is not supported", "choose another one")
        return (None,) * num_layers

    def layer_ropes(self, fields: Fields, rope: Rope, num_layers: int) -> tuple[Rope, ...]:
        every = fields.whole("no_rope_layer_interval", 4)
        rotates = fields.wholes("no_rope_layers") or tuple(int((i + 1) % every != 0) for i in range(num_layers))
        if len(rotates) != num_layers:
            raise fields.refusal("no_rope_layers", f"not one for each of {num_layers} layers", "correct the config")
        return tuple(rope if rotate else replace(rope, scaling=None, share=0.0) for rotate in rotates)
