"""`peregrine serve` as a process of its own, as it is or with an engine that breaks."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

SRC = Path(__file__).parents[2] / "src"
# Run before the command: the engine breaks in its first round after BREAK_AFTER of them.
BREAKING = """
import time
from peregrine.engine.engine import Engine
from peregrine.serve import router_routes, run
run.SHUTDOWN_S = run.GRACE_S = run.FAULT_S = 1
step, rounds = Engine.step, [0]
def breaking(engine):
    rounds[0] += bool(engine.running)
    while rounds[0] > {after}:
        {breaks}
    return step(engine)
Engine.step = breaking
router_routes.server_info = lambda service: time.sleep(1000)
"""
HANG, FAULT, PANIC = "time.sleep(0.01)", "raise MemoryError('no more')", "raise SystemExit('a panic')"


def breaking(breaks: str, after: int = 0) -> str:
    """A script for `process`: /server_info hangs in the event loop, and the engine breaks after some rounds."""
    return BREAKING.format(breaks=breaks, after=after)


@contextmanager
def process(*flags: str, script: str = "") -> Iterator[tuple["subprocess.Popen[str]", httpx.Client]]:
    """A server process, ready; `script` is run in it first."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    started = f"{script}\nimport sys\nfrom peregrine.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", started, "serve", "--port", str(port), "--num-pages", "600", *flags]
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            for _ in range(1200):
                try:
                    if http.get("/health").status_code == 200:
                        break
                except httpx.TransportError:
                    assert running.poll() is None, running.stderr and running.stderr.read()
                time.sleep(0.05)
            yield running, http
    finally:
        running.kill()
        running.wait()
