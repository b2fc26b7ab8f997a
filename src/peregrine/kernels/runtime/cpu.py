"""Which tensors the compiled CPU kernels take, and how a compiled body runs on torch's own threads.

numba is optional and slow to import: only `cpu_jit.py` and the `*_cpu.py` files import it, and those are
imported at the first call that needs them. Parallel bodies run on the OpenMP team that torch itself uses. A
second pool beside it would fight it for the cores, since the workers of both spin while they wait.
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

NUMBA_PRESENT = importlib.util.find_spec("numba") is not None
FLOAT32 = torch.float32
COMPILED = ("linear.cpu", "norm.cpu", "rope.cpu", "activation.cpu", "attention.cpu", "sampling.cpu", "round.cpu")
PIECES_PER_THREAD = 4  # enough to even out threads of unlike speed; long pieces read memory faster


def numba_ready(*tensors: Tensor) -> bool:
    """Whether compiled kernels may take these: numba is there, all float32 on the CPU, no gradient needed."""
    if not NUMBA_PRESENT:
        return False
    for tensor in tensors:
        if not tensor.is_cpu or tensor.dtype is not FLOAT32:
            return False
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))


def load_kernels() -> Iterator[str]:
    """Load every compiled kernel, one name at a time; the first time on a machine this compiles them."""
    for name in COMPILED if NUMBA_PRESENT else ():
        yield name
        importlib.import_module(f"peregrine.kernels.{name}")


def pieces_for(num_items: int, work: int, serial_work: int) -> int:
    """Into how many pieces to cut so many independent items: one, if all the work is below `serial_work`."""
    return 1 if work < serial_work else min(num_items, PIECES_PER_THREAD * torch.get_num_threads())


# One kernel call as it can be made again: its claim counter, what to call, with which arguments.
Call = tuple[ctypes.c_int64, Callable[..., Any], tuple[Any, ...]]


class _Notes(threading.local):
    """What is noted of this thread's kernel calls; None: nothing."""

    calls: list[Call] | None = None  # the calls themselves, see `cpu_graph.py`
    seconds: float | None = None  # the time spent in them


_notes = _Notes()


@contextmanager
def note_calls() -> Iterator[list[Call]]:
    """Note every kernel call that this thread makes inside the block."""
    calls: list[Call] = []
    before, _notes.calls = _notes.calls, calls
    try:
        yield calls
    finally:
        _notes.calls = before


def start_kernel_clock() -> None:
    """Add up the time that this thread spends in compiled kernels from now on; for benchmarks."""
    _notes.seconds = 0.0


def stop_kernel_clock() -> float:
    """Seconds in compiled kernels since this thread's `start_kernel_clock`."""
    seconds, _notes.seconds = _notes.seconds, None
    return seconds or 0.0


def run_calls(calls: Sequence[Call]) -> None:
    """Make noted calls again, in order."""
    began = time.perf_counter() if _notes.seconds is not None else 0.0
    for counter, function, arguments in calls:
        counter.value = 0
        function(*arguments)
    if _notes.seconds is not None:
        _notes.seconds += time.perf_counter() - began


class CpuKernel:
    """A compiled body, cut into pieces that the threads claim one after the other.

    The body gets one block of eight-byte words: where the claim counter lies, the number of pieces, then the
    arguments in the order of `layout` ("q" an integer or address, "d" a float). Pieces must be independent:
    then neither the number of threads nor who claimed what can change a bit.
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
        began = time.perf_counter() if _notes.seconds is not None else 0.0
        call[1](*call[2])
        if _notes.seconds is not None:
            _notes.seconds += time.perf_counter() - began
        if _notes.calls is not None:
            _notes.calls.append(call)


@functools.cache
def torch_team() -> Callable[[int, bytes, int, int], Any] | None:
    """`GOMP_parallel(body, block, threads, flags)` of the OpenMP runtime torch is linked to, if there is one.

    Without it kernels run on the calling thread.
    """
    try:
        # Looking a name up in torch's extension module searches the libraries it is linked to as well.
        team = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (OSError, AttributeError):
        return None
    team.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint]
    team.restype = None
    return team
