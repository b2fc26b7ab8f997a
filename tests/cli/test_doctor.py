"""`peregrine doctor`: the machine, the reasons why a backend cannot serve, and an exit code."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from peregrine.attention.routing import BACKENDS
from peregrine.bench import row_operations
from peregrine.bench.row_operations import Operation
from peregrine.cli import doctor
from spec.harness import eagle3_head, tiny_model

Run = Callable[..., tuple[int, str, str]]


def doubled(x: Tensor) -> Tensor:
    return 2 * x


def by_number_of_rows(x: Tensor) -> Tensor:
    """A faulty operation: a row's bits depend on the number of rows."""
    return x * (1 + 1e-3 * len(x))


def table_of(*functions: Callable[[Tensor], Tensor]) -> Callable[[], list[Operation]]:
    return lambda: [Operation(function.__name__, (torch.ones(67, 5),), function) for function in functions]


@pytest.fixture(autouse=True)
def small_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few operations only: tests/kernels/test_row_bits.py checks all."""
    monkeypatch.setattr(row_operations, "operations", table_of(doubled))


def test_bits_of_rows_are_checked(peregrine: Run) -> None:
    code, out, _ = peregrine("doctor")
    assert code == 0
    assert "rows do not depend on the batch (1 operations, 1 and 2 threads, " in out
    report = json.loads(peregrine("doctor", "--json")[1])
    assert report["bits"]["operations"] == 1
    assert report["bits"]["differences"] == []


def test_a_row_that_depends_on_its_batch_fails_with_its_operation(
    peregrine: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_operations, "operations", table_of(doubled, by_number_of_rows))
    code, out, _ = peregrine("doctor")
    assert code == 1
    assert "rows depend on the batch (2 operations" in out
    assert "by_number_of_rows: row 0 has other bits" in out
    assert "please report it with the output of peregrine doctor --json" in out
    report = json.loads(peregrine("doctor", "--json")[1])
    assert report["healthy"] is False
    [difference] = report["bits"]["differences"]
    assert difference.startswith("by_number_of_rows")


def test_reports_versions_device_and_backends(peregrine: Run) -> None:
    code, out, _ = peregrine("doctor")
    assert code == 0
    assert torch.__version__ in out
    for backend in BACKENDS:
        assert f"{backend.name}: " in out


def test_json_has_reasons_by_backend(peregrine: Run) -> None:
    code, out, _ = peregrine("doctor", "--json", "--device", "cpu", "--dtype", "bfloat16")
    report = json.loads(out)
    assert code == 0
    assert report["healthy"] is True
    assert report["target"]["device"] == "cpu"
    assert report["target"]["dtype"] == "bfloat16"
    assert report["target"]["backends"]["torch"] == []
    assert report["model"] is None


def test_says_which_kernel_serves_which_window(peregrine: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Triton made available: one kernel for short windows, another for the rest."""
    monkeypatch.setattr(doctor, "backend_reasons", lambda *_: {b.name: [] for b in BACKENDS})
    code, out, _ = peregrine("doctor", "--device", "cpu")
    assert code == 0
    assert "verify of 3 drafts: 1 x 4: decode, measured when an engine starts" in out
    assert "prompts: 2 x up to 256: context, rows differ in length" in out
    assert "plain decoding, a draft step: 1 x 1: context, the only kernel there is" in out  # torch
    report = json.loads(peregrine("doctor", "--json", "--device", "cpu")[1])
    assert set(report["target"]["kernels"]) == {backend.name for backend in BACKENDS}


def test_a_backend_that_cannot_serve_has_no_kernels(peregrine: Run) -> None:
    report = json.loads(peregrine("doctor", "--json", "--device", "cpu", "--dtype", "bfloat16")[1])
    assert "torch" in report["target"]["kernels"]
    for name, reasons in report["target"]["backends"].items():
        assert (name in report["target"]["kernels"]) == (not reasons)


def test_unknown_device_fails_with_its_reason(peregrine: Run) -> None:
    code, out, _ = peregrine("doctor", "--device", "tpu")
    assert code == 1
    assert "device='tpu'" in out


def test_a_checkpoint_is_explained_alone(peregrine: Run) -> None:
    code, _, err = peregrine("doctor", str(tiny_model()), "--device", "cuda:9")
    assert (code, "device=cuda:9: a checkpoint is explained without loading it" in err) == (2, True)
    code, out, _ = peregrine("doctor", str(eagle3_head()))
    assert (code, "is a draft head" in out) == (1, True)


def test_model_that_loads_shows_decisions(calls: Any, peregrine: Run) -> None:
    code, out, _ = peregrine("doctor", "--model", "m", "--device", "cpu")
    assert code == 0
    assert calls.options == [{"model": "m", "device": "cpu"}]
    assert calls.closed == 1
    assert "drafter = none: asked for" in out


def test_model_that_does_not_load_fails_with_its_reason(calls: Any, peregrine: Run) -> None:
    code, out, _ = peregrine("doctor", "--model", "broken", "--json")
    report = json.loads(out)
    assert code == 1
    assert report["healthy"] is False
    assert "no config.json in 'broken'" in report["model"]["error"]


def test_a_model_that_cannot_be_split_between_ranks_fails_with_its_reason(peregrine: Run) -> None:
    code, out, _ = peregrine("doctor", "--model", "merlin", "--device", "cpu", "--tensor-parallel", "6")
    assert code == 1
    assert "tensor_parallel=6: 5 heads (KV heads: 1) cannot be shared by so many ranks; " in out
    assert "choose one of 1, 2, 3, 4, 5" in out
