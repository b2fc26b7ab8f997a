"""The residual stream of a decoder, carried together with the norm that is read next.

Wherever something is added to the stream, it is prepared for its next norm, so that no norm is a step of its own. On a
CPU the addition and the norm are one kernel. On a GPU the norm is split between the linear layers around it:

    the layer that adds      writes the sum, the sum times the norm's weight, and the sum of squares of every row
    the layer that reads     multiplies that product and divides each row by its root mean square

Sums of squares are whole numbers of 1 / SQUARE_UNIT: integers may be added in any order, so the programs that compute
parts of a row need not wait for each other, and a row's bits do not depend on them. That unit is too coarse for a row
whose mean square is below SMALL_MEAN, so squares are also counted in 1 / FINE_UNIT, and such a row is divided by those.
"""

from dataclasses import dataclass
from typing import Protocol, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional as F

from peregrine.kernels.norm import add_rms_norm, rms_norm
from peregrine.kernels.runtime.cpu import is_recording, numba_ready
from peregrine.kernels.runtime.dispatch import DeviceFile
from peregrine.kernels.runtime.gpu import triton_ready

_cpu = DeviceFile("peregrine.kernels.residual.cpu")
_triton = DeviceFile("peregrine.kernels.residual.triton")

SQUARE_UNIT, FINE_UNIT = 2.0**24, 2.0**48
SMALL_MEAN = 2.0**-16  # above it, what SQUARE_UNIT drops changes the norm by less than 2**-9
# Largest square of one value; a larger one is made NaN, so that its request ends with an error. A row's sum holds 32.
MAX_SQUARE = 2.0**34


class Norm(Protocol):
    """A root-mean-square norm over the hidden size."""

    @property
    def weight(self) -> Tensor:
        """[H]"""

    @property
    def eps(self) -> float:
        """Added to the mean square."""


@dataclass(slots=True)
class Residual:
    """Values [N, H] and their next norm: complete, or split, with its division left to the next linear layer.

    A split norm can be added to once: the addition takes over `squares` and sets them to zero (see `take_sums`).
    """

    values: Tensor  # [N, H]
    normed: Tensor  # [N, H] the norm of the values; if it is split, the values times the norm's weight
    squares: Tensor | None = None  # [N, 2] i64 sums of squares, coarse and fine; None: the norm is complete
    spare: Tensor | None = None  # [N, 2] i64 zeros, for the squares of the next addition
    eps: float = 0.0
    is_taken: bool = False

    @property
    def scale(self) -> tuple[Tensor, float] | None:
        """(squares, eps) by which a linear layer must divide `normed`; None if the norm is complete."""
        assert not self.is_taken, "this residual was added to: its sums of squares are zeroed by now"
        return None if self.squares is None else (self.squares, self.eps)

    def take_sums(self) -> tuple[Tensor, Tensor]:
        """Two buffers [N, 2] i64 for an addition: zeros to count its squares in, and one to set to zero.

        The second holds this residual's own squares, which nothing may read after the addition.
        """
        if self.squares is None or self.spare is None:
            zeros, unused = torch.zeros(2, len(self.values), 2, dtype=torch.int64, device=self.values.device)
            return zeros, unused
        assert not self.is_taken, "a residual with a split norm can be added to once"
        self.is_taken = True
        return self.spare, self.squares

    def finish_norm(self) -> Tensor:
        """The complete norm. [N, H]"""
        if self.scale is None:
            return self.normed
        whole: Tensor = _triton.finish_norm(self.normed, *self.scale)
        return whole

    def rows(self, chosen: Tensor) -> "Residual":
        """The residual of some rows [R]; both can be added to."""
        values, normed = take_rows(self.values, chosen), take_rows(self.normed, chosen)
        if self.scale is None:
            return Residual(values, normed)
        squares = self.scale[0].index_select(0, chosen)
        return Residual(values, normed, squares, torch.zeros_like(squares), self.eps)


def take_rows(values: Tensor, rows: Tensor) -> Tensor:
    """values [N, ...] of some rows [n]; where kernel calls are recorded, by a kernel."""
    words = values.is_contiguous() and rows.is_contiguous() and values.stride(0) * values.element_size() % 8 == 0
    if is_recording() and words and len(values):
        taken: Tensor = _cpu.take_rows(values, rows)
        return taken
    return values.index_select(0, rows)


def embed_rows(tokens: Tensor, table: Tensor) -> Tensor:
    """Rows of a table [V, H] for tokens [N]; where kernel calls are recorded, by a kernel."""
    return take_rows(table, tokens) if is_recording() else F.embedding(tokens, table)


def add_rows(update: Tensor, values: Tensor) -> Tensor:
    """update + values, both [N, H]; on a CPU by a kernel, which can be part of a recorded step."""
    total: Tensor = _cpu.add(update, values) if numba_ready(update, values) else update + values
    return total


def start_residual(values: Tensor, norm: Norm | None) -> Residual:
    """A residual stream of values [N, H]; without a norm the next layer reads the values themselves."""
    return Residual(values, values if norm is None else rms_norm(values, norm.weight, norm.eps))


def embed_residual(tokens: Tensor, embedding: Tensor, norm: Norm | None) -> Residual:
    """The residual stream of tokens [N]: rows of embedding [V, H]."""
    if not triton_ready(embedding) or not splits_norm(norm, embedding) or _needs_gradient(embedding, norm.weight):
        return start_residual(embed_rows(tokens, embedding), norm)
    values, scaled, squares, spare = _triton.embed(tokens, embedding, norm.weight)
    return Residual(values, scaled, squares, spare, norm.eps)


def split_residual(values: Tensor, norm: Norm) -> Residual:
    """A residual stream of values [N, H] on a GPU with a split norm, as a linear layer that adds to it leaves it."""
    rows = torch.arange(len(values), device=values.device)
    values, scaled, squares, spare = _triton.embed(rows, values, norm.weight)
    return Residual(values, scaled, squares, spare, norm.eps)


def splits_norm(norm: Norm | None, values: Tensor) -> TypeGuard[Norm]:
    """Whether a norm is split on a GPU: not in float16, in which a large value times the norm's weight is infinite."""
    return norm is not None and values.dtype is not torch.float16


def add_to_residual(update: Tensor, residual: Residual, norm: Norm | None) -> Residual:
    """The residual stream plus an update [N, H], with a complete norm."""
    if norm is None:
        values = add_rows(update, residual.values)
        return Residual(values, values)
    normed, values = add_rms_norm(update, residual.values, norm.weight, norm.eps)
    return Residual(values, normed)


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
