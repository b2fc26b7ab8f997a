"""Compile Hopper's own kernels for an H200, on a machine without one. Run as a script, outside the interpreter.

Prints a line of JSON for each: what it is, bytes of shared memory, and how often some instructions occur.
"""

import json
import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from peregrine.kernels.attention.hopper import hopper_decode_kernel
from peregrine.kernels.attention.hopper_prompt import hopper_prompt_kernel
from peregrine.kernels.attention.mla_hopper import mla_hopper_kernel
from peregrine.kernels.attention.mla_hopper_prompt import mla_hopper_prompt_kernel
from peregrine.kernels.attention.mla_triton import HOPPER_REGISTERS as MLA_REGISTERS
from peregrine.kernels.attention.plan import MLA_WARPS
from peregrine.kernels.attention.triton import HOPPER_REGISTERS, HOPPER_STAGES, PROMPT_REGISTERS
from peregrine.kernels.linear.hopper import hopper_kernel
from peregrine.kernels.linear.hopper_large import large_kernel
from peregrine.kernels.linear.tiles import HOPPER_TABLES, LARGE_BOX, TALL_TILES, LargePlan
from peregrine.kernels.moe.hopper import experts_kernel
from peregrine.kernels.moe.hopper_few import STAGES as FEW_STAGES
from peregrine.kernels.moe.hopper_few import few_experts_kernel

TYPES = {
    "*bf16": ("q", "out", "bias", "residual", "norm", "scaled", "x", "inner"),
    "*i64": ("positions", "q_starts", "past_lens", "table", "squares", "next_squares", "stale_squares"),
    "*fp32": ("partial_acc", "partial_ml", "partial", "factors"),
    "*i32": ("arrived", "blocks", "experts", "numbers", "done"),
    "fp32": ("scale", "eps"),
}
ROUND = {"KV_HEADS": 8, "GROUP": 4, "STAGES": HOPPER_STAGES}


def tiles(rows: int, depth: int, height: int | None = None) -> str:
    """The type of a matrix in tiles of rows x depth; they are laid out as tiles of another height would be."""
    layout = gl.NVMMASharedLayout.get_default_for([height or rows, depth], gl.bfloat16)
    return f"tensordesc<bf16[{rows}, {depth}],{layout!r}>"


def compile_kernel(kernel: Any, tiled: dict[str, str], known: dict[str, Any], **options: Any) -> None:
    kind = options.pop("kind", None)
    types = {name: kind for kind, names in TYPES.items() for name in names} | tiled
    signature = {n: "constexpr" if n in known else types.get(n, "i32") for n in kernel.arg_names}
    constants = {(kernel.arg_names.index(name),): value for name, value in known.items()}
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in options.pop("aligned", ())}
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options |= {"num_warps": known["num_warps"], "launch_pdl": True}
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert code.asm["cubin"]
    ptx = code.asm["ptx"]
    facts = {
        "kernel": kernel.fn.__name__,
        "kind": kind,
        "rows": known.get("ROWS"),
        "tail": known.get("TAIL", 0),
        "shared": code.metadata.shared,
        "fusible": len(re.findall(r"\b(?:mul|add|sub)\.f32", ptx)),  # those that stay apart are .rn.f32
        "matrix": len(re.findall(r"wgmma\.mma_async", ptx)),
        "copies": len(re.findall(r"cp\.async\.bulk\.tensor", ptx)),
        "waits": len(re.findall(r"griddepcontrol\.wait", ptx)),
    }
    if kernel is not hopper_kernel:  # of the others the test counts instructions of the machine
        sass = machine_code(code.asm["cubin"])
        facts["held_up"] = sass.count("WARPGROUP.DEPBAR")
        facts["spills"] = len(re.findall(r"\b(?:LDL|STL)\b", sass))
    print(json.dumps(facts))


def machine_code(cubin: bytes) -> str:
    """All instructions of a kernel. `code.asm["sass"]` ends after 64 KB, in the middle of those with several roles."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def compile_linear(kind: str, rows: int, outputs: int, inputs: int, split: int, tail: int = 0) -> None:
    """One line of the tables, as a layer uses it."""
    cols, depth, warps, stages = TALL_TILES[kind][rows, tail] if tail else HOPPER_TABLES[kind][rows]
    known = {"N": outputs, "K": inputs, "SPLIT": split, "ROWS": rows, "COLS": cols, "DEPTH": depth, "STAGES": stages}
    known |= {"SCALE": kind != "split", "BIAS": False, "GATE": kind == "gated", "ADD": kind == "split", "TAIL": tail}
    known["EXCHANGE"] = tail > 0 and split == 2
    tiled = {"x_desc": tiles(rows, depth), "tail_desc": tiles(tail or rows, depth), "w_desc": tiles(cols, depth)}
    compile_kernel(hopper_kernel, tiled, known | {"num_warps": warps}, kind=kind)


def compile_large(outputs: int, inputs: int, gate: bool = False, add: bool = False, **plan: Any) -> None:
    """The kernel for many rows, by its plan."""
    known = {"N": outputs, "K": inputs, "SPLIT": 2 if add else 1, "PAIRS": False, "BIAS": False, "num_warps": 4}
    known |= {"SCALE": not add, "GATE": gate, "ADD": add, "EIGHTHS": 8, "REST": 0} | plan
    box = LargePlan(0, 0, rest=known["REST"], eighths=known["EIGHTHS"]).box
    compile_kernel(large_kernel, large_tiles(gate, box, 32 if known["EIGHTHS"] % 2 else 64), known)


def large_tiles(gate: bool, box: int = LARGE_BOX, chunk: int = 64) -> dict[str, str]:
    """The types of the matrices of kernels for many rows; weights come in boxes of so many columns."""
    weight = [box // 16, 2, 8, 64] if gate else [box, 64]
    layout = gl.NVMMASharedLayout.get_default_for(weight, gl.bfloat16)
    tiled = {"x_desc": tiles(64, 64), "w_desc": f"tensordesc<bf16{weight},{layout!r}>"}
    tiled |= dict.fromkeys(("out_desc", "scaled_desc", "residual_desc"), tiles(64, chunk))
    return tiled | ({"scaled_desc": tiles(64, 32)} if gate and box < LARGE_BOX else {})


def compile_few(experts: int, shared: int, inner: int, choices: int) -> None:
    """The experts of few rows, of a hidden size of 2048."""
    layout = gl.NVMMASharedLayout.get_default_for([4, 2, 8, 64], gl.bfloat16)
    tiled = {"gate_desc": f"tensordesc<bf16[4, 2, 8, 64],{layout!r}>", "down_desc": tiles(64, 64)}
    known = {"EXPERTS": experts, "SHARED": shared, "CHOICES": choices, "PAIRS": 64, "BINS": 128, "N": inner, "K": 2048}
    compile_kernel(few_experts_kernel, tiled, known | {"SCALE": True, "STAGES": FEW_STAGES, "num_warps": 4})


if __name__ == "__main__":
    compile_large(14336, 4096, gate=True, GROUPS=3, REST=3)
    compile_large(4096, 4096, add=True, GROUPS=2)
    compile_large(4096, 4096, add=True, GROUPS=3, EIGHTHS=4)
    compile_large(4096, 4096, add=True, GROUPS=2, EIGHTHS=4)
    compile_large(4096, 4096, add=True, GROUPS=2, EIGHTHS=5)
    compile_large(4096, 4096, add=True, GROUPS=2, PAIRS=True)
    compile_large(4096, 4096, add=True, GROUPS=3, EIGHTHS=4, PAIRS=True)
    compile_large(4096, 4096, add=True, GROUPS=2, EIGHTHS=4, PAIRS=True)
    compile_large(2880, 4096, add=True, BIAS=True, GROUPS=2, EIGHTHS=4, PAIRS=True)  # with chunks past the last output
    compile_large(6144, 4096, GROUPS=2, REST=3)
    compile_large(14336, 4096, gate=True, GROUPS=2, REST=1)
    known = {"N": 1408, "K": 2048, "SCALE": True, "GATE": True, "num_warps": 4}
    compile_kernel(experts_kernel, large_tiles(gate=True), known)
    compile_few(66, 2, 1408, 8)
    compile_few(128, 0, 768, 8)
    # Every kind of weight with one end of its table.
    compile_linear("plain", 16, 6144, 4096, 1)
    compile_linear("split", 128, 4096, 14336, 2)
    compile_linear("split", 128, 4096, 14336, 2, tail=64)
    compile_linear("gated", 128, 14336, 4096, 1)
    compile_linear("wide", 16, 128256, 4096, 1)
    for rows, head_dim, page in ((16, 128, 16), (64, 128, 16), (32, 64, 128)):
        pages = tiles(min(page, 64), 64, height=64)
        known = ROUND | {"ROWS": rows, "D": head_dim, "PAGE": page, "num_warps": 4}
        options = {"maxnreg": HOPPER_REGISTERS, "enable_fp_fusion": False}
        compile_kernel(hopper_decode_kernel, {"keys": pages, "values": pages}, known, **options)
    known = {"KV_HEADS": 8, "GROUP": 4, "D": 128, "PAGE": 16, "num_warps": 4}
    options: dict[str, Any] = {"maxnreg": PROMPT_REGISTERS, "enable_fp_fusion": False}
    options["aligned"] = ("q", "out", "q_stride")
    compile_kernel(hopper_prompt_kernel, dict.fromkeys(("keys", "values"), tiles(16, 64, height=64)), known, **options)
    known = {"HEADS": 16, "RANK": 512, "PAGE": 16, "num_warps": 4}
    compile_kernel(mla_hopper_prompt_kernel, {"keys": tiles(16, 64, height=64)}, known, **options)
    for heads, rank, rows, split_kv in (
        (16, 512, 16, True),
        (16, 512, 64, False),
        (128, 512, 64, True),
        (4, 128, 64, True),
    ):
        known = {"HEADS": heads, "RANK": rank, "ROPE": 64, "PAGE": 16, "ROWS": rows, "STAGES": 2}
        known |= {"SPLIT_KV": split_kv, "ABOVE": 0 if split_kv else 16896, "num_warps": MLA_WARPS[rows]}
        options = {"maxnreg": MLA_REGISTERS[rows], "enable_fp_fusion": False}
        pages = {"keys": tiles(16, 64, height=64)}
        compile_kernel(mla_hopper_kernel, pages, known, **options)
