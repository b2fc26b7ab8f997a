"""The gated activations of the MLP: silu(gate) * up or gelu(gate) * up, element by element."""

from torch import Tensor

from peregrine.kernels.activation.elementwise import gelu, silu
from peregrine.kernels.runtime.cpu import numba_ready
from peregrine.kernels.runtime.dispatch import DeviceFile

_cpu = DeviceFile("peregrine.kernels.activation.cpu")


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
