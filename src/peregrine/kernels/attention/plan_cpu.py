"""What a CPU needs before attention: the slots of all keys that queries see, and new keys and values in the store."""

from dataclasses import dataclass

import torch
from torch import Tensor

from peregrine.config import MAX_NODES
from peregrine.kernels.attention.plan import dense_heads
from peregrine.kernels.attention.tiles_cpu import LANES
from peregrine.kernels.runtime.cpu_jit import cpu_kernel, floats_at, longs_at, words_of


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """Which keys the queries of one forward see, shared by all layers; addresses point into the tensors of `held`."""

    num_rows: int
    num_tokens: int
    max_q_len: int
    width: int  # C, key indices per row: a multiple of LANES
    key_slots: int  # [R, C] i64 slot of each row's key at each index
    shared: int  # [N] i64 keys below this index are the row's; from here on they are the query's own
    limits: int  # [N] i64 the query sees key indices below this
    own_slots: int  # [N, MAX_NODES] i64 slots of the query's own keys: its tree ancestors
    q_starts: int  # [R + 1] i64
    positions: int  # [N] i64
    held: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class CpuKV:
    """Addresses of one layer's keys and values [slots, Hkv, D]; the same address if keys hold their values (MLA)."""

    keys: int
    values: int
    num_heads: int
    value_dim: int
    value_stride: int  # entries from one slot's values to the next slot's

    @property
    def is_shared(self) -> bool:
        return self.keys == self.values


def plan_cpu(
    positions: Tensor,
    q_starts: Tensor,
    past_lens: Tensor,
    max_q_len: int,
    page_table: Tensor,
    page_size: int,
    ancestors: Tensor | None,
) -> CpuPlan:
    """Find the slots of all keys and ancestors, once for all layers. Shapes are those of AttentionMetadata."""
    num_rows, num_pages = page_table.shape
    num_tokens = positions.shape[0]
    num_keys = num_pages * page_size
    width = num_keys + -num_keys % LANES
    num_own = 0 if ancestors is None else num_tokens * MAX_NODES
    buffer = torch.empty(num_rows * width + 2 * num_tokens + num_own, dtype=torch.int64)
    inputs = [positions, q_starts, past_lens, page_table, *([] if ancestors is None else [ancestors])]
    inputs = [x if x.dtype == torch.int64 and x.is_contiguous() else x.long().contiguous() for x in inputs]
    addresses = [x.data_ptr() for x in inputs]
    key_slots = buffer.data_ptr()
    shared = key_slots + num_rows * width * 8
    plan = CpuPlan(
        num_rows=num_rows,
        num_tokens=num_tokens,
        max_q_len=max_q_len,
        width=width,
        key_slots=key_slots,
        shared=shared,
        limits=shared + num_tokens * 8,
        own_slots=shared + 2 * num_tokens * 8,
        q_starts=addresses[1],
        positions=addresses[0],
        held=(buffer, *inputs),
    )
    outputs = (plan.key_slots, plan.shared, plan.limits, plan.own_slots)
    words = 0 if ancestors is None else addresses[4]
    _plan(1, *addresses[:4], *outputs, words, num_rows, num_pages, page_size, width, num_tokens)
    return plan


def write_cpu(kv: CpuKV, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """k and v [M, Hkv, D] go to slots [M] of one layer. Where keys hold their values, v is not read."""
    k, v = dense_heads(k), k if kv.is_shared else dense_heads(v)
    count, heads, head_dim = k.shape
    if count != slots.shape[0]:
        raise ValueError(f"k has {count} tokens, but slots has {slots.shape[0]}")
    pointers = kv.keys, 0 if kv.is_shared else kv.values, slots.data_ptr(), k.data_ptr(), v.data_ptr()
    _write(1, *pointers, count, heads * head_dim, k.stride(0), v.stride(0))


@cpu_kernel("qqqqqqqqqqqqqq")
def _plan(block):  # type: ignore[no-untyped-def]
    words = words_of(block)
    num_rows, num_pages, page_size, width, num_tokens = words[11], words[12], words[13], words[14], words[15]
    positions, q_starts = longs_at(words[2], num_tokens), longs_at(words[3], num_rows + 1)
    past_lens, table = longs_at(words[4], num_rows), longs_at(words[5], (num_rows, num_pages))
    key_slots, shared = longs_at(words[6], (num_rows, width)), longs_at(words[7], num_tokens)
    limits, own_slots = longs_at(words[8], num_tokens), longs_at(words[9], (num_tokens, MAX_NODES))
    is_tree, ancestors = words[10] != 0, longs_at(words[10], num_tokens)
    num_keys = num_pages * page_size  # nothing is read past the table, whatever positions and lengths say
    for r in range(num_rows):
        needed = 0
        for n in range(q_starts[r], q_starts[r + 1]):
            shared[n] = limits[n] = min(past_lens[r] if is_tree else positions[n] + 1, num_keys)
            needed = max(needed, shared[n])
            if is_tree:
                own_slots[n] = 0
                count = 0
                for bit in range(MAX_NODES):
                    if (ancestors[n] >> bit) & 1:
                        key = min(past_lens[r] + bit, num_keys - 1)
                        own_slots[n, count] = table[r, key // page_size] * page_size + key % page_size
                        count += 1
                limits[n] += count
        for s in range(needed):
            key_slots[r, s] = table[r, s // page_size] * page_size + s % page_size
        # The last group of keys is scored whole: past the end it reads the scratch slot, and the scores are dropped.
        key_slots[r, needed : min(width, needed + LANES)] = 0


@cpu_kernel("qqqqqqqqq")
def _write(block):  # type: ignore[no-untyped-def]
    words = words_of(block)
    count, width, k_stride, v_stride = words[7], words[8], words[9], words[10]
    slots = longs_at(words[4], count)
    for i in range(count):
        offset = slots[i] * width * 4
        k, key = floats_at(words[5] + i * k_stride * 4, width), floats_at(words[2] + offset, width)
        for d in range(width):
            key[d] = k[d]
        if words[3] != 0:
            v, value = floats_at(words[6] + i * v_stride * 4, width), floats_at(words[3] + offset, width)
            for d in range(width):
                value[d] = v[d]
