"""Root-mean-square norms on a GPU, one program per row; and the two norms at the input of an EAGLE-3 head."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.runtime.gpu import dense_rows, launch
from peregrine.kernels.runtime.pdl import enter


@triton.jit
def _normed(value, weight, eps, H: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row over its root mean square, in its own dtype, times the weight."""
    wide = value.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, axis=0) / H + eps)
    return weight * (wide * scale).to(value.dtype)


@triton.jit
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    x, weight, out, x_stride, eps, H: tl.constexpr, BLOCK: tl.constexpr
):
    enter()
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    inside = places < H
    value = tl.load(x + row * x_stride + places, mask=inside, other=0.0)
    weights = tl.load(weight + places, mask=inside, other=0.0)
    tl.store(out + row * H + places, _normed(value, weights, eps, H), mask=inside)


@triton.jit
def norm_pair_kernel(  # type: ignore[no-untyped-def]
    tokens, embedding, first_norm, hidden, second_norm, out, stride, eps, H: tl.constexpr, BLOCK: tl.constexpr
):
    enter()
    row, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = tl.arange(0, BLOCK)
    inside = places < H
    if half == 0:
        value = tl.load(embedding + tl.load(tokens + row) * H + places, mask=inside, other=0.0)
        weights = tl.load(first_norm + places, mask=inside, other=0.0)
    else:
        value = tl.load(hidden + row * stride + places, mask=inside, other=0.0)
        weights = tl.load(second_norm + places, mask=inside, other=0.0)
    tl.store(out + (2 * row + half) * H + places, _normed(value, weights, eps, H), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension: x [N, H] or [N, heads, D]."""
    size = x.shape[-1]
    rows = dense_rows(x.reshape(-1, size))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    if len(rows):
        launch(rms_norm_kernel, (len(rows),), rows, weight, out, rows.stride(0), eps, H=size, BLOCK=block, pdl=True)
    return out


def norm_pair(
    tokens: Tensor, embedding: Tensor, first_norm: Tensor, hidden: Tensor, second_norm: Tensor, eps: float
) -> Tensor:
    """Normed embeddings of tokens [N] beside normed hidden states [N, H]: [N, 2 H]."""
    hidden = dense_rows(hidden)
    num_rows, size = hidden.shape
    out = hidden.new_empty(num_rows, 2 * size)
    launch(
        norm_pair_kernel,
        (num_rows, 2),
        tokens,
        embedding,
        first_norm,
        hidden,
        second_norm,
        out,
        hidden.stride(0),
        eps,
        H=size,
        BLOCK=triton.next_power_of_2(size),
        pdl=True,
    )
    return out
