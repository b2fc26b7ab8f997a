"""The processes of a tensor-parallel engine. Rank 0 is the engine; it starts the others, which follow it.

A follower holds its shards of the target and its part of the KV store, and knows no requests: rank 0 tells it which
window to read, which logits to compute and which path of a tree to move, and it does the same calls on the same data.
Scheduling, sampling and drafting are rank 0's alone. A follower ends when rank 0 closes its pipe or is gone; a rank
that is gone is an EngineFault in the next collective of every other one, so nobody waits for it.
"""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from peregrine.attention import AttentionMetadata
from peregrine.attention.routing import BACKENDS
from peregrine.config import MAX_RANKS, EngineConfig
from peregrine.engine.memory import explain_memory, make_stores, store_shape_of
from peregrine.engine.rank_group import join
from peregrine.engine.sources import open_source
from peregrine.errors import ConfigError, EngineFault, PeregrineError
from peregrine.hardware import current_device
from peregrine.kernels.round import Verdict
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT, load_kernels
from peregrine.kernels.runtime.gpu import TRITON_PRESENT
from peregrine.log import logger
from peregrine.models.config import ModelConfig
from peregrine.models.decoder import Decoder
from peregrine.models.parallel import ALONE, LOST, Ranks, fields_of
from peregrine.spec.bound import BoundModel
from peregrine.threads import pick_threads, usable_cores

END_SECONDS = 30
WATCH_SECONDS = 1
# Started by subprocess: multiprocessing would import the user's main program again in every rank.
BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from peregrine.engine.parallel import main; main()"


@dataclass(frozen=True, slots=True)
class LeadingModel(BoundModel):
    """The target on rank 0: every window that it reads is read by the other ranks as well."""

    ranks: Ranks

    def read(self, tokens: Tensor, metadata: AttentionMetadata, taps: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Read a window on all ranks: hidden [N, H] after the final norm, taps [N, len(taps) * H]."""
        self.ranks.tell("read", tokens=tokens, taps=tuple(taps), **fields_of(metadata))
        return BoundModel.read(self, tokens, metadata, taps)

    def fill(self, tokens: Tensor, metadata: AttentionMetadata, taps: Sequence[int]) -> Tensor | None:
        """Read a window on all ranks for its keys, values and taps alone."""
        self.ranks.tell("fill", tokens=tokens, taps=tuple(taps), **fields_of(metadata))
        return BoundModel.fill(self, tokens, metadata, taps)

    def move_path(self, past_lens: Tensor, verdict: Verdict, table: Tensor, page_size: int) -> None:
        """Move the accepted path's cache entries to the front of a tree's window, on all ranks."""
        self.ranks.tell("move_path", past_lens=past_lens, verdict=verdict.table, table=table, page_size=page_size)
        BoundModel.move_path(self, past_lens, verdict, table, page_size)


def lead(model: BoundModel, ranks: Ranks) -> BoundModel:
    """The target of rank 0, which tells the others what to read; they make their KV stores first."""
    if ranks.size == 1:
        return model
    store, backend = model.store, model.backend.name
    ranks.tell(
        "store", num_pages=store.num_pages, page_size=store.page_size, kv_dtype=store.keys.dtype, backend=backend
    )
    await_ranks(ranks.pipes)
    return LeadingModel(**fields_of(model), ranks=ranks)


def possible_sizes(config: ModelConfig) -> list[int]:
    """How many ranks can share a model's heads: with more ranks than KV heads, equally many for each."""
    kv_heads = config.num_kv_heads if config.mla is None else 1
    return [n for n in range(1, min(config.num_heads, MAX_RANKS) + 1) if n <= kv_heads or n % kv_heads == 0]


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
    elif asked.host_cache:
        problem = f"the host cache ({asked.host_cache:g} GiB) holds pages of one process; use host_cache=0, or 1 rank"
    elif device.type == "cuda" and config.experts is not None and size > config.experts.num_experts:
        problem = f"each rank needs an expert, and there are {config.experts.num_experts}; use at most so many"
    elif device.type == "cpu" and size > cores:
        problem = f"this process may use {cores} cores, and each rank needs one; use at most {cores}"
    if problem is not None:
        raise ConfigError(f"tensor_parallel={size}: {problem}")
    widths = Ranks(0, size).head_widths(heads, kv_heads, 1)
    own, own_kv = ("+".join(map(str, each)) for each in widths)
    return f"query heads {own}; " + ("every rank holds all latents" if config.mla else f"KV heads {own_kv}")


@dataclass(frozen=True, slots=True)
class Started:
    """This process as rank 0, and the processes of the others."""

    ranks: Ranks = ALONE
    processes: Sequence["subprocess.Popen[bytes]"] = ()

    @property
    def has_lost(self) -> bool:
        """Whether a rank has ended."""
        return any(process.poll() is not None for process in self.processes)

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
    pairs, closing = [Pipe() for _ in range(size - 1)], threading.Event()
    processes: list[subprocess.Popen[bytes]] = []
    with TemporaryDirectory(prefix="peregrine-ranks-") as folder:
        try:
            for rank, (_, theirs) in enumerate(pairs, 1):
                given = json.dumps([folder, rank, [str(device) for device in devices], theirs.fileno()])
                command = [sys.executable, "-c", BOOT, json.dumps(sys.path), given]
                processes.append(
                    subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
                    )
                )
                theirs.close()  # a rank that is gone is then the end of its pipe
            pipes = tuple(ours for ours, _ in pairs)
            await_ranks(pipes)  # until all have started: joining the group would wait for one that cannot
            started = Started(join(folder, 0, devices, pipes), processes)
            threading.Thread(target=started.watch, args=(closing,), name="peregrine-ranks", daemon=True).start()
            yield started
        finally:
            closing.set()
            for ours, _ in pairs:
                ours.close()
            for process in processes:
                try:
                    process.wait(END_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


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
    devices = [torch.device(name) for name in names]
    # Rank 0 gets these signals too, and may finish its requests first; this rank ends with it.
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.SIG_IGN)
    pipe = Connection(number)
    pipe.send(None)
    try:
        with torch.inference_mode(), current_device(devices[rank]):
            Follower(join(folder, rank, devices, (pipe,)), devices[rank]).run()
    except (EOFError, ConnectionError):
        pass
    except EngineFault as fault:
        logger.error("rank %d: %s", rank, fault)
        sys.exit(1)


class Follower:
    """A rank other than 0: does what it is told until rank 0 ends."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks, self.device = ranks, device
        self.decoder: Decoder | None = None
        self.model: BoundModel | None = None

    def run(self) -> None:
        """Follow; EOFError when rank 0 has closed or is gone."""
        while True:
            what, told = self.ranks.hear(self.device)
            if what in ("load", "store"):
                self._prepare(self._load if what == "load" else self._make_store, told)
            elif what == "head":
                assert self.decoder is not None
                self.decoder.head.forward(**told)
            else:
                self._follow(what, told)

    def _prepare(self, step: Any, told: dict[str, Any]) -> None:
        """Take a step of starting, and answer with what is wrong with it."""
        try:
            step(**told)
            self.ranks.pipes[0].send(None)
        except PeregrineError as error:
            self.ranks.pipes[0].send(str(error))

    def _load(self, model: str, dtype: torch.dtype, max_len: int) -> None:
        if self.device.type == "cpu":
            torch.set_num_threads(pick_threads(torch.get_num_threads(), self.ranks.size)[0])
            for _ in load_kernels():
                pass
        with explain_memory(self.device, "the model's weights", "choose a smaller model, or more ranks"):
            self.decoder = open_source(model).target(self.device, dtype, max_len, self.ranks)

    def _make_store(self, num_pages: int, page_size: int, kv_dtype: torch.dtype, backend: str) -> None:
        assert self.decoder is not None
        (store,) = make_stores([store_shape_of(self.decoder)], num_pages, page_size, kv_dtype, self.device)
        chosen = next(known for known in BACKENDS if known.name == backend)
        self.model = BoundModel(self.decoder, self.decoder.layer_attention(), store, chosen)

    def _follow(self, what: str, told: dict[str, Any]) -> None:
        """One call of `LeadingModel`."""
        model = self.model
        assert model is not None
        if what == "move_path":
            model.move_path(told["past_lens"], Verdict(told["verdict"]), told["table"], told["page_size"])
        else:
            tokens, taps = told.pop("tokens"), told.pop("taps")
            (model.read if what == "read" else model.fill)(tokens, AttentionMetadata(**told), taps)
