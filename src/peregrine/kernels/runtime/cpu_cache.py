"""Machine code of compiled CPU kernels on disk, compiled again when any source that it was made from has changed.

numba's own cache looks at the file of the kernel alone. A kernel also contains what it calls from other files, so here
the key of its entry holds the contents of every file of its package that the kernel's file imports, directly or not.
"""

import contextlib
import hashlib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

IMPORTED = re.compile(r"^\s*(?:from|import)\s+([\w.]+)", re.MULTILINE)


class _SourceCache(FunctionCache):  # type: ignore[misc]
    """numba's cache of one function, with `source_hash` added to the stamp that must match."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__(body)
        stamp = (self._impl.locator.get_source_stamp(), source_hash(body.__module__))
        self._cache_file = IndexDataCacheFile(self._cache_path, self._impl.filename_base, stamp)


def compile_cached(body: Callable[..., Any], signature: Any, **options: Any) -> CFunc:
    """`body` as a C callback: numba's `cfunc(signature, cache=True, **options)` with a cache that knows all sources."""
    compiled = CFunc(body, normalize_signature(signature), locals={}, options=options)
    with contextlib.suppress(RuntimeError):  # no place to write a cache to
        compiled._cache = _SourceCache(body)  # type: ignore[attr-defined]
    compiled.compile()
    return compiled


def jit_cached(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function of arrays and numbers that Python calls, or load it from the same cache."""

    def compile_body(body: Callable[..., Any]) -> Any:
        compiled = jit_part(body)
        with contextlib.suppress(RuntimeError):
            compiled._cache = _SourceCache(body)
        compiled.compile(signature)
        compiled.disable_compile()  # arrays of other types are refused
        return compiled

    return compile_body


def jit_part(body: Callable[..., Any]) -> Any:
    """A part of such functions, compiled with them."""
    return njit(error_model="numpy")(body)


def source_hash(module: str) -> str:
    """A hash of the module's file and of all files of its top-level package that it imports, directly or not."""
    package, waiting, texts = module.partition(".")[0], [module], dict[str, bytes]()
    while waiting:
        name = waiting.pop()
        spec = None if name in texts else importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            continue
        texts[name] = Path(spec.origin).read_bytes()
        waiting += [found for found in IMPORTED.findall(texts[name].decode()) if found.startswith(f"{package}.")]
    return hashlib.sha256(b"\0".join(texts[name] for name in sorted(texts))).hexdigest()
