"""`peregrine doctor`: the machine, reasons for what cannot serve, an exit code for what was asked."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from peregrine.attention.routing import BACKENDS
from peregrine.cli import doctor
from peregrine.synthetic import row_bits
from peregrine.synthetic.row_operations import NUM_ROWS, Operation, by_rows, draw
from peregrine.synthetic.row_operations import Run as Rows

Run = Callable[..., tuple[int, str, str]]

SIGMOID = next(each for each in row_bits.OPERATIONS if each.name == "sigmoid")


def sums_over_the_batch(x: Tensor) -> Tensor:
    """What no operation may do: a row's bits follow from the rows beside it."""
    return x + x.sum() * 0 + 1e-3 * len(x)


@pytest.fixture(autouse=True)
def one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check one operation: tests/kernels/test_row_bits.py has all of them."""
    monkeypatch.setattr(row_bits, "OPERATIONS", (SIGMOID,))


def test_bits_of_rows_are_checked(peregrine: Run) -> None:
    code, out, _ = peregrine("doctor")
    assert code == 0
    assert "float32: rows do not depend on the batch (1 operations, 1 and 2 threads" in out
    report = json.loads(peregrine("doctor", "--json")[1])
    assert report["bits"]["dtypes"]["bfloat16"] == {"operations": 1, "differences": []}


def test_a_row_that_depends_on_its_batch_fails_with_its_operation(
    peregrine: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(size: int, dtype: torch.dtype) -> Rows:
        return by_rows(sums_over_the_batch, draw(NUM_ROWS, size).to(dtype))

    threads = torch.get_num_threads()
    monkeypatch.setattr(row_bits, "OPERATIONS", (SIGMOID, Operation("a sum", build, (7,), (torch.float32,))))
    code, out, _ = peregrine("doctor")
    assert code == 1
    assert "float32: rows depend on the batch" in out
    assert "a sum of size 7 in float32: row 0 differs in a batch of 3 from row 0 on" in out
    assert "please report it with the output of peregrine doctor --json" in out
    assert "bfloat16: rows do not depend on the batch" in out
    report = json.loads(peregrine("doctor", "--json")[1])
    assert report["healthy"] is False
    assert report["bits"]["dtypes"]["float32"]["differences"][0].startswith("a sum of size 7")
    assert torch.get_num_threads() == threads  # left as it was


def test_signs_of_zero_and_nan_are_bits() -> None:
    zero, minus, nan = torch.tensor(0.0), torch.tensor(-0.0), torch.tensor(torch.nan)
    assert row_bits.same_bits((zero, nan), (zero, nan))
    assert not row_bits.same_bits((zero,), (minus,))


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
    """As on a machine whose Triton serves: a kernel for short windows, another for the rest."""
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
