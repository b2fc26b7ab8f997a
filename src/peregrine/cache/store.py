"""The device memory that holds keys and values: one flat row of slots per layer, addressed by page tables."""

import torch
from torch import Tensor

from peregrine.errors import ConfigError


class KVStore:
    """Keys and values of all layers. Slot = page * page_size + offset; page 0 is scratch. Starts as zeros.

    In float8 an entry is held divided by its layer's scale, and cut off at the largest number there is. Scales start
    as 1; whoever knows better fills them in before the first write.
    """

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
        is_scaled = dtype == torch.float8_e4m3fn
        self.k_scales = torch.ones(num_layers, device=device) if is_scaled else None  # [L] f32
        self.v_scales = torch.ones(num_layers, device=device) if is_scaled else None  # [L] f32

    @property
    def num_bytes(self) -> int:
        """Device bytes that keys and values take together."""
        return 2 * self.keys.numel() * self.keys.element_size()

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Put k and v [M, Hkv, D] into one layer's slots [M]; only scratch slots may occur twice."""
        if self.k_scales is not None and self.v_scales is not None:
            k, v = self._quantised(k, self.k_scales[layer]), self._quantised(v, self.v_scales[layer])
        _as_bytes(self.keys[layer]).index_copy_(0, slots, _as_bytes(k))
        _as_bytes(self.values[layer]).index_copy_(0, slots, _as_bytes(v))

    def _quantised(self, x: Tensor, scale: Tensor) -> Tensor:
        largest = torch.finfo(self.keys.dtype).max
        return (x.float() / scale).clamp(-largest, largest).to(self.keys.dtype)


def _as_bytes(x: Tensor) -> Tensor:
    """Float8 as what it is made of, since copies by index do not know it everywhere; anything else as it is."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
