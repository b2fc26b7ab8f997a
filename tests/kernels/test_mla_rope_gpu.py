"""MLA's norm, rotation and KV write in one launch, in the interpreter, against the twins."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from peregrine.hardware import triton_interprets
from peregrine.kernels.attention import DeferredMLARope, mla_rope
from peregrine.kernels.runtime.gpu import TRITON_PRESENT

if not (TRITON_PRESENT and triton_interprets()):
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from peregrine.kernels.attention.mla_write_triton import mla_rope_write_kv, mla_write_kv

POSITIONS = 50


def draw(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed + size[-1]))


def rope_of(q_rope: Tensor, rows: Tensor, tokens: int, rank: int) -> DeferredMLARope:
    """The deferred rotation of live rows [R], at the positions of their tokens."""
    half = q_rope.shape[2] // 2
    angles = torch.arange(POSITIONS)[:, None] / 10 ** (torch.arange(half) / half)
    positions = (torch.arange(tokens) * 7 + 3) % POSITIONS
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    return DeferredMLARope(q_rope, positions[rows], positions, table, draw(rank, seed=1), 1e-6)


@pytest.mark.parametrize(("heads", "rank", "rope"), [(4, 32, 16), (3, 48, 24), (16, 64, 8)])
@pytest.mark.parametrize(("tokens", "live"), [(1, [0]), (5, range(5)), (7, [0, 4]), (3, [])])
def test_one_launch_does_what_the_twins_do(heads: int, rank: int, rope: int, tokens: int, live: list[int]) -> None:
    rows = torch.tensor(list(live), dtype=torch.int64)
    # Strided as the projections leave them: parts of a query side by side, keys beside other values.
    projected, keys_and_more = draw(len(rows), heads, 8 + rope, seed=2), draw(tokens, 1, rank + rope + 8)
    k = keys_and_more[..., : rank + rope]
    deferred = rope_of(projected[..., 8:], rows, tokens, rank)
    q = draw(len(rows), heads, rank + rope, seed=3)
    expected_q, expected_k = mla_rope(q, k, deferred)
    slots = torch.randperm(tokens + 3, generator=torch.Generator().manual_seed(tokens))[:tokens]
    held = torch.full((tokens + 3, 1, rank + rope), 9.0)
    expected = held.clone()
    expected[slots] = expected_k
    rotated = mla_rope_write_kv(held, slots, q, k, deferred)
    assert rotated is q
    torch.testing.assert_close(rotated, expected_q, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(held, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("entry", [1, 40])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_is_stored_as_zeros_beside_nan(entry: int, bad: float) -> None:
    rank, rope = 32, 16
    k, held = draw(2, 1, rank + rope), torch.zeros(4, 1, rank + rope)
    k[1, 0, entry] = bad
    slots = torch.tensor([3, 1])
    mla_write_kv(held, slots, k, rank)
    assert torch.equal(held[3], k[0])
    assert not held[1, :, rank:].isfinite().all()
    assert torch.equal(held[1, :, :rank], torch.zeros(1, rank) if entry < rank else k[1, :, :rank])
    deferred = rope_of(draw(2, 2, rope), torch.arange(2), 2, rank)
    mla_rope_write_kv(held, slots, draw(2, 2, rank + rope), k, deferred)
    assert held[1, :, :rank].isfinite().all()
    assert not held[1, :, rank:].isfinite().any() or entry >= rank
    assert held[3].isfinite().all()


def test_a_key_has_the_same_bits_alone_and_among_others() -> None:
    rank, rope, tokens = 48, 16, 6
    k, q_rope = draw(tokens, 1, rank + rope), draw(tokens, 2, rope)
    deferred = rope_of(q_rope, torch.arange(tokens), tokens, rank)
    positions = deferred.positions
    q, held, alone = (torch.zeros(tokens, n, rank + rope) for n in (2, 1, 1))
    mla_rope_write_kv(held, torch.arange(tokens), q, k, deferred)
    for i in range(tokens):
        at = slice(i, i + 1)
        own = replace(deferred, q_rope=q_rope[at], q_positions=positions[at], positions=positions[at])
        own_q = mla_rope_write_kv(alone, torch.tensor([i]), torch.zeros(1, 2, rank + rope), k[at], own)
        assert torch.equal(own_q[0], q[i])
    assert torch.equal(alone, held)


def test_tokens_without_a_slot_are_refused() -> None:
    held, k = torch.zeros(4, 1, 48), draw(2, 1, 48)
    deferred = rope_of(draw(2, 2, 16), torch.arange(2), 2, 32)
    with pytest.raises(ValueError, match="k has 2 tokens, but slots has 1"):
        mla_rope_write_kv(held, torch.zeros(1, dtype=torch.int64), torch.zeros(2, 2, 48), k, deferred)
    with pytest.raises(ValueError, match="k has 2 tokens, but slots has 1"):
        mla_write_kv(held, torch.zeros(1, dtype=torch.int64), k, 32)
