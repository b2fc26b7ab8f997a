"""`peregrine bench tiles`: each weight shape once, candidates that fit, the fastest tile; no figures without a GPU."""

import ast
import json
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peregrine.bench import tiles
from peregrine.bench.tiles import Line, WeightShape, best_entries, candidates, entry_of, measure, shapes_of, show
from peregrine.cli.main import main
from peregrine.errors import ConfigError
from peregrine.kernels.linear.tiles import HEIGHTS, MIN_DEPTH, TABLES, Tile, pick_tile
from spec.harness import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, VOCAB, build, eagle3_head

QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
SPLIT, PLAIN = WeightShape(4096, 4096, gate=False), WeightShape(6144, 1024, gate=False)


def test_every_weight_of_model_and_head_is_a_shape_once() -> None:
    runner = build(drafter=str(eagle3_head())).engine.runner
    reader = runner.drafter.reader  # type: ignore[attr-defined]
    q, kv = HEADS * HEAD_DIM, 2 * KV_HEADS * HEAD_DIM
    model = {
        WeightShape(QKV, HIDDEN, gate=False),
        WeightShape(q, HIDDEN, gate=False),  # the last layer projects queries separately
        WeightShape(kv, HIDDEN, gate=False),
        WeightShape(HIDDEN, q, gate=False),
        WeightShape(INNER, HIDDEN, gate=True),
        WeightShape(HIDDEN, INNER, gate=False),
        WeightShape(VOCAB, HIDDEN, gate=False),
    }
    assert set(shapes_of([runner.target.decoder])) == model
    head = {
        WeightShape(HIDDEN, 3 * HIDDEN, gate=False),  # the taps
        WeightShape(q, 2 * HIDDEN, gate=False),
        WeightShape(kv, 2 * HIDDEN, gate=False),
        WeightShape(200, HIDDEN, gate=False),
    }
    assert set(shapes_of([runner.target.decoder, reader.head])) == model | head


@given(
    st.integers(1, 1 << 18),
    st.integers(1, 2048).map(lambda blocks: blocks * MIN_DEPTH),
    st.booleans(),
    st.sampled_from(HEIGHTS),
    st.booleans(),
)
def test_candidates_divide_the_inputs_and_the_chosen_tile_is_among_them(
    outputs: int, inputs: int, gate: bool, rows: int, on_hopper: bool
) -> None:
    tried = candidates(WeightShape(outputs, inputs, gate, on_hopper), rows)
    chosen = pick_tile(rows, outputs, inputs, gate, on_hopper)
    assert chosen in tried
    assert len(set(tried)) == len(tried)
    for tile in tried:
        assert (tile.rows, tile.split) == (rows, chosen.split)  # a split would change bits
        assert inputs % (tile.split * tile.depth) == 0
        assert not on_hopper or tile.cols % (16 * tile.warps) == 0  # a warp has 16 outputs, or twice as many


def timed(favourite: tuple[int, int, int, int]) -> Callable[[WeightShape, Tile], float | None]:
    """One tile takes 5 us, the others 10; those of 8 warps do not fit."""

    def time_us(shape: WeightShape, tile: Tile) -> float | None:
        if entry_of(tile) == favourite:
            return 5.0
        return None if tile.warps == 8 else 10.0

    return time_us


def test_the_fastest_tile_is_printed_beside_the_chosen_one() -> None:
    line = measure(SPLIT, 16, timed((128, 64, 4, 3)))
    facts = line.facts()
    assert (line.fastest, facts["fastest_us"]) == ((128, 64, 4, 3), 5.0)
    assert (line.chosen, facts["chosen_us"], facts["ratio"]) == (TABLES["split"][16], 10.0, 2.0)
    assert facts["times"][0] == {"tile": [128, 64, 4, 3], "us": 5.0}
    assert all(entry[2] == 4 for entry in line.times)


def test_a_chosen_tile_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ConfigError, match="does not fit this device"):
        measure(PLAIN, 128, timed((64, 64, 4, 3)))  # the table has 8 warps there


def line_of(outputs: int, times: dict[tuple[int, int, int, int], float]) -> Line:
    return Line(WeightShape(outputs, 4096, gate=False), 16, next(iter(times)), times)


def test_a_kind_takes_the_entry_that_is_least_slow_over_its_shapes() -> None:
    """b is never the fastest, but a and c are slow on some shapes; all shapes have equal weight."""
    a, b, c = (64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 4, 5)
    lines = [line_of(1024, {a: 10.0, b: 11.0, c: 20.0}), line_of(4096, {a: 200.0, b: 110.0, c: 100.0})]
    assert best_entries(lines) == {"split": {16: b}}
    assert best_entries([lines[0], line_of(4096, {a: 1.0})]) == {"split": {16: a}}  # the others did not fit


def test_the_last_lines_can_be_pasted() -> None:
    lines = [measure(shape, rows, timed((64, 64, 4, 3))) for shape in (SPLIT, PLAIN) for rows in (16, 32)]
    result: dict[str, object] = {"model": "m", "drafter": "none", "dtype": "bfloat16"}
    result |= {"lines": [line.facts() for line in lines], "tables": best_entries(lines)}
    shown = show(result).splitlines()
    pasted = ast.literal_eval("{" + "".join(shown[-2:]) + "}")
    assert pasted == {kind: dict.fromkeys((16, 32), (64, 64, 4, 3)) for kind in ("split", "plain")}
    assert len(shown) == 2 + len(lines) + 1 + 2


def test_rows_without_a_table_entry_are_refused() -> None:
    with pytest.raises(ConfigError, match="rows=24: tiles are 16, 32, 64, 128 rows high"):
        tiles.run("shape:llama-3.2-1b", "none", (16, 24), "auto")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is something to measure")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("bench", "tiles", "--model", "shape:llama-3.1-8b")) == 2
    assert "bench tiles: measures CUDA devices" in capsys.readouterr().err


def test_the_command_prints_and_writes_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    asked: list[object] = []

    def run(*arguments: object) -> dict[str, object]:
        asked.extend(arguments)
        return {"benchmark": "tiles", "lines": []}

    monkeypatch.setattr(tiles, "run", run)
    out = tmp_path / "deep" / "tiles.json"
    argv = ("bench", "tiles", "--model", "m", "--rows", "16", "64", "--json", "--out", str(out))
    assert main(argv) == 0
    assert asked == ["m", "auto", (16, 64), "auto"]
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())
