"""The one way a kernel folder reaches its device files, which import numba or Triton: at the first call.

Both are optional and slow to import. `reference.py` of a folder names its device files once and calls through them:

    _cpu, _triton = DeviceFile("peregrine.kernels.norm.cpu"), DeviceFile("peregrine.kernels.norm.triton")
    ...
    if numba_ready(x):
        return _cpu.rms_norm(x, weight, eps)
"""

import importlib
from typing import Any


class DeviceFile:
    """A module that is imported when one of its names is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self._name), name)
        setattr(self, name, value)  # found without this function from now on
        return value
