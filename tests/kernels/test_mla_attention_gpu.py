"""The Triton kernels of MLA in the interpreter: bits independent of how the work is shared.

The conformance kit compares outputs with float64; here are internals that it does not see.
"""

from dataclasses import replace
from types import FunctionType

import pytest
import torch
from torch import Tensor

from peregrine.attention import LayerAttention
from peregrine.attention.conformance.paging import Forward, Layout, lay_out
from peregrine.attention.conformance.problem import Row, chain, tree
from peregrine.attention.torch_backend import TorchBackend
from peregrine.hardware import triton_interprets
from peregrine.kernels.runtime.gpu import TRITON_PRESENT

if not (TRITON_PRESENT and triton_interprets()):
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

import triton

from peregrine.kernels.attention import GpuPlan, Kernel, Launch, mla_merge_triton, mla_num_splits, mla_triton
from peregrine.kernels.attention import plan as plans
from peregrine.kernels.attention.mla_triton import mla_attention
from peregrine.kernels.attention.plan import BLOCK, MLA_MAX_SPLITS, mla_max_keys, mla_split_width
from peregrine.kernels.attention.plan_triton import plan_gpu

RANK = 32
HEADS = (4, 1, RANK + 16, RANK)
LAYER = LayerAttention(0.2, None, None)
CONTEXT = Launch(Kernel.CONTEXT, False, 16, 0)


def opened(rows: list[Row]) -> tuple[Forward, Tensor, GpuPlan]:
    """The rows laid out with all their keys written, the layer's keys, and the plan."""
    forward = lay_out(rows, Layout())
    m = forward.metadata
    forward.store.write(1, m.slots, forward.k, forward.v)
    plan = plan_gpu(m.positions, m.q_starts, m.past_lens, m.page_table, m.page_size, m.ancestors)
    return forward, forward.store.keys[1], plan


def split_kv(programs: int, tile: int = 16) -> Launch:
    return Launch(Kernel.DECODE, False, tile, programs)


def decode(rows: list[Row], programs: int, tile: int = 16) -> Tensor:
    forward, keys, plan = opened(rows)
    return mla_attention(forward.q, keys, plan, split_kv(programs, tile), rows[0].v.shape[2], LAYER.scale)


def context(rows: list[Row], tile: int = 32) -> Tensor:
    forward, keys, plan = opened(rows)
    how = Launch(Kernel.CONTEXT, False, tile, 0)
    return mla_attention(forward.q, keys, plan, how, rows[0].v.shape[2], LAYER.scale)


def test_splits_are_whole_blocks_and_no_more_than_there_is_room_for() -> None:
    for keys in [*range(1, 40000, 7), 16896, 16897, 25344, 25345, 81920, 131072, 1_000_000]:
        width = mla_split_width(keys)
        assert width % BLOCK == 0
        assert -(-keys // width) <= mla_num_splits(keys) <= MLA_MAX_SPLITS
        assert keys <= mla_max_keys(width)
        assert width == mla_split_width(mla_max_keys(width)) < mla_split_width(mla_max_keys(width) + 1)
    widths = [mla_split_width(keys) for keys in (0, 1, 16896, 16897, 25344, 25345, 82700)]
    assert widths == [64, 128, 128, 192, 192, 256, 640]  # the first is that of a query that sees nothing


@pytest.mark.parametrize("programs", [1, 2, 3, 7])
def test_the_number_of_programs_changes_no_bit(programs: int) -> None:
    rows = [chain(past, 3, HEADS) for past in (0, 300, 700)]
    assert torch.equal(decode(rows, programs), context(rows))


@pytest.mark.parametrize("tile", [16, 32, 64])
def test_the_height_of_a_tile_changes_no_bit_here(tile: int) -> None:
    rows = [chain(0, 37, HEADS), chain(140, 5, HEADS), chain(3, 1, HEADS)]
    assert torch.equal(context(rows, tile), context(rows))
    rows = [chain(past, 5, HEADS) for past in (0, 140)]
    assert torch.equal(decode(rows, 3, tile), context(rows))


@pytest.mark.parametrize("num_heads", [1, 5, 20, 70])
def test_heads_may_fill_part_of_a_tile_or_several(num_heads: int) -> None:
    rows = [chain(past, 2, (num_heads, 1, 72, 48)) for past in (0, 140)]
    forward, _, _ = opened(rows)
    expected = torch.cat(forward.run(TorchBackend(), LAYER))
    torch.testing.assert_close(context(rows), expected, atol=2e-6, rtol=1e-5)
    for tile in (16, 64):
        assert torch.equal(decode(rows, 2, tile), context(rows))


@pytest.mark.parametrize("programs", [1, 4])
def test_trees_give_the_same_bits_with_any_number_of_programs(programs: int) -> None:
    parents = [-1, 0, 0, 1, 1, 2, 3]
    rows = [tree(past, parents, HEADS) for past in (0, 126, 128, 250)]
    out = context(rows, 16)
    assert torch.equal(decode(rows, programs), out)
    assert torch.equal(context(rows, 64), out)
    for r, row in enumerate(rows):
        assert torch.equal(context([row.path_to(6)]), out[7 * r + 6 : 7 * r + 7])


FEW = 5
BORDER = 128 * FEW


@pytest.fixture
def few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most five splits, on host and device: they get wider after 640 keys instead of 16,896."""
    monkeypatch.setattr(plans, "MLA_MAX_SPLITS", FEW)
    for name, function in (("split_width", mla_split_width), ("max_keys", mla_max_keys)):
        monkeypatch.setattr(function, "__defaults__", (FEW, *(function.__defaults__ or ())[1:]))
        copied = FunctionType(function.__code__, function.__globals__)  # what is interpreted is kept by function
        for kernels in (mla_triton, mla_merge_triton):
            if name in vars(kernels):
                monkeypatch.setattr(kernels, name, triton.jit(copied))
    assert mla_max_keys(128) == BORDER


@pytest.mark.usefixtures("few_splits")
def test_wide_splits_are_added_in_order() -> None:
    row = chain(BORDER + 100, 2, HEADS)
    out = decode([row], 5)
    assert torch.equal(out, context([row]))
    forward, _, _ = opened([row])
    assert torch.allclose(out, forward.run(TorchBackend(), LAYER)[0], atol=2e-6)


@pytest.mark.usefixtures("few_splits")
def test_a_window_across_a_change_of_split_widths() -> None:
    """Each query gives its output of a single query, though other queries' splits are wider."""
    row = chain(BORDER - 2, 4, HEADS)
    whole = decode([row, chain(7, 4, HEADS)], 5)[:4]
    assert torch.equal(whole, context([row]))
    for i in (1, 2):
        assert torch.equal(decode([row.at(i)], 3), whole[i : i + 1])


@pytest.mark.usefixtures("few_splits")
def test_a_tree_across_a_change_of_split_widths() -> None:
    """The root and its children still have the narrow splits, nodes deeper than that the wide ones."""
    parents = [-1, 0, 0, 1, 1, 2, 3]
    row = tree(BORDER - 2, parents, (2, *HEADS[1:]))  # two heads of seven nodes fill one tile
    whole = decode([row], 4)
    assert torch.equal(whole, context([row], 16))
    for node in (1, 6):
        assert torch.equal(context([row.path_to(node)]), whole[node : node + 1])


@pytest.mark.parametrize("past", [0, 62, 63, 64, 127, 128, 191])
def test_keys_that_end_at_any_border_are_all_read(past: int) -> None:
    row = chain(past, 1, HEADS)
    forward, _, _ = opened([row])
    torch.testing.assert_close(context([row]), forward.run(TorchBackend(), LAYER)[0], atol=2e-6, rtol=1e-5)
    assert torch.equal(decode([row], 3), context([row]))


@pytest.mark.parametrize("jump", [-300.0, 300.0])
def test_very_different_scores_give_no_infinity(jump: float) -> None:
    """Keys of one split have zero weight beside those of the other."""
    row = chain(255, 1, HEADS)
    row.q[:], row.k[:128], row.k[128:] = 1.0, 0.1, 0.1 + jump / 10
    forward, _, _ = opened([row])
    out = context([row])
    assert torch.equal(decode([row], 2), out)
    torch.testing.assert_close(out, forward.run(TorchBackend(), LAYER)[0], atol=2e-6, rtol=1e-5)


def test_a_position_past_the_table_reads_the_table_and_no_further() -> None:
    forward, keys, plan = opened([chain(15, 1, HEADS)])
    far = replace(plan, positions=plan.positions + 900)
    out = mla_attention(forward.q, keys, far, CONTEXT, RANK, 0.2)
    assert torch.equal(out, mla_attention(forward.q, keys, plan, CONTEXT, RANK, 0.2))
    assert torch.equal(out, mla_attention(forward.q, keys, far, split_kv(2), RANK, 0.2))


def test_queries_may_be_strided() -> None:
    forward, keys, plan = opened([chain(140, 2, HEADS)])
    wide = torch.zeros(2, 4, HEADS[2] + 8)
    wide[..., : HEADS[2]] = forward.q
    out = mla_attention(wide[..., : HEADS[2]], keys, plan, CONTEXT, RANK, 0.2)
    assert torch.equal(out, mla_attention(forward.q, keys, plan, CONTEXT, RANK, 0.2))


def test_sizes_that_do_not_fit_the_plan_are_refused() -> None:
    forward, keys, plan = opened([chain(3, 2, HEADS)])
    with pytest.raises(ValueError, match="q has 1 tokens, but the window was planned for 2"):
        mla_attention(forward.q[:1], keys, plan, CONTEXT, RANK, 0.2)
