"""Copies that are recorded are made by a kernel, from any rows into any rows, and can be replayed."""

import pytest
import torch
from torch import Tensor

from peregrine.kernels.copy import copy_into, join_columns
from peregrine.kernels.copy.cpu import copy_into as compiled
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT
from peregrine.kernels.runtime.cpu_graph import CpuGraph

pytestmark = pytest.mark.skipif(not NUMBA_PRESENT, reason="needs numba")


def draw(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randint(-(2**20), 2**20, shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 7), (3, 1), (4, 5), (2, 33)])
def test_a_replayed_copy_is_the_copy(dtype: torch.dtype, rows: int, columns: int) -> None:
    source, target = draw(dtype, rows, columns + 3)[:, 2 : 2 + columns], draw(dtype, rows, columns + 5)
    around = target.clone()

    def step(source: Tensor) -> tuple[Tensor, ...]:
        copy_into(target[:, 1 : 1 + columns], source)
        return ()

    graph = CpuGraph(step, (source,))
    assert graph.complete
    source.copy_(draw(dtype, rows, columns))
    graph(source)
    around[:, 1 : 1 + columns] = source
    assert torch.equal(target, around), "nothing beside it is written"


def test_parts_lie_side_by_side() -> None:
    parts = [torch.randn(3, 5) for _ in range(3)]
    assert torch.equal(join_columns(parts), torch.cat(parts, dim=1))
    graph = CpuGraph(lambda *parts: (join_columns(parts),), parts)
    assert graph.complete
    others = [torch.randn(3, 5) for _ in range(3)]
    assert torch.equal(graph(*others)[0], torch.cat(others, dim=1))


@pytest.mark.parametrize(
    ("target", "source", "said"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2), r"the source is \(3, 2\).*the target \(2, 3\)"),
        (torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64), "int64"),
        (torch.zeros(2, 3), torch.zeros(3, 2).T, "columns are 2 and 1 elements apart, not 1"),
    ],
)
def test_what_does_not_fit_is_refused(target: Tensor, source: Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        compiled(target, source)
