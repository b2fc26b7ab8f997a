"""The numbers of a GGUF file's tensors; quantised ones are dequantised to float32 as they are read."""

import numpy as np
import torch
from torch import Tensor

from peregrine.errors import CheckpointError
from peregrine.models.checkpoint.gguf.header import TYPES, Header, Stored

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def require_readable(header: Header) -> None:
    """Refuse a file with tensors that cannot be read here, by their number formats."""
    if header.unread:
        kinds = ", ".join(sorted(set(header.unread.values())))
        read = ", ".join(kind for kind, _, _ in TYPES.values())
        raise CheckpointError(
            f"{str(header.path)!r}: {len(header.unread)} tensors are {kinds}, which is not read; read are {read}; "
            "use the model in another quantisation, such as Q4_K_M or Q8_0"
        )
    quantised = sorted({stored.kind for stored in header.tensors.values()} - set(FLOATS))
    if quantised and not _library_present():
        raise CheckpointError(
            f"{str(header.path)!r} holds {', '.join(quantised)} weights, which the gguf package dequantises; "
            "run: pip install gguf"
        )


def read_tensor(header: Header, name: str) -> Tensor:
    """A tensor of the file under its own name."""
    stored = header.tensors[name]
    raw = np.memmap(header.path, np.uint8, "r", stored.start, (stored.num_bytes,))
    return read_values(raw, stored.kind, stored.shape)


def read_values(raw: np.ndarray, kind: str, shape: tuple[int, ...]) -> Tensor:
    """The numbers in bytes of one kind."""
    if kind in FLOATS:
        return torch.from_numpy(raw.copy()).view(FLOATS[kind]).view(shape)
    from gguf import GGMLQuantizationType, dequantize

    rows = raw.reshape(*shape[:-1], -1)
    return torch.from_numpy(dequantize(rows, GGMLQuantizationType[kind])).view(shape)


def bytes_of(stored: Stored, index: int | None) -> tuple[int, int]:
    """Where the bytes of a tensor, or of one entry of its first dimension, start and how many there are."""
    if index is None:
        return stored.start, stored.num_bytes
    size = stored.num_bytes // stored.shape[0]
    return stored.start + index * size, size


def _library_present() -> bool:
    from importlib.util import find_spec

    return find_spec("gguf") is not None
