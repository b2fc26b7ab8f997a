"""Root-mean-square norms: over the hidden size of a token, or over each head of it.

The mean of squares and the scaling are computed in float32; the scaled row is rounded to the input's dtype and only
then multiplied by the weight, as in the Hugging Face models.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from peregrine.kernels.runtime.cpu import numba_ready
from peregrine.kernels.runtime.dispatch import DeviceFile
from peregrine.kernels.runtime.gpu import triton_ready

_cpu = DeviceFile("peregrine.kernels.norm.cpu")
_triton = DeviceFile("peregrine.kernels.norm.triton")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension: x [N, H] or [N, heads, D], weight [H] or [D]."""
    if numba_ready(x, weight):
        normed: Tensor = _cpu.rms_norm(x, weight, eps)
        return normed
    if triton_ready(x) and not (x.requires_grad or weight.requires_grad):
        normed = _triton.rms_norm(x, weight, eps)
        return normed
    return rms_norm_torch(x, weight, eps)


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The twin."""
    # The library sums each row by itself: on CUDA in one block of a fixed size, on a CPU in one thread, in an order
    # that depends on the layout, hence the dense copy.
    scaled = F.rms_norm(x.contiguous().float(), (x.shape[-1],), None, eps)
    return weight * scaled.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm of the sum, the sum) of x [N, H] and residual [N, H]."""
    if numba_ready(x, residual, weight):
        both: tuple[Tensor, Tensor] = _cpu.add_rms_norm(x, residual, weight, eps)
        return both
    if triton_ready(x):
        total = x + residual
        return rms_norm(total, weight, eps), total
    return add_rms_norm_torch(x, residual, weight, eps)


def add_rms_norm_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The twin."""
    total = x + residual
    return rms_norm_torch(total, weight, eps), total


def norm_pair(
    tokens: Tensor, embedding: Tensor, first_norm: Tensor, hidden: Tensor, second_norm: Tensor, eps: float
) -> Tensor:
    """Normed embeddings of tokens [N] beside normed hidden states [N, H]: [N, 2 H]."""
    if triton_ready(hidden) and not (torch.is_grad_enabled() and first_norm.requires_grad):
        both: Tensor = _triton.norm_pair(tokens, embedding, first_norm, hidden, second_norm, eps)
        return both
    if numba_ready(embedding, first_norm, hidden, second_norm):
        both = _cpu.norm_pair(tokens, embedding, first_norm, hidden, second_norm, eps)
        return both
    embedded = rms_norm(F.embedding(tokens, embedding), first_norm, eps)
    return torch.cat((embedded, rms_norm(hidden, second_norm, eps)), dim=1)
