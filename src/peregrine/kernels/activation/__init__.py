"""The gated activation of an MLP, and elementwise functions with position-independent bits."""

from peregrine.kernels.activation.elementwise import gelu, sigmoid, silu, soft_cap
from peregrine.kernels.activation.reference import STEEPNESS, clamped_mul, gelu_mul, silu_mul

__all__ = ["STEEPNESS", "clamped_mul", "gelu", "gelu_mul", "sigmoid", "silu", "silu_mul", "soft_cap"]
