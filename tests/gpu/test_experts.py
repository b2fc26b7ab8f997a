"""Routing and experts on published shapes in bfloat16: near float64, bits independent of the batch, and captured."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.compile_experts import MODELS, OSS, RMSNorm
from peregrine.kernels.activation import clamped_mul, silu_mul
from peregrine.kernels.linear.tiles import Tile
from peregrine.kernels.moe import ExpertChoice, RoutingRule, pack_experts, pack_router, route, route_torch
from peregrine.kernels.residual import Residual

ROWS = (1, 4, 8, 9, 17, 32, 33, 128, 4096)  # up to 8 have their own kernel, blocks of up to 16 need no plan
EPS = 1e-6
LIMIT = 1.5  # of gpt-oss's activation: small, so that many values reach it
UNIT = 2.0**24  # squares are whole numbers of 1 / UNIT


@dataclass(frozen=True)
class Problem:
    """One layer's experts, with inputs for the largest number of rows."""

    rule: RoutingRule
    router: Any  # TritonWeight
    bias: Tensor | None
    gate_up: Any  # TritonExperts
    down: Any
    values: Tensor  # [4096, H]
    norm: Tensor  # [H]

    def residual(self, rows: slice) -> Residual:
        values = self.values[rows]
        squares = sums_of_squares(values)
        ready = (values.float() * self.norm.float()).bfloat16()
        return Residual(values, ready, squares, torch.zeros_like(squares), EPS)

    def choose(self, rows: slice) -> ExpertChoice:
        return route(self.residual(rows), self.router, self.rule, self.bias)

    def run(self, rows: slice) -> tuple[Tensor, ...]:
        """Experts, weights, and the contents of the residual afterwards."""
        residual, choice = self.residual(rows), self.choose(rows)
        joined = self.gate_up.add(self.down, residual, choice, RMSNorm(self.norm, EPS))
        assert joined.squares is not None
        return choice.experts, choice.weights, joined.values, joined.normed, joined.squares

    def outputs(self, rows: slice, choice: ExpertChoice, tiles: tuple[Tile, Tile] | None = None) -> Tensor:
        """Each row's weighted outputs of its experts, before they are added up."""
        from peregrine.kernels.moe.triton import expert_outputs

        residual, biases = self.residual(rows), (self.gate_up.bias, self.down.bias)
        assert residual.squares is not None
        scale, weights = (residual.squares, EPS), (self.gate_up.weight, self.down.weight)
        return expert_outputs(residual.normed, scale, choice, *weights, tiles, biases, self.gate_up.limit)

    def expected(self, x: Tensor, expert: Tensor) -> tuple[Tensor, Tensor]:
        """One expert's output in float64, and the sum of its absolute terms."""
        joined, own = self.gate_up.weight[expert].double() @ x, self.down.weight[expert].double()
        if self.gate_up.bias is not None:
            joined = joined + self.gate_up.bias[expert].double()
        limit = self.gate_up.limit
        inner = (silu_mul(joined[None]) if limit is None else clamped_mul(joined[None], limit))[0]
        output = own @ inner
        if self.down.bias is not None:
            output = output + self.down.bias[expert].double()
        return output, own.abs() @ inner.abs()

    def normed(self, rows: slice) -> Tensor:
        """What routing and experts read, in float64: the scale of a row is exact, its values are rounded."""
        residual = self.residual(rows)
        assert residual.squares is not None
        mean = residual.squares[:, 0].double() / (UNIT * self.values.shape[1])
        return residual.normed.double() * (mean + EPS).rsqrt()[:, None]


def sums_of_squares(values: Tensor) -> Tensor:
    """[M, H] -> [M, 2] i64, coarse and fine; squares are rounded to float32, fractions of a unit are dropped."""
    squares = (values.float() * values.float()).double()
    fine = torch.where(squares < 1, squares, 0.0) * 2.0**48
    return torch.stack([(squares * UNIT).long().sum(dim=1), fine.long().sum(dim=1)], dim=1)


@pytest.fixture(scope="module", params=MODELS)
def problem(request: pytest.FixtureRequest) -> Iterator[Problem]:
    rule, hidden, inner, _ = MODELS[request.param]
    generator = torch.Generator("cuda").manual_seed(sum(map(ord, request.param)))

    def draw(*size: int, spread: float = 1.0) -> Tensor:
        return (torch.randn(size, device="cuda", generator=generator) * spread).bfloat16()

    count, biased = rule.num_experts + rule.num_shared, rule is OSS

    def biases(outputs: int) -> Tensor | None:
        return draw(count * outputs) if biased else None

    router, router_bias = draw(rule.num_experts, hidden, spread=hidden**-0.5), draw(rule.num_experts)
    gate_up, down = (
        draw(count * 2 * inner, hidden, spread=hidden**-0.5),
        draw(count * hidden, inner, spread=inner**-0.5),
    )
    yield Problem(
        rule=rule,
        router=pack_router(router, rule, router_bias if biased else None),
        bias=draw(rule.num_experts, spread=0.1).float() if rule.sigmoid else None,
        gate_up=pack_experts(gate_up, count, biases(2 * inner), LIMIT if biased else None),
        down=pack_experts(down, count, biases(hidden)),
        values=draw(max(ROWS), hidden, spread=3.0),
        norm=draw(hidden),
    )
    torch.cuda.empty_cache()


def test_a_row_has_the_same_bits_in_any_batch(problem: Problem) -> None:
    together = problem.run(slice(0, max(ROWS)))
    for rows in ROWS:
        for part, whole in zip(problem.run(slice(0, rows)), together, strict=True):
            assert torch.equal(part, whole[:rows]), rows
    for first, last in ((5, 6), (130, 133), (max(ROWS) - 1, max(ROWS))):
        for part, whole in zip(problem.run(slice(first, last)), together, strict=True):
            assert torch.equal(part, whole[first:last]), (first, last)


def test_routing_is_the_twins_where_scores_differ(problem: Problem) -> None:
    rows = slice(0, 512)
    found = problem.choose(rows)
    logits = problem.normed(rows) @ problem.router.weight.double().T
    if problem.router.bias is not None:
        logits = logits + problem.router.bias.double()
    twin = route_torch(logits.float(), problem.rule, problem.bias)
    same = (found.experts == twin.experts).all(dim=1)
    assert same.float().mean() > 0.98  # elsewhere two scores differ in the last places of float32 only
    torch.testing.assert_close(found.weights[same], twin.weights[same], rtol=1e-4, atol=1e-6)


def test_outputs_are_near_float64(problem: Problem) -> None:
    for num_rows in (4, 160):
        rows = slice(0, num_rows)
        experts, weights, values, ready, squares = problem.run(rows)
        x, expected = problem.normed(rows), problem.values[rows].double()
        bound = torch.zeros_like(expected)
        for row in range(min(num_rows, 4)):
            for expert, weight in zip(experts[row].long(), weights[row].double(), strict=True):
                output, terms = problem.expected(x[row], expert)
                expected[row] += output * weight
                # Roundings to bfloat16: of the inner values and of the output; sums in float32 are far smaller.
                bound[row] += 2.0**-8 * weight * (terms + output.abs())
        checked = slice(0, 4)
        bound = bound + 2.0**-8 * expected.abs()
        assert bool(((values.double() - expected).abs() <= bound)[checked].all())
        assert torch.equal(ready, (values.float() * problem.norm.float()).bfloat16())
        assert torch.equal(squares[:, 0], sums_of_squares(values)[:, 0])


def test_tiles_change_no_bit(problem: Problem) -> None:
    """Tiles whose depth divides the inputs, as `pick_expert_tiles` gives them: gpt-oss has 2880 = 45 * 64."""
    inputs = problem.gate_up.weight.shape[2], problem.down.weight.shape[2]
    for num_rows in (200, 12):  # planned and direct
        rows = slice(0, num_rows)
        choice = problem.choose(rows)
        first = problem.outputs(rows, choice)
        for height, cols, depth, warps in ((16, 32, 64, 4), (32, 64, 128, 4), (64, 128, 64, 8), (128, 64, 32, 4)):
            tile = Tile(height, cols, gcd(depth, *inputs), warps, 3)
            assert torch.equal(problem.outputs(rows, choice, (tile, tile)), first), tile


def test_planned_and_direct_blocks_agree(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    for num_rows in (1, 4, 16):
        rows = slice(0, num_rows)
        choice = problem.choose(rows)
        direct = problem.outputs(rows, choice)
        with monkeypatch.context() as patch:
            patch.setattr("peregrine.kernels.moe.triton.DIRECT_ROWS", 0)
            planned = problem.outputs(rows, choice)
        assert torch.equal(direct, planned), num_rows


def test_few_rows_have_the_bits_of_any(problem: Problem) -> None:
    from peregrine.kernels.moe.hopper_few import few_outputs
    from peregrine.kernels.moe.triton import hopper_takes_few

    for num_rows in range(1, 9):
        rows = slice(7, 7 + num_rows)
        choice, residual = problem.choose(rows), problem.residual(rows)
        if problem.gate_up.bias is not None or not hopper_takes_few(problem.gate_up.weight, *choice.experts.shape):
            continue
        assert residual.squares is not None
        weights = problem.gate_up.weight, problem.down.weight
        for _ in range(3):
            found, counters = few_outputs(residual.normed, (residual.squares, EPS), choice, *weights)
            assert torch.equal(found, problem.outputs(rows, choice)), num_rows
            counters.zero_()  # as the addition that follows does


def test_all_rows_may_choose_the_same_expert(problem: Problem) -> None:
    """Expert 7 gets all blocks, the others none."""
    residual = problem.residual(slice(0, 300))
    crowd = ExpertChoice(torch.full((300, 1), 7, dtype=torch.int32, device="cuda"), torch.ones(300, 1, device="cuda"))
    alone = ExpertChoice(crowd.experts[:1], crowd.weights[:1])
    norm = RMSNorm(problem.norm, EPS)
    whole = problem.gate_up.add(problem.down, residual, crowd, norm)
    first = problem.gate_up.add(problem.down, problem.residual(slice(0, 1)), alone, norm)
    assert torch.equal(first.values, whole.values[:1])


@pytest.mark.parametrize("num_rows", [4, 1024])
def test_captured_experts_follow_their_input(problem: Problem, num_rows: int) -> None:
    """Other rows choose other experts: the recorded launches must not depend on those of the recording."""
    held = problem.values[:num_rows].clone()
    squares, spare = sums_of_squares(held), torch.zeros(num_rows, 2, dtype=torch.int64, device="cuda")
    ready = (held.float() * problem.norm.float()).bfloat16()

    def step() -> tuple[Tensor, ...]:
        residual = Residual(held, ready, squares.clone(), spare.clone(), EPS)
        choice = route(residual, problem.router, problem.rule, problem.bias)
        joined = problem.gate_up.add(problem.down, residual, choice, RMSNorm(problem.norm, EPS))
        assert joined.squares is not None
        return choice.experts, choice.weights, joined.values, joined.normed, joined.squares

    replay, recorded = capture(step)
    for first in (num_rows, 0):
        rows = slice(first, first + num_rows)
        residual = problem.residual(rows)
        assert residual.squares is not None
        held.copy_(residual.values)
        ready.copy_(residual.normed)
        squares.copy_(residual.squares)
        replay()
        for part, expected in zip(recorded, problem.run(rows), strict=True):
            assert torch.equal(part, expected)


def capture(step: Callable[[], tuple[Tensor, ...]]) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    return graph.replay, recorded
