"""Rotary embeddings."""

from peregrine.kernels.rope.reference import DeferredRope, rope, turn_heads

__all__ = ["DeferredRope", "rope", "turn_heads"]
