"""Where a round's time goes, measured from outside: the round itself has no clock in it."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from torch import Tensor

from peregrine.attention.backend import Attend, AttentionBackend, LayerAttention
from peregrine.attention.metadata import AttentionMetadata
from peregrine.attention.traits import Traits
from peregrine.cache.store import KVStore
from peregrine.engine.engine import Engine
from peregrine.kernels.choose import Features
from peregrine.kernels.verdict import Verdict
from peregrine.models.layers import Linear
from peregrine.spec.judge import Judge
from peregrine.spec.state import RowState
from peregrine.spec.types import Chunk, Drafter, Drafts, Seen


@dataclass(slots=True)
class Clock:
    """Seconds by name; spans may nest and each is counted whole."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start
        self.calls[name] += 1


@dataclass(frozen=True, slots=True)
class TimedBackend:
    """An attention backend whose calls are counted."""

    inner: AttentionBackend
    clock: Clock

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def traits(self) -> Traits:
        return self.inner.traits

    def missing(self) -> list[str]:
        return self.inner.missing()

    def bind(self, store: KVStore, layers: Sequence[LayerAttention], metadata: AttentionMetadata) -> Attend:
        attend = self.inner.bind(store, layers, metadata)

        def timed(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with self.clock.span("attention"):
                return attend(layer, q, k, v)

        return timed


class TimedDrafter:
    """A drafter whose proposals are counted."""

    def __init__(self, inner: Drafter, clock: Clock) -> None:
        self.inner, self.clock = inner, clock
        self.shape, self.taps, self.reads_next_token = inner.shape, inner.taps, inner.reads_next_token

    def absorb(self, chunk: Chunk) -> None:
        self.inner.absorb(chunk)

    def propose(self, seen: Seen) -> Drafts:
        with self.clock.span("propose"):
            return self.inner.propose(seen)


def timed_judge(judge: Judge, clock: Clock) -> Judge:
    """A judge whose verdicts are counted."""

    def timed(logits: Tensor, past_lens: Tensor, state: RowState, features: Features) -> Verdict:
        with clock.span("judge"):
            return judge(logits, past_lens, state, features)

    return timed


def attach(engine: Engine, clock: Clock) -> Callable[[], None]:
    """Count the engine's rounds by stage until the returned function is called; it never waits, so CPU only."""
    runner = engine.runner
    kept = (runner.target, runner.drafter, runner.judge)
    target = replace(runner.target, backend=TimedBackend(runner.target.backend, clock))
    runner.target, runner.drafter = target, TimedDrafter(runner.drafter, clock)
    runner.judge = timed_judge(runner.judge, clock)
    linears = [module for module in target.decoder.modules() if isinstance(module, Linear)]
    for module in linears:
        time_calls(module, "forward", "linear", clock)
    time_calls(runner, "launch", "round", clock)

    def detach() -> None:
        runner.target, runner.drafter, runner.judge = kept
        for module in linears:
            del vars(module)["forward"]
        del vars(runner)["launch"]

    return detach


def time_calls(owner: object, method: str, name: str, clock: Clock) -> None:
    """Count the calls of one object's method; the object's own attribute hides its class's."""
    inner = object.__getattribute__(owner, method)

    def timed(*arguments: object) -> object:
        with clock.span(name):
            return inner(*arguments)

    vars(owner)[method] = timed
