"""Prompt chunks by recorded forwards, padded to a recorded size: the same tokens as without."""

from collections.abc import Callable, Hashable
from itertools import accumulate

import pytest
import torch

from kernels.interpreted import needs_interpreter
from peregrine.attention.metadata import AttentionMetadata, LayerAttention
from peregrine.attention.triton_backend import TritonBackend
from peregrine.attention.window import Window
from peregrine.cache.store import KVShape, KVStore
from peregrine.engine.engine import Engine
from peregrine.engine.prompt_graphs import PromptGraphs, chunk_sizes, rows_of, size_for
from spec.harness import Case, build, cases, noisy_model, run


class CalledGraphs:
    """Stands for CUDA graphs on a CPU: a replay is the recorded call, on the same buffers."""

    def __init__(self) -> None:
        self.calls: dict[Hashable, Callable[[], None]] = {}
        self.replayed: list[Hashable] = []

    def record(self, key: Hashable, call: Callable[[], None]) -> int:
        call()
        self.calls[key] = call
        return 0

    def replay(self, key: Hashable) -> None:
        self.replayed.append(key)
        self.calls[key]()


def recorded(engine: Engine) -> CalledGraphs:
    """Let the engine read its prompts by recorded forwards."""
    graphs, seats, runner = CalledGraphs(), engine.runner.seats, engine.runner
    pages = -(-seats.max_places // seats.page_size)
    most = engine.policy.prefill_chunk
    prompts = PromptGraphs(runner.rounds, graphs, most, pages)  # type: ignore[arg-type]
    with torch.inference_mode():
        assert list(prompts.record()) == [0] * (len(prompts.sizes) + 1)
    engine.replay_chunks = prompts.replay
    return graphs


def long_cases(count: int) -> list[Case]:
    """Requests whose prompts have odd lengths, some of them longer than a chunk."""
    return [
        Case((case.prompt * 60)[: 37 * (number + 1)], case.params)
        for number, case in enumerate(cases(count, max_tokens=12))
    ]


@pytest.mark.parametrize(
    "options", [{}, {"drafter": str(noisy_model()), "num_drafts": 2}], ids=["plain", "draft model"]
)
@pytest.mark.parametrize("chunk", [96, 256])
def test_padded_chunks_change_no_token(options: dict[str, object], chunk: int) -> None:
    sizes = {"page_size": 8, "prefill_chunk": chunk, "max_rows": 4, **options}
    asked = long_cases(6)
    expected = run(build(**sizes).engine, asked)
    engine = build(**sizes).engine
    graphs = recorded(engine)
    outputs = run(engine, asked)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert [o.stats for o in outputs] == [o.stats for o in expected]
    assert ("chunk", chunk, rows_of(chunk) + 1) in graphs.replayed
    assert (("chunk", chunk, 1) in graphs.replayed) == (chunk == 96), "whole chunks of one prompt have no padding"


def test_a_chunk_is_padded_to_the_next_size_or_read_as_it_is() -> None:
    assert chunk_sizes(4096) == [64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096]
    assert chunk_sizes(100) == [64, 100]
    assert [rows_of(size) for size in (20, 64, 256, 4096)] == [1, 1, 5, 32]
    sizes = chunk_sizes(2048)
    assert size_for(sizes, 1, 1) == 64
    assert size_for(sizes, 2, 2) == 128, "a chunk of 64 has one prompt"
    assert size_for(sizes, 700, 5) == 768
    assert size_for(sizes, 1030, 1) is None, "the device would take longer for the padding than the host to launch"
    assert size_for(sizes, 1450, 1) is None
    assert size_for(sizes, 2047, 1) == 2048, "a prompt is read up to its last token"
    assert size_for(sizes, 33, 33) is None
    assert size_for(sizes, 2049, 1) is None


@needs_interpreter
def test_gpu_attention_takes_empty_rows_and_padding() -> None:
    """Forty tokens in a window of 64: their outputs are those they have alone."""
    store = KVStore(1, 8, 8, KVShape.of_heads(1, 16), torch.float32, torch.device("cpu"))
    q, k, v = (torch.randn(64, heads, 16) for heads in (2, 1, 1))
    pages = torch.arange(1, 6)[None]
    at = torch.arange(40)

    def attended(lens: list[int], positions: torch.Tensor, table: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        count = len(positions)
        metadata = AttentionMetadata(
            window=Window(len(lens), count, count, None),
            positions=positions,
            q_starts=torch.tensor([0, *accumulate(lens)]),
            past_lens=torch.zeros(len(lens), dtype=torch.int64),
            page_table=table,
            page_size=8,
            slots=slots,
            ancestors=None,
        )
        attend = TritonBackend().bind(store, [LayerAttention(0.25, None, None)], metadata)
        return attend(0, q[:count], k[:count], v[:count])

    alone = attended([40], at, pages, 8 + at)
    zeros = torch.zeros(24, dtype=torch.int64)
    padded = attended(
        [40, 0, 0, 24], torch.cat([at, zeros]), torch.cat([pages, torch.zeros(3, 5).long()]), torch.cat([8 + at, zeros])
    )
    assert torch.equal(padded[:40], alone)
    assert padded.isfinite().all(), "padding was not computed"
