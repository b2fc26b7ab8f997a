"""The learning rate, Muon's orthogonal updates, and which parameter gets which optimizer."""

import pytest
import torch
from torch import nn

from peregrine.errors import ConfigError
from peregrine.train.muon import Muon
from peregrine.train.options import RunOptions
from peregrine.train.run import build_optimizers, learning_rate


def test_the_rate_rises_stays_and_falls_to_zero():
    options = RunOptions(rate=1.0, warmup_steps=9, decay_share=0.5)
    rates = [learning_rate(options, step, 100) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[50] == 1.0
    assert rates[75] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(0.02)
    assert rates[100] == 0.0
    assert learning_rate(options, 10**6, None) == 1.0  # the number of steps is not known yet


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_a_matrix_moves_by_an_orthogonal_update_of_the_size_of_adamws(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(shape[1], shape[0], bias=False)
    muon, _ = build_optimizers(model, weight_decay=0.1)
    with torch.no_grad():
        model.weight.copy_(weight)
    model.weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    muon.param_groups[0]["lr"] = 0.1
    muon.step()
    update = (weight * (1 - 0.1 * 0.1) - model.weight.detach()) / 0.1
    values = torch.linalg.svdvals(update) / (0.2 * max(shape) ** 0.5)
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
    muon, adamw = build_optimizers(model, 0.1, frozenset({"table.weight"}))
    assert [p.shape for p in muon.param_groups[0]["params"]] == [(4, 4)]
    tables, vectors = adamw.param_groups
    assert [p.shape for p in tables["params"]] == [(7, 4)]
    assert [p.shape for p in vectors["params"]] == [(4,)]
    assert (tables["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)


def test_a_table_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="nowhere"):
        build_optimizers(nn.Linear(2, 2), 0.1, frozenset({"nowhere"}))
