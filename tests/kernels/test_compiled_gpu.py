"""The Triton kernels of sampling, the round and the models compile for an H200, on a machine without one."""

import re
from pathlib import Path

import pytest

from kernels.outside import output_of
from peregrine.kernels.runtime.gpu import TRITON_PRESENT

KERNELS = Path(__file__).parents[2] / "src" / "peregrine" / "kernels"
# Attention, the per-head linear, Hopper's linear and kernels in CUDA C++ have their own tests.
ELSEWHERE = ("attention", "per_head_triton", "hopper", "fitted", "runtime/cuda")
OURS = [path for path in sorted(KERNELS.rglob("*.py")) if not any(word in str(path) for word in ELSEWHERE)]


def launched(path: Path) -> set[str]:
    """The kernels that a file launches."""
    names = set(re.findall(r"\blaunch\(\s*(\w+),", path.read_text())) - {"kernel", "hopper_kernel", "large_kernel"}
    return {f"{path.parent.name}.{path.stem} {name}" for name in names}


@pytest.mark.skipif(not TRITON_PRESENT, reason="needs triton")
def test_every_kernel_compiles() -> None:
    compiled = set(output_of("compile_kernels.py").split("\n"))
    expected = set().union(*map(launched, OURS))
    assert len(expected) > 20
    assert expected <= compiled, sorted(expected - compiled)
