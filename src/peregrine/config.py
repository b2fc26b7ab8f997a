"""The options of an engine, and the decisions made from them, each with its reason."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import NoneType
from typing import TypeVar

from peregrine.errors import ConfigError, shown

MAX_NODES = 64  # a tree node's ancestors are one 64-bit word
MAX_DRAFTS = 16
FIXED_DRAFTS = 3  # where windows are not planned and no number is asked for
MAX_LAG = 8
MAX_RANKS = 64
# Lowest and highest value of whole-number options.
LIMITS = {
    "num_drafts": (0, MAX_DRAFTS),
    "page_size": (0, 1024),
    "max_rows": (0, 4096),
    "max_len": (2, 2**31 - 1),
    "num_pages": (2, 2**31 - 1),
    "prefill_chunk": (0, 2**20),
    "lag": (0, MAX_LAG),
    "tensor_parallel": (1, MAX_RANKS),
}

T = TypeVar("T")


def option(default: T, text: str, metavar: str = "", flag: str = "") -> T:
    """A dataclass field with the help text and value name (`metavar`) of its command-line flag.

    The flag is named after the field unless `flag` says otherwise.
    """
    return field(default=default, metadata={"help": text, "metavar": metavar, "flag": flag})


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A draft tree: levels, children per node, and nodes of the window with the root."""

    depth: int
    width: int
    nodes: int

    def __post_init__(self) -> None:
        for name in ("depth", "width", "nodes"):
            object.__setattr__(self, name, check_integer(f"tree: {name}", getattr(self, name), 0, 2**16) or 0)
        shape = f"tree=({self.depth}, {self.width}, {self.nodes})"
        if self.depth < 1 or self.width < 1:
            raise ConfigError(f"{shape}: depth and width must be at least 1")
        if self.depth > MAX_DRAFTS:
            raise ConfigError(f"{shape}: depth {self.depth} is above {MAX_DRAFTS}; lower it")
        if (self.depth - 1) * self.width > MAX_NODES:
            raise ConfigError(f"{shape}: (depth - 1) * width must be at most {MAX_NODES}; lower either")
        most = 1 + self.width + (self.depth - 1) * self.width**2
        if not self.depth + 1 <= self.nodes <= min(MAX_NODES, most):
            raise ConfigError(
                f"{shape}: nodes counts the window with its root and must lie between depth + 1 = {self.depth + 1} "
                f"and {min(MAX_NODES, most)} for this depth and width"
            )


TEXTS = ("model", "drafter", "device", "dtype", "kv_dtype", "attention", "generation_config", "windows")
SPECULATION = {"drafter", "num_drafts", "tree", "windows", "confidence_threshold"}  # what plain decoding goes without
KINDS: dict[str, tuple[type, ...]] = {
    "tree": (TreeShape, NoneType),
    "graphs": (bool, NoneType),
    "prefix_cache": (bool,),
    "row_sizes": (tuple, NoneType),
    "simulate_accept": (int, float, NoneType),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The options of an engine; "auto", and None or 0 where it is the default, leave the choice to it.

    Paths may stand for text, numpy's integers for integers, and (depth, width, nodes) for a TreeShape. drafter=None is
    "none", and so is generation_config=None.
    """

    model: str = option(
        "merlin", "a folder in Hugging Face format, a GGUF file, merlin (embedded), or smollm2 (if installed)", "MODEL"
    )
    drafter: str = option(
        "auto",
        "auto, none, ngram, suffix, eagle3, mtp (the checkpoint's own layer), or a folder: a head or a small model",
        "DRAFTER",
    )
    num_drafts: int | None = option(
        None, "most tokens drafted per round; 0: plain decoding; by default auto: what pays", "K|auto"
    )
    tree: TreeShape | None = option(
        None,
        "draft a tree in every round: its depth, children per node, and nodes with the root; by default auto: chains, "
        "which on a CPU branch where that pays",
        "D,W,N|auto",
    )
    windows: str = option("auto", "auto: each round has the windows that pay; fixed: always num_drafts", "auto|fixed")
    confidence_threshold: float = option(
        0.0,
        "with a confidence head and fixed windows: verify drafts while the product of their confidences, between 0 "
        "and 1, is at least this; 0: all, or where windows are auto those that pay",
        "CHANCE",
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:INDEX", "DEVICE")
    dtype: str = option(
        "auto",
        "what weights are held in: auto (GPU: as stored; CPU: float32, or bfloat16 if stored in it and measured "
        "to be faster), float32, bfloat16 or float16",
        "DTYPE",
    )
    kv_dtype: str = option(
        "auto", "of cached keys and values: auto (as computed), or float8 (e4m3) to save memory", "DTYPE"
    )
    graphs: bool | None = option(None, "record rounds as CUDA graphs; by default where device and backend can")
    attention: str = option("auto", "auto, or the name of an attention backend (see peregrine doctor)", "BACKEND")
    page_size: int = option(0, "tokens per page of the KV cache, a power of two; 0: chosen", "TOKENS")
    num_pages: int | None = option(
        None, "pages of the KV cache; by default all rows at full length, if they fit", "PAGES"
    )
    max_rows: int = option(0, "requests that run together in one batch; 0: what the device has room for", "ROWS")
    max_len: int | None = option(None, "tokens per request, prompt included; by default the model's context", "TOKENS")
    prefill_chunk: int = option(
        0, "prompt tokens read in one forward, shared by the prompts that wait; 0: as --max-stall-ms allows", "TOKENS"
    )
    max_stall_ms: float = option(
        100.0, "milliseconds for which reading prompts may hold up running requests, between two rounds", "MS"
    )
    generation_config: str = option(
        "auto", "sampling defaults: auto (those of the checkpoint's generation_config.json) or none", "auto|none"
    )
    prefix_cache: bool = option(True, "keep the KV of prompts and reuse it for prompts that begin the same way")
    host_cache: float = option(
        0.0, "GiB of host memory for pages that the device's prefix cache has no room for", "GIB"
    )
    tensor_parallel: int = option(
        1,
        "processes that share the model, each with a part of every layer and, with CUDA, a GPU of its own; the same "
        "tokens with any number",
        "RANKS",
    )
    lag: int | None = None  # rounds queued before the oldest is read; None: 0 on CPU, 1 elsewhere
    row_sizes: tuple[int, ...] | None = None  # batches are padded to one of these; None: powers of two for graphs
    simulate_accept: float | None = None  # benchmarks only: draw the acceptance length with this mean

    def __post_init__(self) -> None:
        for name in ("num_drafts", "tree"):
            if getattr(self, name) == "auto":
                object.__setattr__(self, name, None)
        for name in TEXTS:
            object.__setattr__(self, name, checked_text(name, getattr(self, name)))
        for name in ("page_size", "max_rows", "prefill_chunk"):
            object.__setattr__(self, name, 0 if getattr(self, name) is None else getattr(self, name))
        for name, (low, high) in LIMITS.items():
            object.__setattr__(self, name, check_integer(name, getattr(self, name), low, high))
        if isinstance(self.tree, list | tuple):
            if len(self.tree) != 3:
                raise ConfigError(f"tree={shown(self.tree)}: is not (depth, width, nodes)")
            object.__setattr__(self, "tree", TreeShape(*self.tree))
        for name, kinds in KINDS.items():
            if not isinstance(getattr(self, name), kinds):
                wanted = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
                raise ConfigError(f"{name}={shown(getattr(self, name))}: is not of the type {wanted}")
        object.__setattr__(self, "host_cache", check_number("host_cache", self.host_cache, "GiB, such as 0, 0.5 or 64"))
        stall = check_number("max_stall_ms", self.max_stall_ms, "milliseconds, such as 20 or 100")
        object.__setattr__(self, "max_stall_ms", stall)
        if self.drafter == "none" and self.num_drafts:
            raise ConfigError(f"num_drafts={self.num_drafts}: there is no drafter; name one, or leave it out")
        if self.tree is not None and self.num_drafts not in (None, self.tree.depth):
            raise ConfigError(
                f"num_drafts={self.num_drafts}: the tree is {self.tree.depth} deep; leave one of them out"
            )
        threshold = check_number("confidence_threshold", self.confidence_threshold, "0 to 1, such as 0.5")
        object.__setattr__(self, "confidence_threshold", threshold)
        if threshold > 1:
            raise ConfigError(f"confidence_threshold={threshold:g}: is a product of chances; pass 0 to 1, such as 0.5")
        if threshold and self.tree is not None:
            raise ConfigError(f"confidence_threshold={threshold:g}: it shortens chains; leave tree out")
        if self.host_cache and not self.prefix_cache:
            raise ConfigError(f"host_cache={self.host_cache}: it extends the prefix cache; leave prefix_cache on")
        if self.windows not in ("auto", "fixed"):
            raise ConfigError(f"windows={shown(self.windows)}: use auto or fixed")
        if self.generation_config not in ("auto", "none"):
            raise ConfigError(f"generation_config={shown(self.generation_config)}: use auto or none")
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size={self.page_size}: must be a power of two, such as 16, 32 or 64")
        if self.row_sizes is not None and (not self.row_sizes or max(self.row_sizes) < self.max_rows):
            raise ConfigError(f"row_sizes={self.row_sizes}: the largest must be at least max_rows={self.max_rows}")

    @property
    def ragged(self) -> bool:
        """Whether the windows of a round may differ in length."""
        return self.windows == "auto" or self.confidence_threshold > 0

    @property
    def depth(self) -> int:
        """The most drafts on a path; where the engine may choose, the number of a fixed window."""
        if self.tree is not None:
            return self.tree.depth
        return FIXED_DRAFTS if self.num_drafts is None else self.num_drafts


@dataclass(frozen=True, slots=True)
class Decision:
    """One choice the engine made, and why."""

    field: str
    value: object
    because: str


def plain_options(options: Mapping[str, T]) -> dict[str, T | str]:
    """The options of the same engine without speculation."""
    return {name: value for name, value in options.items() if name not in SPECULATION} | {"drafter": "none"}


def checked_text(name: str, value: object) -> str:
    """The option as text: a path is its text; None is "none" where that is a choice."""
    if value is None and name in ("drafter", "generation_config"):
        return "none"
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise ConfigError(f"{name}={shown(value)}: is not text; leave it out for the default")
    return text


def check_number(name: str, value: object, unit: str) -> float:
    """The option as a number that is not negative."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < float("inf"):
        raise ConfigError(f"{name}={shown(value)}: is not a number of {unit}")
    return float(value)


def check_integer(name: str, value: int | None, low: int, high: int | None) -> int | None:
    """The option as an int; refused if it is no integer within its limits. None means it was not set."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f"{name}={shown(value)}: is not an integer")
    value = int(value)
    if value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ConfigError(f"{name}={shown(value)}: must be {limits}")
    return value
