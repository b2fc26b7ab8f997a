"""Keys and values are written to the given slots of one layer, and moved in all layers."""

import pytest
import torch

from peregrine.cache.store import KVShape, KVStore
from peregrine.errors import ConfigError


def make_store(dtype: torch.dtype = torch.float32) -> KVStore:
    return KVStore(2, 5, 4, KVShape.of_heads(3, 8), dtype=dtype, device="cpu")


def test_shape_and_zeros() -> None:
    store = make_store(torch.bfloat16)
    assert store.keys.shape == store.values.shape == (2, 20, 3, 8)
    assert store.keys.dtype == store.values.dtype == torch.bfloat16
    assert not store.keys.any()
    assert not store.values.any()
    assert store.num_bytes == 2 * 2 * 20 * 3 * 8 * 2


def test_write_touches_its_slots_in_its_layer_only() -> None:
    store = make_store()
    slots = torch.tensor([7, 4, 19])
    k, v = torch.randn(3, 3, 8), torch.randn(3, 3, 8)
    store.write(1, slots, k, v)
    assert torch.equal(store.keys[1, slots], k)
    assert torch.equal(store.values[1, slots], v)
    rest = [slot for slot in range(20) if slot not in (7, 4, 19)]
    assert not store.keys[1, rest].any()
    assert not store.values[1, rest].any()
    assert not store.keys[0].any()


def test_write_takes_views_of_a_fused_projection() -> None:
    store = make_store()
    k, v = torch.randn(2, 6, 8).chunk(2, dim=1)
    store.write(0, torch.tensor([8, 9]), k, v)
    assert torch.equal(store.keys[0, 8:10], k)
    assert torch.equal(store.values[0, 8:10], v)


def test_float8_is_stored_divided_by_its_scale_and_clamped() -> None:
    store = make_store(torch.float8_e4m3fn)
    assert store.num_bytes == 2 * 2 * 20 * 3 * 8
    assert store.k_scales is not None
    assert store.v_scales is not None
    store.k_scales[1], store.v_scales[1] = 0.5, 4.0
    k, v = torch.full((2, 3, 8), 3.0), torch.full((2, 3, 8), 2.0)
    k[0, 0, 0], k[1, 0, 0], v[1, 2, 7] = 1e6, -1e6, torch.nan
    store.write(1, torch.tensor([4, 9]), k, v)
    assert store.keys[1, 4].float().unique().equal(torch.tensor([6.0, 448.0]))
    assert store.keys[1, 9].float().unique().equal(torch.tensor([-448.0, 6.0]))
    assert store.values[1, 4].float().unique().equal(torch.tensor([0.5]))
    assert store.values[1, 9, 2, 7].isnan()
    assert not store.keys[0].float().any()


def test_only_float8_has_scales() -> None:
    assert make_store(torch.bfloat16).k_scales is None
    assert make_store().v_scales is None


def test_an_empty_size_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="num_pages=0"):
        KVStore(2, 0, 4, KVShape.of_heads(3, 8), torch.float32, "cpu")


def test_shared_values_are_the_first_part_of_the_keys() -> None:
    store = KVStore(2, 5, 4, KVShape(1, 24, 16, shared=True), torch.bfloat16, "cpu")
    assert (store.keys.shape, store.values.shape) == ((2, 20, 1, 24), (2, 20, 1, 16))
    assert store.num_bytes == 2 * 20 * 24 * 2
    assert store.parts == (store.keys,)
    k = torch.randn(3, 1, 24).bfloat16()
    store.write(1, torch.tensor([7, 4, 19]), k, torch.full((3, 1, 16), torch.nan))
    assert torch.equal(store.keys[1, [7, 4, 19]], k)
    assert torch.equal(store.values[1, [7, 4, 19]], k[..., :16])
    assert not store.keys[0].any()


def test_separate_values_may_be_narrower_than_keys() -> None:
    store = KVStore(1, 2, 4, KVShape(2, 24, 16, shared=False), torch.float32, "cpu")
    k, v = torch.randn(1, 2, 24), torch.randn(1, 2, 16)
    store.write(0, torch.tensor([5]), k, v)
    assert torch.equal(store.values[0, 5], v[0])
    assert store.num_bytes == 4 * 8 * 2 * (24 + 16)


def test_shared_values_wider_than_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match="value_dim=32: shared values are a part of key_dim=24"):
        KVStore(2, 5, 4, KVShape(1, 24, 32, shared=True), torch.float32, "cpu")
