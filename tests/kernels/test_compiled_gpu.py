"""The Triton kernels of sampling, the round and the models compile for an H200, on a machine without one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from peregrine.kernels.runtime.gpu import TRITON_PRESENT

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "src" / "peregrine" / "kernels"
# Attention, the per-head linear and Hopper's linear have their own tests.
ELSEWHERE = ("attention", "per_head_triton", "hopper")
OURS = [path for path in sorted(KERNELS.rglob("*.py")) if not any(word in str(path) for word in ELSEWHERE)]


def launched(path: Path) -> set[str]:
    """The kernels that a file launches."""
    names = set(re.findall(r"\blaunch\(\s*(\w+),", path.read_text())) - {"kernel", "hopper_kernel", "large_kernel"}
    return {f"{path.parent.name}.{path.stem} {name}" for name in names}


@pytest.mark.skipif(not TRITON_PRESENT, reason="needs triton")
def test_every_kernel_compiles() -> None:
    script, tests = Path(__file__).with_name("compile_kernels.py"), Path(__file__).parents[1]
    paths = os.pathsep.join([str(ROOT / "src"), str(tests)])
    outside = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script)], env={**outside, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = set(done.stdout.split("\n"))
    expected = set().union(*map(launched, OURS))
    assert len(expected) > 20
    assert expected <= compiled, sorted(expected - compiled)
