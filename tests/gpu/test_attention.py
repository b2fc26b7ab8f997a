"""The Triton attention kernels on a GPU: correct outputs on real shapes, and bits that depend on nothing else.

Conformance runs beside the other tests in processes of its own, since most of its time is spent on compiling. Figures
without a bound are printed.
"""

import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from peregrine.attention import AttentionMetadata, Kernel, LayerAttention
from peregrine.attention.conformance.paging import LAYER, Forward, Layout, as_stored, attend, lay_out
from peregrine.attention.conformance.problem import Row, answer, chain, tree
from peregrine.attention.kernel_choice import only
from peregrine.attention.triton_backend import TritonBackend
from peregrine.cache.store import KVShape, KVStore
from peregrine.kernels.attention import Launch, StoredKV
from peregrine.kernels.attention.plan import PROMPT_TILE, TALL_TILE, TILE
from peregrine.kernels.runtime.cuda import nvrtc_ready
from peregrine.kernels.runtime.gpu import HOPPER

LLAMA = (32, 8, 128)  # query heads, KV heads, head dim of an 8B model
DEVICE = torch.device("cuda")
SHAPES = list(itertools.product(range(1, 65), range(1, 65)))
DECODE, CONTEXT = TritonBackend(only(Kernel.DECODE, SHAPES)), TritonBackend(only(Kernel.CONTEXT, SHAPES))
PARTS = 12  # processes that conformance is spread over
FP8 = torch.float8_e4m3fn
SCALE = LLAMA[2] ** -0.5
LAYER_ATTENTION = LayerAttention(SCALE, None, None)
BRANCHED = (-1, 0, 0, 1, 1, 2, 3, 3, 7, 8, 0, 10, 4, 5, 12, 14)


@pytest.fixture(scope="module", autouse=True)
def conformance() -> Iterator[list[subprocess.Popen[str]]]:
    """The kit in full, started first and read last."""
    command = [sys.executable, "-m", "peregrine.cli", "conformance", "--attention", "triton", "--json"]
    runs = [
        subprocess.Popen(
            [*command, "--device", "cuda", "--part", f"{part + 1}/{PARTS}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for part in range(PARTS)
    ]
    yield runs
    for run in runs:
        run.kill()


def on_gpu(rows: list[Row], dtype: torch.dtype = torch.bfloat16) -> list[Row]:
    return [row.to(DEVICE, dtype) for row in rows]


def opened(rows: list[Row], kv_dtype: torch.dtype | None = None) -> Forward:
    """The rows laid out, with all their keys and values written."""
    forward = lay_out(rows, Layout(kv_dtype=kv_dtype))
    forward.store.write(LAYER, forward.metadata.slots, forward.k, forward.v)
    return forward


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "heads"),
    [
        (torch.bfloat16, torch.bfloat16, LLAMA),
        (torch.bfloat16, FP8, LLAMA),
        (torch.float16, torch.float16, (32, 8, 64)),
        (torch.bfloat16, torch.bfloat16, (16, 8, 128)),
    ],
    ids=["llama-8b", "llama-8b-fp8", "llama-1b-fp16", "qwen3-0.6b"],
)
def test_outputs_on_real_shapes_are_within_the_bound(
    dtype: torch.dtype, kv_dtype: torch.dtype, heads: tuple[int, int, int]
) -> None:
    layer = LayerAttention(heads[2] ** -0.5, None, None)
    rows = on_gpu([chain(past, 4, heads) for past in (0, 127, 2040, 9000)], dtype)
    layout = Layout(kv_dtype=kv_dtype)
    outs = attend(DECODE, rows, layer, layout)
    assert all(map(torch.equal, outs, attend(CONTEXT, rows, layer, layout)))
    for out, row in zip(outs, rows, strict=True):
        right = answer(as_stored(row, kv_dtype), layer, dtype)
        assert bool(((out.double() - right.out).abs() <= right.bound).all())


def test_the_kernels_write_float8_as_the_store_does() -> None:
    torch.manual_seed(0)
    from peregrine.kernels.attention.kv_write_triton import write_kv

    stores = [KVStore(1, 4, 16, KVShape.of_heads(8, 128), FP8, DEVICE) for _ in range(2)]
    k, v = (torch.randn(64, 8, 128, device=DEVICE, dtype=torch.bfloat16) * 300 for _ in range(2))
    k[3, 0, 0] = torch.nan
    slots = torch.randperm(64, device=DEVICE)
    for store in stores:
        assert store.k_scales is not None
        assert store.v_scales is not None
        store.k_scales.fill_(0.75)
        store.v_scales.fill_(1.5)
    stores[0].write(0, slots, k, v)
    kv = stores[1]
    assert kv.k_scales is not None
    assert kv.v_scales is not None
    write_kv(StoredKV(kv.keys[0], kv.values[0], kv.k_scales[0], kv.v_scales[0]), slots, k, v)
    for one, other in ((stores[0].keys, stores[1].keys), (stores[0].values, stores[1].values)):
        assert torch.equal(one.float().nan_to_num(nan=999.0), other.float().nan_to_num(nan=999.0))


def test_a_value_that_is_not_finite_is_stored_as_zero_with_a_nan_key() -> None:
    """A query that does not see the key multiplies its value by zero, so the value must be finite."""
    from peregrine.kernels.attention.kv_write_triton import write_kv

    store = KVStore(1, 4, 16, KVShape.of_heads(2, 128), torch.bfloat16, DEVICE)
    k, v = (torch.randn(3, 2, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    v[1, 0, 7] = torch.inf
    write_kv(StoredKV(store.keys[0], store.values[0], None, None), torch.arange(3, device=DEVICE), k, v)
    assert bool(store.keys[0, 1, 0].isnan().all())
    assert not store.values[0, 1, 0].any()
    assert torch.equal(store.keys[0, [0, 2]], k[[0, 2]])
    assert torch.equal(store.values[0, :3, 1], v[:, 1])


@pytest.mark.parametrize("past", [100, 2040, 33000])
def test_the_number_of_programs_changes_no_bit(past: int) -> None:
    from peregrine.kernels.attention.plan_triton import plan_gpu
    from peregrine.kernels.attention.triton import dense_attention

    forward = opened(on_gpu([chain(past, 4, LLAMA), chain(past // 2, 4, LLAMA)]))
    m = forward.metadata
    plan = plan_gpu(m.positions, m.q_starts, m.past_lens, m.page_table, m.page_size, None)
    kv = StoredKV(forward.store.keys[LAYER], forward.store.values[LAYER], None, None)
    alone = dense_attention(forward.q, kv, plan, Launch(Kernel.CONTEXT, False, TILE, 0), SCALE, None, None)
    for programs in (1, 2, 3, 7, 16, 33, 100):
        how = Launch(Kernel.DECODE, False, TILE, programs)
        out = dense_attention(forward.q, kv, plan, how, SCALE, None, None)
        assert torch.equal(out, alone), programs


@pytest.mark.parametrize(
    ("heads", "dtype", "pasts", "q_len", "page_size"),
    [
        (LLAMA, torch.bfloat16, (2040,), 4, 16),
        (LLAMA, torch.bfloat16, (0, 3, 64, 127, 128, 129, 700), 4, 16),
        (LLAMA, torch.float16, (33000, 100), 1, 64),
        ((32, 4, 128), torch.bfloat16, (5000, 70), 8, 16),  # four tiles
        ((28, 4, 128), torch.bfloat16, (2040, 5), 5, 8),  # groups of seven
        ((20, 1, 64), torch.bfloat16, (1000, 0), 2, 128),  # a group of more than a tile
        ((32, 8, 64), torch.float16, (2040, 33), 4, 16),
    ],
)
def test_keys_copied_ahead_of_queries_change_no_bit(
    heads: tuple[int, int, int], dtype: torch.dtype, pasts: tuple[int, ...], q_len: int, page_size: int
) -> None:
    """`split_decode.cu`, with NaN in all that no query sees, by any number of programs."""
    if torch.cuda.get_device_capability()[0] != HOPPER or not nvrtc_ready():
        pytest.skip("a kernel for Hopper that NVRTC compiles")
    from peregrine.kernels.attention.plan_triton import plan_gpu
    from peregrine.kernels.attention.triton import dense_attention

    rows, scale = on_gpu([chain(past, q_len, heads) for past in pasts], dtype), heads[2] ** -0.5
    forward = lay_out(rows, Layout(page_size=page_size, poison=True, spare_pages=2))
    forward.store.write(LAYER, forward.metadata.slots, forward.k, forward.v)
    m = forward.metadata
    plan = plan_gpu(m.positions, m.q_starts, m.past_lens, m.page_table, m.page_size, None)
    kv = StoredKV(forward.store.keys[LAYER], forward.store.values[LAYER], None, None)
    alone = dense_attention(forward.q, kv, plan, Launch(Kernel.CONTEXT, False, TILE, 0), scale, None, None)
    assert not alone.isnan().any()
    for programs in (1, 3, 16, 33):
        out = dense_attention(forward.q, kv, plan, Launch(Kernel.DECODE, True, TILE, programs), scale, None, None)
        assert torch.equal(out, alone), programs


@pytest.mark.parametrize("is_tree", [False, True])
def test_a_call_repeated_gives_the_same_bits(is_tree: bool) -> None:
    """Repeated, since a partial result read before it is written would differ only sometimes."""
    pasts = (60, 700, 2300)
    rows = [tree(past, BRANCHED, LLAMA) if is_tree else chain(past, 4, LLAMA) for past in pasts]
    forward = opened(on_gpu(rows))
    bound = DECODE.bind(forward.store, [LAYER_ATTENTION] * (LAYER + 1), forward.metadata)
    first = bound(LAYER, forward.q, forward.k, forward.v)
    same = torch.ones((), dtype=torch.bool, device=DEVICE)
    for _ in range(500):
        same &= (bound(LAYER, forward.q, forward.k, forward.v) == first).all()
    assert bool(same)


def test_other_rows_change_no_bit() -> None:
    row = chain(2040, 4, LLAMA)
    (alone,) = attend(DECODE, on_gpu([row]), LAYER_ATTENTION)
    for count in (2, 8, 16, 32, 40):
        others = [chain(37 * i % 2500, 4, LLAMA, seed=1) for i in range(count - 1)]
        outs = attend(TritonBackend(), on_gpu([*others, row]), LAYER_ATTENTION)
        assert torch.equal(outs[-1], alone), count


def test_verify_reads_what_plain_decoding_reads() -> None:
    """What speculation needs: a window's queries equal single queries, and a prompt equals its chunks."""
    row = chain(2040, 16, LLAMA)
    whole = attend(DECODE, on_gpu([row]), LAYER_ATTENTION)[0]
    for i in range(16):
        assert torch.equal(attend(DECODE, on_gpu([row.at(i)]), LAYER_ATTENTION)[0], whole[i : i + 1])
    prompt = chain(0, 700, LLAMA)
    read = attend(CONTEXT, on_gpu([prompt]), LAYER_ATTENTION)[0]
    for a, b in itertools.pairwise((0, 1, 63, 64, 130, 400, 700)):
        piece = on_gpu([prompt.at(*range(a, b)), chain(5, 3, LLAMA)])
        assert torch.equal(attend(TritonBackend(), piece, LAYER_ATTENTION)[0], read[a:b])
    assert torch.equal(attend(DECODE, on_gpu([prompt.at(699)]), LAYER_ATTENTION)[0], read[699:])


def test_every_node_of_a_tree_gives_what_its_path_gives() -> None:
    for past in (0, 120, 2045):
        row = tree(past, BRANCHED, LLAMA)
        for backend in (DECODE, CONTEXT):
            out = attend(backend, on_gpu([row]), LAYER_ATTENTION)[0]
            for node in range(len(BRANCHED)):
                path = attend(DECODE, on_gpu([row.path_to(node)]), LAYER_ATTENTION)[0]
                assert torch.equal(path, out[node : node + 1]), (past, node)


def test_a_captured_call_follows_lengths_that_change() -> None:
    rows = on_gpu([chain(past, 4, LLAMA) for past in (2040, 300)])
    forward = opened(rows)
    m = forward.metadata
    bound = DECODE.bind(forward.store, [LAYER_ATTENTION] * (LAYER + 1), m)
    bound(LAYER, forward.q, forward.k, forward.v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = bound(LAYER, forward.q, forward.k, forward.v)
    for back in (0, 1, 150, 290):
        m.past_lens.copy_(torch.tensor([2040 - back, 300 - back], device=DEVICE))
        m.positions.copy_((m.past_lens[:, None] + torch.arange(4, device=DEVICE)).flatten())
        graph.replay()
        eager = CONTEXT.bind(forward.store, [LAYER_ATTENTION] * (LAYER + 1), replaced(m))
        assert torch.equal(held, eager(LAYER, forward.q, forward.k, forward.v)), back


def replaced(metadata: AttentionMetadata) -> AttentionMetadata:
    """A forward of the same lengths in memory of its own."""
    return replace(metadata, past_lens=metadata.past_lens.clone(), positions=metadata.positions.clone())


def test_the_host_never_waits() -> None:
    forward = opened(on_gpu([chain(300, 4, LLAMA)]))
    DECODE.bind(forward.store, [LAYER_ATTENTION] * (LAYER + 1), forward.metadata)(
        LAYER, forward.q, forward.k, forward.v
    )
    torch.cuda.set_sync_debug_mode("error")
    try:
        for backend in (DECODE, CONTEXT):
            bound = backend.bind(forward.store, [LAYER_ATTENTION] * (LAYER + 1), forward.metadata)
            bound(LAYER, forward.q, forward.k, forward.v)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_taller_tiles_of_the_context_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    """All tile heights are correct; prints which have the bits of 16 rows, and how fast they read."""
    from peregrine.kernels.attention.plan_triton import plan_gpu
    from peregrine.kernels.attention.triton import dense_attention

    row = chain(1000, 1024, LLAMA)
    forward = opened(on_gpu([row]))
    m = forward.metadata
    plan = plan_gpu(m.positions, m.q_starts, m.past_lens, m.page_table, m.page_size, None)
    kv = StoredKV(forward.store.keys[LAYER], forward.store.values[LAYER], None, None)
    some = [0, 1, 511, 1022, 1023]
    right = answer(row.at(*some).to(DEVICE, torch.bfloat16), LAYER_ATTENTION, torch.bfloat16)
    lines, reference = [], None
    for tile in (16, 32, 64, 128):

        def call(tile: int = tile) -> Tensor:
            return dense_attention(forward.q, kv, plan, Launch(Kernel.CONTEXT, False, tile, 0), SCALE, None, None)

        out = call()
        reference = out if reference is None else reference
        off = (out != reference).float().mean()
        assert bool(((out[some].double() - right.out).abs() <= right.bound).all()), tile
        lines.append(f"tile {tile:>3}: {milliseconds(call):.3f} ms, {float(off):.2%} of outputs differ from tile 16")
    with capsys.disabled():
        print("\ncontext kernel, 1024 queries after 1000 keys, 32/8 heads of 128:", *lines, sep="\n  ")


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("heads", [LLAMA, (28, 4, 128), (8, 8, 64)], ids=["llama-8b", "groups-of-7", "no-groups-d64"])
def test_prompts_on_hopper_have_the_bits_of_the_other_kernels(heads: tuple[int, int, int], page_size: int) -> None:
    """Rows of any length after any past, NaN in all that no query sees; repeated, since a race differs sometimes.

    Of small scores the top stays where a split's first block puts it, of large ones it moves on.
    """
    if torch.cuda.get_device_capability()[0] != HOPPER:
        pytest.skip("Hopper's own kernel")
    from peregrine.kernels.attention.plan_triton import plan_gpu
    from peregrine.kernels.attention.triton import dense_attention

    tall, own = (
        Launch(Kernel.CONTEXT, on_hopper, tile, 0) for on_hopper, tile in ((False, TALL_TILE), (True, PROMPT_TILE))
    )
    for rows in (
        [(0, 1100)],
        [(30_000, 70)],
        [(0, 5), (100, 700), (63, 1), (64, 129), (8191, 64), (4000, 31), (0, 300)],
    ):
        forward = lay_out(on_gpu([chain(*row, heads) for row in rows]), Layout(page_size=page_size, poison=True))
        forward.store.write(LAYER, forward.metadata.slots, forward.k, forward.v)
        kv = StoredKV(forward.store.keys[LAYER], forward.store.values[LAYER], None, None)
        m = forward.metadata
        plan = plan_gpu(m.positions, m.q_starts, m.past_lens, m.page_table, m.page_size, None)
        for scale in (SCALE, 12 * SCALE):
            right = dense_attention(forward.q, kv, plan, tall, scale, None, None)
            assert bool(right.isfinite().all())
            for _ in range(4):
                assert torch.equal(dense_attention(forward.q, kv, plan, own, scale, None, None), right), rows


def milliseconds(call: Callable[[], object], repeats: int = 20) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    first.record()
    for _ in range(repeats):
        call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / repeats


def test_conformance(conformance: list[subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]) -> None:
    worst, cases, failures = 0.0, 0, []
    trials: Counter[str] = Counter()
    for run in conformance:
        out, err = run.communicate()
        assert out, err[-3000:]
        report = json.loads(out)
        cases += report["cases"]
        for name, tally in report["properties"].items():
            trials[name] += tally["trials"]
            failures += [f"{name}: {where}" for where in tally["failures"]]
        worst = max(worst, report["properties"]["near the float64 answer"]["worst"] or 0.0)
    with capsys.disabled():
        print(f"\nconformance: {cases} cases, worst error / bound {worst:.3f}, {len(failures)} failures")
    assert not failures, "\n".join(failures[:20])
    assert cases >= 30
    assert all(trials.values()), trials
