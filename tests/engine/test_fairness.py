"""Prompts share a chunk: short ones do not wait for long ones, the oldest always gets on, and no token changes.

Nothing is timed: what counts is the number of steps until a request has its first token.
"""

import random
from collections.abc import Sequence
from itertools import count

import pytest
import torch

from peregrine.engine.engine import Engine
from peregrine.engine.prefill import next_chunks
from peregrine.engine.request import Request
from peregrine.sampling import SamplingParams
from spec.harness import Case, build, check_pages, eagle3_head, prompts, run, tokens

CHUNK, LONG = 64, 600
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=4, ignore_eos=True)
LONGS = [Case(prompt, PARAMS) for prompt in prompts(8, seed=1, low=LONG, high=LONG + 1)]
SHORTS = [Case(prompt, PARAMS) for prompt in prompts(16, seed=2, low=8, high=12)]


@torch.inference_mode()
def first_steps(engine: Engine, cases: Sequence[Case]) -> list[int]:
    """The step in which each request has its first token; all are there from the beginning."""
    requests = [engine.prepare(list(case.prompt), case.params) for case in cases]
    for request in requests:
        engine.enqueue(request)
    first: dict[int, int] = {}
    for step in count(1):
        if not engine.has_work:
            check_pages(engine)
            return [first[request.id] for request in requests]
        for delta in engine.step():
            if delta.token_ids:
                first.setdefault(delta.request_id, step)
        assert len(engine.running) <= engine.policy.max_rows
    raise AssertionError


@pytest.mark.parametrize("max_rows", [8, 24])
def test_short_requests_do_not_wait_for_long_prompts(max_rows: int) -> None:
    engine = build(max_rows=max_rows, prefill_chunk=CHUNK).engine
    first = first_steps(engine, [*LONGS, *SHORTS])
    assert max(first[8:]) <= 16  # eight prompts of 600 tokens take 75 steps
    assert sorted(first[:8]) == first[:8]  # long ones are read one after the other
    assert first[0] <= 2 * -(-LONG // CHUNK) + 1


def test_a_long_prompt_is_read_while_short_ones_keep_coming() -> None:
    engine = build(max_rows=4, prefill_chunk=CHUNK).engine
    shorts = [case for _ in range(12) for case in SHORTS]
    first = first_steps(engine, [*LONGS[:5], *shorts])
    assert first[0] <= 2 * -(-LONG // CHUNK) + 4  # half a chunk per step is the oldest one's; then it needs a row
    assert max(first[:5]) < max(first)  # not even the fifth, which had no row, comes last


@pytest.mark.parametrize("options", [{}, {"drafter": str(eagle3_head())}, {"page_size": 32, "prefill_chunk": 7}])
def test_sharing_changes_no_token(options: dict[str, object]) -> None:
    some = [*LONGS[:2], *SHORTS[:4], LONGS[2], *SHORTS[4:8]]
    outputs = run(build(**{"max_rows": 3, "prefill_chunk": CHUNK, **options}).engine, some)
    assert tokens(outputs) == tokens([run(build(prefill_chunk=1024).engine, [case])[0] for case in some])


def test_a_chunk_is_full_and_half_of_it_is_the_oldest_prompts() -> None:
    rng = random.Random(0)
    for _ in range(300):
        sizes = [rng.choice([1, 5, 40, 300, 5000]) + rng.randrange(3) for _ in range(rng.randint(1, 12))]
        requests = [Request(i, [1] * (n + 1), PARAMS, 0, n + 2) for i, n in enumerate(sizes)]
        size = rng.choice([1, 7, 64, 256])
        chunks = next_chunks({request: request.num_unread for request in requests}, size)
        read = {chunk.request.id: chunk.end - chunk.start for chunk in chunks}
        assert sum(read.values()) == min(size, sum(sizes))
        assert all(0 < length <= sizes[i] for i, length in read.items())
        assert read[0] >= min(sizes[0], size // 2)
        # Of two other prompts, one that is at most half as long as the other is not behind it.
        for i, length in read.items():
            if i and length:
                assert all(read.get(j, 0) == sizes[j] for j in range(len(sizes)) if 2 * sizes[j] < sizes[i])


@pytest.mark.parametrize(("size", "expected"), [(4224, 4096), (4095, 4095), (8192, 8192), (9000, 9000)])
def test_a_prompt_alone_is_cut_evenly(size: int, expected: int) -> None:
    alone, other = (Request(i, [1] * 20_001, PARAMS, 0, 20_002) for i in range(2))
    assert [chunk.num_tokens for chunk in next_chunks({alone: 20_000}, size)] == [expected]
    assert sum(chunk.num_tokens for chunk in next_chunks({alone: 20_000, other: 20_000}, size)) == size
