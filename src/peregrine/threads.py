"""How many cores this process may use, and how its OpenMP threads wait. Runs before torch is loaded: imports little.

Environment read here: OMP_NUM_THREADS, OMP_WAIT_POLICY, GOMP_SPINCOUNT, KMP_BLOCKTIME. The last two are set if the user
has set none of the three that say how to wait.
"""

import os
import sys

from peregrine.control_groups import cpu_quotas

# Compiled kernels have threads of their own (`kernels/runtime/cpu_team.py`); this is about torch's. An OpenMP kernel
# ends when all threads have arrived. Those that wait spin before they sleep: for 300,000 turns in GNU's library (10 ms
# where a turn is x86's `pause`), for 200 ms in LLVM's and Intel's, on cores that other threads need.
# 100 turns are what GNU's library itself takes where it has more threads than cores.
WAITING = {"GOMP_SPINCOUNT": "100", "KMP_BLOCKTIME": "0"}


def limit_spinning() -> None:
    """Let OpenMP's threads sleep at once when they wait, unless the user says otherwise; call it before torch loads."""
    if not {"OMP_WAIT_POLICY", *WAITING} & os.environ.keys():
        os.environ.update(WAITING)


def usable_cores() -> int:
    """Cores that this process may use: by its affinity, and by the CPU quotas of its control groups, rounded down."""
    count = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min([count, *map(int, cpu_quotas())]))


def pick_threads(current: int, ranks: int = 1) -> tuple[int, str]:
    """How many threads compute in each of `ranks` processes, given how many torch would use, and why."""
    if "OMP_NUM_THREADS" in os.environ:
        return current, "OMP_NUM_THREADS"
    cores = usable_cores()
    shared = f", shared by {ranks} ranks" if ranks > 1 else ""
    why = f"this process may use {cores} core{'s' if cores > 1 else ''}{shared}"
    return max(1, min(current, cores) // ranks), why
