"""What a backend can do, what a model needs of it, and every reason why the two do not fit."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Traits:
    """What a backend can do. Callers read this; they never ask what class it is."""

    devices: frozenset[str] | None  # torch device types; None: any
    dtypes: frozenset[torch.dtype]
    kv_dtypes: frozenset[torch.dtype]  # what a store may hold
    page_sizes: frozenset[int] | None  # None: any
    head_dims: frozenset[int] | None  # None: any
    mla_dims: frozenset[int] | None  # of keys that begin with their values (MLA); None: any; empty: none
    max_decode_q_len: int  # longest uniform window that the decode kernel takes; 0: there is no such kernel
    tree_masks: bool
    windows: bool
    sinks: bool
    caps: bool  # scores can be capped
    automatic: bool  # whether "auto" may choose it; False: only by name


@dataclass(frozen=True, slots=True)
class Needs:
    """What the engine and the model need of a backend."""

    device: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_size: int
    head_dim: int
    tree_masks: bool
    windows: bool
    sinks: bool
    caps: bool
    shared_kv: bool  # keys hold their values (MLA)


def refusals(needs: Needs, traits: Traits) -> list[str]:
    """Why these traits cannot serve these needs; empty when they can."""
    dims = traits.mla_dims if needs.shared_kv else traits.head_dims
    no_mla = needs.shared_kv and dims == frozenset()
    checks = (
        (
            traits.devices is not None and needs.device not in traits.devices,
            f"runs on {', '.join(sorted(traits.devices or ()))}, not on {needs.device}",
        ),
        (
            needs.dtype not in traits.dtypes,
            f"computes in {_dtype_names(traits.dtypes)}, not in {_dtype_names({needs.dtype})}",
        ),
        (
            needs.kv_dtype not in traits.kv_dtypes,
            f"reads keys and values in {_dtype_names(traits.kv_dtypes)}, not {_dtype_names({needs.kv_dtype})}",
        ),
        (
            traits.page_sizes is not None and needs.page_size not in traits.page_sizes,
            f"has page sizes {sorted(traits.page_sizes or ())}, not {needs.page_size}",
        ),
        (no_mla, "reads values apart from keys, and the model's values are a part of its keys (MLA)"),
        (
            not no_mla and dims is not None and needs.head_dim not in dims,
            f"has head dims {_span(dims or frozenset())}, not {needs.head_dim}",
        ),
        (needs.tree_masks and not traits.tree_masks, "has no tree masks; choose a chain drafter"),
        (needs.windows and not traits.windows, "has no sliding windows, and the model has layers with one"),
        (needs.sinks and not traits.sinks, "has no attention sinks, and the model has them"),
        (needs.caps and not traits.caps, "does not cap scores, and the model does"),
        (
            needs.shared_kv and needs.kv_dtype != needs.dtype,
            f"reads keys that hold their values (MLA) in {_dtype_names({needs.dtype})} alone",
        ),
    )
    return [reason for refused, reason in checks if refused]


def _dtype_names(dtypes: frozenset[torch.dtype] | set[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _span(numbers: frozenset[int]) -> str:
    ordered = sorted(numbers)
    return str(ordered) if len(ordered) <= 8 else f"{ordered[0]}, {ordered[1]} .. {ordered[-1]}"
