"""Run a batch and kill it at random moments, twenty times; prints how many lines the output had after each run.

    python tests/serve/kill_batch.py MODEL IN OUT

Each run is a fork of this process, which has imported everything and started no thread: importing torch twenty times
would take minutes.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from peregrine.kernels.runtime.cpu import load_kernels
from peregrine.llm import LLM
from peregrine.serve.batch import Batch
from peregrine.serve.batch_output import BatchOutput

KILLS = 20


def start_batch(model: str, source: Path, target: Path) -> int:
    """The process id of a batch that has just begun."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with BatchOutput(target) as output, LLM(model, drafter="none", num_pages=400) as llm:
            Batch(source, output, llm, "tiny").run()
        code = 0
    finally:
        os._exit(code)


def num_lines(target: Path) -> int:
    """Whole lines in the output."""
    return target.read_bytes().count(b"\n") if target.exists() else 0


def main(model: str, source: Path, target: Path) -> None:
    """Kill, run again, and let the last run end by itself."""
    list(load_kernels())
    torch.nn.Linear(1, 1, device="meta").to_empty(device="cpu")  # torch imports half of itself for this
    draw = random.Random(7)
    sizes, killed = [0], 0
    for kill in range(KILLS + 1):
        child = start_batch(model, source, target)
        if kill < KILLS:
            goal = sizes[-1] + draw.randint(0, 25)  # some are killed before they have written anything
            while num_lines(target) < goal:
                time.sleep(0.001)
            time.sleep(draw.uniform(0, 0.03))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        killed += os.WIFSIGNALED(status)
        sizes.append(num_lines(target))
    print(json.dumps({"sizes": sizes, "killed": killed, "last": os.waitstatus_to_exitcode(status)}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
