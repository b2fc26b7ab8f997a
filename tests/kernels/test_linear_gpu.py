"""The linear kernel in the interpreter: correct results with every fused part, independent of the tile.

Where rounding would blur what is tested, inputs are whole numbers: every sum is exact, whatever its order.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from peregrine.errors import ConfigError
from peregrine.hardware import triton_interprets
from peregrine.kernels.linear import DenseWeight, workspace_bytes
from peregrine.kernels.linear.tiles import (
    HEIGHTS,
    LARGE_COLS,
    LARGE_HEIGHT,
    MAX_ROWS,
    MIN_DEPTH,
    MULTIPROCESSORS,
    ON_H200,
    SPLIT_DEPTH,
    TABLES,
    LargePlan,
    Tile,
    large_plan,
    large_plans,
    pick_split,
    pick_tile,
    tall_tile,
    workspace_sizes,
)
from peregrine.kernels.runtime.gpu import TRITON_PRESENT

if not (TRITON_PRESENT and triton_interprets()):
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from kernels.compile_experts import RMSNorm
from peregrine.kernels.linear import triton as gpu
from peregrine.kernels.linear.triton import TritonWeight
from peregrine.kernels.residual import Residual

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of inf

EPS = 1e-5
ROWS = (1, 5, 17, 130)
SHAPES = [(80, 96), (7, 16), (80, 2048)]  # outputs, inputs: unsplit, less than a tile, split
IDS = ["unsplit", "narrow", "split"]
UNIT = 2**24  # of a square
TILES = [Tile(16, 32, 16, 4, 1), Tile(32, 64, 32, 4, 1), Tile(128, 16, 64, 4, 1)]


def draw(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed + size[0]))


def whole(*size: int, seed: int = 0) -> Tensor:
    """Whole numbers so small that no sum of their products is rounded in float32."""
    return torch.randint(-4, 5, size, generator=torch.Generator().manual_seed(seed + size[0])).float()


def squares_of(values: Tensor) -> list[int]:
    """Each row's sum of squares in units, counted by Python: squares are float32, parts of a unit are dropped."""
    squares = (values.float() * values.float()).double()
    return [sum(int(square * UNIT) for square in row) for row in squares.tolist()]


def sums_of(values: Tensor) -> Tensor:
    """[N, 2] i64: each row's sums of squares in coarse and in fine units; parts of a unit are dropped."""
    squares = (values.float() * values.float()).double()
    fine = torch.where(squares < 1, squares, 0.0) * 2.0**48
    return torch.stack([(squares * 2.0**24).long().sum(dim=1), fine.long().sum(dim=1)], dim=1)


def weights_of(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    return draw(*shape, seed=1) * shape[1] ** -0.5, draw(shape[0], seed=2)


def add(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor, squares: Tensor, stale: Tensor
) -> tuple[Tensor, Tensor]:
    """(sum, sum * norm) of the linear and the residual; the sum's squares are added to `squares`."""
    joined = TritonWeight(weight, bias).add(x, Residual(residual, residual, stale, squares), RMSNorm(norm, EPS))
    assert joined.squares is squares
    assert joined.spare is stale
    assert joined.eps == EPS
    return joined.values, joined.normed


def scaled(x: Tensor, squares: Tensor, weight: Tensor, bias: Tensor | None = None, gate: bool = False) -> Tensor:
    """The linear of a residual whose norm is split: x is its values times the norm's weight."""
    packed, residual = TritonWeight(weight, bias), Residual(x, x, squares, torch.zeros_like(squares), EPS)
    return packed.gated(residual) if gate else packed.linear_normed(residual)


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_kernel_is_the_twin_within_rounding(shape: tuple[int, int], with_bias: bool) -> None:
    weight, bias = weights_of(shape)
    kept = bias if with_bias else None
    for rows in ROWS:
        x = draw(rows, shape[1])
        y = TritonWeight(weight, kept).linear(x)
        exact = x.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
        # One rounding for each product and each sum, of at most half a unit in the last place.
        bound = (shape[1] + 2) * 2.0**-23 * (x.abs() @ weight.abs().T + bias.abs())
        assert bool(((y - exact).abs() <= bound).all())
        twin = DenseWeight(weight, kept).linear(x)
        assert bool(((y - twin).abs() <= 2 * bound).all())


def test_no_rows_are_no_launch() -> None:
    weight, bias = weights_of((80, 96))
    assert TritonWeight(weight, bias).linear(torch.empty(0, 96)).shape == (0, 80)


def test_rows_may_be_strided() -> None:
    weight, bias = weights_of((80, 96))
    wide = draw(5, 200)
    for x in (wide[:, :96], wide[:, 100:196], wide.T.contiguous().T[:, :96]):
        assert torch.equal(TritonWeight(weight, bias).linear(x), TritonWeight(weight, bias).linear(x.contiguous()))


def test_the_residual_may_be_strided() -> None:
    x, weight, wide = whole(5, 96), whole(80, 96, seed=1), whole(5, 200, seed=2)
    squares, stale = torch.zeros(2, 5, 2, dtype=torch.int64)
    total, _ = add(x, weight, None, wide[:, :80], torch.ones(80), squares, stale)
    assert torch.equal(total, x @ weight.T + wide[:, :80])


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_nothing_outside_the_outputs_is_written(shape: tuple[int, int]) -> None:
    weight, _ = weights_of(shape)
    for rows in (5, 17):
        held = torch.full((rows + 130, shape[0]), torch.nan)
        gpu.run(draw(rows, shape[1]), TritonWeight(weight, None), held[:rows])
        assert not held[:rows].isnan().any()
        assert held[rows:].isnan().all()


@pytest.mark.parametrize("gate", [False, True], ids=["plain", "gate"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("inputs", [96, 2048])
def test_scaled_is_the_linear_of_the_norm(gate: bool, with_bias: bool, inputs: int) -> None:
    weight, bias = weights_of((160, inputs))
    values, norm = draw(17, inputs, seed=3) * 3, draw(inputs, seed=4)
    squares = sums_of(values)
    wide = values.double()
    normed = wide / (wide.square().mean(dim=1, keepdim=True) + EPS).sqrt() * norm.double()
    exact = F.linear(normed, weight.double(), bias.double() if with_bias else None)
    if gate:
        exact = F.silu(exact[:, :80]) * exact[:, 80:]
    y = scaled(values * norm, squares, weight, bias if with_bias else None, gate)
    torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
@pytest.mark.parametrize("rows", ROWS)
def test_adding_prepares_the_residual_for_its_next_norm(rows: int, shape: tuple[int, int]) -> None:
    weight, bias = weights_of(shape)
    x, residual, norm = draw(rows, shape[1]), draw(rows, shape[0], seed=5), draw(shape[0], seed=6)
    squares, stale = torch.zeros(rows, 2, dtype=torch.int64), torch.full((rows, 2), 99)
    total, prepared = add(x, weight, bias, residual, norm, squares, stale)
    plain = DenseWeight(weight, bias).linear(x) + residual
    torch.testing.assert_close(total, plain, rtol=1e-5, atol=1e-5)
    assert torch.equal(prepared, total * norm)
    assert squares[:, 0].tolist() == squares_of(total)
    assert not stale.any()


def test_squares_are_added_to_what_is_there() -> None:
    x, weight, residual = whole(5, 96), whole(80, 96, seed=1), whole(5, 80, seed=2)
    squares = torch.arange(5)[:, None].repeat(1, 2)
    total, _ = add(x, weight, None, residual, torch.ones(80), squares, torch.zeros_like(squares))
    assert squares[:, 0].tolist() == [row + count for row, count in enumerate(squares_of(total))]


def add_to(residual: Tensor) -> tuple[Tensor, list[int]]:
    """(prepared for the next norm, squares) of a residual to which nothing is added."""
    rows, size = residual.shape
    squares = torch.zeros(rows, 2, dtype=torch.int64)
    nothing = torch.zeros(rows, 96), torch.zeros(size, 96), None
    _, prepared = add(*nothing, residual, torch.ones(size), squares, torch.zeros_like(squares))
    return prepared, squares[:, 0].tolist()


@pytest.mark.parametrize("value", [2.0**17 + 1, 1e6, -1e30, float("inf"), float("nan")])
def test_a_value_too_large_to_square_makes_its_row_nan_and_no_other(value: float) -> None:
    """The norm of such a row overflows, and a wrong result would be worse than NaN."""
    residual = torch.zeros(2, 80)
    residual[1, 3], residual[:, 70] = value, 0.5
    prepared, squares = add_to(residual)
    assert prepared[1, 3].isnan()
    assert prepared[0].equal(residual[0])
    assert squares[0] == UNIT // 4


def test_thirty_one_of_the_largest_values_are_counted_exactly() -> None:
    residual = torch.zeros(1, 80)
    residual[0, :31] = 2.0**17
    prepared, squares = add_to(residual)
    assert prepared.equal(residual)
    assert squares == [31 * 2**34 * UNIT]


def test_inputs_that_no_matrix_instruction_takes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a linear of 40 inputs.*multiples of 16"):
        pick_tile(4, 64, 40, gate=False)


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launches of at most 32 rows, with a workspace of that size."""
    monkeypatch.setattr(gpu, "MAX_ROWS", 32)
    gpu._workspace.cache_clear()
    yield
    gpu._workspace.cache_clear()


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_many_rows_are_cut_into_launches(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, inputs = shape
    x, weight, residual = whole(70, inputs), whole(outputs, inputs, seed=1), whole(70, outputs, seed=2)
    norm = whole(outputs, seed=3)
    grids: list[tuple[int, ...]] = []
    launch = gpu.launch

    def counted(kernel: object, grid: tuple[int, ...], *arguments: object, **options: object) -> None:
        grids.append(grid)
        launch(kernel, grid, *arguments, **options)

    monkeypatch.setattr(gpu, "launch", counted)
    squares, stale = torch.zeros(70, 2, dtype=torch.int64), torch.full((70, 2), 7)
    total, prepared = add(x, weight, None, residual, norm, squares, stale)
    assert len(grids) == 3
    assert torch.equal(total, x @ weight.T + residual)
    assert torch.equal(prepared, total * norm)
    assert squares[:, 0].tolist() == squares_of(total)
    assert not stale.any()
    values = scaled(x, squares, weight)
    alone = scaled(x[64:], squares[64:], weight)
    assert torch.equal(values[64:], alone)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("split", [1, 2])
def test_the_tile_changes_no_bit_of_what_is_exact(tile: Tile, split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = whole(21, 128), whole(80, 128, seed=1), whole(80, seed=2)
    residual, norm = whole(21, 80, seed=3), whole(80, seed=4)
    monkeypatch.setattr(gpu, "pick_tile", lambda *_: replace(tile, split=split))
    squares, stale = torch.zeros(2, 21, 2, dtype=torch.int64)
    total, prepared = add(x, weight, bias, residual, norm, squares, stale)
    expected = x @ weight.T + bias + residual
    assert torch.equal(total, expected)
    assert torch.equal(prepared, expected * norm)
    assert squares[:, 0].tolist() == squares_of(expected)
    if split > 1:
        assert not gpu._workspace(x.device)[1].any(), "the next launch counts from zero"


@pytest.mark.parametrize(("split", "total"), [(1, 1.0), (2, 0.0)])
def test_inputs_are_added_in_order(split: int, total: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Big, 1, -big, 1, each in a block of its own: in one chain the first 1 is lost, in two chains both are."""
    big = 2.0**25  # its neighbours in float32 are 2 and 4 apart
    weight = torch.zeros(16, 64)
    weight[:, ::16] = torch.tensor([big, 1.0, -big, 1.0])
    monkeypatch.setattr(gpu, "pick_tile", lambda *_: Tile(16, 16, 16, 4, 1, split))
    assert torch.equal(TritonWeight(weight, None).linear(torch.ones(3, 64)), torch.full((3, 16), total))


sizes = st.integers(1, 1 << 18)


@given(sizes, st.integers(1, 4096), st.booleans(), st.lists(st.integers(0, 10_000), min_size=2, max_size=5))
def test_rows_choose_the_tile_and_never_the_split(outputs: int, blocks: int, gate: bool, rows: list[int]) -> None:
    inputs = blocks * MIN_DEPTH
    tiles = [pick_tile(count, outputs, inputs, gate) for count in rows]
    assert {tile.split for tile in tiles} == {pick_split(outputs, inputs, gate)}
    for tile in tiles:
        assert inputs % (tile.split * tile.depth) == 0
        assert tile.depth >= MIN_DEPTH


@pytest.mark.parametrize("kind", TABLES)
def test_tiles_fit_a_multiprocessor(kind: str) -> None:
    """What loads in flight take of an H200's shared memory."""
    for rows, (cols, depth, _, stages) in TABLES[kind].items():
        assert rows in HEIGHTS
        weights = cols * (2 if kind == "gated" else 1)
        assert 2 * stages * depth * (rows + weights) <= 227 * 1024


@pytest.mark.parametrize(
    ("outputs", "inputs", "split"),
    [(4096, 14336, 2), (6144, 4096, 1), (2048, 4096, 4), (2048, 10944, 3), (1024, 4096, 8), (256, 512, 1)],
)
def test_few_tiles_are_shared_by_as_many_programs_as_there_are_multiprocessors(
    outputs: int, inputs: int, split: int
) -> None:
    assert pick_split(outputs, inputs, gate=False) == split
    assert pick_split(outputs, inputs, gate=True) == 1


@given(st.integers(1, 10240), st.integers(8, 256), st.integers(1, 128))
def test_programs_that_share_tiles_all_start_at_once(outputs: int, blocks: int, rows: int) -> None:
    """For up to one tile of rows: a second wave of programs would start only after the first."""
    tile = pick_tile(rows, outputs, SPLIT_DEPTH * blocks, gate=False, on_hopper=True)
    assume(tile.split > 1)
    programs = tile.split * -(-outputs // tile.cols)
    shared_bytes = 2 * tile.stages * tile.depth * (tile.rows + tile.cols)
    assert programs <= MULTIPROCESSORS * (ON_H200.shared_bytes // shared_bytes)


@given(st.integers(1, 5120), st.integers(1, MAX_ROWS), st.integers(16, 256))
def test_partial_sums_find_room(outputs: int, rows: int, blocks: int) -> None:
    """Every program that shares a tile has its own place within the workspace."""
    tile = pick_tile(rows, outputs, SPLIT_DEPTH * blocks, gate=False)
    assume(tile.split > 1)
    partial, arrived = gpu._workspace(torch.device("cpu"))
    assert 4 * (partial.numel() + arrived.numel()) == workspace_bytes(torch.device("cuda"))
    tiles = -(-outputs // tile.cols) * -(-rows // tile.rows)
    assert tiles * tile.split * tile.rows * tile.cols <= partial.numel()
    assert tiles <= arrived.numel()


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "gate", "add", "plan"),
    [
        (128, 6144, 4096, False, False, None),  # tiles of the table have as many rows
        (64, 14336, 4096, True, False, None),
        (65, 14336, 4096, True, False, LargePlan(112, 112)),  # busy enough
        (128, 32000, 4096, False, False, LargePlan(125, 125)),
        (128, 32000, 4096, False, True, None),
        (130, 1024, 4096, False, False, None),  # tiles of all rows fill the device
        (129, 8192, 4096, False, True, None),
        (640, 6144, 4096, False, False, LargePlan(120, 120)),
        (4096, 6144, 4096, False, False, LargePlan(132, 22 * 24, groups=3)),
        (192, 14336, 4096, True, False, LargePlan(112, 112, groups=3)),  # all rows in one wave of tiles
        (192, 128256, 4096, False, False, LargePlan(132, 501, groups=3)),  # four waves, where others need eight
        (193, 14336, 4096, True, False, LargePlan(132, 132, 124, 3)),  # a wave, and three quarters of one
        (192, 8192, 4096, True, False, LargePlan(128, 0, 128, 2, groups=3)),
        (384, 6144, 4096, False, False, LargePlan(96, 0, 96, 3)),
        (512, 6144, 4096, False, False, LargePlan(128, 0, 128, 3)),  # 96 tiles leave programs idle
        (768, 6144, 4096, False, False, LargePlan(128, 0, 128, 3, groups=3)),
        (640, 14336, 4096, True, False, LargePlan(132, 4 * 132, 128, 1)),  # of 32 tiles
        (576, 14336, 4096, True, False, LargePlan(132, 2 * 132, 96, 3, groups=3)),  # of 72 tiles
        (192, 16384, 4096, False, True, LargePlan(128, 128, groups=3, eighths=4)),
        (192, 4096, 14336, False, True, None),
        (193, 4096, 14336, False, True, LargePlan(128, 0, 128, split=2, eighths=4)),
        (257, 1024, 4096, False, False, LargePlan(24, 24, split=8, eighths=4)),
        (384, 4096, 14336, False, True, LargePlan(128, 0, 128, split=2, groups=3, eighths=4)),
        (512, 4096, 14336, False, True, LargePlan(128, 0, 128, split=2)),  # two programs for each tile
        (513, 4096, 14336, False, True, LargePlan(130, 130, split=2, eighths=5)),  # 80 of 128 by 256, 96 of 192 by 128
        (640, 4096, 4096, False, True, LargePlan(130, 130, split=2, eighths=5)),
        (641, 4096, 4096, False, True, LargePlan(128, 128, split=2, groups=3, eighths=4)),
        (896, 4096, 14336, False, True, LargePlan(112, 112, split=2)),
        (1025, 4096, 14336, False, True, LargePlan(132, 132, 120, split=2, groups=3, eighths=4)),  # a wave and parts
        (1153, 4096, 14336, False, True, LargePlan(132, 264, 112, split=2, eighths=4)),
        (1281, 4096, 14336, False, True, LargePlan(132, 224, split=2, groups=3, eighths=4)),
        (2432, 4096, 14336, False, True, LargePlan(132, 264, 80, split=2)),
        (8192, 4096, 14336, False, True, LargePlan(132, 1024, split=2)),
        (4096, 14336, 4096, True, False, LargePlan(132, 27 * 132, 80, 1)),
        (4224, 14336, 4096, True, False, LargePlan(132, 22 * 112 - 90, 120, 3, groups=3)),  # of the last 6 rows' 15
        (8192, 14336, 4096, True, False, LargePlan(132, 36 * 132, 128, 2, groups=3)),
        (8192, 14332, 4096, True, False, None),  # rows of outputs that do not start at multiples of 16 bytes
        (8192, 6144, 192, False, False, None),  # fewer steps than the ring has places
    ],
)
def test_many_rows_have_a_plan_of_their_own(
    rows: int, outputs: int, inputs: int, gate: bool, add: bool, plan: LargePlan | None
) -> None:
    assert large_plan(rows, outputs, inputs, gate, add) == plan


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "gate", "tile"),
    [
        (192, 4096, 14336, False, Tile(128, 64, 64, 4, 6, 2, tail=64)),
        (129, 4096, 14336, False, Tile(128, 64, 64, 4, 6, 2, tail=64)),
        (193, 4096, 14336, False, None),
        (256, 2048, 8192, False, Tile(128, 64, 64, 4, 5, 4, tail=128)),  # in four parts
        (256, 4608, 14336, False, None),
        (256, 6144, 4096, False, Tile(128, 64, 64, 4, 5, 1, tail=128)),
        (192, 6144, 4096, False, Tile(128, 64, 64, 4, 6, 1, tail=64)),
        (192, 128256, 4096, False, None),
        (192, 16384, 4096, False, None),  # more than the device computes at once
        (192, 14336, 4096, True, None),
        (128, 4096, 14336, False, None),
    ],
)
def test_all_rows_may_share_a_tile(rows: int, outputs: int, inputs: int, gate: bool, tile: Tile | None) -> None:
    split = pick_split(outputs, inputs, gate)
    assert tall_tile(rows, outputs, inputs, gate, split) == tile
    if tile is not None:
        assert pick_tile(rows, outputs, inputs, gate, on_hopper=True) == tile
        assert pick_tile(rows, outputs, inputs, gate).tail == 0, "the Triton kernel has no tails"
        ring = tile.stages * (tile.rows + tile.tail + tile.cols * (2 if gate else 1)) * tile.depth * 2
        assert ring + 1024 <= ON_H200.shared_bytes


@pytest.mark.parametrize("outputs", [4096, 6144, 128256])
def test_tiles_have_parts_that_are_whole(outputs: int) -> None:
    """On Hopper copies of rows past the last one are slow. A tail that has more rows than are left begins earlier."""
    for rows in range(HEIGHTS[0], HEIGHTS[-1] + 1):
        tile = pick_tile(rows, outputs, 4096, gate=False, on_hopper=True)
        assert tile.tail <= tile.rows <= rows <= tile.rows + tile.tail, rows


@given(st.integers(65, 9000), st.integers(1, 4096), st.integers(40, 160))
def test_the_last_tiles_are_left_to_pairs_of_programs(rows: int, outputs: int, num_sms: int) -> None:
    """All tiles are whole, or have two programs that run at the same time, after rounds in which all are busy."""
    plans = large_plans(rows, 8 * outputs, gate=False, add=True, split=2, num_sms=num_sms)
    for plan in plans:
        cols = LARGE_COLS * plan.eighths // 8
        tiles = -(-rows // (plan.groups * LARGE_HEIGHT)) * -(-8 * outputs // cols)
        assert 2 * (tiles - plan.tiles) == plan.pieces <= plan.programs <= num_sms
        assert not plan.pieces or plan.tiles % num_sms == 0
    assert any(plan.pieces == 0 for plan in plans)


@given(st.integers(65, 9000), st.integers(1, 4096), st.booleans(), st.integers(40, 160))
def test_all_columns_of_the_last_tiles_are_in_a_piece(rows: int, outputs: int, gate: bool, num_sms: int) -> None:
    """Pieces have all quarters of the tiles that are cut, hardly more, and no program has two."""
    for plan in large_plans(rows, 8 * outputs, gate, add=False, split=1, num_sms=num_sms):
        height = -(-rows // (plan.groups * LARGE_HEIGHT))
        tiles = height * -(-8 * outputs // (LARGE_COLS // 2 if gate else LARGE_COLS))
        quarters = 4 * (tiles - plan.tiles)
        assert plan.pieces <= plan.programs <= num_sms
        assert quarters == 0 if not plan.pieces else quarters <= plan.rest * plan.pieces < quarters + 3 * height
        if plan.pieces:
            assert plan.tiles <= tiles // num_sms * num_sms, "the others are done in rounds of all programs"


def test_pairs_and_parked_sums_have_their_places_in_the_workspace() -> None:
    partial, arrived = workspace_sizes()
    chunk, sums = 64, 2 * LARGE_HEIGHT * LARGE_COLS
    parked = MULTIPROCESSORS * 2 * LARGE_HEIGHT * chunk
    assert parked + MULTIPROCESSORS // 2 * sums <= partial  # pairs: half of each part's sums, of three groups fewer
    assert arrived >= MULTIPROCESSORS // 2 * 3 * 2
