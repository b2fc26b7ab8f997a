"""Draft heads: small networks that draft from a target's hidden states. One file per kind: EAGLE-3, EAGLE, MTP, block.

A block head (DFlash, DSpark) drafts all tokens in one forward. The others draft token by token: their entry at
position p is (hidden state of p, token at p + 1). The first hidden states come from the target,
fused from its taps; the next ones are the head's own. A head borrows the target's embedding and output head unless it
brings its own. Like the decoder, heads are functions of (tokens, hidden, positions, attend), and they train.
"""

from peregrine.models.draft_heads.block import BlockHead
from peregrine.models.draft_heads.block_config import BlockConfig
from peregrine.models.draft_heads.eagle import EagleHead
from peregrine.models.draft_heads.eagle3 import Eagle3Config, Eagle3Head, Eagle3Layer
from peregrine.models.draft_heads.formats import default_taps, prediction_layer
from peregrine.models.draft_heads.loading import find_head, has_prediction_layer, is_head, load_head
from peregrine.models.draft_heads.mtp import MTPHead
from peregrine.models.draft_heads.parts import DraftHead, StepHead, dense_layers
from peregrine.models.draft_heads.saving import save_head

__all__ = [
    "BlockConfig",
    "BlockHead",
    "DraftHead",
    "Eagle3Config",
    "Eagle3Head",
    "Eagle3Layer",
    "EagleHead",
    "MTPHead",
    "StepHead",
    "default_taps",
    "dense_layers",
    "find_head",
    "has_prediction_layer",
    "is_head",
    "load_head",
    "prediction_layer",
    "save_head",
]
