"""Decorators of functions over numpy arrays that the host calls: compiled where numba is installed, plain elsewhere.

Files that use them are imported at the first call that needs them, as device files are (`dispatch.py`).
"""

from collections.abc import Callable
from typing import Any

from peregrine.kernels.runtime.cpu import NUMBA_PRESENT

if NUMBA_PRESENT:
    from peregrine.kernels.runtime.cpu_cache import jit_cached, jit_part
else:

    def jit_cached(signature: str) -> Callable[[Callable[..., Any]], Any]:
        """A function with arguments of these types, in numba's words."""
        return jit_part

    def jit_part(body: Callable[..., Any]) -> Any:
        """A part of such functions."""
        return body


__all__ = ["jit_cached", "jit_part"]
