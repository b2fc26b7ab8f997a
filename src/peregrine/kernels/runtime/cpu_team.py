"""The threads that compiled CPU kernels run on.

The pieces of a kernel are claimed one after the other by whoever is free. So the thread that calls a kernel works as
well, and nobody waits for a thread that has claimed nothing: one that sleeps, or that another process has pushed off
its core, costs nothing but its help. The caller waits only for those that are inside the kernel when no piece is left.
(An OpenMP team waits for all of its threads at the end of every kernel: beside a busy process a server had a tenth of
its speed, and with threads that sleep at once, to mend that, a seventh less when the machine was idle.)

A thread that has nothing to do spins for `SPIN_US`, then it sleeps: to wake it takes as long as a small kernel, and the
Python between two kernels is mostly shorter than `SPIN_US`. Four times as long was no faster on an idle machine, and
slower beside busy processes, where a thread that spins uses up its turn and is then preempted inside a kernel.

The gate is one word: open (bit 0), threads inside (bits 1 to 31), threads that may be inside (bits 32 and up). A thread
enters by a compare-and-swap while the gate is open, and the caller closes it before it returns: so whoever is inside
may read the call, and nobody reads it later.

Imports numba: only `cpu_jit.py` may import this one.
"""

import atexit
import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from numba import njit, types

from peregrine.kernels.runtime.cpu_cache import compile_cached
from peregrine.kernels.runtime.cpu_words import add, invoke, pause, read, swap_if, write

SPIN_US = 50.0
LINE = 16  # words; two cache lines, since some CPUs load them in pairs
# Words of the team's memory, each far from the others: threads write them at the same time.
GATE, EPOCH, CALL, SLEEPERS, AWAITED, OWNED, STOPPED, SETTINGS = (LINE * index for index in range(8))
SPIN, MUTEX, WORK, DONE, LOCK, UNLOCK, WAIT, BROADCAST = range(SETTINGS, SETTINGS + 8)
POSIX = 64  # words for each mutex and condition variable: more than any system needs
TEAM_WORDS = SETTINGS + LINE + 3 * POSIX
INSIDE = 0xFFFFFFFE


@njit
def lock(team):  # type: ignore[no-untyped-def]
    """Take the team's mutex."""
    invoke(read(team + 8 * LOCK), read(team + 8 * MUTEX), 0)


@njit
def unlock(team):  # type: ignore[no-untyped-def]
    """Give the team's mutex back."""
    invoke(read(team + 8 * UNLOCK), read(team + 8 * MUTEX), 0)


@njit
def wait(team, condition):  # type: ignore[no-untyped-def]
    """Sleep until the condition variable is signalled; the mutex is free meanwhile."""
    invoke(read(team + 8 * WAIT), read(team + 8 * condition), read(team + 8 * MUTEX))


@njit
def wake(team, condition):  # type: ignore[no-untyped-def]
    """Wake all who sleep on a condition variable."""
    lock(team)
    invoke(read(team + 8 * BROADCAST), read(team + 8 * condition), 0)
    unlock(team)


@njit
def await_call(team, seen):  # type: ignore[no-untyped-def]
    """Wait for an epoch other than `seen`."""
    for _ in range(read(team + 8 * SPIN)):
        if read(team + 8 * EPOCH) != seen:
            return
        pause()
    lock(team)
    add(team + 8 * SLEEPERS, 1)  # from here on whoever begins an epoch wakes this thread
    while read(team + 8 * EPOCH) == seen:
        wait(team, WORK)
    add(team + 8 * SLEEPERS, -1)
    unlock(team)


@njit
def await_helpers(team):  # type: ignore[no-untyped-def]
    """Wait until nobody is inside."""
    for _ in range(read(team + 8 * SPIN)):
        if read(team + 8 * GATE) & INSIDE == 0:
            return
        pause()
    lock(team)
    write(team + 8 * AWAITED, 1)
    while read(team + 8 * GATE) & INSIDE != 0:
        wait(team, DONE)
    write(team + 8 * AWAITED, 0)
    unlock(team)


@njit
def begin_epoch(team):  # type: ignore[no-untyped-def]
    """Let every thread of the team look at the gate."""
    add(team + 8 * EPOCH, 1)
    if read(team + 8 * SLEEPERS) > 0:
        wake(team, WORK)


def run(team, call):  # type: ignore[no-untyped-def]
    """Run the body of one call (see `CpuKernel`) on this thread and on those of the team that come in time."""
    body, helpers, block = read(call), read(call + 8), call + 16
    write(read(block), 0)  # no piece is claimed
    if helpers == 0 or not swap_if(team + 8 * OWNED, 0, 1):  # or another thread has the team: do without
        invoke(body, block, 0)
        return
    write(team + 8 * CALL, call)
    write(team + 8 * GATE, (helpers << 32) | 1)
    begin_epoch(team)
    invoke(body, block, 0)
    if add(team + 8 * GATE, -1) & INSIDE != 0:  # closed now
        await_helpers(team)
    write(team + 8 * OWNED, 0)


run_inside = njit(run)


def run_all(team, calls, count):  # type: ignore[no-untyped-def]
    """Run the calls whose addresses stand in `calls`, in order, up to one that leaves its claim counter below zero."""
    for index in range(count):
        call = read(calls + 8 * index)
        run_inside(team, call)
        if read(read(call + 16)) < 0:
            return


def serve(team):  # type: ignore[no-untyped-def]
    """What a thread of the team does until the team is stopped."""
    seen = 0
    while read(team + 8 * STOPPED) == 0:
        await_call(team, seen)
        seen = read(team + 8 * EPOCH)
        gate = read(team + 8 * GATE)
        while gate & 1 == 1 and (gate & INSIDE) >> 1 < gate >> 32:  # open, and there is room
            if swap_if(team + 8 * GATE, gate, gate + 2):
                call = read(team + 8 * CALL)
                invoke(read(call), call + 16, 0)
                if add(team + 8 * GATE, -2) & (INSIDE | 1) == 0 and read(team + 8 * AWAITED) == 1:
                    wake(team, DONE)
                break
            gate = read(team + 8 * GATE)


def stop(team):  # type: ignore[no-untyped-def]
    """End the threads of the team."""
    write(team + 8 * STOPPED, 1)
    begin_epoch(team)


def spin(turns):  # type: ignore[no-untyped-def]
    """Pause so many times."""
    for _ in range(turns):
        pause()


WORD = types.int64


class CpuTeam:
    """Threads that help with kernels. They are started when a call first asks for them."""

    def __init__(self) -> None:
        self._memory = (ctypes.c_int64 * TEAM_WORDS)()
        self._address = ctypes.addressof(self._memory)
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()
        self._code: list[Any] = []  # owns the machine code
        run_one = self._compile(run, [WORD, WORD], [ctypes.c_void_p, ctypes.c_char_p])
        run_many = self._compile(run_all, [WORD, WORD, WORD], [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64])
        self.run: Callable[[bytes], None] = functools.partial(run_one, self._address)
        self.run_all: Callable[[Any, int], None] = functools.partial(run_many, self._address)

    def _compile(self, body: Callable[..., None], kinds: list[Any], argument_types: list[Any]) -> Callable[..., None]:
        """A compiled function of this file, as one that Python calls without holding the GIL."""
        self._code.append(compile_cached(body, types.void(*kinds)))
        return ctypes.CFUNCTYPE(None, *argument_types)(self._code[-1].address)

    def helpers(self, wanted: int) -> int:
        """How many threads may help: `wanted`, started if need be, or none where there are no POSIX threads."""
        if wanted > len(self._threads) and os.name == "posix":
            with self._starting:
                self._start(wanted)
        return min(wanted, len(self._threads))

    def _start(self, wanted: int) -> None:
        if not self._threads:
            self._prepare()
        serve_team = self._compile(serve, [WORD], [ctypes.c_void_p])
        while len(self._threads) < wanted:
            name = f"peregrine-cpu-{len(self._threads) + 1}"
            thread = threading.Thread(target=serve_team, args=(self._address,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _prepare(self) -> None:
        """Fill the settings: how many turns `SPIN_US` are, the system's functions, and what they work on."""
        system = ctypes.CDLL(None)
        places = [self._address + 8 * (SETTINGS + LINE + POSIX * index) for index in range(3)]
        for place, name in zip(places, ("mutex", "cond", "cond"), strict=True):
            system[f"pthread_{name}_init"](ctypes.c_void_p(place), None)
        names = ("pthread_mutex_lock", "pthread_mutex_unlock", "pthread_cond_wait", "pthread_cond_broadcast")
        functions = [ctypes.cast(system[name], ctypes.c_void_p).value or 0 for name in names]
        self._memory[SPIN : BROADCAST + 1] = [int(SPIN_US * self._turns_per_us()), *places, *functions]
        stop_team = self._compile(stop, [WORD], [ctypes.c_void_p])
        atexit.register(self._end, stop_team)
        os.register_at_fork(after_in_child=self._disband)

    def _turns_per_us(self) -> float:
        """Turns in a microsecond, by the best of a few tries: something may come between."""
        pause_often, turns = self._compile(spin, [WORD], [ctypes.c_int64]), 2000
        seconds = []
        for _ in range(9):
            began = time.perf_counter()
            pause_often(turns)
            seconds.append(time.perf_counter() - began)
        return turns / (1e6 * min(seconds))

    def _disband(self) -> None:
        """A forked process has none of the threads: there the team is never free, and callers work alone."""
        self._memory[OWNED], self._memory[SLEEPERS] = 1, 0

    def _end(self, stop_team: Callable[[int], None]) -> None:
        """End the threads before Python takes down the machine code that they run."""
        stop_team(self._address)
        for thread in self._threads:
            thread.join()
