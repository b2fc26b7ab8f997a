"""What every search for the lowest score kept needs: which rows have filters, and how much mass top-p keeps."""

import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.sampling.params import SamplingTensors
from peregrine.kernels.sampling.scores_triton import INFINITY


def limits(sampling: SamplingTensors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The filters of all rows, as `is_filtered` takes them."""
    return sampling.temperature, sampling.top_k, sampling.top_p, sampling.log_min_p


@triton.jit
def is_filtered(row, temperatures, top_ks, top_ps, log_min_ps, vocab_size):  # type: ignore[no-untyped-def]
    """Whether a filter can drop a token of this row; greedy rows take the best score, which every filter keeps."""
    top_k = tl.load(top_ks + row)
    filtered = ((top_k > 0) & (top_k < vocab_size)) | (tl.load(top_ps + row) < 1)
    filtered = filtered | (tl.load(log_min_ps + row) > -INFINITY)
    return filtered & (tl.load(temperatures + row) > 0)


@triton.jit
def wanted_mass(total, top_p):  # type: ignore[no-untyped-def]
    """The mass that top-p keeps: i64, f32 -> i64; at least 1, which the best token has."""
    return tl.maximum(tl.ceil(total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)
