"""Compile the Triton kernels of MLA for an H200, on a machine without one. Run outside the interpreter.

Prints a line of JSON for each: what it is, bytes of shared memory, and how often some instructions occur. The shapes
are DeepSeek-V2-Lite's (16 heads), V3's (128 heads) around attention, and one whose sizes are no multiple of a vector.
"""

import json
import re
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.compiler import ASTSource

from kernels.compile_kernels import H200, POINTERS, UNFENCED
from peregrine.kernels.runtime import gpu


def compile_kernel(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Compile as a launch would: pointers and strides that are multiples of 16 are specialised."""
    names = kernel.arg_names
    values = dict(zip(names, arguments, strict=False)) | {n: options.pop(n) for n in names if n in options}
    signature, constants, aligned = {}, {}, {}
    for place, (name, value) in enumerate(values.items()):
        if isinstance(value, torch.Tensor):
            signature[name], aligned[(place,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        elif place >= len(arguments) or value is None:
            signature[name], constants[(place,)] = "constexpr", value
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
            if isinstance(value, int) and value % 16 == 0 and not kernel.params[place].do_not_specialize:
                aligned[(place,)] = [["tt.divisibility", 16]]
    code = triton.compile(ASTSource(kernel, signature, constants, aligned), target=H200, options=options)
    assert code.asm["cubin"]
    ptx = code.asm["ptx"]
    facts = {
        "kernel": kernel.fn.__name__,
        "rows": values.get("ROWS"),
        "rank": values.get("RANK"),
        "shared": code.metadata.shared,
        "fused": len(re.findall(r"\bfma\.", ptx)),
        "matrix": len(re.findall(r"wgmma\.mma_async|mma\.sync", ptx)),
        "ahead": len(re.findall(r"cp\.async\.c[ag]", ptx)),
        "unfenced": len(UNFENCED.findall(ptx)),
    }
    print(json.dumps(facts))


def half(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.bfloat16)


def whole(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int64)


def compile_attention(heads: int, rank: int, rope: int, tile: int, everything: bool = False) -> None:
    """Split-KV decoding of a chain; optionally of a tree, and of a chain by a program that reads all keys."""
    from peregrine.kernels.attention.mla_triton import mla_attention
    from peregrine.kernels.attention.plan import GpuPlan, Kernel, Launch

    q, keys = half(4, heads, rank + rope), half(32, 1, rank + rope)
    chain = GpuPlan(whole(4), whole(2), whole(1), whole(1, 8), 16, None, None)
    shared, alone = Launch(Kernel.DECODE, False, tile, 7), Launch(Kernel.CONTEXT, False, tile, 0)
    mla_attention(q, keys, chain, shared, rank, 0.1)
    if everything:
        tree = replace(chain, limits=torch.zeros(4, dtype=torch.int32), paths=whole(4, 64))
        mla_attention(q, keys, tree, shared, rank, 0.1)
        mla_attention(q, keys, chain, alone, rank, 0.1)


def compile_parts(heads: int, nope: int, rank: int, rope: int) -> None:
    """The kernels around attention: rotation with the KV write, and the per-head linears before and after."""
    from peregrine.kernels.attention import mla_write_triton as mla_write
    from peregrine.kernels.attention.mla import DeferredMLARope
    from peregrine.kernels.linear.per_head_triton import TritonPerHead

    tokens, table = whole(3), torch.zeros(99, rope)
    projected, k, keys = half(3, heads, nope + rope), half(3, 1, rank + rope), half(32, 1, rank + rope)
    q = half(3, heads, rank + rope)
    deferred = DeferredMLARope(projected[..., nope:], tokens, tokens, table, half(rank), 1e-6)
    mla_write.mla_rope_write_kv(keys, tokens, q, k, deferred)
    mla_write.mla_write_kv(keys, tokens, k, rank)
    TritonPerHead(half(heads, rank, nope)).linear(projected[..., :nope], q[..., :rank])
    TritonPerHead(half(heads, nope, rank)).linear(half(300, heads, rank))


if __name__ == "__main__":
    gpu.launch = compile_kernel
    compile_attention(16, 512, 64, 16)
    compile_attention(16, 512, 64, 64, everything=True)
    compile_attention(20, 48, 24, 32)
    compile_parts(128, 128, 512, 64)
