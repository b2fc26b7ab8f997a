"""`peregrine conformance`: a table and an exit code; what cannot run is refused by name."""

import json
from collections.abc import Callable

import pytest

from peregrine.attention.conformance import report
from peregrine.hardware import triton_interprets
from peregrine.kernels.runtime.gpu import TRITON_PRESENT

Run = Callable[..., tuple[int, str, str]]


def test_a_correct_backend_passes(peregrine: Run) -> None:
    code, out, _ = peregrine("conformance", "--attention", "torch", "--device", "cpu", "--quick", "--part", "1/3")
    assert code == 0
    assert "near the float64 answer" in out
    assert "FAIL" not in out


def test_a_wrong_one_fails(peregrine: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from peregrine.attention import torch_backend

    right = torch_backend.paged_attention_torch
    monkeypatch.setattr(torch_backend, "paged_attention_torch", lambda *args: right(*args) * 1.01)
    argv = ("--attention", "torch", "--device", "cpu", "--dtype", "float32", "--quick", "--part", "1/5", "--json")
    code, out, _ = peregrine("conformance", *argv)
    assert code == 1
    said = json.loads(out)
    assert said["passed"] is False
    assert said["properties"]["near the float64 answer"]["failures"]
    assert not said["properties"]["rows independent of the batch"]["failures"]


def test_the_parts_add_up_to_all_cases(peregrine: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "PROPERTIES", {"near the float64 answer": report.PROPERTIES["near the float64 answer"]})
    argv = ("conformance", "--attention", "torch", "--device", "cpu", "--dtype", "float32", "--quick", "--json")
    whole = json.loads(peregrine(*argv)[1])
    parts = [json.loads(peregrine(*argv, "--part", f"{i}/2")[1]) for i in (1, 2)]
    assert sum(part["cases"] for part in parts) == whole["cases"]
    for name, tally in whole["properties"].items():
        assert sum(part["properties"][name]["trials"] for part in parts) == tally["trials"]


@pytest.mark.skipif(not (TRITON_PRESENT and triton_interprets()), reason="needs Triton's interpreter")
@pytest.mark.parametrize("part", ["1/4", "2/4", "3/4", "4/4"])  # the interpreter is slow: workers share the cases
def test_triton_passes_in_the_interpreter(peregrine: Run, part: str) -> None:
    argv = ("--attention", "triton", "--device", "cpu", "--quick", "--json", "--part", part)
    code, out, _ = peregrine("conformance", *argv)
    said = json.loads(out)
    assert code == 0, said
    assert said["cases"] >= 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--attention", "flash"), "attention='flash': no such backend; choose one of triton, numba, torch"),
        (("--attention", "torch", "--dtype", "int8"), "dtype='int8': torch computes in float32, bfloat16, float16"),
        (("--attention", "torch", "--device", "tpu"), "device='tpu'"),
        (("--attention", "torch", "--quick", "--part", "5000/5000"), "part=5000/5000: there are"),
    ],
)
def test_bad_input_is_one_line(peregrine: Run, argv: tuple[str, ...], message: str) -> None:
    code, _, err = peregrine("conformance", *argv)
    assert code == 2
    assert message in err


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b"])
def test_a_part_is_i_of_n(peregrine: Run, text: str) -> None:
    code, _, err = peregrine("conformance", "--attention", "torch", "--part", text)
    assert code == 2
    assert "is not I/N with I from 1 to N" in err
