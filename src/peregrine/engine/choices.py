"""What the engine chooses for options that were left open, each with its reason, and what it refuses."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from peregrine.attention.backend import AttentionBackend
from peregrine.attention.routing import choose_backend
from peregrine.attention.traits import Needs
from peregrine.config import Decision, EngineConfig
from peregrine.engine.memory import GPU_SHARE, scratch_bytes
from peregrine.engine.prefill import SHARED
from peregrine.engine.sources import ModelSource
from peregrine.errors import ConfigError
from peregrine.hardware import free_bytes, resolve_dtype
from peregrine.kernels.linear import linear_seconds
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT
from peregrine.kernels.runtime.cuda import OLDEST, compiler_version, nvrtc_ready
from peregrine.kernels.runtime.gpu import TRITON_PRESENT
from peregrine.models.config import ModelConfig
from peregrine.models.decoder import Decoder
from peregrine.models.loading import num_weights
from peregrine.models.rope_table import LongScaling
from peregrine.spec.ahead import MAX_SHARE
from peregrine.spec.registry import DraftSource, StoreShape
from peregrine.spec.types import Drafter

PAGE_SIZE = 16
MAX_ROWS, CPU_ROWS, CPU_CHUNK = 256, 8, 256
ROW_TOKENS = 1024  # tokens of a row that memory is planned for; the context, if that is shorter
# Memory of a recorded round, as a multiple of its float32 logits: 1.1 GiB for 32 rows of 4 nodes and 128,256 tokens.
ROUND_LOGITS = 18
CHUNK_SHARE = 0.05  # of free memory, for the scratch tensors of the largest chunk
GPU_CHUNKS = (SHARED, 2048, 1024, 512)
MEASURED_WEIGHTS = 1e8  # with fewer weights no dtype is much faster than the other, so none is measured
MAX_DEFAULT_LEN = 2**20  # tables with an entry for every position take memory before the first request comes

Value = TypeVar("Value")


class Decisions:
    """The decisions made so far."""

    def __init__(self) -> None:
        self.made: list[Decision] = []

    def take(self, field: str, choice: tuple[Value, str]) -> Value:
        """Note a value and the reason for it, instead of an earlier one of that field; returns the value."""
        value, because = choice
        shown = str(value).removeprefix("torch.") if isinstance(value, torch.device | torch.dtype) else value
        self.made = [each for each in self.made if each.field != field] + [Decision(field, shown, because)]
        return value


def pick_dtype(asked: EngineConfig, device: torch.device, source: ModelSource, rows: int) -> tuple[torch.dtype, str]:
    """The dtype that weights are held in, and why; `rows` is the number of tokens of one request's window."""
    dtype = resolve_dtype(asked.dtype, device, source.dtype)
    if asked.dtype != "auto":
        narrow = device.type == "cpu" and dtype != torch.float32
        return dtype, "asked for" + ("; weights are held in it, arithmetic is float32" if narrow else "")
    if device.type != "cpu":
        return dtype, "as stored"
    if not source.is_bfloat16 or num_weights(source.config) < MEASURED_WEIGHTS or not NUMBA_PRESENT:
        return dtype, "exact on any CPU"
    return faster_dtype(rows, source.config.hidden_size)


def faster_dtype(rows: int, num_inputs: int) -> tuple[torch.dtype, str]:
    """The faster of float32 and bfloat16, measured, for weights that both hold exactly; tokens are the same."""
    seconds = {dtype: linear_seconds(dtype, rows, num_inputs) for dtype in (torch.float32, torch.bfloat16)}
    ratio = seconds[torch.float32] / seconds[torch.bfloat16]
    rounds = f"at {rows} {'row' if rows == 1 else 'rows'}, measured; bits are the same"
    if ratio > 1:
        return torch.bfloat16, f"as stored; {ratio:.2f} times as fast as float32 {rounds}"
    return torch.float32, f"{1 / ratio:.2f} times as fast as bfloat16 {rounds}"


def round_rows(asked: EngineConfig, drafter: str) -> int:
    """How many tokens of one request a round reads."""
    if drafter == "none":
        return 1
    return asked.depth + 1 if asked.tree is None else asked.tree.nodes


def pick_long_factors(config: ModelConfig, max_len: int) -> tuple[str, str] | None:
    """Which of longrope's two sets of factors is used for all positions, and why; None if the model has only one."""
    scaling = config.rope.scaling
    if not isinstance(scaling, LongScaling) or scaling.short_factors == scaling.long_factors:
        return None
    original = scaling.original_positions
    if max_len > original:
        return "long factors", f"max_len={max_len} is above the original context of {original}; lower it for the short"
    return "short factors", f"max_len={max_len} is within the original context"


def pick_backend(
    asked: EngineConfig,
    target: Decoder,
    draft: DraftSource,
    shapes: Sequence[StoreShape],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> tuple[AttentionBackend, str]:
    """The attention backend of the target and the drafter, and why."""
    shared_kv = any(shape.kv.shared for shape in shapes)
    if shared_kv and kv_dtype != dtype:
        raise ConfigError(f"kv_dtype={asked.kv_dtype!r}: latents (MLA) are held in the model's own dtype; use auto")
    needs = Needs(
        device=target.embedding.device.type,
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=asked.page_size,
        head_dim=target.config.kv_shape.key_dim,
        tree_masks=asked.tree is not None or draft.sees_both_ways,
        windows=any(window is not None for window in target.config.windows),
        sinks=target.config.sinks,
        caps=target.config.scales.score_cap is not None,
        shared_kv=shared_kv,
    )
    choice = choose_backend(asked.attention, needs)
    return choice.backend, "; ".join(choice.reasons)


def pick_drafter(asked: EngineConfig, source: ModelSource) -> tuple[str, str]:
    """The drafter's name, and why."""
    if asked.num_drafts == 0 and asked.tree is None:
        return "none", "num_drafts=0"
    return (asked.drafter, "asked for") if asked.drafter != "auto" else source.automatic_drafter()


def pick_max_len(asked: EngineConfig, config: ModelConfig) -> tuple[int, str]:
    """Most tokens of a request, prompt included, and why."""
    if asked.max_len is not None and asked.max_len > config.max_positions:
        raise ConfigError(f"max_len={asked.max_len}: the model's context is {config.max_positions}; lower it")
    if asked.max_len is not None:
        return asked.max_len, "asked for"
    if config.max_positions > MAX_DEFAULT_LEN:
        return MAX_DEFAULT_LEN, f"the model's context is {config.max_positions}; ask for more with max_len"
    return config.max_positions, "the model's context"


def pick_graphs(asked: EngineConfig, device: torch.device) -> tuple[bool, str]:
    """Whether rounds are recorded as CUDA graphs, and why."""
    able = device.type == "cuda" and TRITON_PRESENT
    if asked.graphs and not able:
        raise ConfigError(
            f"graphs=True: rounds are recorded on CUDA devices with Triton; this is {device}; leave it out"
        )
    if asked.graphs is not None:
        return asked.graphs, "asked for"
    return able, "a round is one launch" if able else "rounds are recorded on CUDA devices with Triton"


def pick_cuda_kernels() -> tuple[str, str]:
    """Whether Hopper has the kernels in CUDA C++, for few rows and for linears of 65 to 384, and why."""
    if nvrtc_ready():
        return "all", f"compiled by NVRTC {'.'.join(map(str, compiler_version()))}"
    oldest = ".".join(map(str, OLDEST))
    return "none", f"others serve, more slowly: NVRTC {oldest} or later is needed; pip install nvidia-cuda-nvrtc"


def pick_lag(asked: EngineConfig, device: torch.device) -> tuple[int, str]:
    """How many rounds are queued before the oldest is read, and why."""
    if asked.lag is not None:
        return asked.lag, "asked for"
    return (0, "nothing to overlap on a CPU") if device.type == "cpu" else (1, "hides the host")


def pick_page_size(asked: EngineConfig) -> tuple[int, str]:
    """Tokens per page, and why."""
    return (asked.page_size, "asked for") if asked.page_size else (PAGE_SIZE, "prefixes are shared in steps of it")


def pick_max_rows(
    asked: EngineConfig, config: ModelConfig, token_bytes: int, max_len: int, device: torch.device
) -> tuple[int, str]:
    """Requests that run together, and why: on CUDA a power of two that memory has room for, on a CPU a few.

    `token_bytes` is what one token takes in all KV stores. To be called when the page size is chosen and, on CUDA, the
    weights are loaded: rows are planned for the memory that is still free.
    """
    if asked.max_rows:
        return asked.max_rows, "asked for"
    most = max(asked.row_sizes) if asked.row_sizes is not None else MAX_ROWS
    free = free_bytes(device)
    if device.type == "cpu" or free is None:
        return min(CPU_ROWS, most), "rows share the cores"
    tokens = int(free * GPU_SHARE / token_bytes) if asked.num_pages is None else asked.num_pages * asked.page_size
    nodes: float = asked.depth + 1 if asked.tree is None else asked.tree.nodes
    if asked.ragged and asked.tree is None:
        nodes = min(nodes, MAX_SHARE)
    round_bytes = nodes * config.vocab_size * 4 * ROUND_LOGITS
    room = min(tokens // min(max_len, ROW_TOKENS), int(free * (1 - GPU_SHARE) / round_bytes))
    rows = min(most, 2 ** max(0, room.bit_length() - 1))
    return rows, f"the KV cache holds {tokens} tokens, {tokens // rows} for each, beside {rows} rows of logits"


def pick_prefill_chunk(
    asked: EngineConfig, config: ModelConfig, max_len: int, device: torch.device, dtype: torch.dtype
) -> tuple[int, str]:
    """Most prompt tokens of one forward, and why."""
    if asked.prefill_chunk:
        return asked.prefill_chunk, "asked for"
    limit = f"less where it would hold up running requests for more than {asked.max_stall_ms:g} ms"
    free = free_bytes(device)
    if device.type == "cpu" or free is None:
        return CPU_CHUNK, limit
    for chunk in GPU_CHUNKS:
        if scratch_bytes(replace(asked, prefill_chunk=chunk), config, max_len, dtype) <= CHUNK_SHARE * free:
            return chunk, limit
    return 256, f"memory is short; {limit}"


def pick_row_sizes(asked: EngineConfig, graphs: bool) -> tuple[int, ...] | None:
    """The batch sizes that are recorded; None: batches have any size.

    Powers of two, and from 32 on one more between each two: in large batches a padding row costs as much as a row.
    """
    if asked.row_sizes is not None or not graphs:
        return asked.row_sizes
    sizes = {2**power for power in range(13)} | {3 * 2**power for power in range(4, 12)}
    return tuple(sorted({size for size in sizes if size < asked.max_rows} | {asked.max_rows}))


def check_windows(config: ModelConfig, drafter: Drafter) -> None:
    """Refuse a tree deeper than a sliding window: its nodes must see all their ancestors."""
    shortest = min((w for w in config.windows if w is not None), default=None)
    if not drafter.shape.is_chain and shortest is not None and shortest <= drafter.shape.depth:
        raise ConfigError(
            f"tree: depth {drafter.shape.depth} does not fit the model's window of {shortest}; draft a chain"
        )
