"""`peregrine doctor`: facts for everybody, reasons for what cannot serve, an exit code for what was asked."""

import json
from collections.abc import Callable
from typing import Any

import torch

from peregrine.attention.routing import BACKENDS

Run = Callable[..., tuple[int, str, str]]


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
