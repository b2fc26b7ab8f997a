"""EAGLE: one linear over (embedding, normed target state), plain layers, the target's output head."""

import torch
from torch import Tensor, nn

from peregrine.attention import Attend
from peregrine.kernels.copy import join_columns
from peregrine.kernels.residual import Residual
from peregrine.models.checkpoint.plan import linear_plan
from peregrine.models.config import ModelConfig
from peregrine.models.decoder import Decoder
from peregrine.models.decoder_layer import Layer
from peregrine.models.draft_heads.formats import plain_layer_config
from peregrine.models.draft_heads.opened import Blueprint, OpenedHead, is_ignorable, require_same
from peregrine.models.draft_heads.parts import StepHead, own_tables
from peregrine.models.families import family_of
from peregrine.models.layers import Linear, output_head


class EagleHead(StepHead):
    """One linear over (embedding, normed target state), then plain layers.

    There is no norm before the first layer and none before the output head.
    """

    def __init__(
        self,
        layer: ModelConfig,
        target: Decoder,
        device: torch.device | str,
        dtype: torch.dtype,
        own_embedding: bool,
        own_head: bool,
        fuse_bias: bool,
    ) -> None:
        super().__init__(layer, layer.num_layers, (target.config.num_layers,), target, own_embedding)
        hidden_size, last = layer.hidden_size, layer.num_layers - 1
        with torch.device("meta"):
            self.fc = Linear(2 * hidden_size, hidden_size, fuse_bias, self.ranks.split(hidden_size))
            self.layers = nn.ModuleList(
                Layer(layer, i, split=i == last, normed_input=i > 0, ranks=self.ranks) for i in range(layer.num_layers)
            )
            self.head = output_head(hidden_size, layer.vocab_size, self.ranks) if own_head else None
        self.place(device, dtype, target)

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, live: Tensor | None = None
    ) -> Tensor:
        """tokens [N], hidden [N, H], positions [N] -> [N, H], or [R, H] for the live rows."""
        values = self.fc(join_columns((self.embed(tokens), hidden)))
        residual = Residual(values, values)  # the first layer has no input norm
        return self.through(list(self.layers), residual, positions, attend, live, None).values


def eagle_blueprint(source: OpenedHead, target: ModelConfig) -> Blueprint:
    """How to build the folder's EAGLE head for this target."""
    fields, names = source.fields, source.stored
    layer = plain_layer_config(fields.layer)
    require_same(fields.layer, "vocab_size", layer.vocab_size, target.vocab_size, "vocabulary")
    require_same(fields.layer, "hidden_size", layer.hidden_size, target.hidden_size, "hidden size")
    hidden, bias = layer.hidden_size, "fc.bias" in names
    own_embedding, own_head = "embed_tokens.weight" in names, "lm_head.weight" in names
    plan = linear_plan("fc", {"fc": (hidden, 2 * hidden)}, bias)
    for i in range(layer.num_layers):
        plan |= family_of(layer).layer_plan(layer, f"layers.{i}", f"layers.{i}", hidden, i == layer.num_layers - 1)
    del plan["layers.0.input_norm.weight"]
    plan |= own_tables(layer, own_embedding, layer.vocab_size if own_head else None)
    return Blueprint(
        plan,
        is_ignorable,
        lambda decoder, device, dtype: EagleHead(layer, decoder, device, dtype, own_embedding, own_head, bias),
    )
