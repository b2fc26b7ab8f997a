"""MTP (NEXTN): a decoder layer of the target's own kind that reads (embedding, hidden state): DeepSeek, GLM, MiMo."""

import torch
from torch import Tensor, nn

from peregrine.attention import Attend
from peregrine.errors import CheckpointError
from peregrine.kernels.copy import join_columns
from peregrine.kernels.residual import start_residual
from peregrine.models.checkpoint.plan import Piece, linear_plan
from peregrine.models.checkpoint.weights import Weights, listed
from peregrine.models.config import ModelConfig
from peregrine.models.decoder import Decoder
from peregrine.models.decoder_layer import Layer
from peregrine.models.draft_heads.formats import (
    MIMO_PREFIX,
    SPECULATORS_MTP_PREFIX,
    layer_config,
    mtp_prefixes,
    prediction_layer,
)
from peregrine.models.draft_heads.opened import Blueprint, OpenedHead, is_ignorable, require_same
from peregrine.models.draft_heads.parts import StepHead, input_norm
from peregrine.models.families import family_of
from peregrine.models.layers import Linear, RMSNorm, output_head

_NEXTN_NAMES = {"fc": "eh_proj", "embedding_norm": "enorm", "hidden_norm": "hnorm", "norm": "shared_head.norm"}
# The target's embedding and output head, of which the layer may hold copies; a tied head is the embedding.
_TARGET_NAMES = {
    "embedding": ("model.embed_tokens.weight",),
    "head.weight": ("lm_head.weight", "model.embed_tokens.weight"),
}
_MTP_NAMES = {
    "fc": "input_proj",
    "embedding_norm": "token_layernorm",
    "hidden_norm": "hidden_layernorm",
    "norm": "final_layernorm",
}


class MTPHead(StepHead):
    """Norms of embedding and hidden state, one linear over both, a decoder layer, a norm, an output head.

    The layer is of the target's kind, MLA and experts included. The next step reads the normed hidden state. MiMo puts
    the hidden state before the embedding.
    """

    def __init__(
        self,
        layer: ModelConfig,
        target: Decoder,
        device: torch.device | str,
        dtype: torch.dtype,
        hidden_first: bool,
        own_embedding: bool = False,
        own_head: bool = False,
    ) -> None:
        super().__init__(layer, 1, (target.config.num_layers,), target, own_embedding)
        self.hidden_first = hidden_first
        with torch.device("meta"):
            self.embedding_norm = RMSNorm(layer.hidden_size, layer.norm_eps)
            self.hidden_norm = RMSNorm(layer.hidden_size, layer.norm_eps)
            self.fc = Linear(2 * layer.hidden_size, layer.hidden_size, shard=self.ranks.split(layer.hidden_size))
            self.layers = nn.ModuleList([Layer(layer, 0, split=True, ranks=self.ranks)])
            self.norm = RMSNorm(layer.hidden_size, layer.norm_eps)
            self.head = output_head(layer.hidden_size, layer.vocab_size, self.ranks) if own_head else None
        self.place(device, dtype, target)

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, live: Tensor | None = None
    ) -> Tensor:
        """tokens [N], hidden [N, H], positions [N] -> [N, H], or [R, H] for the live rows."""
        halves = (self.embedding_norm(self.embed(tokens)), self.hidden_norm(hidden))
        values = self.fc(join_columns(halves[::-1] if self.hidden_first else halves))
        residual = start_residual(values, input_norm(self.layers[0]))
        return self.through(list(self.layers), residual, positions, attend, live, self.norm).finish_norm()


def mtp_blueprint(source: OpenedHead, target: ModelConfig) -> Blueprint:
    """How to build the folder's only prediction layer for this target."""
    fields, weights = source.fields, source.weights
    config, prefixes = layer_config(fields.layer), mtp_prefixes(weights.names())
    require_same(fields.layer, "vocab_size", config.vocab_size, target.vocab_size, "vocabulary")
    require_same(fields.layer, "hidden_size", config.hidden_size, target.hidden_size, "hidden size")
    if len(prefixes) != 1 or fields.outer.whole("num_nextn_predict_layers", 1, minimum=0) > 1:
        raise CheckpointError(
            f"{str(weights.folder)!r} holds {len(prefixes)} prediction layers "
            f"({listed(prefixes) or 'none'}); exactly one is supported"
        )
    prefix, hidden = prefixes[0], config.hidden_size
    layer = prediction_layer(config, has_experts=f"{prefix}mlp.gate.weight" in weights.names())
    plain = prefix in (MIMO_PREFIX, SPECULATORS_MTP_PREFIX)
    names = _MTP_NAMES if plain else _NEXTN_NAMES
    plan = linear_plan("fc", {prefix + names["fc"]: (hidden, 2 * hidden)}, bias=False)
    for ours in ("embedding_norm", "hidden_norm", "norm"):
        plan[f"{ours}.weight"] = (Piece(f"{prefix}{names[ours]}.weight", (hidden,)),)
    stored = prefix.removesuffix(".")
    plan |= family_of(layer).layer_plan(layer, "layers.0", stored, hidden, split=True, moe=layer.has_experts(0))
    # Files repeat the target's embedding and head beside the layer.
    copies = {"embedding": f"{prefix}embed_tokens.weight", "head.weight": f"{prefix}shared_head.head.weight"}
    own = {
        ours: (Piece(name, (config.vocab_size, hidden)),)
        for ours, name in copies.items()
        if _differs(weights, name, _TARGET_NAMES[ours])
    }
    return Blueprint(
        plan | own,
        lambda name: not name.startswith(prefix) or name in copies.values() or is_ignorable(name),
        lambda decoder, device, dtype: MTPHead(
            layer, decoder, device, dtype, prefix == MIMO_PREFIX, "embedding" in own, "head.weight" in own
        ),
    )


def _differs(weights: Weights, name: str, of_target: tuple[str, ...]) -> bool:
    """Whether a tensor is stored and differs from the target's tensor in the same folder, if that is stored."""
    if name not in weights.names():
        return False
    targets = [other for other in of_target if other in weights.names()]
    return not targets or not torch.equal(weights.tensor(name), weights.tensor(targets[0]))
