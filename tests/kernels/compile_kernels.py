"""Compile the Triton kernels of sampling, the round and the models for an H200, on a machine without one.

Run as a script, outside the interpreter: `launch` compiles instead of launching, for the arguments it is given.
Prints the name of each kernel that came out as machine code.
"""

import re
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.compile_experts import RMSNorm, compile_experts
from kernels.exact_sampling import Params, sampling_of
from peregrine.kernels.linear.tiles import WIDE_OUTPUTS
from peregrine.kernels.runtime import gpu
from peregrine.spec.windows import WindowBuffer

H200 = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
}
# A matrix instruction that may read copied values before they are visible to it: no proxy fence since the last wait.
UNFENCED = re.compile(r"cp\.async\.wait(?:(?!fence\.proxy\.async|cp\.async\.wait).)*?wgmma\.mma_async", re.DOTALL)


def compile_kernel(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Compile as a launch would: pointers are multiples of 16, None is a constant, and so is 1 unless forbidden."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    aligned: dict[tuple[int], Any] = {}
    for place, (name, value) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[name], aligned[(place,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        elif value is None or (type(value) is int and value == 1 and not kernel.params[place].do_not_specialize):
            signature[name], constants[(place,)] = "constexpr", value
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
    for place, name in enumerate(kernel.arg_names):
        if place >= len(arguments):
            signature[name], constants[(place,)] = "constexpr", options.pop(name)
    code = triton.compile(ASTSource(kernel, signature, constants, aligned), target=H200, options=options)
    assert code.asm["cubin"]
    assert not UNFENCED.search(code.asm["ptx"]), f"{kernel.fn.__name__}: copies are multiplied without a fence"
    print(".".join(kernel.fn.__module__.split(".")[-2:]), kernel.fn.__name__)


def compile_rounds() -> None:
    """Every kernel of a round outside the models, for a batch of one row and for one of several."""
    from peregrine.kernels.round import (
        allot_triton,
        drafts_triton,
        ngram_triton,
        places_triton,
        tree_triton,
        verdict_triton,
    )
    from peregrine.kernels.round.tree import Frontier, Growth
    from peregrine.kernels.round.verdict import Ends, Nodes, Verdict
    from peregrine.kernels.sampling import adjust_triton as adjust_gpu
    from peregrine.kernels.sampling import filters_triton as filters_gpu
    from peregrine.kernels.sampling import logprobs_triton as logprobs_gpu
    from peregrine.kernels.sampling import scores_triton as scores_gpu
    from peregrine.kernels.sampling import triton as choose_gpu
    from peregrine.kernels.sampling.params import Context, Features, Masks
    from peregrine.synthetic import accept_triton as simulated_gpu

    def whole(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int64)

    vocab_size, page_size, places, depth, width = 40_000, 16, 2048, 3, 2
    for rows, nodes in ((1, depth + 1), (3, 9)):
        sampling = sampling_of([Params()] * rows)
        logits = torch.zeros(rows, nodes, vocab_size, dtype=torch.bfloat16)
        at, out, ids = whole(rows, nodes), whole(rows, nodes), whole(vocab_size)
        window = Nodes(*(whole(rows, nodes) for _ in range(4)), whole(rows))
        history, table = whole(rows, places), whole(rows, places // page_size)
        context = Context(history, whole(rows), whole(rows), window.tokens, window.ancestors)
        everything = Features(True, True, True, True, True, masked=True)
        words = torch.zeros(rows, nodes, -(-vocab_size // 32), dtype=torch.int32)
        sampling = replace(sampling, masks=Masks(torch.zeros(rows, dtype=torch.int32), words))
        adjusted = adjust_gpu.adjust(logits, at, sampling, everything, context)
        lowest = filters_gpu.lowest_kept(logits, sampling, adjusted)
        choose_gpu.best_tokens(logits, at, sampling, True, None, lowest, True, out, adjusted)
        logprobs_gpu.logprobs(logits, out, out, sampling.logprobs, 64)
        if rows > 1:  # other dtypes and fewer features
            filters_gpu.lowest_kept(logits, sampling)
            filters_gpu.lowest_kept(logits.float(), sampling)
            logprobs_gpu.logprobs(logits.float(), out, None, None, 0)
            choose_gpu.best_tokens(logits.float(), at, sampling, True, None, lowest, True, out)
        scores_gpu.gumbel(sampling.seeds, at, ids)
        scores_gpu.masses(logits.float(), lowest)
        choose_gpu.best_tokens(logits, at, sampling, False, None, None, True, out)
        choose_gpu.best_tokens(logits[:, :1, :999], at[:, :1], sampling, True, ids, None, False, out)

        ends = Ends(whole(rows), whole(rows), whole(rows, 4), torch.zeros(rows, dtype=torch.bool))
        verdict = Verdict(verdict_triton.commit(out, window, ends, history, depth))
        simulated_gpu.bend_choices(out, window, ends.past_lens, sampling.seeds, torch.ones(2).double(), vocab_size)
        places_triton.window_places(whole(rows), out, table, page_size, places)
        places_triton.path_places(whole(rows), whole(rows), history, table, page_size, depth + 1, 1, places)
        places_triton.ahead_places(whole(rows), table, page_size, 0, depth, width, places)
        ngram_triton.find_repeats(history, whole(rows), depth, 4, 2)
        buffer = WindowBuffer(rows, rows * nodes, nodes, torch.device("cpu"))
        said, odds = torch.zeros(rows, depth), torch.zeros(rows, depth, 11)
        allot_triton.allot_windows(said, odds, torch.zeros(10), *buffer.tensors)
        store = torch.zeros(2, 64, 8, 128, dtype=torch.bfloat16)
        drafts_triton.move_path([store, store], whole(rows), verdict, table, page_size)
        drafts_triton.keep_drafts(out, whole(rows), whole(rows), out[:, 1:], depth, [])
        drafts_triton.keep_drafts(out, whole(rows), whole(rows), out[:, 1:], whole(rows), [(out, out)] * 3)

        growth, frontier = Growth.begin(rows, depth, width, ids, sampling, Features(sampled=True)), None
        for level, count in enumerate((1, width)):
            fields = tree_triton.grow(growth, logits[:, :count], at[:, :count], frontier, level, (1e-3, -256.0))
            frontier = Frontier(*fields)
        tree_triton.select(growth, nodes, depth)


def compile_models() -> None:
    """Every kernel of the models, with all its optional parts and with none."""
    from peregrine.kernels.attention.kv_write_triton import rope_write_kv
    from peregrine.kernels.attention.plan import StoredKV
    from peregrine.kernels.linear.triton import TritonWeight
    from peregrine.kernels.norm import triton as norm_gpu
    from peregrine.kernels.residual import Residual
    from peregrine.kernels.residual import triton as residual_gpu
    from peregrine.kernels.rope.reference import DeferredRope

    def half(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.bfloat16)

    rows, hidden, inner = 3, 2048, 8192
    tokens, squares = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, 2, dtype=torch.int64)
    x, norm, many = half(rows, hidden), half(hidden), half(100, hidden)
    TritonWeight(half(WIDE_OUTPUTS, hidden), None).linear(x)
    sums = torch.zeros(100, 2, dtype=torch.int64)
    TritonWeight(half(inner, hidden), None).gated(Residual(many, many, sums, sums, 1e-5))
    residual = Residual(x, x, squares, torch.zeros_like(squares), 1e-5)
    TritonWeight(half(hidden, inner), half(hidden)).add(half(rows, inner), residual, RMSNorm(norm, 1e-5))
    residual_gpu.embed(tokens, half(99, hidden), norm)
    residual_gpu.finish_norm(x, squares, 1e-5)
    norm_gpu.rms_norm(x, norm, 1e-5)
    norm_gpu.norm_pair(tokens, half(99, hidden), norm, x, norm, 1e-5)

    heads, head_dim = half(rows, 6, 128), 128
    table = torch.zeros(99, head_dim)
    for head_norm, kind in ((None, torch.bfloat16), (half(head_dim), torch.float8_e4m3fn)):
        rope = DeferredRope(tokens, tokens, table, head_norm, head_norm, 1e-5)
        store = torch.zeros(16, 2, head_dim, dtype=kind)
        scale = None if head_norm is None else torch.ones(())
        kv = StoredKV(store, store, scale, scale)
        rope_write_kv(kv, tokens, heads[:, :2], heads[:, 2:4], heads[:, 4:], rope)


def compile_gather() -> None:
    """The exchange between ranks that share a GPU."""
    from peregrine.kernels.gather import Mailbox, gather, mailbox_words

    memory = [torch.zeros(mailbox_words(2), dtype=torch.int32) for _ in range(2)]
    gather(torch.zeros(2, 5, 2048), torch.zeros(5, 2048), Mailbox.of(1, memory))


if __name__ == "__main__":
    gpu.launch = compile_kernel
    compile_gather()
    compile_rounds()
    compile_models()
    compile_experts()
