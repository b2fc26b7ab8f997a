"""Weights that are split between ranks of a GPU, in Triton's interpreter: the bits of the whole weight.

Ranks run one after the other, so the last one sees what all have computed.
"""

import os

import pytest
import torch
from torch import Tensor

from kernels.compile_experts import RMSNorm
from peregrine.kernels.linear import tiles
from peregrine.kernels.residual import Residual
from peregrine.models import sharded
from peregrine.models.parallel import Ranks
from peregrine.models.sharded import ShardedWeight

pytestmark = pytest.mark.skipif(not os.environ.get("TRITON_INTERPRET"), reason="needs Triton's interpreter")

ROWS, OUTPUTS, INPUTS, EPS = 5, 192, 256, 1e-5
SIZES = (2, 5)  # ranks; of 192 outputs five have shares of 38 and 39


class InTurn:
    """A group whose ranks run one after the other."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []

    def gather(self, out: Tensor, own: Tensor) -> None:
        self.parts.append(own)
        out[: sum(map(len, self.parts))] = torch.cat(self.parts)

    def add(self, x: Tensor) -> None:
        raise NotImplementedError

    def send(self, x: Tensor) -> None:
        raise NotImplementedError

    def abort(self) -> None:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits as on a GPU of four multiprocessors: one of the whole weight, four of a share with one tile."""
    monkeypatch.setattr(tiles, "SPLIT_PROGRAMS", 4)
    monkeypatch.setattr(tiles, "SPLIT_INPUTS", 64)
    monkeypatch.setattr(sharded, "triton_ready", lambda x: True)
    assert tiles.pick_split(OUTPUTS, INPUTS, gate=False) == 1
    assert tiles.pick_split(64, INPUTS, gate=False) == 4


def draw(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def whole(outputs: int = OUTPUTS, scale: float = 1.0) -> sharded.WeightFormat:
    from peregrine.kernels.linear.triton import TritonWeight

    return TritonWeight(draw(outputs, INPUTS, seed=1), scale * draw(outputs, seed=2))


def shares(size: int, outputs: int = OUTPUTS, parts: int = 1, scale: float = 1.0) -> list[ShardedWeight]:
    """The same weight split between ranks, to be used in their order."""
    from peregrine.kernels.linear.triton import TritonWeight

    made, group, weight = [], InTurn(), whole(outputs * parts, scale)
    assert isinstance(weight, TritonWeight)
    assert weight.bias is not None
    for rank in range(size):
        shard = Ranks(rank, size, group).split(outputs, parts)
        assert shard is not None
        own = TritonWeight(shard.take(weight.weight), shard.take(weight.bias), shard.total)
        made.append(ShardedWeight(own, shard))
    return made


def start(seed: int = 3, width: int = INPUTS) -> Residual:
    return sharded.split_residual(draw(ROWS, width, seed=seed), RMSNorm(draw(width, seed=4), EPS))


@pytest.mark.parametrize("size", SIZES)
def test_linears_of_shares_are_those_of_the_whole(size: int) -> None:
    x = draw(ROWS, INPUTS, seed=5)
    assert torch.equal([own.linear(x) for own in shares(size)][-1], whole().linear(x))
    assert torch.equal([own.linear_normed(start()) for own in shares(size)][-1], whole().linear_normed(start()))
    gated = [own.gated(start()) for own in shares(size, OUTPUTS // 2, parts=2)][-1]
    assert torch.equal(gated, whole().gated(start()))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [1.0, 1e-4], ids=["coarse squares", "fine squares"])
def test_what_shares_add_to_a_residual_is_what_the_whole_adds(size: int, scale: float) -> None:
    """Values, their products with the norm and their sums of squares; small rows are counted in fine units."""
    x, norm = scale * draw(ROWS, INPUTS, seed=6), RMSNorm(draw(OUTPUTS, seed=7), EPS)
    before = scale * draw(ROWS, OUTPUTS, seed=8)

    def residual() -> Residual:
        return sharded.split_residual(before, norm)

    found = [own.add(x, residual(), norm) for own in shares(size, scale=scale)][-1]
    expected = whole(scale=scale).add(x, residual(), norm)
    assert torch.equal(found.values, expected.values)
    assert torch.equal(found.normed, expected.normed)
    assert torch.equal(found.finish_norm(), expected.finish_norm())
    assert found.squares is not None
    assert expected.squares is not None
    assert torch.equal(found.squares[:, 0], expected.squares[:, 0])
    if scale < 1:
        assert torch.equal(found.squares, expected.squares)
    assert found.spare is not None
    assert not found.spare.any()
