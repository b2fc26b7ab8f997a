"""The gated activations of the MLP: silu(gate) * up, gelu(gate) * up, or gpt-oss's, element by element."""

from torch import Tensor

from peregrine.kernels.activation.elementwise import gelu, sigmoid, silu
from peregrine.kernels.runtime.cpu import numba_ready
from peregrine.kernels.runtime.dispatch import DeviceFile

_cpu = DeviceFile("peregrine.kernels.activation.cpu")
STEEPNESS = 1.702  # of the sigmoid in `clamped_mul`


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu of the first half of each row times its second half: [N, 2I] -> [N, I]."""
    return _cpu.silu_mul(gate_up) if numba_ready(gate_up) else silu_mul_torch(gate_up)


def silu_mul_torch(gate_up: Tensor) -> Tensor:
    """The twin."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu of the first half of each row times its second half: [N, 2I] -> [N, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate) * up


def clamped_mul(gate_up: Tensor, limit: float) -> Tensor:
    """gpt-oss's: gate * sigmoid(1.702 gate) * (up + 1), gate at most the limit and up within it. [N, 2I] -> [N, I]"""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit).contiguous(), up.clamp(-limit, limit)
    return gate * sigmoid(gate * STEEPNESS) * (up + 1)
