"""What an attention backend is given and what it offers: traits, and `bind`, which plans one forward."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from peregrine.attention.kernel_choice import KernelCosts
from peregrine.attention.metadata import AttentionMetadata, LayerAttention
from peregrine.attention.traits import Traits
from peregrine.cache.store import KVStore
from peregrine.kernels.attention import DeferredMLARope
from peregrine.kernels.rope import DeferredRope

Deferred = DeferredRope | DeferredMLARope  # norms and rotations that the backend still has to apply


class Attend(Protocol):
    """The attention of one forward."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rope: Deferred | None = None) -> Tensor:
        """Store k [M, Hkv, D] and v [M, Hkv, Dv] at metadata.slots, then attend. q [N, Hq, D] -> [N, Hq, Dv]

        With `rope`, queries and keys are normed and rotated first. Without queries (N is 0) it only stores.
        """


class AttentionBackend(Protocol):
    """One way to compute attention over paged keys and values."""

    @property
    def name(self) -> str:
        """Its name in the configuration."""

    @property
    def traits(self) -> Traits:
        """What it can do where it can run."""

    def missing(self) -> list[str]:
        """What has to be installed before it can run here; empty when it can."""

    def with_costs(self, costs: KernelCosts) -> "AttentionBackend":
        """A backend that takes the cheaper kernel where two may serve; itself if it has one kernel."""

    def bind(self, store: KVStore, layers: Sequence[LayerAttention], metadata: AttentionMetadata) -> Attend:
        """Plan one forward for all layers; the returned callable never waits for the device."""
