"""Experts: the twin against a loop in float64, the kernels against the twin; bits do not depend on the batch."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from kernels.compile_experts import RMSNorm
from kernels.interpreted import needs_interpreter
from peregrine.errors import ConfigError
from peregrine.kernels.linear.tiles import Tile
from peregrine.kernels.moe import ExpertChoice, ExpertFormat, pack_experts, plain_experts
from peregrine.kernels.moe.reference import ExpertShare, LinearExperts, experts_mlp
from peregrine.kernels.moe.tiles import CROWDED, DIRECT_ROWS, GATED, PLAIN, pick_expert_tiles
from peregrine.kernels.residual import Residual

NUM_EXPERTS, HIDDEN, INNER = 7, 48, 32
UNIT = 2**24  # of a square
Experts = tuple[ExpertFormat, ExpertFormat]  # gate_up and down


def draw(*size: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed + size[0])) * spread


def stacks() -> tuple[Tensor, Tensor]:
    gate_up = draw(NUM_EXPERTS * 2 * INNER, HIDDEN, seed=1, spread=0.2)
    return gate_up, draw(NUM_EXPERTS * HIDDEN, INNER, seed=2, spread=0.2)


def linears(weight: Tensor) -> LinearExperts:
    experts = pack_experts(weight, NUM_EXPERTS)
    assert isinstance(experts, LinearExperts)
    return experts


def packed() -> tuple[LinearExperts, LinearExperts]:
    gate_up, down = stacks()
    return linears(gate_up), linears(down)


def choice_of(num_rows: int, choices: int = 3, seed: int = 0, first: int = 0) -> ExpertChoice:
    """Each row's experts at random, none twice and none before the first."""
    order = first + draw(num_rows, NUM_EXPERTS - first, seed=seed).argsort(dim=1)[:, :choices]
    return ExpertChoice(order.int(), draw(num_rows, choices, seed=seed + 1).abs())


CHOICES = {
    "alone": choice_of(1),
    "some": choice_of(9),
    "many": choice_of(70),
    "all to one": ExpertChoice(torch.full((21, 1), 4, dtype=torch.int32), draw(21, 1)),
    "nobody to the first": choice_of(12, first=3),
}
each_choice = pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)


def by_hand(x: Tensor, choice: ExpertChoice) -> Tensor:
    """The reference in float64, row by row and expert by expert."""
    gate_up, down = (
        stack.double().view(NUM_EXPERTS, -1, size) for stack, size in zip(stacks(), (HIDDEN, INNER), strict=True)
    )
    out = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for row in range(len(x)):
        for expert, weight in zip(choice.experts[row].tolist(), choice.weights[row].tolist(), strict=True):
            gate, up = (gate_up[expert] @ x[row].double()).chunk(2)
            out[row] += weight * (down[expert] @ (F.silu(gate) * up))
    return out


@each_choice
def test_the_twin_is_the_loop(choice: ExpertChoice) -> None:
    x = draw(len(choice.experts), HIDDEN, seed=3)
    torch.testing.assert_close(experts_mlp(x, choice, *packed()).double(), by_hand(x, choice), rtol=1e-5, atol=1e-5)


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    choice, x = CHOICES["many"], draw(70, HIDDEN, seed=3)
    whole = experts_mlp(x, choice, *packed())
    for rows in (slice(0, 1), slice(5, 9), slice(60, 70), slice(69, 70)):
        own = ExpertChoice(choice.experts[rows], choice.weights[rows])
        assert torch.equal(experts_mlp(x[rows], own, *packed()), whole[rows])


def test_outputs_are_added_in_the_order_of_the_choice() -> None:
    """Large outputs that cancel: another order would lose the small one."""
    down = torch.zeros(NUM_EXPERTS, HIDDEN, INNER)
    down[0], down[1], down[2] = 2.0**24, -(2.0**24), 1.0
    gate_up = torch.zeros(NUM_EXPERTS, 2 * INNER, HIDDEN)
    gate_up[:, 0, 0], gate_up[:, INNER, 0] = 100.0, 0.01  # silu(100) * 0.01 is one
    x, weights = torch.zeros(1, HIDDEN), torch.ones(1, 3)
    x[0, 0] = 1.0
    stacked = linears(gate_up.flatten(0, 1)), linears(down.flatten(0, 1))
    for experts, expected in (([0, 1, 2], 1.0), ([2, 0, 1], 0.0)):
        found = experts_mlp(x, ExpertChoice(torch.tensor([experts]), weights), *stacked)
        assert found[0, 0].item() == pytest.approx(expected, abs=1e-3)


def test_plain_experts_can_be_trained() -> None:
    gate_up, down = (stack.requires_grad_() for stack in stacks())
    x = draw(9, HIDDEN, seed=3).requires_grad_()
    plain = plain_experts(gate_up, NUM_EXPERTS), plain_experts(down, NUM_EXPERTS)
    found = experts_mlp(x, CHOICES["some"], *plain)  # type: ignore[arg-type]
    torch.testing.assert_close(found, experts_mlp(x.detach(), CHOICES["some"], *packed()))
    found.sum().backward()
    assert all(part.grad is not None and part.grad.abs().sum() > 0 for part in (gate_up, down, x))


@pytest.mark.parametrize("with_norm", [False, True])
def test_outputs_are_added_to_the_residual(with_norm: bool) -> None:
    x, residual, norm = draw(9, HIDDEN, seed=3), draw(9, HIDDEN, seed=4), draw(HIDDEN, seed=5)
    gate_up, down = packed()
    joined = gate_up.add(down, Residual(residual, x), CHOICES["some"], RMSNorm(norm, 1e-6) if with_norm else None)
    values = residual + experts_mlp(x, CHOICES["some"], *packed())
    torch.testing.assert_close(joined.values, values)
    normed = F.rms_norm(values, (HIDDEN,), norm, 1e-6) if with_norm else values
    torch.testing.assert_close(joined.normed, normed)


def test_tiles_take_what_matrix_instructions_can() -> None:
    with pytest.raises(ConfigError, match="multiples of 16"):
        pick_expert_tiles(24, 64, 2048, 1400)
    assert GATED.keys() == PLAIN.keys()
    for pairs, rows in ((24, 16), (10_000, 128)):
        wide, narrow = pick_expert_tiles(pairs, 64, 2048, 1408)
        assert wide.rows == narrow.rows == rows
        assert 2048 % wide.depth == 1408 % narrow.depth == 0
    assert all(height >= DIRECT_ROWS for height in GATED)  # a block found directly holds all rows


def test_blocks_that_just_fit_the_device_have_smaller_tiles() -> None:
    """Four tokens of DeepSeek-V2-Lite with shared experts just fit; one token, eight rows and Qwen3-30B-A3B do not."""
    crowded, base = CROWDED[:2], GATED[16][:2]
    for pairs, experts, inner_size, tile in (
        (32, 66, 1408, crowded),
        (8, 66, 1408, base),
        (256, 66, 1408, base),
        (32, 128, 768, base),
    ):
        wide, _ = pick_expert_tiles(pairs, experts, 2048, inner_size)
        assert (wide.rows, wide.cols, wide.depth) == (16, *tile)


@pytest.fixture
def triton_experts() -> Experts:
    """gate_up and down in the Triton format."""
    from peregrine.kernels.moe.triton import TritonExperts

    gate_up, down = (TritonExperts(stack.view(NUM_EXPERTS, -1, stack.shape[1])) for stack in stacks())
    return gate_up, down


def squares_of(values: Tensor) -> Tensor:
    """Sums of squares in units; parts of a unit are dropped."""
    return ((values * values).double() * UNIT).long().sum(dim=1)


@needs_interpreter
@each_choice
def test_the_kernels_are_the_twin(choice: ExpertChoice, triton_experts: Experts) -> None:
    num_rows = len(choice.experts)
    values, norm, next_norm = draw(num_rows, HIDDEN, seed=3), draw(HIDDEN, seed=4), draw(HIDDEN, seed=5)
    stale = torch.stack([squares_of(values)] * 2, dim=1)
    residual = Residual(values, values * norm, stale, torch.zeros_like(stale), 1e-6)
    gate_up, down = triton_experts
    joined = gate_up.add(down, residual, choice, RMSNorm(next_norm, 1e-5))
    whole = F.rms_norm(values, (HIDDEN,), norm, 1e-6)
    expected = values + experts_mlp(whole, choice, *packed())
    torch.testing.assert_close(joined.values, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(joined.normed, joined.values * next_norm)
    assert joined.squares is not None
    assert torch.equal(joined.squares[:, 0], squares_of(joined.values))
    assert joined.spare is not None
    assert joined.spare is stale
    assert not joined.spare.any()
    assert joined.eps == 1e-5


@needs_interpreter
def test_the_kernels_take_a_whole_norm_and_need_not_make_one(triton_experts: Experts) -> None:
    x, residual, norm = draw(9, HIDDEN, seed=3), draw(9, HIDDEN, seed=4), draw(HIDDEN, seed=5)
    expected = residual + experts_mlp(x, CHOICES["some"], *packed())
    gate_up, down = triton_experts
    bare = gate_up.add(down, Residual(residual, x), CHOICES["some"], None)
    torch.testing.assert_close(bare.values, expected, rtol=1e-4, atol=1e-5)
    assert bare.squares is None
    normed = gate_up.add(down, Residual(residual, x), CHOICES["some"], RMSNorm(norm, 1e-6))
    assert torch.equal(normed.values, bare.values)
    assert normed.squares is not None
    assert torch.equal(normed.squares[:, 0], squares_of(bare.values))


def whole_numbers(low: int, high: int, *size: int, seed: int = 0) -> Tensor:
    return torch.randint(low, high + 1, size, generator=torch.Generator().manual_seed(seed)).float()


def whole_stacks() -> tuple[Tensor, Tensor]:
    """Experts in whole numbers, with gates so large that silu changes nothing: sums are exact, whatever their order."""
    gates = whole_numbers(1, 2, NUM_EXPERTS, INNER, HIDDEN, seed=1)
    gate_up = torch.cat([gates, whole_numbers(-1, 1, NUM_EXPERTS, INNER, HIDDEN, seed=2)], dim=1)
    return gate_up, whole_numbers(-1, 1, NUM_EXPERTS, HIDDEN, INNER, seed=3)


def whole_twin(x: Tensor, choice: ExpertChoice) -> Tensor:
    return experts_mlp(x, choice, *(linears(stack.flatten(0, 1)) for stack in whole_stacks()))


@needs_interpreter
def test_the_kernels_outputs_do_not_depend_on_batch_or_tile() -> None:
    from peregrine.kernels.moe import triton as experts_gpu

    stacked, x = whole_stacks(), whole_numbers(1, 2, 70, HIDDEN, seed=4)
    choice = ExpertChoice(CHOICES["many"].experts, whole_numbers(1, 4, 70, 3, seed=5))
    whole = experts_gpu.expert_outputs(x, None, choice, *stacked).view(70, 3, HIDDEN)
    assert torch.equal(whole.sum(dim=1), whole_twin(x, choice))
    for rows in (slice(0, 1), slice(5, 9), slice(66, 70)):
        own = ExpertChoice(choice.experts[rows].contiguous(), choice.weights[rows].contiguous())
        alone = experts_gpu.expert_outputs(x[rows], None, own, *stacked)
        assert torch.equal(alone.view(-1, 3, HIDDEN), whole[rows])
    for rows, cols, depth in ((32, 16, 16), (64, 64, 16), (128, 32, 16)):
        tile = Tile(rows, cols, depth, 4, 1)
        again = experts_gpu.expert_outputs(x, None, choice, *stacked, (tile, tile))
        assert torch.equal(again.view(70, 3, HIDDEN), whole)


@needs_interpreter
@pytest.mark.parametrize("num_rows", [5, 40])
def test_shares_of_the_experts_put_together_are_the_whole(num_rows: int) -> None:
    """Five rows are found in the choice, forty planned; a share has two experts, one, or all but those."""
    from peregrine.kernels.moe import triton as experts_gpu

    gate_up, down = (draw(NUM_EXPERTS, *size) for size in ((2 * INNER, HIDDEN), (HIDDEN, INNER)))
    x, choice = draw(num_rows, HIDDEN), shared_of(num_rows)
    whole = experts_gpu.expert_outputs(x, None, choice, gate_up, down)
    bits = torch.zeros_like(whole).view(torch.int32)
    for first, end in ((0, 2), (2, NUM_EXPERTS - 1), (NUM_EXPERTS - 1, NUM_EXPERTS)):
        share = ExpertShare(first, NUM_EXPERTS, merge=lambda outputs: outputs)
        held = gate_up[first:end].clone(), down[first:end].clone()
        bits += experts_gpu.expert_outputs(x, None, choice, *held, share=share).view(torch.int32)
    assert torch.equal(bits.view(torch.float32), whole)


def crowd_of(num_rows: int) -> ExpertChoice:
    """All rows choose the same three experts, each in another order."""
    turns = (torch.arange(num_rows)[:, None] + torch.arange(3)) % 3
    return ExpertChoice(torch.tensor([5, 0, 3])[turns].int(), draw(num_rows, 3))


def shared_of(num_rows: int) -> ExpertChoice:
    """The last two experts are shared by all rows, the first three are chosen: five places of eight."""
    own = draw(num_rows, NUM_EXPERTS - 2).argsort(dim=1)[:, :3]
    shared = torch.tensor([NUM_EXPERTS - 2, NUM_EXPERTS - 1]).expand(num_rows, 2)
    return ExpertChoice(torch.cat([own, shared], dim=1).int(), draw(num_rows, 5))


@needs_interpreter
@pytest.mark.parametrize("num_rows", [1, 3, 16, 17, 32, 33])
@pytest.mark.parametrize("draw_choice", [choice_of, crowd_of, shared_of])
def test_few_rows_give_the_same_outputs_without_a_plan(
    draw_choice: Callable[[int], ExpertChoice], num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last row is a pad that holds NaN, which may not reach other rows."""
    from peregrine.kernels.moe import triton as experts_gpu

    plan, plans = experts_gpu.plan, []

    def count_plans(experts: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor]:
        plans.append(rows)
        return plan(experts, num_experts, rows)

    monkeypatch.setattr(experts_gpu, "plan", count_plans)
    stacked, experts = whole_stacks(), draw_choice(num_rows).experts
    choice = ExpertChoice(experts, whole_numbers(1, 4, *experts.shape, seed=5))
    x = whole_numbers(1, 2, num_rows, HIDDEN, seed=4)
    twin = whole_twin(x, choice)
    if num_rows > 1:
        x[-1], twin[-1] = torch.nan, torch.nan
    found = experts_gpu.expert_outputs(x, None, choice, *stacked)
    assert len(plans) == (num_rows > DIRECT_ROWS)
    summed = found.view(num_rows, -1, HIDDEN).sum(dim=1)
    torch.testing.assert_close(summed, twin, rtol=0, atol=0, equal_nan=True)
    monkeypatch.setattr(experts_gpu, "DIRECT_ROWS", 0)
    planned = experts_gpu.expert_outputs(x, None, choice, *stacked)
    assert len(plans) == 1 + (num_rows > DIRECT_ROWS)
    torch.testing.assert_close(planned, found, rtol=0, atol=0, equal_nan=True)


@needs_interpreter
@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=150), st.sampled_from([16, 32]), st.booleans())
def test_a_plan_sorts_pairs_and_cuts_blocks(numbers: list[int], rows: int, ranked: bool) -> None:
    from peregrine.kernels.moe import plan_triton

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_triton, "MAX_RANKED", 4096 if ranked else 0)
        order, blocks = plan_triton.plan(torch.tensor(numbers, dtype=torch.int32)[:, None], 10, rows)
    assert order.tolist() == sorted(range(len(numbers)), key=lambda pair: (numbers[pair], pair))
    expected, start = [], 0
    for expert in sorted(set(numbers)):
        last = start + numbers.count(expert)
        expected += [[expert, first, last] for first in range(start, last, rows)]
        start = last
    count = int(blocks[0])
    assert count == len(expected) <= plan_triton.most_blocks(len(numbers), 10, rows)
    assert blocks[1 : 1 + 3 * count].view(-1, 3).tolist() == expected


@needs_interpreter
@pytest.mark.parametrize(("num_rows", "num_experts", "choices"), [(1, 5, 2), (150, 10, 3), (90, 66, 8)])
def test_rows_are_gathered_in_blocks_that_share_an_expert(num_rows: int, num_experts: int, choices: int) -> None:
    from peregrine.kernels.moe.gather_triton import gather

    experts = draw(num_rows, num_experts).argsort(dim=1)[:, :choices].int()
    x, choice = draw(num_rows, 20), ExpertChoice(experts, draw(num_rows, choices, seed=1))
    squares = torch.stack([squares_of(x), torch.zeros(num_rows, dtype=torch.int64)], dim=1)
    gathered, factors, blocks, places = gather(x, (squares, 1e-6), choice, num_experts, 16)
    count, flat, at = int(blocks[0]), experts.flatten(), places.long()
    assert places.unique().numel() == len(places)
    assert count == sum(-(-int(hits) // 16) for hits in flat.bincount())
    assert torch.equal(blocks[1 : 1 + 2 * count : 2][at // 16], flat)
    assert bool((at % 16 < blocks[2 : 2 + 2 * count : 2][at // 16]).all())
    assert torch.equal(gathered[at], x.repeat_interleave(choices, 0))
    assert torch.equal(factors[1, at], choice.weights.flatten())
    scales = 1 / (x.pow(2).mean(dim=1) + 1e-6).sqrt()
    torch.testing.assert_close(factors[0, at], scales.repeat_interleave(choices))


@needs_interpreter
def test_outputs_at_places_add_up_to_the_same_bits() -> None:
    from peregrine.kernels.moe.combine_triton import combine

    outputs, residual, norm = draw(9 * 3, HIDDEN), draw(9, HIDDEN, seed=1), draw(HIDDEN, seed=2)
    places = torch.randperm(40, generator=torch.Generator().manual_seed(0))[: len(outputs)]
    spread = torch.full((40, HIDDEN), torch.nan)
    spread[places] = outputs
    made = [(*torch.empty(2, 9, HIDDEN), torch.zeros(9, 2).long(), torch.zeros(9, 2).long()) for _ in range(2)]
    combine(outputs, residual, norm, made[0])
    combine(spread, residual, norm, made[1], places.int())
    assert all(map(torch.equal, *made))


@needs_interpreter
def test_long_inputs_are_cut(triton_experts: Experts, monkeypatch: pytest.MonkeyPatch) -> None:
    from peregrine.kernels.moe import triton as experts_gpu

    choice, x = CHOICES["many"], draw(70, HIDDEN, seed=3)
    (gate_up, down), norm = triton_experts, RMSNorm(torch.ones(HIDDEN), 1e-6)
    whole = gate_up.add(down, Residual(x, x), choice, norm)
    monkeypatch.setattr(experts_gpu, "MAX_ROWS", 32)
    cut = gate_up.add(down, Residual(x, x), choice, norm)
    assert torch.equal(whole.values, cut.values)
    assert whole.squares is not None
    assert cut.squares is not None
    assert torch.equal(whole.squares, cut.squares)
    nothing = ExpertChoice(choice.experts[:0], choice.weights[:0])
    assert gate_up.add(down, Residual(x[:0], x[:0]), nothing, None).values.shape == (0, HIDDEN)


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [5e-4, 3e4], ids=["small", "large"])
def test_norms_of_small_and_of_large_values_are_right(size: float, dtype: torch.dtype) -> None:
    from peregrine.kernels.moe.triton import TritonExperts

    values = (draw(9, HIDDEN).sign() * size).to(dtype)
    gate_up, down = torch.zeros(NUM_EXPERTS, 2 * INNER, HIDDEN), torch.zeros(NUM_EXPERTS, HIDDEN, INNER)
    norm = RMSNorm(torch.full((HIDDEN,), 3.0, dtype=dtype), 1e-7)
    experts = TritonExperts(gate_up.to(dtype)), TritonExperts(down.to(dtype))
    joined = experts[0].add(experts[1], Residual(values, values), CHOICES["some"], norm)
    if joined.squares is None:
        normed = joined.normed.double()
    else:
        mean = joined.squares[:, 1].double() / (2.0**48 * HIDDEN) if size < 1 else values.double().square().mean(dim=1)
        normed = joined.normed.double() * (mean + 1e-7).rsqrt()[:, None]
    exact = 3 * values.double() * (values.double().square().mean(dim=1, keepdim=True) + 1e-7).rsqrt()
    torch.testing.assert_close(normed, exact, rtol=2.0**-7, atol=0.0)
