"""Every drafter on models with experts: a prediction layer (MTP) with MLA, heads, draft models, look-up.

With any drafter, batch and page size, the tokens are those of plain decoding, and of transformers.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from peregrine.sampling import SamplingParams
from spec.expert_models import expert_model, glm_mtp_model, mla_mtp_model
from spec.harness import Case, accept_length, build, cases, disturbed, eagle3_head, prompts, run, tokens

SOME = cases(8, max_tokens=20)
ARRIVALS = [0, 0, 2, 5, 5, 9, 14, 15]
TREE = (3, 3, 13)
MODELS: dict[str, Callable[[], Path]] = {"mla": mla_mtp_model, "experts": expert_model, "glm": glm_mtp_model}


@cache
def draft_model(model: str) -> str:
    return str(disturbed(MODELS[model](), 0.05))


@cache
def plain(model: str) -> list[list[int]]:
    return tokens(run(build(MODELS[model]()).engine, SOME))


MTP: dict[str, object] = {"drafter": "mtp"}
HEAD: dict[str, object] = {"drafter": str(eagle3_head(taps=(0, 1, 2)))}
DRAFTERS: dict[str, tuple[str, dict[str, object]]] = {
    **{f"mla, mtp chain of {k}": ("mla", {**MTP, "num_drafts": k}) for k in (1, 2, 3)},
    "mla, mtp tree": ("mla", {**MTP, "tree": TREE}),
    "mla, mtp wide tree": ("mla", {**MTP, "tree": (2, 6, 20)}),
    "mla, eagle3 chain": ("mla", HEAD),
    "mla, eagle3 tree": ("mla", {**HEAD, "tree": TREE}),
    "mla, ngram": ("mla", {"drafter": "ngram", "num_drafts": 4}),
    "mla, draft model": ("mla", {"drafter": draft_model("mla"), "num_drafts": 3}),
    "mla, draft model tree": ("mla", {"drafter": draft_model("mla"), "tree": TREE}),
    "mla, dense draft model": ("mla", {"drafter": draft_model("experts")}),
    "experts, eagle3 chain": ("experts", HEAD),
    "experts, eagle3 tree": ("experts", {**HEAD, "tree": TREE}),
    "experts, draft model tree": ("experts", {"drafter": draft_model("experts"), "tree": TREE}),
    "experts, mla draft model": ("experts", {"drafter": draft_model("mla"), "num_drafts": 2}),
    "experts, ngram": ("experts", {"drafter": "ngram", "num_drafts": 4}),
    "glm, mtp chain": ("glm", {**MTP, "num_drafts": 3}),
    "glm, mtp tree": ("glm", {**MTP, "tree": TREE}),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_speculation_changes_no_token(name: str) -> None:
    model, options = DRAFTERS[name]
    outputs = run(build(MODELS[model](), **options).engine, SOME, ARRIVALS)
    assert tokens(outputs) == plain(model)
    if "mtp" in name:
        assert accept_length(outputs) > 1.05, "a drafter that is never right tests nothing"


@pytest.mark.parametrize("model", MODELS)
def test_the_text_varies(model: str) -> None:
    assert len({tuple(text) for text in plain(model)}) == len(SOME)
    assert len({token for text in plain(model) for token in text}) > 40  # of 160
    assert min(len(set(text)) for text in plain(model)) > 2, "a row that repeats one token tests nothing"


SETTINGS: dict[str, dict[str, object]] = {
    "page size 1, one behind": {"page_size": 1, "num_pages": 4000, "lag": 1, "tree": TREE},
    "page size 64, two behind": {"page_size": 64, "lag": 2, "num_drafts": 3},
    "chunks of 8, padded rows": {"prefill_chunk": 8, "row_sizes": (3, 8), "num_drafts": 2},
    "chunks of 32, no prefix cache": {"prefill_chunk": 32, "prefix_cache": False, "tree": TREE},
    "few rows": {"max_rows": 2, "num_drafts": 3},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_engine_settings_change_no_token(name: str) -> None:
    engine = build(mla_mtp_model(), **MTP, **SETTINGS[name]).engine
    assert tokens(run(engine, SOME, ARRIVALS)) == plain("mla")


@pytest.mark.parametrize("tree", [None, TREE])
def test_preemption_changes_no_token(tree: object) -> None:
    outputs = run(build(mla_mtp_model(), page_size=8, num_pages=24, tree=tree, **MTP).engine, SOME)
    assert sum(output.stats.preemptions for output in outputs) > 0
    assert tokens(outputs) == plain("mla")


def test_a_prefix_hit_changes_no_token() -> None:
    """Pages that prompts and rounds have written, the prediction layer's among them, serve later requests."""
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=30)
    first = Case(tuple(range(1, 90)), params)
    text = tokens(run(build(mla_mtp_model()).engine, [first]))[0]
    second = Case((*first.prompt, *text[:20], 7), params)
    engine = build(mla_mtp_model(), num_drafts=3, **MTP).engine
    outputs = run(engine, [first, second], [0, 99])  # one after the other
    assert tokens(outputs) == [text, *tokens(run(build(mla_mtp_model()).engine, [second]))]
    assert [output.stats.cached_tokens for output in outputs] == [0, 96]


@pytest.mark.parametrize("guess", [{"num_drafts": 3}, {"tree": TREE}], ids=["chain", "tree"])
def test_poisoned_pages_change_nothing(guess: dict[str, object]) -> None:
    """NaN in every unwritten slot of the target and of the prediction layer, which has its own store."""
    engine = build(mla_mtp_model(), row_sizes=(3, 8), **MTP, **guess).engine
    own = engine.runner.drafter.reader.store
    assert (own.num_layers, own.shape) == (1, engine.runner.target.store.shape)
    for store in (engine.runner.target.store, own):
        store.keys.fill_(float("nan"))
    assert tokens(run(engine, SOME)) == plain("mla")


@pytest.mark.parametrize("model", MODELS)
def test_greedy_text_is_that_of_transformers(model: str) -> None:
    """With the prediction layer or a head as drafter; transformers ignores the layer."""
    folder = MODELS[model]()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    some = [Case(prompt, params) for prompt in prompts(3, seed=9, low=2)]
    options = HEAD if model == "experts" else {**MTP, "tree": TREE}
    ours = tokens(run(build(folder, **options).engine, some))
    for case, text in zip(some, ours, strict=True):
        made = theirs.generate(
            torch.tensor([case.prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert made[0, len(case.prompt) :].tolist() == text
