"""What a group of warps does with a block of keys in `hopper_prompt.py`: the arithmetic of `blocks.py`, in Gluon.

`scores_of` and `add_values` start the products; `weigh` makes weights of scores, `rescaled` follows a top that moved,
and `add_split` merges a split's state into the total. A group has HALF rows of a tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from peregrine.kernels.attention import plan
from peregrine.kernels.attention.blocks import LOWEST
from peregrine.kernels.attention.hopper import BLOCK, WIDTH, next_top
from peregrine.kernels.runtime.layouts import product_layout
from peregrine.kernels.runtime.rounding import rounded

HALF = gl.constexpr(plan.PROMPT_TILE // 2)  # query rows of one group of warps


@gluon.jit
def scores_of(q_tile, k_tiles, place, zero, COLUMNS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start the product of queries and one block of keys."""
    k_tile = k_tiles.index(place * COLUMNS)._reinterpret(k_tiles.dtype, [BLOCK, COLUMNS * WIDTH], k_tiles.layout)
    return warpgroup_mma(q_tile, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def larger_halves(scores):  # type: ignore[no-untyped-def]
    """The larger of the left and the right half of the columns: many short chains instead of a long one."""
    WIDE: gl.constexpr = scores.shape[1] // 2
    product: gl.constexpr = product_layout(WIDE)
    left, right = gl.split(gl.permute(gl.reshape(scores, [HALF, 2, WIDE]), [0, 2, 1]))
    left = gl.convert_layout(left, product, assert_trivial=True)
    return gl.maximum(left, gl.convert_layout(right, product, assert_trivial=True))


@gluon.jit
def weigh(scores, m_i, start, limit, min_limit, begins, factor, NUMBER: gl.constexpr):  # type: ignore[no-untyped-def]
    """(weights, top, what the state so far is multiplied with) of one more block of a split."""
    layout: gl.constexpr = scores.type.layout
    if start + BLOCK > min_limit:  # some rows do not see some keys
        index = start + gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
        scores = gl.where(index[None, :] < limit[:, None], scores, float("-inf"))
    largest = gl.max(larger_halves(larger_halves(scores)), axis=1)
    largest = gl.convert_layout(largest, gl.SliceLayout(1, layout), assert_trivial=True)
    m_i = gl.where(begins, LOWEST, m_i)
    new_m = next_top(m_i, largest * factor)
    weights = gl.exp2(gl.fma(scores, factor, -new_m[:, None]))
    return rounded(weights, NUMBER, False), new_m, gl.exp2(m_i - new_m)


@gluon.jit
def add_values(p, v_tiles, place, ones, l_i, acc, begins, COLUMNS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start the products of weights with ones and with a block of values; a split's first block starts from zero."""
    v_tile = v_tiles.index(place * COLUMNS)._reinterpret(v_tiles.dtype, [BLOCK, COLUMNS * WIDTH], v_tiles.layout)
    p_l = gl.convert_layout(p, gl.DotOperandLayout(0, l_i.type.layout, 2), assert_trivial=True)
    p_acc = gl.convert_layout(p, gl.DotOperandLayout(0, acc.type.layout, 2), assert_trivial=True)
    l_i = warpgroup_mma(p_l, ones.permute((1, 0)), l_i, use_acc=not begins, is_async=True)
    return l_i, warpgroup_mma(p_acc, v_tile, acc, use_acc=not begins, is_async=True)


@gluon.jit
def add_split(total_m, total_l, total, m_i, l_i, acc):  # type: ignore[no-untyped-def]
    """The total after one more split, whose state is (m_i, l_i, acc)."""
    new_m = next_top(total_m, m_i)
    kept, added = gl.exp2(total_m - new_m), gl.exp2(m_i - new_m)
    total_l = gl.fma(l_i, in_rows_of(l_i, added), rescaled(total_l, kept))
    return new_m, total_l, gl.fma(acc, in_rows_of(acc, added), rescaled(total, kept))


@gluon.jit
def in_rows_of(values, factors):  # type: ignore[no-untyped-def]
    """Factors of the rows of a matrix, for every column."""
    column = gl.convert_layout(factors, gl.SliceLayout(1, values.type.layout), assert_trivial=True)[:, None]
    return gl.broadcast(values, column)[1]


@gluon.jit
def rescaled(values, factors):  # type: ignore[no-untyped-def]
    """Each row times its factor. A warp whose factors are all 1 leaves it out: tops seldom move, and bits stay."""
    COUNT: gl.constexpr = values.shape[0] * values.shape[1] // 128  # values of a thread
    code: gl.constexpr = rescaling_code(COUNT)
    operands: gl.constexpr = rescaling_operands(COUNT)
    return gl.inline_asm_elementwise(code, operands, [values, in_rows_of(values, factors)], gl.float32, True, COUNT)


@gluon.constexpr_function
def rescaling_code(count: int) -> str:
    """PTX: `count` values times as many factors, unless those of all threads are 1. A thread has two rows."""
    first, second = f"${2 * count}", f"${2 * count + 2}"  # two neighbours of a row, then two of the other
    moved = f"setp.neu.f32 p, {first}, 0f3F800000; setp.neu.or.f32 p, {second}, 0f3F800000, p;"
    skip = "vote.sync.any.pred p, p, 0xffffffff; @!p bra done;"
    products = " ".join(f"mul.rn.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    return f"{{ .reg .pred p; {moved} {skip} {products} done: }}"


@gluon.constexpr_function
def rescaling_operands(count: int) -> str:
    """Results, the values (in the registers of the results), and the factors."""
    return ",".join(["=r"] * count + [str(i) for i in range(count)] + ["r"] * count)
