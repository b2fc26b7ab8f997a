"""Where a stream begins and ends on a GPU: embedding rows made ready for a norm, and a norm finished."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.linear.triton import MAX_SQUARE, SQUARE_UNIT, linear_add, linear_scaled
from peregrine.kernels.runtime.gpu import launch
from peregrine.kernels.runtime.pdl import enter

__all__ = ["embed", "finish_norm", "linear_add", "linear_scaled"]


@triton.jit
def embed_kernel(  # type: ignore[no-untyped-def]
    tokens, embedding, norm, values, scaled, squares, spare, H: tl.constexpr, BLOCK: tl.constexpr
):
    enter()
    row = tl.program_id(0)
    token = tl.load(tokens + row)
    places = tl.arange(0, BLOCK)
    inside = places < H
    value = tl.load(embedding + token * H + places, mask=inside, other=0.0)
    weights = tl.load(norm + places, mask=inside, other=0.0).to(tl.float32)
    wide = value.to(tl.float32)
    tl.store(values + row * H + places, value, mask=inside)
    square = wide * wide
    ready = tl.where(square <= MAX_SQUARE, wide * weights, float("nan"))
    tl.store(scaled + row * H + places, ready.to(scaled.dtype.element_ty), mask=inside)
    square = tl.where(square <= MAX_SQUARE, square, 0.0) * SQUARE_UNIT
    tl.store(squares + row, tl.sum(square.to(tl.int64), axis=0))
    tl.store(spare + row, tl.zeros((), tl.int64))


@triton.jit
def finish_norm_kernel(  # type: ignore[no-untyped-def]
    scaled, squares, out, eps, H: tl.constexpr, BLOCK: tl.constexpr
):
    enter()
    row = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    inside = places < H
    mean = tl.load(squares + row).to(tl.float32) / (H * SQUARE_UNIT)
    value = tl.load(scaled + row * H + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * H + places, (value / tl.sqrt_rn(mean + eps)).to(out.dtype.element_ty), mask=inside)


def embed(tokens: Tensor, embedding: Tensor, norm: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(values, values * norm, squares, zeros) of tokens [N] in embedding [V, H]."""
    num_rows, size = tokens.shape[0], embedding.shape[1]
    values = embedding.new_empty(num_rows, size)
    scaled = torch.empty_like(values)
    squares, spare = torch.empty(2, num_rows, dtype=torch.int64, device=tokens.device)
    block = triton.next_power_of_2(size)
    if num_rows:
        launch(
            embed_kernel,
            (num_rows,),
            tokens,
            embedding,
            norm,
            values,
            scaled,
            squares,
            spare,
            H=size,
            BLOCK=block,
            pdl=True,
        )
    return values, scaled, squares, spare


def finish_norm(scaled: Tensor, squares: Tensor, eps: float) -> Tensor:
    """Scaled values [N, H] divided by the root of their mean square."""
    out = torch.empty_like(scaled)
    block = triton.next_power_of_2(scaled.shape[1])
    if len(scaled):
        launch(finish_norm_kernel, (len(scaled),), scaled, squares, out, eps, H=scaled.shape[1], BLOCK=block, pdl=True)
    return out
