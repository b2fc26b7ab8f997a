"""The Triton attention kernels become machine code for an H200, without one."""

import json

import pytest

from kernels.outside import output_of
from peregrine.kernels.runtime.gpu import TRITON_PRESENT

SHARED_BYTES = 227 * 1024  # of an H200's multiprocessor, for one program


@pytest.mark.skipif(not TRITON_PRESENT, reason="needs triton")
def test_attention_kernels_compile() -> None:
    compiled = [json.loads(line) for line in output_of("compile_attention.py").splitlines()]
    arithmetic = [facts for facts in compiled if facts["kernel"] in ("decode_kernel", "context_kernel")]
    merges = [facts for facts in compiled if facts["kernel"] == "merge_kernel"]
    copies = {facts["kernel"] for facts in compiled} & {"write_kernel", "paths_kernel"}
    assert len(arithmetic) == 5
    assert merges
    assert len(copies) == 2
    for facts in arithmetic + merges:
        assert facts["fusible"] == 0, "the compiler may fuse products and additions here and not in other kernels"
    for facts in arithmetic:
        assert facts["matrix"] > 0
        assert facts["ahead"] > 0, "loads are not pipelined"
        assert facts["unfenced"] == 0, "copied keys must be fenced before the matrix unit reads them"
        assert facts["shared"] * 2 <= SHARED_BYTES, "two programs have to fit beside each other"
