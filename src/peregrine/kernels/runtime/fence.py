"""A fence that Triton 3.6 leaves out on Hopper."""

import triton
import triton.language as tl

from peregrine.kernels.runtime.pdl import PDL


@triton.jit
def fence_copies(step):  # type: ignore[no-untyped-def]
    """Let the matrix unit see what cp.async has copied to shared memory; call it before the products of a step.

    cp.async writes through the generic proxy and wgmma reads through the async proxy; the PTX memory model orders the
    two only by fence.proxy.async. Triton 3.6 leaves it out for pipelined loads (triton-lang/triton#9610 adds it), and
    wgmma may then multiply what its place in the ring held before. `step` is any integer that the loop changes.
    """
    if PDL:  # Hopper or later, and not the interpreter
        tl.inline_asm_elementwise(
            "fence.proxy.async.shared::cta; mov.u32 $0, $1;", "=r,r", [step], dtype=tl.int32, is_pure=False, pack=1
        )
