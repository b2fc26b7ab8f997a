"""The cores a process may use, and OpenMP's threads told not to spin, before torch loads their library."""

import os
import subprocess
import sys

import pytest

from peregrine import threads


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, threads.WAITING),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
    ],
)
def test_waiting_threads_sleep_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], told: dict[str, str]
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    threads.limit_spinning()
    assert os.environ == told


@pytest.mark.skipif(sys.platform != "linux", reason="torch uses GNU's OpenMP on Linux")
def test_openmp_is_told_before_torch_loads_it() -> None:
    names = ("OMP_WAIT_POLICY", *threads.WAITING)
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE", "PYTHONPATH": os.pathsep.join(sys.path)}
    code = "import peregrine.llm"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "GOMP_SPINCOUNT = '100'" in done.stderr or "_OPENMP" not in done.stderr


def test_threads_follow_the_cores_unless_openmp_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads.pick_threads(8) == (2, "this process may use 2 cores")
    assert threads.pick_threads(1)[0] == 1  # torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert threads.pick_threads(8) == (8, "OMP_NUM_THREADS")
