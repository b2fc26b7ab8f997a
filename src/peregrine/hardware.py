"""Facts about this machine, and which device and dtype an option resolves to on it."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from peregrine.control_groups import memory_limits
from peregrine.errors import ConfigError
from peregrine.threads import usable_cores

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GIB = 2**30
Array = npt.NDArray[np.int64] | npt.NDArray[np.float32]
# The CPU flags worth reporting: those that decide which arithmetic is fast (x86, then ARM).
CPU_FLAGS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2"),
)


@dataclass(frozen=True, slots=True)
class Cpu:
    """The CPU; `cores` counts those this process may use."""

    name: str
    cores: int
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device; free memory at the time of reading."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_total_bytes: int
    memory_free_bytes: int


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a benchmark or a bug report states about its machine; None: not installed or not known."""

    python: str
    system: str
    torch: str
    numba: str | None
    triton: str | None
    cuda: str | None
    cpu: Cpu
    memory_total_bytes: int | None
    memory_available_bytes: int | None
    gpus: tuple[Gpu, ...]


def upload(values: Sequence[int] | Sequence[float] | Array, device: torch.device) -> torch.Tensor:
    """Copy values to the device without waiting for the copy: whole numbers as int64, others as float32."""
    array = np.asarray(values)  # torch itself takes five times as long to read a list
    tensor = torch.from_numpy(array if array.dtype.kind == "i" else array.astype(np.float32))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device current in this thread: Triton launches, events and graph captures use the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def read_hardware() -> Hardware:
    """Read all facts of this machine."""
    total, available = read_memory()
    return Hardware(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        torch=str(torch.__version__),
        numba=version_of("numba"),
        triton=version_of("triton"),
        cuda=torch.version.cuda,
        cpu=read_cpu(),
        memory_total_bytes=total,
        memory_available_bytes=available,
        gpus=read_gpus(),
    )


def version_of(package: str) -> str | None:
    """The installed version of a package, without importing it; None if it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def triton_interprets() -> bool:
    """Whether Triton kernels run in Triton's interpreter, on CPU tensors (tests only)."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def read_cpu() -> Cpu:
    """Name, usable cores and flags of the CPU; on ARM, /proc/cpuinfo has no name but lscpu knows it."""
    facts = colon_table(read_text(Path("/proc/cpuinfo")))
    present = set((facts.get("flags") or facts.get("Features") or "").split())
    name = facts.get("model name")
    if name is None and shutil.which("lscpu"):
        printed = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
        name = colon_table(printed).get("Model name")
    return Cpu(name or platform.machine(), usable_cores(), tuple(flag for flag in CPU_FLAGS if flag in present))


def read_memory() -> tuple[int | None, int | None]:
    """Bytes of main memory that this process may have, and that are left; None where there is no /proc/meminfo."""
    facts = colon_table(read_text(Path("/proc/meminfo")))
    if "MemTotal" not in facts or "MemAvailable" not in facts:
        return None, None
    total, available = (int(facts[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))  # from kB
    limits = list(memory_limits())
    return min([total, *(most for most, _ in limits)]), min([available, *(left for _, left in limits)])


def read_gpus() -> tuple[Gpu, ...]:
    """Facts of every CUDA device torch can use."""
    if not torch.cuda.is_available():
        return ()
    return tuple(read_gpu(index) for index in range(torch.cuda.device_count()))


def read_gpu(index: int) -> Gpu:
    """Facts of one CUDA device."""
    free, total = torch.cuda.mem_get_info(index)
    capability = torch.cuda.get_device_capability(index)
    return Gpu(index, torch.cuda.get_device_name(index), capability, total, free)


def check_room(device: torch.device, what: str, num_bytes: int) -> None:
    """Refuse an allocation that cannot fit, before any of it is made."""
    free = free_bytes(device)
    if free is not None and num_bytes > free:
        raise ConfigError(
            f"{device} has no room for {what}: {num_bytes / GIB:.1f} GiB are needed and {free / GIB:.1f} GiB are "
            "free; ask for less, or choose another device"
        )


def free_bytes(device: torch.device) -> int | None:
    """Unused memory of the device; None if unknown."""
    if device.type == "cpu":
        return read_memory()[1]
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # cached by torch's allocator
    return read_gpu(device.index or 0).memory_free_bytes + idle


def resolve_device(name: str) -> torch.device:
    """The device an option names; "auto" is the first CUDA device, else the CPU. ConfigError if unknown."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cuda_names = [f"cuda:{index}" for index in range(count)]
    if name == "auto":
        name = "cuda" if count else "cpu"
    if name == "cpu" or name in cuda_names:
        return torch.device(name)
    if name == "cuda" and count:
        return torch.device("cuda", 0)
    problem = "is not a device Peregrine knows"
    if name.startswith("cuda"):
        problem = "is not on this machine" if count else f"torch {torch.__version__} sees no CUDA device"
    known = ["auto", "cpu", *(["cuda"] if count else []), *cuda_names]
    raise ConfigError(f"device={name!r}: {problem}; choose one of {', '.join(known)}")


def resolve_dtype(name: str, device: torch.device, stored: torch.dtype) -> torch.dtype:
    """The dtype that weights are held in; "auto" is float32 on the CPU and the checkpoint's own on CUDA."""
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        if stored in DTYPES.values():
            return stored
        raise ConfigError(f"dtype='auto': the checkpoint holds {stored}; choose one of {', '.join(DTYPES)}")
    if name not in DTYPES:
        raise ConfigError(f"dtype={name!r}: no such dtype; choose one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def arithmetic_dtype(held: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of activations: that of the weights, but float32 on a CPU, whose compiled kernels know no other."""
    return torch.float32 if device.type == "cpu" else held


def resolve_kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of stored keys and values; "auto" is the dtype of arithmetic."""
    if name not in ("auto", "float8"):
        raise ConfigError(f"kv_dtype={name!r}: no such dtype; choose auto or float8")
    return dtype if name == "auto" else torch.float8_e4m3fn


def colon_table(text: str) -> dict[str, str]:
    """Parse `name : value` lines; the first line of each name counts."""
    facts: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            facts.setdefault(name.strip(), value.strip())
    return facts


def read_text(path: Path) -> str:
    """The file's text, or an empty string if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
