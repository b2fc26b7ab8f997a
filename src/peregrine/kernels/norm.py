"""Root-mean-square norms: over the hidden size of a token, or over each head of it.

The mean of squares and the scaling are computed in float32; the scaled row takes the input's dtype and only
then meets the weight, as in the Hugging Face models.
"""

import functools
from types import ModuleType

import torch.nn.functional as F
from torch import Tensor

from peregrine.kernels.cpu import cpu_ready


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension: x [N, H] or [N, heads, D], weight [H] or [D]."""
    kernel = _compiled().rms_norm if cpu_ready(x, weight) else rms_norm_torch
    normed: Tensor = kernel(x, weight, eps)
    return normed


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The twin."""
    # The library sums each row apart: on CUDA one block of a fixed size, on a CPU one thread in an order that
    # depends on the layout, hence the dense copy.
    scaled = F.rms_norm(x.contiguous().float(), (x.shape[-1],), None, eps)
    return weight * scaled.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm of the sum, the sum) of x [N, H] and residual [N, H]."""
    kernel = _compiled().add_rms_norm if cpu_ready(x, residual, weight) else add_rms_norm_torch
    both: tuple[Tensor, Tensor] = kernel(x, residual, weight, eps)
    return both


def add_rms_norm_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The twin."""
    total = x + residual
    return rms_norm_torch(total, weight, eps), total


@functools.cache
def _compiled() -> ModuleType:
    from peregrine.kernels import norm_cpu

    return norm_cpu
