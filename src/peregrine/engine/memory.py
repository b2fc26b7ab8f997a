"""How a device's memory is shared out: pages from what weights leave, and errors that say who asked for what."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from peregrine.cache.store import KVStore
from peregrine.config import EngineConfig
from peregrine.errors import ConfigError
from peregrine.hardware import read_gpu, read_memory
from peregrine.models.decoder import Decoder
from peregrine.spec.registry import StoreShape

# Of the memory that is free once weights are loaded; on a GPU the rest is for graphs and prompts.
CPU_SHARE, GPU_SHARE = 0.25, 0.85
SPARE_PAGES = 8  # of one request, beyond its length: what rounds in flight may write
GIB = 2**30


@contextmanager
def explain_memory(device: torch.device, what: str, remedy: str) -> Iterator[None]:
    """Turn running out of device memory into an error that says what asked for it, and what was free."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_allocated(device)
        raise ConfigError(
            f"{device} has no room for {what}: {free / GIB:.1f} of {total / GIB:.1f} GiB are free and "
            f"{held / GIB:.1f} GiB hold what was loaded before; {remedy} ({error})"
        ) from error


def store_shape_of(model: Decoder) -> StoreShape:
    """What a model's own store must hold."""
    return StoreShape(model.config.num_layers, model.config.num_kv_heads, model.config.head_dim)


def page_bytes(stores: Sequence[StoreShape], page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page in all stores together."""
    return sum(2 * s.num_layers * s.num_kv_heads * s.head_dim for s in stores) * dtype.itemsize * page_size


def pick_num_pages(
    asked: EngineConfig, stores: Sequence[StoreShape], max_len: int, device: torch.device, dtype: torch.dtype
) -> tuple[int, str]:
    """Pages for every seat at full length, or as many as the memory allows."""
    if asked.num_pages is not None:
        return asked.num_pages, "asked for"
    size = page_bytes(stores, asked.page_size, dtype)
    wanted = 1 + asked.max_rows * (-(-max_len // asked.page_size) + SPARE_PAGES)
    free = read_memory()[1] if device.type == "cpu" else read_gpu(device.index or 0).memory_free_bytes
    share = CPU_SHARE if device.type == "cpu" else GPU_SHARE
    allowed = wanted if free is None else int(free * share / size)
    if allowed < 2:
        raise ConfigError(f"num_pages: {share:.0%} of the free memory holds {allowed} pages of {size} bytes")
    if wanted <= allowed:
        return wanted, f"{asked.max_rows} requests of {max_len} tokens"
    return allowed, f"{share:.0%} of the free memory"


def make_stores(
    shapes: Sequence[StoreShape], num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> list[KVStore]:
    """Stores of so many pages, one for each shape."""
    size = num_pages * page_bytes(shapes, page_size, dtype)
    what = f"num_pages={num_pages}, {size / GIB:.1f} GiB of keys and values"
    with explain_memory(device, what, "lower num_pages, max_rows or max_len"):
        return [
            KVStore(s.num_layers, num_pages, page_size, s.num_kv_heads, s.head_dim, dtype, device)
            for s in shapes
        ]
