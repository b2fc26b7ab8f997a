"""What an attention backend is given and what it offers: traits, and `bind`, which plans one forward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from peregrine.attention.kernel_choice import KernelCosts
from peregrine.attention.metadata import AttentionMetadata
from peregrine.attention.traits import Traits
from peregrine.cache.store import KVStore
from peregrine.kernels.attention import DeferredMLARope
from peregrine.kernels.rope import DeferredRope

Deferred = DeferredRope | DeferredMLARope  # what is still to be done to queries and keys, by kind of attention


class Attend(Protocol):
    """Attention of one forward: what the queries of a layer find among the keys they see."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: Deferred | None = None) -> Tensor:
        """k [M, Hkv, D] and v [M, Hkv, Dv] go to metadata.slots first. q [N, Hq, D] -> [N, Hq, Dv]

        With `turn`, queries and keys are normed and turned on the way. Without queries (N is 0) it only writes.
        """


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What is particular to one layer's attention."""

    scale: float  # multiplies q . k
    window: int | None  # a query at position p sees keys above p - window; None: all
    sinks: Tensor | None  # [Hq] logits that join the softmax denominator only; None: no sinks


class AttentionBackend(Protocol):
    """One way to compute attention over paged keys and values."""

    @property
    def name(self) -> str:
        """What a user calls it."""

    @property
    def traits(self) -> Traits:
        """What it can do where it can run."""

    def missing(self) -> list[str]:
        """What has to be installed before it can run here; empty when it can."""

    def with_costs(self, costs: KernelCosts) -> "AttentionBackend":
        """The same backend, which takes the cheaper of its kernels where both may serve; itself if it has one."""

    def bind(self, store: KVStore, layers: Sequence[LayerAttention], metadata: AttentionMetadata) -> Attend:
        """Plan once for all layers; what comes back writes keys and values, then attends, without a wait."""
