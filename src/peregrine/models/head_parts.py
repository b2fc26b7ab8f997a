"""What draft heads are made of: the first EAGLE-3 layer, and all that every head has and borrows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peregrine.attention import Attend, LayerAttention
from peregrine.kernels.tape import Shelf, Step
from peregrine.models.config import ModelConfig
from peregrine.models.decoder import Decoder
from peregrine.models.layers import MLP, Attention, Layer, Linear, RMSNorm
from peregrine.models.rope_table import SPARE_POSITIONS, rope_table

MAX_SHELF_ROWS = 64  # larger windows are not run from remembered kernel calls


@dataclass(frozen=True, slots=True)
class Lender:
    """What a head borrows from its target; held so that it is not counted among the head's parameters."""

    embedding: Tensor  # [V, Ht]
    head: Linear


class Head(nn.Module):
    """What every head has: layers' shape, rotary table, own or borrowed embedding and output head."""

    rope_table: Tensor
    embedding: nn.Parameter | None
    head: Linear | None
    draft_to_target: Tensor | None

    def __init__(self, layer: ModelConfig, num_layers: int, taps: tuple[int, ...], target: Decoder) -> None:
        super().__init__()
        self.layer_config = layer
        self.taps = taps
        self.num_layers = num_layers
        self.num_kv_heads, self.head_dim = layer.num_kv_heads, layer.head_dim
        self.lender = Lender(target.embedding, target.head)
        self.embedding, self.head = None, None

    def place(self, device: torch.device | str, dtype: torch.dtype, target: Decoder) -> None:
        """Give the parameters, made without memory, a place; and make the table as long as the target's."""
        self.to(dtype).to_empty(device=device)
        layer, config = self.layer_config, target.config
        table = target.rope_table
        if (layer.rope, layer.head_dim) != (config.rope, config.head_dim):
            table = rope_table(layer.rope, layer.head_dim, len(table) - SPARE_POSITIONS, device)
        self.register_buffer("rope_table", table.to(device), persistent=False)

    def layer_attention(self) -> list[LayerAttention]:
        """How each layer attends, for `bind`."""
        return self.layer_config.layer_attention()[: self.num_layers]

    def embed(self, tokens: Tensor) -> Tensor:
        """[N] -> [N, H], from the head's own embedding or the target's."""
        return F.embedding(tokens, self.lender.embedding if self.embedding is None else self.embedding)

    def score(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, Vd], by the head's own output head or the target's."""
        scores: Tensor = (self.lender.head if self.head is None else self.head)(hidden)
        return scores

    def through(
        self,
        layers: Sequence[nn.Module],
        update: Tensor | None,
        stream: Tensor,
        positions: Tensor,
        attend: Attend,
        live: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """(update, stream) after plain layers; the last of them computes live rows alone."""
        for i, layer in enumerate(layers):
            assert isinstance(layer, Layer)
            normed, stream = layer.enter(update, stream)
            layer_live = live if i == len(layers) - 1 else None
            update, stream = layer.forward(normed, stream, positions, self.rope_table, attend, layer_live)
        assert update is not None
        return update, stream


class Eagle3Layer(nn.Module):
    """A layer that reads embedding and hidden state side by side; the hidden state is the residual."""

    def __init__(self, config: ModelConfig, split: bool, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.shelf = Shelf(max_rows=MAX_SHELF_ROWS)
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config, 0, 2 * config.hidden_size, split)
        self.post_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        positions: Tensor,
        table: Tensor,
        attend: Attend,
        live: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """(update, stream) whose sum leaves the layer."""
        normed = self.hidden_norm(hidden)
        stream = normed if self.norm_before_residual else hidden
        both = torch.cat((self.input_norm(embedded), normed), dim=1)  # [N, 2 H]
        if live is None:
            q, k, v = self._run(0, lambda x, at: self.attention.project(x, at, table), both, positions)
        else:
            q, k, v = self.attention.project(both, positions, table, live)
            stream = stream.index_select(0, live)
        update, stream = self._run(1, self._leave, attend(0, q, k, v), stream)
        return update, stream

    def _leave(self, attended: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        normed, stream = self.post_norm.add(self.attention.merge(attended), stream)
        return self.mlp.forward(normed), stream

    def _run(self, index: int, step: Step, *inputs: Tensor) -> tuple[Tensor, ...]:
        """A step of kernels alone, from memory once it is packed for the CPU."""
        packed = self.mlp.down.packed
        compiled = packed is not None and packed.panels is not None
        return self.shelf.run(index, step, *inputs) if compiled else step(*inputs)
