"""Whether every CPU operation gives a row the same bits alone and in any batch.

All rows are computed together on one thread, and some of them alone. Then rows are computed in batches of odd sizes
that start at odd rows, with their memory shifted by one element or spread out, on several threads, and compared bit by
bit.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from peregrine.bench.row_operations import Operation, operations


@dataclass(frozen=True, slots=True)
class Finding:
    """A row whose bits depend on the batch."""

    operation: str
    row: int
    batch: str  # which rows, memory and threads gave other bits

    def __str__(self) -> str:
        return f"{self.operation}: row {self.row} has other bits in a batch of {self.batch}"


def check_rows(
    threads: Sequence[int] = (1, 2, 3), quick: bool = False, table: Iterable[Operation] | None = None
) -> list[Finding]:
    """At most one finding per operation; none: a row's bits depend on that row alone.

    The quick form leaves out the batches of a few rows.
    """
    found = (_check(operation, threads, quick) for operation in (operations() if table is None else table))
    return [finding for finding in found if finding is not None]


def _check(operation: Operation, threads: Sequence[int], quick: bool) -> Finding | None:
    count = len(operation.rows[0])
    with _torch_threads(1):
        expected = _run(operation, operation.rows)
        for row in sorted({*range(min(count, 6)), count // 2, count - 3, count - 2, count - 1}):
            alone = _run(operation, [x[row : row + 1].clone() for x in operation.rows])
            if _first_difference([rows[row : row + 1] for rows in expected], alone) is not None:
                return Finding(operation.name, row, "all rows")
    batches = [(0, count, memory) for memory in MEMORY] + [(1, count, "plain"), (0, 1, "plain")]
    few = [] if quick else [(0, 2, "plain"), (1, 4, "shifted"), (2, 7, "plain"), (3, 12, "plain"), (4, 22, "spread")]
    for number in threads:
        with _torch_threads(number):
            for first, end, memory in batches + (few if number == 1 else []):
                results = _run(operation, [MEMORY[memory](x[first:end]) for x in operation.rows])
                row = _first_difference([rows[first:end] for rows in expected], results)
                if row is not None:
                    batch = f"rows {first} to {min(end, count) - 1}, {memory} memory, {number} threads"
                    return Finding(operation.name, first + row, batch)
    return None


def _run(operation: Operation, rows: Sequence[Tensor]) -> list[Tensor]:
    """The results as bytes: [n, bytes of a row] each."""
    results = operation.run(*rows)
    tensors = (results,) if isinstance(results, Tensor) else results
    dense = (x.clone(memory_format=torch.contiguous_format) for x in tensors)
    return [x.view(len(rows[0]), -1).view(torch.uint8) for x in dense]


def _first_difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> int | None:
    """The first row in which two lists of results differ."""
    for one, other in zip(expected, found, strict=True):
        if not torch.equal(one, other):
            return int((one != other).any(dim=1).nonzero()[0])
    return None


def _shifted(x: Tensor) -> Tensor:
    """A copy that starts one element after an aligned address."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def _spread(x: Tensor) -> Tensor:
    """A copy whose rows lie three elements apart; inside a row nothing changes."""
    if x.dim() == 1:
        return x.clone()
    dense = x.flatten(1)
    return x.new_zeros(len(x), dense.shape[1] + 3)[:, :-3].copy_(dense).view(x.shape)


MEMORY: dict[str, Callable[[Tensor], Tensor]] = {"plain": lambda x: x, "shifted": _shifted, "spread": _spread}


@contextmanager
def _torch_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
