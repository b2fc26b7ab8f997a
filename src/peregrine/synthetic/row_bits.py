"""Whether a row's bits depend on the batch.

A row is computed alone, and then in batches of several sizes, at several places in memory, with several numbers of
threads; all bits must be the same. `peregrine doctor` checks a few sizes of each operation, the tests many.
"""

import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from peregrine.synthetic.row_operations import NUM_ROWS, OPERATIONS, Operation, Outputs

BATCHES, OFFSETS, THREADS = (1, 3, 17, 40), (0, 3), (1, 2)


@dataclass(frozen=True, slots=True)
class Finding:
    """What the check of one operation in one dtype gave."""

    operation: str
    dtype: torch.dtype
    differences: tuple[str, ...]  # empty: the rows do not depend on the batch


def check_machine() -> Iterator[Finding]:
    """Check every operation at a few sizes, in a few seconds once kernels are compiled."""
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # torch then takes another way
    for operation in OPERATIONS:
        for dtype in operation.dtypes:
            found = [text for size in operation.sizes for text in differences(operation, size, dtype, offsets=(3,))]
            yield Finding(operation.name, dtype, tuple(found))


def differences(
    operation: Operation,
    size: int,
    dtype: torch.dtype,
    batches: Sequence[int] = BATCHES,
    offsets: Sequence[int] = OFFSETS,
    threads: Sequence[int] = THREADS,
) -> list[str]:
    """Each batch in which a row has other bits than alone, in words."""
    run, found = operation.build(size, dtype), []
    with torch.inference_mode(), num_threads(1):
        alone = [run([row], 0)[0] for row in range(NUM_ROWS)]
    for count, batch, offset in itertools.product(threads, batches, offsets):
        for first in {0, NUM_ROWS - batch}:
            rows = range(first, first + batch)
            with torch.inference_mode(), num_threads(count):
                outputs = run(rows, offset)
            wrong = [row for row, out in zip(rows, outputs, strict=True) if not same_bits(out, alone[row])]
            if wrong:
                place = f"in a batch of {batch} from row {first} on, {offset} elements into its memory"
                what = f"{operation.name} of size {size} in {str(dtype).removeprefix('torch.')}"
                found.append(f"{what}: row {wrong[0]} differs {place}, {count} threads")
    return found


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Let torch, and with it the compiled kernels, use so many threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def same_bits(a: Outputs, b: Outputs) -> bool:
    """Whether all values have the same bits: 0.0 and -0.0 differ, a NaN equals itself."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return all(
        torch.equal(x.contiguous().view(words[x.element_size()]), y.contiguous().view(words[y.element_size()]))
        for x, y in zip(a, b, strict=True)
    )
