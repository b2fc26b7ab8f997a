"""EAGLE-3: a layer over (embedding, fused target states), with its own norm, output head and often vocabulary."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from peregrine.attention import Attend
from peregrine.kernels.norm import norm_pair
from peregrine.kernels.residual import Residual, take_rows
from peregrine.kernels.runtime.cpu import is_recording
from peregrine.kernels.runtime.cpu_graph import CpuGraphs
from peregrine.models.checkpoint.plan import Piece, Plan, linear_plan
from peregrine.models.config import ModelConfig
from peregrine.models.decoder import Decoder
from peregrine.models.decoder_layer import Layer
from peregrine.models.draft_heads.formats import plain_layer_config, read_taps, read_variant
from peregrine.models.draft_heads.opened import Blueprint, OpenedHead, is_ignorable, read_draft_to_target, require_same
from peregrine.models.draft_heads.parts import StepHead, input_norm, own_tables
from peregrine.models.families import family_of
from peregrine.models.layers import MLP, QKV, Attention, Linear, LiveRows, RMSNorm, output_head
from peregrine.models.parallel import ALONE, Ranks

MAX_GRAPH_ROWS = 64  # larger windows are not run from recorded kernel calls
PROJECT, AFTER_ATTENTION, LOGITS = range(3)  # what is recorded


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
    norm_before_residual: bool = False  # the residual is the normed hidden state, not the plain one
    norm_each_tap: bool = False  # one norm per tap before fusing
    norm_all_taps: bool = False  # one norm over the concatenated taps before fusing
    norm_output: bool = False  # the next step reads the normed hidden state


class Eagle3Head(StepHead):
    """Taps fused by one linear, a layer over (embedding, hidden), further plain layers, a norm and an output head.

    The returned hidden state has not passed the final norm, unless `norm_output` is set.
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
        super().__init__(layer, layer.num_layers, config.taps, target, config.own_embedding)
        self.config = config
        hidden_size, last = layer.hidden_size, layer.num_layers - 1
        tapped_size = len(config.taps) * config.target_hidden_size
        with torch.device("meta"):
            self.fc = Linear(tapped_size, hidden_size, config.fuse_bias, self.ranks.split(hidden_size))
            self.tap_norms = nn.ModuleList(
                RMSNorm(config.target_hidden_size, layer.norm_eps) for _ in config.taps if config.norm_each_tap
            )
            self.taps_norm = RMSNorm(tapped_size, layer.norm_eps) if config.norm_all_taps else None
            self.first = Eagle3Layer(layer, last == 0, config.norm_before_residual, self.ranks)
            self.layers = nn.ModuleList(
                Layer(layer, i, i == last, ranks=self.ranks) for i in range(1, layer.num_layers)
            )
            self.norm = RMSNorm(hidden_size, layer.norm_eps)
            self.head = output_head(hidden_size, config.draft_vocab_size, self.ranks) if config.own_head else None
        self.place(device, dtype, target, draft_to_target)

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
        residual = self.first.forward(
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
            residual = self.through(layers, residual, positions, attend, live, last_norm)
        return residual.finish_norm()

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, Vd]."""

        def step(hidden: Tensor) -> tuple[Tensor, ...]:
            return (self.score(hidden if self.config.norm_output else self.norm(hidden)),)

        if not self.first.is_recordable or is_recording():
            return step(hidden)[0]
        return self.first.graphs.run(LOGITS, step, hidden)[0].clone()  # the next replay writes over what it returned


class Eagle3Layer(nn.Module):
    """A decoder layer whose input is [normed embedding, normed hidden state]; the residual is the hidden state."""

    def __init__(self, config: ModelConfig, split: bool, norm_before_residual: bool, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.graphs = CpuGraphs(max_rows=MAX_GRAPH_ROWS, copies_inputs=True)  # those are others' drafts and states
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config, 0, 2 * config.hidden_size, split, ranks)
        self.post_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config, ranks)

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
        """The residual stream after the layer, prepared for `next_norm`."""
        values = hidden
        # Queries of all rows take less time than kernels that are called one by one; but a prompt needs none of them.
        recorded = self.is_recordable and len(hidden) <= MAX_GRAPH_ROWS and not is_recording()
        if recorded and (live is None or len(live)):
            qkv, normed = self._project(tokens, embedding, hidden, positions, table)
            values = normed if self.norm_before_residual else hidden
            if live is not None:
                qkv, values = replace(qkv, q=qkv.q.index_select(0, live)), values.index_select(0, live)
            return self._after_attention(qkv.attend(attend, 0), values, next_norm)
        both = self._join(tokens, embedding, hidden)
        if self.norm_before_residual:
            values = both[:, hidden.shape[1] :].contiguous()
        # `both` is normed already, so the projection reads it as it is.
        rows = None
        if live is not None:
            chosen, values = take_rows(both, live), take_rows(values, live)
            rows = LiveRows(Residual(chosen, chosen), take_rows(positions, live))
        qkv = self.attention.project(Residual(both, both), positions, table, rows)
        return self._second_half(qkv.attend(attend, 0), values, next_norm)

    @property
    def is_recordable(self) -> bool:
        """Whether a CPU graph can replay the layer."""
        return self.mlp.down.format.is_recordable

    def _join(self, tokens: Tensor, embedding: Tensor, hidden: Tensor) -> Tensor:
        norms = self.input_norm.weight, self.hidden_norm.weight
        return norm_pair(tokens, embedding, norms[0], hidden, norms[1], self.input_norm.eps)  # [N, 2 H]

    def _project(
        self, tokens: Tensor, embedding: Tensor, hidden: Tensor, positions: Tensor, table: Tensor
    ) -> tuple[QKV, Tensor]:
        """The projections, and the normed hidden state [N, H]; from a CPU graph."""

        def step(hidden: Tensor, tokens: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
            both = self._join(tokens, embedding, hidden)
            qkv = self.attention.project(Residual(both, both), positions, table)
            return qkv.q, qkv.k, qkv.v, both[:, hidden.shape[1] :]

        q, k, v, normed = self.graphs.run(PROJECT, step, hidden, tokens, positions)
        return QKV(q, k, v), normed

    def _after_attention(self, attended: Tensor, values: Tensor, next_norm: RMSNorm | None) -> Residual:
        """The second half of the layer; from a CPU graph."""

        def step(attended: Tensor, values: Tensor) -> tuple[Tensor, ...]:
            residual = self._second_half(attended, values, next_norm)
            return residual.values, residual.normed

        added, normed = self.graphs.run(AFTER_ATTENTION, step, attended, values)
        added = added.clone()  # the next replay writes over what a graph returned
        return Residual(added, added if next_norm is None else normed.clone())

    def _second_half(self, attended: Tensor, values: Tensor, next_norm: RMSNorm | None) -> Residual:
        merged = self.attention.merge_heads(attended)
        residual = self.attention.out.format.add(merged, Residual(values, values), self.post_norm)
        return self.mlp.forward(residual, next_norm)


def eagle3_plan(config: Eagle3Config) -> Plan:
    """Which canonical tensors (SafeAILab's names) make up an EAGLE-3 head."""
    layer, hidden = config.layer, config.layer.hidden_size
    tapped_size = len(config.taps) * config.target_hidden_size
    plan = linear_plan("fc", {"fc": (hidden, tapped_size)}, config.fuse_bias)
    norms = {"norm": ("norm", hidden), "first.input_norm": ("midlayer.input_layernorm", hidden)}
    norms["first.hidden_norm"] = ("midlayer.hidden_norm", hidden)
    norms["first.post_norm"] = ("midlayer.post_attention_layernorm", hidden)
    if config.norm_all_taps:
        norms["taps_norm"] = ("input_norm", tapped_size)
    for i in range(len(config.taps) if config.norm_each_tap else 0):
        norms[f"tap_norms.{i}"] = (f"fc_norm.{i}", config.target_hidden_size)
    plan |= {f"{ours}.weight": (Piece(f"{name}.weight", (size,)),) for ours, (name, size) in norms.items()}
    split = layer.num_layers == 1
    plan |= family_of(layer).attention_plan(layer, "first.attention", "midlayer.self_attn", 2 * hidden, split)
    plan |= family_of(layer).mlp_plan(layer, "first.mlp", "midlayer.mlp")
    for i in range(1, layer.num_layers):
        plan |= family_of(layer).layer_plan(layer, f"layers.{i - 1}", f"layers.{i}", hidden, i == layer.num_layers - 1)
    plan |= own_tables(layer, config.own_embedding, config.draft_vocab_size if config.own_head else None)
    return plan


def eagle3_blueprint(source: OpenedHead, target: ModelConfig) -> Blueprint:
    """How to build the folder's EAGLE-3 head for this target."""
    fields, names = source.fields, source.stored
    layer, variant = plain_layer_config(fields.layer), read_variant(fields)
    require_same(fields.layer, "vocab_size", layer.vocab_size, target.vocab_size, "vocabulary")
    seen_size = fields.outer.whole("target_hidden_size", layer.hidden_size)
    require_same(fields.outer, "target_hidden_size", seen_size, target.hidden_size, "idea of the hidden size")
    draft_vocab_size = fields.outer.whole("draft_vocab_size", layer.vocab_size)
    same_size = layer.hidden_size == target.hidden_size
    config = Eagle3Config(
        layer=layer,
        taps=read_taps(fields, target.num_layers),
        target_hidden_size=seen_size,
        draft_vocab_size=draft_vocab_size,
        own_embedding="embed_tokens.weight" in names or not same_size,
        own_head="lm_head.weight" in names or not same_size or draft_vocab_size != layer.vocab_size,
        fuse_bias="fc.bias" in names,
        norm_before_residual=variant.norm_before_residual,
        norm_each_tap=variant.norm_each_tap,
        norm_all_taps=variant.norm_all_taps,
        norm_output=variant.norm_output,
    )
    if config.own_embedding and not config.own_head and fields.layer.flag("tie_word_embeddings", False):
        raise fields.layer.refusal("tie_word_embeddings", "no lm_head.weight is stored", "store it untied")
    draft_to_target = read_draft_to_target(source, draft_vocab_size, layer.vocab_size)
    return Blueprint(
        eagle3_plan(config),
        is_ignorable,
        lambda decoder, device, dtype: Eagle3Head(config, decoder, device, dtype, draft_to_target),
    )
