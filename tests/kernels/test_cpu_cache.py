"""Cached machine code is compiled again when a file that its kernel imports has changed."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from peregrine.kernels.runtime.cpu import NUMBA_PRESENT

pytestmark = pytest.mark.skipif(not NUMBA_PRESENT, reason="numba is not installed")

SHARED = """
from numba import njit

@njit
def amount():
    return {amount}
"""
KERNEL = """
from peregrine.kernels.runtime.cpu_jit import cpu_kernel, longs_at, words_of
from stale_kernels.between import amount

@cpu_kernel("q")
def write(block):
    words = words_of(block)
    longs_at(words[2], (1,))[0] = amount()
"""


def load() -> ModuleType:
    """The kernel's module, imported as a new process would."""
    for name in [name for name in sys.modules if name.startswith("stale_kernels")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    return importlib.import_module("stale_kernels.kernel")


def result(module: ModuleType) -> tuple[int, bool]:
    """(what the kernel writes, whether it came from the cache)."""
    out = torch.zeros(1, dtype=torch.int64)
    module.write(1, out.data_ptr())
    return int(out), module.write._compiled._cache_hits > 0


def test_a_changed_import_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "stale_kernels"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "shared.py").write_text(SHARED.format(amount=5))
    (package / "between.py").write_text("from stale_kernels.shared import amount\n")
    (package / "kernel.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # changes within a second would be missed by Python itself
    assert result(load()) == (5, False)
    assert result(load()) == (5, True)
    (package / "shared.py").write_text(SHARED.format(amount=7))
    assert result(load()) == (7, False)
    assert result(load()) == (7, True)
