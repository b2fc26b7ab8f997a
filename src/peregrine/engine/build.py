"""From what was asked for to an engine that runs: every choice on the way is a Decision with its reason."""

import time
from dataclasses import dataclass, replace

import torch
from tqdm import tqdm

from peregrine.attention.routing import choose_backend
from peregrine.attention.traits import GraphSupport, Needs, Traits
from peregrine.cache.pages import PagePool
from peregrine.cache.prefix import PrefixTree
from peregrine.config import Decision, EngineConfig
from peregrine.engine.admission import Limits
from peregrine.engine.engine import BatchPolicy, Engine
from peregrine.engine.graphs import Graphs
from peregrine.engine.kernel_costs import choose_kernels, window_shapes
from peregrine.engine.memory import explain_memory, make_stores, pick_num_pages, scratch_bytes, store_shape_of
from peregrine.engine.page_ledger import PageLedger
from peregrine.engine.runner import VARIANTS, Runner
from peregrine.engine.sources import ModelSource, open_source
from peregrine.errors import ConfigError
from peregrine.hardware import resolve_device, resolve_dtype, resolve_kv_dtype
from peregrine.kernels.runtime.cpu import COMPILED, load_kernels
from peregrine.kernels.runtime.gpu import TRITON_PRESENT
from peregrine.models.config import ModelConfig
from peregrine.models.decoder import Decoder
from peregrine.spec.bound import BoundModel
from peregrine.spec.judge import judge
from peregrine.spec.registry import make_drafter
from peregrine.spec.state import SeatState
from peregrine.spec.types import Drafter
from peregrine.synthetic.judge import simulated_judge
from peregrine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Built:
    """An engine, the tokenizer of its model, and why it is as it is."""

    engine: Engine
    tokenizer: Tokenizer
    model: ModelConfig
    decisions: tuple[Decision, ...]


def build_engine(asked: EngineConfig) -> Built:
    """Load the model and its drafter, lay out memory, and put the engine together."""
    source = open_source(asked.model)
    device = resolve_device(asked.device)
    dtype = resolve_dtype(asked.dtype, device, source.dtype)
    decisions = [
        Decision("model", *source.describe(asked.model)),
        Decision("device", str(device), "asked for" if asked.device != "auto" else "the fastest there is"),
        Decision(
            "dtype", str(dtype).removeprefix("torch."), "asked for" if asked.dtype != "auto" else dtype_reason(device)
        ),
    ]
    max_len = pick_max_len(asked, source.config)  # refused before anything large is loaded
    tokenizer = source.tokenizer()
    with explain_memory(device, "the model's weights", "choose a smaller model or another device"):
        target = source.target(device, dtype)
    check_tokenizer(tokenizer, target.config)
    name, why = pick_drafter(asked, source)
    with explain_memory(device, "the drafter's weights", "choose a smaller drafter, ngram or none"):
        draft = source.drafter(name, target)
    decisions.append(Decision("drafter", name, why))

    if device.type == "cpu":
        compile_kernels()

    kv_dtype = resolve_kv_dtype(asked.kv_dtype, dtype)
    shapes = [store_shape_of(target)] + ([draft.store_shape] if draft.store_shape else [])
    needs = attention_needs(asked, target, device, dtype, kv_dtype)
    # The drafter attends with the same backend.
    needs = replace(needs, shared_kv=any(shape.kv.shared for shape in shapes))
    check_kv_dtype(asked.kv_dtype, needs)
    choice = choose_backend(asked.attention, needs)
    decisions.append(Decision("attention", choice.backend.name, "; ".join(choice.reasons)))
    graphs, why = pick_graphs(asked, device, choice.backend.traits)
    decisions.append(Decision("graphs", graphs, why))

    scratch = scratch_bytes(asked, target.config, max_len, dtype) if device.type == "cuda" else 0
    num_pages, why = pick_num_pages(asked, shapes, max_len, device, kv_dtype, scratch)
    decisions.append(Decision("num_pages", num_pages, why))
    stores = make_stores(shapes, num_pages, asked.page_size, kv_dtype, device)
    policy, why = pick_policy(asked, device, graphs)
    decisions.append(Decision("lag", policy.lag, why))
    backend, layers = choice.backend, target.layer_attention()
    if graphs and backend.traits.max_decode_q_len:  # kernels are timed by recording them
        windows = window_shapes(asked, name != "none", policy.row_sizes or (1, policy.max_rows))
        backend, made = choose_kernels(backend, stores[0], layers, target.config.num_heads, dtype, windows)
        decisions.append(made)
    bound = BoundModel(target, layers, stores[0], backend)
    drafter = make_drafter(draft, asked.num_drafts, asked.tree, stores[-1], backend)
    check_windows(target.config, drafter)
    engine = assemble(asked, bound, drafter, tokenizer, max_len, policy)
    if graphs:
        decisions.append(record_graphs(engine, device))
    return Built(engine, tokenizer, target.config, tuple(decisions))


def assemble(
    asked: EngineConfig, target: BoundModel, drafter: Drafter, tokenizer: Tokenizer, max_len: int, policy: BatchPolicy
) -> Engine:
    """Put the parts together; nothing is decided here."""
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
    )


def compile_kernels() -> None:
    """Have every CPU kernel ready before the first request; a bar shows when that takes long."""
    names = tqdm(load_kernels(), "compiling kernels for this CPU, once", len(COMPILED), delay=3, leave=False)
    for name in names:
        names.set_postfix_str(name, refresh=False)


def dtype_reason(device: torch.device) -> str:
    return "exact on any CPU" if device.type == "cpu" else "as stored"


def check_tokenizer(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """A tokenizer may leave ids unused, but it may not make ids the model does not have."""
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {config.vocab_size}; they are not a pair"
        )


def attention_needs(
    asked: EngineConfig, target: Decoder, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
) -> Needs:
    """What the model and the shape of its windows ask of attention."""
    return Needs(
        device=device.type,
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=asked.page_size,
        head_dim=target.config.kv_shape.key_dim,
        tree_masks=asked.tree is not None,
        windows=any(window is not None for window in target.config.windows),
        sinks=False,
        shared_kv=target.config.kv_shape.shared,
        graphs=GraphSupport.NEVER,
    )


def check_kv_dtype(name: str, needs: Needs) -> None:
    """No backend reads latents in another dtype than the model's: said in one line, not once for each of them."""
    if needs.shared_kv and needs.kv_dtype != needs.dtype:
        raise ConfigError(f"kv_dtype={name!r}: latents (MLA) are held in the model's own dtype; use auto")


def pick_drafter(asked: EngineConfig, source: ModelSource) -> tuple[str, str]:
    """Which drafter, and why."""
    if asked.num_drafts == 0 and asked.tree is None:
        return "none", "num_drafts=0"
    return (asked.drafter, "asked for") if asked.drafter != "auto" else source.automatic_drafter()


def pick_max_len(asked: EngineConfig, config: ModelConfig) -> int:
    """Tokens a request may have in all."""
    if asked.max_len is not None and asked.max_len > config.max_positions:
        raise ConfigError(f"max_len={asked.max_len}: the model's context is {config.max_positions}; lower it")
    return asked.max_len or config.max_positions


def pick_graphs(asked: EngineConfig, device: torch.device, traits: Traits) -> tuple[bool, str]:
    """Whether rounds are recorded as device graphs, and why."""
    able = device.type == "cuda" and traits.graphs > GraphSupport.NEVER and TRITON_PRESENT
    if asked.graphs and not able:
        raise ConfigError(
            f"graphs=True: rounds are recorded on CUDA devices with Triton; this is {device}; leave it out"
        )
    if asked.graphs is not None:
        return asked.graphs, "asked for"
    return able, "a round is one launch" if able else "rounds are recorded on CUDA devices with Triton"


def pick_policy(asked: EngineConfig, device: torch.device, graphs: bool) -> tuple[BatchPolicy, str]:
    """How requests are batched, and why the host runs ahead or does not."""
    sizes = asked.row_sizes
    if sizes is None and graphs:
        sizes = tuple(sorted({min(2**power, asked.max_rows) for power in range(13)}))
    if asked.lag is not None:
        lag, why = asked.lag, "asked for"
    elif device.type == "cpu":
        lag, why = 0, "nothing to overlap on a CPU"
    else:
        lag, why = 1, "hides the host"
    return BatchPolicy(asked.max_rows, asked.prefill_chunk, lag, sizes), why


def record_graphs(engine: Engine, device: torch.device) -> Decision:
    """Record every round the engine may run; a bar shows how far it is."""
    began, taken = time.perf_counter(), 0
    sizes = engine.policy.row_sizes
    assert sizes is not None
    engine.runner.graphs = Graphs(device)
    bar = tqdm(total=len(sizes) * len(VARIANTS), desc="recording rounds", unit="graph", delay=1, leave=False)
    with bar, explain_memory(device, "the graphs of rounds", "lower max_rows or num_pages"):
        for num_bytes in engine.runner.record(sizes):
            taken += num_bytes
            bar.update()
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    return Decision(
        "recorded",
        len(engine.runner.graphs),
        f"rounds of {', '.join(map(str, sizes))} rows in {len(VARIANTS)} variants; "
        f"{taken / 2**20:.0f} MiB, {seconds:.1f} s",
    )


def check_windows(config: ModelConfig, drafter: Drafter) -> None:
    """Tree nodes always see their ancestors, so a sliding window must be longer than the tree is deep."""
    shortest = min((w for w in config.windows if w is not None), default=None)
    if not drafter.shape.is_chain and shortest is not None and shortest <= drafter.shape.depth:
        raise ConfigError(
            f"tree: depth {drafter.shape.depth} does not fit the model's window of {shortest}; guess a chain"
        )
