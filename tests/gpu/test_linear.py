"""The linear kernel on the weights of an 8B model in bfloat16: near float64, and bits independent of the batch."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from peregrine.kernels.linear import DenseWeight

ROWS = (1, 2, 4, 7, 16, 17, 64, 128, 200, 300)
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
    x: Tensor  # [300, K]
    squares: Tensor  # [300, 2] of the residual that x was prepared from
    residual: Tensor  # [300, N]
    norm: Tensor  # [N]

    def run(self, rows: slice) -> tuple[Tensor, ...]:
        """The kernel on some rows, with outputs that held NaN: the result, and the other outputs."""
        from peregrine.kernels.linear.triton import Addition, TritonWeight, run

        weight = TritonWeight(self.weight, self.bias)
        x, residual = self.x[rows], self.residual[rows]
        out, scaled = torch.full_like(residual, torch.nan), torch.full_like(residual, torch.nan)
        if self.part == "add":
            squares, stale = torch.zeros_like(self.squares[rows]), torch.full_like(self.squares[rows], 99)
            run(x, weight, out, add=Addition(residual, self.norm, scaled, squares, stale))
            return out, scaled, squares, stale
        scale = None if self.part == "plain" else (self.squares[rows], EPS)
        run(x, weight, out, scale=scale, gate=self.part == "gate")
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


@pytest.fixture(scope="module", params=WEIGHTS)
def problem(request: pytest.FixtureRequest) -> Iterator[Problem]:
    outputs, inputs, part = WEIGHTS[request.param]
    generator = torch.Generator("cuda").manual_seed(sum(map(ord, request.param)))

    def draw(*size: int, spread: float = 1.0) -> Tensor:
        return (torch.randn(size, device="cuda", generator=generator) * spread).bfloat16()

    height, most = outputs * (2 if part == "gate" else 1), max(ROWS)
    values = draw(most, inputs, spread=3.0)
    yield Problem(
        part=part,
        weight=draw(height, inputs, spread=inputs**-0.5),
        bias=draw(outputs) if request.param == "down" else None,
        x=values,
        squares=sums_of_squares(values),
        residual=draw(most, outputs),
        norm=draw(outputs),
    )
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
