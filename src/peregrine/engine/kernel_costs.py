"""Times the attention kernels of a backend while an engine starts, so that each window gets the faster one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from peregrine.attention import AttentionBackend, AttentionMetadata, Kernel, Window
from peregrine.attention.kernel_choice import KernelCosts, Shape, kernel_reason, measure_costs, only, problem_of
from peregrine.cache.store import KVStore
from peregrine.config import Decision, EngineConfig
from peregrine.engine.graphs import Graphs
from peregrine.kernels.attention import Problem, decode_launch, gpu_of
from peregrine.models.decoder import Decoder
from peregrine.spec.bound import BoundModel
from peregrine.spec.links import Links
from peregrine.spec.registry import DraftSource

CONTEXT = 2048  # cached tokens of each measured row, as in a usual chat
LONG = 32768  # cached tokens of a long one
REPEATS = 5  # forwards of all layers; the fastest counts

Windows = Mapping[Shape, bool]  # (rows, queries per row) -> whether the queries are nodes of a tree


def choose_kernels(model: BoundModel, windows: Windows, max_len: int) -> tuple[AttentionBackend, Decision]:
    """The model's backend with measured costs for these windows, and the Decision that reports them.

    Windows that only the context kernel serves are not timed. Where it is faster than programs that share the keys of a
    tile, both are timed with LONG cached tokens, too, or `max_len`: one program for each tile may leave most of the
    device idle, which a long context makes far slower and a short one does not show.
    """
    backend, gpu = model.backend, gpu_of(model.store.keys)
    problems = {shape: widest_choice(model, full_window(model.store, shape, windows[shape])) for shape in windows}
    launches = {shape: decode_launch(problems[shape], gpu, backend.traits.max_decode_q_len) for shape in windows}
    timed = [shape for shape, decode in launches.items() if decode is not None]
    long = min(LONG, max_len)

    def time_ms(context: int, kernel: Kernel, shape: Shape) -> float:
        forced = replace(model, backend=backend.with_costs(only(kernel, [shape])))
        return time_forward(forced, full_window(model.store, shape, windows[shape], context))

    def times_of(shapes: Sequence[Shape], context: int) -> dict[Shape, tuple[float, float]]:
        return dict(measure_costs(shapes, partial(time_ms, context)).times)

    with torch.inference_mode():
        times = times_of(timed, CONTEXT)
        shared = [shape for shape, decode in launches.items() if decode is not None and decode.programs > 1]
        faster = [shape for shape in shared if times[shape][0] > times[shape][1]]
        slower = {shape: ms for shape, ms in times_of(faster, long).items() if ms[0] < ms[1]}
    costs = KernelCosts(times | slower)
    reasons = [
        kernel_reason(problem, backend.traits, gpu, costs) + (f" at {long} tokens" if shape in slower else "")
        for shape, problem in problems.items()
    ]
    value = f"measured for {len(timed)} windows of {CONTEXT} tokens"
    return backend.with_costs(costs), Decision("kernels", value, "; ".join(reasons))


def widest_choice(model: BoundModel, metadata: AttentionMetadata) -> Problem:
    """The attention of the layer with the most kernels to choose from: one without sliding window and sinks, if any."""
    layer = min(model.layers, key=lambda layer: (layer.window is not None, layer.sinks is not None))
    return problem_of(metadata, model.store, layer, own_heads(model), model.decoder.embedding.dtype)


def own_heads(model: BoundModel) -> int:
    """Query heads of this rank."""
    return model.decoder.layer(0).attention.num_heads


def window_shapes(asked: EngineConfig, draft: DraftSource, row_sizes: Sequence[int]) -> Windows:
    """The uniform windows of a round at each batch size.

    The target verifies a window of all nodes. A drafter's network reads the accepted path (a draft model with the root
    before it), its last layer one query per row; then it steps, in a tree over `width` nodes at once.
    """
    depth = asked.depth
    q_lens = {1: False}
    if asked.ragged:  # windows differ in length: only one token alone is always the same
        return {(rows, 1): False for rows in sorted(row_sizes)}
    if draft.network is not None:
        q_lens[depth + 2 if isinstance(draft.network, Decoder) else depth + 1] = False
    if asked.tree is not None and asked.tree.width > 1:
        q_lens |= {asked.tree.width: True, asked.tree.nodes: True}
    elif draft.name != "none":
        q_lens[depth + 1] = False
    return {(rows, q_len): q_lens[q_len] for rows in sorted(row_sizes) for q_len in sorted(q_lens)}


def time_forward(model: BoundModel, metadata: AttentionMetadata) -> float:
    """Milliseconds of one layer's attention; all layers run in turn, so that keys come from memory, not from L2."""
    store, count = model.store, len(metadata.positions)
    device, kv, dtype = store.keys.device, store.shape, model.decoder.embedding.dtype
    q = torch.zeros(count, own_heads(model), kv.key_dim, dtype=dtype, device=device)
    k = torch.zeros(count, kv.num_heads, kv.key_dim, dtype=dtype, device=device)
    attend = model.bind(metadata)

    def every_layer() -> None:
        for layer in range(store.num_layers):
            attend(layer, q, k, k[..., : kv.value_dim])

    graphs: Graphs[None] = Graphs(device)  # launched one by one, the host's time would be measured
    graphs.record("all", every_layer)
    graphs.replay("all")
    times = []
    for _ in range(REPEATS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        graphs.replay("all")
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / store.num_layers)
    return float(min(times))


def full_window(store: KVStore, shape: Shape, tree: bool = False, context: int = CONTEXT) -> AttentionMetadata:
    """Rows of so many cached tokens, on any pages there are; new keys go to the scratch page. A tree is a chain."""
    rows, q_len = shape
    device, page_size = store.keys.device, store.page_size
    pages = -(-(context + q_len) // page_size)

    def count(stop: int) -> Tensor:
        return torch.arange(stop, device=device)

    past_lens = torch.full((rows,), context, device=device)
    return AttentionMetadata(
        window=Window.uniform(rows, q_len),
        positions=(past_lens[:, None] + count(q_len)).flatten(),
        q_starts=count(rows + 1) * q_len,
        past_lens=past_lens,
        page_table=(count(rows * pages) % max(1, store.num_pages - 1) + 1).view(rows, pages),
        page_size=page_size,
        slots=torch.zeros(rows * q_len, dtype=torch.int64, device=device),
        ancestors=Links.chain(q_len, device).ancestors.repeat(rows, 1) if tree else None,
    )
