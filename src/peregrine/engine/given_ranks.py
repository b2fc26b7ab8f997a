"""Ranks of a tensor-parallel engine that are the processes of a torchrun: rank 0 is the engine, the others follow it.

    torchrun --nproc-per-node 2 program.py        # which makes an LLM(tensor_parallel=2) in every process

In rank 0 the program goes on with the engine; in the others it does not: they end, with code 0, when the engine does.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from multiprocessing.connection import Client, Listener
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import distributed as dist

from peregrine.engine.parallel import Started, follow, lead, started_ranks
from peregrine.errors import ConfigError

JOIN_SECONDS = 300  # that the processes have to get as far as this
ADDRESS = "address of rank 0"


def open_ranks(devices: Sequence[torch.device]) -> AbstractContextManager[Started]:
    """The ranks on these devices: the processes of a torchrun that are as many, or processes that are started."""
    known: Any = dist  # torch's stubs know little of this
    if len(devices) > 1 and dist.is_torchelastic_launched():
        if dist.is_initialized():
            store, rank, size = known.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
        else:
            store, rank, size = next(known.rendezvous("env://"))
        if size == len(devices):
            return given_ranks(known.PrefixStore("peregrine", store), rank, devices)
    return started_ranks(devices)


@contextmanager
def given_ranks(store: Any, rank: int, devices: Sequence[torch.device]) -> Iterator[Started]:
    """Rank 0 of processes that have met in a store; in another one it follows until rank 0 ends, then SystemExit."""
    size, limit = len(devices), timedelta(seconds=JOIN_SECONDS)
    if threading.current_thread() is not threading.main_thread():
        problem = "under torchrun engines are made in the main thread; a server starts its ranks itself, without it"
        raise ConfigError(f"tensor_parallel={size}: {problem}")
    if rank:
        store.set(f"rank {rank}", "")
        try:
            pipe = Client(store.get(ADDRESS).decode())
        except FileNotFoundError:
            raise ConfigError(f"tensor_parallel={size}: rank {rank} is on another machine than rank 0") from None
        pipe.send(rank)
        follow(store, rank, devices, pipe, ended := threading.Event())
        ended.set()  # the program may take its time to end
        raise SystemExit(0)
    with TemporaryDirectory(prefix="peregrine-ranks-") as folder, Listener(f"{folder}/rank0", backlog=size) as listener:
        store.set(ADDRESS, listener.address)
        try:
            store.wait([f"rank {other}" for other in range(1, size)], limit)
        except RuntimeError:
            problem = f"not every process of the torchrun has made its engine within {JOIN_SECONDS} s; all must"
            raise ConfigError(f"tensor_parallel={size}: {problem}") from None
        pipes = [listener.accept() for _ in range(1, size)]
        by_rank = dict(zip([pipe.recv() for pipe in pipes], pipes, strict=True))
        with lead(store, devices, [by_rank[other] for other in range(1, size)]) as started:
            yield started
