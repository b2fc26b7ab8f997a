"""top-k, top-p and min-p on a GPU: the lowest score that they keep, without sorting.

Logits of 16 bits are counted into histograms of their values (`histogram_triton.py`); other logits and adjusted scores
are searched by digits of their 32 bits (`digits_triton.py`). Both find the same score: they add up the same whole
numbers, in any order. Rows without a filter and greedy rows take part in neither.
"""

import torch
from torch import Tensor

from peregrine.kernels.sampling.adjust_triton import Adjusted
from peregrine.kernels.sampling.digits_triton import HALF_BYTES, lowest_by_digits
from peregrine.kernels.sampling.histogram_triton import lowest_by_histogram
from peregrine.kernels.sampling.params import SamplingTensors


def lowest_kept(logits: Tensor, sampling: SamplingTensors, adjusted: Adjusted | None = None) -> Tensor:
    """The score, after temperature, that a token needs to stay: [R, T, V] -> [R, T] f32; -inf where all do."""
    lowest = torch.empty(logits.shape[:2], dtype=torch.float32, device=logits.device)
    is_half = logits.element_size() == HALF_BYTES
    if is_half:
        lowest_by_histogram(logits.contiguous(), sampling, adjusted, lowest)
    if not is_half or adjusted is not None:
        lowest_by_digits(logits, sampling, adjusted, lowest)
    return lowest
