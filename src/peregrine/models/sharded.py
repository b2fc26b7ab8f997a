"""Weights of which a rank holds a part and that give every rank the whole result (see `parallel.py`)."""

from dataclasses import dataclass

from torch import Tensor

from peregrine.kernels.linear import WeightFormat
from peregrine.kernels.moe import ExpertChoice, ExpertFormat, ExpertShare
from peregrine.kernels.residual import Norm, Residual, split_residual, splits_norm
from peregrine.kernels.runtime.gpu import triton_ready
from peregrine.models.parallel import Ranks, Shard


@dataclass(frozen=True, slots=True)
class NormColumns:
    """Some columns of a norm's weight."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class ShardedWeight(WeightFormat):
    """A rank's rows of a weight; the outputs are those of the whole one, on every rank."""

    own: WeightFormat
    shard: Shard

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs) of the whole weight."""
        return self.shard.total, self.own.shape[1]

    @property
    def num_bytes(self) -> int:
        """What this rank reads."""
        return self.own.num_bytes

    def linear(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias: [N, I] -> [N, O]."""
        return self._gather(self.own.linear(x))

    def linear_normed(self, residual: Residual) -> Tensor:
        """The linear of the normed residual: -> [N, O]."""
        return self._gather(self.own.linear_normed(residual))

    def gated(self, residual: Residual) -> Tensor:
        """silu(first half) * second half: each rank computes it for its outputs. -> [N, O / 2]"""
        return self._gather(self.own.gated(residual))

    def add(self, x: Tensor, residual: Residual, norm: Norm | None) -> Residual:
        """The residual plus the linear of x, prepared for the norm that comes next.

        A GPU's kernel adds to the residual before it rounds; so each rank adds its columns, and the sums are gathered.
        """
        if not splits_norm(norm, residual.values) or not triton_ready(x):
            return WeightFormat.add(self, x, residual, norm)
        (span,) = self.shard.rows
        before = residual.values[:, slice(*span)]
        own = self.own.add(x, Residual(before, before), NormColumns(norm.weight[slice(*span)], norm.eps))
        return split_residual(self._gather(own.values), norm)

    def _gather(self, own: Tensor) -> Tensor:
        assert self.shard.widths is not None
        return self.shard.ranks.gather(own, self.shard.widths)


@dataclass(frozen=True, slots=True)
class ShardedExperts(ExpertFormat):
    """A rank's experts of one linear layer: as many as `own` has, from number `first` of all on."""

    own: ExpertFormat
    ranks: Ranks
    first: int
    total: int  # experts of all ranks

    @property
    def shape(self) -> tuple[int, int, int]:
        """(experts of this rank, outputs, inputs)."""
        return self.own.shape

    @property
    def num_bytes(self) -> int:
        """Size of this rank's experts in memory."""
        return self.own.num_bytes

    def add(
        self,
        down: ExpertFormat,
        residual: Residual,
        choice: ExpertChoice,
        norm: Norm | None,
        share: ExpertShare | None = None,
    ) -> Residual:
        """The residual plus its experts' outputs, prepared for the norm that comes next."""
        assert isinstance(down, ShardedExperts)
        assert share is None
        here = ExpertShare(self.first, self.total, self.ranks.merge)
        return self.own.add(down.own, residual, choice, norm, here)
