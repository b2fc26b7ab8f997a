"""DFlash and DSpark: a whole block of drafts in one forward.

Every layer sees the target's hidden states: each token that the target has read gets a key and a value in every layer,
made from its fused taps. The block is the newest token followed by mask tokens; its tokens see all of that and, both
ways, each other. DFlash's mask tokens predict the token at their own position. DSpark counts the newest token's own
prediction as the first draft, corrects each draft's scores by the draft before it, and says how sure it is.
"""

import torch
from torch import Tensor, nn

from peregrine.attention import Attend
from peregrine.kernels.residual import Residual, embed_residual, start_residual
from peregrine.models.checkpoint.plan import Piece, Plan, linear_plan
from peregrine.models.config import ModelConfig
from peregrine.models.decoder import Decoder
from peregrine.models.decoder_layer import Layer
from peregrine.models.draft_heads.block_config import BlockConfig, read_block_config
from peregrine.models.draft_heads.markov import ConfidenceHead, MarkovHead, confidence_plan, markov_plan
from peregrine.models.draft_heads.opened import Blueprint, OpenedHead, is_ignorable, read_draft_to_target
from peregrine.models.draft_heads.parts import DraftHead, input_norm, own_tables
from peregrine.models.families import family_of
from peregrine.models.layers import Attention, Linear, LiveRows, RMSNorm, output_head
from peregrine.models.parallel import ALONE, Ranks


class BlockHead(DraftHead):
    """Taps fused by one linear and a norm; layers that see them as keys and values; a norm and an output head."""

    def __init__(
        self,
        config: BlockConfig,
        target: Decoder,
        device: torch.device | str,
        dtype: torch.dtype,
        draft_to_target: Tensor | None = None,
    ) -> None:
        layer = config.layer
        super().__init__(layer, layer.num_layers, config.taps, target, config.own_embedding)
        self.config = config
        with torch.device("meta"):
            size = layer.hidden_size
            self.fc = Linear(len(config.taps) * config.target_hidden_size, size, False, self.ranks.split(size))
            self.hidden_norm = RMSNorm(layer.hidden_size, layer.norm_eps)
            # Keys and values are asked for without queries, for the tokens of the context.
            self.layers = nn.ModuleList(Layer(layer, i, split=True, ranks=self.ranks) for i in range(layer.num_layers))
            self.norm = RMSNorm(layer.hidden_size, layer.norm_eps)
            self.head = output_head(layer.hidden_size, config.draft_vocab_size, self.ranks) if config.own_head else None
            self.markov, self.confidence = small_heads(config, self.ranks)
        self.place(device, dtype, target, draft_to_target)

    def fuse(self, tapped: Tensor) -> Tensor:
        """[N, len(taps) * Ht] -> [N, H]."""
        fused: Tensor = self.hidden_norm(self.fc(tapped))
        return fused

    def remember(self, fused: Tensor, positions: Tensor, attend: Attend) -> None:
        """Give every layer keys and values of tokens that the target has read: fused taps [N, H], positions [N]."""
        seen, none = Residual(fused, fused), LiveRows(Residual(fused[:0], fused[:0]), positions[:0])
        for layer in self.layers:
            assert isinstance(layer, Layer)
            assert isinstance(layer.attention, Attention)
            qkv = layer.attention.project(seen, positions, self.rope_table, none)
            qkv.attend(attend, layer.attention.layer)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The normed hidden state of each token of a block. [N], [N] -> [N, H]"""
        layers = list(self.layers)
        norm = input_norm(layers[0])
        if self.borrows_scaled:
            residual = start_residual(self.embed(tokens), norm)
        else:
            residual = embed_residual(tokens, self.token_embedding, norm)
        return self.through(layers, residual, positions, attend, None, self.norm).finish_norm()

    def confidences(self, hidden: Tensor, before: Tensor) -> Tensor:
        """The chance that drafts are right if all before them are: hidden [n, H], tokens before them [n] -> [n]."""
        assert self.confidence is not None
        if self.config.confidence_reads_token:
            assert self.markov is not None
            hidden = torch.cat((hidden, self.markov.embed(before)), dim=1)
        chances: Tensor = self.confidence(hidden)
        return chances


def small_heads(config: BlockConfig, ranks: Ranks = ALONE) -> tuple[MarkovHead | None, ConfidenceHead | None]:
    """The Markov and the confidence head, where the checkpoint has them."""
    layer, markov, confidence = config.layer, None, None
    if config.markov is not None:
        sizes = config.markov_rank, layer.hidden_size, layer.vocab_size, config.draft_vocab_size
        markov = MarkovHead(config.markov, *sizes, ranks)
    if config.confidence:
        confidence = ConfidenceHead(layer.hidden_size + config.markov_rank * config.confidence_reads_token)
    return markov, confidence


def block_plan(config: BlockConfig) -> Plan:
    """Which canonical tensors (z-lab's and DeepSpec's names) make up a block head."""
    layer, hidden = config.layer, config.layer.hidden_size
    plan = linear_plan("fc", {"fc": (hidden, len(config.taps) * config.target_hidden_size)}, bias=False)
    plan |= {f"{name}.weight": (Piece(f"{name}.weight", (hidden,)),) for name in ("hidden_norm", "norm")}
    for i in range(layer.num_layers):
        plan |= family_of(layer).layer_plan(layer, f"layers.{i}", f"layers.{i}", hidden, split=True)
    plan |= own_tables(layer, config.own_embedding, config.draft_vocab_size if config.own_head else None)
    with torch.device("meta"):
        markov, confidence = small_heads(config)
    return (
        plan
        | ({} if markov is None else markov_plan(markov))
        | ({} if confidence is None else confidence_plan(confidence))
    )


def block_blueprint(source: OpenedHead, target: ModelConfig) -> Blueprint:
    """How to build the folder's DFlash or DSpark head for this target."""
    config = read_block_config(source, target)
    draft_to_target = read_draft_to_target(source, config.draft_vocab_size, config.layer.vocab_size)
    return Blueprint(
        block_plan(config),
        is_ignorable,
        lambda decoder, device, dtype: BlockHead(config, decoder, device, dtype, draft_to_target),
        config.max_drafts,
        config.confidence,
    )
