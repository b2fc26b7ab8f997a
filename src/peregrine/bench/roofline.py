"""The roofline of a round: the bytes it must read and the operations it must do.

Bytes are weights, keys and values, once for every forward pass that reads them; norms and rows of embeddings are small
and left out. Of experts, as many count as tokens would hit at random; `experts_read` counts those that they do hit.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from peregrine.cache.store import KVStore
from peregrine.engine.engine import Engine
from peregrine.kernels.linear import PerHeadFormat, WeightFormat
from peregrine.kernels.moe import ExpertChoice, ExpertFormat
from peregrine.models.draft_heads import Eagle3Head
from peregrine.models.experts import Experts
from peregrine.models.layers import Linear
from peregrine.models.mla import PerHeadLinear
from peregrine.spec.block import BlockDrafter
from peregrine.spec.chain import ChainDrafter
from peregrine.spec.readers import DraftReader, HeadReader, ModelReader
from peregrine.spec.tree import TreeDrafter


@dataclass(frozen=True, slots=True)
class Work:
    """What must at least be read and computed."""

    num_bytes: float
    operations: float  # multiplications and additions

    def __add__(self, other: "Work") -> "Work":
        return Work(self.num_bytes + other.num_bytes, self.operations + other.operations)


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass over all rows."""

    weights: list[tuple[nn.Module, int]]  # networks, with the number of tokens that go through each
    store: KVStore
    num_heads: int  # of queries
    num_queries: int


def round_work(engine: Engine, rows: int, context: float) -> Work:
    """One round of `rows` requests that are `context` tokens long on average."""
    total = Work(0.0, 0.0)
    for each in round_passes(engine, rows):
        for module, num_tokens in each.weights:
            total += weight_work(module, num_tokens)
        total += attention_work(each, rows, context)
    return total


def round_passes(engine: Engine, rows: int) -> Iterator[Pass]:
    """The target's pass and the drafter's."""
    target, shape = engine.runner.target, engine.runner.drafter.shape
    nodes, path = rows * shape.nodes, rows * (shape.depth + 1)
    yield Pass([(target.decoder, nodes)], target.store, target.decoder.config.num_heads, nodes)
    reader, steps = reader_of(engine), [rows * shape.width] * (shape.depth - 1)  # tokens of the passes after the first
    if isinstance(reader, ModelReader):
        decoder, store, num_heads = reader.model.decoder, reader.model.store, reader.model.decoder.config.num_heads
        # The first pass reads the accepted path; past the last layer's keys and values, one live token per row.
        *layers, last = decoder.layers
        first = [(layer, path) for layer in layers] + [(last, rows), (decoder.head, rows)]
        yield Pass(first, store, num_heads, rows)
        for num_tokens in steps:
            yield Pass([(decoder, num_tokens)], store, num_heads, num_tokens)
    if isinstance(reader, HeadReader):
        head = reader.head
        fuse: list[nn.Module] = [head.fc] if isinstance(head, Eagle3Head) else []  # taps are fused once
        parts = [part for part in head.children() if part not in fuse]
        parts += [head.lender.head] if head.head is None else []
        for index, num_tokens in enumerate([rows, *steps]):
            weights = [(part, num_tokens) for part in parts] + [(part, path) for part in fuse if index == 0]
            yield Pass(weights, reader.store, head.layer_config.num_heads, num_tokens)

    drafter = engine.runner.drafter
    if isinstance(drafter, BlockDrafter):
        block, tokens = drafter.head, rows * drafter.num_inputs
        out = block.lender.head if block.head is None else block.head
        blocks = [(block.fc, path), *((layer, tokens) for layer in block.layers), (out, rows * shape.depth)]
        if block.markov is not None:  # once for each draft of the path
            blocks += [(block.markov, rows * shape.width)] * shape.depth
        yield Pass(blocks, drafter.store, block.layer_config.num_heads, tokens)


def weight_work(module: nn.Module, num_tokens: int) -> Work:
    """Every linear of a module, read once and applied to each token."""
    work = Work(0.0, 0.0)
    for part in module.modules():
        match part:
            case Experts():
                work += expert_work(part, expected_hits(part, num_tokens), num_tokens)
            case PerHeadLinear() | Linear():
                work += linear_work(part.format, num_tokens)
    return work


def linear_work(weight: WeightFormat | PerHeadFormat | ExpertFormat, num_tokens: int) -> Work:
    """A weight that is read once and applied to each token."""
    return Work(weight.num_bytes, 2.0 * num_tokens * math.prod(weight.shape))


def expert_work(mixture: Experts, hits: float, num_tokens: int) -> Work:
    """A layer's experts, `hits` of which are read; the router is a linear of its own."""
    both = linear_work(mixture.gate_up.format, num_tokens) + linear_work(mixture.down.format, num_tokens)
    chosen = mixture.config.top_k + mixture.config.num_shared
    count = mixture.down.num_experts
    return Work(hits * both.num_bytes / count, chosen * both.operations / count)


def expected_hits(mixture: Experts, num_tokens: int) -> float:
    """How many experts are hit by tokens that choose at random; all of them hit the shared ones."""
    chosen, count = mixture.config.top_k, mixture.config.num_experts
    return count * (1 - (1 - chosen / count) ** num_tokens) + mixture.config.num_shared


def attention_work(each: Pass, rows: int, context: float) -> Work:
    """Keys and values of all layers, read once per row; MLA's values lie in their keys and count once."""
    store, shape = each.store, each.store.shape
    num_bytes = store.num_layers * shape.num_entries * store.keys.element_size() * rows * context
    operations = 2 * store.num_layers * each.num_heads * (shape.key_dim + shape.value_dim) * each.num_queries * context
    return Work(num_bytes, operations)


def reader_of(engine: Engine) -> DraftReader | None:
    """The drafter's network as a reader; None if it has none."""
    drafter = engine.runner.drafter
    return drafter.reader if isinstance(drafter, ChainDrafter | TreeDrafter) else None


def stores_of(engine: Engine) -> list[KVStore]:
    """The KV stores of the target and of a drafter that has one."""
    reader = reader_of(engine)
    own = reader.model.store if isinstance(reader, ModelReader) else None
    own = reader.store if isinstance(reader, HeadReader) else own
    own = engine.runner.drafter.store if isinstance(engine.runner.drafter, BlockDrafter) else own
    return [engine.runner.target.store] + ([own] if own is not None else [])


def mixtures_of(engine: Engine) -> list[Experts]:
    """Every layer's experts that a round goes through, each once."""
    networks = [module for each in round_passes(engine, 1) for module, _ in each.weights]
    found = [part for network in networks for part in network.modules() if isinstance(part, Experts)]
    return list(dict.fromkeys(found))


def experts_read(engine: Engine, rounds: int, every: int = 1) -> tuple[float, float]:
    """Run rounds and count the experts that every n-th of them reads: (bytes above `round_work`, experts).

    Bytes are the mean of the counted rounds; experts are the mean per layer of the target. Random weights may send all
    tokens to the same few.
    """
    counts: list[tuple[Experts, int, int]] = []  # experts, the tokens that chose, and how many experts they hit

    def count(mixture: Experts, choice: ExpertChoice) -> None:
        counts.append((mixture, len(choice.experts), len(torch.unique(choice.experts))))

    mixtures = mixtures_of(engine)
    for index in range(rounds):
        counted = index % every == 0
        for mixture in mixtures:
            mixture.on_choice = partial(count, mixture) if counted else None
        engine.runner.eager = counted  # the host has to see the choices
        try:
            engine.step()
        finally:
            engine.runner.eager = False
            for mixture in mixtures:
                mixture.on_choice = None
    above = sum(expert_work(mixture, hits - expected_hits(mixture, n), n).num_bytes for mixture, n, hits in counts)
    target = set(engine.runner.target.decoder.modules())
    of_target = [hits for mixture, _, hits in counts if mixture in target]
    return above / len(range(0, rounds, every)), sum(of_target) / max(1, len(of_target))
