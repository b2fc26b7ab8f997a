"""What every draft head has: its layers' config, rotary table, and embedding and output head, own or the target's."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace

import torch
from torch import Tensor, nn

from peregrine.attention import Attend, LayerAttention
from peregrine.kernels.residual import Residual, embed_rows
from peregrine.models.checkpoint.plan import Piece, Plan
from peregrine.models.config import ModelConfig
from peregrine.models.decoder import Decoder
from peregrine.models.decoder_layer import Layer
from peregrine.models.layers import Linear, LiveRows, RMSNorm, allocate
from peregrine.models.rope_table import SPARE_POSITIONS, LongScaling, rope_table


@dataclass(frozen=True, slots=True)
class Lender:
    """What a head borrows from its target. A plain value, so that nn.Module does not count it as the head's own.

    Heads are made with the embedding as it is stored; a target of some families holds it multiplied by `factor`.
    """

    embedding: Tensor  # [V, Ht]
    factor: float
    head: Linear


class DraftHead(nn.Module, ABC):
    """A network that drafts from the target's hidden states.

    Embedding and output head are its own or borrowed from the target.
    """

    rope_table: Tensor
    embedding: nn.Parameter | None
    head: Linear | None
    draft_to_target: Tensor | None  # [Vd] i64 target id of each draft id; None: the same vocabulary

    def __init__(
        self, layer: ModelConfig, num_layers: int, taps: tuple[int, ...], target: Decoder, own_embedding: bool
    ) -> None:
        super().__init__()
        self.layer_config = layer
        self.taps = taps
        self.num_layers = num_layers
        self.ranks = target.ranks.for_draft(layer)  # that share it
        self.kv_shape = self.ranks.kv_shape(layer)
        self.lender = Lender(target.embedding, target.config.embedding_factor, target.head)
        self.embedding, self.head = None, None
        if own_embedding:
            self.embedding = nn.Parameter(torch.empty(layer.vocab_size, layer.hidden_size, device="meta"))

    def place(
        self, device: torch.device | str, dtype: torch.dtype, target: Decoder, draft_to_target: Tensor | None = None
    ) -> None:
        """Allocate the parameters, which were made on the meta device, and a rotary table as long as the target's."""
        allocate(self, device, dtype)
        layer, config = self.layer_config, target.config
        table = target.rope_table
        if (layer.rope, layer.rope_dim) != (config.rope, config.rope_dim):
            table = rope_table(layer.rope, layer.rope_dim, len(table) - SPARE_POSITIONS, device)
        self.register_buffer("rope_table", table.to(device), persistent=False)
        ids = None if draft_to_target is None else draft_to_target.to(device)
        self.register_buffer("draft_to_target", ids, persistent=False)

    def fuse(self, tapped: Tensor) -> Tensor:
        """The target's taps as one hidden state each, [N, len(taps) * Ht] -> [N, H]; a single tap is one."""
        return tapped

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the draft vocabulary, before a Markov head. [n, H] -> [n, Vd]"""
        return self.score(hidden)

    def layer_attention(self) -> list[LayerAttention]:
        """Scale and window of each layer, for `bind`."""
        return self.layer_config.layer_attention()[: self.num_layers]

    @property
    def token_embedding(self) -> Tensor:
        """[V, H], the head's own or the target's; for heads that norm it, since the target's may be scaled."""
        return self.lender.embedding if self.embedding is None else self.embedding

    def embed(self, tokens: Tensor) -> Tensor:
        """[N] -> [N, H], as stored."""
        rows = embed_rows(tokens, self.token_embedding)
        return rows / self.lender.factor if self.borrows_scaled else rows

    @property
    def borrows_scaled(self) -> bool:
        """Whether `token_embedding` is not as stored."""
        return self.embedding is None and self.lender.factor != 1

    def score(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, Vd], by the head's own output head or the target's."""
        scores: Tensor = (self.lender.head if self.head is None else self.head)(hidden)
        return scores

    def through(
        self,
        layers: Sequence[nn.Module],
        residual: Residual,
        positions: Tensor,
        attend: Attend,
        live: Tensor | None,
        last_norm: RMSNorm | None,
    ) -> Residual:
        """Run plain layers; the last one computes queries, MLP and output for live rows only."""
        for i, layer in enumerate(layers):
            assert isinstance(layer, Layer)
            last = i == len(layers) - 1
            rows = LiveRows.of(live if last else None, residual, positions)
            qkv = layer.attention.project(residual, positions, self.rope_table, rows)
            attended = qkv.attend(attend, layer.attention.layer)
            next_norm = last_norm if last else input_norm(layers[i + 1])
            residual = layer.after_attention(attended, rows.residual if rows else residual, next_norm)
        return residual


class StepHead(DraftHead):
    """A head that drafts token by token: it predicts the next token from (hidden state, next token) pairs."""

    @abstractmethod
    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, live: Tensor | None = None
    ) -> Tensor:
        """tokens [N], hidden [N, H], positions [N] -> the next hidden states, [N, H], or [R, H] of live rows."""


def input_norm(layer: nn.Module) -> RMSNorm | None:
    """The norm at the input of a plain layer."""
    assert isinstance(layer, Layer)
    return layer.input_norm


def dense_layers(config: ModelConfig, family: str, num_layers: int, mlp: int | None = None) -> ModelConfig:
    """Layers for a new head, as wide as the target's: dense, without biases, with head norms as `family` has them.

    `mlp` is the inner size of their MLPs, if it is not the target's.
    """
    head_dim = config.head_dim if config.mla is None else config.mla.value_dim
    # All of its heads is rotated. Factors of each pair, of which the target may have fewer, are left out then.
    stretched = config.rope.scaling
    fits = not isinstance(stretched, LongScaling) or 2 * len(stretched.short_factors) == head_dim
    plain = {field.name: field.default for field in fields(ModelConfig) if field.default is not MISSING}
    return replace(
        config,
        **plain,  # nothing of what differs from the plain decoder in a few families
        family=family,
        num_layers=num_layers,
        intermediate_size=mlp or config.intermediate_size,
        head_dim=head_dim,
        rope=replace(config.rope, share=1.0, scaling=stretched if fits else None),
        windows=(None,) * num_layers,
        tied=False,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=family == "qwen3",
        mla=None,
        experts=None,
        num_extra_layers=0,
    )


def own_tables(layer: ModelConfig, embedding: bool, head_size: int | None) -> Plan:
    """The plan of what a head might borrow but has: an embedding, an output head of `head_size` tokens."""
    tables = {"embedding": ("embed_tokens.weight", layer.vocab_size if embedding else None)}
    tables["head.weight"] = ("lm_head.weight", head_size)
    return {
        ours: (Piece(name, (rows, layer.hidden_size)),) for ours, (name, rows) in tables.items() if rows is not None
    }
