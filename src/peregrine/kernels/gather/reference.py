"""An all-gather between ranks that have mapped each other's GPU memory: one kernel launch, which a CUDA graph can hold.

Each rank has a mailbox that all ranks can write. It holds, for every (sending rank, program), one flag and two buffers.
Program p of a rank sends its chunks one by one; the sending of one chunk is an exchange, and exchanges are counted:

1. Write the chunk into this rank's buffer of every mailbox.
2. Set this rank's flag of every mailbox to the number of the exchange.
3. Wait until the flags that program p of all ranks has in the own mailbox reach that number.
4. Read the chunks of all ranks from the own mailbox.

Odd and even exchanges use different buffers. When all flags say n, every rank has ended exchange n - 1, so exchange
n + 1 may overwrite what that one sent. A program waits only for the same program of other ranks, and programs start in
order, so there is no deadlock even if few of them run at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peregrine.kernels.runtime.dispatch import DeviceFile

_triton = DeviceFile("peregrine.kernels.gather.triton")

PROGRAMS = 64  # the most of one launch
CHUNK = 8192  # values of 2 bytes in one exchange


@dataclass(frozen=True, slots=True)
class Mailbox:
    """What one of `size` ranks needs for the gather."""

    rank: int
    size: int
    memory: Sequence[Tensor]  # the mailboxes of all ranks as mapped here, [mailbox_words] i32, zero at first
    addresses: Tensor  # [size + 1] i64: where each mailbox is, then where `stop` is
    stop: Tensor  # [1] i32 in pinned host memory; if the host sets it, waiting kernels end with a device error
    numbers: Tensor  # [PROGRAMS] i32: the number of each program's last exchange, zero at first

    @staticmethod
    def of(rank: int, memory: Sequence[Tensor]) -> "Mailbox":
        """For the rank that has mapped these mailboxes, its own among them."""
        device = memory[rank].device
        stop = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        addresses = torch.tensor([part.data_ptr() for part in (*memory, stop)], device=device)
        numbers = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
        return Mailbox(rank, len(memory), tuple(memory), addresses, stop, numbers)


def mailbox_words(size: int) -> int:
    """Words of 4 bytes in a mailbox for `size` ranks: the flags, then two buffers of 2-byte values for each flag."""
    return size * PROGRAMS * (1 + CHUNK)


def gather(out: Tensor, own: Tensor, mailbox: Mailbox) -> None:
    """`out` becomes `own` of rank 0, of rank 1, and so on, on all ranks; `own` has an even number of bytes."""
    _triton.gather(out.view(-1).view(torch.int16), own.view(-1).view(torch.int16), mailbox, PROGRAMS, CHUNK)


def gather_torch(out: Tensor, owns: Sequence[Tensor]) -> None:
    """The twin: all ranks' values are given, in one process."""
    out.copy_(torch.cat([own.flatten() for own in owns]).view(out.shape))
