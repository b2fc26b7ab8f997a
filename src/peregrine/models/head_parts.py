"""What draft heads are made of: the first EAGLE-3 layer, and all that every head has and borrows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peregrine.attention import Attend, LayerAttention
from peregrine.kernels.norm import norm_pair
from peregrine.kernels.residual import Residual
from peregrine.kernels.runtime.cpu_graph import CpuGraphs
from peregrine.models.config import ModelConfig
from peregrine.models.decoder import Decoder
from peregrine.models.decoder_layer import Layer
from peregrine.models.layers import MLP, QKV, Attention, Linear, LiveRows, RMSNorm
from peregrine.models.rope_table import SPARE_POSITIONS, rope_table

MAX_GRAPH_ROWS = 64  # larger windows are not run from remembered kernel calls


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
        self.kv_shape = layer.kv_shape
        self.lender = Lender(target.embedding, target.head)
        self.embedding, self.head = None, None

    def place(self, device: torch.device | str, dtype: torch.dtype, target: Decoder) -> None:
        """Give the parameters, made without memory, a place; and make the table as long as the target's."""
        self.to(dtype).to_empty(device=device)
        layer, config = self.layer_config, target.config
        table = target.rope_table
        if (layer.rope, layer.rope_dim) != (config.rope, config.rope_dim):
            table = rope_table(layer.rope, layer.rope_dim, len(table) - SPARE_POSITIONS, device)
        self.register_buffer("rope_table", table.to(device), persistent=False)

    def layer_attention(self) -> list[LayerAttention]:
        """How each layer attends, for `bind`."""
        return self.layer_config.layer_attention()[: self.num_layers]

    @property
    def token_embedding(self) -> Tensor:
        """[V, H], the head's own or the target's."""
        return self.lender.embedding if self.embedding is None else self.embedding

    def embed(self, tokens: Tensor) -> Tensor:
        """[N] -> [N, H]."""
        return F.embedding(tokens, self.token_embedding)

    def score(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, Vd], by the head's own output head or the target's."""
        scores: Tensor = (self.lender.head if self.head is None else self.head)(hidden)
        return scores

    def through(
        self,
        layers: Sequence[nn.Module],
        stream: Residual,
        positions: Tensor,
        attend: Attend,
        live: Tensor | None,
        last_norm: RMSNorm | None,
    ) -> Residual:
        """The stream after plain layers, ready for the last norm; the last layer computes live rows alone."""
        for i, layer in enumerate(layers):
            assert isinstance(layer, Layer)
            last = i == len(layers) - 1
            live_rows = LiveRows.of(live if last else None, stream, positions)
            heads = layer.attention.project(stream, positions, self.rope_table, live_rows)
            attended = heads.attend(attend, layer.attention.layer)
            next_norm = last_norm if last else input_norm(layers[i + 1])
            stream = layer.after_attention(attended, live_rows.residual if live_rows else stream, next_norm)
        return stream


def input_norm(layer: nn.Module) -> RMSNorm | None:
    """The norm a plain layer begins with."""
    assert isinstance(layer, Layer)
    return layer.input_norm


class Eagle3Layer(nn.Module):
    """A layer that reads embedding and hidden state side by side; the hidden state is the residual."""

    def __init__(self, config: ModelConfig, split: bool, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.graphs = CpuGraphs(max_rows=MAX_GRAPH_ROWS)
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config, 0, 2 * config.hidden_size, split)
        self.post_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        tokens: Tensor,
        embedding: Tensor,
        hidden: Tensor,
        positions: Tensor,
        table: Tensor,
        attend: Attend,
        live: Tensor | None,
        next_norm: RMSNorm | None,
    ) -> Residual:
        """The stream that leaves the layer, ready for the norm that comes next."""
        norms = self.input_norm.weight, self.hidden_norm.weight
        both = norm_pair(tokens, embedding, norms[0], hidden, norms[1], self.input_norm.eps)  # [N, 2 H]
        values = both[:, hidden.shape[1] :].contiguous() if self.norm_before_residual else hidden
        if live is None:
            heads = self._ask(both, positions, table)
        else:
            chosen = both.index_select(0, live)
            live_rows = LiveRows(live, Residual(chosen, chosen), positions.index_select(0, live))
            # What is normed already is read as it is.
            heads = self.attention.project(Residual(both, both), positions, table, live_rows)
            values = values.index_select(0, live)
        return self._leave(heads.attend(attend, 0), values, next_norm)

    def _ask(self, both: Tensor, positions: Tensor, table: Tensor) -> QKV:
        if not self._remembers:
            return self.attention.project(Residual(both, both), positions, table)

        def step(both: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
            heads = self.attention.project(Residual(both, both), positions, table)
            return heads.q, heads.k, heads.v

        q, k, v = self.graphs.run(0, step, both, positions)
        return QKV(q, k, v)

    def _leave(self, attended: Tensor, values: Tensor, next_norm: RMSNorm | None) -> Residual:
        def leave(attended: Tensor, values: Tensor) -> Residual:
            stream = self.attention.out.join(attended.flatten(1), Residual(values, values), self.post_norm)
            return self.mlp.forward(stream, next_norm)

        def step(attended: Tensor, values: Tensor) -> tuple[Tensor, ...]:
            stream = leave(attended, values)
            return stream.values, stream.ready

        if not self._remembers:
            return leave(attended, values)
        values, ready = self.graphs.run(1, step, attended, values)
        return Residual(values, ready)

    @property
    def _remembers(self) -> bool:
        """Whether steps of kernels alone are run from memory: once it is packed for the CPU."""
        packed = self.mlp.down.packed
        return packed is not None and packed.panels is not None
