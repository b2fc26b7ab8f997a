"""What Linux's control groups (containers, systemd, Slurm) let this process use: cores and memory, versions 1 and 2."""

from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def cpu_quotas() -> Iterator[float]:
    """Cores that each group of this process allows."""
    for folder in _groups("cpu"):
        old = [_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        quota, period = _read(folder / "cpu.max").split() or old
        if quota.strip().isdigit() and float(period):  # "max" or -1: no limit
            yield float(quota) / float(period)


def memory_limits() -> Iterator[tuple[int, int]]:
    """Bytes that each group of this process may hold, and that are left; cached files can be dropped."""
    for folder in _groups("memory"):
        for limit, held, dropped in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, used = _read(folder / limit).strip(), _read(folder / held).strip()
            if most.isdigit() and used.isdigit():
                table = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
                yield int(most), max(0, int(most) - int(used) + int(table.get(dropped, 0)))


def _groups(controller: str) -> Iterator[Path]:
    """The folders of the groups that bind this process by a controller; a group is bound by those above it, too."""
    for line in _read(OWN).splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # Version 1 has a folder for each controller, or for several together, in an order of the system's own.
        roots = [CGROUPS / part for part in dict.fromkeys((controllers, controller))] if controllers else [CGROUPS]
        root = next((root for root in roots if root.is_dir()), roots[0])
        group = root / name.strip("/")  # inside a container often not there: the root is the container's own group
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
