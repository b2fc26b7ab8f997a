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
from peregrine.models.config import ModelConfig
from peregrine.models.layers import Layer, Linear, RMSNorm, settle
from peregrine.models.rope_table import rope_table


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
        tap_normed = num_layers in taps
        tapped: dict[int, Tensor] = {}
        stream = F.embedding(tokens, self.embedding)
        update: Tensor | None = None
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            normed, stream = layer.enter(update, stream)
            if i in taps:
                tapped[i] = stream
            layer_live = live if i == num_layers - 1 and not tap_normed else None
            update, stream = layer.forward(normed, stream, positions, self.rope_table, attend, layer_live)
        assert update is not None
        hidden, _ = self.norm.add(update, stream)
        if tap_normed:
            tapped[num_layers] = hidden
            hidden = hidden if live is None else hidden.index_select(0, live)
        return hidden, torch.cat([tapped[i] for i in taps], dim=1) if taps else None

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, V]."""
        scores: Tensor = self.head(hidden)
        return scores
