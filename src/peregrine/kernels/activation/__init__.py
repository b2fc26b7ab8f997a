"""The gated activation of an MLP, and elementwise functions with position-independent bits."""

from peregrine.kernels.activation.elementwise import sigmoid, silu
from peregrine.kernels.activation.reference import silu_mul

__all__ = ["sigmoid", "silu", "silu_mul"]
