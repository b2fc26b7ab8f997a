"""The linear kernel on the weights of an 8B model in bfloat16: near float64, and bits independent of the batch."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from peregrine.kernels.linear import DenseWeight
from peregrine.kernels.linear.cuda_tiles import CudaPlan, FittedPlan, clustered_plan
from peregrine.kernels.linear.tiles import LARGE_HEIGHT, LargePlan, Tile, large_plans, pick_split, pick_tile

ROWS = (1, 2, 4, 7, 16, 17, 48, 64, 96, 127, 128, 192, 200, 300)
MANY_ROWS = (
    *(129, 160, 192, 200, 255, 256, 257, 288, 384, 448, 511, 512, 513, 576, 640, 700, 768, 896, 1000, 1024, 1536, 2048),
    *(3001, 4096, 4224, 8192),
)
EPS = 1e-5
UNIT = 2.0**24  # squares are whole numbers of 1 / UNIT
# Outputs, inputs, and what is fused with the product.
WEIGHTS = {
    "qkv": (6144, 4096, "scale"),
    "o": (4096, 4096, "add"),
    "gate_up": (14336, 4096, "gate"),
    "down": (4096, 14336, "add"),
    "head": (128256, 4096, "plain"),
}


@dataclass(frozen=True)
class Problem:
    """One weight, with inputs for the largest number of rows."""

    part: str
    weight: Tensor  # [N, K], or [2 N, K] with a gate
    bias: Tensor | None
    x: Tensor  # [most rows, K]
    squares: Tensor  # [most rows, 2] of the residual that x was prepared from
    residual: Tensor  # [most rows, N]
    norm: Tensor  # [N]

    @property
    def tile(self) -> Tile:
        """The tile of the kernel for few rows."""
        outputs, inputs = self.residual.shape[1], self.x.shape[1]
        return pick_tile(max(ROWS), outputs, inputs, self.part == "gate", on_hopper=True)

    def plans(self, rows: int) -> list[LargePlan]:
        """All plans of the kernel for many rows."""
        (outputs, inputs), gate = (self.residual.shape[1], self.x.shape[1]), self.part == "gate"
        return list(large_plans(rows, outputs, gate, self.part == "add", pick_split(outputs, inputs, gate)))

    @property
    def fitted_plans(self) -> list[FittedPlan]:
        """Plans in tiles of any width, also of widths that nobody chooses; only these kernels take the weight."""
        (height, inputs), gate = self.weight.shape, self.part == "gate"
        split = pick_split(self.residual.shape[1], inputs, gate)
        if split > 2 or inputs % (64 * split) or self.residual.shape[1] % 8:
            return []
        widths = (48, 80, 96, 128, 144, 224) if split == 1 else (48, 64, 112, 128)
        # A thread of three groups has 128 registers, which hold its sums of 144 columns.
        plans = [FittedPlan(groups, cols, split) for groups in (2, 3) for cols in widths if groups == 2 or cols <= 144]
        return [plan for plan in plans if plan.cols <= height]

    def run(
        self, rows: slice, tile: Tile | None = None, plan: LargePlan | CudaPlan | None = None
    ) -> tuple[Tensor, ...]:
        """The kernel on some rows, with outputs that held NaN: the result, and the other outputs."""
        from peregrine.kernels.linear.epilogue import Addition
        from peregrine.kernels.linear.triton import TritonWeight, run

        weight = TritonWeight(self.weight, self.bias)
        x, residual = self.x[rows], self.residual[rows]
        out, scaled = torch.full_like(residual, torch.nan), torch.full_like(residual, torch.nan)
        if self.part == "add":
            squares, stale = torch.zeros_like(self.squares[rows]), torch.full_like(self.squares[rows], 99)
            run(x, weight, out, add=Addition(residual, self.norm, scaled, squares, stale), tile=tile, plan=plan)
            return out, scaled, squares, stale
        scale = None if self.part == "plain" else (self.squares[rows], EPS)
        run(x, weight, out, scale=scale, gate=self.part == "gate", tile=tile, plan=plan)
        return (out,)

    def exact(self, rows: slice) -> tuple[Tensor, Tensor]:
        """The result in float64, and an error bound for bfloat16 with sums in float32."""
        x, weight = self.x[rows].double(), self.weight.double()
        scale = torch.ones(len(x), 1, dtype=torch.float64, device=x.device)
        if self.part in ("scale", "gate"):
            mean = self.squares[rows, 0].double() / (UNIT * x.shape[1])
            scale = (mean + EPS).rsqrt()[:, None]
        bias = 0.0 if self.bias is None else self.bias.double()
        total = x @ weight.T * scale + bias
        # A chain loses up to one unit in the last place of float32 at each of its sums.
        error = (x.shape[1] + 4) * 2.0**-23 * (x.abs() @ weight.abs().T * scale + abs(bias))
        if self.part == "gate":
            gate, up = total.chunk(2, dim=1)
            gate_error, up_error = error.chunk(2, dim=1)
            total = F.silu(gate) * up
            error = 1.1 * gate_error * (up.abs() + up_error) + F.silu(gate).abs() * up_error
            error = error + 2.0**-20 * total.abs()  # of the exponential
        elif self.part == "add":
            total = total + self.residual[rows].double()
        return total, error + 2.0**-8 * (total.abs() + error)


def make_problem(outputs: int, inputs: int, part: str, bias: bool, rows: int, dtype: torch.dtype) -> Problem:
    """A weight and inputs, drawn at random."""
    generator = torch.Generator("cuda").manual_seed(outputs + inputs)

    def draw(*size: int, spread: float = 1.0) -> Tensor:
        return (torch.randn(size, device="cuda", generator=generator) * spread).to(dtype)

    height, values = outputs * (2 if part == "gate" else 1), draw(rows, inputs, spread=3.0)
    return Problem(
        part=part,
        weight=draw(height, inputs, spread=inputs**-0.5),
        bias=draw(height) if bias else None,
        x=values,
        squares=sums_of_squares(values),
        residual=draw(rows, outputs),
        norm=draw(outputs),
    )


@pytest.fixture(scope="module", params=WEIGHTS)
def problem(request: pytest.FixtureRequest) -> Iterator[Problem]:
    outputs, inputs, part = WEIGHTS[request.param]
    rows = max(ROWS) if request.param == "head" else max(MANY_ROWS)
    yield make_problem(outputs, inputs, part, request.param == "down", rows, torch.bfloat16)
    torch.cuda.empty_cache()


def sums_of_squares(values: Tensor) -> Tensor:
    """[M, H] -> [M, 2] i64, coarse and fine; squares are rounded to float32, fractions of a unit are dropped."""
    squares = (values.float() * values.float()).double()
    fine = torch.where(squares < 1, squares, 0.0) * 2.0**48
    return torch.stack([(squares * UNIT).long().sum(dim=1), fine.long().sum(dim=1)], dim=1)


def test_a_row_has_the_same_bits_in_any_batch(problem: Problem) -> None:
    """With any number of rows, at any place among them."""
    together = problem.run(slice(0, max(ROWS)))
    for rows in ROWS:
        for part, whole in zip(problem.run(slice(0, rows)), together, strict=True):
            assert torch.equal(part, whole[:rows]), rows
    for place in (5, 130, max(ROWS) - 1):
        for part, whole in zip(problem.run(slice(place, place + 1)), together, strict=True):
            assert torch.equal(part, whole[place : place + 1]), place


def test_results_are_near_float64_and_near_the_twin(problem: Problem) -> None:
    for rows in (slice(0, 7), slice(0, max(ROWS))):
        out = problem.run(rows)[0].double()
        exact, bound = problem.exact(rows)
        assert bool(((out - exact).abs() <= bound).all())
        if problem.part == "plain":
            twin = DenseWeight(problem.weight, problem.bias).linear(problem.x[rows]).double()
            assert bool(((out - twin).abs() <= 2 * bound).all())


@pytest.mark.parametrize("problem", ["o", "down"], indirect=True)
def test_the_other_outputs_follow_from_the_sum(problem: Problem) -> None:
    out, scaled, squares, stale = problem.run(slice(0, 200))
    assert torch.equal(scaled, (out.float() * problem.norm.float()).bfloat16())
    assert torch.equal(squares[:, 0], sums_of_squares(out)[:, 0])
    assert not stale.any()


def test_a_call_repeated_gives_the_same_bits(problem: Problem) -> None:
    """Repeated, since a partial sum read too early, or a counter that was not reset, would show only sometimes."""
    first = problem.run(slice(0, 4))
    same = torch.ones((), dtype=torch.bool, device="cuda")
    for _ in range(200):
        for part, other in zip(problem.run(slice(0, 4)), first, strict=True):
            same &= (part == other).all()
    assert bool(same)


@pytest.mark.parametrize("problem", ["qkv", "o", "gate_up", "down"], indirect=True)
def test_many_rows_have_the_bits_of_few(problem: Problem) -> None:
    """The kernel for many rows has other tiles, another order of work and, where inputs are split, another merge."""
    for rows in MANY_ROWS:
        for many, few in zip(problem.run(slice(0, rows)), problem.run(slice(0, rows), problem.tile), strict=True):
            assert torch.equal(many, few), rows


@pytest.mark.parametrize("problem", ["qkv", "o", "gate_up", "down"], indirect=True)
def test_every_plan_gives_the_same_bits(problem: Problem) -> None:
    """Also those that other devices would take: whole tiles or pieces, two groups or three, pairs or parts in turn."""
    kinds = set()
    for rows in (190, 193, 256, 290, 384, 530, 576, 640, 704, 770, 1100):
        few = problem.run(slice(0, rows), problem.tile)
        for plan in problem.plans(rows):
            kinds.add((plan.groups, plan.eighths, plan.rest, plan.tiles > 0, plan.pieces > 0))
            for many, one in zip(problem.run(slice(0, rows), plan=plan), few, strict=True):
                assert torch.equal(many, one), (rows, plan)
    assert len(kinds) == {"scale": 13, "gate": 8, "add": 10}[problem.part]


@pytest.mark.parametrize("problem", ["qkv", "o", "gate_up", "down"], indirect=True)
def test_tiles_of_every_width_give_the_same_bits(problem: Problem) -> None:
    """Also where tiles overlap: rows and columns that no whole tile begins with."""
    assert len(problem.fitted_plans) >= 8
    for rows in (65, 100, 128, 129, 190, 193, 256, 300, 384):
        few = problem.run(slice(0, rows), problem.tile)
        for plan in problem.fitted_plans:
            for many, one in zip(problem.run(slice(0, rows), plan=plan), few, strict=True):
                assert torch.equal(many, one), (rows, plan)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("outputs", "inputs", "part", "bias"),
    [
        (6144, 4096, "scale", True),
        (1000, 512, "gate", True),
        (200, 320, "add", False),
        (8192, 1024, "add", True),
        (4096, 4096, "plain", True),
        (2048, 2048, "add", False),
        (2048, 1536, "scale", True),
        (2880, 4096, "add", True),
    ],
    ids=["bias", "gate of odd width", "narrow", "unsplit addition", "two parts", "four parts", "three parts", "past N"],
)
def test_many_rows_of_other_weights(outputs: int, inputs: int, part: str, bias: bool, dtype: torch.dtype) -> None:
    problem = make_problem(outputs, inputs, part, bias, 1500, dtype)
    for rows in (40, 100, 190, 200, 257, 512, 1500):
        few = problem.run(slice(0, rows), problem.tile)
        fitted = problem.fitted_plans if LARGE_HEIGHT < rows < 512 else ()
        for plan in (None, *(problem.plans(rows) if rows > LARGE_HEIGHT else ()), *fitted):
            for many, one in zip(problem.run(slice(0, rows), plan=plan), few, strict=True):
                assert torch.equal(many, one), (rows, plan)


@pytest.mark.parametrize(
    ("outputs", "inputs", "part", "bias", "dtype"),
    [
        (4096, 4096, "add", False, torch.bfloat16),  # in two parts
        (4096, 14336, "add", True, torch.float16),
        (3072, 2048, "scale", True, torch.bfloat16),
        (2048, 4096, "add", False, torch.bfloat16),  # in four, two programs on a multiprocessor
        (576, 2048, "scale", False, torch.float16),  # in four, one on each
        (1536, 8960, "add", False, torch.bfloat16),  # in five
        (1000, 4096, "plain", True, torch.bfloat16),  # in eight; the last tile is not whole
    ],
)
def test_programs_of_a_cluster_give_the_same_bits(
    outputs: int, inputs: int, part: str, bias: bool, dtype: torch.dtype
) -> None:
    """Repeated, since a sum that is read too early differs sometimes; with rows of small and of uncountable squares."""
    problem = make_problem(outputs, inputs, part, bias, 64, dtype)
    for small in (5, 7, 40):
        problem.x[small] *= 1e-4
        problem.residual[small] *= 1e-4
    problem.x[11] *= 300.0
    problem.residual[13, 100] = torch.nan
    tried = 0
    for rows in (1, 4, 8, 11, 16, 17, 33, 64):
        plan = clustered_plan(rows, outputs, inputs, False, pick_split(outputs, inputs, False))
        if plan is None:
            continue
        tried += 1
        right = problem.run(slice(0, rows), tile=pick_tile(rows, outputs, inputs, False, on_hopper=True))
        for _ in range(20):
            assert all(map(same_bits, problem.run(slice(0, rows), plan=plan), right)), rows
    assert tried >= 5


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether all numbers are equal or NaN in both."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


@pytest.mark.parametrize("inputs", [4096, 14336])
def test_squares_that_cannot_be_counted_and_small_rows_of_many(inputs: int) -> None:
    problem = make_problem(4096, inputs, "add", False, 600, torch.bfloat16)
    problem.x[::7] = 0.0
    problem.residual[::7] *= 1e-4  # so small that its squares are counted in fine units
    problem.residual[3::11, 70] = 3e5
    problem.residual[4::13, 5] = torch.nan
    problem.residual[5::17, 300] = torch.inf
    for rows in (96, 190, 200, 300, 600):
        few = problem.run(slice(0, rows), problem.tile)
        for plan in (None, FittedPlan(2, 64, 2), FittedPlan(3, 112, 2)):
            for many, one in zip(problem.run(slice(0, rows), plan=plan), few, strict=True):
                assert torch.equal(many.nan_to_num(), one.nan_to_num()), (rows, plan)


def test_a_row_of_two_tiles_may_have_a_square_that_cannot_be_counted() -> None:
    """The last 64 of 300 rows begin at row 236: both groups must mark the value of row 240, whoever stores it last."""
    problem = make_problem(4096, 4096, "add", False, 300, torch.bfloat16)
    problem.residual[240, 70] = 3e5
    assert all(bool(problem.run(slice(0, 300))[1][240, 70].isnan()) for _ in range(20))


@pytest.mark.parametrize("rows", [384, 512, 2048])
def test_a_sum_is_what_the_library_computes_without_splitting(rows: int) -> None:
    """An independent oracle: cuBLASLt, asked for one chain over all inputs."""
    problem = make_problem(6144, 4096, "plain", False, rows, torch.bfloat16)
    matmul, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    library = torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        matmul.allow_bf16_reduced_precision_reduction = (False, False)
        assert torch.equal(problem.run(slice(0, rows))[0], problem.x @ problem.weight.T)
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before
        torch.backends.cuda.preferred_blas_library(library)


@pytest.mark.parametrize("rows", [96, 192, 200, 512])
@pytest.mark.parametrize("problem", ["o"], indirect=True)
def test_programs_that_wait_for_each_other_give_the_same_bits_again(problem: Problem, rows: int) -> None:
    """These rows of a split weight are computed by pairs of programs, which exchange sums."""
    first = problem.run(slice(0, rows))
    same = torch.ones((), dtype=torch.bool, device="cuda")
    for _ in range(200):
        for part, other in zip(problem.run(slice(0, rows)), first, strict=True):
            same &= (part == other).all()
    assert bool(same)
