"""What callers of LLM pass: each form works as in vLLM or transformers, or is refused in one clear line."""

import doctest
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import peregrine.llm
from peregrine import LLM, SamplingParams
from peregrine.errors import CheckpointError, ConfigError, EngineFault, PeregrineError
from peregrine.llm import engine_config
from peregrine.serve.job import chat_job, completion_job
from peregrine.serve.protocol import ChatBody, CompletionBody
from spec.harness import build, tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=6)
RECOMMENDED = {"temperature": 0.6, "top_p": 0.9, "top_k": 7, "do_sample": True, "num_beams": 4}
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The tiny model with recommended sampling parameters, opened by a Path and without a drafter."""
    folder = Path(shutil.copytree(tiny_model(), tmp_path_factory.mktemp("model") / "tiny"))
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | RECOMMENDED))
    with LLM(folder, drafter=None, num_pages=np.int64(200)) as made:
        yield made


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[int]:
    return llm.generate([5, 6, 7], GREEDY)[0].token_ids


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(PeregrineError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "prompts",
    [
        (5, 6, 7),
        range(5, 8),
        np.array([5, 6, 7]),
        np.array([5, 6, 7], dtype=np.int16),
        torch.tensor([5, 6, 7]),
        list(torch.tensor([5, 6, 7])),
        [np.int32(5), np.int64(6), 7],
        [torch.tensor([5, 6, 7])],
        torch.tensor([[5, 6, 7]]),
        (list(ids) for ids in [[5, 6, 7]]),
        iter([np.array([5, 6, 7])]),
    ],
    ids=lambda prompts: type(prompts).__name__,
)
def test_ids_may_come_in_any_list_array_or_tensor(llm: LLM, expected: list[int], prompts: Any) -> None:
    outputs = llm.generate(prompts, GREEDY)
    assert [o.token_ids for o in outputs] == [expected]
    assert outputs[0].prompt_token_ids == [5, 6, 7]
    assert {type(i) for i in outputs[0].prompt_token_ids} == {int}


def test_rows_of_a_matrix_and_items_of_a_generator_are_prompts(llm: LLM, expected: list[int]) -> None:
    two = llm.generate(torch.tensor([[5, 6, 7], [5, 6, 8]]), GREEDY, progress=False)
    assert [o.prompt_token_ids for o in two] == [[5, 6, 7], [5, 6, 8]]
    drawn = llm.generate((text for text in ("Once", "upon")), GREEDY, progress=False)
    assert [o.prompt_token_ids for o in drawn] == [llm.encode("Once"), llm.encode("upon")]
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        (b"Once", "prompt=b'Once': is bytes; decode them to text"),
        ([b"Once"], "prompt=b'Once': is bytes; decode them to text"),
        (HELLO, "is a list of messages; use llm.chat(messages)"),
        (HELLO[0], "is a message; use llm.chat([message])"),
        ({"prompt": "Once"}, "is a mapping; pass text, token ids"),
        (None, "prompt=None: is of the type NoneType; pass text, token ids"),
        (7, "prompt=7: is of the type int; pass text, token ids"),
        (torch.tensor(7), "is of the type Tensor; pass text, token ids"),
        (torch.tensor([1.5, 2.0]), "prompt=1.5: is not a token id"),
        ([5, "a"], "prompt='a': is not a token id"),
        ([5, True], "prompt=True: is not a token id"),
        ([5, 2**63], "is not a token id; ids run from 0 to 299"),
        ([1.0, 2.0], "prompt=1.0: is not a token id"),
        ([[[5]]], "prompt=[5]: is not a token id"),
        (torch.zeros(1, 2, 2, dtype=torch.int64), "has 2 dimensions; pass a list of ids"),
    ],
    ids=repr,
)
def test_other_prompts_are_refused_in_a_line(llm: LLM, prompts: Any, says: str) -> None:
    assert says in error_of(lambda: llm.generate(prompts, GREEDY, progress=False))


def test_parameters_may_be_a_dict_or_nothing_over_the_models_defaults(llm: LLM, expected: list[int]) -> None:
    assert llm.generate([5, 6, 7], {"temperature": 0, "max_tokens": 6})[0].token_ids == expected
    assert [o.token_ids for o in llm.generate([[5, 6, 7]], iter([{"temperature": 0, "max_tokens": 6}]))] == [expected]
    assert llm.sampling() == SamplingParams(temperature=0.6, top_p=0.9, top_k=7)
    assert llm.sampling({"top_p": 0.5, "seed": 3}) == SamplingParams(temperature=0.6, top_p=0.5, top_k=7, seed=3)
    assert llm.sampling(GREEDY) is GREEDY  # taken as they are
    seeded = SamplingParams(temperature=0.6, top_p=0.9, top_k=7, seed=4, max_tokens=9)
    assert llm.generate([5], {"seed": 4, "max_tokens": 9})[0].token_ids == llm.generate([5], seeded)[0].token_ids


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ("hot", "params='hot': is of the type str; pass SamplingParams or a dict"),
        (0.7, "params=0.7: is of the type float; pass SamplingParams or a dict"),
        ({"temprature": 1}, "temprature=1: is not a sampling parameter"),
        ({5: 1}, "5=1: is not a sampling parameter"),
        ([GREEDY, GREEDY], "params='2 sets': there are 1 prompts"),
        ([GREEDY, 5], "params=5: is of the type int"),
    ],
    ids=repr,
)
def test_other_parameters_are_refused_in_a_line(llm: LLM, params: Any, says: str) -> None:
    assert says in error_of(lambda: llm.generate([5], params))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": 3}, "model=3: is not text"),
        ({"model": b"merlin"}, "model=b'merlin': is not text"),
        ({"device": None}, "device=None: is not text; leave it out for the default"),
        ({"page_size": 16.0}, "page_size=16.0: is not an integer"),
        ({"max_rows": 2**70}, "must be between 0 and 4096"),
        ({"drafter": "none", "num_drafts": 3}, "num_drafts=3: there is no drafter; name one, or leave it out"),
        ({"tree": (3, 2, 8), "num_drafts": 0}, "num_drafts=0: the tree is 3 deep; leave one of them out"),
        ({"tree": "3,2,8"}, "tree='3,2,8': is not of the type TreeShape or None"),
        ({"tree": (3, "a", 8)}, "tree: width='a': is not an integer"),
        ({"prefix_cache": "no"}, "prefix_cache='no': is not of the type bool"),
        ({"max_stall_ms": -1}, "max_stall_ms=-1: is not a number of milliseconds, such as 20 or 100"),
        ({"host_cache": -1}, "host_cache=-1: is not a number of GiB, such as 0, 0.5 or 64"),
        ({"host_cache": float("nan")}, "host_cache=nan: is not a number of GiB"),
        ({"host_cache": 4, "prefix_cache": False}, "host_cache=4.0: it extends the prefix cache"),
        ({"generation_config": "vllm"}, "generation_config='vllm': use auto or none"),
        ({"num_draft": 3}, "num_draft=3: no such option; did you mean num_drafts?"),
    ],
    ids=repr,
)
def test_wrong_options_are_refused_in_a_line(options: dict[str, Any], says: str) -> None:
    assert says in error_of(lambda: engine_config(options.pop("model", "merlin"), options))


def test_options_may_be_paths_and_numbers_of_numpy() -> None:
    config = engine_config(Path("/models/a"), {"drafter": Path("b"), "num_drafts": np.int32(2), "tree": [2, 2, 4]})
    assert (config.model, config.drafter, config.num_drafts, config.tree.nodes) == ("/models/a", "b", 2, 4)
    assert engine_config("x", {"drafter": None}).drafter == "none"


def test_n_gives_each_prompt_as_many_generations(llm: LLM) -> None:
    several = SamplingParams(n=3, seed=2**63 - 1, max_tokens=9)
    outputs = llm.generate([[5, 6], [7]], several, progress=False)
    assert [o.prompt_token_ids for o in outputs] == [[5, 6]] * 3 + [[7]] * 3
    assert [o.seed for o in outputs] == [2**63 - 1, 0, 1] * 2
    alone = [llm.generate(o.prompt_token_ids, SamplingParams(seed=o.seed, max_tokens=9))[0] for o in outputs]
    assert [o.token_ids for o in outputs] == [o.token_ids for o in alone]
    mixed = llm.generate([[5], [6]], [{"n": 2, "max_tokens": 1}, {"max_tokens": 1}], progress=False)
    assert [o.prompt_token_ids for o in mixed] == [[5], [5], [6]]
    assert "n=3: a stream or a request is one generation" in error_of(lambda: next(llm.stream([5], several)))


def test_a_chat_goes_through_the_template(llm: LLM) -> None:
    one = llm.chat(HELLO, GREEDY)
    assert one[0].token_ids == llm.generate([llm.encode_chat(HELLO)], GREEDY)[0].token_ids
    good, bad, also = llm.chat([HELLO, [{"role": "user"}], HELLO], GREEDY, progress=False)
    assert bad.finish_reason == "error"
    assert "messages[0].content=None: is not a string" in str(bad.error)
    assert good.token_ids == also.token_ids == one[0].token_ids


@pytest.mark.parametrize("messages", ["Hello", HELLO[0], None, [], [["Hello"]]], ids=repr)
def test_what_is_no_chat_is_refused(llm: LLM, messages: Any) -> None:
    assert "message" in error_of(lambda: llm.chat(messages, GREEDY))


def test_log_probabilities_have_texts_beside_ids(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    output = llm.generate("Once upon", params)[0]
    assert output.logprobs is not None
    assert output.prompt_logprobs is not None
    for entry in (*output.logprobs, *output.prompt_logprobs):
        assert entry.text == llm.tokenizer.token_text(entry.token_id)
        assert entry.top_texts == tuple(llm.tokenizer.token_text(i) for i, _ in entry.top)
    written = output.to_json()["logprobs"]
    assert written[0]["top"][0] == {  # type: ignore[index]
        "token_id": output.token_ids[0],
        "text": output.logprobs[0].text,
        "logprob": output.logprobs[0].logprob,
    }
    bare = llm.generate([5], SamplingParams(max_tokens=1, logprobs=1, detokenize=False))[0].logprobs
    assert bare is not None
    assert (bare[0].text, bare[0].top_texts) == (None, ())


def test_a_fork_is_told_that_the_engine_is_elsewhere(llm: LLM, expected: list[int]) -> None:
    """Without the engine's thread every call would wait for ever."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        for call in (lambda: llm.generate([5, 6, 7], GREEDY), llm.drop_cached, lambda: next(llm.stream([5]))):
            try:
                call()
            except EngineFault as error:
                os.write(writing, f"{error}\n".encode())
        llm.close()  # does nothing
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as said:
        lines = said.read().splitlines()
    assert os.waitpid(child, 0)[1] == 0
    assert len(lines) == 3
    assert set(lines) == {peregrine.engine.loop.FORKED}
    assert llm.generate([5, 6, 7], GREEDY)[0].token_ids == expected  # the parent's goes on


def test_the_checkpoints_sampling_defaults_are_a_decision(llm: LLM, tmp_path: Path) -> None:
    decision = next(d for d in llm.decisions if d.field == "generation_config")
    assert decision.value == "temperature=0.6, top_k=7, top_p=0.9"
    assert decision.because == "generation_config.json; a request's own values win; it is not asked for num_beams"
    folder = Path(shutil.copytree(tiny_model(), tmp_path / "model"))
    path = folder / "generation_config.json"
    plain = build(folder)
    [decision] = [d for d in plain.decisions if d.field == "generation_config"]
    assert (plain.sampling_defaults, decision.value) == ({}, "none")
    path.write_text(json.dumps({"temperature": 0.5, "eos_token_id": 2}))
    built = build(folder, generation_config="none")
    assert built.sampling_defaults == {}
    assert built.model.eos_ids == (2,)  # ids are no sampling default
    path.write_text(json.dumps({"temperature": "hot"}))
    with pytest.raises(
        CheckpointError, match=r"generation_config\.json: temperature='hot': .* generation_config='none'"
    ):
        build(folder)
    assert build(folder, generation_config=None).sampling_defaults == {}


def test_bodies_of_the_server_are_completed_by_the_defaults(llm: LLM) -> None:
    job = completion_job(CompletionBody(prompt="Once", top_p=0.4, n=2, seed=3), llm)
    assert [(p.temperature, p.top_k, p.top_p, p.seed) for p in job.params] == [(0.6, 7, 0.4, 3), (0.6, 7, 0.4, 4)]
    job = chat_job(ChatBody.model_validate({"messages": HELLO, "temperature": 0, "top_k": -1}), llm)
    assert (job.params[0].temperature, job.params[0].top_k, job.params[0].max_tokens) == (0.0, 0, None)


def test_an_unknown_generation_config_is_refused_before_the_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match="use auto or none"):
        LLM("/no/such/folder", generation_config="fast")


def test_the_example_in_the_docstring_of_llm_runs() -> None:
    example = doctest.DocTestFinder(recurse=False).find(LLM, "LLM", globs={})[0]
    assert len(example.examples) >= 6
    result = doctest.DocTestRunner().run(example)
    assert (result.failed, result.attempted) == (0, len(example.examples))
