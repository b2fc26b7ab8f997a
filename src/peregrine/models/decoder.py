"""The decoder: all families of `models/families` as one module.

A pure function of (tokens, positions, attend): `attend` alone knows how attention is computed, where keys and values
live and which tokens see which. So one forward serves prefill, verify, look-ahead and training.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from peregrine.attention import Attend, LayerAttention
from peregrine.kernels.activation import soft_cap
from peregrine.kernels.copy import join_columns
from peregrine.kernels.residual import Residual, embed_residual
from peregrine.kernels.runtime.cpu import is_recording
from peregrine.kernels.runtime.cpu_graph import CpuGraphs
from peregrine.models.config import ModelConfig
from peregrine.models.decoder_layer import Layer
from peregrine.models.layers import QKV, Attention, LiveRows, RMSNorm, allocate, output_head, pack_linears
from peregrine.models.parallel import ALONE, Ranks
from peregrine.models.rope_table import rope_table

# Windows whose activations fit in this are replayed from CPU graphs; larger ones do not need it.
MAX_GRAPH_BYTES = 8 * 2**20
FIRST = -1  # of what is recorded, the projections of the first layer; others have the number of their layer


class Decoder(nn.Module):
    """Embedding, layers, final norm and head; weights are not set until they are drawn or loaded."""

    rope_table: Tensor

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        num_positions: int | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        self.config, self.ranks = config, ranks
        self.kv_shape = ranks.kv_shape(config)
        token_bytes = 4 * (6 * config.hidden_size + 3 * config.intermediate_size) * config.num_layers
        self.graphs = CpuGraphs(max_rows=MAX_GRAPH_BYTES // token_bytes)
        last = config.num_layers - 1
        with torch.device("meta"):
            self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
            self.layers = nn.ModuleList(Layer(config, i, i == last, ranks=ranks) for i in range(config.num_layers))
            self.norm = RMSNorm(config.hidden_size, config.residual_eps)
            self.head = output_head(config.hidden_size, config.vocab_size, ranks)
        allocate(self, device, dtype)
        if config.shares_embedding:
            self.head.weight = self.embedding
        length, dim = num_positions or config.max_positions, config.rope_dim
        self.register_buffer("rope_table", rope_table(config.rope, dim, length, device), persistent=False)
        tables = {rope: rope_table(rope, dim, length, device) for rope in set(config.layer_ropes)}
        self.layer_tables = [tables[rope] for rope in config.layer_ropes]

    def layer_attention(self) -> list[LayerAttention]:
        """How each layer attends, for `bind`."""
        layers = self.config.layer_attention()
        if not self.config.sinks:
            return layers
        parts = [self.layer(i).attention for i in range(len(layers))]
        sinks = [part.own_sinks() for part in parts if isinstance(part, Attention)]
        return [replace(layer, sinks=own) for layer, own in zip(layers, sinks, strict=True)]

    def pack(self, held: torch.dtype | None = None) -> "Decoder":
        """Pack every linear, for inference, its weight held in this dtype on a CPU; it can no longer be trained."""
        pack_linears(self, self.head if self.config.shares_embedding else None, held)
        return self

    def forward(
        self,
        tokens: Tensor,  # [N] i64
        positions: Tensor,  # [N] i64
        attend: Attend,
        taps: Sequence[int] = (),
        live: Tensor | None = None,  # [R] i64
    ) -> tuple[Tensor, Tensor | None]:
        """(normed hidden [N, H], taps [N, len(taps) * H] or None); with `live`, hidden of those rows alone.

        Tap i is the residual stream that enters layer i; tap `num_layers` is the normed hidden state, always of all
        rows. In the last layer keys and values are computed for all tokens, the rest for live rows alone.
        """
        num_layers = len(self.layers)
        last, tap_normed = num_layers - 1, num_layers in taps
        live_queries = None if tap_normed else live
        tapped: dict[int, Tensor] = {}
        residual, qkv = self.embed(tokens), None
        for i in range(num_layers):
            if i in taps:
                scale = self.config.scales.residual
                tapped[i] = residual.values if scale == 1 else residual.values * scale
            if i < last:
                qkv = qkv or self._project(i, residual, positions)
                attended = qkv.attend(attend, i)
                can_project = live_queries is None or i + 1 < last
                qkv, residual = self._to_next_layer(i, attended, residual, positions, can_project)
            else:
                rows = LiveRows.of(live_queries, residual, positions)
                qkv = qkv or self.layer(i).attention.project(residual, positions, self.table(i), rows)
                attended = qkv.attend(attend, i)
                residual = self._finish(attended, rows.residual if rows else residual)
        hidden = residual.finish_norm()
        if tap_normed:
            tapped[num_layers] = hidden
            hidden = hidden if live is None else hidden.index_select(0, live)
        return hidden, join_columns([tapped[i] for i in taps]) if taps else None

    def embed(self, tokens: Tensor) -> Residual:
        """The residual stream of tokens [N], prepared for the first layer."""
        return embed_residual(tokens, self.embedding, self.layer(0).input_norm)

    def table(self, i: int) -> Tensor:
        """The rotary table of the i-th layer."""
        return self.layer_tables[i] if self.layer_tables else self.rope_table

    def layer(self, i: int) -> Layer:
        """The i-th layer."""
        layer = self.layers[i]
        assert isinstance(layer, Layer)
        return layer

    @property
    def is_recordable(self) -> bool:
        """Whether the layers run the same compiled CPU kernels for every token, so that a CPU graph can replay them."""
        config = self.config
        return self.head.format.is_recordable and not (config.mla or config.experts or config.unfused)

    def _project(self, i: int, residual: Residual, positions: Tensor) -> QKV:
        """The projections of layer i, if the layer before did not make them; a CPU graph replays those of the first."""
        layer, table = self.layer(i), self.table(i)
        if i > 0 or not self.is_recordable:
            return layer.attention.project(residual, positions, table)

        def step(normed: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
            qkv = layer.attention.project(Residual(normed, normed), positions, table)
            return qkv.q, qkv.k, qkv.v

        q, k, v = self.graphs.run(FIRST, step, residual.normed, positions)
        return QKV(q, k, v)

    def _finish(self, attended: Tensor, residual: Residual) -> Residual:
        """The second half of the last layer, with the final norm; a CPU graph replays it."""
        last = len(self.layers) - 1
        if not self.is_recordable:
            return self.layer(last).after_attention(attended, residual, self.norm)

        def step(attended: Tensor, values: Tensor) -> tuple[Tensor, ...]:
            after = self.layer(last).after_attention(attended, Residual(values, values), self.norm)
            return after.values, after.normed

        values, normed = self.graphs.run(last, step, attended, residual.values)
        return Residual(
            values, normed if is_recording() else normed.clone()
        )  # the caller's own: the next replay writes over what a graph returned

    def _to_next_layer(
        self, i: int, attended: Tensor, residual: Residual, positions: Tensor, can_project: bool
    ) -> tuple[QKV | None, Residual]:
        """From layer i's attention to layer i + 1; a CPU graph replays it with the projection of layer i + 1."""
        layer, following, table = self.layer(i), self.layer(i + 1), self.table(i + 1)
        if not can_project or not self.is_recordable:
            return None, layer.after_attention(attended, residual, following.input_norm)

        def step(attended: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
            after = layer.after_attention(attended, Residual(values, values), following.input_norm)
            qkv = following.attention.project(after, positions, table)
            return qkv.q, qkv.k, qkv.v, after.values

        q, k, v, values = self.graphs.run(i, step, attended, residual.values, positions)
        return QKV(q, k, v), Residual(values, values)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, V]."""
        logits, scales = self.head.forward(hidden), self.config.scales
        if scales.logits != 1:
            logits = logits / scales.logits
        return logits if scales.logit_cap is None else soft_cap(logits, scales.logit_cap)
