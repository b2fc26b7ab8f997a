"""`peregrine batch --processes 2`, for real: an engine is killed, and a second run answers the rest. `make test-batch`.

The number of threads and the starting of processes are what `test_batch.py` leaves out.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from serve.processes import SRC
from serve.test_batch import read, request, write


def children(pid: int) -> list[int]:
    """The engines' processes of a batch; multiprocessing has one more, which tracks its resources."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_a_killed_engine_ends_the_run_and_the_next_one_goes_on(tmp_path: Path) -> None:
    asked = [request(str(i), prompt="Once upon a time", max_tokens=40, seed=i, ignore_eos=True) for i in range(200)]
    source, target = write(tmp_path / "in.jsonl", asked), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "peregrine.cli", "batch", str(source), str(target), "--processes", "2"]
    options = {"stderr": subprocess.PIPE, "text": True, "env": {**os.environ, "PYTHONPATH": str(SRC)}}
    running = subprocess.Popen(command, **options)  # type: ignore[call-overload]
    while not target.exists() or target.read_bytes().count(b"\n") < 20:
        assert running.poll() is None
        time.sleep(0.05)
    engines = children(running.pid)
    assert len(engines) == 2
    os.kill(engines[1], signal.SIGKILL)
    _, said = running.communicate(timeout=60)
    assert running.returncode not in (0, None)
    assert f"process {engines[1]} of the batch has ended (exit code -9); run it again" in said
    assert "Traceback" not in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in engines), "an engine was left running"
    before = target.read_bytes()
    assert 20 <= before.count(b"\n") < 200
    again = subprocess.run(command, **options, timeout=300, check=False)  # type: ignore[call-overload]
    assert again.returncode == 0, again.stderr
    lines = read(target)
    assert list(lines) == [line["custom_id"] for line in asked]
    kept = [json.loads(line) for line in before.splitlines()]
    assert all(lines[line["custom_id"]] == line for line in kept), "an answer was made again"
