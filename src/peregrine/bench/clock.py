"""Where the time of a round on a CPU goes, stage by stage.

torch.profiler is not used: it does not see the compiled kernels, which are no torch operations, and what it records of
each small operation takes about as long as the operation.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from peregrine.engine.engine import Engine
from peregrine.kernels.runtime.cpu import start_kernel_clock, stop_kernel_clock
from peregrine.spec.round import no_mark


class StageClock:
    """A runner's `mark` that adds up seconds by stage, and those spent in compiled kernels."""

    def __init__(self) -> None:
        self.rounds = 0
        self.seconds: dict[str, float] = defaultdict(float)
        self.kernel_seconds = 0.0
        self._stage, self._began = "", 0.0

    @property
    def round_seconds(self) -> float:
        """Seconds of all rounds, from launch to launched."""
        return sum(self.seconds.values())

    def __call__(self, stage: str) -> None:
        now = time.perf_counter()
        if self._stage:
            self.seconds[self._stage] += now - self._began
        match stage:
            case "launch":
                start_kernel_clock()
            case "launched":
                self.kernel_seconds += stop_kernel_clock()
                self.rounds += 1
        self._stage, self._began = "" if stage in ("launched", "wait", "read") else stage, now


@contextmanager
def timed_rounds(engine: Engine) -> Iterator[StageClock]:
    """Time the engine's rounds inside the block. It does not wait for a device, so it is for CPUs."""
    engine.runner.mark = clock = StageClock()
    try:
        yield clock
    finally:
        engine.runner.mark = no_mark
