"""Identity on a GPU: in bfloat16, over 100,000 tokens, neither speculation nor batching nor paging changes a token.

The reference is plain decoding, one request at a time, from recorded rounds. Every run is compared with it token by
token: speculation by chains, trees, look-up and a draft model, sixteen rows, eager rounds, other page sizes, prefill of
tokens that the reference decoded, and preempted requests.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from gpu.random_models import VOCAB, disturbed, llama, qwen3, wide
from peregrine.engine.build import Built, build_engine
from peregrine.engine.engine import Engine
from peregrine.engine.output import Output
from peregrine.llm import engine_config
from peregrine.sampling import SamplingParams
from spec.harness import Case, run, tokens

ROWS, MAX_TOKENS = 16, 512
ALONE = 4  # requests of a run that takes one after the other
TREE = (5, 4, 24)
PARAMS: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 40, "min_p": 0.01},
)
Run = tuple[str, dict[str, object]]  # name, options


def build(model: str, **options: object) -> Built:
    """An engine for all rows or, with max_rows=1, for one; its graphs have that size.

    Windows have a fixed shape: beside models as small as these the engine would plan to draft nothing.
    """
    size = 1 if options.get("max_rows") == 1 else ROWS
    pages = (ROWS * 864) // int(str(options.get("page_size", 16)))
    wanted: dict[str, object] = {"device": "cuda", "max_rows": size, "row_sizes": (size,), "max_len": 832}
    wanted |= {"num_pages": pages, "drafter": "none", "windows": "fixed"}
    return build_engine(engine_config(model, wanted | options))


def cases(vocab_size: int) -> list[Case]:
    """Prompts of 3 to 300 tokens; every third repeats itself, so that look-up finds something."""
    generator, made = torch.Generator().manual_seed(7), []
    for index in range(ROWS):
        length = 3 + 19 * index
        drawn = torch.randint(2, vocab_size, (length,), generator=generator).tolist()
        prompt = (drawn[: length // 4 + 1] * 5)[:length] if index % 3 == 0 else drawn
        params = {"seed": index, "max_tokens": MAX_TOKENS, "ignore_eos": True, "detokenize": False}
        made.append(Case(tuple(prompt), SamplingParams(**(params | PARAMS[index % len(PARAMS)]))))  # type: ignore[arg-type]
    return made


def count_equal(name: str, got: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> int:
    """How many tokens were compared; all must be equal."""
    for row, (one, other) in enumerate(zip(got, expected, strict=True)):
        differ = [place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]]
        assert not differ, f"{name}: request {row} differs first at token {differ[0]}"
        assert len(one) == len(other), f"{name}: request {row} has {len(one)} tokens and not {len(other)}"
    return sum(map(len, got))


def runs_of(drafter: str) -> list[Run]:
    """Options that must change no token, spread over few runs."""
    chain: dict[str, object] = {"drafter": drafter}
    return [
        ("16 rows", {"page_size": 64}),
        ("16 rows, eager", {"graphs": False, "row_sizes": None}),
        ("chain of 3, 16 rows", chain | {"num_drafts": 3}),
        ("chain of 3, 16 rows, eager", chain | {"num_drafts": 3, "graphs": False, "page_size": 64}),
        ("chain of 5, alone", chain | {"num_drafts": 5, "max_rows": 1, "page_size": 64}),
        ("tree, 16 rows", chain | {"tree": TREE}),
        ("tree, alone", chain | {"tree": TREE, "max_rows": 1}),
        ("look-up, 16 rows", {"drafter": "ngram", "num_drafts": 4, "page_size": 64}),
    ]


def compare_all(model: str, drafter: str, vocab_size: int) -> int:
    """Run everything against the reference; the number of tokens compared."""
    some = cases(vocab_size)
    expected = tokens(run(build(model, max_rows=1).engine, some))
    assert len({tuple(row[-50:]) for row in expected}) == ROWS, (
        "all rows have the same text: the test would prove nothing"
    )
    compared = 0
    for name, options in runs_of(drafter):
        count = ALONE if options.get("max_rows") == 1 else ROWS
        outputs = run(build(model, **options).engine, some[:count])
        compared += count_equal(f"{name} of {model}", tokens(outputs), expected[:count])
        if "drafter" in options:
            assert right_drafts(outputs) > 0, f"{name}: no draft was ever right"
    compared += count_equal("preempted", *preempted(model, some, expected))
    compared += count_equal("read on", *read_on(model, some, expected, prefix_cache=True))
    compared += count_equal("read anew", *read_on(model, some, expected, prefix_cache=False))
    return compared


def right_drafts(outputs: Sequence[Output]) -> int:
    return sum(output.stats.correct for output in outputs)


Pair = tuple[list[list[int]], list[list[int]]]


def preempted(model: str, some: Sequence[Case], expected: list[list[int]]) -> Pair:
    """With pages for a third of the rows, requests are preempted, and prefilled again later."""
    outputs = run(build(model, num_pages=280, prefix_cache=False).engine, some)
    assert sum(output.stats.preemptions for output in outputs) > 0
    return tokens(outputs), expected


def read_on(model: str, some: Sequence[Case], expected: list[list[int]], prefix_cache: bool) -> Pair:
    """Texts continued from the middle of an output: tokens of rounds are now a prompt, cached or not."""
    engine = build(model, prefix_cache=prefix_cache).engine
    if prefix_cache:
        serve(engine, some)
    middle = MAX_TOKENS // 3
    later = [
        Case(case.prompt + tuple(row[:middle]), shortened(case.params, MAX_TOKENS - middle))
        for case, row in zip(some, expected, strict=True)
    ]
    outputs = serve(engine, later)
    cached = sum(output.stats.cached_tokens for output in outputs)
    assert (cached > ROWS * middle // 2) == prefix_cache
    return tokens(outputs), [row[middle:] for row in expected]


def shortened(params: SamplingParams, max_tokens: int) -> SamplingParams:
    kept = {name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "min_p", "seed")}
    return SamplingParams(**kept, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


@torch.inference_mode()
def serve(engine: Engine, some: Sequence[Case]) -> list[Output]:
    """Run every case to its end without clearing the prefix cache."""
    requests = [engine.prepare(list(case.prompt), case.params) for case in some]
    for request in requests:
        engine.enqueue(request)
    outputs: dict[int, Output] = {}
    while engine.has_work:
        outputs |= {delta.request_id: delta.output for delta in engine.step() if delta.output is not None}
    return [outputs[request.id] for request in requests]


@pytest.mark.parametrize("model", [llama, qwen3], ids=["llama", "qwen3"])
def test_50_000_tokens_of_each_random_model_are_the_same(model, capsys: pytest.CaptureFixture[str]) -> None:
    """Two models, 100,000 tokens."""
    folder: Path = model()
    compared = compare_all(str(folder), str(disturbed(folder)), VOCAB)
    with capsys.disabled():
        print(f"\nidentity, {model.__name__}: {compared} tokens compared, no difference")
    assert compared >= 50_000


def test_the_embedded_model_gives_the_same_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """With its trained draft head, so that long paths are accepted."""
    compared = compare_all("merlin", "eagle3", vocab_size=8192)
    with capsys.disabled():
        print(f"\nidentity, merlin: {compared} tokens compared, no difference")
    assert compared >= 50_000


def test_256_rows_and_prompts_cut_at_odd_places_give_the_same_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """A crowd whose prompts share recorded and plain chunks of any size, with and without drafts; then some alone."""
    model, crowd = str(qwen3()), 256
    generator, some = torch.Generator().manual_seed(8), []
    for index in range(crowd):
        prompt = torch.randint(2, VOCAB, (1 + 37 * index % 701,), generator=generator).tolist()
        params = {"seed": index, "max_tokens": 40, "ignore_eos": True, "detokenize": False}
        some.append(Case(tuple(prompt), SamplingParams(**(params | PARAMS[index % len(PARAMS)]))))  # type: ignore[arg-type]
    sizes: dict[str, object] = {"max_rows": crowd, "row_sizes": (64, 192, crowd), "num_pages": 13_000}
    expected = tokens(run(build(model, **sizes, prefill_chunk=4096).engine, some))
    drafts: dict[str, object] = {"drafter": str(disturbed(qwen3())), "num_drafts": 3}
    compared = 0
    for name, options in (
        ("chunks of 333", {"prefill_chunk": 333}),
        ("chunks of 1471, drafts", drafts | {"prefill_chunk": 1471}),
    ):
        compared += count_equal(name, tokens(run(build(model, **(sizes | options)).engine, some)), expected)
    few = slice(crowd - 8, crowd)
    compared += count_equal("alone", tokens(run(build(model, max_rows=1).engine, some[few])), expected[few])
    with capsys.disabled():
        print(f"\nidentity, 256 rows: {compared} tokens compared, no difference")
    assert compared > 20_000


def test_rounds_of_1_to_384_tokens_of_wide_layers_give_the_same_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """Linears of an 8B's widths, which several kernels share by the number of tokens: 128 rows that end one by one."""
    model, crowd = str(wide()), 128
    generator, some = torch.Generator().manual_seed(9), []
    for index in range(crowd):
        prompt = torch.randint(2, VOCAB, (1 + 37 * index % 301,), generator=generator).tolist()
        params = {"seed": index, "max_tokens": 24 + index // 2, "ignore_eos": True, "detokenize": False}
        some.append(Case(tuple(prompt), SamplingParams(**(params | PARAMS[index % len(PARAMS)]))))  # type: ignore[arg-type]
    sizes: dict[str, object] = {"max_rows": crowd, "row_sizes": (32, 48, 64, 80, 96, crowd), "num_pages": 5_000}
    few = slice(crowd - 8, crowd)
    alone, compared = tokens(run(build(model, max_rows=1).engine, some[few])), 0
    assert len({tuple(row[-20:]) for row in alone}) == len(alone)
    expected = tokens(run(build(model, **sizes).engine, some))
    compared += count_equal("alone", alone, expected[few])
    drafts: dict[str, object] = {"drafter": str(disturbed(wide()))}
    for name, options in (
        ("one draft, chunks of 200", drafts | {"num_drafts": 1, "prefill_chunk": 200}),
        ("two drafts, chunks of 333", drafts | {"num_drafts": 2, "prefill_chunk": 333}),
    ):
        compared += count_equal(name, tokens(run(build(model, **(sizes | options)).engine, some)), expected)
    with capsys.disabled():
        print(f"\nidentity, wide layers: {compared} tokens compared, no difference")
    assert compared > 14_000
