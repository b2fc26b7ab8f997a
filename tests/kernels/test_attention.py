"""The torch reference of attention in edge cases, and the compiled CPU kernel against it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from peregrine.kernels.attention import reference as attention
from peregrine.kernels.attention.reference import BLOCK, paged_attention_torch, plan_causal, plan_tree, slots_of_rows
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT

if TYPE_CHECKING:
    from peregrine.kernels.attention.plan_cpu import CpuKV, CpuPlan

needs_numba = pytest.mark.skipif(not NUMBA_PRESENT, reason="needs numba")


def test_slots_follow_the_table_and_end_in_scratch() -> None:
    slots = slots_of_rows(torch.tensor([[3, 1], [2, 0]], dtype=torch.int32), page_size=4)
    assert slots.shape == (2, BLOCK)
    assert slots.dtype == torch.int64
    assert slots[0, :10].tolist() == [12, 13, 14, 15, 4, 5, 6, 7, 0, 0]
    assert slots[1, :9].tolist() == [8, 9, 10, 11, 0, 1, 2, 3, 0]


def test_a_tree_query_reads_its_ancestors_as_a_chain() -> None:
    slots = slots_of_rows(torch.tensor([[1, 2]]), page_size=8)  # key s lies in slot 8 + s
    words = torch.tensor([[0b00001, 0b01001, 0b11001]])
    plan = plan_tree(torch.tensor([5, 6, 7]), torch.tensor([0, 3]), torch.tensor([5]), words, slots)
    assert plan.limits.flatten().tolist() == [6, 7, 8]
    assert plan.key_slots[2, :8].tolist() == [8, 9, 10, 11, 12, 8 + 5 + 0, 8 + 5 + 3, 8 + 5 + 4]


def test_ragged_rows_find_their_tokens() -> None:
    positions = torch.tensor([4, 0, 1, 2, 9])
    slots = torch.zeros(3, BLOCK, dtype=torch.int64)
    plan = plan_causal(positions, torch.tensor([0, 1, 4, 5]), 3, slots)
    assert plan.places is not None
    assert plan.tokens is not None
    assert plan.places.flatten()[plan.tokens].tolist() == [0, 1, 2, 3, 4]
    assert plan.tokens.tolist() == [0, 3, 4, 5, 6]
    assert plan.limits.flatten()[plan.tokens].tolist() == [5, 1, 2, 3, 10]


def test_chunking_bounds_memory_and_changes_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 96, 2, 16)
    q = torch.randn(40, 6, 16)
    plan = plan_causal(torch.arange(50, 90), torch.tensor([0, 40]), 40, torch.arange(128).clamp(max=95)[None])
    whole = paged_attention_torch(q, keys, values, plan, 0.25, None, torch.randn(6))
    torch.manual_seed(0)
    monkeypatch.setattr(attention, "MAX_PRODUCTS", 1)
    keys, values = torch.randn(2, 96, 2, 16)
    q = torch.randn(40, 6, 16)
    assert torch.equal(paged_attention_torch(q, keys, values, plan, 0.25, None, torch.randn(6)), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_computes_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 64, 1, 16).to(dtype)
    q = torch.randn(2, 3, 16).to(dtype)
    plan = plan_causal(torch.tensor([40, 41]), torch.tensor([0, 2]), 2, torch.arange(64)[None])
    out = paged_attention_torch(q, keys, values, plan, 0.25, None, None)
    wide = paged_attention_torch(q.float(), keys.float(), values.float(), plan, 0.25, None, None)
    assert out.dtype == dtype
    assert torch.equal(out, wide.to(dtype))


def stored(keys: Tensor, values: Tensor) -> "CpuKV":
    """One layer's keys and values [slots, Hkv, D], as compiled kernels take them."""
    from peregrine.kernels.attention.plan_cpu import CpuKV

    return CpuKV(keys.data_ptr(), values.data_ptr(), *values.shape[1:], values.stride(0))


def plans(depths: list[int], words: list[int] | None) -> tuple["CpuPlan", attention.QueryPlan]:
    """Plans of two rows for the kernel and for its twin; with ancestor words the windows are trees."""
    from peregrine.kernels.attention.plan_cpu import plan_cpu

    table, past_lens = torch.tensor([[1, 5, 3, 9], [2, 4, 0, 0]], dtype=torch.int32), torch.tensor([50, 17])
    positions, count = (past_lens[:, None] + torch.tensor(depths)).flatten(), len(depths)
    q_starts, slots = torch.arange(3) * count, slots_of_rows(table, 16)
    trees = None if words is None else torch.tensor([words]).expand(2, count)
    plan = plan_cpu(positions, q_starts, past_lens, count, table, 16, trees)
    if trees is None:
        return plan, plan_causal(positions, q_starts, count, slots)
    return plan, plan_tree(positions, q_starts, past_lens, trees, slots)


@needs_numba
@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("window", [None, 7])
def test_kernel_agrees_with_its_twin(is_tree: bool, window: int | None) -> None:
    from peregrine.kernels.attention.cpu import paged_attention_cpu

    torch.manual_seed(0)
    keys, values = torch.randn(2, 160, 2, 24)
    q, sinks = torch.randn(2 * 5, 6, 24), torch.randn(6)
    plan, twin = plans([0, 1, 1, 2, 2], [1, 3, 5, 11, 21] if is_tree else None)
    out = paged_attention_cpu(q, stored(keys, values), plan, 0.3, window, sinks)
    expected = paged_attention_torch(q, keys, values, twin, 0.3, window, sinks)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


@needs_numba
@pytest.mark.parametrize("value_dim", [32, 20, 48])
@pytest.mark.parametrize("is_tree", [False, True])
def test_values_may_be_the_first_part_of_their_keys(is_tree: bool, value_dim: int) -> None:
    """Sizes that are whole vectors, that end within a vector, and that take all of the key."""
    from peregrine.kernels.attention.cpu import paged_attention_cpu

    torch.manual_seed(0)
    keys, q = torch.randn(160, 1, 48), torch.randn(2 * 3, 7, 48)
    plan, twin = plans([0, 1, 1], [1, 3, 5] if is_tree else None)
    poisoned = keys.clone()
    poisoned[0] = torch.nan  # the scratch slot, which no query sees
    out = paged_attention_cpu(q, stored(poisoned, poisoned[..., :value_dim]), plan, 0.2, None, None)
    expected = paged_attention_torch(q, keys, keys[..., :value_dim], twin, 0.2, None, None)
    assert out.shape == (6, 7, value_dim)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


@needs_numba
def test_keys_that_hold_their_values_are_written_once() -> None:
    from peregrine.kernels.attention.plan_cpu import write_cpu

    keys, k = torch.zeros(32, 1, 24), torch.randn(2, 1, 24)
    write_cpu(stored(keys, keys[..., :16]), torch.tensor([3, 30]), k, torch.full((2, 1, 16), torch.nan))
    assert torch.equal(keys[[3, 30]], k)
    assert int(keys.any(dim=2).sum()) == 2


@needs_numba
def test_threads_do_not_change_bits() -> None:
    from peregrine.kernels.attention.cpu import paged_attention_cpu
    from peregrine.kernels.attention.plan_cpu import plan_cpu

    torch.manual_seed(0)
    keys, values = torch.randn(2, 608, 1, 64)
    q = torch.randn(60, 5, 64)
    table = torch.arange(1, 38)[None]
    plan = plan_cpu(torch.arange(520, 580), torch.tensor([0, 60]), torch.tensor([520]), 60, table, 16, None)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(paged_attention_cpu(q, stored(keys, values), plan, 0.1, None, None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@needs_numba
def test_a_position_past_the_table_reads_the_table_and_no_further() -> None:
    from peregrine.kernels.attention.cpu import paged_attention_cpu
    from peregrine.kernels.attention.plan_cpu import plan_cpu

    keys, values = torch.randn(2, 32, 1, 16)
    q = torch.randn(2, 1, 16)
    table, q_starts, past_lens = torch.tensor([[1]]), torch.tensor([0, 2]), torch.tensor([15])
    plan = plan_cpu(torch.tensor([15, 900]), q_starts, past_lens, 2, table, 16, None)
    out = paged_attention_cpu(q[[0, 0]], stored(keys, values), plan, 0.25, None, None)
    assert torch.equal(out[0], out[1])


@needs_numba
def test_sizes_that_do_not_fit_the_plan_are_refused() -> None:
    from peregrine.kernels.attention.cpu import paged_attention_cpu
    from peregrine.kernels.attention.plan_cpu import plan_cpu, write_cpu

    keys, values = torch.zeros(2, 32, 1, 16)
    plan = plan_cpu(torch.tensor([3]), torch.tensor([0, 1]), torch.tensor([3]), 1, torch.tensor([[1]]), 16, None)
    with pytest.raises(ValueError, match="2 tokens, but the window was planned for 1"):
        paged_attention_cpu(torch.zeros(2, 1, 16), stored(keys, values), plan, 1.0, None, None)
    with pytest.raises(ValueError, match="k has 2 tokens, but slots has 1"):
        write_cpu(stored(keys, values), torch.tensor([3]), *torch.zeros(2, 2, 1, 16))


@needs_numba
def test_other_threads_may_allocate_while_it_runs() -> None:
    """Memory that a kernel still uses must not be free: here threads share one heap, and one of them fills it."""
    script, root = Path(__file__).with_name("attention_beside_threads.py"), Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(root / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr[-2000:]
