"""`peregrine bench contention`: shares of the speed alone, and busy processes that end with the measurement."""

import os
import resource
import subprocess
import sys
import time

import pytest

from peregrine.bench import contention, http
from processes import is_running


def test_shares_are_of_the_speed_alone_and_of_the_fair_share() -> None:
    line = contention.case(2, [(40.0, 10.0), (60.0, 30.0), (50.0, 20.0)], alone=[100.0, 80.0], fair=0.5)
    assert line["offline"] == {
        "tokens_per_s": 50.0,
        "slowest": 40.0,
        "fastest": 60.0,
        "share": 0.5,
        "of_fair_share": 1.0,
    }
    assert (line["http"]["share"], line["http"]["of_fair_share"]) == (0.25, 0.5)
    facts = {"model": "m", "tokens": 64, "threads": 2, "cores": 2, "load": 0.1, "cases": [line], "identical": True}
    shown = contention.show(facts).splitlines()
    assert shown[2].split() == ["2", "50%", "offline", "50.0", "40.0-60.0", "50%", "100%"]
    assert shown[-1] == "identical: yes"


def test_busy_processes_compute_and_end() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)  # of children that have ended
    with contention.busy_processes(2):
        pass
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime > before.ru_utime + before.ru_stime


@pytest.mark.parametrize("code", [contention.BUSY_LOOP, http.SERVER], ids=["busy", "server"])
def test_children_end_with_whoever_started_them(code: str) -> None:
    starter = (
        "import os, subprocess, sys\n"
        "from subprocess import DEVNULL, PIPE\n"
        "child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdin=PIPE, stdout=DEVNULL)\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    child = int(subprocess.run([sys.executable, "-c", starter, code], stdout=subprocess.PIPE, check=False).stdout)
    for _ in range(300):
        if not is_running(child):
            return
        time.sleep(0.1)
    os.kill(child, 9)
    raise AssertionError("it runs on")
