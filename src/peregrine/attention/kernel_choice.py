"""Which kernel of the Triton backend serves a forward: by sizes, and where two may serve, by what they cost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from peregrine.attention.metadata import AttentionMetadata, LayerAttention
from peregrine.attention.traits import Traits
from peregrine.attention.window import Window
from peregrine.cache.store import KVStore
from peregrine.kernels.attention import Gpu, Kernel, Launch, Problem, context_launch, decode_launch

Shape = tuple[int, int]  # rows, queries on each


@dataclass(frozen=True, slots=True)
class KernelCosts:
    """Milliseconds that the kernels took for uniform windows, measured where they run."""

    times: Mapping[Shape, tuple[float, float]]  # shape -> decode, context

    def of(self, problem: Problem) -> tuple[float, float] | None:
        """(decode, context) for windows of this shape; None if they were not measured."""
        return None if problem.q_len is None else self.times.get((problem.num_rows, problem.q_len))


UNMEASURED = KernelCosts({})


def only(kernel: Kernel, shapes: Sequence[Shape]) -> KernelCosts:
    """Costs that make one kernel serve windows of these shapes, where it can."""
    cost = (0.0, 1.0) if kernel is Kernel.DECODE else (1.0, 0.0)
    return KernelCosts(dict.fromkeys(shapes, cost))


def measure_costs(shapes: Sequence[Shape], time_ms: Callable[[Kernel, Shape], float]) -> KernelCosts:
    """Time both kernels for each shape; the caller leaves out shapes that have no decode launch."""
    return KernelCosts({s: (time_ms(Kernel.DECODE, s), time_ms(Kernel.CONTEXT, s)) for s in shapes})


def problem_of(
    metadata: AttentionMetadata, store: KVStore, layer: LayerAttention, num_heads: int, dtype: torch.dtype
) -> Problem:
    """The sizes of one layer's attention in a forward."""
    window, kv = metadata.window, store.shape
    return Problem(
        num_rows=window.num_rows,
        num_tokens=window.num_tokens,
        q_len=window.q_len,
        max_q_len=window.max_q_len,
        num_keys=metadata.page_table.shape[1] * metadata.page_size,
        page_size=metadata.page_size,
        num_heads=num_heads,
        num_kv_heads=kv.num_heads,
        key_dim=kv.key_dim,
        value_dim=kv.value_dim,
        is_mla=kv.shared,
        dtype=dtype,
        kv_dtype=store.keys.dtype,
        is_tree=metadata.ancestors is not None,
        has_window=layer.window is not None,
        has_sinks=layer.sinks is not None,
    )


def usual_problem(window: Window, head_dim: int, page_size: int, dtype: torch.dtype) -> Problem:
    """The sizes of a usual dense model, where no model is at hand: 32 query heads, 8 KV heads, 4096 tokens."""
    return Problem(
        num_rows=window.num_rows,
        num_tokens=window.num_tokens,
        q_len=window.q_len,
        max_q_len=window.max_q_len,
        num_keys=4096,
        page_size=page_size,
        num_heads=32,
        num_kv_heads=8,
        key_dim=head_dim,
        value_dim=head_dim,
        is_mla=False,
        dtype=dtype,
        kv_dtype=dtype,
        is_tree=False,
        has_window=False,
        has_sinks=False,
    )


def choose_launch(problem: Problem, traits: Traits, gpu: Gpu, costs: KernelCosts = UNMEASURED) -> Launch:
    """The kernel that serves this problem, its tile and its programs: decode if it can, unless context is faster.

    This is the only place where an attention kernel is chosen.
    """
    decode, context = decode_launch(problem, gpu, traits.max_decode_q_len), context_launch(problem, gpu)
    if decode is None:
        return context
    decode_ms, context_ms = costs.of(problem) or (0.0, 0.0)
    return decode if decode_ms <= context_ms else context


def kernel_reason(problem: Problem, traits: Traits, gpu: Gpu, costs: KernelCosts = UNMEASURED) -> str:
    """Why `choose_launch` takes what it takes, in words."""
    q_len, longest = problem.q_len, traits.max_decode_q_len
    window = f"{problem.num_rows} x {q_len or f'up to {problem.max_q_len}'}"
    chosen = f"{window}: {choose_launch(problem, traits, gpu, costs).kernel.value}"
    if longest == 0:
        return f"{chosen}, the only kernel there is"
    if q_len is None:
        return f"{chosen}, rows differ in length"
    if q_len > longest:
        return f"{chosen}, decode takes at most {longest} queries a row"
    if decode_launch(problem, gpu, longest) is None:
        return f"{chosen}, tiles of queries alone fill the device"
    times = costs.of(problem)
    if times is None:
        return f"{chosen}, measured when an engine starts"
    return f"{chosen}, decode took {times[0]:.4f} ms and context {times[1]:.4f} ms"
