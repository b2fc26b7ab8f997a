"""Run a batch and kill it at random moments, ten times; prints how many lines the output had after each run.

    python tests/serve/kill_batch.py MODEL IN OUT

Each run is a fork of this process, which has imported everything, has generated once to load all kernels, and has
started no thread: doing that in new processes would take a minute.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from threading import RLock

import torch
from tqdm import tqdm

from peregrine.engine.build import build_engine
from peregrine.kernels.runtime.cpu import load_kernels
from peregrine.llm import LLM, engine_config
from peregrine.sampling import SamplingParams
from peregrine.serve.batch import Batch, check_source
from peregrine.serve.batch_engines import LocalEngine
from peregrine.serve.batch_output import BatchOutput

KILLS = 10
OPTIONS: dict[str, object] = {"drafter": "none", "num_pages": 400}


def start_batch(model: str, source: Path, target: Path) -> int:
    """The process id of a batch that has just begun."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with BatchOutput(target) as output, LLM(model, **OPTIONS) as llm:
            wanted = check_source(source, "tiny")
            output.resume(wanted)
            Batch(source, output, LocalEngine(llm, "tiny"), wanted).run()
        code = 0
    finally:
        os._exit(code)


@torch.inference_mode()
def warm_up(model: str) -> None:
    """Generate a little with an engine that is stepped here, without a thread of its own."""
    list(load_kernels())
    engine = build_engine(engine_config(model, OPTIONS)).engine
    engine.enqueue(engine.prepare([5], SamplingParams(max_tokens=4)))
    while engine.has_work:
        engine.step()


def num_lines(target: Path) -> int:
    """Whole lines in the output."""
    return target.read_bytes().count(b"\n") if target.exists() else 0


def main(model: str, source: Path, target: Path) -> None:
    """Kill, run again, and let the last run end by itself."""
    # By default forks share a lock for progress bars, and a run that is killed with it would block all later ones.
    tqdm.monitor_interval = 0
    tqdm.set_lock(RLock())
    warm_up(model)
    draw = random.Random(7)
    sizes, killed = [0], 0
    for kill in range(KILLS + 1):
        child = start_batch(model, source, target)
        if kill < KILLS:
            goal = sizes[-1] + draw.randint(0, 25)  # some are killed before they have written anything
            while num_lines(target) < goal:
                time.sleep(0.001)
            time.sleep(draw.uniform(0, 0.01))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        killed += os.WIFSIGNALED(status)
        sizes.append(num_lines(target))
    print(json.dumps({"sizes": sizes, "killed": killed, "last": os.waitstatus_to_exitcode(status)}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
