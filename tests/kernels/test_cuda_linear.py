"""Linears in CUDA C++: which plans there are, and what NVRTC makes of them, on a machine without a GPU."""

import ctypes
import re
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peregrine.kernels.linear import cuda_tiles as plans
from peregrine.kernels.linear.cuda_linear import Sizes, linear_source
from peregrine.kernels.linear.cuda_tiles import ClusteredPlan, FittedPlan, clustered_plan, fitted_plan, hopper_plan
from peregrine.kernels.linear.tiles import large_plan, pick_split
from peregrine.kernels.runtime import cuda
from peregrine.kernels.runtime.gpu import HOPPER_SHARED_BYTES, TRITON_PRESENT

LLAMA_8B = {
    "qkv": (6144, 4096, False, False),
    "o": (4096, 4096, False, True),
    "gate_up": (14336, 4096, True, False),
    "down": (4096, 14336, False, True),
}
MULTIPROCESSORS = 132
needs_nvrtc = pytest.mark.skipif(not cuda.nvrtc_ready() or not TRITON_PRESENT, reason="needs NVRTC and cuobjdump")


def plan_of(name: str, rows: int) -> FittedPlan | None:
    outputs, inputs, gate, add = LLAMA_8B[name]
    return fitted_plan(rows, outputs, inputs, gate, add, pick_split(outputs, inputs, gate))


def test_the_plans_of_an_8b_are_those_that_were_the_fastest() -> None:
    chosen = {
        (name, rows): (plan.groups, plan.cols, plan.split)
        for name in LLAMA_8B
        for rows in (64, 65, 128, 129, 192, 193, 256, 257, 384, 385)
        if (plan := plan_of(name, rows))
    }
    assert chosen == {
        **dict.fromkeys([("qkv", 65), ("qkv", 128)], (2, 48, 1)),
        **dict.fromkeys([("qkv", 129), ("qkv", 192)], (3, 48, 1)),
        **dict.fromkeys([("qkv", 193), ("qkv", 256)], (2, 96, 1)),
        **dict.fromkeys([("qkv", 257), ("qkv", 384)], (2, 144, 1)),
        **dict.fromkeys([("o", 65), ("o", 128), ("down", 65), ("down", 128)], (2, 64, 2)),
        **dict.fromkeys([("gate_up", 65), ("gate_up", 128)], (2, 224, 1)),
    }


@given(
    rows=st.integers(1, 600),
    outputs=st.integers(1, 4000).map(lambda n: 8 * n),
    inputs=st.integers(1, 300).map(lambda n: 64 * n),
    gate=st.booleans(),
    num_sms=st.sampled_from([78, 114, 132]),
)
def test_a_plan_is_one_tile_for_each_multiprocessor(
    rows: int, outputs: int, inputs: int, gate: bool, num_sms: int
) -> None:
    split = pick_split(outputs, inputs, gate)
    plan = fitted_plan(rows, outputs, inputs, gate, False, split, num_sms)
    if plan is None:
        return
    weight_rows = outputs * (2 if gate else 1)
    assert plan.programs(rows, weight_rows) <= num_sms
    assert plan.split == split
    assert inputs % (64 * split) == 0
    assert rows >= 64  # the last group's rows begin so early that they are whole
    assert weight_rows >= plan.cols
    assert plan.stages >= 2
    assert plan.shared_bytes <= HOPPER_SHARED_BYTES
    exchanged_bytes = 128 * plan.groups * (plan.cols // 4) * 4 if plan.split == 2 else 0
    assert exchanged_bytes <= plan.shared_bytes


def test_inputs_in_parts_go_to_clusters_while_rows_are_few() -> None:
    """By outputs and inputs: rooms for rows, places in the ring, and whether a program has a multiprocessor alone."""
    weights = {"8b down": (4096, 14336), "qwen3-30b o": (2048, 4096), "qwen2.5-1.5b o": (1536, 1536)}
    chosen = {
        (name, rows): (plan.width, plan.stages, plan.alone)
        for name, (outputs, inputs) in weights.items()
        for rows in (1, 16, 17, 64, 65)
        if (plan := clustered_plan(rows, outputs, inputs, False, pick_split(outputs, inputs, False)))
    }
    assert chosen == {
        ("8b down", 1): (8, 12, True),
        ("8b down", 16): (16, 11, True),
        ("8b down", 17): (32, 9, True),
        ("8b down", 64): (64, 7, True),
        ("qwen3-30b o", 1): (8, 6, False),  # 32 clusters of four: 30 of them have multiprocessors of their own
        ("qwen3-30b o", 16): (16, 5, False),
        ("qwen2.5-1.5b o", 1): (8, 4, True),
        ("qwen2.5-1.5b o", 16): (16, 4, True),
        ("qwen2.5-1.5b o", 17): (32, 4, True),
        ("qwen2.5-1.5b o", 64): (64, 4, True),
    }
    assert clustered_plan(8, 6144, 4096, False, 1) is None, "nothing to share"
    assert clustered_plan(8, 4096, 4096, True, 2) is None, "gates need more room"


@given(
    rows=st.integers(0, 80),
    outputs=st.integers(1, 1300).map(lambda n: 8 * n),
    inputs=st.integers(1, 300).map(lambda n: 64 * n),
    num_sms=st.sampled_from([78, 114, 132]),
)
def test_all_programs_of_clusters_run_at_once(rows: int, outputs: int, inputs: int, num_sms: int) -> None:
    split = pick_split(outputs, inputs, False)
    plan = clustered_plan(rows, outputs, inputs, False, split, num_sms)
    if plan is None:
        return
    assert 1 < plan.split <= 8
    assert plan.steps * 128 * plan.split == inputs
    assert 1 <= rows <= plan.width
    assert plan.programs(rows, outputs) % plan.split == 0
    assert plan.stages >= min(3, plan.steps)
    each = HOPPER_SHARED_BYTES if plan.alone else HOPPER_SHARED_BYTES // 2
    assert plan.shared_bytes <= each
    assert plan.shared_bytes >= 4 * plan.width * 68, "sums take the place of the ring"
    assert not plan.alone or plan.programs(rows, outputs) <= num_sms


def test_without_nvrtc_the_kernels_in_gluon_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "nvrtc_ready", lambda: True)
    assert hopper_plan(256, 6144, 4096, False, False) == FittedPlan(2, 96)
    assert isinstance(hopper_plan(4, 4096, 14336, False, True), ClusteredPlan)
    assert hopper_plan(2048, 6144, 4096, False, False) == large_plan(2048, 6144, 4096, False, False)
    monkeypatch.setattr(plans, "nvrtc_ready", lambda: False)
    assert hopper_plan(256, 4096, 14336, False, True) == large_plan(256, 4096, 14336, False, True)
    assert hopper_plan(4, 4096, 14336, False, True) is None


@needs_nvrtc
@pytest.mark.parametrize(
    ("name", "rows"),
    [("qkv", 100), ("qkv", 190), ("qkv", 256), ("qkv", 384), ("o", 128), ("down", 100), ("gate_up", 128)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_a_plan_compiles_to_the_intended_instructions(name: str, rows: int, dtype: torch.dtype, tmp_path: Path) -> None:
    plan, (_, _, gate, add) = plan_of(name, rows), LLAMA_8B[name]
    assert plan is not None
    code, registers = disassembled(linear_source(plan, gate, add, dtype), tmp_path)
    product = f"HGMMA.64x{plan.cols}x16.F32" + (".BF16" if dtype is torch.bfloat16 else " ")
    assert code.count("HGMMA") == code.count(product) > 0
    assert "UTMALDG" in code
    assert re.search(r"\b(LDL|STL)\b", code) is None, "registers are spilled"
    # Warps are dealt to four parts of a multiprocessor, each with a quarter of 65,536 registers.
    assert registers * 32 * -(-plan.threads // 128) <= 16384
    # One wait within the loop and one after it, for each of the copies of the loop that the compiler makes.
    assert code.count("WARPGROUP.DEPBAR") <= code.count("HGMMA") // 4 + 1
    # A barrier with the scope of the cluster in the loop would make every step wait for all memory.
    assert "MEMBAR.ALL.GPU" not in code or plan.split == 2
    assert "ACQBULK" in code, "it does not wait for the kernel before"
    assert "PREEXIT" in code, "the next kernel cannot start early"


@needs_nvrtc
@pytest.mark.parametrize(
    ("outputs", "inputs", "rows", "add"), [(2048, 4096, 4, True), (4096, 14336, 64, True), (3072, 2048, 16, False)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_a_clustered_plan_compiles_to_the_intended_instructions(
    outputs: int, inputs: int, rows: int, add: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    plan = clustered_plan(rows, outputs, inputs, False, pick_split(outputs, inputs, False))
    assert plan is not None
    code, registers = disassembled(linear_source(plan, False, add, dtype), tmp_path)
    product = f"HGMMA.64x{plan.width}x16.F32" + (".BF16" if dtype is torch.bfloat16 else " ")
    assert code.count("HGMMA") == code.count(product) > 0
    assert re.search(r"\b(LDL|STL)\b", code) is None, "registers are spilled"
    assert registers * plan.threads * 2 <= 65536, "two programs have to fit beside each other"
    # Both kinds of warps meet once with the memory of the cluster in order, and once without.
    assert code.count("MEMBAR.ALL.GPU") == 2
    assert code.count("UCGABAR_WAIT") == 4
    assert "ACQBULK" in code, "it does not wait for the kernel before"
    assert "PREEXIT" in code, "the next kernel cannot start early"


def test_structures_are_laid_out_as_the_driver_has_them() -> None:
    """As cuda.h has them on machines of 64 bits; and what linears are given."""
    config, attribute = cuda._Config, cuda._Attribute
    places = [getattr(config, name).offset for name, *_ in config._fields_]
    assert (places, ctypes.sizeof(config)) == ([0, 12, 24, 32, 40, 48], 56)
    assert (attribute.value.offset, ctypes.sizeof(attribute)) == (8, 72)
    assert ctypes.sizeof(cuda.TensorMap) == 128
    assert ctypes.sizeof(Sizes) == 24


@pytest.mark.parametrize(("version", "ready"), [((12, 3), False), ((12, 4), True), ((13, 0), True)])
def test_an_old_compiler_is_left_alone(version: tuple[int, int], ready: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_compiler", lambda: "NVRTC")
    monkeypatch.setattr(cuda, "compiler_version", lambda: version)
    assert cuda.nvrtc_ready.__wrapped__() == ready
    monkeypatch.setattr(cuda, "_compiler", lambda: None)
    assert not cuda.nvrtc_ready.__wrapped__()


@needs_nvrtc
def test_source_that_is_refused_shows_why() -> None:
    with pytest.raises(RuntimeError, match=r'NVRTC refuses a kernel of ours:(?s:.*)identifier "nothing" is undefined'):
        cuda.compile_source('extern "C" __global__ void kernel(int* out) { *out = nothing; }')


@needs_nvrtc
def test_machine_code_is_compiled_once_and_read_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(cuda, "cache_folder", lambda: tmp_path / "new")
    monkeypatch.setattr(cuda, "compile_source", lambda source: compiled.append(source) or source.encode())
    assert [cuda.cached_code(source) for source in ("a", "a", "b", "a")] == [b"a", b"a", b"b", b"a"]
    assert compiled == ["a", "b"]
    assert len(list((tmp_path / "new").iterdir())) == 2
    (tmp_path / "file").touch()
    monkeypatch.setattr(cuda, "cache_folder", lambda: tmp_path / "file" / "below")  # cannot be made
    assert cuda.cached_code("c") == b"c"


@needs_nvrtc
def test_the_cache_lies_beside_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    assert cuda.cache_folder() == Path("/somewhere/peregrine")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    assert cuda.cache_folder() == Path.home() / ".triton/cache/peregrine"


def disassembled(source: str, folder: Path) -> tuple[str, int]:
    """A kernel's instructions, and the registers of a thread."""
    import triton

    path, tool = folder / "kernel.cubin", triton.knobs.nvidia.cuobjdump.path
    path.write_bytes(cuda.compile_source(source))
    code, usage = (
        subprocess.run([tool, flag, str(path)], capture_output=True, text=True, check=True).stdout
        for flag in ("-sass", "-res-usage")
    )
    found = re.search(r"REG:(\d+)", usage)
    assert found
    return code, int(found[1])
