"""Attention over paged keys and values: windows, metadata, backends and the choice among them."""

from peregrine.attention.backend import Attend, AttentionBackend, Deferred, LayerAttention
from peregrine.attention.kernel_choice import Kernel, KernelCosts, kernel_for
from peregrine.attention.metadata import AttentionMetadata
from peregrine.attention.routing import Choice, choose_backend
from peregrine.attention.traits import GraphSupport, Needs, Traits, refusals
from peregrine.attention.window import Window

__all__ = [
    "Attend",
    "AttentionBackend",
    "AttentionMetadata",
    "Choice",
    "Deferred",
    "GraphSupport",
    "Kernel",
    "KernelCosts",
    "LayerAttention",
    "Needs",
    "Traits",
    "Window",
    "choose_backend",
    "kernel_for",
    "refusals",
]
