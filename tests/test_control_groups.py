"""What control groups allow: cores and memory, of both versions, with files as the kernel writes them."""

import os
import sys
from pathlib import Path

import pytest

from peregrine import control_groups, hardware, threads

GROUPS = "0::/app/web\n"
OLD_GROUPS = "4:memory:/m\n2:cpu,cpuacct:/app/web\n1:cpuset:/\n"
MIB = 2**20


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of control groups, of which this process is in those that `own` names."""
    monkeypatch.setattr(control_groups, "CGROUPS", tmp_path)
    monkeypatch.setattr(control_groups, "OWN", tmp_path / "own")
    return tmp_path


def make(folder: Path, own: str, files: dict[str, str]) -> None:
    for name, text in {"own": own, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


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
        (OLD_GROUPS, {"cpu/app/cpu.cfs_quota_us": "400000", "cpu/app/cpu.cfs_period_us": "100000"}, 4),
    ],
)
def test_quotas_limit_the_cores(
    write: Path, monkeypatch: pytest.MonkeyPatch, groups: str, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    make(write, groups, files)
    assert threads.usable_cores() == cores


@pytest.mark.parametrize(
    ("groups", "files", "total", "left"),
    [
        ("", {}, 64, 48),
        (GROUPS, {"memory.max": "max", "memory.current": str(9 * MIB)}, 64, 48),
        (GROUPS, {"app/memory.max": str(8 * MIB), "app/memory.current": str(5 * MIB)}, 8, 3),
        (
            GROUPS,
            {
                "app/memory.max": str(8 * MIB),
                "app/memory.current": str(5 * MIB),
                "app/memory.stat": f"anon {MIB}\ninactive_file {2 * MIB}",  # the kernel drops those first
            },
            8,
            5,
        ),
        (GROUPS, {"app/web/memory.max": str(100 * MIB), "app/web/memory.current": "0"}, 64, 48),
        (
            OLD_GROUPS,
            {"memory/m/memory.limit_in_bytes": str(2 * MIB), "memory/m/memory.usage_in_bytes": str(3 * MIB)},
            2,
            0,
        ),
    ],
)
def test_limits_are_what_is_left_of_memory(
    write: Path, monkeypatch: pytest.MonkeyPatch, groups: str, files: dict[str, str], total: int, left: int
) -> None:
    make(write, groups, files)
    monkeypatch.setattr(hardware, "read_text", lambda path: f"MemTotal: {64 * 1024} kB\nMemAvailable: {48 * 1024} kB\n")
    assert hardware.read_memory() == (total * MIB, left * MIB)
