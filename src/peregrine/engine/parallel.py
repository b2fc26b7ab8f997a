"""The processes of a tensor-parallel engine. Rank 0 is the engine; it starts the others, which follow it.

A follower has the parts that rank 0 has (seats, rounds, recorded graphs), with its shards of the target and of the
drafter and its parts of their KV stores, and knows no requests: rank 0 tells it which call to make on which part.
Scheduling is rank 0's alone. A follower ends when rank 0 closes its pipe or is gone; a rank that is gone is an
EngineFault in the next collective of every other one, so nobody waits for it.
"""

import copyreg
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from operator import methodcaller
from tempfile import TemporaryDirectory
from typing import Any

import torch

from peregrine.attention.backend import AttentionBackend
from peregrine.cache.page_copies import PageCopies
from peregrine.cache.store import KVStore
from peregrine.config import EngineConfig
from peregrine.engine.followed_plan import followed
from peregrine.engine.graphs import Graphs
from peregrine.engine.memory import explain_memory, make_stores
from peregrine.engine.prompt_graphs import PromptGraphs
from peregrine.engine.rank_group import file_store, join
from peregrine.engine.round_plan import RoundPlan
from peregrine.engine.rounds import RoundOptions, Rounds
from peregrine.engine.sources import open_source
from peregrine.errors import ConfigError, EngineFault, PeregrineError
from peregrine.hardware import current_device
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT, load_kernels
from peregrine.kernels.runtime.gpu import TRITON_PRESENT
from peregrine.log import logger
from peregrine.models.config import ModelConfig
from peregrine.models.decoder import Decoder
from peregrine.models.parallel import ALONE, LOST, Ranks, possible_sizes
from peregrine.spec.registry import DraftSource, StoreShape
from peregrine.threads import pick_threads, usable_cores

END_SECONDS = 30
LEFT_SECONDS = 3  # that a rank has to end after rank 0
WATCH_SECONDS = 1
# Started by subprocess: multiprocessing would import the user's main program again in every rank.
BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from peregrine.engine.parallel import main; main()"
copyreg.pickle(RoundPlan, followed)


def check_ranks(asked: EngineConfig, device: torch.device, config: ModelConfig) -> str:
    """What each rank holds; ConfigError if so many ranks cannot share the model, or not on this machine."""
    size, cores = asked.tensor_parallel, usable_cores()
    heads, kv_heads = config.num_heads, config.num_kv_heads if config.mla is None else 1
    able, problem = possible_sizes(config), None
    if size not in able:
        known = ", ".join(map(str, able))
        problem = f"{heads} heads (KV heads: {kv_heads}) cannot be shared by so many ranks; choose one of {known}"
    elif not (NUMBA_PRESENT if device.type == "cpu" else TRITON_PRESENT):
        needed = "numba" if device.type == "cpu" else "triton"
        problem = f"needs compiled kernels, whose bits do not depend on how a layer is split; pip install {needed}"
    elif device.type == "cuda" and config.experts is not None and size > config.experts.num_experts:
        problem = f"each rank needs an expert; use at most {config.experts.num_experts}, their number"
    elif device.type == "cpu" and size > cores:
        problem = f"this process may use {cores} cores, and each rank needs one; use at most {cores}"
    if problem is not None:
        raise ConfigError(f"tensor_parallel={size}: {problem}")
    widths = Ranks(0, size).head_widths(heads, kv_heads, 1)
    own, own_kv = ("+".join(map(str, each)) for each in widths)
    return f"query heads {own}; " + ("every rank holds all latents" if config.mla else f"KV heads {own_kv}")


@dataclass(frozen=True, slots=True)
class Started:
    """This process as rank 0, and the processes of the others, if it has started them."""

    ranks: Ranks = ALONE
    processes: Sequence["subprocess.Popen[bytes]"] = ()

    @property
    def has_lost(self) -> bool:
        """Whether a rank has ended, which is the end of its pipe."""
        return any(has_ended(pipe, wait=False) for pipe in self.ranks.pipes)

    def check(self) -> None:
        """EngineFault if a rank has ended."""
        if self.has_lost:
            raise EngineFault(LOST)

    def watch(self, closing: threading.Event) -> None:
        """Wait until a rank ends, then abort the collectives in which this rank's device waits for it."""
        assert self.ranks.group is not None
        while not closing.wait(WATCH_SECONDS):
            if self.has_lost:
                self.ranks.group.abort()
                return


@contextmanager
def started_ranks(devices: Sequence[torch.device]) -> Iterator[Started]:
    """Rank 0 on the first of these devices, and the others started on theirs; they end with the context."""
    size = len(devices)
    if size == 1:
        yield Started()
        return
    pairs = [Pipe() for _ in range(size - 1)]
    processes: list[subprocess.Popen[bytes]] = []
    with TemporaryDirectory(prefix="peregrine-ranks-") as folder:
        try:
            for rank, (_, theirs) in enumerate(pairs, 1):
                pipe, silent = theirs.fileno(), subprocess.DEVNULL
                given = json.dumps([folder, rank, [str(device) for device in devices], pipe])
                command = [sys.executable, "-c", BOOT, json.dumps(sys.path), given]
                processes.append(subprocess.Popen(command, stdin=silent, stdout=silent, pass_fds=[pipe]))
                theirs.close()  # a rank that is gone is then the end of its pipe
            with lead(file_store(folder, size), devices, [ours for ours, _ in pairs]) as started:
                yield replace(started, processes=processes)
        finally:
            for process in processes:
                try:
                    process.wait(END_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


@contextmanager
def lead(store: object, devices: Sequence[torch.device], pipes: Sequence[Connection]) -> Iterator[Started]:
    """Be rank 0 of those at the other ends of these pipes, which end with the context."""
    closing = threading.Event()
    try:
        await_ranks(pipes)  # until all have started: joining the group would wait for one that cannot
        started = Started(join(store, 0, devices, tuple(pipes)))
        threading.Thread(target=started.watch, args=(closing,), name="peregrine-ranks", daemon=True).start()
        yield started
    finally:
        closing.set()
        for pipe in pipes:
            pipe.close()


def await_ranks(pipes: Sequence[Connection]) -> None:
    """Wait until every other rank has done what it was told; ConfigError with the first problem."""
    for rank, pipe in enumerate(pipes, 1):
        try:
            problem = pipe.recv()
        except EOFError:
            problem = "it ended while it started; what it wrote is above"
        if problem is not None:
            raise ConfigError(f"tensor_parallel={len(pipes) + 1}: rank {rank}: {problem}")


def main() -> None:
    """A follower's process."""
    folder, rank, names, number = json.loads(sys.argv[2])
    devices, ended = [torch.device(name) for name in names], threading.Event()  # this process is to end with rank 0
    follow(file_store(folder, len(names)), rank, devices, Connection(number), ended)
    os._exit(0)  # nothing is left to do; a library's thread that still ran aborted an interpreter on its way out


def follow(store: object, rank: int, devices: Sequence[torch.device], pipe: Connection, ended: threading.Event) -> None:
    """Be another rank than 0, which is at the other end of the pipe, until that ends; see `end_after`."""
    # Rank 0 gets these signals too, and may finish its requests first; this rank ends with it.
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.SIG_IGN)
    threading.Thread(target=end_after, args=(pipe, ended), name="peregrine-end", daemon=True).start()
    pipe.send(None)
    try:
        with torch.inference_mode(), current_device(devices[rank]):
            Follower(join(store, rank, devices, (pipe,)), devices[rank]).run()
    except (EOFError, ConnectionError):
        if devices[rank].type == "cuda":
            torch.cuda.synchronize()  # rank 0 may wait for its part of what is queued
    except EngineFault as fault:
        logger.error("rank %d: %s", rank, fault)
        sys.exit(1)


def end_after(pipe: Connection, ended: threading.Event, seconds: float = LEFT_SECONDS) -> None:
    """Wait until the other end of a pipe is gone, however its process ended; end this process if it goes on.

    It ends by itself if it waits for that pipe; but it may wait for its device, where rank 0's part never comes.
    """
    has_ended(pipe, wait=True)
    if not ended.wait(seconds):
        os._exit(1)


def has_ended(pipe: Connection, wait: bool) -> bool:
    """Whether the other end of a pipe is gone, or wait until it is."""
    if pipe.closed:
        return True
    ends = select.poll()
    ends.register(pipe.fileno(), 0)  # hang-ups are always reported
    return bool(ends.poll(None if wait else 0))


class Follower:
    """A rank other than 0: does what it is told until rank 0 ends."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks, self.device = ranks, device
        self.parts: dict[str, Any] = {"follower": self}  # that rank 0 calls
        self.networks: tuple[Decoder, DraftSource] | None = None
        self.stores: list[KVStore] = []
        self.copies: PageCopies | None = None
        self.graphs: Graphs[None] | None = None

    def run(self) -> None:
        """Follow; EOFError when rank 0 has closed or is gone."""
        while True:
            self.follow()

    def follow(self) -> bool:
        """Make the calls of the next message; False if that was the end of what is recorded."""
        method = ""
        for part, method, given in self.ranks.hear():
            methodcaller(method, *given)(self.parts[part])
        return method != "end"

    def load(self, model: str, dtype: torch.dtype, max_len: int, drafter: str) -> None:
        """Load this rank's shards."""
        if self.device.type == "cpu":
            torch.set_num_threads(pick_threads(torch.get_num_threads(), self.ranks.size)[0])
            for _ in load_kernels():
                pass
        self.__init__(self.ranks, self.device)  # type: ignore[misc]  # what the last model took is free
        remedy = "choose a smaller model, or more ranks"
        with self._answering(), explain_memory(self.device, "the model's weights", remedy):
            source = open_source(model)
            target = source.target(self.device, dtype, max_len, self.ranks)
            self.networks = target, source.drafter(drafter)(target)

    def make_stores(self, num_pages: int, page_size: int, kv_dtype: torch.dtype) -> None:
        """Make room for this rank's keys and values."""
        target, draft = self._loaded
        with self._answering():
            shapes = [StoreShape.of(network) for network in (target, draft.network) if network is not None]
            self.stores = make_stores(shapes, num_pages, page_size, kv_dtype, self.device)

    def make_rounds(self, backend: AttentionBackend, options: RoundOptions) -> None:
        """Put rounds together."""
        rounds = Rounds.make(*self._loaded, self.stores, backend, options)
        self.parts |= {"rounds": rounds, "seats": rounds.seats}

    def make_copies(self, num_slots: int) -> None:
        """Take this rank's host memory for evicted pages."""
        with self._answering():
            self.copies = PageCopies(self.stores, num_slots)

    def copy(self, *given: Any) -> None:
        """Copy pages to host memory or back, before anything else is done."""
        assert self.copies is not None
        methodcaller(*given)(self.copies)
        self.copies.join()

    def make_prompts(self, most: int, num_pages: int) -> None:
        """Make ready to record what rank 0 records."""
        self.graphs = Graphs(self.device)
        self.parts["prompts"] = PromptGraphs(self.parts["rounds"], self.graphs, most, num_pages)

    def record(self, key: Hashable) -> None:
        """Record the calls up to the next end, twice: to warm up, and what a replay repeats."""
        assert self.graphs is not None
        self.graphs.record(key, self._follow_to_end)

    def replay(self, key: Hashable) -> None:
        """Repeat what was recorded."""
        assert self.graphs is not None
        self.graphs.replay(key)

    def end(self) -> None:
        """What is recorded ends here."""

    @property
    def _loaded(self) -> tuple[Decoder, DraftSource]:
        assert self.networks is not None
        return self.networks

    def _follow_to_end(self) -> None:
        while self.follow():
            pass

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Take a step of starting, and answer with what is wrong with it."""
        try:
            yield
            self.ranks.pipes[0].send(None)
        except PeregrineError as error:
            self.ranks.pipes[0].send(str(error))
