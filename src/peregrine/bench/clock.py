"""Where a round's time goes, measured from outside: the round itself has no clock in it."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from peregrine.attention.backend import Attend, AttentionBackend, Deferred, LayerAttention
from peregrine.attention.kernel_choice import KernelCosts
from peregrine.attention.metadata import AttentionMetadata
from peregrine.attention.traits import Traits
from peregrine.cache.store import KVStore
from peregrine.engine.engine import Engine
from peregrine.models.decoder import Decoder
from peregrine.models.head_parts import Eagle3Layer
from peregrine.models.layers import Linear
from peregrine.spec.chain import ChainDrafter
from peregrine.spec.readers import HeadReader, ModelReader
from peregrine.spec.tree import TreeDrafter


@dataclass(slots=True)
class Clock:
    """Seconds by name. Spans of different names may nest; of one name only the outermost counts."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _open: set[str] = field(default_factory=set)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        if name in self._open:
            yield
            return
        self._open.add(name)
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start
        self.calls[name] += 1
        self._open.remove(name)


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

    def with_costs(self, costs: KernelCosts) -> "TimedBackend":
        return TimedBackend(self.inner.with_costs(costs), self.clock)

    def bind(self, store: KVStore, layers: Sequence[LayerAttention], metadata: AttentionMetadata) -> Attend:
        attend = self.inner.bind(store, layers, metadata)

        def timed(layer: int, q: Tensor, k: Tensor, v: Tensor, turn: Deferred | None = None) -> Tensor:
            with self.clock.span("kernels"):
                return attend(layer, q, k, v, turn)

        return timed


@contextmanager
def watch(engine: Engine, clock: Clock) -> Iterator[None]:
    """Count the engine's rounds by stage inside the block. It never waits for a device, so it is for CPUs."""
    runner, target = engine.runner, engine.runner.target
    with ExitStack() as undo:
        undo.callback(setattr, runner, "target", target)
        runner.target = replace(target, backend=TimedBackend(target.backend, clock))
        count_network(target.decoder, clock, undo)
        if isinstance(runner.drafter, ChainDrafter | TreeDrafter):
            count_reader(runner.drafter.reader, clock, undo)
        count_calls(target.decoder, "forward", "verify", clock, undo)
        count_calls(target.decoder, "logits", "verify", clock, undo)
        for owner, method, name in (
            (runner, "launch", "round"),
            (runner, "judge", "judge"),
            (runner.drafter, "propose", "propose"),
        ):
            count_calls(owner, method, name, clock, undo)
        yield


def count_reader(reader: object, clock: Clock, undo: ExitStack) -> None:
    """The kernels of a drafter's own network."""
    if isinstance(reader, HeadReader) and isinstance(reader.head, nn.Module):
        undo.callback(setattr, reader, "backend", reader.backend)
        reader.backend = TimedBackend(reader.backend, clock)
        count_network(reader.head, clock, undo)
    if isinstance(reader, ModelReader):
        model = reader.model
        undo.callback(setattr, reader, "model", model)
        reader.model = replace(model, backend=TimedBackend(model.backend, clock))
        count_network(model.decoder, clock, undo)


def count_network(network: nn.Module, clock: Clock, undo: ExitStack) -> None:
    """Matrix products, and the remembered runs that consist of little else."""
    for module in network.modules():
        if isinstance(module, Linear):
            count_calls(module, "forward", "kernels", clock, undo)
        if isinstance(module, Decoder | Eagle3Layer):
            count_calls(module.graphs, "run", "kernels", clock, undo)


def count_calls(owner: object, method: str, name: str, clock: Clock, undo: ExitStack) -> None:
    """Count the calls of one object's method; an attribute of the object's own hides its class's."""
    inner: Callable[..., object] = object.__getattribute__(owner, method)
    own = vars(owner)
    undo.callback(own.__setitem__, method, own[method]) if method in own else undo.callback(own.pop, method)

    def timed(*arguments: object, **named: object) -> object:
        with clock.span(name):
            return inner(*arguments, **named)

    own[method] = timed
