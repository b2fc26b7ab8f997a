"""The decoder: Llama, Mistral, Qwen2, Qwen3, Mixtral and DeepSeek as one module.

A pure function of (tokens, positions, attend): how attention is computed, where keys and values live and
which tokens see which is `attend`'s affair alone, so one forward serves prefill, verify, look-ahead and
training.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peregrine.attention import Attend, LayerAttention
from peregrine.kernels.residual import Residual, embed_residual, normed, start_residual
from peregrine.kernels.runtime.cpu_graph import CpuGraphs
from peregrine.models.config import ModelConfig
from peregrine.models.decoder_layer import Layer
from peregrine.models.layers import QKV, Linear, LiveRows, RMSNorm, pack_linears
from peregrine.models.rope_table import rope_table

# Windows whose activations fit in this are run from remembered kernel calls; larger ones do not need it.
MAX_GRAPH_BYTES = 8 * 2**20


class Decoder(nn.Module):
    """Embedding, layers, final norm and head; weights are not set until they are drawn or loaded."""

    rope_table: Tensor

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        num_positions: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        token_bytes = 4 * (6 * config.hidden_size + 3 * config.intermediate_size) * config.num_layers
        self.graphs = CpuGraphs(max_rows=MAX_GRAPH_BYTES // token_bytes)
        # Calls are remembered where a layer is the same kernels for every token.
        self.remembers = config.mla is None and config.experts is None
        last = config.num_layers - 1
        with torch.device("meta"):
            self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
            self.layers = nn.ModuleList(Layer(config, i, split=i == last) for i in range(config.num_layers))
            self.norm = RMSNorm(config.hidden_size, config.norm_eps)
            self.head = Linear(config.hidden_size, config.vocab_size)
        self.to(dtype).to_empty(device=device)
        if config.tied:
            self.head.weight = self.embedding
        table = rope_table(config.rope, config.rope_dim, num_positions or config.max_positions, device)
        self.register_buffer("rope_table", table, persistent=False)

    def layer_attention(self) -> list[LayerAttention]:
        """How each layer attends, for `bind`."""
        return self.config.layer_attention()

    def pack(self) -> "Decoder":
        """Switch every linear to the row-exact kernel, for inference; it can no longer be trained."""
        pack_linears(self, self.head if self.config.tied else None)
        return self

    def forward(
        self,
        tokens: Tensor,  # [N] i64
        positions: Tensor,  # [N] i64
        attend: Attend,
        taps: Sequence[int] = (),
        live: Tensor | None = None,  # [R] i64
    ) -> tuple[Tensor, Tensor | None]:
        """(normed hidden [N, H], taps [N, len(taps) * H] or None); with `live` hidden is of those rows alone.

        Tap i is the residual stream that enters layer i; tap `num_layers` is the normed hidden, always of all
        rows. In the last layer keys and values are computed for all tokens, the rest for live rows alone.
        """
        num_layers = len(self.layers)
        last, tap_normed = num_layers - 1, num_layers in taps
        queried = None if tap_normed else live
        tapped: dict[int, Tensor] = {}
        stream, heads = self.embed(tokens), None
        for i in range(num_layers):
            if i in taps:
                tapped[i] = stream.values
            live_rows = LiveRows.of(queried, stream, positions) if i == last else None
            if heads is None:
                heads = self.layer(i).attention.project(stream, positions, self.rope_table, live_rows)
            attended = heads.attend(attend, i)
            if i == last:
                stream = self.layer(i).after_attention(attended, live_rows.residual if live_rows else stream, self.norm)
            else:
                all_ask = queried is None or i + 1 < last
                heads, stream = self._cross(i, attended, stream, positions, all_ask)
        hidden = normed(stream)
        if tap_normed:
            tapped[num_layers] = hidden
            hidden = hidden if live is None else hidden.index_select(0, live)
        return hidden, torch.cat([tapped[i] for i in taps], dim=1) if taps else None

    def embed(self, tokens: Tensor) -> Residual:
        """The embeddings of tokens [N], ready for the first layer."""
        norm = self.layer(0).input_norm
        assert norm is not None
        if self.head.packed is None:
            return start_residual(F.embedding(tokens, self.embedding), norm.weight, norm.eps)
        return embed_residual(tokens, self.embedding, norm.weight, norm.eps)

    def layer(self, i: int) -> Layer:
        """The i-th layer."""
        layer = self.layers[i]
        assert isinstance(layer, Layer)
        return layer

    def _cross(
        self, i: int, attended: Tensor, stream: Residual, positions: Tensor, all_ask: bool
    ) -> tuple[QKV | None, Residual]:
        """From layer i's answer of attention to layer i + 1; its question comes along where calls are remembered."""
        layer, following = self.layer(i), self.layer(i + 1)
        packed = self.head.packed
        if not self.remembers or packed is None or packed.panels is None or not all_ask:
            return None, layer.after_attention(attended, stream, following.input_norm)

        def step(attended: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
            after = layer.after_attention(attended, Residual(values, values), following.input_norm)
            heads = following.attention.project(after, positions, self.rope_table)
            return heads.q, heads.k, heads.v, after.values

        q, k, v, values = self.graphs.run(i, step, attended, stream.values, positions)
        return QKV(q, k, v), Residual(values, values)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, V]."""
        return self.head.forward(hidden)
