"""Linear layers whose rows have the same bits in every batch."""

from peregrine.kernels.linear.measure import linear_seconds
from peregrine.kernels.linear.per_head import PerHeadFormat, PlainPerHead, pack_per_head
from peregrine.kernels.linear.reference import DenseWeight, PlainWeight, WeightFormat, pack_weight
from peregrine.kernels.linear.tiles import workspace_bytes

__all__ = [
    "DenseWeight",
    "PerHeadFormat",
    "PlainPerHead",
    "PlainWeight",
    "WeightFormat",
    "linear_seconds",
    "pack_per_head",
    "pack_weight",
    "workspace_bytes",
]
