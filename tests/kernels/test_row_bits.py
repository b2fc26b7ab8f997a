"""Every CPU operation gives a row the same bits in any batch: with each instruction set, with numba and without it."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from peregrine.bench.row_bits import check_rows
from peregrine.bench.row_operations import Operation
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT

# What ATEN_CPU_CAPABILITY may be on this CPU: torch falls back to less, never to more.
X86 = ["default", "avx2", "avx512"]
OWN = torch.backends.cpu.get_cpu_capability().lower()
CAPABILITIES = X86[: X86.index(OWN) + 1] if OWN in X86 else ["default"]

SWEEP = """
import sys
if {hidden}:
    sys.modules["numba"] = None
import torch
from peregrine.bench.row_bits import check_rows
from peregrine.bench.row_operations import operations
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT
assert NUMBA_PRESENT != {hidden}
# numba's kernels compute in float32; what never uses them is swept without numba.
table = [op for op in operations() if {hidden} or not ("torch" in op.name or op.name.endswith("bfloat16"))]
assert len(table) > 40
assert torch.backends.cpu.get_cpu_capability().lower() in ("{capability}", "default")
print(*check_rows(table=table), sep="\\n", end="")
"""


# numba compiles for the CPU that there is; torch's own operations are all swept without it.
@pytest.mark.parametrize(("capability", "numba"), [(CAPABILITIES[-1], True), *((each, False) for each in CAPABILITIES)])
def test_no_operation_depends_on_the_batch(capability: str, numba: bool) -> None:
    if numba and not NUMBA_PRESENT:
        pytest.skip("numba is not installed")
    script = SWEEP.format(hidden=not numba, capability=capability)
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def last_element(x: Tensor) -> Tensor:
    """A faulty operation: another rounding in the last element of the tensor."""
    y = x.clone()
    y.view(-1)[-1] += 1e-6
    return y


def vector_tail(x: Tensor) -> Tensor:
    """A faulty operation: other code for the tail after vectors of 16, as in torch's sigmoid on x86-64."""
    y = 1 / (1 + (-x).exp())
    left = x.numel() % 16
    if left:
        y.view(-1)[-left:] = x.reshape(-1)[-left:].double().sigmoid().float()
    return y


def by_threads(x: Tensor) -> Tensor:
    return x * (1 + 1e-6 * (torch.get_num_threads() > 2))


def by_alignment(x: Tensor) -> Tensor:
    return x * (1 + 1e-6 * (x.data_ptr() % 16 > 0))


def by_layout(x: Tensor) -> Tensor:
    return x * (1 + 1e-6 * (not x.is_contiguous()))


def by_number_of_rows(x: Tensor) -> Tensor:
    return x * (1 + 1e-6 * (len(x) == 2))


@pytest.mark.parametrize("fault", [last_element, vector_tail, by_threads, by_alignment, by_layout, by_number_of_rows])
def test_a_fault_is_found(fault) -> None:  # type: ignore[no-untyped-def]
    rows = torch.randn(67, 32, generator=torch.Generator().manual_seed(1))
    right = Operation("right", (rows,), lambda x: x * 2)
    wrong = Operation("wrong", (rows[:, :31].contiguous() if fault is vector_tail else rows,), fault)
    found = check_rows(table=[right, wrong])
    assert [finding.operation for finding in found] == ["wrong"]
    assert "row" in str(found[0])


def test_the_quick_form_finds_faults_of_large_batches() -> None:
    rows = torch.randn(67, 33, generator=torch.Generator().manual_seed(1))
    assert check_rows(quick=True, table=[Operation("tail", (rows,), last_element)])
