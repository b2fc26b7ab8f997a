"""The gather as a Triton kernel; `reference.py` says how it works."""

import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.gather.reference import Mailbox
from peregrine.kernels.runtime.gpu import launch

LOOK_EVERY = tl.constexpr(1024)  # reads of a flag between two reads of `stop` in host memory
MOST_READS = tl.constexpr(1 << 30)  # of a flag, about 10 minutes; then the kernel ends with an error


def gather(out: Tensor, own: Tensor, mailbox: Mailbox, programs: int, chunk: int) -> None:
    """`own` [n] i16 of all ranks, in order, in `out` [size * n]."""
    count = own.numel()
    launch(
        _gather,
        (min(programs, triton.cdiv(count, chunk)),),
        *(own, out, mailbox.addresses, mailbox.numbers, count),
        RANK=mailbox.rank,
        SIZE=mailbox.size,
        PROGRAMS=programs,
        CHUNK=chunk,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["count"])
def _gather(  # type: ignore[no-untyped-def]
    own,
    out,
    addresses,
    numbers,
    count,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    program = tl.program_id(0)
    number = tl.load(numbers + program)
    lanes = tl.arange(0, CHUNK)
    mine = tl.load(addresses + RANK)
    for chunk in range(program, tl.cdiv(count, CHUNK), tl.num_programs(0)):
        number += 1
        places = tl.cast(chunk, tl.int64) * CHUNK + lanes
        inside = places < count
        values = tl.load(own + places, mask=inside, other=0)
        for rank in tl.static_range(SIZE):
            there = _place(tl.load(addresses + rank), number, RANK, program, SIZE, PROGRAMS, CHUNK)
            tl.store(there + lanes, values, mask=inside)
        tl.debug_barrier()  # all of the program's stores come before its flags
        for rank in tl.static_range(SIZE):
            flag = tl.load(addresses + rank).to(tl.pointer_type(tl.int32)) + RANK * PROGRAMS + program
            tl.atomic_xchg(flag, number, sem="release", scope="sys")
        for rank in tl.static_range(SIZE):
            flag = mine.to(tl.pointer_type(tl.int32)) + rank * PROGRAMS + program
            _await(flag, number, tl.load(addresses + SIZE).to(tl.pointer_type(tl.int32)))
        tl.debug_barrier()  # all flags have been seen before its loads
        for rank in tl.static_range(SIZE):
            here = _place(mine, number, rank, program, SIZE, PROGRAMS, CHUNK)
            received = tl.load(here + lanes, mask=inside, other=0, volatile=True)
            tl.store(out + tl.cast(count, tl.int64) * rank + places, received, mask=inside)
    tl.store(numbers + program, number)


@triton.jit
def _place(  # type: ignore[no-untyped-def]
    memory, number, rank, program, SIZE: tl.constexpr, PROGRAMS: tl.constexpr, CHUNK: tl.constexpr
):
    """The buffer for what a rank's program sends in this exchange."""
    data = (memory + 4 * SIZE * PROGRAMS).to(tl.pointer_type(tl.int16))
    return data + (((number % 2) * SIZE + rank) * PROGRAMS + program) * CHUNK


@triton.jit
def _await(flag, number, stop):  # type: ignore[no-untyped-def]
    """Wait until a flag has reached this number; a device error if the host sets `stop`, or after MOST_READS."""
    reads = 0
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < number:
        reads += 1
        if reads % LOOK_EVERY == 0:  # noqa: SIM102  the kernel language has no `and` that leaves out a load
            if (tl.load(stop, volatile=True) != 0) | (reads >= MOST_READS):
                tl.inline_asm_elementwise("trap; mov.b32 $0, $1;", "=r,r", [reads], tl.int32, is_pure=False, pack=1)
