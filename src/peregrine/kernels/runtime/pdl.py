"""How a kernel starts before the one before it has ended: programmatic dependent launch, in two words.

A kernel launched `early` starts once every program of the kernel before has called `release` or ended. Until its own
`wait` returns it may read weights alone, which nobody writes; after it, all that earlier kernels wrote. If the kernel
before released only after its own wait, all that was written before *that* kernel may be read as well: so decode
attention reads lengths and page tables early, because the kernel that turns queries and keys stands before it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from peregrine.kernels.runtime.gpu import starts_early

EARLY = tl.constexpr(starts_early())  # elsewhere kernels start in order, and have nothing to wait for


@triton.jit
def wait():  # type: ignore[no-untyped-def]
    """Until all that earlier kernels wrote is there."""
    if EARLY:
        gdc_wait()


@triton.jit
def release():  # type: ignore[no-untyped-def]
    """From now on the next kernel may start, if it was launched early."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def enter():  # type: ignore[no-untyped-def]
    """For kernels that have nothing to do early but to start: wait, then release."""
    wait()
    release()
