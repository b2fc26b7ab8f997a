"""CPU graphs: the kernel calls of a function are recorded once and replayed on the same memory, without Python between.

On a CPU a small kernel takes as long as the Python that calls it. A function that consists of compiled kernels alone
makes the same calls on the same addresses every time, if its inputs and intermediate tensors keep their places: so it
is run once while its calls are recorded, and from then on only the calls are made. As with CUDA graphs there is no
second version of any code: what is replayed is what ran.
"""

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from peregrine.kernels.runtime.cpu import Replay, is_recording, record_calls
from peregrine.kernels.runtime.cpu_arena import Arena

aten = torch.ops.aten
ALLOCATIONS = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default}  # allocate, write nothing
RECORDED_USE = 7  # to record takes as long as seven replays save: not worth it for a number of rows that is seldom seen

Step = Callable[..., tuple[Tensor, ...]]


class _Hurry(threading.local):
    """Whether this thread records what it runs for the first time."""

    at_once = False


_hurry = _Hurry()


@contextmanager
def record_at_once(when: bool = True) -> Iterator[None]:
    """Inside, everything is recorded the first time it is run: for what is timed, or sure to be run again."""
    before, _hurry.at_once = _hurry.at_once, _hurry.at_once or when
    try:
        yield
    finally:
        _hurry.at_once = before


def records_at_once() -> bool:
    """Whether the present call is inside `record_at_once`."""
    return _hurry.at_once


class _Recorded:
    """How many graphs there were until now."""

    count = 0


def count_recorded() -> int:
    """How many graphs were recorded in this process: a round that records a new one is not as fast as the next."""
    return _Recorded.count


class CpuGraph:
    """One recorded run of a function, to be replayed: for inputs of the same shapes, into the same output tensors."""

    def __init__(self, step: Step, inputs: Sequence[Tensor], arena: Arena | None = None) -> None:
        self.inputs = tuple(inputs)
        self._arena = arena or Arena()  # of what is computed on the way; it must live as long as the graph
        _Recorded.count += 1
        watch = _Watch(self._arena)
        with record_calls() as calls, watch:
            self.outputs = step(*inputs)
        self._replay = Replay(calls)
        self.complete = not watch.unknown  # False: it did something that cannot be replayed

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Replay for these inputs; the outputs are overwritten by the next replay."""
        for place, value in zip(self.inputs, inputs, strict=True):
            if place is not value:
                place.copy_(value)
        self._replay()
        return self.outputs


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Places what is allocated in an arena, so that recorded addresses stay valid, and notices work of torch itself."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.arena = arena
        self.unknown: list[Any] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled inside; the base class would import the compiler to find out, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS:
            return self.arena.like(result)
        if not _is_view(func, args, result):
            self.unknown.append(func)
        return result


@cache
def _makes_views(func: Any) -> bool:
    """Whether an operation always returns views, and changes nothing."""
    alias = [found.alias_info for found in func._schema.returns]
    return not func._schema.is_mutable and bool(alias) and all(alias)


def _is_view(func: Any, args: tuple[Any, ...], result: Any) -> bool:
    """Whether an operation changed nothing and returned only views of its arguments' memory."""
    if _makes_views(func):
        return True
    if not isinstance(result, Tensor | list | tuple):  # a number that Python reads
        return False
    given = {value.untyped_storage().data_ptr() for value in args if isinstance(value, Tensor)}
    seen = [result] if isinstance(result, Tensor) else result
    return not func._schema.is_mutable and all(x.untyped_storage().data_ptr() in given for x in seen)


class CpuGraphs:
    """The CPU graphs of some functions that belong together, for each number of rows that they were run with.

    They share the memory of what they compute on the way. When their outputs are those of too many rows, the graphs of
    the least recently used number are dropped. A graph keeps the inputs it was recorded with and writes later ones over
    them; if somebody else needs those, it must have copies. Where no outputs are needed after the next replay, whatever
    it is of, they share their outputs' memory, too. `few` rows or fewer are recorded at their first use.
    """

    def __init__(
        self,
        max_rows: int,
        kept_rows: int | None = None,
        *,
        copies_inputs: bool = False,
        shares_outputs: bool = False,
        few: int = 0,
    ) -> None:
        self.max_rows, self.kept_rows = max_rows, 8 * max_rows if kept_rows is None else kept_rows
        self.copies_inputs, self.shares_outputs, self.few = copies_inputs, shares_outputs, few
        self.arena = Arena()
        self._uses: Counter[tuple[int, Hashable]] = Counter()
        self._graphs: dict[int, dict[Hashable, CpuGraph]] = {}  # number of rows -> name of the function -> graph

    def run(self, name: Hashable, step: Step, *inputs: Tensor) -> tuple[Tensor, ...]:
        """`step(*inputs)`: replayed if it was recorded for this number of rows, recorded if few or often run.

        Outputs are overwritten by the next replay of the same function and number of rows. Inside another recording
        the function just runs.
        """
        num_rows = inputs[0].shape[0]
        if num_rows > self.max_rows or is_recording():
            return step(*inputs)
        graphs = self._graphs.get(num_rows, {})
        graph = graphs.get(name)
        if graph is None and num_rows > self.few:
            self._uses[num_rows, name] += 1
            if self._uses[num_rows, name] < RECORDED_USE and not records_at_once():
                return step(*inputs)
        self._graphs.pop(num_rows, None)
        self._graphs[num_rows] = graphs  # now the most recently used
        if graph is not None:
            return graph(*inputs) if graph.complete else step(*inputs)
        while sum(self._graphs) > self.kept_rows:
            del self._graphs[next(iter(self._graphs))]
        kept = [value.clone() for value in inputs] if self.copies_inputs else inputs
        graph = graphs[name] = CpuGraph(step, kept, self.arena)
        if self.shares_outputs:
            self.arena.share(graph.outputs)
        return graph.outputs
