"""Builds an engine from its options: every option left open is resolved, and noted as a Decision with its reason."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from tqdm import tqdm

from peregrine.attention.backend import AttentionBackend
from peregrine.attention.routing import choose_backend
from peregrine.attention.traits import Needs
from peregrine.cache.pages import PagePool
from peregrine.cache.prefix import PrefixTree
from peregrine.config import Decision, EngineConfig
from peregrine.engine.admission import Limits
from peregrine.engine.engine import Engine
from peregrine.engine.graphs import Graphs
from peregrine.engine.kernel_costs import choose_kernels, window_shapes
from peregrine.engine.memory import explain_memory, make_stores, pick_num_pages, scratch_bytes, store_shape_of
from peregrine.engine.page_ledger import PageLedger
from peregrine.engine.policy import BatchPolicy
from peregrine.engine.runner import VARIANTS, Runner
from peregrine.engine.sources import ModelSource, open_source
from peregrine.errors import ConfigError
from peregrine.grammar import GRAMMARS_PRESENT, GrammarCompiler
from peregrine.hardware import arithmetic_dtype, current_device, resolve_device, resolve_dtype, resolve_kv_dtype
from peregrine.kernels.linear import workspace_bytes
from peregrine.kernels.runtime.cpu import COMPILED, load_kernels
from peregrine.kernels.runtime.gpu import TRITON_PRESENT
from peregrine.models.config import ModelConfig
from peregrine.models.decoder import Decoder
from peregrine.spec.bound import BoundModel
from peregrine.spec.judge import judge
from peregrine.spec.registry import DraftSource, StoreShape, make_drafter
from peregrine.spec.state import SeatState
from peregrine.spec.types import Drafter
from peregrine.synthetic.judge import simulated_judge
from peregrine.text.chat import has_system_place
from peregrine.text.tokenizer import Tokenizer
from peregrine.threads import pick_threads

MAX_DEFAULT_LEN = 2**20  # tables of positions take memory before the first request comes
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Built:
    """An engine, its model's tokenizer, config and sampling defaults, and every decision made for it."""

    engine: Engine
    tokenizer: Tokenizer
    model: ModelConfig
    sampling_defaults: dict[str, object]  # of requests that do not say otherwise
    decisions: tuple[Decision, ...]


class Decisions:
    """The decisions made so far."""

    def __init__(self) -> None:
        self.made: list[Decision] = []

    def take(self, field: str, choice: tuple[Value, str]) -> Value:
        """Note a value and the reason for it; returns the value."""
        value, because = choice
        shown = str(value).removeprefix("torch.") if isinstance(value, torch.device | torch.dtype) else value
        self.made.append(Decision(field, shown, because))
        return value


def build_engine(asked: EngineConfig) -> Built:
    """Load the model and its drafter, lay out memory, and put the engine together."""
    device = resolve_device(asked.device)
    with current_device(device):
        return _build(asked, device)


def _build(asked: EngineConfig, device: torch.device) -> Built:
    source, decisions = open_source(asked.model), Decisions()
    decisions.take("model", source.describe(asked.model))
    decisions.take("device", (device, "asked for" if asked.device != "auto" else "the fastest there is"))
    dtype = decisions.take("dtype", pick_dtype(asked, device, source))
    # What cannot be served is refused before anything large is loaded.
    max_len = decisions.take("max_len", pick_max_len(asked, source.config))
    defaults = pick_sampling_defaults(asked, source, decisions)
    tokenizer = source.tokenizer()
    check_tokenizer(tokenizer, source.config)
    if tokenizer.missing is not None:
        decisions.take("tokenizer", ("none", f"token ids alone are served: {tokenizer.missing}"))
    if not has_system_place(tokenizer):
        decisions.take("system_message", ("in the next user message", "the chat template has no place for it"))
    if device.type == "cuda" and source.config.unfused:
        decisions.take("layers", ("plain", f"not fused: {', '.join(source.config.unfused)}"))
    with explain_memory(device, "the model's weights", "choose a smaller model or another device"):
        target = source.target(device, dtype, max_len)
    name = decisions.take("drafter", pick_drafter(asked, source))
    with explain_memory(device, "the drafter's weights", "choose a smaller drafter, ngram or none"):
        draft = source.drafter(name, target)
    if device.type == "cpu":
        torch.set_num_threads(decisions.take("threads", pick_threads(torch.get_num_threads())))
        compile_kernels()

    shapes = [store_shape_of(target)] + ([draft.store_shape] if draft.store_shape else [])
    dtype = arithmetic_dtype(dtype, device)
    kv_dtype = resolve_kv_dtype(asked.kv_dtype, dtype)
    backend, why = pick_backend(asked, target, draft, shapes, dtype, kv_dtype)
    decisions.take("attention", (backend.name, why))
    graphs = decisions.take("graphs", pick_graphs(asked, device))
    scratch = scratch_bytes(asked, target.config, max_len, dtype) if device.type == "cuda" else 0
    scratch += workspace_bytes(device)
    num_pages = decisions.take("num_pages", pick_num_pages(asked, shapes, max_len, device, kv_dtype, scratch))
    stores = make_stores(shapes, num_pages, asked.page_size, kv_dtype, device)
    lag = decisions.take("lag", pick_lag(asked, device))
    policy = BatchPolicy(asked.max_rows, asked.prefill_chunk, lag, pick_row_sizes(asked, graphs))

    bound = BoundModel(target, target.layer_attention(), stores[0], backend)
    if graphs and backend.traits.max_decode_q_len:  # kernels are timed by recording them
        windows = window_shapes(asked, draft, policy.row_sizes or (1, policy.max_rows))
        backend, timed = choose_kernels(bound, windows)
        decisions.made.append(timed)
    drafter = make_drafter(draft, asked.num_drafts, asked.tree, stores[-1], backend)
    check_windows(target.config, drafter)
    engine = assemble(asked, replace(bound, backend=backend), drafter, tokenizer, max_len, policy)
    if graphs:
        decisions.made.append(record_graphs(engine, device))
    return Built(engine, tokenizer, target.config, defaults, tuple(decisions.made))


def assemble(
    asked: EngineConfig, target: BoundModel, drafter: Drafter, tokenizer: Tokenizer, max_len: int, policy: BatchPolicy
) -> Engine:
    """Put the engine's parts together."""
    device, num_pages = target.store.keys.device, target.store.num_pages
    num_seats = policy.max_rows if policy.row_sizes is None else max(policy.row_sizes)
    seats = SeatState(num_seats, drafter.shape, max_len, asked.page_size, device)
    verdicts = judge if asked.simulate_accept is None else simulated_judge(asked.simulate_accept, drafter.shape.depth)
    lookahead = int(drafter.reads_next_token)
    pool = PagePool(num_pages)
    tree = PrefixTree(pool, asked.page_size, lookahead) if asked.prefix_cache else None
    config = target.decoder.config
    return Engine(
        runner=Runner(target, drafter, verdicts, seats),
        ledger=PageLedger(pool, tree, asked.page_size, lookahead),
        limits=Limits(
            vocab_size=config.vocab_size,
            max_len=max_len,
            num_places=(num_pages - 1) * asked.page_size,
            span=drafter.shape.span,
            num_drafts=drafter.shape.depth,
            eos_ids=config.eos_ids,
        ),
        tokenizer=tokenizer,
        policy=policy,
        simulated=asked.simulate_accept is not None,
        grammars=GrammarCompiler(tokenizer, config.vocab_size, config.eos_ids),
    )


def compile_kernels() -> None:
    """Compile every CPU kernel before the first request, with a progress bar if that takes long."""
    names = tqdm(load_kernels(), "compiling kernels for this CPU, once", len(COMPILED), delay=3, leave=False)
    for name in names:
        names.set_postfix_str(name, refresh=False)


def check_tokenizer(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Refuse a tokenizer whose ids the model does not have; it may have fewer."""
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {config.vocab_size}; they are not a pair"
        )


def pick_dtype(asked: EngineConfig, device: torch.device, source: ModelSource) -> tuple[torch.dtype, str]:
    """The dtype that weights are held in, and why."""
    dtype, automatic = resolve_dtype(asked.dtype, device, source.dtype), "as stored"
    wanted = "asked for"
    if device.type == "cpu":
        automatic = "exact on any CPU"
        wanted += "; weights are held in it, arithmetic is float32" if dtype != torch.float32 else ""
    return dtype, wanted if asked.dtype != "auto" else automatic


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
        sinks=False,
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


def pick_sampling_defaults(asked: EngineConfig, source: ModelSource, decisions: Decisions) -> dict[str, object]:
    """Sampling parameters of requests that do not say otherwise, noted with their reason."""
    found, because = source.sampling_defaults() if asked.generation_config == "auto" else ({}, "asked for")
    written = ", ".join(f"{name}={value}" for name, value in found.items())
    decisions.take("generation_config", (written or "none", because))
    return found


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


def pick_lag(asked: EngineConfig, device: torch.device) -> tuple[int, str]:
    """How many rounds are queued before the oldest is read, and why."""
    if asked.lag is not None:
        return asked.lag, "asked for"
    return (0, "nothing to overlap on a CPU") if device.type == "cpu" else (1, "hides the host")


def pick_row_sizes(asked: EngineConfig, graphs: bool) -> tuple[int, ...] | None:
    """The batch sizes that are recorded; None: batches have any size."""
    if asked.row_sizes is not None or not graphs:
        return asked.row_sizes
    return tuple(sorted({min(2**power, asked.max_rows) for power in range(13)}))


def record_graphs(engine: Engine, device: torch.device) -> Decision:
    """Record every round the engine may run, with a progress bar."""
    began, taken = time.perf_counter(), 0
    sizes = engine.policy.row_sizes
    assert sizes is not None
    engine.runner.graphs = Graphs(device)
    variants = len(VARIANTS)
    if GRAMMARS_PRESENT:
        engine.runner.seats.hold_masks(engine.limits.vocab_size)
        variants += 2  # the two parts of a round with a grammar
    bar = tqdm(total=len(sizes) * variants, desc="recording rounds", unit="graph", delay=1, leave=False)
    with bar, explain_memory(device, "the graphs of rounds", "lower max_rows or num_pages"):
        for num_bytes in engine.runner.record(sizes):
            taken += num_bytes
            bar.update()
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    return Decision(
        "recorded",
        len(engine.runner.graphs),
        f"rounds of {', '.join(map(str, sizes))} rows in {variants} variants; {taken / 2**20:.0f} MiB, {seconds:.1f} s",
    )


def check_windows(config: ModelConfig, drafter: Drafter) -> None:
    """Refuse a tree deeper than a sliding window: its nodes must see all their ancestors."""
    shortest = min((w for w in config.windows if w is not None), default=None)
    if not drafter.shape.is_chain and shortest is not None and shortest <= drafter.shape.depth:
        raise ConfigError(
            f"tree: depth {drafter.shape.depth} does not fit the model's window of {shortest}; draft a chain"
        )
