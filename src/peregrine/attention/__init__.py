"""Attention over paged keys and values: windows, metadata, backends and the choice among them."""

from peregrine.attention.backend import Attend, AttentionBackend, Deferred
from peregrine.attention.kernel_choice import KernelCosts, choose_launch
from peregrine.attention.metadata import AttentionMetadata, LayerAttention
from peregrine.attention.routing import BackendChoice, choose_backend
from peregrine.attention.traits import Needs, Traits, refusals
from peregrine.attention.window import Window
from peregrine.kernels.attention import Kernel

__all__ = [
    "Attend",
    "AttentionBackend",
    "AttentionMetadata",
    "BackendChoice",
    "Deferred",
    "Kernel",
    "KernelCosts",
    "LayerAttention",
    "Needs",
    "Traits",
    "Window",
    "choose_backend",
    "choose_launch",
    "refusals",
]
