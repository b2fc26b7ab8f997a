"""Programmatic dependent launch (PDL): a kernel starts before the previous one has ended.

A kernel launched with `pdl=True` starts once every program of the previous kernel has called `release` or ended. Until
its own `wait` returns it may read only what no kernel writes, such as weights; after it, everything that earlier
kernels wrote. A kernel whose next one reads only that early calls `release` at once.

If a kernel calls `release` only after its own `wait` (`enter`), then everything written before *that* kernel may be
read early by all that follow. The kernel that rotates queries and keys does: so attention reads lengths, page tables
and keys of earlier forwards early.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from peregrine.kernels.runtime.gpu import pdl_ready

PDL = tl.constexpr(pdl_ready())  # without it kernels run one after the other, and there is nothing to wait for


@triton.jit
def wait():  # type: ignore[no-untyped-def]
    """Return when everything that earlier kernels wrote can be read."""
    if PDL:
        gdc_wait()


@triton.jit
def release():  # type: ignore[no-untyped-def]
    """Let the next kernel start, if it is launched with PDL."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def enter():  # type: ignore[no-untyped-def]
    """Wait, then release: for kernels that read nothing before the previous kernel has ended."""
    wait()
    release()
