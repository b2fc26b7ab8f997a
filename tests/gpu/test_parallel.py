"""Tensor parallel on a GPU: two ranks give the tokens and log-probabilities of one, bit for bit.

Both ranks are on one GPU, where NCCL refuses to serve: they write into each other's memory. How weights are split, what
each rank computes, how rounds are recorded and how results are put together is the same as with a GPU each. NCCL is
tried with one rank.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from engine.parallel_cases import told
from gpu.random_models import deepseek, disturbed, llama, qwen3, qwen3_moe
from peregrine.engine.build import build_engine
from peregrine.engine.output import Output
from peregrine.engine.parallel import Started, started_ranks
from peregrine.engine.rank_group import nccl_group
from peregrine.grammar import GRAMMARS_PRESENT
from peregrine.llm import engine_config
from peregrine.sampling import SamplingParams
from spec.harness import Case, run

CUDA = torch.device("cuda:0")
SETTINGS: tuple[dict[str, object], ...] = (
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.9, "top_p": 0.9, "logprobs": 1},
    {"temperature": 0.0, "frequency_penalty": 0.3},
    {"temperature": 1.1, "top_k": 40, "min_p": 0.01},
)
Options = dict[str, object]


@pytest.fixture(scope="module")
def pair() -> Iterator[Started]:
    """This process and another one, which share the GPU."""
    with started_ranks([CUDA] * 2) as started:
        yield started


def chain(model: Path) -> Options:
    return {"model": model, "drafter": disturbed(model), "num_drafts": 3}


# Each with how many tokens it generates; models are made when a test is run.
ENGINES: dict[str, tuple[Callable[[], Options], int]] = {
    "llama": (lambda: chain(llama()), 48),
    "llama, plain steps": (lambda: {**chain(llama()), "graphs": False}, 16),
    "llama, float8, tree": (lambda: {**chain(llama()), "tree": (3, 2, 8), "kv_dtype": "float8"}, 24),
    "qwen3": (lambda: chain(qwen3()), 48),
    "merlin": (lambda: {"model": "merlin", "drafter": "eagle3", "dtype": "bfloat16"}, 32),  # ranks share its KV head
    "experts": (lambda: chain(qwen3_moe()), 24),
    "latents and experts": (lambda: {"model": deepseek(), "drafter": "mtp"}, 16),
    # Its inputs are split, and a rank's share of it alone would be split otherwise.
    "8b shape": (lambda: {"model": "shape:llama-3.1-8b", "drafter": "none"}, 24),
    "float16": (lambda: {"model": llama(), "drafter": "ngram", "dtype": "float16"}, 32),
}


def cases(num_tokens: int) -> list[Case]:
    """Three short prompts, and one that Hopper's kernel for many rows reads."""
    generator, made = torch.Generator().manual_seed(7), []
    for index, length in enumerate((5, 11, 3, 200)):
        prompt = torch.randint(2, 500, (length,), generator=generator).tolist()
        params = {"seed": index, "max_tokens": num_tokens, "ignore_eos": True, "detokenize": False} | SETTINGS[index]
        made.append(Case(tuple(prompt), SamplingParams(**params)))  # type: ignore[arg-type]
    return made


def outputs(options: Options, started: Started, num_tokens: int) -> list[Output]:
    given = {"device": "cuda:0", "max_rows": 4, "max_len": 320, "num_pages": 120, "windows": "fixed"}
    given |= {"graphs": bool(started.processes), "tensor_parallel": started.ranks.size, **options}
    if given["graphs"]:
        given |= {"row_sizes": (4,), "prefill_chunk": 64}
    model = str(given.pop("model"))
    engine = build_engine(engine_config(model, given), started).engine
    assert (engine.runner.graphs is not None) == given["graphs"]
    asked = cases(num_tokens)
    if model == "merlin" and GRAMMARS_PRESENT:  # whose masks go to all ranks
        digits = SamplingParams(temperature=0.8, seed=9, max_tokens=num_tokens, regex="[0-9]{99}", detokenize=False)
        asked.append(Case(asked[0].prompt, digits))
    return run(engine, asked)


@pytest.mark.parametrize("name", ENGINES)
@torch.inference_mode()
def test_two_ranks_give_the_bits_of_one(name: str, pair: Started) -> None:
    make, num_tokens = ENGINES[name]
    options = make()
    alone = outputs(options, Started(), num_tokens)
    assert len({tuple(output.token_ids) for output in alone}) == len(alone)
    together = outputs(options, pair, num_tokens)
    for index, (one, two) in enumerate(zip(alone, together, strict=True)):
        differ = [place for place, ids in enumerate(zip(one.token_ids, two.token_ids, strict=True)) if ids[0] != ids[1]]
        assert not differ, f"request {index} differs first at token {differ[0]} of {num_tokens}"
    assert told(together) == told(alone)


KILL = """
import os, sys
sys.path[:] = {path!r}
import torch
from peregrine.engine.build import build_engine
from peregrine.engine.parallel import started_ranks
from peregrine.grammar import GRAMMARS_PRESENT
from peregrine.llm import engine_config
from peregrine.sampling import SamplingParams

with torch.inference_mode(), started_ranks([torch.device("cuda:0")] * 2) as started:
    options = {{"device": "cuda:0", "max_rows": 1, "max_len": 320, "drafter": "none", "prefill_chunk": 64}}
    engine = build_engine(engine_config("merlin", {{**options, "tensor_parallel": 2}}), started).engine
    engine.enqueue(engine.prepare([1, 2, 3], SamplingParams(max_tokens=300, ignore_eos=True, detokenize=False)))
    for _ in range(5):
        engine.step()
    started.processes[0].kill()
    try:
        while engine.has_work:
            engine.step()
    except Exception as error:
        print("ended by", type(error).__name__, flush=True)
    os._exit(0)
"""


def test_a_rank_that_is_killed_ends_the_rounds_of_the_other() -> None:
    """In a process of its own: the device's error is the end of its context."""
    command = [sys.executable, "-c", KILL.format(path=sys.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.stdout.startswith("ended by"), done.stderr[-2000:]


def test_nccl_takes_the_calls_and_a_graph_repeats_them(tmp_path: Path) -> None:
    group = nccl_group(dist.FileStore(str(tmp_path / "store"), 1), 0, 1)
    own = torch.arange(24, device=CUDA).to(torch.bfloat16).view(4, 6)
    out, whole = torch.empty_like(own), own.clone()

    def collectives() -> None:
        group.gather(out, own)
        group.add(whole.view(torch.int32))

    stream = torch.cuda.Stream(CUDA)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        collectives()
    stream.synchronize()
    assert torch.equal(out, own)
    assert torch.equal(whole, own)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        collectives()
    own += 1
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, own)
    group.abort()
