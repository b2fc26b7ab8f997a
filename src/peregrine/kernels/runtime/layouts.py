"""Layouts of tensors that Hopper's own kernels share."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def product_layout(columns: int) -> gl.NVMMADistributedLayout:
    """How four warps hold the result of a matrix instruction with this many columns: each has 16 of its rows."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
