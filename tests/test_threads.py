"""The cores a process may use, and OpenMP's threads told not to spin, before torch loads their library."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from peregrine import threads

GROUPS = "0::/app/web\n"
OLD_GROUPS = "4:memory:/m\n2:cpu,cpuacct:/app/web\n1:cpuset:/\n"


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


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("", {}, 8),
        (GROUPS, {"cpu.max": "max 100000"}, 8),
        (GROUPS, {"cpu.max": "250000 100000"}, 2),  # a container's own group is the root of what it sees
        (GROUPS, {"app/cpu.max": "350000 100000", "app/web/cpu.max": "max 100000"}, 3),
        (GROUPS, {"app/web/cpu.max": "50000 100000"}, 1),
        (GROUPS, {"app/web/cpu.max": "9900000 100000"}, 8),
        (OLD_GROUPS, {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 8),
        (OLD_GROUPS, {"cpu,cpuacct/app/cpu.cfs_quota_us": "400000", "cpu,cpuacct/app/cpu.cfs_period_us": "100000"}, 4),
    ],
)
def test_quotas_of_control_groups_limit_the_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, groups: str, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    read = threads._read
    monkeypatch.setattr(threads, "_read", lambda path: groups if path == Path("/proc/self/cgroup") else read(path))
    monkeypatch.setattr(threads, "CGROUPS", tmp_path)
    assert threads.usable_cores() == cores


def test_threads_follow_the_cores_unless_openmp_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads.pick_threads(8) == (2, "this process may use 2 cores")
    assert threads.pick_threads(1)[0] == 1  # torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert threads.pick_threads(8) == (8, "OMP_NUM_THREADS")
