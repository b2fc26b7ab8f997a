"""Device memory: how many pages fit beside the weights, and errors that say what did not fit."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from peregrine.cache.host_tier import HostTier
from peregrine.cache.page_copies import STAGED_BYTES, Event, PageCopies
from peregrine.cache.pages import PagePool
from peregrine.cache.store import KVStore
from peregrine.config import MAX_NODES, EngineConfig
from peregrine.errors import ConfigError
from peregrine.grammar import GRAMMARS_PRESENT
from peregrine.hardware import GIB, check_room, free_bytes
from peregrine.kernels.attention import mla_num_splits
from peregrine.models.config import ModelConfig
from peregrine.models.parallel import Ranks
from peregrine.spec.registry import StoreShape

# Share of pages in the memory left by weights and scratch; on a GPU the rest is for graphs.
CPU_SHARE, GPU_SHARE = 0.25, 0.85
# Per request, for places past its length that rounds may write: pages, or as many as hold the longest window.
SPARE_PAGES, SPARE_TOKENS = 8, 2 * MAX_NODES
SPARE_COPIED = 2  # per row, kept free by copying cached pages to the host ahead
EXPERT_BLOCK = 128  # most rows of a block that shares an expert; each expert leaves one unfilled
LATENT_TILE = 64  # most queries times heads in one tile of the MLA kernel
SHARED_TILES = 80  # most MLA tiles whose keys are split between programs; with more, each tile has one program


@contextmanager
def explain_memory(device: torch.device, what: str, remedy: str) -> Iterator[None]:
    """Turn running out of device memory into a ConfigError that says what was to be allocated and what was free."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_allocated(device)
        raise ConfigError(
            f"{device} has no room for {what}: {free / GIB:.1f} of {total / GIB:.1f} GiB are free and "
            f"{held / GIB:.1f} GiB hold what was loaded before; {remedy} ({error})"
        ) from error


def page_bytes(stores: Sequence[StoreShape], page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page in all stores together."""
    return sum(s.num_layers * s.kv.num_entries for s in stores) * dtype.itemsize * page_size


def scratch_bytes(asked: EngineConfig, config: ModelConfig, max_len: int, dtype: torch.dtype) -> int:
    """Estimate of what the largest prompt chunk and the largest round need on a GPU besides weights and pages."""
    size, latent, experts = dtype.itemsize, config.mla, config.experts
    attention, mlp, fixed = (2 * config.num_heads * config.head_dim * size, config.intermediate_size * size, 0)
    if latent is not None:
        # Queries before and after w_uk, accumulators in float32, outputs before and after w_uv.
        entries = latent.q_dim + latent.key_dim + latent.kv_rank + latent.value_dim
        attention = config.num_heads * (entries * size + 4 * latent.kv_rank)
        nodes = asked.depth + 1 if asked.tree is None else asked.tree.nodes
        tiles = min(SHARED_TILES, asked.max_rows * -(-nodes * config.num_heads // LATENT_TILE))
        fixed = tiles * mla_num_splits(max_len) * LATENT_TILE * 4 * latent.kv_rank
    if experts is not None:
        answer = experts.inner_size + config.hidden_size
        mlp = max(mlp, experts.rule.num_choices * answer * size + 4 * experts.num_experts)
        fixed += EXPERT_BLOCK * (experts.num_experts + experts.rule.num_shared) * answer * size
    copied_bytes = 2 * STAGED_BYTES if asked.host_cache else 0
    return asked.prefill_chunk * (4 * config.hidden_size * size + max(attention, mlp)) + fixed + copied_bytes


def mask_bytes(asked: EngineConfig, drafter: str, config: ModelConfig) -> tuple[int, str]:
    """Bytes of grammars' masks and of the tokens they force, at every node of every seat's window; and why."""
    tree = None if drafter == "none" else asked.tree
    depth = 0 if drafter == "none" else asked.depth
    nodes = depth + 1 if tree is None else tree.nodes
    if not GRAMMARS_PRESENT:
        return 0, "no structured output without llguidance; pip install llguidance"
    seats = max(asked.row_sizes or (asked.max_rows,))
    masks, forced = 4 * -(-config.vocab_size // 32), 8 * (depth + 1)
    return seats * (
        4 + nodes * (masks + forced)
    ), f"{seats} rows of {nodes} nodes, a bit for each of {config.vocab_size} tokens"


def pick_num_pages(
    asked: EngineConfig,
    stores: Sequence[StoreShape],
    max_len: int,
    device: torch.device,
    dtype: torch.dtype,
    scratch: int = 0,
) -> tuple[int, str]:
    """Pages for every seat at full length, or as many as fit beside `scratch` bytes; and why."""
    if asked.num_pages is not None:
        return asked.num_pages, "asked for"
    size = page_bytes(stores, asked.page_size, dtype)
    spare = max(SPARE_PAGES, SPARE_TOKENS // asked.page_size)
    wanted = 1 + asked.max_rows * (-(-max_len // asked.page_size) + spare)
    free = free_bytes(device)
    share = CPU_SHARE if device.type == "cpu" else GPU_SHARE
    of_what = f"{share:.0%} of the free memory"
    if scratch:
        of_what += f" beside {scratch / GIB:.1f} GiB that rounds and prompts work in"
    allowed = wanted if free is None else int((free - scratch) * share / size)
    if allowed < 2:
        raise ConfigError(f"num_pages: {of_what} holds {max(0, allowed)} pages of {size} bytes")
    if wanted <= allowed:
        return wanted, f"{asked.max_rows} requests of {max_len} tokens"
    return allowed, of_what


def fit_max_len(max_len: int, num_pages: int, page_size: int, span: int) -> tuple[int, str] | None:
    """Tokens of a request that runs alone, if all pages hold fewer than its context and a round's window; and why."""
    places = (num_pages - 1) * page_size
    held = places - span
    if held < 2:
        least = 1 - (-(span + 2) // page_size)
        raise ConfigError(
            f"num_pages={num_pages}: holds no token beside {span} of a round's window; ask for {least} or more"
        )
    if held >= max_len:
        return None
    return (
        held,
        f"num_pages={num_pages} hold {places} tokens, {span} of them for a round's window; the context is {max_len}",
    )


def make_stores(
    shapes: Sequence[StoreShape], num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> list[KVStore]:
    """One store of `num_pages` pages for each shape."""
    size = num_pages * page_bytes(shapes, page_size, dtype)
    what = f"num_pages={num_pages}, {size / GIB:.1f} GiB of keys and values"
    if device.type == "cpu":  # which hands out more than it has, and ends the process later
        check_room(device, what, size)
    with explain_memory(device, what, "lower num_pages, max_rows or max_len"):
        return [KVStore(s.num_layers, num_pages, page_size, s.kv, dtype, device) for s in shapes]


class LedCopies(PageCopies):
    """Copies that all ranks make, each of its parts of the pages; only rank 0 looks when they have ended."""

    def __init__(self, stores: Sequence[KVStore], num_slots: int, ranks: Ranks) -> None:
        super().__init__(stores, num_slots)
        self.ranks = ranks
        ranks.tell("follower", "make_copies", num_slots)

    def out(self, pages: Sequence[int], slots: Sequence[int]) -> Event | None:
        """Copy device pages to host slots."""
        self.ranks.note("follower", "copy", "out", pages, slots)
        return super().out(pages, slots)

    def back(self, slots: Sequence[int], pages: Sequence[int]) -> Event | None:
        """Copy host slots to device pages."""
        self.ranks.note("follower", "copy", "back", slots, pages)
        return super().back(slots, pages)


def make_host_tier(asked: EngineConfig, pool: PagePool, stores: Sequence[KVStore], ranks: Ranks) -> HostTier:
    """Host memory for pages that the device evicts; all ranks' together is as large as was asked for."""
    size = sum(store.num_bytes for store in stores) // pool.num_pages * ranks.size
    num_slots = int(asked.host_cache * GIB) // size
    if not num_slots:
        raise ConfigError(f"host_cache={asked.host_cache:g}: less than a page of {size} bytes; give it more, or 0")
    what = f"host_cache={asked.host_cache:g}, {num_slots} pages in host memory"
    check_room(torch.device("cpu"), what, num_slots * size)
    copies = PageCopies(stores, num_slots) if ranks.size == 1 else LedCopies(stores, num_slots, ranks)
    return HostTier(pool, copies, spare=SPARE_COPIED * asked.max_rows if copies.is_queued else 0)
