"""Linear layers in which a row's bits do not depend on the other rows of the batch.

The compiled kernels compute each output as one chain over the inputs in ascending order, started at zero (of fused
multiply-adds on a CPU, of matrix instructions on a GPU), and add the bias to the finished sum. The torch twin gets the
same property from the library: rows go through it in tiles of a fixed height, the last one filled with zeros, so that
every library call has the same shape.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from peregrine.kernels.activation import silu_mul
from peregrine.kernels.residual import Norm, Residual, add_to_residual
from peregrine.kernels.runtime.cpu import numba_ready
from peregrine.kernels.runtime.dispatch import DeviceFile
from peregrine.kernels.runtime.gpu import triton_ready

_cpu = DeviceFile("peregrine.kernels.linear.cpu")
_triton = DeviceFile("peregrine.kernels.linear.triton")

CPU_TILE_ROWS = 16
CPU_TILE_OUTPUTS = 64
DEVICE_TILE_ROWS = 64  # an accelerator is bound by reading the weight, once per tile


class WeightFormat(ABC):
    """A weight [O, I] with its bias as one device stores them, and the linear layers that read them.

    A new format must define the abstract members; it overrides the others where it has a kernel that fuses them.
    """

    __slots__ = ()
    is_recordable = False  # whether its layers run compiled CPU kernels alone, which a CpuGraph can replay

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """What a layer reads: the weight's size in memory."""

    @abstractmethod
    def linear(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias: [N, I] -> [N, O]. Differentiable in x."""

    def linear_normed(self, residual: Residual) -> Tensor:
        """The linear of the normed residual: -> [N, O]."""
        return self.linear(residual.finish_norm())

    def gated(self, residual: Residual) -> Tensor:
        """silu(first half) * second half of the linear of the normed residual: -> [N, O / 2]."""
        return silu_mul(self.linear(residual.finish_norm()))

    def add(self, x: Tensor, residual: Residual, norm: Norm | None) -> Residual:
        """The residual plus the linear of x [N, I], prepared for the norm that comes next."""
        return add_to_residual(self.linear(x), residual, norm)


@dataclass(frozen=True, slots=True)
class DenseWeight(WeightFormat):
    """The twin: plain tensors and library calls. Differentiable in the weight too."""

    weight: Tensor  # [O, I]
    bias: Tensor | None  # [O]

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def num_bytes(self) -> int:
        """What a layer reads: the weight's size in memory."""
        return self.weight.numel() * self.weight.element_size()

    def linear(self, x: Tensor) -> Tensor:
        """One library call per tile of rows, all of one shape."""
        num_rows = x.shape[0]
        tile_rows = CPU_TILE_ROWS if x.is_cpu else DEVICE_TILE_ROWS
        # Padding copies even when nothing is missing: all tiles are then aligned in the same way, whatever view x is.
        padded, weight, bias = F.pad(x, (0, 0, 0, -num_rows % tile_rows)), self.weight, self.bias
        if x.is_cpu and x.element_size() == 2:  # the library rounds these differently for different numbers of threads
            padded, weight, bias = padded.float(), weight.float(), None if bias is None else bias.float()
        starts = range(0, max(num_rows, 1), tile_rows)
        tiles = [_tile_linear(padded[start : start + tile_rows], weight, bias) for start in starts]
        return torch.cat(tiles)[:num_rows].to(x.dtype)


@dataclass(frozen=True, slots=True)
class PlainWeight(DenseWeight):
    """The library's own linear layer, for training: a row's bits may depend on the batch."""

    def linear(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias: [N, I] -> [N, O]."""
        return F.linear(x, self.weight, self.bias)


def pack_weight(
    weight: Tensor, bias: Tensor | None = None, held: torch.dtype | None = None, whole_outputs: int | None = None
) -> WeightFormat:
    """The values of weight [O, I] and bias [O] in the format of their device; no gradient will reach them.

    `held` is what a CPU's float32 weights may be rounded to and held in. Of a weight that is a part of the rows of a
    larger one, every output has the bits that it has in that one, if its `whole_outputs` are given.
    """
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}, the weight has {weight.shape[0]} outputs")
    dense = DenseWeight(weight.detach(), None if bias is None else bias.detach())
    packed: WeightFormat = dense
    if triton_ready(weight):
        packed = _triton.TritonWeight(dense.weight, dense.bias, whole_outputs)
    elif weight.numel() and numba_ready(dense.weight, *(() if dense.bias is None else (dense.bias,))):
        packed = _cpu.PanelWeight.pack(dense, held)
    return packed


def _tile_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The library's linear of one tile of rows.

    MKL splits outputs between threads and rounds differently at the ends of pieces that fill no vectors. So on a CPU
    the outputs past the last whole CPU_TILE_OUTPUTS are computed apart, filled up with zeros.
    """
    left = weight.shape[0] % CPU_TILE_OUTPUTS
    if not left or not x.is_cpu:
        return F.linear(x, weight, bias)
    whole, missing = weight.shape[0] - left, CPU_TILE_OUTPUTS - left
    last_bias = None if bias is None else F.pad(bias[whole:], (0, missing))
    rest = F.linear(x, F.pad(weight[whole:], (0, 0, 0, missing)), last_bias)
    if not whole:
        return rest[:, :left]
    first = F.linear(x, weight[:whole], None if bias is None else bias[:whole])
    return torch.cat([first, rest[:, :left]], dim=1)
