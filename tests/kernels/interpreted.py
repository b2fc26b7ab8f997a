"""Triton kernels on CPU tensors: a mark for tests that need the interpreter, switches that send work there."""

from types import ModuleType

import pytest
from torch import Tensor

from peregrine.hardware import triton_interprets
from peregrine.kernels.linear import per_head as heads
from peregrine.kernels.linear import reference as linear
from peregrine.kernels.moe import experts, route
from peregrine.kernels.norm import reference as norm
from peregrine.kernels.residual import reference as stream
from peregrine.kernels.round import drafts, ngram, places, verdict
from peregrine.kernels.round import tree as grow
from peregrine.kernels.runtime.gpu import TRITON_PRESENT
from peregrine.kernels.sampling import filters
from peregrine.kernels.sampling import reference as choose
from peregrine.models import layers
from peregrine.models import mla as latent
from peregrine.synthetic import accept as simulated

needs_interpreter = pytest.mark.skipif(
    not (TRITON_PRESENT and triton_interprets()), reason="needs Triton's interpreter"
)


def send_to_triton(patch: pytest.MonkeyPatch) -> None:
    """Let every kernel of the law and of the round's bookkeeping take CPU tensors."""
    send(patch, choose, drafts, filters, grow, ngram, places, simulated, verdict)


def send_models_to_triton(patch: pytest.MonkeyPatch) -> None:
    """Let every kernel of the models take CPU tensors, instead of those compiled for the CPU."""
    send(patch, linear, norm, stream, experts, heads, route, latent, layers)
    for module in (linear, norm):
        patch.setattr(module, "numba_ready", lambda *tensors: False)


def send(patch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    def on_cpu(tensor: Tensor) -> bool:
        return tensor.is_cpu

    for module in modules:
        patch.setattr(module, "triton_ready", on_cpu)
