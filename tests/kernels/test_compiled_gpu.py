"""The Triton kernels of the law, the round and the models become machine code for an H200, without one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from peregrine.kernels.runtime.gpu import TRITON_PRESENT

KERNELS = Path(__file__).parents[2] / "src" / "peregrine" / "kernels"
# Attention's, latent attention's too, have a test of their own, and noise_gpu holds no kernel, only a part of some.
OURS = sorted(
    path.stem.removesuffix("_gpu")
    for path in KERNELS.glob("*_gpu.py")
    if not path.stem.startswith(("attention", "heads", "latent", "noise"))
)


@pytest.mark.skipif(not TRITON_PRESENT, reason="needs triton")
def test_every_kernel_compiles() -> None:
    script, tests = Path(__file__).with_name("compile_kernels.py"), Path(__file__).parents[1]
    paths = os.pathsep.join([str(KERNELS.parents[1]), str(tests)])
    outside = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script)], env={**outside, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = set(done.stdout.split("\n"))
    for unit in OURS:
        source = (KERNELS / f"{unit}_gpu.py").read_text()
        for name in set(re.findall(r"launch\(\s*(\w+),", source)) - {"hopper_kernel"}:  # which has its own test
            assert f"{unit}_gpu {name}" in compiled
