"""The device memory that holds keys and values: one flat row of slots per layer, addressed by page tables."""

from dataclasses import dataclass

import torch
from torch import Tensor

from peregrine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token stores in one layer: a key and a value per KV head, or keys that contain their values (MLA)."""

    num_heads: int
    key_dim: int
    value_dim: int
    shared: bool  # the value is the first value_dim entries of the key

    @staticmethod
    def of_heads(num_heads: int, head_dim: int) -> "KVShape":
        """Separate keys and values of the same size."""
        return KVShape(num_heads, head_dim, head_dim, shared=False)

    @property
    def num_entries(self) -> int:
        """Numbers stored for one token in one layer."""
        return self.num_heads * (self.key_dim + (0 if self.shared else self.value_dim))


class KVStore:
    """Keys and values of all layers. Slot = page * page_size + offset; page 0 is scratch. Starts as zeros.

    Shared values are a view of the keys, so writing keys writes both. In float8 an entry is stored divided by its
    layer's scale and clamped to the largest number of the format. Scales are 1 unless set before the first write.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        shape: KVShape,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        sizes = {
            "num_layers": num_layers,
            "num_pages": num_pages,
            "page_size": page_size,
            "num_heads": shape.num_heads,
            "key_dim": shape.key_dim,
            "value_dim": shape.value_dim,
        }
        for field, size in sizes.items():
            if size < 1:
                raise ConfigError(f"{field}={size}: a KV store needs at least 1")
        if shape.shared and shape.value_dim > shape.key_dim:
            raise ConfigError(f"value_dim={shape.value_dim}: shared values are a part of key_dim={shape.key_dim}")
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.page_size = page_size
        self.shape = shape
        self.keys = torch.zeros(
            (num_layers, num_pages * page_size, shape.num_heads, shape.key_dim), dtype=dtype, device=device
        )  # [L, slots, Hkv, D]
        self.values = self.keys[..., : shape.value_dim]  # [L, slots, Hkv, Dv]
        if not shape.shared:
            self.values = torch.zeros((*self.keys.shape[:3], shape.value_dim), dtype=dtype, device=device)
        is_scaled = dtype == torch.float8_e4m3fn
        self.k_scales = torch.ones(num_layers, device=device) if is_scaled else None  # [L] f32
        self.v_scales = self.k_scales if shape.shared else _copy(self.k_scales)  # [L] f32

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values together."""
        return sum(part.numel() * part.element_size() for part in self.parts)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Keys and values, or keys alone where they contain the values. Each [L, slots, Hkv, D]."""
        return (self.keys,) if self.shape.shared else (self.keys, self.values)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [M, Hkv, D] in one layer's slots [M]; only scratch slots may occur twice.

        `v` is ignored where keys contain the values.
        """
        if self.k_scales is not None and self.v_scales is not None:
            k, v = self._quantised(k, self.k_scales[layer]), self._quantised(v, self.v_scales[layer])
        _as_bytes(self.keys[layer]).index_copy_(0, slots, _as_bytes(k))
        if not self.shape.shared:
            _as_bytes(self.values[layer]).index_copy_(0, slots, _as_bytes(v))

    def _quantised(self, x: Tensor, scale: Tensor) -> Tensor:
        largest = torch.finfo(self.keys.dtype).max
        return (x.float() / scale).clamp(-largest, largest).to(self.keys.dtype)


def _copy(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.clone()


def _as_bytes(x: Tensor) -> Tensor:
    """Float8 viewed as bytes, since index_copy_ does not support it on every device; other dtypes unchanged."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
