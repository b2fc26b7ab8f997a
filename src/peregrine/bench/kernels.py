"""`peregrine bench kernels`: the two attention kernels on the windows of a round, against the copy bandwidth.

Each figure is one layer's attention over keys and values that are in memory, not in the device's cache: the layers of a
store larger than that cache are attended to one after the other. The share is the bandwidth at which keys and values
are read over that of a copy in the same run; in MLA a key holds its value and counts once.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from peregrine.attention import AttentionMetadata, Kernel, LayerAttention, Window
from peregrine.attention.kernel_choice import Shape, kernel_reason, measure_costs, only, problem_of
from peregrine.attention.triton_backend import TritonBackend
from peregrine.bench.device import COLD_BYTES, copy_bandwidth, graph_ms
from peregrine.cache.store import KVShape, KVStore
from peregrine.errors import ConfigError
from peregrine.hardware import DTYPES, resolve_device
from peregrine.kernels.attention import decode_launch, gpu_of
from peregrine.synthetic.interpreter import mend_interpreter

MAX_LAYERS = 64
Json = dict[str, Any]
WINDOWS = {"a draft step, or the absorb's live token": 1, "verify": 4, "a wide verify": 8}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    rows: tuple[int, ...] = (1, 8, 32)
    q_lens: tuple[int, ...] = (1, 4, 8)
    contexts: tuple[int, ...] = (2048, 32768)
    heads: tuple[int, int, int] = (32, 8, 128)  # query heads, KV heads, head dim
    latent: tuple[int, int, int] | None = None  # MLA, too: query heads, entries of the latent and of its rotated part
    page_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str = "auto"  # or float8
    device: str = "auto"

    @property
    def num_heads(self) -> int:
        return self.latent[0] if self.latent else self.heads[0]

    @property
    def kv_shape(self) -> KVShape:
        """What one token stores in one layer."""
        if self.latent is None:
            return KVShape.of_heads(*self.heads[1:])
        _, rank, rope = self.latent
        return KVShape(1, rank + rope, rank, shared=True)

    @property
    def name(self) -> str:
        """The kind of attention in words."""
        kv = self.kv_shape
        stored = f"latent of {kv.value_dim} + {kv.key_dim - kv.value_dim}"
        return f"{self.num_heads} heads on " + (stored if kv.shared else f"{kv.num_heads} of {kv.key_dim}")


def run(plan: Plan) -> Json:
    """Measure, and return everything as plain values."""
    device = resolve_device(plan.device)
    backend = TritonBackend()
    reasons = backend.missing()
    if device.type not in (backend.traits.devices or ()):
        reasons.append(f"device={str(device)!r}: Triton kernels need a CUDA device")
    if plan.dtype not in DTYPES:
        reasons.append(f"dtype={plan.dtype!r}: choose one of {', '.join(DTYPES)}")
    if plan.kv_dtype not in ("auto", "float8"):
        reasons.append(f"kv_dtype={plan.kv_dtype!r}: choose auto or float8")
    if plan.latent and plan.kv_dtype != "auto":
        reasons.append(f"kv_dtype={plan.kv_dtype!r}: MLA has kv_dtype auto alone")
    if reasons:
        raise ConfigError(f"bench kernels: {'; '.join(reasons)}")
    if device.type == "cpu":
        mend_interpreter()
    bandwidth = copy_bandwidth() if device.type == "cuda" else None
    kinds = [replace(plan, latent=None), plan] if plan.latent else [plan]
    lines = [
        line
        for kind, context in itertools.product(kinds, plan.contexts)
        for line in measure_context(kind, context, device, bandwidth)
    ]
    return {
        "heads": list(plan.heads),
        "latent": None if plan.latent is None else list(plan.latent),
        "page_size": plan.page_size,
        "dtype": plan.dtype,
        "kv_dtype": plan.kv_dtype,
        "copy_tb_per_s": None if bandwidth is None else bandwidth / 1e12,
        "lines": lines,
    }


def measure_context(plan: Plan, context: int, device: torch.device, bandwidth: float | None) -> list[Json]:
    """Both kernels at one context length for every window; decode_ms is None where only context serves."""
    traits, layer = TritonBackend().traits, LayerAttention(1.0, None, None)
    lines = []
    for shape in itertools.product(plan.rows, plan.q_lens):
        rows, q_len = shape
        store, metadata = make_window(plan, context, shape, device)
        problem, gpu = problem_of(metadata, store, layer, plan.num_heads, DTYPES[plan.dtype]), gpu_of(store.keys)
        decodes = decode_launch(problem, gpu, traits.max_decode_q_len) is not None
        del store

        def time_kernel(kernel: Kernel, shape: Shape) -> float:
            return time_ms(plan, context, kernel, shape, device)

        costs = measure_costs([shape] if decodes else [], time_kernel)
        decode_ms, context_ms = costs.of(problem) or (None, time_kernel(Kernel.CONTEXT, shape))
        line: Json = {"kind": plan.name, "rows": rows, "q_len": q_len, "context": context}
        line |= {"decode_ms": decode_ms, "context_ms": context_ms}
        if bandwidth is not None:
            memory_ms = rows * context * layer_token_bytes(plan) / bandwidth * 1e3
            line |= {"decode_share": decode_ms and memory_ms / decode_ms, "context_share": memory_ms / context_ms}
        line["choice"] = kernel_reason(problem, traits, gpu, costs)
        lines.append(line)
    return lines


def time_ms(plan: Plan, context: int, kernel: Kernel, shape: Shape, device: torch.device) -> float:
    """Milliseconds of one layer's attention by this kernel, storing the window's keys and values included."""
    rows, q_len = shape
    kv, dtype = plan.kv_shape, DTYPES[plan.dtype]
    store, metadata = make_window(plan, context, shape, device)
    layers = [LayerAttention(kv.key_dim**-0.5, None, None)] * store.num_layers
    q = torch.randn(rows * q_len, plan.num_heads, kv.key_dim, device=device).to(dtype)
    k, v = torch.randn(2, rows * q_len, kv.num_heads, kv.key_dim, device=device).to(dtype)
    attend = TritonBackend(only(kernel, [shape])).bind(store, layers, metadata)

    def every_layer() -> list[Tensor]:
        return [attend(layer, q, k, v) for layer in range(store.num_layers)]

    with torch.inference_mode():
        return (graph_ms if device.type == "cuda" else interpreter_ms)(every_layer, device) / store.num_layers


def interpreter_ms(call: Callable[[], list[Tensor]], device: torch.device) -> float:
    """Milliseconds of one call in Triton's interpreter: this shows that the command works, and nothing else."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def make_window(plan: Plan, context: int, shape: Shape, device: torch.device) -> tuple[KVStore, AttentionMetadata]:
    """Random keys and values of `context` tokens on every row, the window's own last among them."""
    rows, q_len = shape
    pages = -(-context // plan.page_size)
    num_bytes = rows * context * layer_token_bytes(plan)
    layers = 1 if device.type == "cpu" else max(1, min(MAX_LAYERS, -(-COLD_BYTES // num_bytes)))
    kv_dtype = torch.float8_e4m3fn if plan.kv_dtype == "float8" else DTYPES[plan.dtype]
    store = KVStore(layers, 1 + rows * pages, plan.page_size, plan.kv_shape, kv_dtype, device)
    for part in store.parts:
        part.copy_(torch.randn(part.shape[1:], device=device))  # the same in every layer
    past_lens = torch.full((rows,), context - q_len, device=device)
    places = past_lens[:, None] + torch.arange(q_len, device=device)  # [R, T]
    table = 1 + torch.randperm(rows * pages, device=device).view(rows, pages)
    return store, AttentionMetadata(
        window=Window.uniform(rows, q_len),
        positions=places.flatten(),
        q_starts=torch.arange(0, rows * q_len + 1, q_len, device=device),
        past_lens=past_lens,
        page_table=table,
        page_size=plan.page_size,
        slots=torch.zeros(rows * q_len, dtype=torch.int64, device=device),  # nothing is written
        ancestors=None,
    )


def layer_token_bytes(plan: Plan) -> int:
    """Bytes of one token's keys and values in one layer."""
    itemsize = 1 if plan.kv_dtype == "float8" else DTYPES[plan.dtype].itemsize
    return plan.kv_shape.num_entries * itemsize


def show(result: Json) -> str:
    """The result as a table."""
    names = {q_len: name for name, q_len in WINDOWS.items()}
    bandwidth = result["copy_tb_per_s"]
    lines = [f"pages of {result['page_size']}, {result['dtype']}"]
    lines.append("no CUDA device: times are the interpreter's" if bandwidth is None else f"copy {bandwidth:.2f} TB/s")
    lines.append(f"{'rows':>5} {'q_len':>5} {'context':>8} {'decode':>16} {'context':>16}  faster")
    for kind, measured in itertools.groupby(result["lines"], key=lambda line: line["kind"]):
        lines.append(f"{kind}:")
        for line in measured:
            shape = f"{line['rows']:>5} {line['q_len']:>5} {line['context']:>8}"
            decode_ms = line["decode_ms"]
            faster = "context" if decode_ms is None or decode_ms > line["context_ms"] else "decode"
            times = f"{time_cell(line, 'decode'):>16} {time_cell(line, 'context'):>16}"
            lines.append(f"{shape} {times}  {faster:<8} {names.get(line['q_len'], '')}".rstrip())
    return "\n".join(lines)


def time_cell(line: Json, kernel: str) -> str:
    """A kernel's time, and its share of the bandwidth if that was measured."""
    if line[f"{kernel}_ms"] is None:
        return "-"
    share = line.get(f"{kernel}_share")
    return f"{line[f'{kernel}_ms']:.4f} ms" + ("" if share is None else f" {share:.0%}")
