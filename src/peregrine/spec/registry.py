"""Drafters by name. A new drafter is a file beside this one and a line in DRAFTERS."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from peregrine.attention.backend import AttentionBackend
from peregrine.cache.store import KVShape, KVStore
from peregrine.config import TreeShape
from peregrine.errors import ConfigError
from peregrine.models.checkpoint.weights import Weights
from peregrine.models.config import ModelConfig
from peregrine.models.decoder import Decoder
from peregrine.models.draft_heads import BlockHead, DraftHead, StepHead, find_head, has_prediction_layer, is_head
from peregrine.models.families import read_config
from peregrine.models.loading import load_decoder
from peregrine.models.parallel import Ranks
from peregrine.models.rope_table import SPARE_POSITIONS
from peregrine.spec.block import BlockDrafter, check_confidence, check_depth
from peregrine.spec.bound import BoundModel
from peregrine.spec.chain import ChainDrafter
from peregrine.spec.ngram import NgramDrafter
from peregrine.spec.plain import NoDrafter
from peregrine.spec.readers import DraftReader, HeadReader, ModelReader
from peregrine.spec.suffix import SuffixDrafter
from peregrine.spec.tree import TreeDrafter
from peregrine.spec.types import Drafter

# Drafters without weights of their own: name -> made for a number of drafts, on a device.
DRAFTERS: dict[str, Callable[[int, torch.device], Drafter]] = {
    "none": lambda num_drafts, device: NoDrafter(),
    "ngram": lambda num_drafts, device: NgramDrafter(num_drafts),
    "suffix": SuffixDrafter,
}


AskedDepth = tuple[int | None, TreeShape | None, float]  # num_drafts, tree and confidence_threshold, as asked for


@dataclass(frozen=True, slots=True)
class StoreShape:
    """What a drafter's own KV store must hold per place."""

    num_layers: int
    kv: KVShape

    @staticmethod
    def of(network: DraftHead | Decoder) -> "StoreShape":
        """Of a network's own share, where ranks share it."""
        return StoreShape(layers_of(network)[1], network.kv_shape)

    @staticmethod
    def in_memory(network: DraftHead | Decoder, ranks: Ranks) -> "list[StoreShape]":
        """Of all shares of a network that are in the memory of one device; ranks that cannot share it have it whole."""
        config, count = layers_of(network)
        copies = ranks.size if network.ranks.size == 1 and ranks.share_memory else 1
        return [StoreShape(count, kv) for kv in network.ranks.kv_shapes(config)] * copies


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A drafter found by name or folder, its network loaded, before it has a store."""

    name: str
    network: DraftHead | Decoder | None

    @property
    def sees_both_ways(self) -> bool:
        """Whether drafting needs attention with masks, as trees do."""
        return isinstance(self.network, BlockHead) and not all(self.network.config.causal)


def layers_of(network: DraftHead | Decoder) -> tuple[ModelConfig, int]:
    """The config of a network's layers, and how many there are."""
    if isinstance(network, Decoder):
        return network.config, network.config.num_layers
    return network.layer_config, network.num_layers


LoadDrafter = Callable[[Decoder], DraftSource]  # loads the weights of a drafter that was found, for its target


def find_drafter(name: str, model: Weights, target: ModelConfig, depth: AskedDepth) -> LoadDrafter:
    """A drafter by name: one in DRAFTERS, "mtp" for the model's own layer, a folder inside the model's, or a folder.

    What does not fit the target is refused here, before weights are loaded.
    """
    num_drafts, tree, threshold = depth
    if name in DRAFTERS:
        check_confidence(name, False, threshold)
        return lambda decoder: DraftSource(name, None)
    model_folder = model.folder
    beside, elsewhere = model_folder / name, Path(name)
    if name == "mtp":
        check_prediction_layer(model, target)
        weights = model
    elif beside.is_dir():
        weights = Weights(beside)
    elif elsewhere.is_dir():
        weights = Weights(elsewhere)
    else:
        known = [
            "auto",
            *DRAFTERS,
            "mtp",
            *(p.name for p in sorted(model_folder.iterdir()) if (p / "config.json").exists()),
        ]
        raise ConfigError(f"drafter={name!r}: no such drafter or folder; choose {', '.join(known)} or a folder")
    if name == "mtp" or is_head(weights):
        head = find_head(weights, target)
        check_depth(head.blueprint.max_drafts, num_drafts, tree)
        check_confidence(name, head.blueprint.says, threshold)
        return lambda decoder: DraftSource(name, head.load(decoder, decoder.embedding.device, decoder.embedding.dtype))
    check_confidence(name, False, threshold)
    vocab_size = read_config(weights.folder).vocab_size
    if vocab_size != target.vocab_size:
        raise ConfigError(
            f"drafter={name!r}: its vocabulary has {vocab_size} tokens, the target's "
            f"{target.vocab_size}; a draft model must share the target's tokenizer"
        )
    return lambda decoder: DraftSource(name, load_draft_model(weights, decoder))


def load_draft_model(weights: Weights, target: Decoder) -> Decoder:
    """A small model that drafts. Its table covers the target's positions, whatever its own config says."""
    num_positions = len(target.rope_table) - SPARE_POSITIONS
    ranks, embedding = target.ranks.for_draft(read_config(weights.folder)), target.embedding
    return load_decoder(weights, embedding.device, embedding.dtype, num_positions=num_positions, ranks=ranks)


def check_prediction_layer(model: Weights, target: ModelConfig) -> None:
    """Refuse to draft with a layer that the checkpoint does not have."""
    if not has_prediction_layer(model):
        raise ConfigError(
            f"drafter='mtp': {str(model.folder)!r} has no prediction layer (its config says "
            f"num_nextn_predict_layers={target.num_extra_layers}, and no tensor is a layer's eh_proj or "
            "input_proj); choose ngram, none or a draft head's folder, or the files that have the layer"
        )


def make_drafter(
    source: DraftSource,
    num_drafts: int,
    tree: TreeShape | None,
    store: KVStore | None,
    backend: AttentionBackend,
    threshold: float | None = None,
) -> Drafter:
    """The drafter, ready to propose."""
    if source.network is None or store is None:
        if tree is not None:
            raise ConfigError(f"drafter={source.name!r}: guesses no trees; leave tree out or choose a draft head")
        return DRAFTERS[source.name](num_drafts, torch.device("cpu") if store is None else store.keys.device)
    if isinstance(source.network, BlockHead):
        return BlockDrafter(source.network, store, backend, num_drafts, tree, threshold)
    reader: DraftReader
    if isinstance(source.network, Decoder):
        reader = ModelReader(BoundModel(source.network, source.network.layer_attention(), store, backend))
    else:
        assert isinstance(source.network, StepHead)
        reader = HeadReader(source.network, store, backend)
    if tree is None or tree.width == 1:
        return ChainDrafter(reader, num_drafts if tree is None else tree.depth)
    return TreeDrafter(reader, tree.depth, tree.width, tree.nodes)
