"""Triton kernels on CPU tensors: a mark for tests that need the interpreter, switches that send work there."""

from types import ModuleType

import pytest
from torch import Tensor

from peregrine.hardware import triton_interprets
from peregrine.kernels import (
    choose,
    drafts,
    experts,
    filters,
    grow,
    heads,
    linear,
    ngram,
    norm,
    places,
    route,
    simulated,
    stream,
    verdict,
)
from peregrine.kernels.gpu import TRITON_PRESENT
from peregrine.models import latent, layers

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
        patch.setattr(module, "cpu_ready", lambda *tensors: False)


def send(patch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    def on_cpu(tensor: Tensor) -> bool:
        return tensor.is_cpu

    for module in modules:
        patch.setattr(module, "gpu_ready", on_cpu)
