"""Compile some Triton kernels for a device before Hopper, on a machine without one. Run outside the interpreter.

Prints for each whether it waits for the kernel before it (PDL), and whether it fits such a device.
"""

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from peregrine.kernels.runtime import gpu

A100 = GPUTarget("cuda", 80, 32)


def main() -> None:
    """Kernels are imported here, since they read the device's generation at import."""
    gpu.generation = lambda: 8
    from kernels.compile_attention import PLAIN, SHAPE, TYPES
    from peregrine.kernels.attention.blocks import SAME_BITS
    from peregrine.kernels.attention.dense_triton import decode_kernel, merge_kernel

    types = {name: kind for kind, names in TYPES.items() for name in names}
    types |= dict.fromkeys(("q", "out", "keys", "values"), "*bf16")
    for kernel, known, options in (
        (decode_kernel, SHAPE | PLAIN, SAME_BITS),
        (merge_kernel, SHAPE | PLAIN | {"MERGED": 1}, {"num_warps": 1}),
    ):
        constants = {name: value for name, value in known.items() if name in kernel.arg_names}
        signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
        code = triton.compile(ASTSource(kernel, signature, constants), target=A100, options=dict(options))
        assert code.asm["cubin"]
        print(json.dumps({"waits": "griddepcontrol" in code.asm["ptx"], "shared": code.metadata.shared}))


if __name__ == "__main__":
    main()
