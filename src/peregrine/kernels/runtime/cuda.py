"""CUDA C++ kernels: compiled by NVRTC, which comes with torch, and launched by the driver.

For what Triton cannot say: clusters of programs that copy to each other's shared memory. A kernel's source is a `.cu`
file beside the module that launches it. Machine code is kept on disk, as Triton keeps its own.
"""

import ctypes
import functools
import hashlib
import importlib.util
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peregrine.errors import ConfigError

ARCHITECTURE, OLDEST = "sm_90a", (12, 4)  # the compiler's version: from there on it knows __maxnreg__
TENSOR_TYPES = {torch.float16: 6, torch.bfloat16: 9}  # of CUtensorMapDataType
SWIZZLE_128, PROMOTE_256 = 3, 3  # of CUtensorMapSwizzle, CUtensorMapL2promotion
MAX_SHARED, CLUSTER, OVERLAP = 8, 4, 6  # of CUfunction_attribute, CUlaunchAttributeID (twice)
NUMBERS = {torch.bfloat16: "bf16", torch.float16: "f16"}  # their names in PTX


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and a union of 64 bytes, of which whole numbers are used."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint32 * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


class TensorMap(ctypes.Structure):
    """CUtensorMap: a matrix in global memory as the copy engine (TMA) reads it. The driver wants it aligned."""

    _fields_ = [("words", ctypes.c_uint64 * 16)]


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel and how it is launched."""

    function: ctypes.c_void_p
    threads: int
    shared_bytes: int
    cluster: int  # programs in one

    def launch(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Queue it on the current stream; it may start before the previous kernel has ended (PDL)."""
        attributes = (_Attribute * 2)()
        attributes[0].id, attributes[1].id = CLUSTER, OVERLAP
        attributes[0].value[:3] = [self.cluster, 1, 1]
        attributes[1].value[0] = 1
        sizes = ((ctypes.c_uint * 3)(*counts) for counts in (grid, (self.threads, 1, 1)))
        config = _Config(*sizes, self.shared_bytes, torch.cuda.current_stream().cuda_stream, attributes, 2)
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(each) for each in arguments))
        _check("cuLaunchKernelEx", _driver().cuLaunchKernelEx(ctypes.byref(config), self.function, pointers, None))


def load_kernel(source: str, name: str, threads: int, shared_bytes: int, cluster: int) -> Kernel:
    """The kernel of that name, compiled now or before, on the current device."""
    code = cached_code(source)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    driver = _driver()
    torch.cuda.current_stream()  # initialises CUDA, if nothing else has
    _check("cuModuleLoadData", driver.cuModuleLoadData(ctypes.byref(module), code))
    _check("cuModuleGetFunction", driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
    _check("cuFuncSetAttribute", driver.cuFuncSetAttribute(function, MAX_SHARED, shared_bytes))
    return Kernel(function, threads, shared_bytes, cluster)


def tensor_map(matrix: Tensor, box_rows: int, box_columns: int) -> TensorMap:
    """A matrix [rows, columns] in boxes whose rows have 128 bytes, swizzled by the copy."""
    pitch = matrix.stride(0) * matrix.element_size()
    return _encoded(matrix, (matrix.shape[1], matrix.shape[0]), (pitch,), (box_columns, box_rows))


def paired_tensor_map(matrix: Tensor, box_rows: int, box_columns: int) -> TensorMap:
    """`tensor_map` of a matrix [2 * N, columns]: boxes have 8 rows of its first half, 8 of the second and so on."""
    rows, pitch = matrix.shape[0] // 2, matrix.stride(0) * matrix.element_size()
    sizes, strides = (matrix.shape[1], 8, 2, rows // 8), (pitch, rows * pitch, 8 * pitch)
    return _encoded(matrix, sizes, strides, (box_columns, 8, 2, box_rows // 16))


def _encoded(matrix: Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> TensorMap:
    # The structure must begin at a multiple of 64 bytes: ctypes gives 16.
    room = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + 64)
    made = TensorMap.from_buffer(room, -ctypes.addressof(room) % 64)
    rank = len(sizes)
    call = _driver().cuTensorMapEncodeTiled(
        ctypes.byref(made),
        *(TENSOR_TYPES[matrix.dtype], rank, ctypes.c_void_p(matrix.data_ptr())),
        *((ctypes.c_uint64 * rank)(*sizes), (ctypes.c_uint64 * (rank - 1))(*strides)),
        *((ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank)),
        *(0, SWIZZLE_128, PROMOTE_256, 0),
    )
    _check("cuTensorMapEncodeTiled", call)
    return made


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """A tensor as a kernel's argument; None is a null pointer."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


@functools.cache
def nvrtc_ready() -> bool:
    """Whether CUDA C++ can be compiled here, by a compiler that knows what our kernels say."""
    return _compiler() is not None and compiler_version() >= OLDEST


def compiler_version() -> tuple[int, int]:
    """NVRTC's, which is that of its CUDA toolkit."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _the_compiler().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def cached_code(source: str) -> bytes:
    """`compile_source`, read from disk where this compiler has compiled the same before."""
    key = f"{compiler_version()} {ARCHITECTURE} {source}"
    path = cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()}.cubin"
    if path.is_file():
        return path.read_bytes()
    code = compile_source(source)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        Path(file.name).replace(path)  # another process sees all of it or nothing
    except OSError:  # no place to write to
        pass
    return code


def cache_folder() -> Path:
    """Where machine code is kept: beside Triton's, which users already know how to move."""
    import triton  # it is slow to import

    return Path(triton.knobs.cache.dir) / "peregrine"


def compile_source(source: str) -> bytes:
    """Machine code (a cubin) of CUDA C++ for Hopper."""
    compiler, program, size = _the_compiler(), ctypes.c_void_p(), ctypes.c_size_t()
    options = [f"--gpu-architecture={ARCHITECTURE}".encode(), b"--std=c++17", b"--device-as-default-execution-space"]
    compiler.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    status = compiler.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    if status:
        compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        compiler.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC refuses a kernel of ours:\n{log.value.decode(errors='replace')}")
    compiler.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    compiler.nvrtcGetCUBIN(program, code)
    compiler.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


def shared_source(dtype: torch.dtype, known: Mapping[str, object]) -> str:
    """What is put before a kernel for elements of this type: the names that it knows, then `hopper.cuh`."""
    named = {"NUMBER": f'"{NUMBERS[dtype]}"', **known}
    lines = [f"#define {name} {value}" for name, value in named.items()]
    return "\n".join([*lines, Path(__file__).with_name("hopper.cuh").read_text(), ""])


def product_source(columns: int, number: str) -> str:
    """CUDA C++: `product(sums, left, right)` adds a product of 64 x 16 and 16 x `columns` elements to a thread's sums.

    left, right: matrices in shared memory, as the instruction `wgmma` describes them; number: their type's name in PTX.
    """
    count = columns // 2
    sums, operands = (", ".join(form.format(i) for i in range(count)) for form in ("%{}", '"+f"(sums[{}])'))
    shape = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{number}.{number}"
    code = f"{shape} {{{sums}}}, %{count}, %{count + 1}, yes, 1, 1, 0, 0;"
    return (
        f"__device__ __forceinline__ void product(float (&sums)[{count}], unsigned long long left,"
        " unsigned long long right) {\n"
        f'  asm volatile("{{ .reg .pred yes; setp.ne.b32 yes, 1, 0; {code} }}"\n'
        f'    : {operands} : "l"(left), "l"(right));\n}}\n'
    )


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(call: str, status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{call}: {(text.value or b'unknown error').decode()}")


def _the_compiler() -> Any:
    compiler = _compiler()
    if compiler is None:
        raise ConfigError("NVRTC, CUDA's run-time compiler, is not installed; pip install nvidia-cuda-nvrtc")
    return compiler


@functools.cache
def _compiler() -> Any | None:
    for path in _compiler_paths():
        try:
            for part in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")):  # which it opens by name alone
                ctypes.CDLL(str(part))
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


def _compiler_paths() -> Iterator[str]:
    """Where NVRTC may be: the one that torch was built with, then what pip or the system has."""
    major = (torch.version.cuda or "").partition(".")[0]
    names = [f"libnvrtc.so.{major}"] if major else ["libnvrtc.so.13", "libnvrtc.so.12"]
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for name in names:
            yield from map(str, sorted(Path(folder).glob(f"*/lib/{name}")))
    yield from names
