"""Head norms, rotation and the KV write in one launch, in the interpreter, against the twins."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from peregrine.cache.store import KVShape, KVStore
from peregrine.hardware import triton_interprets
from peregrine.kernels.rope.reference import DeferredRope, rotate_heads
from peregrine.kernels.runtime.gpu import TRITON_PRESENT

if not (TRITON_PRESENT and triton_interprets()):
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from peregrine.kernels.attention import StoredKV
from peregrine.kernels.attention.kv_write_triton import rope_write_kv

Q_HEADS, KV_HEADS, POSITIONS = 6, 2, 50
FP8 = torch.float8_e4m3fn


def draw(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed + size[-1]))


def rope_of(rows: Tensor, tokens: int, head_dim: int, norms: bool) -> DeferredRope:
    """The deferred rotation of live rows [R], at the positions of their tokens."""
    angles = torch.arange(POSITIONS)[:, None] / 10 ** (torch.arange(head_dim // 2) / head_dim)
    positions = (torch.arange(tokens) * 7 + 3) % POSITIONS
    q_norm, k_norm = (draw(head_dim, seed=seed) if norms else None for seed in (1, 2))
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    return DeferredRope(positions[rows], positions, table, q_norm, k_norm, 1e-5)


def empty_store(tokens: int, head_dim: int, dtype: torch.dtype = torch.float32) -> KVStore:
    return KVStore(1, tokens + 3, 1, KVShape.of_heads(KV_HEADS, head_dim), dtype, "cpu")


def layer_of(store: KVStore) -> StoredKV:
    scales = (store.k_scales, store.v_scales)
    return StoredKV(store.keys[0], store.values[0], *(None if scale is None else scale[0] for scale in scales))


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "head norms"])
@pytest.mark.parametrize("head_dim", [16, 40, 64])
@pytest.mark.parametrize(("tokens", "live"), [(1, [0]), (5, range(5)), (17, [0, 4, 16]), (5, [])])
def test_one_launch_does_what_the_twins_do(norms: bool, head_dim: int, tokens: int, live: list[int]) -> None:
    rows = torch.tensor(list(live), dtype=torch.int64)
    # Keys and values lie side by side, as a fused projection leaves them.
    kv = draw(tokens, 2 * KV_HEADS, head_dim, seed=5)
    k, v = kv[:, :KV_HEADS], kv[:, KV_HEADS:]
    q = draw(tokens, Q_HEADS, head_dim, seed=6)[rows]
    rope = rope_of(rows, tokens, head_dim, norms)
    slots = torch.randperm(tokens + 3, generator=torch.Generator().manual_seed(tokens))[:tokens]
    store, expected = empty_store(tokens, head_dim), empty_store(tokens, head_dim)
    for held in (store.keys, store.values, expected.keys, expected.values):
        held.fill_(9.0)  # slots that are not written keep it
    rotated = rope_write_kv(layer_of(store), slots, q, k, v, rope)
    expected_q, expected_k = rotate_heads(q, k, rope)
    expected.write(0, slots, expected_k, v)
    torch.testing.assert_close(rotated, expected_q)
    torch.testing.assert_close(store.keys, expected.keys)
    assert torch.equal(store.values, expected.values)


@pytest.mark.parametrize("factor", [1.0, 0.25, 8.0])
def test_float8_stores_hold_what_the_twin_writes(factor: float) -> None:
    """Numbers that float8 has, and some beyond its largest; the interpreter rounds other numbers differently."""
    tokens, head_dim = 5, 16
    exact = torch.tensor([1.0, -1.5, 0.5, 448.0, -448.0, 0.0, 600.0, -1e6]) * factor
    k, v = (exact.roll(by).repeat(tokens, KV_HEADS, 2) for by in (0, 3))
    rows = torch.arange(tokens)
    rope = rope_of(rows, tokens, head_dim, norms=False)
    still = torch.cat((torch.ones(POSITIONS, head_dim // 2), torch.zeros(POSITIONS, head_dim // 2)), dim=1)
    rope = replace(rope, table=still)
    store, expected = (empty_store(tokens, head_dim, FP8) for _ in range(2))
    for held in (store, expected):
        assert held.k_scales is not None
        assert held.v_scales is not None
        held.k_scales.fill_(factor)
        held.v_scales.fill_(2 * factor)
    rope_write_kv(layer_of(store), rows + 1, torch.ones(tokens, Q_HEADS, head_dim), k, v, rope)
    expected.write(0, rows + 1, k, v)
    assert torch.equal(store.keys.view(torch.uint8), expected.keys.view(torch.uint8))
    assert torch.equal(store.values.view(torch.uint8), expected.values.view(torch.uint8))
