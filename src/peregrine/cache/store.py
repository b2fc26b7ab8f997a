"""The device memory that holds keys and values: one flat row of slots per layer, addressed by page tables."""

import torch
from torch import Tensor

from peregrine.errors import ConfigError


class KVStore:
    """Keys and values of all layers. Slot = page * page_size + offset; page 0 is scratch. Starts as zeros."""

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        sizes = {
            "num_layers": num_layers,
            "num_pages": num_pages,
            "page_size": page_size,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
        }
        for field, size in sizes.items():
            if size < 1:
                raise ConfigError(f"{field}={size}: a KV store needs at least 1")
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        shape = (num_layers, num_pages * page_size, num_kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)  # [L, slots, Hkv, D]
        self.values = torch.zeros(shape, dtype=dtype, device=device)  # [L, slots, Hkv, D]

    @property
    def num_bytes(self) -> int:
        """Device bytes that keys and values take together."""
        return 2 * self.keys.numel() * self.keys.element_size()

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Put k and v [M, Hkv, D] into one layer's slots [M]; only scratch slots may occur twice."""
        self.keys[layer].index_copy_(0, slots, k)
        self.values[layer].index_copy_(0, slots, v)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots [M] to slots [M] in every layer; all are read before any is written."""
        self.keys.index_copy_(1, targets, self.keys.index_select(1, sources))
        self.values.index_copy_(1, targets, self.values.index_select(1, sources))
