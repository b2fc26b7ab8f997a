"""Triton kernels on CPU tensors: a mark for tests that need the interpreter, and functions that select it."""

import importlib
import pkgutil
import sys

import pytest
from torch import Tensor

import peregrine.models
from peregrine.hardware import triton_interprets
from peregrine.kernels.runtime.gpu import TRITON_PRESENT

needs_interpreter = pytest.mark.skipif(
    not (TRITON_PRESENT and triton_interprets()), reason="needs Triton's interpreter"
)
ROUND = ("peregrine.kernels.sampling", "peregrine.kernels.round", "peregrine.synthetic")
MODELS = (*(f"peregrine.kernels.{name}" for name in ("linear", "norm", "residual", "moe")), "peregrine.models")


def send_to_triton(patch: pytest.MonkeyPatch) -> None:
    """Let every kernel of sampling and of the round's bookkeeping take CPU tensors; drafters take a GPU's steps."""
    send(patch, ROUND)
    hide_numba(patch, ("peregrine.spec",))


def send_models_to_triton(patch: pytest.MonkeyPatch) -> None:
    """Let every kernel of the models take CPU tensors, instead of those compiled for the CPU."""
    send(patch, MODELS)
    hide_numba(patch, MODELS)


def hide_numba(patch: pytest.MonkeyPatch, prefixes: tuple[str, ...]) -> None:
    """Make `numba_ready` false in all modules whose names begin with a prefix."""
    for name, module in list(sys.modules.items()):
        if name.startswith(prefixes) and "numba_ready" in vars(module):
            patch.setattr(module, "numba_ready", lambda *tensors: False)


def send(patch: pytest.MonkeyPatch, prefixes: tuple[str, ...]) -> None:
    """Make `triton_ready` true of CPU tensors in all modules whose names begin with a prefix."""

    def on_cpu(tensor: Tensor) -> bool:
        return tensor.is_cpu

    for found in pkgutil.walk_packages(peregrine.models.__path__, "peregrine.models."):
        importlib.import_module(found.name)  # imports the kernels' references as well
    for prefix in prefixes:
        importlib.import_module(prefix)
    modules = [m for name, m in list(sys.modules.items()) if name.startswith(prefixes) and "triton_ready" in vars(m)]
    assert modules, f"no module of {prefixes} calls triton_ready"
    for module in modules:
        patch.setattr(module, "triton_ready", on_cpu)
