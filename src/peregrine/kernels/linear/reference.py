"""Linear layers whose rows do not depend on their company: alone or among many, a row has the same bits.

The law of the compiled kernels: each output is one chain over the inputs in ascending order, started at zero
(on a CPU of fused multiply-adds, on a GPU of matrix instructions); the bias is added to the finished sum. The
law of the twin: rows go through the library in tiles of a fixed height, the last one filled with zeros, so that
every row meets the same call on the same shape.
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from peregrine.kernels.runtime.cpu import numba_ready
from peregrine.kernels.runtime.dispatch import DeviceFile
from peregrine.kernels.runtime.gpu import triton_ready

_cpu = DeviceFile("peregrine.kernels.linear.cpu")
_triton = DeviceFile("peregrine.kernels.linear.triton")

CPU_TILE_ROWS = 16
DEVICE_TILE_ROWS = 64  # an accelerator is bound by reading the weight, once per tile


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight laid out for `linear`; exactly one of `panels` and `weight` is there."""

    out_features: int
    panels: Tensor | None  # [ceil(O / 16), I, 16] float32 for the compiled kernel; outputs past O are zero
    weight: Tensor | None  # [O, I] for a GPU's kernel and for the twin
    bias: Tensor | None  # [O]; beside panels it is always there and as long as their outputs


def pack_weight(weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
    """Lay out the values of weight [O, I] and bias [O] for `linear`; no gradient will reach them."""
    out_features = weight.shape[0]
    if bias is not None and bias.shape != (out_features,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, the weight has {out_features} outputs")
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    if weight.numel() == 0 or not numba_ready(weight, *(() if bias is None else (bias,))):
        return PackedWeight(out_features, panels=None, weight=weight, bias=bias)
    panels, padded_bias = _cpu.pack(weight, bias)
    return PackedWeight(out_features, panels=panels, weight=None, bias=padded_bias)


def linear(x: Tensor, packed: PackedWeight) -> Tensor:
    """x @ weight.T + bias, row by row: [N, I] -> [N, O]."""
    if packed.panels is not None and numba_ready(x):
        y: Tensor = _cpu.linear(x, packed.panels, packed.bias, packed.out_features)
        return y
    if packed.weight is not None and triton_ready(x) and not x.requires_grad:
        y = _triton.linear(x, packed.weight, packed.bias)
        return y
    return linear_torch(x, packed)


def linear_torch(x: Tensor, packed: PackedWeight) -> Tensor:
    """The twin: one library call per tile of rows, all of one shape. Differentiable in x."""
    weight, bias = packed.weight, packed.bias
    if packed.panels is not None and bias is not None:
        weight = packed.panels.transpose(1, 2).flatten(0, 1)[: packed.out_features]
        bias = bias[: packed.out_features]
    assert weight is not None
    num_rows = x.shape[0]
    tile_rows = CPU_TILE_ROWS if x.is_cpu else DEVICE_TILE_ROWS
    # Padding copies even when nothing is missing: tiles are then aligned alike, whatever view x is.
    padded = F.pad(x, (0, 0, 0, -num_rows % tile_rows))
    if x.is_cpu and not _library_takes(x.dtype):
        padded, weight, bias = padded.float(), weight.float(), None if bias is None else bias.float()
    starts = range(0, max(num_rows, 1), tile_rows)
    tiles = [F.linear(padded[start : start + tile_rows], weight, bias) for start in starts]
    return torch.cat(tiles)[:num_rows].to(x.dtype)


@functools.cache
def _library_takes(dtype: torch.dtype) -> bool:
    """Whether the CPU's matrix library multiplies this dtype.

    Without it torch uses loops of its own, which round differently for different numbers of threads, and which take a
    hundred times as long as the library takes in float32.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return True
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    ask = torch.ops.mkldnn
    return bool(ask._is_mkldnn_bf16_supported() if dtype is torch.bfloat16 else ask._is_mkldnn_fp16_supported())
