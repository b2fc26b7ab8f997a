"""Linear layers whose rows have the same bits in every batch."""

from peregrine.kernels.linear.per_head import PackedPerHead, pack_per_head, per_head_linear
from peregrine.kernels.linear.reference import PackedWeight, linear, pack_weight

__all__ = ["PackedPerHead", "PackedWeight", "linear", "pack_per_head", "pack_weight", "per_head_linear"]
