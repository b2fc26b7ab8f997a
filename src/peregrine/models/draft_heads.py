"""Draft heads: small networks that guess on from a target's hidden states. EAGLE-3, EAGLE and MTP.

All read entries: the entry at position p is (hidden state of p, token at p + 1). The first hidden states come
from the target, fused from its taps; the next ones are the head's own. A head borrows the target's embedding
and output head unless it brings its own. Like the decoder, heads are pure functions of (tokens, hidden,
positions, attend), and they train.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from peregrine.attention import Attend, LayerAttention
from peregrine.cache.store import KVShape
from peregrine.kernels.residual import Residual, normed, start_residual
from peregrine.models.config import ModelConfig
from peregrine.models.decoder import Decoder
from peregrine.models.decoder_layer import Layer
from peregrine.models.head_parts import Eagle3Layer, Head, input_norm
from peregrine.models.layers import Linear, RMSNorm


class DraftHead(Protocol):
    """What drives guessing, whatever the head is made of."""

    taps: tuple[int, ...]  # target taps it wants
    num_layers: int
    kv_shape: KVShape
    draft_to_target: Tensor | None  # [Vd] i64 target id of each draft id; None: the same vocabulary

    def layer_attention(self) -> list[LayerAttention]:
        """How each layer attends, for `bind`."""

    def fuse(self, tapped: Tensor) -> Tensor:
        """The target's taps as one hidden state each. [N, len(taps) * Ht] -> [N, H]"""

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, live: Tensor | None = None
    ) -> Tensor:
        """tokens [N], hidden [N, H], positions [N] -> the next hidden, [N, H], or [R, H] of live rows."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the draft vocabulary. [n, H] -> [n, Vd]"""


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Shape and variant of an EAGLE-3 head."""

    layer: ModelConfig  # of its layers; vocab_size is the target's
    taps: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    own_embedding: bool
    own_head: bool
    fuse_bias: bool = False
    norm_before_residual: bool = False  # the residual is the normed hidden state instead of the plain one
    norm_each_tap: bool = False  # every tap has a norm of its own before fusing
    norm_all_taps: bool = False  # the taps, side by side, have one norm before fusing
    norm_output: bool = False  # the next step reads the normed hidden state


class Eagle3Head(Head):
    """EAGLE-3: taps fused by one linear, a layer over (embedding, hidden), a norm and a head of its own.

    The hidden state it returns has not passed the final norm, unless the variant says so.
    """

    def __init__(
        self,
        config: Eagle3Config,
        target: Decoder,
        device: torch.device | str,
        dtype: torch.dtype,
        draft_to_target: Tensor | None = None,
    ) -> None:
        layer = config.layer
        super().__init__(layer, layer.num_layers, config.taps, target)
        self.config = config
        hidden_size, last = layer.hidden_size, layer.num_layers - 1
        tapped_size = len(config.taps) * config.target_hidden_size
        with torch.device("meta"):
            if config.own_embedding:
                self.embedding = nn.Parameter(torch.empty(layer.vocab_size, hidden_size))
            self.fc = Linear(tapped_size, hidden_size, config.fuse_bias)
            self.tap_norms = nn.ModuleList(
                RMSNorm(config.target_hidden_size, layer.norm_eps) for _ in config.taps if config.norm_each_tap
            )
            self.taps_norm = RMSNorm(tapped_size, layer.norm_eps) if config.norm_all_taps else None
            self.first = Eagle3Layer(layer, last == 0, config.norm_before_residual)
            self.layers = nn.ModuleList(Layer(layer, i, i == last) for i in range(1, layer.num_layers))
            self.norm = RMSNorm(hidden_size, layer.norm_eps)
            self.head = Linear(hidden_size, config.draft_vocab_size) if config.own_head else None
        self.place(device, dtype, target)
        self.register_buffer(
            "draft_to_target", None if draft_to_target is None else draft_to_target.to(device), persistent=False
        )

    def fuse(self, tapped: Tensor) -> Tensor:
        """[N, len(taps) * Ht] -> [N, H]."""
        if self.taps_norm is not None:
            tapped = self.taps_norm(tapped)
        if len(self.tap_norms):
            pieces = torch.split(tapped, self.config.target_hidden_size, dim=1)
            tapped = torch.cat(
                [norm(piece.contiguous()) for norm, piece in zip(self.tap_norms, pieces, strict=True)], dim=1
            )
        fused: Tensor = self.fc(tapped)
        return fused

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, live: Tensor | None = None
    ) -> Tensor:
        """tokens [N], hidden [N, H], positions [N] -> [N, H], or [R, H] for the live rows."""
        layers = list(self.layers)
        last_norm = self.norm if self.config.norm_output else None
        stream = self.first.forward(
            tokens,
            self.token_embedding,
            hidden,
            positions,
            self.rope_table,
            attend,
            None if layers else live,
            input_norm(layers[0]) if layers else last_norm,
        )
        if layers:
            stream = self.through(layers, stream, positions, attend, live, last_norm)
        return normed(stream)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, Vd]."""
        return self.score(hidden if self.config.norm_output else self.norm(hidden))


class EagleHead(Head):
    """EAGLE: one linear over (embedding, normed target hidden), plain layers, the target's output head.

    The first layer has no input norm, and no norm stands before the output head.
    """

    draft_to_target: Tensor | None = None

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
        super().__init__(layer, layer.num_layers, (target.config.num_layers,), target)
        hidden_size, last = layer.hidden_size, layer.num_layers - 1
        with torch.device("meta"):
            if own_embedding:
                self.embedding = nn.Parameter(torch.empty(layer.vocab_size, hidden_size))
            self.fc = Linear(2 * hidden_size, hidden_size, fuse_bias)
            self.layers = nn.ModuleList(
                Layer(layer, i, split=i == last, normed_input=i > 0) for i in range(layer.num_layers)
            )
            self.head = Linear(hidden_size, layer.vocab_size) if own_head else None
        self.place(device, dtype, target)

    def fuse(self, tapped: Tensor) -> Tensor:
        """The only tap, as it is."""
        return tapped

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, live: Tensor | None = None
    ) -> Tensor:
        """tokens [N], hidden [N, H], positions [N] -> [N, H], or [R, H] for the live rows."""
        values = self.fc(torch.cat((self.embed(tokens), hidden), dim=1))
        stream = Residual(values, values)  # the first layer has no input norm
        return self.through(list(self.layers), stream, positions, attend, live, None).values

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, V]."""
        return self.score(hidden)


class MTPHead(Head):
    """MTP (NEXTN): both halves normed, one linear, a decoder layer, a norm, an output head.

    The layer is one like the target's, latent attention and experts included. The next step reads the normed hidden
    state. MiMo puts the hidden state before the embedding. Embedding and output head are the target's, unless the
    checkpoint has others.
    """

    draft_to_target: Tensor | None = None

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
        super().__init__(layer, 1, (target.config.num_layers,), target)
        self.hidden_first = hidden_first
        with torch.device("meta"):
            if own_embedding:
                self.embedding = nn.Parameter(torch.empty(layer.vocab_size, layer.hidden_size))
            self.embedding_norm = RMSNorm(layer.hidden_size, layer.norm_eps)
            self.hidden_norm = RMSNorm(layer.hidden_size, layer.norm_eps)
            self.fc = Linear(2 * layer.hidden_size, layer.hidden_size)
            self.layers = nn.ModuleList([Layer(layer, 0, split=True)])
            self.norm = RMSNorm(layer.hidden_size, layer.norm_eps)
            self.head = Linear(layer.hidden_size, layer.vocab_size) if own_head else None
        self.place(device, dtype, target)

    def fuse(self, tapped: Tensor) -> Tensor:
        """The only tap, as it is."""
        return tapped

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, live: Tensor | None = None
    ) -> Tensor:
        """tokens [N], hidden [N, H], positions [N] -> [N, H], or [R, H] for the live rows."""
        halves = (self.embedding_norm(self.embed(tokens)), self.hidden_norm(hidden))
        values = self.fc(torch.cat(halves[::-1] if self.hidden_first else halves, dim=1))
        norm = input_norm(self.layers[0])
        assert norm is not None
        stream = start_residual(values, norm.weight, norm.eps)
        return normed(self.through(list(self.layers), stream, positions, attend, live, self.norm))

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, V]."""
        return self.score(hidden)
