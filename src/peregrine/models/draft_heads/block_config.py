"""What the config.json of a DFlash or DSpark head asks for, in every public spelling.

Fields stand at the top level (DeepSpec), inside `dflash_config` (z-lab, SpecForge) or in the speculators layout.
"""

from dataclasses import dataclass

from peregrine.config import MAX_NODES
from peregrine.models.checkpoint.folder import Fields
from peregrine.models.config import ModelConfig
from peregrine.models.draft_heads.formats import HeadFields, plain_layer_config
from peregrine.models.draft_heads.markov import MARKOV_KINDS
from peregrine.models.draft_heads.opened import OpenedHead, require_same

# Fields of variants that are not served: DFlash 2's convolutions and selector, scaled embeddings and scores, adapters.
_UNSERVED = ("conv_kernel_size", "selector_rank", "input_embedding_scale", "output_multiplier", "draft_adapter_rank")


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """Shape and variant of a block head."""

    layer: ModelConfig  # of its layers; vocab_size is the target's
    taps: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    mask_token: int
    block_size: int  # inputs of a block: the newest token and masks
    drafts_from_newest: bool  # the newest token's own prediction is the first draft
    causal: tuple[bool, ...]  # layers whose block tokens see only those before them
    markov: str | None  # kind of the Markov head
    markov_rank: int
    confidence: bool
    confidence_reads_token: bool  # the token before a draft, beside its hidden state
    own_embedding: bool
    own_head: bool

    @property
    def max_drafts(self) -> int:
        return self.block_size if self.drafts_from_newest else self.block_size - 1


def read_block_config(source: OpenedHead, target: ModelConfig) -> BlockConfig:
    """A block head's fields, checked against its target."""
    fields, names = source.fields, source.stored
    outer, layer = fields.outer, plain_layer_config(fields.layer)
    vocab, hidden = target.vocab_size, target.hidden_size
    require_same(fields.layer, "vocab_size", layer.vocab_size, vocab, "vocabulary")
    seen_size = outer.whole("target_hidden_size", hidden)
    require_same(outer, "target_hidden_size", seen_size, hidden, "idea of the hidden size")
    own_embedding, own_head = "embed_tokens.weight" in names, "lm_head.weight" in names
    if not own_embedding or not own_head:
        require_same(fields.layer, "hidden_size", layer.hidden_size, hidden, "hidden size")
    draft_vocab = outer.whole("draft_vocab_size", layer.vocab_size)
    if draft_vocab != vocab and not own_head:
        raise outer.refusal("draft_vocab_size", "no lm_head.weight of that size is stored", "store it")
    for name in _UNSERVED:
        if name in _place(fields, name):
            raise _place(fields, name).refusal(name, "such heads are not supported", "choose a DFlash or DSpark head")
    mask_token, block_size = _read_block(fields, vocab)
    markov, rank = _read_markov(fields)
    confidence = "confidence_head.proj.weight" in names
    place = _place(fields, "confidence_head_with_markov")
    reads_token = confidence and place.flag("confidence_head_with_markov", False)
    if reads_token and markov is None:
        raise place.refusal("confidence_head_with_markov", "there is no Markov head to read from", "correct the config")
    return BlockConfig(
        layer=layer,
        taps=_read_taps(fields, target.num_layers),
        target_hidden_size=hidden,
        draft_vocab_size=draft_vocab,
        mask_token=mask_token,
        block_size=block_size,
        drafts_from_newest=_drafts_from_newest(fields),
        causal=_causal_layers(fields, layer),
        markov=markov,
        markov_rank=rank,
        confidence=confidence,
        confidence_reads_token=reads_token,
        own_embedding=own_embedding,
        own_head=own_head,
    )


def _place(fields: HeadFields, name: str) -> Fields:
    """The object that has a field: the config itself, its `dflash_config`, or the part about layers."""
    places = (fields.outer, fields.outer.inner("dflash_config"), fields.layer)
    return next((place for place in places if name in place), fields.outer)


def _read_block(fields: HeadFields, vocab: int) -> tuple[int, int]:
    """(mask token, inputs of a block)."""
    place = _place(fields, "mask_token_id")
    mask_token = place.whole("mask_token_id", minimum=0)
    if mask_token >= vocab:
        raise place.refusal("mask_token_id", f"the target has {vocab} tokens", "use the head made for this target")
    place = _place(fields, "block_size")
    return mask_token, place.whole("block_size", minimum=2, maximum=MAX_NODES)


def _read_markov(fields: HeadFields) -> tuple[str | None, int]:
    """(kind, rank) of the Markov head; None and 0 if there is none."""
    rank = _place(fields, "markov_rank").whole("markov_rank", 0, minimum=0)
    if not rank:
        return None, 0
    place = _place(fields, "markov_head_type")
    kind = place.text("markov_head_type", "vanilla").lower()
    if kind not in MARKOV_KINDS:
        raise place.refusal("markov_head_type", f"supported are {', '.join(MARKOV_KINDS)}", "choose another head")
    return kind, rank


def _read_taps(fields: HeadFields, num_layers: int) -> tuple[int, ...]:
    """Which target states are read, as taps.

    `target_layer_ids` counts the layers that a state *leaves* (-1: the embedding), the speculators layout's
    `aux_hidden_state_layer_ids` the layers that it *enters*, as our taps do.
    """
    place, name = _place(fields, "target_layer_ids"), "target_layer_ids"
    taps = tuple(layer + 1 for layer in place.wholes(name, minimum=-1))
    if not taps:
        place, name = fields.outer, "aux_hidden_state_layer_ids"
        taps = place.wholes(name)
    if not taps:
        raise place.refusal(name, "the field is missing", "name the target's layers that the head reads")
    if max(taps) >= num_layers:
        problem = f"the target has {num_layers} layers; only states that enter one of them can be read"
        raise place.refusal(name, problem, "use the head made for this target")
    return taps


def _drafts_from_newest(fields: HeadFields) -> bool:
    """DSpark's own files always count the newest token's prediction; the speculators layout says so."""
    words = " ".join(fields.outer.texts("architectures")).lower()
    words += _place(fields, "projector_type").text("projector_type", "")
    dspark = "dspark" in words and not fields.speculators
    return _place(fields, "sample_from_anchor").flag("sample_from_anchor", dspark)


def _causal_layers(fields: HeadFields, layer: ModelConfig) -> tuple[bool, ...]:
    """Layers whose blocks are causal: as the config says, otherwise those with a sliding window.

    Where the speculators layout says nothing of windows that see both ways, their blocks are causal.
    """
    for name in ("is_causal", "causal"):
        place = _place(fields, name)
        if name in place:
            return (place.flag(name, False),) * layer.num_layers
    name = "sliding_window_non_causal"
    both_ways = _place(fields, name).flag(name, False)
    return tuple(window is not None and not both_ways for window in layer.windows[: layer.num_layers])
