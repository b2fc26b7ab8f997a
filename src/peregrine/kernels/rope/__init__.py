"""Rotary embeddings."""

from peregrine.kernels.rope.reference import DeferredRope, rope, rotate_heads

__all__ = ["DeferredRope", "rope", "rotate_heads"]
