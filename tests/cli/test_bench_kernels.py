"""`peregrine bench kernels`: both kernels on every given shape; no figures without a GPU."""

import json
from collections.abc import Callable

import pytest

from peregrine.hardware import triton_interprets
from peregrine.kernels.runtime.gpu import TRITON_PRESENT

Run = Callable[..., tuple[int, str, str]]
SMALL = ("--rows", "1", "2", "--q-lens", "3", "--contexts", "150", "--heads", "4", "1", "16")

needs_interpreter = pytest.mark.skipif(
    not (TRITON_PRESENT and triton_interprets()), reason="needs Triton's interpreter"
)


@needs_interpreter
def test_every_shape_has_a_line(peregrine: Run) -> None:
    argv = ("bench", "kernels", "--device", "cpu", "--dtype", "float32", *SMALL)
    code, out, _ = peregrine(*argv, "--json")
    result = json.loads(out)
    assert code == 0
    assert result["copy_tb_per_s"] is None
    assert [(line["rows"], line["q_len"], line["context"]) for line in result["lines"]] == [(1, 3, 150), (2, 3, 150)]
    for line in result["lines"]:
        faster = "decode" if line["decode_ms"] <= line["context_ms"] else "context"
        assert line["choice"].startswith(f"{line['rows']} x 3: {faster}, ")
    code, out, _ = peregrine(*argv)
    assert code == 0
    assert "no CUDA device" in out


@needs_interpreter
def test_mla_is_measured_too(peregrine: Run) -> None:
    argv = ("bench", "kernels", "--device", "cpu", "--dtype", "float32", *SMALL, "--latent", "4", "32", "16")
    code, out, _ = peregrine(*argv, "--json")
    result = json.loads(out)
    assert code == 0
    assert result["latent"] == [4, 32, 16]
    kinds = ["4 heads on 1 of 16"] * 2 + ["4 heads on latent of 32 + 16"] * 2
    assert [line["kind"] for line in result["lines"]] == kinds
    assert [line["rows"] for line in result["lines"]] == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--device", "cpu"), "device='cpu': Triton kernels need a CUDA device"),
        (("--device", "cpu", "--dtype", "int4"), "dtype='int4': choose one of float32, bfloat16, float16"),
        (("--device", "cpu", "--kv-dtype", "float9"), "kv_dtype='float9': choose auto or float8"),
        (
            ("--device", "cpu", "--latent", "16", "512", "64", "--kv-dtype", "float8"),
            "kv_dtype='float8': MLA has kv_dtype auto alone",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(
    peregrine: Run, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], message: str
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code, _, err = peregrine("bench", "kernels", *argv)
    assert code == 2
    assert message in err
