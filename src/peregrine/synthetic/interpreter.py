"""Triton's interpreter, which runs the GPU kernels on CPU tensors: slow, for tests, conformance and benchmarks."""

import inspect
from typing import Any

from peregrine.kernels.runtime.gpu import TRITON_PRESENT


def mend_interpreter() -> None:
    """Make the interpreter of Triton 3.6 work with numpy 2.4, and faster; call it before the first kernel runs."""
    if not TRITON_PRESENT:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    if patch.__module__ == __name__:
        return

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        # Loop bounds are held in arrays of one element, which numpy no longer takes for numbers.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(())))

    def call_device_function(self: Any, *arguments: Any, **named: Any) -> Any:
        # Unlike Triton's own: the language is patched once per file of device functions, not at every call, and files
        # of plain arithmetic that serve host and device need not import the language.
        if self.fn.__module__ not in patched:
            if any(inspect.ismodule(value) and value in (tl, tl.core) for value in self.fn.__globals__.values()):
                interpreter._patch_lang(self.fn)
            patched.add(self.fn.__module__)
        return self.rewrite()(*arguments, **named)

    patched: set[str] = set()

    interpreter._patch_lang_tensor = patch_and_mend
    interpreter.InterpretedFunction.__call__ = call_device_function
