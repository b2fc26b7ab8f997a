"""Runs of compiled kernels remembered, and run again on the same memory without the Python between them.

On a CPU a small kernel takes as long as the Python that calls it. A function whose only work is compiled kernels does
the same calls on the same addresses each time, if its inputs and intermediates keep their places: so it is run once
while its calls are noted, and from then on the calls alone are made. What a device's graph capture is to a GPU, in
the same spirit: there is no second version of anything, what is replayed is what ran.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from peregrine.kernels.runtime.cpu import note_calls, run_calls

aten = torch.ops.aten
ROOM = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default}  # make room, write nothing

Step = Callable[..., tuple[Tensor, ...]]


class CpuGraph:
    """One run of a function, to be repeated: same inputs' shapes, other values, the same output tensors."""

    def __init__(self, step: Step, inputs: Sequence[Tensor]) -> None:
        self.inputs = tuple(inputs)
        keeper = _Keeper()
        with note_calls() as self._calls, keeper:
            self.outputs = step(*inputs)
        self._memory = keeper.made
        self.complete = not keeper.unknown  # False: it did something that cannot be repeated from notes

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs for these inputs; they are overwritten by the next call."""
        for place, value in zip(self.inputs, inputs, strict=True):
            if place is not value:
                place.copy_(value)
        run_calls(self._calls)
        return self.outputs


class _Keeper(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps every tensor that is made, so that noted addresses stay theirs, and notices work done by torch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[Any] = []
        self.unknown: list[Any] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in here; saying so would import the compiler, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.made.append(result)
        if func not in ROOM and not _only_looks(func, args, result):
            self.unknown.append(func)
        return result


def _only_looks(func: Any, args: tuple[Any, ...], result: Any) -> bool:
    """Whether an operation changed nothing, and all it returned lies in its arguments' memory."""
    given = {value.untyped_storage().data_ptr() for value in args if isinstance(value, Tensor)}
    seen = [result] if isinstance(result, Tensor) else list(result)
    return not func._schema.is_mutable and all(x.untyped_storage().data_ptr() in given for x in seen)


class CpuGraphs:
    """CpuGraph steps of functions that belong together, by the number of rows they were run for.

    Rows come in few numbers; the number used least recently is given up when there are too many.
    """

    def __init__(self, max_rows: int, max_kept: int = 12) -> None:
        self.max_rows, self.max_kept = max_rows, max_kept
        self._steps: dict[int, dict[int, CpuGraph]] = {}

    def run(self, index: int, step: Step, *inputs: Tensor) -> tuple[Tensor, ...]:
        """`step(*inputs)`, from memory if its like was run before; outputs last until the next run of the like."""
        num_rows = inputs[0].shape[0]
        if num_rows > self.max_rows:
            return step(*inputs)
        steps = self._steps.pop(num_rows, {})
        self._steps[num_rows] = steps  # now the one used last
        known = steps.get(index)
        if known is not None:
            return known(*inputs) if known.complete else step(*inputs)
        if len(self._steps) > self.max_kept:
            del self._steps[next(iter(self._steps))]
        steps[index] = CpuGraph(step, inputs)
        return steps[index].outputs
