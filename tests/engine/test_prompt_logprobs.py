"""Log-probabilities of prompts do not depend on chunks, cache or batch; and the drafts of a round are reported."""

import pytest
import torch

from peregrine.engine.output import Output, TokenLogprob
from peregrine.sampling import SamplingParams
from spec.harness import Case, build, cases, noisy_model, prompts, run
from spec.test_identity import naive_logits

PROMPT = prompts(1, seed=5, low=50, high=60)[0]
SCORED = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=3)


def scores(output: Output) -> list[TokenLogprob]:
    assert output.prompt_logprobs is not None
    return output.prompt_logprobs


def test_prompt_logprobs_equal_a_naive_recompute() -> None:
    engine = build(prefill_chunk=16).engine
    scored = scores(run(engine, [Case(PROMPT, SCORED), *cases(3, max_tokens=20)])[0])
    logits = naive_logits(engine)
    assert [entry.token_id for entry in scored] == list(PROMPT[1:])
    for place, entry in enumerate(scored, start=1):
        expected = torch.tensor(logits(list(PROMPT[:place]))).double().log_softmax(0)
        assert entry.logprob == pytest.approx(float(expected[PROMPT[place]]), abs=1e-4)
        assert [i for i, _ in entry.top] == expected.topk(3).indices.tolist()


@pytest.mark.parametrize("options", [{}, {"prefill_chunk": 7}, {"drafter": str(noisy_model())}])
def test_a_generated_token_scores_the_same_bits_as_a_prompt(options: dict[str, object]) -> None:
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=60, ignore_eos=True, logprobs=3)
    written = run(build(**options).engine, [Case(PROMPT, params)])[0]
    assert written.logprobs is not None
    again = run(build(**options).engine, [Case((*PROMPT, *written.token_ids), SCORED)])[0]
    assert scores(again)[-60:] == written.logprobs


def test_neither_the_cache_nor_preemption_changes_prompt_logprobs() -> None:
    engine = build().engine
    first, cached = (run(engine, [Case(PROMPT, SCORED)])[0] for _ in range(2))
    assert scores(first) == scores(cached)
    assert cached.stats.cached_tokens == 0
    plain = run(engine, [Case(PROMPT, SamplingParams(temperature=0, max_tokens=4))])[0]
    assert plain.prompt_logprobs is None
    # So few pages that a prompt must wait for others, and running requests are preempted.
    tight = build(num_pages=14, prefill_chunk=16).engine
    crowd = [Case(PROMPT, SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, prompt_logprobs=3))] * 3
    outputs = run(tight, crowd)
    assert sum(output.stats.preemptions for output in outputs) > 0
    assert all(scores(output) == scores(first) for output in outputs)


def test_a_prompt_of_one_token_has_none() -> None:
    output = run(build().engine, [Case((5,), SCORED)])[0]
    assert output.prompt_logprobs == []


@torch.inference_mode()
def test_the_first_delta_has_prompt_logprobs_and_each_its_own_logprobs() -> None:
    engine = build(drafter=str(noisy_model())).engine
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    engine.enqueue(engine.prepare(list(PROMPT), params))
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    output = deltas[-1].output
    assert output is not None
    assert deltas[0].prompt_logprobs == output.prompt_logprobs
    assert all(delta.prompt_logprobs is None for delta in deltas[1:])
    assert [entry for delta in deltas for entry in delta.logprobs or []] == output.logprobs


@torch.inference_mode()
@pytest.mark.parametrize("tree", [None, (3, 3, 10)])
def test_deltas_show_the_drafts_of_their_round(tree: tuple[int, int, int] | None) -> None:
    engine = build(drafter=str(noisy_model()), tree=tree).engine
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, report_drafts=True)
    engine.enqueue(engine.prepare(list(PROMPT), params))
    engine.enqueue(engine.prepare(list(PROMPT[:9]), SamplingParams(temperature=0, max_tokens=20)))
    shown = []
    while engine.has_work:
        for delta in engine.step():
            assert (delta.drafts is not None) == (delta.request_id == 0)
            shown += [delta] if delta.drafts else []
    rejected = 0
    for delta in shown:
        drafts = delta.drafts
        assert drafts is not None
        assert len(drafts.tokens) == len(drafts.parents) == delta.offered
        assert len(drafts.correct) == sum(delta.drafted)
        node = 0
        for place, correct in enumerate(drafts.correct):  # a path from the root that spells the output
            assert drafts.parents[correct - 1] == node
            assert drafts.tokens[correct - 1] == delta.token_ids[place]
            node = correct
        children = [t for t, parent in zip(drafts.tokens, drafts.parents, strict=True) if parent == node]
        if len(delta.token_ids) > len(drafts.correct):
            assert delta.token_ids[len(drafts.correct)] not in children  # else it would have been correct
        rejected += len(children)
    assert rejected > 3
