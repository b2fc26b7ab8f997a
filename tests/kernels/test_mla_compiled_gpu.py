"""The Triton kernels of MLA become machine code for an H200, without one."""

import json

import pytest

from kernels.outside import output_of
from peregrine.kernels.runtime.gpu import TRITON_PRESENT

SHARED_BYTES = 227 * 1024  # of an H200's multiprocessor, for one program
KERNELS = {"mla_kernel", "mla_merge_kernel", "mla_rope_write_kernel", "mla_write_kernel", "per_head_kernel"}


@pytest.mark.skipif(not TRITON_PRESENT, reason="needs triton")
def test_mla_kernels_compile() -> None:
    compiled = [json.loads(line) for line in output_of("compile_mla.py").splitlines()]
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
