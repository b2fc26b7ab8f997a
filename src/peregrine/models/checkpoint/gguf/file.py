"""An opened GGUF file: its tensors by Hugging Face's names, with the interface of an opened safetensors file."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from peregrine.models.checkpoint.folder import Fields
from peregrine.models.checkpoint.gguf.config import config_fields
from peregrine.models.checkpoint.gguf.header import Header, Stored, read_header
from peregrine.models.checkpoint.gguf.layouts import PARTS, WHOLE, Layout, Metadata, layout_of
from peregrine.models.checkpoint.gguf.values import FLOATS, bytes_of, read_values, require_readable

_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # read with the config


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor under its Hugging Face name: what is stored, and how it is made of that."""

    stored: tuple[Stored, ...]
    index: int | None  # of the first dimension, if it is one of a stack
    undo: Callable[..., Tensor] | None  # of what the converter did to it, from as many tensors as are stored

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of what is read."""
        return [part.shape if self.index is None else part.shape[1:] for part in self.stored]

    def get_shape(self) -> list[int]:
        """As of a safetensors slice."""
        try:
            return list(self.made(torch.empty(shape, device="meta") for shape in self.shapes).shape)
        except RuntimeError:  # the parts do not fit together: the message about the wrong shape has the first one's
            return list(self.shapes[0])

    def get_dtype(self) -> str:
        """As of a safetensors slice: the number format of what is read."""
        kinds = {part.kind for part in self.stored}
        return kinds.pop() if len(kinds) == 1 and kinds <= set(FLOATS) else "F32"

    def made(self, parts: Iterable[Tensor]) -> Tensor:
        """The tensor, from what is stored."""
        (first, *others) = parts
        return first if self.undo is None else self.undo(first, *others)

    def __getitem__(self, place: slice) -> Tensor:
        """As of a safetensors slice: an empty tensor, for its dtype."""
        return torch.empty(0, dtype=FLOATS[self.get_dtype()])


class GGUFFile:
    """The tensors of a GGUF file, read one at a time; opening reads the header alone."""

    def __init__(self, path: Path) -> None:
        self.header = open_header(path)
        require_readable(self.header)
        self.config = config_fields(self.header)
        self._entries = _entries(self.header, self.config)
        self._bytes = np.memmap(path, np.uint8, "r")

    @property
    def is_quantised(self) -> bool:
        """Whether any weight is dequantised as it is read."""
        return any(part.kind not in FLOATS for entry in self._entries.values() for part in entry.stored)

    def keys(self) -> list[str]:
        return list(self._entries)

    def get_slice(self, name: str) -> Entry:
        return self._entries[name]

    def get_tensor(self, name: str) -> Tensor:
        entry, dtype = self._entries[name], FLOATS[self._entries[name].get_dtype()]
        places = [bytes_of(part, entry.index) for part in entry.stored]
        return entry.made(
            read_values(self._bytes[start : start + size], part.kind, shape).to(dtype)
            for part, shape, (start, size) in zip(entry.stored, entry.shapes, places, strict=True)
        )


def open_header(path: Path) -> Header:
    """The header of a file; the latest one is kept, since config, tensors and tokenizer are read one after another."""
    status = path.stat()
    return _header(path.absolute(), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1)
def _header(path: Path, size: int, changed: int) -> Header:
    return read_header(path)


def _entries(header: Header, config: Fields) -> dict[str, Entry]:
    """Every tensor by its Hugging Face name; one that has none keeps its own."""
    layout = layout_of(Metadata.of(header))
    found: dict[str, Entry] = {}
    used = set(_ROPE)
    for i in range(config.whole("num_hidden_layers")):
        for name, (parts, join) in layout.joins.items():
            stored = [f"blk.{i}.{part}" for part in parts]
            if all(part in header.tensors for part in stored):
                found[f"model.layers.{i}.{name}"] = Entry(tuple(header.tensors[part] for part in stored), None, join)
                used.update(stored)
    for name, one in header.tensors.items():
        if name not in used:
            found |= _renamed(name, one, layout, config)
    return found


def _renamed(name: str, stored: Stored, layout: Layout, config: Fields) -> dict[str, Entry]:
    parts, match = PARTS | layout.names, _LAYER.fullmatch(name)
    shifted = partial(torch.sub, other=layout.norm_offset) if layout.norm_offset and "norm." in name else None
    if match is None or match[2] not in parts:
        return {WHOLE.get(name, name): Entry((stored,), None, shifted)}
    layer, part, kind = f"model.layers.{match[1]}", parts[match[2]], match[3]
    if match[2].endswith("_exps"):
        names = [f"{layer}.{layout.experts}.{i}.{part}.{kind}" for i in range(stored.shape[0])]
        return {stacked: Entry((stored,), i, None) for i, stacked in enumerate(names)}
    if match[2] == "ffn_gate_inp_shexp" and len(stored.shape) == 1:  # a linear with one output
        stored = replace(stored, shape=(1, *stored.shape))
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(match[2])
    undo = partial(_unpaired, heads=config.whole(heads)) if heads is not None and layout.paired else shifted
    return {f"{layer}.{part}.{kind}": Entry((stored,), None, undo)}


def _unpaired(rows: Tensor, heads: int) -> Tensor:
    """Rows of heads, from neighbouring rotation pairs back to pairs half a head apart."""
    pairs = rows.view(heads, -1, 2, *rows.shape[1:])  # [h, D / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(rows.shape)
