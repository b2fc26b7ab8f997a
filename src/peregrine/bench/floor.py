"""What a round must read from memory: weights, keys and values, on every pass that reads them.

Of experts, as many count as the pass's tokens hit if they choose at random, or as they hit in rounds that are counted.
Norms and embeddings' rows are small.
"""

import torch
from torch import nn

from peregrine.cache.store import KVStore
from peregrine.engine.engine import Engine
from peregrine.kernels.moe import ExpertChoice
from peregrine.kernels.residual import Residual
from peregrine.models.draft_heads import DraftHead, Eagle3Head
from peregrine.models.experts import Experts, Router
from peregrine.models.head_parts import Head
from peregrine.models.layers import Linear
from peregrine.models.mla import PerHeadLinear
from peregrine.spec.chain import ChainDrafter
from peregrine.spec.readers import HeadReader, ModelReader
from peregrine.spec.tree import TreeDrafter
from peregrine.spec.types import Drafter


def round_bytes(engine: Engine, rows: int, context: float) -> int:
    """What a round must read: the target once, the drafter once per pass, and the keys and values of both."""
    target, drafter = engine.runner.target, engine.runner.drafter
    total = weight_bytes(target.decoder, rows * drafter.shape.nodes) + store_bytes(target.store, rows, context)
    if isinstance(drafter, ChainDrafter | TreeDrafter):
        reader, depth = drafter.reader, drafter.shape.depth
        steps = [rows * drafter.shape.width] * (depth - 1)  # tokens of each pass after the first
        if isinstance(reader, HeadReader):
            # The first pass reads the path's keys for all its places, and the rest for one live token of each row.
            total += sum(head_bytes(reader.head, num_tokens) for num_tokens in [rows, *steps])
            total += fuse_bytes(reader.head) + depth * store_bytes(reader.store, rows, context)
        elif isinstance(reader, ModelReader):
            # The first pass reads the path; its last layer, and so the experts there, one live token of each row.
            decoder, path = reader.model.decoder, rows * (depth + 1)
            last = decoder.layer(decoder.config.num_layers - 1)
            total += weight_bytes(decoder, path) - weight_bytes(last, path) + weight_bytes(last, rows)
            total += sum(weight_bytes(decoder, num_tokens) for num_tokens in steps)
            total += depth * store_bytes(reader.model.store, rows, context)
    return int(total)


def has_experts(engine: Engine) -> bool:
    """Whether the target or the drafter has some."""
    networks = [engine.runner.target.decoder, *networks_of(engine.runner.drafter)]
    return any(mixtures_of(network) for network in networks)


def experts_read(engine: Engine, rounds: int, every: int = 1) -> tuple[float, float]:
    """(bytes, experts of a layer) that a round really reads of experts: the mean of every n-th of the next rounds.

    Bytes are told as how many there are beyond those that `round_bytes` expects, experts as the mean of the target's
    layers. Random weights may send all tokens to the same few.
    """
    target, drafter = engine.runner.target.decoder, engine.runner.drafter
    mine = {id(part.router) for part in mixtures_of(target)}
    mixtures = {id(part.router): part for module in [target, *networks_of(drafter)] for part in mixtures_of(module)}
    read: list[tuple[Experts, int, int]] = []  # who was asked, by how many tokens, and how many experts they hit
    choose, graphs = Router.choose, engine.runner.graphs

    def counted(router: Router, stream: Residual) -> ExpertChoice:
        choice = choose(router, stream)
        read.append((mixtures[id(router)], len(choice.experts), len(torch.unique(choice.experts))))
        return choice

    for at in range(rounds):
        if at % every == 0:  # not recorded: the host has to see the choices
            Router.choose = counted  # type: ignore[method-assign, assignment]
            engine.runner.graphs = None
        try:
            engine.step()
        finally:
            Router.choose, engine.runner.graphs = choose, graphs  # type: ignore[method-assign]
    beyond = sum((hits - part.expected_hits(count)) * part.expert_bytes() for part, count, hits in read)
    of_target = [hits for part, _, hits in read if id(part.router) in mine]
    return beyond / len(range(0, rounds, every)), sum(of_target) / max(1, len(of_target))


def networks_of(drafter: Drafter) -> list[nn.Module]:
    """What a drafter reads with, if it is a network."""
    reader = drafter.reader if isinstance(drafter, ChainDrafter | TreeDrafter) else None
    if isinstance(reader, ModelReader):
        return [reader.model.decoder]
    return [reader.head] if isinstance(reader, HeadReader) and isinstance(reader.head, Head) else []


def stores_of(engine: Engine) -> list[KVStore]:
    """Keys and values of the target, and of a drafter that has some."""
    drafter = engine.runner.drafter
    reader = drafter.reader if isinstance(drafter, ChainDrafter | TreeDrafter) else None
    if isinstance(reader, ModelReader):
        return [engine.runner.target.store, reader.model.store]
    return [engine.runner.target.store] + ([reader.store] if isinstance(reader, HeadReader) else [])


def mixtures_of(module: nn.Module) -> list[Experts]:
    """Every mixture of experts in it."""
    return [part for part in module.modules() if isinstance(part, Experts)]


def head_bytes(head: DraftHead, num_tokens: int) -> float:
    """Bytes of a draft head that every pass reads, its borrowed output head included."""
    if not isinstance(head, Head):
        return 0
    borrowed = linear_bytes(head.lender.head) if head.head is None else 0
    return weight_bytes(head, num_tokens) - fuse_bytes(head) + borrowed


def fuse_bytes(head: DraftHead) -> int:
    """Bytes that are read once a round: what fuses taps, for guesses have none."""
    return linear_bytes(head.fc) if isinstance(head, Eagle3Head) else 0


def weight_bytes(module: nn.Module, num_tokens: int) -> float:
    """Bytes of every linear that so many tokens read."""
    total = 0.0
    for part in module.modules():
        match part:
            case Experts():
                total += part.active_bytes(num_tokens)
            case PerHeadLinear():
                assert part.packed is not None
                total += part.packed.num_bytes
            case Linear():
                total += linear_bytes(part)
    return total


def linear_bytes(part: Linear) -> int:
    """Bytes of one packed linear."""
    assert part.packed is not None
    weight = part.packed.weight if part.packed.weight is not None else part.packed.panels
    assert weight is not None
    return weight.numel() * weight.element_size()


def store_bytes(store: KVStore, rows: int, context: float) -> float:
    """Keys and values of all layers at so many places; values that lie in their keys count once."""
    return store.num_layers * store.shape.num_entries * store.keys.element_size() * rows * context
