"""Which calls Hopper's own kernels take: decided on the host from shapes, so it can be asked without such a device."""

import pytest
import torch

from peregrine.kernels.runtime.gpu import TRITON_PRESENT

if not TRITON_PRESENT:
    pytest.skip("needs triton", allow_module_level=True)

from peregrine.kernels.attention import mla_plan_triton as latent
from peregrine.kernels.attention import plan_triton as dense
from peregrine.kernels.attention.plan_triton import GpuPlan, StoredKV

PROCESSORS = 132


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors count as lying on an H200."""
    for plans in (dense, latent):
        monkeypatch.setattr(plans, "is_hopper", lambda tensor: True)
        monkeypatch.setattr(plans, "multiprocessors", lambda device, elsewhere: PROCESSORS)


def plan_of(rows: int, q_len: int, page_size: int = 16, tree: bool = False) -> GpuPlan:
    numbers = torch.zeros(rows * q_len, dtype=torch.int64)
    paths = torch.zeros(rows * q_len, 64, dtype=torch.int64) if tree else None
    limits = numbers.int() if tree else None
    table = torch.zeros(rows, 8, dtype=torch.int64)
    return GpuPlan(numbers, torch.zeros(rows + 1), torch.zeros(rows), table, page_size, limits, paths)


def takes(rows: int, q_len: int = 4, heads: tuple[int, int, int] = (32, 8, 128), **other: object) -> bool:
    num_heads, kv_heads, head_dim = heads
    q = torch.zeros(rows * q_len, num_heads, head_dim, dtype=torch.bfloat16)
    kv_dtype = other.pop("kv_dtype", torch.bfloat16)
    keys = torch.zeros(16, kv_heads, head_dim).to(kv_dtype)  # type: ignore[call-overload]
    window, sinks = other.pop("window", None), other.pop("sinks", None)
    plan = plan_of(rows, q_len, **other)  # type: ignore[arg-type]
    return dense.hopper_takes(q, StoredKV(keys, keys, None, None), plan, window, sinks)  # type: ignore[arg-type]


def test_dense_attention_is_taken_where_its_tiles_fill_the_device() -> None:
    """Two programs fit on a processor: as soon as tiles could not be shared by two, one reads all keys of a tile."""
    assert [rows for rows in (1, 8, 16, 17, 32) if takes(rows)] == [17, 32]
    assert [rows for rows in (8, 16, 33, 34) if takes(rows, heads=(32, 4, 128))] == [34]


@pytest.mark.parametrize(
    "other",
    [
        {"window": 100},
        {"sinks": torch.zeros(32)},
        {"tree": True},
        {"page_size": 4},
        {"kv_dtype": torch.float8_e4m3fn},
        {"heads": (32, 8, 80)},
        {"heads": (128, 1, 128)},
    ],
    ids=["window", "sinks", "tree", "small pages", "float8", "head dim", "wide group"],
)
def test_what_is_not_common_is_left_to_triton(other: dict[str, object]) -> None:
    assert takes(64)
    assert not takes(64, **other)  # type: ignore[arg-type]


@pytest.mark.parametrize(("q_len", "group", "tile"), [(1, 4, 16), (4, 4, 16), (5, 4, 32), (4, 16, 64), (64, 8, 64)])
def test_a_tile_holds_all_queries_of_a_row_up_to_64(q_len: int, group: int, tile: int) -> None:
    assert dense.hopper_tile(q_len, group) == tile


def test_latents_are_taken_in_whole_columns() -> None:
    def taken(rank: int, rope: int, **other: object) -> bool:
        q = torch.zeros(4, 16, rank + rope, dtype=torch.bfloat16)
        keys = torch.zeros(16, 1, rank + rope, dtype=torch.bfloat16)
        return latent.hopper_takes(q, keys, plan_of(1, 4, **other), rank)  # type: ignore[arg-type]

    assert taken(512, 64)
    assert taken(128, 64)
    assert not taken(192, 64)  # eight warps add 128 entries at a time
    assert not taken(512, 32)
    assert not taken(512, 64, tree=True)
    assert [latent.hopper_tile(pairs) for pairs in (1, 16, 17, 64, 512)] == [16, 16, 64, 64, 64]
