"""Which devices the ranks of a tensor-parallel engine are on, and the collectives between them.

Ranks with a GPU each use NCCL, ranks of a CPU gloo over loopback. NCCL refuses two ranks on one GPU: those go through
gloo and host memory, and every collective waits for the device. That is for tests of the split on one GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from peregrine.errors import ConfigError, EngineFault
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


def join(folder: str, rank: int, devices: Sequence[torch.device], pipes: tuple[Connection, ...]) -> Ranks:
    """Join the group of ranks that meet in a folder; they are on one machine."""
    known: Any = dist  # torch's stubs know little of this
    size, device = len(devices), devices[rank]
    store = known.FileStore(f"{folder}/store", size)
    together = len(set(devices)) == 1
    if device.type == "cuda" and not together:
        group: Group = nccl_group(store, rank, size)
    else:
        options = known.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=ANSWER_SECONDS)
        options._devices = [known.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group = TorchGroup(known.ProcessGroupGloo(store, rank, size, options))
        group = HostGroup(group) if device.type == "cuda" else group
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

    def send(self, x: Tensor) -> None:
        """Rank 0's x in every rank's x."""
        self._run(self.group.broadcast, x, 0)

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
class HostGroup:
    """A group of a CPU's tensors for ranks that share a GPU."""

    group: TorchGroup

    def gather(self, out: Tensor, own: Tensor) -> None:
        """Every rank's `own` one after the other in `out`."""
        host = torch.empty(out.shape, dtype=out.dtype)
        self.group.gather(host, own.cpu())
        out.copy_(host)

    def add(self, x: Tensor) -> None:
        """The sum of all ranks' x, which are whole numbers, in x."""
        host = x.cpu()
        self.group.add(host)
        x.copy_(host)

    def send(self, x: Tensor) -> None:
        """Rank 0's x in every rank's x."""
        host = x.cpu()
        self.group.send(host)
        x.copy_(host)

    def abort(self) -> None:
        """End collectives that wait for a rank which is gone."""
        self.group.abort()
