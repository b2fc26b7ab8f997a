"""The offline interface: batches, streams, errors, and clean-up."""

import asyncio
import functools
import operator
import subprocess
import sys

import pytest
import torch

from peregrine import LLM, SamplingParams
from peregrine.engine.output import Delta
from peregrine.errors import ConfigError, EngineFault, RequestError
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT, load_kernels
from spec.harness import build, check_pages, noisy_model, tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm():
    with LLM(str(tiny_model()), drafter=str(noisy_model()), num_drafts=3, num_pages=200) as made:
        yield made


def test_outputs_come_in_the_order_of_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["Once upon a time", [5, 6, 7], "The falcon"]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.prompt_token_ids for o in outputs] == [llm.encode(p) for p in prompts]
    assert all(o.text == llm.tokenizer.decode(o.token_ids) for o in outputs)
    assert "3/3" in capsys.readouterr().err  # the progress bar


def test_one_prompt_is_a_batch_of_one(llm: LLM) -> None:
    for prompt in ("Once upon a time", [5, 6, 7]):
        assert len(llm.generate(prompt, GREEDY)) == 1


def test_parameters_may_differ_by_prompt(llm: LLM) -> None:
    outputs = llm.generate([[5], [5]], [GREEDY, SamplingParams(temperature=0, max_tokens=3)], progress=False)
    assert [len(o.token_ids) for o in outputs] == [12, 3]
    with pytest.raises(RequestError, match="there are 2 prompts"):
        llm.generate([[5], [5]], [GREEDY])


def test_one_bad_prompt_does_not_disturb_the_others(llm: LLM) -> None:
    good, bad, also = llm.generate([[5, 6], [], [7]], GREEDY, progress=False)
    assert bad.finish_reason == "error"
    assert "prompt=[]: is empty" in str(bad.error)
    assert good.token_ids == llm.generate([5, 6], GREEDY)[0].token_ids
    assert also.finish_reason == "length"
    with pytest.raises(RequestError, match="is empty"):
        llm.generate([[]], GREEDY)


def test_a_stream_adds_up_to_the_output(llm: LLM) -> None:
    deltas = list(llm.stream("Once upon", GREEDY))
    whole = llm.generate("Once upon", GREEDY)[0]
    final = deltas[-1].output
    assert final is not None
    assert "".join(d.text for d in deltas) == final.text == whole.text
    assert functools.reduce(operator.iadd, (d.token_ids for d in deltas), []) == whole.token_ids
    assert functools.reduce(operator.iadd, (d.drafted for d in deltas), []) == final.drafted
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)


def test_a_stream_of_tokens_holds_what_it_gave(llm: LLM) -> None:
    """Its deltas are read when they are taken: they are equal, copied and printed as any others."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    deltas = list(llm.stream([5, 6], params))
    output = deltas[-1].output
    assert output is not None
    assert output.token_ids == llm.generate([5, 6], params)[0].token_ids
    assert [token for delta in deltas for token in delta.token_ids] == output.token_ids
    assert len(deltas) > 1
    for delta in deltas:
        assert Delta(*delta) == delta
        assert type(delta) is Delta


def test_closing_a_stream_aborts_its_request(llm: LLM) -> None:
    stream = llm.stream([5], SamplingParams(temperature=0, max_tokens=500, ignore_eos=True))
    next(stream)
    stream.close()
    llm.loop.call(lambda: None)
    while llm.engine.has_work:
        pass
    check_pages(llm.engine)


def test_async_streams_run_side_by_side(llm: LLM) -> None:
    async def whole(prompt: list[int]) -> list[int]:
        return [token async for delta in llm.astream(prompt, GREEDY) for token in delta.token_ids]

    async def both() -> list[list[int]]:
        return await asyncio.gather(whole([5, 6]), whole([7]), whole([8, 9, 10]))

    expected = [o.token_ids for o in llm.generate([[5, 6], [7], [8, 9, 10]], GREEDY, progress=False)]
    assert asyncio.run(both()) == expected


def test_chat_goes_through_the_template(llm: LLM) -> None:
    ids = llm.encode_chat([{"role": "user", "content": "Hello"}])
    assert llm.tokenizer.decode(ids) == "User: Hello\nAssistant:"


def test_decisions_have_reasons(llm: LLM) -> None:
    assert {d.field for d in llm.decisions} == {
        *("model", "device", "dtype", "max_len", "generation_config", "drafter", "threads", "attention", "graphs"),
        *("page_size", "max_rows", "prefill_chunk", "grammar_mask_bytes", "num_pages", "lag"),
        *("windows", "tree", "num_drafts", "costs"),
    }
    assert all(d.because for d in llm.decisions)


def test_unknown_options_are_named() -> None:
    with pytest.raises(ConfigError, match="speed='ludicrous'"):
        LLM(str(tiny_model()), speed="ludicrous")


def test_an_engine_fault_reaches_every_caller_and_nothing_hangs() -> None:
    with LLM(str(tiny_model()), drafter="none", num_pages=100) as llm:

        def explode(*_: object) -> None:
            raise MemoryError("no more")

        llm.engine.runner.launch = explode  # type: ignore[method-assign]
        with pytest.raises(EngineFault, match="MemoryError: no more"):
            llm.generate([[1], [2]], GREEDY, progress=False)
        with pytest.raises(EngineFault, match="no more"):
            llm.generate([1], GREEDY)


def test_a_closed_engine_says_so() -> None:
    llm = LLM(str(tiny_model()), drafter="none", num_pages=100)
    llm.close()
    with pytest.raises(EngineFault, match="closed"):
        llm.generate([1], GREEDY)


def test_text_can_be_left_out(llm: LLM) -> None:
    output = llm.generate([5, 6], SamplingParams(temperature=0, max_tokens=12, detokenize=False))[0]
    assert output.text == ""
    assert output.token_ids == llm.generate([5, 6], GREEDY)[0].token_ids
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(detokenize=False, stop="x")


def test_build_is_what_llm_runs() -> None:
    assert build().engine.limits.num_drafts == 0


def test_no_drafts_is_plain_decoding() -> None:
    built = build(drafter=str(noisy_model()), num_drafts=0)
    assert built.engine.limits.num_drafts == 0
    assert ("none", "num_drafts=0") in [(d.value, d.because) for d in built.decisions if d.field == "drafter"]


def test_exit_without_close_is_quiet() -> None:
    """The process ends cleanly while a request is in flight. It never imported sympy, for which torch needs 0.6 s."""
    list(load_kernels())  # compiled here if nobody has yet: a first start shows a progress bar
    code = f"""
import sys
from peregrine import LLM, SamplingParams
llm = LLM({str(tiny_model())!r}, drafter="none", num_pages=100)
stream = llm.stream([5, 6], SamplingParams(temperature=0, max_tokens=500, ignore_eos=True))
print(len(next(stream).token_ids), "sympy" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if NUMBA_PRESENT or not line.startswith("numba is not installed")]
    assert (done.returncode, done.stdout, said) == (0, "1 False\n", [])


def test_bfloat16_on_a_cpu_holds_weights_and_computes_in_float32() -> None:
    with LLM(str(tiny_model()), dtype="bfloat16", drafter="none", num_pages=50) as made:
        assert made.generate("Once", GREEDY)[0].finish_reason == "length"
        decoder, store = made.engine.runner.target.decoder, made.engine.runner.target.store
        chosen = next(decision for decision in made.decisions if decision.field == "dtype")
    assert (chosen.value, "arithmetic is float32" in chosen.because) == ("bfloat16", True)
    assert store.keys.dtype is decoder.embedding.dtype is torch.float32


def test_requests_of_one_call_begin_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their prompts share a chunk: one that began alone would hold up the others, and be planned as if it stayed so."""
    monkeypatch.setattr("peregrine.llm.TOGETHER_S", 60.0)
    with LLM("merlin", num_pages=100) as llm:
        seen, step = list[int](), llm.engine.step
        monkeypatch.setattr(llm.engine, "step", lambda: (seen.append(llm.engine.num_requests), step())[1])
        llm.generate(["Once", "Tom", "A dog"], SamplingParams(max_tokens=2, temperature=0), progress=False)
        assert seen[0] == 3
        monkeypatch.setattr("peregrine.llm.TOGETHER_S", 0.0)
        outputs = llm.generate(["Once", "Tom", "A dog"], SamplingParams(max_tokens=2, temperature=0), progress=False)
        assert len(outputs) == 3
