"""What a backend can do, what a model asks of it, and every reason the two do not fit."""

from dataclasses import dataclass
from enum import IntEnum

import torch


class GraphSupport(IntEnum):
    """Which forwards may be recorded into a device graph; each level includes the ones below."""

    NEVER = 0
    UNIFORM = 1
    ANY = 2


@dataclass(frozen=True, slots=True)
class Traits:
    """What a backend can do. Callers read this; they never ask what class it is."""

    devices: frozenset[str] | None  # torch device types; None: any
    dtypes: frozenset[torch.dtype]
    kv_dtypes: frozenset[torch.dtype]  # what a store may hold
    page_sizes: frozenset[int] | None  # None: any
    head_dims: frozenset[int] | None  # None: any
    latent_dims: frozenset[int] | None  # of keys that begin with their values (MLA); empty: none such
    max_decode_q_len: int  # longest uniform window the decode kernel takes; 0: it has none
    tree_masks: bool
    windows: bool
    sinks: bool
    reads_host_lens: bool  # costs one device-to-host wait per forward
    graphs: GraphSupport
    automatic: bool  # whether "auto" may take it; False: only who asks for it by name gets it


@dataclass(frozen=True, slots=True)
class Needs:
    """What the engine and the model ask of a backend."""

    device: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_size: int
    head_dim: int
    tree_masks: bool
    windows: bool
    sinks: bool
    shared_kv: bool
    graphs: GraphSupport = GraphSupport.NEVER


def refusals(needs: Needs, traits: Traits) -> list[str]:
    """Why these traits cannot serve these needs; empty when they can."""
    reasons = []
    if traits.devices is not None and needs.device not in traits.devices:
        reasons.append(f"runs on {', '.join(sorted(traits.devices))}, not on {needs.device}")
    if needs.dtype not in traits.dtypes:
        reasons.append(f"computes in {_dtype_names(traits.dtypes)}, not in {_dtype_names({needs.dtype})}")
    if needs.kv_dtype not in traits.kv_dtypes:
        reasons.append(
            f"reads keys and values in {_dtype_names(traits.kv_dtypes)}, not {_dtype_names({needs.kv_dtype})}"
        )
    if traits.page_sizes is not None and needs.page_size not in traits.page_sizes:
        reasons.append(f"has page sizes {sorted(traits.page_sizes)}, not {needs.page_size}")
    dims = traits.latent_dims if needs.shared_kv else traits.head_dims
    if needs.shared_kv and dims == frozenset():
        reasons.append("reads values apart from keys, and the model's values are a part of its keys (MLA)")
    elif dims is not None and needs.head_dim not in dims:
        reasons.append(f"has head dims {_span(dims)}, not {needs.head_dim}")
    if needs.tree_masks and not traits.tree_masks:
        reasons.append("has no tree masks; choose a chain drafter")
    if needs.windows and not traits.windows:
        reasons.append("has no sliding windows, and the model has layers with one")
    if needs.sinks and not traits.sinks:
        reasons.append("has no attention sinks, and the model has them")
    if needs.shared_kv and needs.kv_dtype != needs.dtype:
        reasons.append(f"reads keys that hold their values (MLA) in {_dtype_names({needs.dtype})} alone")
    if needs.graphs > traits.graphs:
        reasons.append(f"captures {traits.graphs.name}, but the round needs {needs.graphs.name}")
    if needs.graphs > GraphSupport.NEVER and traits.reads_host_lens:
        reasons.append("reads lengths on the host, which a captured round never does")
    return reasons


def _dtype_names(dtypes: frozenset[torch.dtype] | set[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _span(numbers: frozenset[int]) -> str:
    ordered = sorted(numbers)
    return str(ordered) if len(ordered) <= 8 else f"{ordered[0]}, {ordered[1]} .. {ordered[-1]}"
