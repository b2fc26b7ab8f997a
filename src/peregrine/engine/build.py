"""Builds an engine from its options: every option left open is resolved, and noted as a Decision with its reason."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from tqdm import tqdm

from peregrine.attention import AttentionBackend
from peregrine.cache.pages import PagePool
from peregrine.cache.prefix import PrefixTree
from peregrine.cache.store import KVStore
from peregrine.config import Decision, EngineConfig
from peregrine.engine.admission import Limits
from peregrine.engine.choices import (
    Decisions,
    check_windows,
    pick_backend,
    pick_cuda_kernels,
    pick_drafter,
    pick_dtype,
    pick_graphs,
    pick_lag,
    pick_long_factors,
    pick_max_len,
    pick_max_rows,
    pick_page_size,
    pick_prefill_chunk,
    pick_row_sizes,
    round_rows,
)
from peregrine.engine.engine import Engine
from peregrine.engine.given_ranks import open_ranks
from peregrine.engine.kernel_costs import choose_kernels, window_shapes
from peregrine.engine.memory import (
    explain_memory,
    fit_max_len,
    make_host_tier,
    make_stores,
    mask_bytes,
    page_bytes,
    pick_num_pages,
    scratch_bytes,
)
from peregrine.engine.page_ledger import PageLedger
from peregrine.engine.parallel import Started, await_ranks, check_ranks
from peregrine.engine.policy import BatchPolicy
from peregrine.engine.rank_group import rank_devices
from peregrine.engine.recording import record_graphs
from peregrine.engine.rounds import RoundOptions, Rounds
from peregrine.engine.runner import Runner
from peregrine.engine.sources import ModelSource, open_source
from peregrine.engine.window_choice import AUTO, Chosen, add_planner, plan_ahead, time_ahead, with_windows
from peregrine.errors import ConfigError
from peregrine.grammar import GrammarCompiler
from peregrine.hardware import arithmetic_dtype, current_device, resolve_device, resolve_kv_dtype
from peregrine.kernels.linear import workspace_bytes
from peregrine.kernels.runtime.cpu import COMPILED, load_kernels
from peregrine.kernels.runtime.gpu import HOPPER, generation
from peregrine.log import logger
from peregrine.models.config import ModelConfig
from peregrine.models.decoder import Decoder
from peregrine.models.parallel import Ranks
from peregrine.spec.bound import BoundModel
from peregrine.spec.registry import DraftSource, LoadDrafter, StoreShape
from peregrine.text.chat import has_system_place
from peregrine.text.tokenizer import Tokenizer
from peregrine.threads import pick_threads


@dataclass(frozen=True, slots=True)
class Built:
    """An engine, its model's tokenizer, config and sampling defaults, and every decision made for it."""

    engine: Engine
    tokenizer: Tokenizer
    model: ModelConfig
    sampling_defaults: dict[str, object]  # of requests that do not say otherwise
    decisions: tuple[Decision, ...]
    close: Callable[[], None] = lambda: None  # ends the other ranks of a tensor-parallel engine
    check: Callable[[], None] | None = None  # raises if one of them has ended; None: there are none


def build_engine(asked: EngineConfig, joined: Started | None = None) -> Built:
    """Load the model and its drafter, lay out memory, and put the engine together.

    A tensor-parallel engine starts its other ranks, which end with `Built.close`, or leads those it is given.
    """
    device = resolve_device(asked.device)
    with ExitStack() as until_closed, current_device(device):
        started: list[Started] = []

        def start_ranks() -> Ranks:
            own = joined or until_closed.enter_context(open_ranks(rank_devices(device, asked.tensor_parallel)))
            started.append(own)
            return own.ranks

        built = _build(asked, device, start_ranks)
        check = started[0].check if started[0].ranks.size > 1 else None
        return replace(built, close=until_closed.pop_all().close, check=check)


def _build(asked: EngineConfig, device: torch.device, start_ranks: Callable[[], Ranks]) -> Built:
    source, decisions = open_source(asked.model), Decisions()
    max_stall_s = None if asked.prefill_chunk else asked.max_stall_ms / 1e3  # a size that was asked for is kept
    decisions.take("model", source.describe(asked.model))
    decisions.take("device", (device, "asked for" if asked.device != "auto" else "the fastest there is"))
    name = decisions.take("drafter", pick_drafter(asked, source))
    dtype = decisions.take("dtype", pick_dtype(asked, device, source, round_rows(asked, name)))
    # What cannot be served is refused before anything large is loaded.
    load_drafter = source.drafter(name, (asked.num_drafts, asked.tree, asked.confidence_threshold))
    max_len = decisions.take("max_len", pick_max_len(asked, source.config))
    defaults = pick_sampling_defaults(asked, source, decisions)
    tokenizer = source.tokenizer()
    check_tokenizer(tokenizer, source.config)
    note_model(decisions, source.config, tokenizer, device, max_len)
    if asked.tensor_parallel > 1:
        decisions.take("tensor_parallel", (asked.tensor_parallel, check_ranks(asked, device, source.config)))
    ranks = start_ranks()
    ranks.tell("follower", "load", asked.model, dtype, max_len, name)
    target, draft = load_networks(source, load_drafter, ranks, device, dtype, max_len, decisions)
    asked, tree = with_windows(asked, target.config, draft, device, decisions.take)
    if device.type == "cpu":
        torch.set_num_threads(decisions.take("threads", pick_threads(torch.get_num_threads(), ranks.size)))
        compile_kernels()

    asked = replace(asked, page_size=decisions.take("page_size", pick_page_size(asked)))
    networks = [target] + ([draft.network] if draft.network else [])
    shapes = [StoreShape.of(network) for network in networks]
    dtype = arithmetic_dtype(dtype, device)
    kv_dtype = resolve_kv_dtype(asked.kv_dtype, dtype)
    backend, why = pick_backend(asked, target, draft, shapes, dtype, kv_dtype)
    decisions.take("attention", (backend.name, why))
    graphs = decisions.take("graphs", pick_graphs(asked, device))
    await_ranks(ranks.pipes)  # their weights are in memory, which all may share
    together = [shape for network in networks for shape in StoreShape.in_memory(network, ranks)]
    asked = with_sizes(asked, target.config, page_bytes(together, 1, kv_dtype), max_len, device, dtype, decisions)
    scratch = scratch_bytes(asked, target.config, max_len, dtype) if device.type == "cuda" else 0
    scratch *= 2 if graphs else 1  # recorded chunks keep their memory; others are launched beside them
    scratch += workspace_bytes(device) + decisions.take("grammar_mask_bytes", mask_bytes(asked, name, target.config))
    num_pages = decisions.take("num_pages", pick_num_pages(asked, together, max_len, device, kv_dtype, scratch))
    stores = make_stores(shapes, num_pages, asked.page_size, kv_dtype, device)
    ranks.tell("follower", "make_stores", num_pages, asked.page_size, kv_dtype)
    await_ranks(ranks.pipes)
    lag = decisions.take("lag", pick_lag(asked, device))
    policy = BatchPolicy(asked.max_rows, asked.prefill_chunk, max_stall_s, lag, pick_row_sizes(asked, graphs))
    if graphs and backend.traits.max_decode_q_len:  # kernels are timed by recording them
        bound = BoundModel(target, target.layer_attention(), stores[0], backend)
        windows = window_shapes(asked, draft, policy.row_sizes or (1, policy.max_rows))
        backend, timed = choose_kernels(bound, windows, max_len)
        decisions.made.append(timed)
    options = RoundOptions.of(asked, max(policy.row_sizes or (policy.max_rows,)), max_len)
    rounds = make_rounds(target, draft, stores, backend, options)
    ledger = make_ledger(asked, stores, ranks, int(rounds.drafter.reads_next_token), decisions)
    engine = assemble(asked, rounds, tokenizer, policy, ledger, tree, decisions)
    if graphs:
        plan_ahead(asked, engine.runner, draft)
        decisions.made.append(record_graphs(engine, device))
        decisions.made += time_ahead(engine.runner, policy.row_sizes or ())
    else:
        decisions.made += add_planner(asked, engine.runner, draft)
    return Built(engine, tokenizer, target.config, defaults, tuple(decisions.made))


def load_networks(
    source: ModelSource,
    load_drafter: LoadDrafter,
    ranks: Ranks,
    device: torch.device,
    dtype: torch.dtype,
    max_len: int,
    decisions: Decisions,
) -> tuple[Decoder, DraftSource]:
    """The target and the drafter, of which several ranks hold their shards."""
    with explain_memory(device, "the model's weights", "choose a smaller model or another device"):
        target = source.target(device, dtype, max_len, ranks)
    with explain_memory(device, "the drafter's weights", "choose a smaller drafter, ngram or none"):
        draft = load_drafter(target)
    if ranks.size > 1 and draft.network is not None:
        count, whole = draft.network.ranks.size, f"its heads cannot be shared by {ranks.size}: each has it whole"
        decisions.take("drafter_ranks", (count, "split as the target is" if count > 1 else whole))
    return target, draft


def with_sizes(
    asked: EngineConfig,
    config: ModelConfig,
    token_bytes: int,
    max_len: int,
    device: torch.device,
    dtype: torch.dtype,
    decisions: Decisions,
) -> EngineConfig:
    """The options with the sizes of batches and prompt chunks chosen, where they were left open."""
    rows = decisions.take("max_rows", pick_max_rows(asked, config, token_bytes, max_len, device))
    asked = replace(asked, max_rows=rows)
    chunk = decisions.take("prefill_chunk", pick_prefill_chunk(asked, config, max_len, device, dtype))
    return replace(asked, prefill_chunk=chunk)


def make_rounds(
    target: Decoder, draft: DraftSource, stores: list[KVStore], backend: AttentionBackend, options: RoundOptions
) -> Rounds:
    """The parts of rounds, on every rank."""
    rounds = Rounds.make(target, draft, stores, backend, options)
    check_windows(target.config, rounds.drafter)
    target.ranks.tell("follower", "make_rounds", backend, options)
    return rounds


def assemble(
    asked: EngineConfig,
    rounds: Rounds,
    tokenizer: Tokenizer,
    policy: BatchPolicy,
    ledger: PageLedger,
    tree: Chosen,
    decisions: Decisions,
) -> Engine:
    """Put the engine's parts together."""
    config, shape, max_len = rounds.target.decoder.config, rounds.drafter.shape, rounds.seats.max_len
    if fewer := fit_max_len(max_len, rounds.target.store.num_pages, asked.page_size, shape.span):
        logger.warning("max_len=%d: %s", *fewer)
        max_len = decisions.take("max_len", fewer)
    return Engine(
        runner=Runner(rounds),
        ledger=ledger,
        limits=Limits(
            vocab_size=config.vocab_size,
            max_len=max_len,
            num_drafts=shape.depth,
            nodes=shape.span if tree[0] == AUTO else shape.nodes,
            tree=tree,
            eos_ids=config.eos_ids,
        ),
        tokenizer=tokenizer,
        policy=policy,
        simulated=asked.simulate_accept is not None,
        grammars=GrammarCompiler(tokenizer, config.vocab_size, config.eos_ids),
    )


def make_ledger(
    asked: EngineConfig, stores: list[KVStore], ranks: Ranks, lookahead: int, decisions: Decisions
) -> PageLedger:
    """The page pool with its prefix cache, and host memory for what that evicts."""
    pool = PagePool(stores[0].num_pages)
    tree = PrefixTree(pool, asked.page_size, lookahead) if asked.prefix_cache else None
    tier = make_host_tier(asked, pool, stores, ranks) if asked.host_cache else None
    if tier is not None:
        await_ranks(ranks.pipes)
        slots, size = tier.copies.num_slots, tier.copies.page_bytes
        decisions.take("host_cache", (f"{asked.host_cache:g} GiB", f"{slots} evicted pages of {size} bytes"))
    return PageLedger(pool, tree, asked.page_size, lookahead, tier)


def compile_kernels() -> None:
    """Compile every CPU kernel before the first request, with a progress bar if that takes long."""
    names = tqdm(load_kernels(), "compiling kernels for this CPU, once", len(COMPILED), delay=3, leave=False)
    for name in names:
        names.set_postfix_str(name, refresh=False)


def note_model(
    decisions: Decisions, config: ModelConfig, tokenizer: Tokenizer, device: torch.device, max_len: int
) -> None:
    """Note what is done otherwise for this model or device than for most."""
    if (factors := pick_long_factors(config, max_len)) is not None:
        decisions.take("rope", factors)
    if tokenizer.missing is not None:
        decisions.take("tokenizer", ("none", f"token ids alone are served: {tokenizer.missing}"))
    if not has_system_place(tokenizer):
        decisions.take("system_message", ("in the next user message", "the chat template has no place for it"))
    if device.type == "cuda" and config.unfused:
        decisions.take("layers", ("plain", f"not fused: {', '.join(config.unfused)}"))
    if device.type == "cuda" and generation() == HOPPER:
        decisions.take("cuda_kernels", pick_cuda_kernels())


def check_tokenizer(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Refuse a tokenizer whose ids the model does not have; it may have fewer."""
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {config.vocab_size}; they are not a pair"
        )


def pick_sampling_defaults(asked: EngineConfig, source: ModelSource, decisions: Decisions) -> dict[str, object]:
    """Sampling parameters of requests that do not say otherwise, noted with their reason."""
    found, because = source.sampling_defaults() if asked.generation_config == "auto" else ({}, "asked for")
    written = ", ".join(f"{name}={value}" for name, value in found.items())
    decisions.take("generation_config", (written or "none", because))
    return found
