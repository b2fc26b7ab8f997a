"""From what was asked for to an engine that runs: every choice on the way is a Decision with its reason."""

from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from peregrine.attention.routing import choose_backend
from peregrine.attention.traits import GraphSupport, Needs
from peregrine.cache.pages import PagePool
from peregrine.cache.prefix import PrefixTree
from peregrine.cache.store import KVStore
from peregrine.config import Decision, EngineConfig
from peregrine.engine.admission import Limits
from peregrine.engine.engine import Engine, Pace
from peregrine.engine.folders import find_model
from peregrine.engine.holdings import Holdings
from peregrine.engine.runner import Runner
from peregrine.errors import ConfigError
from peregrine.hardware import read_gpu, read_memory, resolve_device, resolve_dtype
from peregrine.kernels.cpu import COMPILED, load_kernels
from peregrine.models.config import ModelConfig
from peregrine.models.decoder import Decoder
from peregrine.models.loading import load_decoder, stored_dtype
from peregrine.spec.bound import BoundModel
from peregrine.spec.judge import judge
from peregrine.spec.registry import StoreShape, find_drafter, make_drafter
from peregrine.spec.simulate import simulated_judge
from peregrine.spec.state import SeatState
from peregrine.spec.types import Drafter
from peregrine.text.tokenizer import Tokenizer

CPU_SHARE, GPU_SHARE = 0.25, 0.85  # of the memory that is free once weights are loaded, for KV pages


@dataclass(frozen=True, slots=True)
class Built:
    """An engine, the tokenizer of its model, and why it is as it is."""

    engine: Engine
    tokenizer: Tokenizer
    model: ModelConfig
    decisions: tuple[Decision, ...]


def build_engine(asked: EngineConfig) -> Built:
    """Load the model and its drafter, lay out memory, and put the engine together."""
    folder = find_model(asked.model)
    device = resolve_device(asked.device)
    dtype = resolve_dtype(asked.dtype, device, stored_dtype(folder))
    decisions = [
        Decision(
            "model", str(folder), "asked for" if str(folder) == asked.model else f"{asked.model} lies there"
        ),
        Decision("device", str(device), "asked for" if asked.device != "auto" else "the fastest there is"),
        Decision(
            "dtype",
            str(dtype).removeprefix("torch."),
            "asked for" if asked.dtype != "auto" else dtype_reason(device),
        ),
    ]
    tokenizer = Tokenizer.read(folder)
    target = load_decoder(folder, device, dtype)
    check_tokenizer(tokenizer, target.config)
    name, why = pick_drafter(asked.drafter, folder)
    source = find_drafter(name, folder, target)
    decisions.append(Decision("drafter", name, why))

    if device.type == "cpu":
        compile_kernels()

    needs = attention_needs(asked, target, device, dtype)
    choice = choose_backend(asked.attention, needs)
    decisions.append(Decision("attention", choice.backend.name, "; ".join(choice.reasons)))

    max_len = pick_max_len(asked, target.config)
    stores = [store_shape_of(target)] + ([source.store_shape] if source.store_shape else [])
    num_pages, why = pick_num_pages(asked, stores, max_len, device, dtype)
    decisions.append(Decision("num_pages", num_pages, why))

    def make_store(shape: StoreShape) -> KVStore:
        return KVStore(
            shape.num_layers, num_pages, asked.page_size, shape.num_kv_heads, shape.head_dim, dtype, device
        )

    bound = BoundModel(target, target.layer_attention(), make_store(stores[0]), choice.backend)
    draft_store = make_store(source.store_shape) if source.store_shape else None
    drafter = make_drafter(source, asked.num_drafts, asked.tree, draft_store, choice.backend)
    check_windows(target.config, drafter)
    lag = asked.lag if asked.lag is not None else (0 if device.type == "cpu" else 1)
    why = (
        "asked for"
        if asked.lag is not None
        else "nothing to overlap on a CPU"
        if lag == 0
        else "hides the host"
    )
    decisions.append(Decision("lag", lag, why))
    return Built(
        assemble(asked, bound, drafter, tokenizer, max_len, num_pages, lag),
        tokenizer,
        target.config,
        tuple(decisions),
    )


def assemble(
    asked: EngineConfig,
    target: BoundModel,
    drafter: Drafter,
    tokenizer: Tokenizer,
    max_len: int,
    num_pages: int,
    lag: int,
) -> Engine:
    """Put the parts together; nothing is decided here."""
    device = target.store.keys.device
    num_seats = asked.max_rows if asked.row_sizes is None else max(asked.row_sizes)
    seats = SeatState(num_seats, drafter.shape, max_len, asked.page_size, device)
    verdicts = (
        judge
        if asked.simulate_accept is None
        else simulated_judge(asked.simulate_accept, drafter.shape.depth)
    )
    lookahead = int(drafter.reads_next_token)
    pool = PagePool(num_pages)
    tree = PrefixTree(pool, asked.page_size, lookahead) if asked.prefix_cache else None
    config = target.decoder.config
    return Engine(
        runner=Runner(target, drafter, verdicts, seats),
        holdings=Holdings(pool, tree, asked.page_size, lookahead),
        limits=Limits(
            vocab_size=config.vocab_size,
            max_len=max_len,
            num_places=(num_pages - 1) * asked.page_size,
            span=drafter.shape.span,
            num_drafts=drafter.shape.depth,
            eos_ids=config.eos_ids,
        ),
        tokenizer=tokenizer,
        pace=Pace(asked.max_rows, asked.prefill_chunk, lag, asked.row_sizes),
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


def pick_drafter(asked: str, folder: Path) -> tuple[str, str]:
    """The drafter's name, and why."""
    if asked != "auto":
        return asked, "asked for"
    if (folder / "eagle3" / "config.json").exists():
        return "eagle3", "the model's folder has a head"
    return "none", "the model's folder has no head; ask for ngram or a folder to speculate"


def attention_needs(asked: EngineConfig, target: Decoder, device: torch.device, dtype: torch.dtype) -> Needs:
    """What the model and the shape of its windows ask of attention."""
    return Needs(
        device=device.type,
        dtype=dtype,
        page_size=asked.page_size,
        head_dim=target.config.head_dim,
        tree_masks=asked.tree is not None,
        windows=any(window is not None for window in target.config.windows),
        sinks=False,
        graphs=GraphSupport.NEVER,
    )


def pick_max_len(asked: EngineConfig, config: ModelConfig) -> int:
    """Tokens a request may have in all."""
    if asked.max_len is not None and asked.max_len > config.max_positions:
        raise ConfigError(f"max_len={asked.max_len}: the model's context is {config.max_positions}; lower it")
    return asked.max_len or config.max_positions


def store_shape_of(model: Decoder) -> StoreShape:
    return StoreShape(model.config.num_layers, model.config.num_kv_heads, model.config.head_dim)


def pick_num_pages(
    asked: EngineConfig, stores: list[StoreShape], max_len: int, device: torch.device, dtype: torch.dtype
) -> tuple[int, str]:
    """Pages for every seat at full length, or as many as the memory allows."""
    if asked.num_pages is not None:
        return asked.num_pages, "asked for"
    place_bytes = sum(2 * s.num_layers * s.num_kv_heads * s.head_dim for s in stores) * dtype.itemsize
    page_bytes = place_bytes * asked.page_size
    wanted = 1 + asked.max_rows * (-(-max_len // asked.page_size) + 8)
    free = read_memory()[1] if device.type == "cpu" else read_gpu(device.index or 0).memory_free_bytes
    share = CPU_SHARE if device.type == "cpu" else GPU_SHARE
    allowed = wanted if free is None else int(free * share / page_bytes)
    if allowed < 2:
        raise ConfigError(
            f"num_pages: {share:.0%} of the free memory holds {allowed} pages of {page_bytes} bytes"
        )
    if wanted <= allowed:
        return wanted, f"{asked.max_rows} requests of {max_len} tokens"
    return allowed, f"{share:.0%} of the free memory"


def check_windows(config: ModelConfig, drafter: Drafter) -> None:
    """Tree nodes always see their ancestors, so a sliding window must be longer than the tree is deep."""
    shortest = min((w for w in config.windows if w is not None), default=None)
    if not drafter.shape.is_chain and shortest is not None and shortest <= drafter.shape.depth:
        raise ConfigError(
            f"tree: depth {drafter.shape.depth} does not fit the model's window of {shortest}; guess a chain"
        )
