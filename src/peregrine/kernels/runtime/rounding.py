"""Rounding to half precision that Hopper's own kernels share."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def rounded(values, NUMBER: gl.constexpr, MOVES: gl.constexpr):  # type: ignore[no-untyped-def]
    """`values.to(NUMBER)`, two at a time; without MOVES it is computed here, whatever the compiler would do.

    Of values that are needed again the compiler converts one at a time, and it moves conversions behind products that
    they should go along with.
    """
    if gl.bfloat16 == NUMBER:
        both = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [values], gl.bfloat16, MOVES, 2)
    else:
        both = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [values], gl.float16, MOVES, 2)
    return both
