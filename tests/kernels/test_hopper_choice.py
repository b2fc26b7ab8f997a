"""Which kernel the sizes of a problem allow, with which tile and how many programs: pure functions, without a GPU."""

from dataclasses import replace

import pytest
import torch

from peregrine.kernels.attention import Gpu, Kernel, Launch, Problem, context_launch, decode_launch
from peregrine.kernels.attention.plan import hopper_tile

H200 = Gpu(is_cuda=True, is_hopper=True, num_sms=132, compiles_cuda=True)
NO_NVRTC = replace(H200, compiles_cuda=False)
BLACKWELL = Gpu(is_cuda=True, is_hopper=False, num_sms=148, compiles_cuda=False)
INTERPRETER = Gpu(is_cuda=False, is_hopper=False, num_sms=16, compiles_cuda=False)
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
LLAMA = Problem(
    num_rows=1,
    num_tokens=4,
    q_len=4,
    max_q_len=4,
    num_keys=4096,
    page_size=16,
    num_heads=32,
    num_kv_heads=8,
    key_dim=128,
    value_dim=128,
    is_mla=False,
    dtype=BF16,
    kv_dtype=BF16,
    is_tree=False,
    has_window=False,
    has_sinks=False,
)
DEEPSEEK = replace(LLAMA, num_heads=16, num_kv_heads=1, key_dim=576, value_dim=512, is_mla=True)


def window(problem: Problem, rows: int, q_len: int = 4) -> Problem:
    return replace(problem, num_rows=rows, num_tokens=rows * q_len, q_len=q_len, max_q_len=q_len)


def decode(problem: Problem, gpu: Gpu = H200) -> Launch | None:
    return decode_launch(problem, gpu, 64)


def split_kv(tile: int, programs: int, on_hopper: bool = False) -> Launch:
    return Launch(Kernel.DECODE, on_hopper, tile, programs)


@pytest.mark.parametrize(
    ("problem", "gpu", "launch"),
    [
        (window(LLAMA, 1), H200, split_kv(16, 16, on_hopper=True)),  # one program on each of 132 multiprocessors
        (replace(window(LLAMA, 1), num_keys=1024), H200, split_kv(16, 8, on_hopper=True)),  # no more than splits
        (replace(window(LLAMA, 1), num_kv_heads=1), H200, split_kv(16, 32)),  # eight tiles for the KV head
        (window(LLAMA, 4), H200, split_kv(16, 4, on_hopper=True)),
        (window(LLAMA, 5), H200, split_kv(16, 6)),  # too few programs for each tile to be the fastest
        (replace(window(LLAMA, 8), key_dim=64, value_dim=64), H200, split_kv(16, 4, on_hopper=True)),  # two on each
        (window(LLAMA, 1), NO_NVRTC, split_kv(16, 32)),  # no more programs than splits
        (window(LLAMA, 4), NO_NVRTC, split_kv(16, 8)),  # two programs on each of 132 multiprocessors
        (replace(window(LLAMA, 1), is_tree=True), H200, split_kv(16, 33)),
        (window(LLAMA, 16), H200, split_kv(16, 2)),
        (window(LLAMA, 17), H200, split_kv(16, 0, on_hopper=True)),  # tiles alone fill the device
        (window(LLAMA, 17, 16), H200, split_kv(64, 0, on_hopper=True)),
        (window(LLAMA, 17, 64), H200, split_kv(64, 0, on_hopper=True)),
        (window(LLAMA, 17, 65), H200, None),
        (replace(window(LLAMA, 4), q_len=None), H200, split_kv(16, 4, on_hopper=True)),  # rows of up to 4
        (replace(window(LLAMA, 32), q_len=None), H200, split_kv(16, 0, on_hopper=True)),
        (replace(window(LLAMA, 4, 17), q_len=None), H200, None),
        (replace(window(DEEPSEEK, 1), q_len=None), H200, None),
        (window(LLAMA, 32), BLACKWELL, None),
        (window(LLAMA, 8), BLACKWELL, split_kv(16, 4)),
        (replace(window(LLAMA, 1), num_keys=128), H200, None),  # one split
        (replace(window(LLAMA, 1), num_keys=128, is_tree=True), H200, split_kv(16, 9)),  # 8 paths more
        (window(LLAMA, 1), INTERPRETER, split_kv(16, 4)),
        (window(DEEPSEEK, 1, 1), H200, split_kv(16, 32, on_hopper=True)),
        (window(DEEPSEEK, 1, 4), H200, split_kv(64, 32, on_hopper=True)),
        (window(DEEPSEEK, 8, 4), H200, split_kv(64, 16, on_hopper=True)),
        (window(DEEPSEEK, 66, 4), H200, split_kv(64, 2, on_hopper=True)),
        (window(DEEPSEEK, 67, 4), H200, None),
        (replace(window(DEEPSEEK, 8, 4), is_tree=True), H200, split_kv(64, 16)),
        (replace(window(DEEPSEEK, 8, 4), dtype=torch.float32, kv_dtype=torch.float32), H200, split_kv(16, 4)),
        (window(DEEPSEEK, 8, 4), BLACKWELL, split_kv(64, 18)),
        (window(DEEPSEEK, 1, 1), INTERPRETER, split_kv(16, 16)),
    ],
)
def test_decode(problem: Problem, gpu: Gpu, launch: Launch | None) -> None:
    assert decode(problem, gpu) == launch


@pytest.mark.parametrize(
    ("problem", "gpu", "tile", "on_hopper"),
    [
        (window(LLAMA, 1, 1), H200, 16, False),
        (window(LLAMA, 1, 16), H200, 64, False),  # 64 query rows of each KV head
        (window(LLAMA, 1, 15), H200, 16, False),
        (replace(window(LLAMA, 1, 16), kv_dtype=FP8), H200, 16, False),
        (replace(window(LLAMA, 1, 16), is_tree=True), H200, 16, False),
        (window(DEEPSEEK, 1, 1), H200, 64, True),
        (replace(window(DEEPSEEK, 1, 1), is_tree=True), H200, 64, False),
        (replace(window(DEEPSEEK, 1, 1), dtype=torch.float32), BLACKWELL, 16, False),
        (window(DEEPSEEK, 1, 2), INTERPRETER, 32, False),
        (window(DEEPSEEK, 1, 200), INTERPRETER, 64, False),
    ],
)
def test_context(problem: Problem, gpu: Gpu, tile: int, on_hopper: bool) -> None:
    assert context_launch(problem, gpu) == Launch(Kernel.CONTEXT, on_hopper, tile, 0)


def test_hoppers_dense_kernel_serves_where_its_tiles_fill_the_device() -> None:
    """Two programs fit on a multiprocessor: with too many tiles for split-KV, one program reads all keys of a tile."""
    taken = {rows: decode(window(LLAMA, rows)) for rows in (1, 8, 16, 17, 32)}
    assert [rows for rows, launch in taken.items() if launch and launch.on_hopper and not launch.programs] == [17, 32]
    few_heads = {rows: decode(window(replace(LLAMA, num_kv_heads=4), rows)) for rows in (8, 16, 33, 34)}
    assert [rows for rows, launch in few_heads.items() if launch and launch.on_hopper and not launch.programs] == [34]


@pytest.mark.parametrize(
    "other",
    [
        {"has_window": True},
        {"has_sinks": True},
        {"is_tree": True},
        {"page_size": 4},
        {"kv_dtype": FP8},
        {"key_dim": 80, "value_dim": 80},
        {"num_heads": 128, "num_kv_heads": 1},
    ],
    ids=["window", "sinks", "tree", "small pages", "float8", "head dim", "wide group"],
)
def test_uncommon_settings_are_left_to_triton(other: dict[str, object]) -> None:
    common = decode(window(LLAMA, 64))
    assert common is not None
    assert common.on_hopper
    launch = decode(replace(window(LLAMA, 64), **other))  # type: ignore[arg-type]
    assert launch is None or not launch.on_hopper


@pytest.mark.parametrize(("q_len", "group", "tile"), [(1, 4, 16), (4, 4, 16), (5, 4, 32), (4, 16, 64), (64, 8, 64)])
def test_a_tile_holds_all_queries_of_a_row_up_to_64(q_len: int, group: int, tile: int) -> None:
    assert hopper_tile(q_len, group) == tile


@pytest.mark.parametrize(
    ("rank", "rope", "other", "taken"),
    [
        (512, 64, {}, True),
        (128, 64, {}, True),
        (192, 64, {}, False),  # eight warps add 128 entries at a time
        (512, 32, {}, False),
        (384, 64, {}, False),  # partials lie in rows of 512
        (512, 128, {}, False),  # more than shared memory holds
        (512, 64, {"is_tree": True}, False),
        (512, 64, {"page_size": 4}, False),
    ],
)
def test_hopper_needs_mla_sizes_of_whole_columns(rank: int, rope: int, other: dict[str, object], taken: bool) -> None:
    problem = replace(DEEPSEEK, value_dim=rank, key_dim=rank + rope, **other)  # type: ignore[arg-type]
    launch = decode(problem)
    assert launch is not None
    assert launch.on_hopper == taken == context_launch(problem, H200).on_hopper
