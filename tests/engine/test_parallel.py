"""Tensor parallel: the bits of one process, and ends instead of hangs."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.parallel_cases import differences, drafters, families, requests
from peregrine.config import EngineConfig
from peregrine.engine import choices, parallel
from peregrine.engine.graphs import Graphs
from peregrine.engine.parallel import Follower, check_ranks, started_ranks
from peregrine.engine.rank_group import rank_devices
from peregrine.engine.sources import open_source
from peregrine.engine.window_choice import pick_windows
from peregrine.errors import ConfigError, EngineFault
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT
from peregrine.llm import LLM
from peregrine.models.decoder import Decoder
from peregrine.models.draft_heads import DraftHead, load_head
from peregrine.models.layers import Linear
from peregrine.models.loading import load_decoder
from peregrine.models.parallel import ALONE, Ranks
from peregrine.sampling import SamplingParams
from peregrine.spec.registry import DraftSource
from peregrine.synthetic.shapes import draw_here
from processes import is_running
from spec.block_heads import block_head, calm_model
from spec.harness import eagle3_head, eagle_head, mla_model, mtp_model, tiny_model

# One of each kind: KV heads shared by ranks, norms over all heads, gelu, experts, latents, trees, borrowed heads.
FOUR_RANKS = ("llama, untied", "olmo2", "gemma2", "gpt-oss", "deepseek-v2", "eagle tree", "mtp on latents and experts")
CPU = torch.device("cpu")
EXPERTS = SimpleNamespace(num_experts=4)
needs_numba = pytest.mark.skipif(not NUMBA_PRESENT, reason="CPU ranks need numba")
LONG = SamplingParams(max_tokens=150, ignore_eos=True, detokenize=False)


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "usable_cores", lambda: 64)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> "list[subprocess.Popen[bytes]]":
    """The ranks that are started."""
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(parallel.subprocess, "Popen", Noted)
    return started


@needs_numba
def test_every_family_and_drafter_has_the_bits_of_one_process(processes: "list[subprocess.Popen[bytes]]") -> None:
    engines = families() | drafters()
    two_ranks = [name for name in engines if name not in FOUR_RANKS]
    assert list(differences(engines, {2: two_ranks, 4: FOUR_RANKS}, requests(3, 4))) == []
    assert [process.returncode for process in processes] == [0] * 4


@needs_numba
def test_a_rank_that_is_killed_ends_every_request(processes: "list[subprocess.Popen[bytes]]") -> None:
    with LLM(tiny_model(), tensor_parallel=2, drafter="none", num_pages=200) as llm:
        other = llm.stream([4, 5, 6], LONG)
        first = llm.stream([1, 2, 3], LONG)
        processes[0].send_signal(signal.SIGINT)  # as from a terminal or a service's manager, which signal all processes
        processes[0].terminate()
        next(first), next(other)
        processes[0].kill()
        for stream in (first, other):
            with pytest.raises(EngineFault, match="a rank of this tensor-parallel engine is gone"):
                list(stream)
        with pytest.raises(EngineFault, match="is gone"):
            llm.generate([1, 2], LONG)
    assert processes[0].wait(1) == -signal.SIGKILL


@needs_numba
def test_ranks_end_when_rank_0_is_killed() -> None:
    program = (
        "import sys\n"
        "from peregrine.engine import parallel\n"
        "parallel.usable_cores = lambda: 2\n"
        "start = parallel.subprocess.Popen\n"
        "def noted(*given, **options):\n"
        "    process = start(*given, **options)\n"
        "    print(process.pid, flush=True)\n"
        "    return process\n"
        "parallel.subprocess.Popen = noted\n"
        "from peregrine import LLM, SamplingParams\n"
        f"llm = LLM({str(tiny_model())!r}, tensor_parallel=2, drafter='none', num_pages=200)\n"
        "for delta in llm.stream([1, 2, 3], SamplingParams(max_tokens=500, ignore_eos=True, detokenize=False)):\n"
        "    print('delta', flush=True)\n"
    )
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{program}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None
        rank = int(leader.stdout.readline())
        assert leader.stdout.readline() == "delta\n"
        leader.kill()
    for _ in range(600):
        if not is_running(rank):
            return
        time.sleep(0.1)
    os.kill(rank, signal.SIGKILL)
    pytest.fail("the other rank is still there")


def test_a_rank_that_waits_for_something_else_ends_after_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Pipe()
    ended: list[int] = []
    monkeypatch.setattr(parallel.os, "_exit", ended.append)
    watch = threading.Thread(target=parallel.end_after, args=(theirs, threading.Event(), 0.0))
    watch.start()
    ours.send("a message that nobody takes")
    watch.join(0.2)
    assert watch.is_alive()
    ours.close()
    watch.join(30)
    assert ended == [1]


def test_a_rank_that_cannot_start_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "BOOT", "raise SystemExit(3)")
    with (
        pytest.raises(ConfigError, match="tensor_parallel=2: rank 1: it ended while it started"),
        started_ranks([CPU] * 2),
    ):
        pass


@pytest.mark.parametrize(
    ("ranks", "change", "device", "said"),
    [
        (4, {"num_heads": 6, "num_kv_heads": 3}, "cpu", r"6 heads \(KV heads: 3\) .* choose one of 1, 2, 3, 6"),
        (7, {}, "cpu", "6 heads"),
        (6, {"experts": EXPERTS}, "cuda", "each rank needs an expert; use at most 4"),
        (3, {"num_heads": 65, "num_kv_heads": 65}, "cpu", "may use 2 cores"),
    ],
)
def test_impossible_numbers_of_ranks_are_refused(
    ranks: int, change: dict[str, Any], device: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "usable_cores", lambda: 2)
    monkeypatch.setattr(parallel, "NUMBA_PRESENT", True)
    asked, config = EngineConfig(tensor_parallel=ranks), replace(open_source(str(tiny_model())).config, **change)
    with pytest.raises(ConfigError, match=f"^tensor_parallel={ranks}: .*{said}"):
        check_ranks(asked, torch.device(device), config)


def test_ranks_need_the_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "NUMBA_PRESENT", False)
    with pytest.raises(ConfigError, match=r"tensor_parallel=2: needs compiled kernels.*pip install numba"):
        LLM(tiny_model(), tensor_parallel=2)


def test_what_ranks_hold_is_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "NUMBA_PRESENT", True)
    asked = EngineConfig(tensor_parallel=4)
    assert check_ranks(asked, CPU, open_source(str(tiny_model())).config) == "query heads 1+2+1+2; KV heads 1+1+1+1"
    assert check_ranks(asked, CPU, open_source(str(mla_model())).config).endswith("every rank holds all latents")


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("cuda:0", 4, "every rank needs a GPU of its own, and from cuda:0 on there are 2; use at most 2"),
        ("cuda:1", 2, "from cuda:1 on there is 1; use at most 1"),
    ],
)
def test_every_rank_needs_a_gpu_of_its_own(name: str, size: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    device = torch.device(name)
    with pytest.raises(ConfigError, match=f"^tensor_parallel={size}: .*{said}"):
        rank_devices(device, size)
    assert rank_devices(torch.device("cuda:0"), 2) == (torch.device("cuda:0"), torch.device("cuda:1"))


def test_ranks_on_gpus_record_rounds_of_fixed_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "TRITON_PRESENT", True)
    cuda, drafter = torch.device("cuda:0"), DraftSource("ngram", None)
    for ranks, windows in ((1, "auto"), (2, "fixed")):
        asked = EngineConfig(tensor_parallel=ranks)
        assert choices.pick_graphs(asked, cuda)[0] is True
        assert pick_windows(asked, drafter, cuda)[0] == windows


@pytest.mark.parametrize("folder", [eagle3_head, eagle_head, block_head, mtp_model])
def test_ranks_hold_their_rows_of_draft_heads(folder: Callable[[], Path]) -> None:
    """Every weight is the rank's part of the stored one, and linears are half as large as the whole ones."""
    model = {block_head: calm_model, mtp_model: mtp_model}.get(folder, tiny_model)()

    def load(ranks: Ranks) -> DraftHead:
        return load_head(folder(), load_decoder(model, pack=False, ranks=ranks), CPU, torch.float32, pack=False)

    whole = load(ALONE)
    for rank in range(2):
        own, held, total = load(Ranks(rank, 2)), 0, 0
        for path, part in own.named_modules():
            for name, parameter in part.named_parameters(recurse=False):
                expected = whole.get_parameter(f"{path}.{name}" if path else name)
                shard = part.__dict__.get("shard")
                assert torch.equal(parameter, expected if shard is None else shard.take(expected))
                if isinstance(part, Linear):
                    held, total = held + parameter.numel(), total + expected.numel()
        assert held <= 0.51 * total
        assert own.kv_shape.num_entries == whole.kv_shape.num_entries // 2


def test_a_graph_is_recorded_and_replayed_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rank 0 tells while it records is recorded by the others, so that a replay is one message."""
    ours, theirs = Pipe()
    made: list[str] = []
    capturing = SimpleNamespace(depth=0)

    @contextmanager
    def capture(*given: object, **options: object) -> Iterator[None]:
        capturing.depth += 1
        yield
        capturing.depth -= 1

    class Network:
        def note(self, place: int) -> None:
            made.append(f"{'recorded' if capturing.depth else 'done'} {place}")

    graph = SimpleNamespace(replay=lambda: made.append("replayed"))
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in (
        ("graph_pool_handle", lambda: None),
        ("Stream", lambda device: stream),
        ("current_stream", lambda device: stream),
        ("stream", lambda stream: nullcontext()),
        ("mem_get_info", lambda device: (0, 0)),
        ("CUDAGraph", lambda: graph),
        ("graph", capture),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    leader = Ranks(0, 2, None, (ours,))
    graphs: Graphs[None] = Graphs(CPU, leader)
    graphs.record("round", lambda: [leader.tell("network", "note", place) for place in (1, 2)] and None)
    leader.note("network", "note", 3)
    graphs.replay("round")
    follower = Follower(Ranks(1, 2, None, (theirs,)), CPU)
    follower.parts["network"], follower.graphs = Network(), Graphs(CPU)
    made.clear()
    follower.follow(), follower.follow()
    assert made == ["done 1", "done 2", "recorded 1", "recorded 2", "done 3", "replayed"]
    assert not theirs.poll()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_draw_their_rows_of_random_weights(size: int) -> None:
    """Sizes that divide nothing; every row of every weight is on some rank, and latents and routers on all."""
    config = open_source(str(mla_model())).config
    whole = Decoder(config)
    draw_here(whole, seed=1)
    for rank in range(size):
        own = Decoder(config, ranks=Ranks(rank, size))
        draw_here(own, seed=1)
        for path, part in own.named_modules():
            for name, parameter in part.named_parameters(recurse=False):
                expected = whole.get_parameter(f"{path}.{name}" if path else name)
                shard = part.__dict__.get("shard")
                assert torch.equal(parameter, expected if shard is None else shard.take(expected))
