"""Multi-head latent attention (MLA) on a GPU: correct outputs on real shapes, and bits that depend on nothing else.

Conformance as a whole runs in test_attention.py. How fast tiles read is printed.
"""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from peregrine.attention import Kernel, LayerAttention
from peregrine.attention.conformance.paging import LAYER, Forward, Layout, attend, lay_out
from peregrine.attention.conformance.problem import Row, answer, chain, tree
from peregrine.attention.kernel_choice import only
from peregrine.attention.triton_backend import TritonBackend
from peregrine.kernels.attention import DeferredMLARope, GpuPlan, Launch, mla_rope
from peregrine.kernels.linear import pack_per_head

LITE, V3 = (16, 1, 576, 512), (128, 1, 576, 512)  # DeepSeek-V2-Lite and V3
FLASH = (20, 1, 576, 512)  # GLM-4.7-Flash
RANK = 512
DEVICE = torch.device("cuda")
SHAPES = list(itertools.product(range(1, 65), range(1, 65)))
DECODE, CONTEXT = TritonBackend(only(Kernel.DECODE, SHAPES)), TritonBackend(only(Kernel.CONTEXT, SHAPES))
OWN = LayerAttention(192**-0.5, None, None)
BRANCHED = (-1, 0, 0, 1, 1, 2, 3, 3, 7, 8, 0, 10)
PROGRAMS = (1, 2, 3, 7, 16, 33, 100)
# Rows of a tile, and whether it is the Hopper kernel's, as `plan.py` chooses on a GPU. Only Triton serves trees.
TRITON, TILES = ((64, False),), ((64, False), (16, True), (64, True))


def on_gpu(rows: list[Row], dtype: torch.dtype = torch.bfloat16) -> list[Row]:
    return [row.to(DEVICE, dtype) for row in rows]


def opened(rows: list[Row]) -> Forward:
    """The rows laid out, with all their keys written."""
    forward = lay_out(rows, Layout())
    forward.store.write(LAYER, forward.metadata.slots, forward.k, forward.v)
    return forward


def outputs_by_tile(forward: Forward, tiles: tuple[tuple[int, bool], ...] = TILES) -> Iterator[tuple[str, Tensor]]:
    """(name, output) of the call with every tile height, by one program and by several."""
    from peregrine.kernels.attention.mla_triton import mla_attention
    from peregrine.kernels.attention.plan_triton import plan_gpu

    m = forward.metadata
    plan = plan_gpu(m.positions, m.q_starts, m.past_lens, m.page_table, m.page_size, m.ancestors)
    keys = forward.store.keys[LAYER]
    for tile, on_hopper in tiles:
        launches = [Launch(Kernel.DECODE, on_hopper, tile, programs) for programs in PROGRAMS]
        if tile == 64 or not on_hopper:
            launches.insert(0, Launch(Kernel.CONTEXT, on_hopper, tile, 0))
        for how in launches:
            yield str(how), mla_attention(forward.q, keys, plan, how, RANK, OWN.scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [LITE, FLASH, (64, 1, 576, 512), V3], ids=["v2-lite", "glm-flash", "kimi-k2", "v3"])
def test_outputs_on_real_shapes_are_within_the_bound(dtype: torch.dtype, heads: tuple[int, ...]) -> None:
    rows = on_gpu([chain(past, 4, heads) for past in (0, 127, 2040, 9000)], dtype)
    outs = attend(DECODE, rows, OWN)
    assert all(map(torch.equal, outs, attend(CONTEXT, rows, OWN)))
    for out, row in zip(outs, rows, strict=True):
        right = answer(row, OWN, dtype)
        assert bool(((out.double() - right.out).abs() <= right.bound).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("past", [100, 2040, 16894, 33000])  # at 16896 splits become wider
def test_neither_tiles_nor_programs_change_a_bit(past: int, dtype: torch.dtype) -> None:
    forward = opened(on_gpu([chain(past, 4, LITE), chain(past // 2, 4, LITE)], dtype))
    name, first = next(outputs_by_tile(forward))
    for other, out in outputs_by_tile(forward):
        assert torch.equal(out, first), f"{other} differs from {name}"


@pytest.mark.parametrize("past", [0, 120, 2045, 16893])
def test_every_node_of_a_tree_gives_what_its_path_gives(past: int) -> None:
    row = tree(past, BRANCHED, LITE)
    paths = [attend(DECODE, on_gpu([row.path_to(node)]), OWN)[0] for node in range(len(BRANCHED))]
    for name, out in outputs_by_tile(opened(on_gpu([row])), TRITON):
        assert torch.equal(out, torch.cat(paths)), name


@pytest.mark.parametrize("is_tree", [False, True])
def test_a_call_repeated_gives_the_same_bits(is_tree: bool) -> None:
    """Repeated, since a partial result read before it is written would differ only sometimes."""
    rows = [tree(past, BRANCHED, LITE) if is_tree else chain(past, 4, LITE) for past in (60, 700, 2300)]
    forward = opened(on_gpu(rows))
    for backend in (DECODE, CONTEXT):
        bound = backend.bind(forward.store, [OWN] * (LAYER + 1), forward.metadata)
        first = bound(LAYER, forward.q, forward.k, forward.v)
        same = torch.ones((), dtype=torch.bool, device=DEVICE)
        for _ in range(300):
            same &= (bound(LAYER, forward.q, forward.k, forward.v) == first).all()
        assert bool(same)


def test_other_rows_change_no_bit() -> None:
    row = chain(2040, 4, LITE)
    (alone,) = attend(DECODE, on_gpu([row]), OWN)
    for count in (2, 8, 32, 140):
        others = [chain(37 * i % 2500, 4, LITE, seed=1) for i in range(count - 1)]
        outs = attend(TritonBackend(), on_gpu([*others, row]), OWN)
        assert torch.equal(outs[-1], alone), count


@pytest.mark.parametrize("past", [2040, 16892, 84477])  # the last two cross to wider splits
def test_verify_reads_what_plain_decoding_reads(past: int) -> None:
    """What speculation needs: a window's queries equal single queries."""
    row = chain(past, 8, LITE)
    whole = attend(DECODE, on_gpu([row]), OWN)[0]
    assert torch.equal(attend(CONTEXT, on_gpu([row]), OWN)[0], whole)
    for i in range(8):
        assert torch.equal(attend(DECODE, on_gpu([row.at(i)]), OWN)[0], whole[i : i + 1])


def test_a_prompt_may_be_read_in_chunks() -> None:
    prompt = chain(0, 700, LITE)
    read = attend(CONTEXT, on_gpu([prompt]), OWN)[0]
    for a, b in itertools.pairwise((0, 1, 63, 64, 130, 400, 700)):
        piece = on_gpu([prompt.at(*range(a, b)), chain(5, 3, LITE)])
        assert torch.equal(attend(TritonBackend(), piece, OWN)[0], read[a:b])
    assert torch.equal(attend(DECODE, on_gpu([prompt.at(699)]), OWN)[0], read[699:])


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(
    "heads", [LITE, V3, FLASH, (3, 1, 576, 512), (8, 1, 320, 256)], ids=["v2-lite", "v3", "glm-flash", "3", "rank-256"]
)
def test_prompts_have_the_bits_of_the_triton_kernel(heads: tuple[int, ...], page_size: int) -> None:
    """Rows of any length after any past, NaN in all that no query sees; repeated, since a race differs sometimes."""
    from peregrine.kernels.attention.mla_triton import mla_attention
    from peregrine.kernels.attention.plan_triton import plan_gpu

    for rows in ([(0, 300)], [(16_880, 20), (30_000, 9)], [(0, 5), (100, 70), (63, 1), (64, 129), (8191, 64), (0, 33)]):
        forward = lay_out(on_gpu([chain(*row, heads) for row in rows]), Layout(page_size=page_size, poison=True))
        forward.store.write(LAYER, forward.metadata.slots, forward.k, forward.v)
        m, keys = forward.metadata, forward.store.keys[LAYER]
        plan = plan_gpu(m.positions, m.q_starts, m.past_lens, m.page_table, m.page_size, None)
        calls = [Launch(Kernel.CONTEXT, on_hopper, 64, 0) for on_hopper in (False, *[True] * 5)]
        right, *outs = (mla_attention(forward.q, keys, plan, how, heads[3], OWN.scale) for how in calls)
        assert bool(right.isfinite().all())
        assert all(torch.equal(out, right) for out in outs), rows


def test_a_captured_call_follows_lengths_that_change() -> None:
    forward = opened(on_gpu([chain(past, 4, LITE) for past in (2040, 300)]))
    m = forward.metadata
    graph = torch.cuda.CUDAGraph()

    def read() -> Tensor:
        return next(out for name, out in outputs_by_tile(forward, ((64, False),)) if "programs=33" in name)

    read()
    with torch.cuda.graph(graph):
        held = read()
    for back in (0, 1, 150, 290):
        m.past_lens.copy_(torch.tensor([2040 - back, 300 - back], device=DEVICE))
        m.positions.copy_((m.past_lens[:, None] + torch.arange(4, device=DEVICE)).flatten())
        graph.replay()
        assert torch.equal(held, next(outputs_by_tile(forward))[1]), back


def test_the_host_never_waits() -> None:
    forward, deferred = opened(on_gpu([chain(300, 4, LITE)])), rope_of(4)
    weight = pack_per_head(torch.randn(16, RANK, 128, device=DEVICE, dtype=torch.bfloat16))
    nope = torch.randn(4, 16, 128, device=DEVICE, dtype=torch.bfloat16)

    def call(backend: TritonBackend) -> Tensor:
        q = torch.empty_like(forward.q)
        weight.linear(nope, q[..., :RANK])
        bound = backend.bind(forward.store, [OWN] * (LAYER + 1), forward.metadata)
        return bound(LAYER, q, forward.k, forward.v, deferred)

    for backend in (DECODE, CONTEXT):
        call(backend)
        torch.cuda.set_sync_debug_mode("error")
        try:
            call(backend)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def rope_of(tokens: int) -> DeferredMLARope:
    torch.manual_seed(tokens)
    q_rope = torch.randn(tokens, 16, 192, device=DEVICE, dtype=torch.bfloat16)[..., 128:]
    positions = torch.randperm(5000, device=DEVICE)[:tokens]
    angles = torch.rand(5000, 32, device=DEVICE) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    norm = torch.rand(RANK, device=DEVICE).to(torch.bfloat16)
    return DeferredMLARope(q_rope, positions, positions, table, norm, 1e-6)


def test_one_launch_rotates_and_stores_as_the_twin_does() -> None:
    from peregrine.kernels.attention.mla_write_triton import mla_rope_write_kv

    deferred = rope_of(300)
    k = torch.randn(300, 1, 576, device=DEVICE, dtype=torch.bfloat16)
    q = torch.randn(300, 16, 576, device=DEVICE, dtype=torch.bfloat16)
    right_q, right_k = mla_rope(q, k, deferred)
    slots, held = torch.randperm(400, device=DEVICE)[:300], torch.zeros(400, 1, 576, device=DEVICE).bfloat16()
    rotated = mla_rope_write_kv(held, slots, q, k, deferred)
    torch.testing.assert_close(rotated, right_q)
    torch.testing.assert_close(held[slots], right_k)


@pytest.mark.parametrize(("inputs", "outputs"), [(128, 512), (512, 128)], ids=["w_uk", "w_uv"])
def test_heads_have_the_same_bits_in_any_batch(inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(4096, 16, inputs + 64, device=DEVICE, dtype=torch.bfloat16)[..., :inputs]
    weight = torch.randn(16, outputs, inputs, device=DEVICE, dtype=torch.bfloat16) / inputs**0.5
    packed = pack_per_head(weight)
    together = packed.linear(x)
    right = torch.einsum("nhk,hok->nho", x.double(), weight.double())
    torch.testing.assert_close(together.double(), right, atol=2e-2, rtol=1e-2)
    for count in (1, 4, 16, 17, 64, 128, 1000):
        assert torch.equal(packed.linear(x[7 : 7 + count]), together[7 : 7 + count]), count


@pytest.mark.parametrize(("rows", "q_len"), [(1, 1), (1, 4), (8, 1), (8, 4)])
def test_how_fast_tiles_read(rows: int, q_len: int, capsys: pytest.CaptureFixture[str]) -> None:
    """At 80k tokens of context: milliseconds and bytes of keys per second, printed."""
    from peregrine.kernels.attention.mla_triton import mla_attention

    context = 81920
    keys = torch.randn((1 + rows * context // 16) * 16, 1, 576, device=DEVICE, dtype=torch.bfloat16)
    table = 1 + torch.randperm(rows * context // 16, device=DEVICE).view(rows, -1)
    past = torch.full((rows,), context - q_len, device=DEVICE)
    positions = (past[:, None] + torch.arange(q_len, device=DEVICE)).flatten()
    plan = GpuPlan(positions, torch.arange(rows + 1, device=DEVICE) * q_len, past, table, 16, None, None)
    q = torch.randn(rows * q_len, 16, 576, device=DEVICE, dtype=torch.bfloat16)
    lines, first = [], None
    for tile, on_hopper in TILES:
        for programs in sorted({132 // rows, 264 // rows, 66 // rows}):
            how = Launch(Kernel.DECODE, on_hopper, tile, programs)

            def call(how: Launch = how) -> Tensor:
                return mla_attention(q, keys, plan, how, RANK, OWN.scale)

            first = call() if first is None else first
            assert torch.equal(call(), first)
            took = milliseconds(call)
            speed = keys.numel() * 2 / took / 1e9
            kernel = "Hopper's" if on_hopper else "Triton's"
            lines.append(f"{kernel} tile of {tile}, {programs} programs: {took:.4f} ms, {speed:.2f} TB/s")
    assert torch.equal(mla_attention(q, keys, plan, Launch(Kernel.CONTEXT, True, 64, 0), RANK, OWN.scale), first)
    with capsys.disabled():
        print(f"\nMLA decode, {rows} rows x {q_len} queries x 16 heads at 80k:", *lines, sep="\n  ")


def milliseconds(call: Callable[[], Tensor], repeats: int = 20) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    first.record()
    for _ in range(repeats):
        call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / repeats
