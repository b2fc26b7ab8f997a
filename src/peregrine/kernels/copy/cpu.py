"""A matrix copied row by row, compiled for the CPU."""

from torch import Tensor

from peregrine.kernels.runtime.cpu_jit import arguments_of, claim, cpu_kernel, floats_at, words_of

WORD = 4  # bytes


def copy_into(target: Tensor, source: Tensor) -> None:
    """See `reference.py`; elements are whole words."""
    if target.shape != source.shape or target.dtype is not source.dtype:
        raise ValueError(
            f"the source is {tuple(source.shape)} {source.dtype}, the target {tuple(target.shape)} {target.dtype}"
        )
    rows, columns = source.shape
    if columns > 1 and (source.stride(1), target.stride(1)) != (1, 1):
        raise ValueError(f"columns are {source.stride(1)} and {target.stride(1)} elements apart, not 1")
    size = source.element_size()
    pitches = source.stride(0) * size, target.stride(0) * size
    _copy(1, source.data_ptr(), target.data_ptr(), rows, columns * size // WORD, *pitches)


@cpu_kernel("qqqqqq")
def _copy(block):  # type: ignore[no-untyped-def]
    source, target, rows, words, source_pitch, target_pitch = arguments_of(block, 6)
    if claim(words_of(block)) != 0:
        return
    for i in range(rows):
        row, copy = floats_at(source + i * source_pitch, words), floats_at(target + i * target_pitch, words)
        for j in range(words):
            copy[j] = row[j]
