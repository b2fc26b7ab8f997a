"""How two programs of Hopper's kernel for many rows share a tile, in Gluon: each has one part of the inputs.

Each sends the other its sums of half of the columns and finishes the other half, so that both end at the same time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from peregrine.kernels.linear.hopper_ring import CHUNK, HEIGHT


@gluon.jit
def for_other(chunks, part):  # type: ignore[no-untyped-def]
    """(the chunks that the other program of a pair finishes, those of this one): the first half is part 0's."""
    if len(chunks) == 4:
        sent = (gl.where(part == 0, chunks[2], chunks[0]), gl.where(part == 0, chunks[3], chunks[1]))
        own = (gl.where(part == 0, chunks[0], chunks[2]), gl.where(part == 0, chunks[1], chunks[3]))
    else:
        sent = (gl.where(part == 0, chunks[1], chunks[0]),)  # type: ignore[assignment]
        own = (gl.where(part == 0, chunks[0], chunks[1]),)  # type: ignore[assignment]
    return sent, own


@gluon.jit
def places(base, chunk):  # type: ignore[no-untyped-def]
    """Pointers to the elements of a chunk that lies at `base` in blocks of 8 by 8, each of them what a warp holds."""
    layout: gl.constexpr = chunk.type.layout
    rows, cols = gl.arange(0, HEIGHT, gl.SliceLayout(1, layout)), gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    return base + ((rows // 8 * (8 * CHUNK) + rows % 8 * 8)[:, None] + (cols // 8 * 64 + cols % 8)[None, :])


@gluon.jit
def exchanged(chunks, part, slot, partial, arrived):  # type: ignore[no-untyped-def]
    """The sums of this program's half of the columns, from both parts of the inputs.

    slot: of a pair and a group of warps in `partial`, where sums lie, and in `arrived`, where 1 means that they do.
    """
    sent, own = for_other(chunks, part)
    SENT: gl.constexpr = len(sent)
    for c in gl.static_range(SENT):
        gl.store(places(partial + ((slot + part) * SENT + c) * (HEIGHT * CHUNK), sent[c]), sent[c])
    gl.thread_barrier()
    gl.atomic_add(arrived + slot + part, 1, sem="release")
    while gl.atomic_cas(arrived + slot + 1 - part, 1, 0, sem="acquire") == 0:
        pass
    gl.thread_barrier()
    others = partial + (slot + 1 - part) * (SENT * HEIGHT * CHUNK)
    first = gl.load(places(others, own[0]), cache_modifier=".cg")
    if SENT == 2:
        second = gl.load(places(others + HEIGHT * CHUNK, own[1]), cache_modifier=".cg")
        sums = (first + own[0], second + own[1])
    else:
        sums = (first + own[0],)  # type: ignore[assignment]
    return sums
