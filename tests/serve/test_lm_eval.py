"""lm-eval's local-completions model, unchanged: its scores are the engine's own log-probabilities."""

from itertools import pairwise

import pytest

from peregrine import SamplingParams
from peregrine.engine.folders import find_model
from serve.conftest import Served

pytest.importorskip("lm_eval", reason="pip install --no-deps lm-eval, and tenacity, aiohttp")
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

PAIRS = [("Once upon a", " time"), ("Once upon a", " banana"), ("The falcon flew over the", " old house")]


@pytest.fixture(scope="module")
def model(server: Served) -> LocalCompletionsAPI:
    return LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model="merlin",
        tokenizer_backend="huggingface",
        tokenizer=str(find_model("merlin")),
        batch_size=2,
        max_length=2048,
    )


def ask(kind: str, arguments: list[tuple[object, ...]]) -> list[Instance]:
    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def test_loglikelihood(server: Served, model: LocalCompletionsAPI) -> None:
    told = model.loglikelihood(ask("loglikelihood", PAIRS), disable_tqdm=True)
    for (context, continuation), (score, greedy) in zip(PAIRS, told, strict=True):
        ids = server.llm.encode(context + continuation)
        start = len(server.llm.encode(context))
        asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        entries = server.llm.generate([ids], asked)[0].prompt_logprobs[start - 1 :]
        assert score == pytest.approx(sum(entry.logprob for entry in entries))
        assert greedy == all(entry.top[0][0] == entry.token_id for entry in entries)
    assert told[0][1]
    assert all(one > other for one, other in pairwise(score for score, _ in told[:2]))


def test_rolling(server: Served, model: LocalCompletionsAPI) -> None:
    text = "Once upon a time there was a falcon."
    [score] = model.loglikelihood_rolling(ask("loglikelihood_rolling", [(text,)]), disable_tqdm=True)
    ids = [server.llm.tokenizer.eos_id, *server.llm.encode(text)]
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    entries = server.llm.generate([ids], asked)[0].prompt_logprobs
    assert score == pytest.approx(sum(entry.logprob for entry in entries))


def test_generate_until(server: Served, model: LocalCompletionsAPI) -> None:
    asked = [("Once upon a time", {"until": ["."], "max_gen_toks": 30})]
    [text] = model.generate_until(ask("generate_until", asked), disable_tqdm=True)
    offline = server.llm.generate(asked[0][0], SamplingParams(temperature=0, max_tokens=30, stop=["."]))[0]
    assert text == offline.text
