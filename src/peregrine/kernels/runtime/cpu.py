"""Which tensors the compiled CPU kernels take, and how a compiled body runs on torch's own threads.

numba is optional and slow to import: only `cpu_jit.py` and the folders' `cpu.py` files import it, and those are
imported at the first call that needs them. Parallel bodies run on the OpenMP threads that torch itself uses. A second
thread pool would compete with them for the cores, since the workers of both spin while they wait.
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
from typing import Any

import torch
from torch import Tensor

from peregrine.log import logger

NUMBA_PRESENT = importlib.util.find_spec("numba") is not None
FLOAT32 = torch.float32
COMPILED = ("linear.cpu", "norm.cpu", "rope.cpu", "activation.cpu", "attention.cpu", "sampling.cpu", "round.cpu")
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
    """Load every compiled kernel, one name at a time; the first time on a machine this compiles them."""
    if not NUMBA_PRESENT:
        warn_without_numba()
    for name in COMPILED if NUMBA_PRESENT else ():
        yield name
        importlib.import_module(f"peregrine.kernels.{name}")


@functools.cache
def warn_without_numba() -> None:
    """Say, once, what its absence costs."""
    logger.warning("numba is not installed: generation takes about three times as long; run: pip install numba")


def pieces_for(num_items: int, work: int, serial_work: int) -> int:
    """The number of pieces that independent items are cut into: one, if all the work is below `serial_work`."""
    return 1 if work < serial_work else min(num_items, PIECES_PER_THREAD * torch.get_num_threads())


# One kernel call as it can be made again: its claim counter, the function to call, its arguments.
Call = tuple[ctypes.c_int64, Callable[..., Any], tuple[Any, ...]]


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


def start_kernel_clock() -> None:
    """Add up the time that this thread spends in compiled kernels from now on; for benchmarks."""
    _recorder.seconds = 0.0


def stop_kernel_clock() -> float:
    """Seconds in compiled kernels since this thread's `start_kernel_clock`."""
    seconds, _recorder.seconds = _recorder.seconds, None
    return seconds or 0.0


def run_calls(calls: Sequence[Call]) -> None:
    """Make recorded calls again, in order."""
    began = time.perf_counter() if _recorder.seconds is not None else 0.0
    for counter, function, arguments in calls:
        counter.value = 0
        function(*arguments)
    if _recorder.seconds is not None:
        _recorder.seconds += time.perf_counter() - began


class CpuKernel:
    """A compiled body, cut into pieces that threads claim one after the other.

    The body gets one block of eight-byte words: the address of the claim counter, the number of pieces, then the
    arguments in the order of `layout` ("q" an integer or address, "d" a float). Pieces must be independent: then
    neither the number of threads nor which of them claims a piece can change a bit.
    """

    def __init__(self, compiled: Any, layout: str) -> None:
        self._compiled = compiled  # owns the machine code
        self._address: int = compiled.address
        self._pack = struct.Struct("qq" + layout).pack
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self._address)

    def __call__(self, pieces: int, *arguments: float) -> None:
        """Run every piece once and return when all are done; other Python threads may run meanwhile."""
        claimed = ctypes.c_int64(0)
        block = self._pack(ctypes.addressof(claimed), pieces, *arguments)
        threads = torch.get_num_threads() if pieces > 1 else 1
        team = torch_team() if threads > 1 else None
        call: Call = (claimed, self._alone, (block,))
        if team is not None:
            call = (claimed, team, (self._address, block, min(pieces, threads), 0))
        began = time.perf_counter() if _recorder.seconds is not None else 0.0
        call[1](*call[2])
        if _recorder.seconds is not None:
            _recorder.seconds += time.perf_counter() - began
        if _recorder.calls is not None:
            _recorder.calls.append(call)


@functools.cache
def torch_team() -> Callable[[int, bytes, int, int], Any] | None:
    """`GOMP_parallel(body, block, threads, flags)` of the OpenMP runtime that torch is linked to, if there is one.

    It runs the body on all threads of the team and returns when they are done. Compilers emit calls of it for `#pragma
    omp parallel`, so it is a stable interface of libgomp, and libomp offers it too. Without it kernels run on the
    calling thread.
    """
    try:
        # A name looked up in torch's extension module is also searched in the libraries that it is linked to.
        team = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (OSError, AttributeError):
        return None
    team.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint]
    team.restype = None
    return team
