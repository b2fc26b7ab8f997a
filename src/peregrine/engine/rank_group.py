"""Which devices the ranks of a tensor-parallel engine are on, and the collectives between them.

Ranks with a GPU each use NCCL, ranks of a CPU gloo over loopback. NCCL refuses two ranks on one GPU: those write into
each other's memory (`kernels/gather`). They take turns on the GPU, so this is for tests of the split on one GPU. What
GPUs exchange is launched as kernels are: a CUDA graph holds it.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

from peregrine.errors import ConfigError, EngineFault
from peregrine.kernels.gather import Mailbox, gather, mailbox_words
from peregrine.models.parallel import LOST, Group, Ranks

ANSWER_SECONDS = 600  # how long a rank waits for another one that has not ended


def rank_devices(device: torch.device, size: int) -> tuple[torch.device, ...]:
    """A device for each rank: the CPU for all, or a GPU for each, from the given one on."""
    if device.type == "cpu" or size == 1:
        return (device,) * size
    first, count = device.index or 0, torch.cuda.device_count()
    if first + size > count:
        raise ConfigError(
            f"tensor_parallel={size}: every rank needs a GPU of its own, and from {device} on there "
            f"{'is' if count - first == 1 else 'are'} {count - first}; use at most {count - first}, or device=cpu"
        )
    return tuple(torch.device("cuda", first + rank) for rank in range(size))


def file_store(folder: str, size: int) -> object:
    """A folder in which ranks meet."""
    known: Any = dist  # torch's stubs know little of this
    return known.FileStore(f"{folder}/store", size)


def join(store: object, rank: int, devices: Sequence[torch.device], pipes: tuple[Connection, ...]) -> Ranks:
    """Join the group of ranks that meet in a store; they are on one machine."""
    known: Any = dist
    size, device = len(devices), devices[rank]
    together = len(set(devices)) == 1
    if device.type == "cuda" and not together:
        group: Group = nccl_group(store, rank, size)
    elif device.type == "cuda":
        group = SharedGroup.join(store, rank, size, device)
    else:
        options = known.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=ANSWER_SECONDS)
        options._devices = [known.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group = TorchGroup(known.ProcessGroupGloo(store, rank, size, options))
    return Ranks(rank, size, group, pipes, together)


def nccl_group(store: object, rank: int, size: int) -> "TorchGroup":
    """Collectives of GPUs, which are queued on the device's current stream and wait there."""
    known: Any = dist
    options = known.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=ANSWER_SECONDS)
    return TorchGroup(known.ProcessGroupNCCL(store, rank, size, options), aborts=True)


@dataclass(frozen=True, slots=True)
class TorchGroup:
    """A process group of torch, whose tensors are where it wants them."""

    group: Any
    aborts: bool = False  # whether its collectives wait on the device, until they are aborted

    def gather(self, out: Tensor, own: Tensor) -> None:
        """Every rank's `own` one after the other in `out`."""
        self._run(self.group._allgather_base, out, own)

    def add(self, x: Tensor) -> None:
        """The sum of all ranks' x, which are whole numbers, in x."""
        self._run(self.group.allreduce, x)

    def abort(self) -> None:
        """End collectives that wait for a rank which is gone; on a CPU they end by themselves."""
        if self.aborts:
            self.group.abort()

    def _run(self, collective: Any, data: Tensor, *others: object) -> None:
        if data.numel():  # of no rows there is nothing to send
            try:
                collective(data, *others).wait()
            except RuntimeError as error:
                raise EngineFault(LOST) from error


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """Ranks on one GPU, which write into each other's memory."""

    mailbox: Mailbox

    @staticmethod
    def join(store: Any, rank: int, size: int, device: torch.device) -> "SharedGroup":
        """Map the memory of all ranks."""
        own = torch.zeros(mailbox_words(size), dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)  # it is zero before another rank can write to it
        store.set(f"memory {rank}", pickle.dumps(reduce_tensor(own)))  # type: ignore[no-untyped-call]
        memory = [own] * size
        for other in range(size):
            if other != rank:
                rebuild, values = pickle.loads(store.get(f"memory {other}"))
                memory[other] = rebuild(*values)
        return SharedGroup(Mailbox.of(rank, memory))

    def gather(self, out: Tensor, own: Tensor) -> None:
        """Every rank's `own` one after the other in `out`."""
        if own.numel():
            gather(out, own, self.mailbox)

    def add(self, x: Tensor) -> None:
        """The sum of all ranks' x, which are whole numbers, in x."""
        x.copy_(self._every(x).sum(dim=0, dtype=x.dtype))

    def _every(self, x: Tensor) -> Tensor:
        """Every rank's x: [size, *x.shape]."""
        every = x.new_empty(self.mailbox.size, *x.shape)
        self.gather(every, x.contiguous())
        return every

    def abort(self) -> None:
        """End exchanges that wait for a rank which is gone, by an error of the device."""
        self.mailbox.stop.fill_(1)
