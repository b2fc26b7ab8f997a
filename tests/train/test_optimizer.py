"""The learning-rate curve, Muon's orthogonal updates, and which parameter gets which optimizer."""

import pytest
import torch
from torch import nn

from peregrine.errors import ConfigError
from peregrine.train.muon import Muon, orthogonal
from peregrine.train.optimizer import Curve, Optimizers


def test_the_rate_rises_stays_and_falls_to_zero():
    curve = Curve(peak=1.0, warmup_steps=9, total_steps=100, decay_share=0.5)
    assert curve.at(0) == pytest.approx(0.1)
    assert curve.at(9) == curve.at(50) == 1.0
    assert curve.at(75) == pytest.approx(0.5)
    assert curve.at(99) == pytest.approx(0.02)
    assert curve.at(100) == 0.0


@pytest.mark.parametrize("shape", [(3, 8, 24), (2, 24, 8), (1, 16, 16)])
def test_singular_values_come_near_one(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(matrices))
    assert values.min() > 0.4
    assert values.max() < 1.4


def test_matrices_of_one_shape_are_updated_as_if_alone():
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(6, 10, generator=generator) for _ in range(3)]
    gradients = [torch.randn(6, 10, generator=generator) for _ in range(3)]

    def updated(chosen):
        matrices = [nn.Parameter(weights[i].clone()) for i in chosen]
        optimizer = Muon(matrices, weight_decay=0.1)
        optimizer.param_groups[0]["lr"] = 0.1
        for matrix, i in zip(matrices, chosen, strict=True):
            matrix.grad = gradients[i]
        optimizer.step()
        return [matrix.detach() for matrix in matrices]

    together = updated([0, 1, 2])
    torch.testing.assert_close(together[1], updated([1])[0])
    assert (together[1] - weights[1]).abs().mean() > 0.005


def test_tables_go_to_adamw_and_vectors_do_not_decay():
    model = nn.ModuleDict({"table": nn.Embedding(7, 4), "layer": nn.Linear(4, 4)})
    optimizers = Optimizers(model, 0.1, frozenset({"table.weight"}))
    assert [p.shape for p in optimizers.muon.param_groups[0]["params"]] == [(4, 4)]
    tables, vectors = optimizers.adamw.param_groups
    assert [p.shape for p in tables["params"]] == [(7, 4)]
    assert [p.shape for p in vectors["params"]] == [(4,)]
    assert (tables["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)


def test_a_table_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="nowhere"):
        Optimizers(nn.Linear(2, 2), 0.1, frozenset({"nowhere"}))
