"""The dense decoder: Llama, Mistral, Qwen2 and Qwen3 as one module.

A pure function of (tokens, positions, attend): how attention is computed, where keys and values live and
which tokens see which is `attend`'s affair alone, so one forward serves prefill, verify, look-ahead and
training.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peregrine.attention import Attend, LayerAttention
from peregrine.kernels.tape import Shelf
from peregrine.models.config import ModelConfig
from peregrine.models.layers import Layer, Linear, RMSNorm, settle
from peregrine.models.rope_table import rope_table

# Windows whose activations fit in this are run from remembered kernel calls; larger ones do not need it.
MAX_SHELF_BYTES = 8 * 2**20


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
        self.shelf = Shelf(max_rows=MAX_SHELF_BYTES // token_bytes)
        last = config.num_layers - 1
        with torch.device("meta"):
            self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
            self.layers = nn.ModuleList(Layer(config, i, split=i == last) for i in range(config.num_layers))
            self.norm = RMSNorm(config.hidden_size, config.norm_eps)
            self.head = Linear(config.hidden_size, config.vocab_size)
        self.to(dtype).to_empty(device=device)
        if config.tied:
            self.head.weight = self.embedding
        table = rope_table(config.rope, config.head_dim, num_positions or config.max_positions, device)
        self.register_buffer("rope_table", table, persistent=False)

    def layer_attention(self) -> list[LayerAttention]:
        """How each layer attends, for `bind`."""
        return self.config.layer_attention()

    def pack(self) -> "Decoder":
        """Switch every linear to the row-exact kernel, for inference; it can no longer be trained."""
        self.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, Linear) and module.packed is None:
                module.pack(keep_weight=module is self.head and self.config.tied)
        settle(self)
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
        last_live = None if tap_normed else live
        tapped: dict[int, Tensor] = {}
        q, k, v, stream = self._enter(0, None, F.embedding(tokens, self.embedding), positions, last_live)
        for i in range(last):
            if i in taps:
                tapped[i] = stream
            q, k, v, stream = self._cross(i, attend(i, q, k, v), stream, positions, last_live)
        if last in taps:
            tapped[last] = stream
        attended = attend(last, q, k, v)
        stream = stream if last_live is None else stream.index_select(0, last_live)
        hidden, _ = self.norm.add(*self.layer(last).leave(attended, stream))
        if tap_normed:
            tapped[num_layers] = hidden
            hidden = hidden if live is None else hidden.index_select(0, live)
        return hidden, torch.cat([tapped[i] for i in taps], dim=1) if taps else None

    def layer(self, i: int) -> Layer:
        """The i-th layer."""
        layer = self.layers[i]
        assert isinstance(layer, Layer)
        return layer

    def _enter(
        self, i: int, update: Tensor | None, stream: Tensor, positions: Tensor, last_live: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(q, k, v, stream) at the entrance of layer i; queries of live rows alone if it is the last."""
        layer = self.layer(i)
        normed, stream = layer.enter(update, stream)
        live = last_live if i == len(self.layers) - 1 else None
        return *layer.attention.project(normed, positions, self.rope_table, live), stream

    def _cross(
        self, i: int, attended: Tensor, stream: Tensor, positions: Tensor, last_live: Tensor | None
    ) -> tuple[Tensor, ...]:
        """From layer i's answer of attention to layer i + 1's question: (q, k, v, stream)."""

        def step(attended: Tensor, stream: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
            return self._enter(i + 1, *self.layer(i).leave(attended, stream), positions, last_live)

        compiled = self.head.packed is not None and self.head.packed.panels is not None
        if compiled and (last_live is None or i + 2 < len(self.layers)):
            return self.shelf.run(i, step, attended, stream, positions)
        return step(attended, stream, positions)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, V]."""
        return self.head.forward(hidden)
