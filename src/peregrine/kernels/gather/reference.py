"""Every rank's values on all ranks, through memory that the others can write: a launch that a CUDA graph can hold.

A rank's mailbox has a flag for each (rank, program) and two places for what each (rank, program) sends. Program p of
every rank writes its part of the rank's values into all mailboxes, then raises its flag there to the number of the
exchange, and waits until all flags of program p in its own mailbox are there, too. Exchanges use the two places in
turn: a rank that is at exchange n has read what came with n - 1, so that n + 1 may be written over it. A program waits
only for the same program of other ranks, and programs start in order: that ends even where few run at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peregrine.kernels.runtime.dispatch import DeviceFile

_triton = DeviceFile("peregrine.kernels.gather.triton")

PROGRAMS = 64  # of one exchange, at most
CHUNK = 8192  # values of 2 bytes that a program sends at once


@dataclass(frozen=True, slots=True)
class Mailbox:
    """What one rank of `size` needs to exchange values."""

    rank: int
    size: int
    memory: Sequence[Tensor]  # all ranks' [mailbox_words] i32 as this one has mapped them, zero at first
    addresses: Tensor  # [size + 1] i64 of that memory, then of `stop`
    stop: Tensor  # [1] i32 in pinned host memory; not 0: the exchange is given up, and the device has an error
    numbers: Tensor  # [PROGRAMS] i32 of each program's last exchange, zero at first

    @staticmethod
    def of(rank: int, memory: Sequence[Tensor]) -> "Mailbox":
        """The mailbox of a rank that has mapped the memory of all."""
        device = memory[rank].device
        stop = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        addresses = torch.tensor([part.data_ptr() for part in (*memory, stop)], device=device)
        numbers = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
        return Mailbox(rank, len(memory), tuple(memory), addresses, stop, numbers)


def mailbox_words(size: int) -> int:
    """Words of 4 bytes in the mailbox of each of `size` ranks: flags, then two places for what is sent."""
    return size * PROGRAMS * (1 + CHUNK)


def gather(out: Tensor, own: Tensor, mailbox: Mailbox) -> None:
    """Every rank's `own`, an even number of bytes, one after the other in `out`, on all ranks."""
    _triton.gather(out.view(-1).view(torch.int16), own.view(-1).view(torch.int16), mailbox, PROGRAMS, CHUNK)


def gather_torch(out: Tensor, owns: Sequence[Tensor]) -> None:
    """The same of all ranks' values in one process."""
    out.copy_(torch.cat([own.flatten() for own in owns]).view(out.shape))
