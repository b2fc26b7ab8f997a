"""What the attention kernels of a backend cost here, measured while an engine warms up, on its own store."""

from collections.abc import Sequence

import torch
from torch import Tensor

from peregrine.attention import AttentionBackend, AttentionMetadata, LayerAttention, Window
from peregrine.attention.kernel_choice import Kernel, Shape, kernel_reason, measure_costs, only
from peregrine.cache.store import KVStore
from peregrine.config import Decision, EngineConfig
from peregrine.engine.graphs import Graphs

CONTEXT = 2048  # tokens of a row that is measured: where most chats are
REPEATS = 5  # forwards of all layers; the fastest counts


def choose_kernels(
    backend: AttentionBackend,
    store: KVStore,
    layers: Sequence[LayerAttention],
    num_heads: int,
    dtype: torch.dtype,
    shapes: Sequence[Shape],
) -> tuple[AttentionBackend, Decision]:
    """The backend, which from now on takes the faster kernel for windows of these shapes, and its reasons."""

    def time_ms(kernel: Kernel, shape: Shape) -> float:
        return time_forward(backend.with_costs(only(kernel, [shape])), store, layers, num_heads, dtype, shape)

    with torch.inference_mode():
        costs = measure_costs(shapes, time_ms)
    reasons = [kernel_reason(Window.uniform(*shape), backend.traits, costs) for shape in shapes]
    chosen = backend.with_costs(costs)
    value = f"measured for {len(shapes)} windows of {CONTEXT} tokens"
    return chosen, Decision("kernels", value, "; ".join(reasons))


def window_shapes(asked: EngineConfig, drafts: bool, row_sizes: Sequence[int]) -> list[Shape]:
    """The uniform windows of a round: a plain or draft step, what is verified, what the drafter reads again."""
    q_lens = {1}
    if drafts:
        q_lens |= {asked.num_drafts + 1} if asked.tree is None else {asked.tree.depth + 1}
    return [(rows, q_len) for rows in sorted(row_sizes) for q_len in sorted(q_lens)]


def time_forward(
    backend: AttentionBackend,
    store: KVStore,
    layers: Sequence[LayerAttention],
    num_heads: int,
    dtype: torch.dtype,
    shape: Shape,
) -> float:
    """Milliseconds of one layer's attention, over all layers in turn: what is read lies in memory, not in a cache."""
    device, kv = store.keys.device, store.shape
    metadata = full_window(store, shape)
    count = len(metadata.positions)
    q = torch.zeros(count, num_heads, kv.key_dim, dtype=dtype, device=device)
    k = torch.zeros(count, kv.num_heads, kv.key_dim, dtype=dtype, device=device)
    attend = backend.bind(store, layers, metadata)

    def every_layer() -> None:
        for layer in range(store.num_layers):
            attend(layer, q, k, k[..., : kv.value_dim])

    graphs: Graphs[None] = Graphs(device)  # launched one by one, the host would be what is measured
    graphs.record(shape, every_layer)
    graphs.replay(shape)
    times = []
    for _ in range(REPEATS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        graphs.replay(shape)
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / store.num_layers)
    return float(min(times))


def full_window(store: KVStore, shape: Shape) -> AttentionMetadata:
    """Rows that hold CONTEXT tokens, on whatever pages there are; their new keys go to the scratch page."""
    rows, q_len = shape
    device, page_size = store.keys.device, store.page_size
    pages = -(-(CONTEXT + q_len) // page_size)

    def count(stop: int) -> Tensor:
        return torch.arange(stop, device=device)

    past_lens = torch.full((rows,), CONTEXT, device=device)
    return AttentionMetadata(
        window=Window.uniform(rows, q_len),
        positions=(past_lens[:, None] + count(q_len)).flatten(),
        q_starts=count(rows + 1) * q_len,
        past_lens=past_lens,
        page_table=(count(rows * pages) % max(1, store.num_pages - 1) + 1).view(rows, pages),
        page_size=page_size,
        slots=torch.zeros(rows * q_len, dtype=torch.int64, device=device),
        ancestors=None,
    )
