"""Triton's interpreter, which runs the GPU kernels on CPU tensors: slow, for tests, conformance and benchmarks."""

import inspect
from dataclasses import replace
from typing import Any

import numpy as np

from peregrine.kernels.runtime.gpu import TRITON_PRESENT


def mend_interpreter() -> None:
    """Make the interpreter of Triton 3.6 work with numpy 2.4, and faster; call it before the first kernel runs.

    Does nothing where kernels are compiled: the compiler needs the language as it is.
    """
    if not TRITON_PRESENT:
        return
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    if not triton.knobs.runtime.interpret:
        return

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

    def patch_builtin(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic = interpreter.TritonSemantic(builder)

        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return member(*arguments, **named)

        scope.set_attr(place, name, call)

    patched: set[str] = set()

    interpreter._patch_lang_tensor, interpreter._patch_attr = patch_and_mend, patch_builtin
    interpreter.InterpretedFunction.__call__ = call_device_function
    # Checks for overflow are computed and then dropped unless `debug` is set.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    _multiply_rows_alike()
    _share_types()
    _check_types_once()


def _multiply_rows_alike() -> None:
    """Sum every element of a product in one order: on CPUs without AVX-512, numpy's depends on a row's place."""
    from triton.runtime import interpreter

    product = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if not a.data.dtype == b.data.dtype == d.data.dtype == np.float32:
            return product(self, a, b, d, *options)
        return interpreter.TensorHandle(np.einsum("...ij,...jk->...ik", a.data, b.data) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _share_types() -> None:
    """Make each block type once, with what a tensor derives from its type: this was most of the interpreter's time."""
    import triton.language as tl
    from triton.language import core
    from triton.runtime import interpreter

    begin_type, begin_tensor, np_dtype = tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype
    unwrap = core._unwrap_if_constexpr

    def shared_type(cls: Any, *fields: Any) -> Any:
        if cls is not tl.block_type:
            return object.__new__(cls)
        element, shape = fields
        blocks = element.__dict__.setdefault("blocks", {})
        return blocks.setdefault(tuple(map(faster_unwrap, shape)), None) or object.__new__(cls)

    def begin_type_once(self: Any, element: Any, shape: Any) -> None:
        if "numel" not in self.__dict__:
            begin_type(self, element, shape)
            element.__dict__["blocks"][tuple(self.shape)] = self

    def begin_tensor_faster(self: Any, handle: Any, type: Any) -> None:
        derived = type.__dict__.get("derived")
        if derived is None:
            begin_tensor(self, handle, type)
            type.derived = (self.shape, self.numel, self.dtype)
        else:
            self.handle, self.type = handle, type
            self.shape, self.numel, self.dtype = derived

    def np_dtype_once(kind: Any) -> Any:
        found = kind.__dict__.get("np_dtype")
        if found is None:
            found = kind.np_dtype = np_dtype(kind)
        return found

    def faster_unwrap(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind is int or kind is core.tensor or kind is core.dtype else unwrap(value)

    tl.block_type.__new__, tl.block_type.__init__ = shared_type, begin_type_once
    tl.tensor.__init__ = begin_tensor_faster
    interpreter._get_np_dtype = np_dtype_once
    core._unwrap_if_constexpr = faster_unwrap


def _check_types_once() -> None:
    """Find out once what two types give, make each constant once, and leave it to numpy to repeat a smaller operand.

    An operand that numpy repeats has the type of the result and less data; every result has all of it.
    """
    import triton.language as tl
    from triton.language.semantic import TritonSemantic

    broadcast, constant = TritonSemantic.broadcast_impl_value, TritonSemantic.scalar_constant
    check_operands = TritonSemantic.binary_op_type_checking_impl

    def faster_broadcast(self: Any, left: Any, right: Any) -> Any:
        return (left, right) if left.type is right.type else broadcast(self, left, right)

    def as_type(self: Any, side: Any, kind: Any) -> Any:
        scalar, handle = kind.scalar, side.handle
        if side.dtype is not scalar and not scalar.is_ptr() and side.dtype != scalar:
            handle = self.builder.cast_impl(handle, scalar)
        return tl.tensor(handle, kind)

    def faster_check(self: Any, left: Any, right: Any, *rules: Any, **more_rules: Any) -> Any:
        if type(left) is not tl.tensor:
            if type(right) is tl.tensor and _fits(left, right.dtype):
                return tl.tensor(constant_once(self, left, right.dtype).handle, right.type), right
        elif type(right) is not tl.tensor:
            if _fits(right, left.dtype):
                return left, tl.tensor(constant_once(self, right, left.dtype).handle, left.type)
        elif left.type is right.type:
            if _is_plain(left.dtype):
                return left, right
        elif not rules or rules[0] or rules[2]:  # the left one may be a pointer, or both become one type
            met = left.type.__dict__.setdefault("met", {})
            entry = met.get(id(right.type))
            if entry is None:  # its type is kept, so that no other one gets its id
                entry = met[id(right.type)] = right.type, _meet(left.type, right.type)
            types = entry[1]
            if types is not None and (rules[:1] == (True,) or not left.dtype.is_ptr()):
                return as_type(self, left, types[0]), as_type(self, right, types[1])
        return check_operands(self, left, right, *rules, **more_rules)

    def constant_once(self: Any, value: Any, dtype: Any) -> Any:
        made = dtype.__dict__.setdefault("constants", {})
        key = value or str(value)  # 0.0 equals -0.0
        found = made.get(key)
        if found is None:
            found = made[key] = constant(self, value, dtype)
            found.handle.data.flags.writeable = False
        return found

    TritonSemantic.broadcast_impl_value = faster_broadcast
    TritonSemantic.binary_op_type_checking_impl = faster_check
    TritonSemantic.scalar_constant = constant_once


def _is_plain(dtype: Any) -> bool:
    """Whether operations on two such values give one more, by every rule."""
    found = dtype.__dict__.get("is_plain")
    if found is None:
        found = dtype.is_plain = dtype.is_fp32() or dtype.is_int()
    return bool(found)


def _meet(left: Any, right: Any) -> Any:
    """The types that two operands have in an operation; None: Triton's own rules say so."""
    import triton.language as tl

    kinds = [left.scalar, right.scalar]
    if kinds[0].is_int_signed() and kinds[1].is_int_signed():
        kinds = [max(kinds, key=lambda kind: kind.int_bitwidth)] * 2
    elif not (kinds[0].is_ptr() and kinds[1].is_int()) and not (_is_plain(kinds[0]) and kinds[0] == kinds[1]):
        return None
    try:
        shape = list(np.broadcast_shapes(*(side.shape if side.is_block() else () for side in (left, right))))
    except ValueError:
        return None
    return tuple(tl.block_type(kind, shape) if shape else kind for kind in kinds)


def _fits(value: Any, dtype: Any) -> bool:
    """Whether a Python number takes on the type of the other operand."""
    if not _is_plain(dtype) or dtype.is_int1():
        return False
    if dtype.is_fp32():
        return type(value) is float or type(value) is int
    return type(value) is int and dtype.get_int_min_value() <= value <= dtype.get_int_max_value()
