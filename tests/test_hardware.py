"""Which device and dtype an option resolves to, and the facts read from a machine's tables."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from peregrine import hardware
from peregrine.errors import ConfigError
from peregrine.hardware import read_hardware, resolve_device, resolve_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CPUINFO = """processor : 0
model name : Some Xeon @ 2.0GHz
flags : fpu avx2 avx512f amx_tile amx_bf16 made_up

processor : 1
model name : Another
"""


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("name", "device"),
    [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:0", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu")],
)
def test_device_with_gpus(name: str, device: str) -> None:
    assert resolve_device(name) == torch.device(device)


@pytest.mark.usefixtures("no_gpu")
def test_auto_without_gpu_is_the_cpu() -> None:
    assert resolve_device("auto") == CPU


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_absent_cuda_is_refused_with_what_exists(name: str) -> None:
    with pytest.raises(ConfigError, match=f"device='{name}'.*sees no CUDA device; choose one of auto, cpu$"):
        resolve_device(name)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("name", ["cuda:2", "cuda:x", "mps", "tpu", ""])
def test_unknown_device_is_refused_with_what_exists(name: str) -> None:
    with pytest.raises(ConfigError, match=f"device='{name}'.*choose one of auto, cpu, cuda, cuda:0, cuda:1$"):
        resolve_device(name)


@pytest.mark.parametrize(
    ("name", "device", "stored", "dtype"),
    [
        ("auto", CPU, torch.bfloat16, torch.float32),
        ("auto", CUDA, torch.bfloat16, torch.bfloat16),
        ("auto", CUDA, torch.float16, torch.float16),
        ("bfloat16", CPU, torch.float32, torch.bfloat16),
        ("float32", CUDA, torch.bfloat16, torch.float32),
    ],
)
def test_dtype(name: str, device: torch.device, stored: torch.dtype, dtype: torch.dtype) -> None:
    assert resolve_dtype(name, device, stored) is dtype


def test_unknown_dtype_is_refused_with_what_exists() -> None:
    with pytest.raises(ConfigError, match=r"dtype='int4'.*auto, float32, bfloat16, float16"):
        resolve_dtype("int4", CPU, torch.float32)


def test_auto_refuses_a_stored_dtype_that_cannot_be_computed_in() -> None:
    with pytest.raises(ConfigError, match="float8_e4m3fn; choose one of float32"):
        resolve_dtype("auto", CUDA, torch.float8_e4m3fn)


def test_cpu_facts_come_from_the_first_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "read_text", lambda path: CPUINFO if path == Path("/proc/cpuinfo") else "")
    cpu = hardware.read_cpu()
    assert cpu.name == "Some Xeon @ 2.0GHz"
    assert cpu.flags == ("avx2", "avx512f", "amx_tile", "amx_bf16")
    assert cpu.cores >= 1


def test_memory_is_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "read_text", lambda path: "MemTotal: 2048 kB\nMemAvailable:  1024 kB\n")
    monkeypatch.setattr(hardware, "memory_limits", lambda: iter(()))
    assert hardware.read_memory() == (2 * 2**20, 2**20)


def test_absent_package_has_no_version() -> None:
    assert hardware.version_of("no-such-package-here") is None
    assert hardware.version_of("torch")


def test_facts_fit_into_json() -> None:
    facts = json.loads(json.dumps(dataclasses.asdict(read_hardware())))
    assert facts["torch"] == str(torch.__version__)
    assert facts["cpu"]["cores"] >= 1
