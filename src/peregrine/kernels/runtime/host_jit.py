"""Decorators of functions over numpy arrays that the host calls: compiled where numba is installed, plain elsewhere.

Files that use them are imported at the first call that needs them, as device files are (`dispatch.py`).
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from peregrine.kernels.runtime.cpu import NUMBA_PRESENT

if NUMBA_PRESENT:
    from peregrine.kernels.runtime.cpu_cache import jit_cached, jit_part
    from peregrine.kernels.runtime.cpu_jit import floats_at
else:

    def jit_cached(signature: str) -> Callable[[Callable[..., Any]], Any]:
        """A function with arguments of these types, in numba's words."""
        return jit_part

    def jit_part(body: Callable[..., Any]) -> Any:
        """A part of such functions."""
        return body

    def floats_at(address: int, count: int) -> NDArray[np.float32]:
        """The float32 array of this length that starts at an address."""
        return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), (count,))


__all__ = ["floats_at", "jit_cached", "jit_part"]
