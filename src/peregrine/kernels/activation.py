"""The gated activation of the MLP: silu(gate) * up, element by element."""

import functools
from types import ModuleType

from torch import Tensor

from peregrine.kernels.cpu import cpu_ready
from peregrine.kernels.elementwise import silu


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu of the first half of each row times its second half: [N, 2I] -> [N, I]."""
    return _compiled().silu_mul(gate_up) if cpu_ready(gate_up) else silu_mul_torch(gate_up)


def silu_mul_torch(gate_up: Tensor) -> Tensor:
    """The twin."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


@functools.cache
def _compiled() -> ModuleType:
    from peregrine.kernels import activation_cpu

    return activation_cpu
