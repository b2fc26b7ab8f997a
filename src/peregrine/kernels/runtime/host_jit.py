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
    from peregrine.kernels.runtime.cpu_jit import doubles_at, floats_at, longs_at
else:

    def jit_cached(signature: str) -> Callable[[Callable[..., Any]], Any]:
        """A function with arguments of these types, in numba's words."""
        return jit_part

    def jit_part(body: Callable[..., Any]) -> Any:
        """A part of such functions."""
        return body

    def array_at(kind: Any) -> Callable[[int, Any], NDArray[Any]]:
        """A function that finds the array of this shape, or length, that starts at an address."""

        def found(address: int, shape: Any) -> NDArray[Any]:
            sizes = shape if isinstance(shape, tuple) else (shape,)
            return np.ctypeslib.as_array(ctypes.cast(int(address), ctypes.POINTER(kind)), sizes)

        return found

    floats_at, doubles_at, longs_at = map(array_at, (ctypes.c_float, ctypes.c_double, ctypes.c_int64))


__all__ = ["doubles_at", "floats_at", "jit_cached", "jit_part", "longs_at"]
