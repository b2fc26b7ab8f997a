"""Which tensors the compiled CPU kernels take, and how a compiled body is called, recorded and called again.

numba is optional and slow to import: only `cpu_cache.py`, `cpu_jit.py`, `cpu_team.py`, `cpu_words.py` and files whose
names end in `cpu.py` import it, and those are imported at the first call that needs them.
"""

import ctypes
import functools
import importlib
import importlib.util
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from peregrine.log import logger

NUMBA_PRESENT = importlib.util.find_spec("numba") is not None
FLOAT32 = torch.float32
FOLDERS = "linear", "norm", "copy", "residual", "rope", "activation", "attention", "sampling", "round"
FURTHER = "attention.plan_cpu", "round.places_cpu", "sampling.filters_cpu", "sampling.shares_cpu"
PLANNING = "spec.planner_cpu", "spec.odds_cpu", "spec.rows_cpu"
COMPILED = (*(f"kernels.{folder}.cpu" for folder in FOLDERS), *(f"kernels.{name}" for name in FURTHER), *PLANNING)
CLOSED = -1  # in the claim counter of a recorded call: those after it are not made
PIECES_PER_THREAD = 4  # enough to even out threads of unlike speed; long pieces read memory faster


def numba_ready(*tensors: Tensor) -> bool:
    """Whether compiled kernels take these: numba is installed, all are float32 on the CPU, no gradient is needed."""
    if not NUMBA_PRESENT:
        return False
    for tensor in tensors:
        if not tensor.is_cpu or tensor.dtype is not FLOAT32:
            return False
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))


def load_kernels() -> Iterator[str]:
    """Load every file with compiled functions, one name at a time; the first time on a machine this compiles them."""
    if not NUMBA_PRESENT:
        warn_without_numba()
    for name in COMPILED if NUMBA_PRESENT else ():
        yield name
        importlib.import_module(f"peregrine.{name}")


@functools.cache
def warn_without_numba() -> None:
    """Say, once, what its absence costs."""
    logger.warning("numba is not installed: generation takes about ten times as long; run: pip install numba")


def pieces_for(num_items: int, work: int, serial_work: int) -> int:
    """The number of pieces that independent items are cut into: one, if all the work is below `serial_work`."""
    return 1 if work < serial_work else min(num_items, PIECES_PER_THREAD * torch.get_num_threads())


class Team(Protocol):
    """The threads that kernels run on (`cpu_team.py`)."""

    run: Callable[[bytes], None]  # one call
    run_all: Callable[[Any, int], None]  # the calls at these addresses

    def helpers(self, wanted: int) -> int:
        """How many threads may help with a call."""


Call = tuple[Team, bytes, ctypes.c_int64]  # as it can be made again: its words, and the claim counter they point at


class _Recorder(threading.local):
    """What is recorded of this thread's kernel calls; None: nothing."""

    calls: list[Call] | None = None  # the calls themselves, see `cpu_graph.py`
    seconds: float | None = None  # the time spent in them


_recorder = _Recorder()


@contextmanager
def record_calls() -> Iterator[list[Call]]:
    """Record every kernel call that this thread makes inside the block."""
    calls: list[Call] = []
    before, _recorder.calls = _recorder.calls, calls
    try:
        yield calls
    finally:
        _recorder.calls = before


def is_recording() -> bool:
    """Whether this thread's kernel calls are recorded now: a replay inside would be lost."""
    return _recorder.calls is not None


def start_kernel_clock() -> None:
    """Add up the time that this thread spends in compiled kernels from now on; for benchmarks."""
    _recorder.seconds = 0.0


def stop_kernel_clock() -> float:
    """Seconds in compiled kernels since this thread's `start_kernel_clock`."""
    seconds, _recorder.seconds = _recorder.seconds, None
    return seconds or 0.0


def _run(function: Callable[..., None], *arguments: Any) -> None:
    """Call it, on this thread's kernel clock if that is started."""
    if _recorder.seconds is None:
        function(*arguments)
        return
    began = time.perf_counter()
    function(*arguments)
    _recorder.seconds += time.perf_counter() - began


class Replay:
    """Recorded calls, made again in order without Python between them, up to one that leaves its counter CLOSED."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        places = [ctypes.cast(ctypes.c_char_p(words), ctypes.c_void_p).value for _, words, _ in calls]
        self._places = (ctypes.c_void_p * len(places))(*places)

    def __call__(self) -> None:
        """Make them."""
        if self._calls:
            _run(self._calls[0][0].run_all, self._places, len(self._places))


class CpuKernel:
    """A compiled body, cut into pieces that threads claim one after the other.

    A call is a sequence of eight-byte words: the body's address, how many threads may help, and the block that the body
    gets: the address of the claim counter, the number of pieces, then the arguments in the order of `layout` ("q" an
    integer or address, "d" a float). Pieces must be independent: then neither the number of threads nor which of them
    claims a piece can change a bit.
    """

    def __init__(self, compiled: Any, layout: str, team: Team) -> None:
        self._compiled = compiled  # owns the machine code
        self._address: int = compiled.address
        self._pack = struct.Struct("qqqq" + layout).pack
        self._team = team

    def __call__(self, pieces: int, *arguments: float) -> None:
        """Run every piece once and return when all are done; other Python threads may run meanwhile."""
        claimed = ctypes.c_int64(0)
        helpers = self._team.helpers(min(pieces, torch.get_num_threads()) - 1) if pieces > 1 else 0
        call = self._pack(self._address, helpers, ctypes.addressof(claimed), pieces, *arguments)
        _run(self._team.run, call)
        if _recorder.calls is not None:
            _recorder.calls.append((self._team, call, claimed))
