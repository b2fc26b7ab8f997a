"""The Triton attention kernels in the interpreter: edge cases, and bits independent of how the work is shared.

The conformance kit compares outputs with float64; here are internals that it does not see.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from peregrine.attention import LayerAttention
from peregrine.attention.conformance.paging import Forward, Layout, lay_out
from peregrine.attention.conformance.problem import Row, answer, chain, tree
from peregrine.attention.torch_backend import TorchBackend
from peregrine.cache.store import KVShape, KVStore
from peregrine.hardware import triton_interprets
from peregrine.kernels.runtime.gpu import TRITON_PRESENT

if not (TRITON_PRESENT and triton_interprets()):
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from peregrine.kernels.attention import GpuPlan, Kernel, Launch, StoredKV
from peregrine.kernels.attention.kv_write_triton import write_kv
from peregrine.kernels.attention.plan import BLOCK, TILE, num_splits, split_of_index, start_of_split
from peregrine.kernels.attention.plan_triton import plan_gpu
from peregrine.kernels.attention.triton import dense_attention

LAYER = LayerAttention(0.2, None, None)
HEADS = (4, 1, 16)
CONTEXT = Launch(Kernel.CONTEXT, False, TILE, 0)


def split_kv(programs: int) -> Launch:
    return Launch(Kernel.DECODE, False, TILE, programs)


def open_layer(forward: Forward) -> StoredKV:
    """The forward's layer, with its keys and values written."""
    store = forward.store
    store.write(1, forward.metadata.slots, forward.k, forward.v)
    scales = (None, None)
    if store.k_scales is not None and store.v_scales is not None:
        scales = (store.k_scales[1], store.v_scales[1])
    return StoredKV(store.keys[1], store.values[1], *scales)


def plan_of(forward: Forward) -> GpuPlan:
    m = forward.metadata
    return plan_gpu(m.positions, m.q_starts, m.past_lens, m.page_table, m.page_size, m.ancestors)


def decode(rows: list[Row], programs: int, layer: LayerAttention = LAYER) -> Tensor:
    forward = lay_out(rows, Layout())
    kv, plan = open_layer(forward), plan_of(forward)
    return dense_attention(forward.q, kv, plan, split_kv(programs), layer.scale, layer.window, layer.sinks)


def context(rows: list[Row], tile: int, layer: LayerAttention = LAYER) -> Tensor:
    forward = lay_out(rows, Layout())
    kv, plan = open_layer(forward), plan_of(forward)
    how = Launch(Kernel.CONTEXT, False, tile, 0)
    return dense_attention(forward.q, kv, plan, how, layer.scale, layer.window, layer.sinks)


def test_every_key_lies_in_one_split_of_whole_blocks() -> None:
    for index in [*range(0, 9000, 7), 8191, 8192, 32767, 32768, 32769, 131071, 131072]:
        split = split_of_index(index)
        assert start_of_split(split) <= index < start_of_split(split + 1)
    borders = [start_of_split(split) for split in range(200)]
    assert all(border % BLOCK == 0 for border in borders)
    assert [start_of_split(s) for s in (0, 1, 32, 33, 48, 49, 64, 65, 80, 81)] == [
        *(0, 128, 4096, 4352, 8192, 8704, 16384, 17408, 32768, 34816)
    ]
    assert [num_splits(keys) for keys in (1, 128, 129, 4096, 4097, 32768, 131072)] == [1, 1, 2, 32, 33, 80, 128]


@pytest.mark.parametrize("programs", [1, 2, 3, 7])
def test_the_number_of_programs_changes_no_bit(programs: int) -> None:
    rows = [chain(past, 3, HEADS) for past in (0, 300, 700)]
    layer = LayerAttention(0.2, 200, torch.linspace(-1, 1, 4))
    assert torch.equal(decode(rows, programs), context(rows, 16))
    assert torch.equal(decode(rows, programs, layer), context(rows, 16, layer))


@pytest.mark.parametrize("programs", [1, 4])
def test_trees_give_the_same_bits_with_any_number_of_programs(programs: int) -> None:
    parents = [-1, 0, 0, 1, 1, 2, 3]
    rows = [tree(past, parents, HEADS) for past in (0, 126, 128, 250)]
    assert torch.equal(decode(rows, programs), context(rows, 16))


def test_splits_of_every_width_are_merged_in_order() -> None:
    row = chain(9000, 2, (1, 1, 16))
    out = decode([row], 5)
    assert torch.equal(out, context([row], 16))
    forward = lay_out([row], Layout())
    assert torch.allclose(out, forward.run(TorchBackend(), LAYER)[0], atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_large_scores_move_the_top_and_small_ones_leave_it(dtype: torch.dtype) -> None:
    """Scores that grow from block to block by less and by more than what leaves a top where it is."""
    row = chain(700, 3, HEADS)
    grown = row.k * torch.arange(len(row.k)).view(-1, 1, 1) / 300
    row = replace(row, k=grown).to("cpu", dtype)
    for scale in (0.2, 1.0, 5.0):
        layer = LayerAttention(scale, None, None)
        out = context([row], 16, layer)
        assert torch.equal(decode([row], 3, layer), out)
        right = answer(row, layer, dtype)
        assert bool(((out.double() - right.out).abs() <= right.bound).all())


@pytest.mark.parametrize("past", [0, 62, 63, 64, 127, 128, 191, 319])
def test_keys_that_end_at_any_border_are_all_read(past: int) -> None:
    """One query that sees all keys, whose number ends at block and split borders."""
    row = chain(past, 1, HEADS)
    forward = lay_out([row], Layout())
    expected = forward.run(TorchBackend(), LAYER)[0]
    torch.testing.assert_close(context([row], 16), expected, atol=2e-6, rtol=1e-5)
    assert torch.equal(decode([row], 3), context([row], 16))


@pytest.mark.parametrize("tile", [32, 64])
def test_the_height_of_a_tile_changes_no_bit_here(tile: int) -> None:
    rows = [chain(0, 37, HEADS), chain(140, 5, HEADS), chain(3, 1, HEADS)]
    assert torch.equal(context(rows, tile), context(rows, 16))


def test_float8_keys_and_values_are_read_as_they_are_stored() -> None:
    rows = [chain(past, 3, HEADS) for past in (5, 140)]
    forward = lay_out(rows, Layout(kv_dtype=torch.float8_e4m3fn))
    expected = torch.cat(forward.run(TorchBackend(), LAYER))
    out = dense_attention(forward.q, open_layer(forward), plan_of(forward), split_kv(2), 0.2, None, None)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


def test_write_puts_each_token_where_the_store_would() -> None:
    stores = [KVStore(1, 4, 16, KVShape.of_heads(3, 24), torch.float32, "cpu") for _ in range(2)]
    k, v = torch.randn(5, 6, 24).split([3, 3], dim=1)  # views of a fused projection
    slots = torch.tensor([7, 3, 40, 41, 16])
    stores[0].write(0, slots, k, v)
    write_kv(StoredKV(stores[1].keys[0], stores[1].values[0], None, None), slots, k, v)
    assert torch.equal(stores[0].keys, stores[1].keys)
    assert torch.equal(stores[0].values, stores[1].values)


def test_a_position_past_the_table_reads_the_table_and_no_further() -> None:
    forward = lay_out([chain(15, 1, HEADS)], Layout())
    kv, plan = open_layer(forward), plan_of(forward)
    far = GpuPlan(plan.positions + 900, plan.q_starts, plan.past_lens, plan.page_table, 16, None, None)
    for window in (None, 4):
        out = dense_attention(forward.q, kv, far, CONTEXT, 0.2, window, None)
        assert out.isfinite().all()
        assert torch.equal(dense_attention(forward.q, kv, far, split_kv(2), 0.2, window, None), out)
    outs = [dense_attention(forward.q, kv, which, CONTEXT, 0.2, None, None) for which in (far, plan)]
    assert torch.equal(*outs)


def test_sizes_that_do_not_fit_the_plan_are_refused() -> None:
    forward = lay_out([chain(3, 2, HEADS)], Layout())
    kv, plan = open_layer(forward), plan_of(forward)
    with pytest.raises(ValueError, match="q has 1 tokens, but the window was planned for 2"):
        dense_attention(forward.q[:1], kv, plan, CONTEXT, 0.2, None, None)
    with pytest.raises(ValueError, match="k has 1 tokens and v 2, but slots has 2"):
        write_kv(kv, forward.metadata.slots, forward.k[:1], forward.v)
