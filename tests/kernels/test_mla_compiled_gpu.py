"""The Triton kernels of MLA become machine code for an H200, without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from peregrine.kernels.runtime.gpu import TRITON_PRESENT

SRC = Path(__file__).parents[2] / "src"
SHARED_BYTES = 227 * 1024  # of an H200's multiprocessor, for one program
KERNELS = {"mla_kernel", "mla_merge_kernel", "mla_rope_write_kernel", "mla_write_kernel", "per_head_kernel"}


@pytest.mark.skipif(not TRITON_PRESENT, reason="needs triton")
def test_mla_kernels_compile() -> None:
    outside = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_mla.py"))],
        env={**outside, "PYTHONPATH": os.pathsep.join([str(SRC), str(Path(__file__).parents[1])])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {facts["kernel"] for facts in compiled} == KERNELS
    attention = [facts for facts in compiled if facts["kernel"] == "mla_kernel"]
    assert {(facts["rank"], facts["rows"]) for facts in attention} == {(512, 16), (512, 64), (48, 32)}
    for facts in attention:
        assert facts["fused"] == 0, "a fused multiply-add in one kernel and not in the other would change bits"
        assert facts["matrix"] > 0
        assert facts["ahead"] > 0, "loads are not pipelined"
        assert facts["shared"] <= SHARED_BYTES
    assert all(facts["matrix"] > 0 for facts in compiled if facts["kernel"] == "per_head_kernel")
    assert {facts["unfenced"] for facts in compiled} == {0}, "copies must be fenced before the matrix unit reads them"
