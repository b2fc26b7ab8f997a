"""What this machine is, and which device and dtype a wish comes to on it."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from peregrine.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Instruction sets that decide which arithmetic is fast; the rest of a CPU's flags are noise here.
X86_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16")
AMX_FLAGS = ("amx_tile", "amx_bf16", "amx_int8")
ARM_FLAGS = ("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2")
TELLING_FLAGS = X86_FLAGS + AMX_FLAGS + ARM_FLAGS


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processor; `cores` are those this process may use."""

    name: str
    cores: int
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device; free memory as it was when asked."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_total_bytes: int
    memory_free_bytes: int


@dataclass(frozen=True, slots=True)
class Hardware:
    """The facts a figure or a bug report needs; None where a thing is not installed or not known."""

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


def upload(values: Sequence[int] | Sequence[float], device: torch.device) -> torch.Tensor:
    """A tensor of these values on the device; the host does not wait for the copy."""
    tensor = torch.tensor(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the thread's current one: kernels, events and graphs go to that one, not to their tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def read_hardware() -> Hardware:
    """The facts of this machine, now."""
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
    """Whether Triton kernels run in Triton's interpreter, on CPU tensors: slow, and for tests."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def read_cpu() -> Cpu:
    """Name, usable cores and telling flags of the processor."""
    facts = colon_table(read_text(Path("/proc/cpuinfo")))
    present = set((facts.get("flags") or facts.get("Features") or "").split())
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    name = facts.get("model name") or cpu_name_from_tools() or platform.machine()
    return Cpu(name, cores, tuple(flag for flag in TELLING_FLAGS if flag in present))


def cpu_name_from_tools() -> str:
    """The name where /proc/cpuinfo has none (ARM, macOS); empty if no tool tells it."""
    if shutil.which("lscpu"):
        return colon_table(run_tool("lscpu")).get("Model name", "")
    if sys.platform == "darwin":
        return run_tool("sysctl", "-n", "machdep.cpu.brand_string").strip()
    return ""


def read_memory() -> tuple[int | None, int | None]:
    """Bytes of main memory: total, and available to a new process."""
    facts = colon_table(read_text(Path("/proc/meminfo")))
    if "MemTotal" in facts and "MemAvailable" in facts:
        return kilobytes(facts["MemTotal"]), kilobytes(facts["MemAvailable"])
    if sys.platform == "darwin":
        total = run_tool("sysctl", "-n", "hw.memsize").strip()
        return (int(total) if total.isdigit() else None), None
    return None, None


def read_gpus() -> tuple[Gpu, ...]:
    """Every CUDA device torch can use."""
    if not torch.cuda.is_available():
        return ()
    return tuple(read_gpu(index) for index in range(torch.cuda.device_count()))


def read_gpu(index: int) -> Gpu:
    """One CUDA device's facts."""
    free, total = torch.cuda.mem_get_info(index)
    capability = torch.cuda.get_device_capability(index)
    return Gpu(index, torch.cuda.get_device_name(index), capability, total, free)


def resolve_device(name: str) -> torch.device:
    """The device a wish comes to: "auto" is the first CUDA device, else the CPU. Unknown ones are refused."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and count == 0):
        return torch.device("cpu")
    cuda_names = {f"cuda:{index}": index for index in range(count)}
    if count and name in ("auto", "cuda"):
        return torch.device("cuda", 0)
    if name in cuda_names:
        return torch.device("cuda", cuda_names[name])
    problem = "is not a device Peregrine knows"
    if name.startswith("cuda"):
        problem = "is not on this machine" if count else f"torch {torch.__version__} sees no CUDA device"
    known = ["auto", "cpu", *(["cuda"] if count else []), *cuda_names]
    raise ConfigError(f"device={name!r}: {problem}; choose one of {', '.join(known)}")


def resolve_dtype(name: str, device: torch.device, stored: torch.dtype) -> torch.dtype:
    """The dtype a wish comes to: "auto" is float32 on the CPU and the checkpoint's own on CUDA."""
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        if stored in DTYPES.values():
            return stored
        raise ConfigError(f"dtype='auto': the checkpoint holds {stored}; choose one of {', '.join(DTYPES)}")
    if name not in DTYPES:
        raise ConfigError(f"dtype={name!r}: no such dtype; choose one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def resolve_kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype keys and values are held in: "auto" is that of the arithmetic."""
    if name not in ("auto", "float8"):
        raise ConfigError(f"kv_dtype={name!r}: no such dtype; choose auto or float8")
    return dtype if name == "auto" else torch.float8_e4m3fn


def colon_table(text: str) -> dict[str, str]:
    """`name : value` lines as a mapping; the first of each name counts."""
    facts: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            facts.setdefault(name.strip(), value.strip())
    return facts


def kilobytes(text: str) -> int:
    """The bytes in a figure such as `24012312 kB`."""
    return int(text.split()[0]) * 1024


def read_text(path: Path) -> str:
    """The file's text; empty where there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""


def run_tool(*command: str) -> str:
    """What a system tool prints; empty if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""
