"""Compile the Triton attention kernels for an H200, on a machine without one. Run as a script, outside the interpreter.

Prints a line of JSON for each: what it is, bytes of shared memory, and how often some instructions occur.
"""

import json
import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.compile_kernels import UNFENCED
from peregrine.kernels.attention import dense_triton as kernels
from peregrine.kernels.attention import kv_write_triton as kv_write
from peregrine.kernels.attention import plan_triton
from peregrine.kernels.attention.blocks import SAME_BITS
from peregrine.kernels.attention.plan import BLOCK, TALL_TILE, TILE

TYPES = {
    "fp32": ("scale",),
    "*fp32": ("k_scale", "v_scale", "sinks", "partial_acc", "partial_ml"),
    "*i32": ("limits",),
    "*i64": ("positions", "past_lens", "table", "q_starts", "paths", "slots", "ancestors"),
}
PLAIN = {"TREE": False, "WINDOWED": False, "SINKS": False, "SCALED": False, "D": 128, "D_PAD": 128}
EVERYTHING = {"TREE": True, "WINDOWED": True, "SINKS": True, "SCALED": True, "D": 80, "D_PAD": 128}
SHAPE = {"KV_HEADS": 8, "GROUP": 4, "PAGE": 16, "ROWS": TILE, "BLOCK": BLOCK, "STAGES": 5}
COPY = {"KV_HEADS": 8, "D": 128, "D_PAD": 128, "SCALED": True, "LARGEST": 448.0}


def compile_kernel(kernel: Any, known: dict[str, Any], kv_type: str, **options: Any) -> None:
    constants = {name: value for name, value in known.items() if name in kernel.arg_names}
    types = {name: kind for kind, names in TYPES.items() for name in names}
    types |= {"q": "*bf16", "out": "*bf16", "k": "*bf16", "v": "*bf16", "keys": kv_type, "values": kv_type}
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(signature.items())
        if (kind.startswith("*") and not name.endswith("_scale")) or name.endswith("_stride")
    }
    source = ASTSource(kernel, signature, constants, aligned)
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert code.asm["cubin"]
    ptx = code.asm["ptx"]
    facts = {
        "kernel": kernel.fn.__name__,
        "kv": kv_type,
        "shared": code.metadata.shared,
        "fusible": len(re.findall(r"\b(?:mul|add|sub)\.f32", ptx)),  # those that stay apart are .rn.f32
        "matrix": len(re.findall(r"\bmma\.sync|wgmma\.mma_async", ptx)),
        "ahead": len(re.findall(r"cp\.async\.c[ag]", ptx)),
        "unfenced": len(UNFENCED.findall(ptx)),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    for kernel in (kernels.decode_kernel, kernels.context_kernel):
        compile_kernel(kernel, SHAPE | PLAIN, "*bf16", num_stages=3, **SAME_BITS)
        compile_kernel(kernel, SHAPE | EVERYTHING, "*fp8e4nv", num_stages=3, **SAME_BITS)
    tall = SHAPE | PLAIN | {"ROWS": TALL_TILE, "STAGES": 3}
    compile_kernel(kernels.context_kernel, tall, "*bf16", num_stages=3, **SAME_BITS)
    for features in (PLAIN, EVERYTHING):
        known = SHAPE | features | {"MERGED": 1}
        compile_kernel(kernels.merge_kernel, known, "*bf16", enable_fp_fusion=False, num_warps=1)
    compile_kernel(kv_write.write_kernel, COPY, "*fp8e4nv", num_warps=1)
    compile_kernel(plan_triton.paths_kernel, {"PAGE": 16}, "*bf16", num_warps=1)
