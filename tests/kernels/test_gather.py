"""The exchange of ranks that write each other's memory: two processes in Triton's interpreter, on shared memory."""

import multiprocessing
import time

import pytest
import torch
from torch import Tensor

from kernels.interpreted import needs_interpreter
from peregrine.kernels.gather import Mailbox, gather, gather_torch, mailbox_words, reference

pytestmark = needs_interpreter
SIZES = (3, 64, 65, 200, 1, 300, 64)  # values: parts of a chunk, one, several, and more than programs take at once
ROUNDS = len(SIZES) + 2
DTYPES = (torch.bfloat16, torch.float32, torch.int64)


def values(rank: int, round_: int) -> Tensor:
    """What a rank sends in an exchange."""
    size = SIZES[round_ % len(SIZES)]
    return (torch.arange(size) * 7 + 1000 * rank + 31 * round_).to(DTYPES[round_ % len(DTYPES)])


def exchange(rank: int, memory: list[Tensor], out: Tensor) -> None:
    """A rank's side of some exchanges; rank 1 begins when the others wait for it."""
    reference.PROGRAMS, reference.CHUNK = 2, 64
    mailbox, found = Mailbox.of(rank, memory), []
    if rank == 1:
        time.sleep(0.2)
    for round_ in range(ROUNDS):
        own = values(rank, round_)
        every = torch.empty(len(memory) * len(own), dtype=own.dtype)
        gather(every, own, mailbox)
        found.append(every.double())
    out.copy_(torch.cat(found))


def test_all_ranks_have_the_values_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 3
    monkeypatch.setattr(reference, "PROGRAMS", 2)
    monkeypatch.setattr(reference, "CHUNK", 64)
    memory = [torch.zeros(mailbox_words(size), dtype=torch.int32).share_memory_() for _ in range(size)]
    expected = []
    for round_ in range(ROUNDS):
        owns = [values(rank, round_) for rank in range(size)]
        every = torch.empty(size * len(owns[0]), dtype=owns[0].dtype)
        gather_torch(every, owns)
        expected.append(every.double())
    whole = torch.cat(expected)
    outs = [torch.zeros_like(whole).share_memory_() for _ in range(size)]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=exchange, args=(rank, memory, outs[rank])) for rank in range(size)]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(60)
            assert rank.exitcode == 0
    finally:
        for rank in ranks:
            rank.kill()
    for out in outs:
        assert torch.equal(out, whole)
