"""Random draft heads in the usual shapes for a target, drawn and packed on its device; for benchmarks."""

from collections.abc import Callable

import torch

from peregrine.models.decoder import Decoder
from peregrine.models.draft_heads import (
    BlockConfig,
    BlockHead,
    DraftHead,
    Eagle3Config,
    Eagle3Head,
    MTPHead,
    default_taps,
    dense_layers,
    prediction_layer,
)
from peregrine.models.layers import pack_linears
from peregrine.synthetic.shapes import draw_here

DRAFT_VOCAB = 32000
BLOCK_LAYERS, BLOCK_SIZE, MARKOV_RANK = 5, 16, 256


def draw_head(target: Decoder, seed: int = 1) -> Eagle3Head:
    """An EAGLE-3 head for the target, of the usual shape: one Llama layer, a draft vocabulary of 32k."""
    config, weight = target.config, target.embedding
    layer = dense_layers(config, "llama", 1)
    size = min(DRAFT_VOCAB, config.vocab_size)
    shape = Eagle3Config(
        layer, default_taps(config.num_layers), config.hidden_size, size, own_embedding=False, own_head=True
    )
    spread = torch.arange(size, device=weight.device) * (config.vocab_size // size)
    head = Eagle3Head(shape, target, weight.device, weight.dtype, spread)
    draw_here(head, seed)
    pack_linears(head)
    return head


def draw_prediction_layer(target: Decoder, seed: int = 1) -> MTPHead:
    """A prediction layer of the kind of the target's last layer; embedding and output head are borrowed."""
    config, weight = target.config, target.embedding
    layer = prediction_layer(config, has_experts=config.has_experts(config.num_layers - 1))
    head = MTPHead(layer, target, weight.device, weight.dtype, hidden_first=False)
    draw_here(head, seed)
    pack_linears(head)
    return head


def draw_dflash(target: Decoder) -> BlockHead:
    """A DFlash head of the usual shape: five layers, five taps, blocks of 16."""
    return _draw_block(target, markov=None)


def draw_dspark(target: Decoder) -> BlockHead:
    """A DSpark head of the usual shape: as DFlash's, with a Markov head of rank 256 and a confidence head."""
    return _draw_block(target, markov="vanilla")


def _draw_block(target: Decoder, markov: str | None, seed: int = 1) -> BlockHead:
    config, weight = target.config, target.embedding
    last = config.num_layers - 2
    shape = BlockConfig(
        layer=dense_layers(config, "qwen3", BLOCK_LAYERS),
        taps=tuple(sorted({2 + (last - 2) * i // (BLOCK_LAYERS - 1) for i in range(BLOCK_LAYERS)})),
        target_hidden_size=config.hidden_size,
        draft_vocab_size=config.vocab_size,
        mask_token=config.vocab_size - 1,
        block_size=BLOCK_SIZE,
        drafts_from_newest=markov is not None,
        causal=(False,) * BLOCK_LAYERS,
        markov=markov,
        markov_rank=0 if markov is None else MARKOV_RANK,
        confidence=markov is not None,
        confidence_reads_token=markov is not None,
        own_embedding=False,
        own_head=False,
    )
    head = BlockHead(shape, target, weight.device, weight.dtype)
    draw_here(head, seed)
    pack_linears(head)
    return head


# How to make each drafter that a shape can have.
SHAPE_DRAFTERS: dict[str, Callable[[Decoder], DraftHead]] = {
    "eagle3": draw_head,
    "dflash": draw_dflash,
    "dspark": draw_dspark,
    "mtp": draw_prediction_layer,
}
