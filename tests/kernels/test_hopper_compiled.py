"""Hopper's own kernels compile to the intended instructions: asynchronous copies and one wait for the kernel before."""

import json

import pytest

from kernels.outside import output_of
from peregrine.kernels.linear.tiles import HOPPER_TABLES, TALL_TILES
from peregrine.kernels.runtime.gpu import TRITON_PRESENT

MOST_SHARED = 227 * 1024  # bytes that a program can have
DENSE, PROMPT, MLA, MLA_PROMPT = (
    *("hopper_decode_kernel", "hopper_prompt_kernel"),
    *("mla_hopper_kernel", "mla_hopper_prompt_kernel"),
)
LINEAR, LARGE, EXPERTS, FEW = "hopper_kernel", "large_kernel", "experts_kernel", "few_experts_kernel"
ATTENTION = (DENSE, PROMPT, MLA, MLA_PROMPT)


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, int | str]]:
    return [json.loads(line) for line in output_of("compile_hopper.py").splitlines()]


pytestmark = pytest.mark.skipif(not TRITON_PRESENT, reason="needs triton")


def test_all_fit_a_multiprocessor(compiled: list[dict[str, int | str]]) -> None:
    assert len(compiled) == 28
    assert all(0 < int(facts["shared"]) <= MOST_SHARED for facts in compiled)


def test_every_line_of_the_tables_fits(compiled: list[dict[str, int | str]]) -> None:
    """A linear takes its ring of tiles and little more: what is compiled of the tables shows it, the rest follows."""
    lines = {(kind, rows, 0): line for kind, table in HOPPER_TABLES.items() for rows, line in table.items()}
    lines |= {(kind, *rows): line for kind, table in TALL_TILES.items() for rows, line in table.items()}
    rings = {
        (kind, rows, tail): stages * (rows + tail + cols * (2 if kind == "gated" else 1)) * depth * 2
        for (kind, rows, tail), (cols, depth, _, stages) in lines.items()
    }
    linears = {(f["kind"], f["rows"], f["tail"]): int(f["shared"]) for f in compiled if f["kernel"] == LINEAR}
    assert {kind for kind, _, tail in linears if not tail} == set(HOPPER_TABLES)
    more = max(shared - rings[line] for line, shared in linears.items())  # type: ignore[index]
    assert 0 <= more <= 1024
    assert max(rings.values()) + more <= MOST_SHARED


def test_two_programs_of_attention_fit_beside_each_other(compiled: list[dict[str, int | str]]) -> None:
    assert all(2 * int(f["shared"]) < MOST_SHARED for f in compiled if f["kernel"] == DENSE)


def test_tiles_are_copied_and_multiplied_by_hopper(compiled: list[dict[str, int | str]]) -> None:
    assert all(int(facts["matrix"]) > 0 and int(facts["copies"]) > 0 for facts in compiled)


def test_products_of_attention_wait_for_each_other_only_where_they_must(compiled: list[dict[str, int | str]]) -> None:
    """If the compiler cannot analyse one product, or registers run out, it makes each wait for the one before."""
    # In prompts two groups of warps multiply, with code of their own.
    most = {DENSE: 3, PROMPT: 8, MLA: 3, MLA_PROMPT: 10}
    assert all(int(f["held_up"]) <= most[str(f["kernel"])] for f in compiled if f["kernel"] in ATTENTION)


def test_products_for_many_rows_follow_each_other(compiled: list[dict[str, int | str]]) -> None:
    """Two waits for every loop of products, for the step before and for the last; more if registers run out.

    A group has one loop, and another one for pieces, or for parts of the last tiles.
    """
    large = [f for f in compiled if f["kernel"] == LARGE]
    whole, parts = [(8, 4), (12, 6), (8, 4), (16, 4)], [(16, 8), (24, 12), (16, 8), (16, 8)]
    cut = [(48, 12), (24, 8), (16, 8)]
    assert [(f["matrix"], f["held_up"]) for f in large] == [cut[0], *whole, *parts, *cut[1:]]


def test_products_of_few_rows_follow_each_other(compiled: list[dict[str, int | str]]) -> None:
    """Two waits for each of the two linears, as above, and no registers spilled."""
    assert [(f["matrix"], f["held_up"], f["spills"]) for f in compiled if f["kernel"] == FEW] == [(16, 4, 0)] * 2


def test_registers_for_many_rows_are_spilled_around_loops_only(compiled: list[dict[str, int | str]]) -> None:
    """None but of additions in parts, those of a part's end. A seldom path that keeps values needs far more."""
    spills = [int(f["spills"]) for f in compiled if f["kernel"] == LARGE]
    in_parts = spills[1], spills[2], spills[5], spills[6]  # whole tiles and three groups, likewise with pairs
    assert sum(spills) == sum(in_parts)
    assert max(in_parts) < 60


def test_every_warp_waits_for_the_kernel_before(compiled: list[dict[str, int | str]]) -> None:
    """Attention has two kinds of warps, and each must wait: one reads new keys, the other queries. So has LARGE."""
    # Each group of PROMPT waits, its copying warp before lengths, too; MLA_PROMPT has two groups and two that copy.
    waits = {DENSE: 2, PROMPT: 4, MLA: 2, MLA_PROMPT: 4, LARGE: 3, EXPERTS: 3, FEW: 2}
    assert {(f["kernel"], f["waits"]) for f in compiled} == {*waits.items(), (LINEAR, 1), (LARGE, 4)}  # of three groups


def test_attention_rounds_as_its_twin_does(compiled: list[dict[str, int | str]]) -> None:
    """What the compiler fuses in one kernel and not in another would give other bits: only what is written is fused."""
    assert {f["fusible"] for f in compiled if f["kernel"] in ATTENTION} == {0}
