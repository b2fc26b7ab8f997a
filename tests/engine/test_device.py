"""An engine builds and steps on its own CUDA device, whichever device is current in the calling thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from peregrine import LLM, SamplingParams
from peregrine.engine import build as building
from peregrine.engine.runner import Runner
from peregrine.engine.sources import FolderSource
from peregrine.hardware import current_device
from spec.harness import build, tiny_model

SECOND = torch.device("cuda", 1)


class Stop(Exception):
    """Ends a build early, since the device does not exist."""


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """A fake of CUDA's current device per thread: `current.device`."""
    current = threading.local()

    @contextmanager
    def device(device: torch.device) -> Iterator[None]:
        before, current.device = getattr(current, "device", None), device
        yield
        current.device = before

    monkeypatch.setattr(torch.cuda, "device", device)
    return current


def test_weights_are_loaded_and_kernels_launched_on_the_device(
    current: threading.local, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(source: FolderSource, device: torch.device, *options: object) -> None:
        assert current.device == device == SECOND
        raise Stop

    monkeypatch.setattr(building, "resolve_device", lambda name: SECOND)
    monkeypatch.setattr(FolderSource, "target", load)
    with pytest.raises(Stop):
        build(device="cuda:1")


def test_the_engines_thread_steps_on_the_device(current: threading.local, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[str, torch.device]] = set()
    for name in ("launch", "read"):
        real = getattr(Runner, name)

        def record(runner: Runner, *arguments: object, real=real) -> object:
            seen.add((threading.current_thread().name, current.device))
            return real(runner, *arguments)

        monkeypatch.setattr(Runner, name, record)
    with LLM(str(tiny_model()), drafter="none", num_pages=100) as llm:
        llm.engine.runner.device = SECOND
        llm.generate([1, 2], SamplingParams(temperature=0, max_tokens=4))
    assert seen == {("peregrine-engine", SECOND)}
    assert not hasattr(current, "device")  # this thread's own device is left alone


def test_a_cpu_has_no_current_device(current: threading.local) -> None:
    with current_device(torch.device("cpu")):
        assert not hasattr(current, "device")
