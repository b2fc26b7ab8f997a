"""DFlash and DSpark heads in their public layouts: drafts equal a plain second implementation, tokens do not change."""

import json
from pathlib import Path
from struct import unpack_from
from typing import Any

import pytest
import torch

from peregrine.engine.sources import FolderSource
from peregrine.errors import ConfigError, PeregrineError
from peregrine.kernels.runtime.cpu_graph import CpuGraph, record_at_once
from peregrine.sampling import SamplingParams
from peregrine.spec.block import BlockDrafter
from spec.block_heads import BLOCK, BlockReference, block_head, calm_model
from spec.harness import VOCAB, Case, accept_length, build, cases, prompts, run, tiny_model, tokens
from spec.test_embedded import body

HEADS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash, speculators, part of the vocabulary": {"layout": "speculators", "draft_vocab": 200},
    "dflash, causal": {"causal": True},
    "dspark": {"layout": "deepspec", "markov": "vanilla", "confidence": True},
    "dspark, gated": {"layout": "speculators", "markov": "gated"},
    "dspark, rnn": {"layout": "deepspec", "markov": "rnn"},
}
BIGRAMS = {"layout": "deepspec", "markov": "vanilla", "knows_bigrams": True}


@torch.inference_mode()
def offered(options: dict[str, object], some: list[Case], model: Path) -> list[tuple[list[int], list[int]]]:
    """(text before the round, drafts offered in it) of every round of the cases, all in one batch."""
    engine = build(model, max_rows=3, page_size=8, prefill_chunk=16, **options).engine
    requests = [engine.prepare(list(case.prompt), case.params) for case in some]
    texts, rounds = {r.id: list(r.prompt) for r in requests}, []
    for request in requests:
        engine.enqueue(request)
    while engine.has_work:
        for delta in engine.step():
            if delta.drafts is not None and delta.drafts.tokens:
                rounds.append((list(texts[delta.request_id]), delta.drafts.tokens))
            texts[delta.request_id] += delta.token_ids
    return rounds


def greedy(count: int, max_tokens: int) -> list[Case]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, report_drafts=True, ignore_eos=True)
    return [Case(prompt, params) for prompt in prompts(count, seed=4)]


@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_of_a_plain_implementation(name: str) -> None:
    attention = "torch" if name in ("dflash", "dspark") else "auto"
    head, given = HEADS[name], block_head(**HEADS[name])
    reference = BlockReference.of(given, tiny_model(), head.get("markov"), head.get("causal", False))
    options = {"drafter": str(given), "num_drafts": 5, "attention": attention}
    rounds = offered(options, greedy(3, 10), tiny_model())
    assert len(rounds) >= 3 * 8
    for text, drafts in rounds:
        assert drafts == reference.drafts(text, 5)[: len(drafts)]


def test_drafts_after_accepted_drafts_are_those_of_a_plain_implementation() -> None:
    """A head that knows what follows a token, on a model that mostly goes by it: windows are accepted in part."""
    given = block_head(**BIGRAMS)
    reference = BlockReference.of(given, calm_model(), "vanilla")
    for pages in (600, 14):  # few: requests are preempted and read again
        options = {"drafter": str(given), "num_drafts": BLOCK, "num_pages": pages}
        some = greedy(4, 40)
        rounds = offered(options, some, calm_model())
        for text, drafts in rounds:
            assert drafts == reference.drafts(text, BLOCK)[: len(drafts)]
        assert len(rounds) < 4 * 39 / 2  # more than two tokens a round


@pytest.mark.parametrize("name", HEADS)
def test_no_token_changes(name: str) -> None:
    some = cases(10, max_tokens=24, seed=77)
    plain = tokens(run(build().engine, some))
    options = {"drafter": str(block_head(**HEADS[name])), "num_drafts": 6}
    assert tokens(run(build(max_rows=4, **options).engine, some)) == plain


@pytest.mark.parametrize("fields", [{}, {"markov": "vanilla", "confidence": True}], ids=["dflash", "dspark"])
def test_all_drafts_of_a_block_are_one_replay(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, of several rows, from the block's forward to the last pick; and so is reading the path before it."""
    pytest.importorskip("numba")
    made: list[CpuGraph] = []
    record = CpuGraph.__init__

    def note(graph: CpuGraph, *arguments: object) -> None:
        record(graph, *arguments)  # type: ignore[arg-type]
        made.append(graph)

    monkeypatch.setattr(CpuGraph, "__init__", note)
    head = block_head("speculators", draft_vocab=256, **fields)  # whole panels, as those of real models
    with record_at_once():
        run(build(drafter=str(head), num_drafts=6, max_rows=3).engine, greedy(3, max_tokens=4))
    picks = [[unpack_from("q", words)[0] for _, words, _ in graph._replay._calls] for graph in made]
    counts = [calls.count(body("sampling.cpu", "_choose_nodes")) for calls in picks]
    assert set(counts) == {0, 1, 6}, "the path, the target's choice, and all drafts"
    assert all(graph.complete for graph in made)


def test_accepted_blocks_change_no_token() -> None:
    some = cases(10, max_tokens=48, seed=78)
    plain = tokens(run(build(calm_model()).engine, some))
    options = {"drafter": str(block_head(**BIGRAMS)), "num_drafts": BLOCK}
    for size, pages in ((16, 600), (4, 60)):
        outputs = run(build(calm_model(), page_size=size, num_pages=pages, **options).engine, some)
        assert tokens(outputs) == plain
        assert accept_length(outputs) > 2


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"mask_token_id": VOCAB}, "mask_token_id=300: the target has 300 tokens"),
        ({"block_size": 1}, "block_size=1: not a whole number of at least 2"),
        ({"target_layer_ids": [0, 3]}, "target_layer_ids=.*the target has 4 layers"),
        ({"vocab_size": 299}, "vocab_size=299: the head's vocabulary is 299"),
        ({"hidden_size": 64}, "hidden_size=64: the head's hidden size is 64"),
        ({"markov_rank": 8}, "markov_head.markov_w1.weight"),
        ({"markov_rank": 8, "markov_head_type": "fir"}, "markov_head_type='fir': supported are vanilla, gated, rnn"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash 2 heads are not supported"),
        ({"selector_rank": 16}, "selector_rank=16: such heads are not supported"),
        ({"block_size": 3}, "num_drafts=5: this head drafts a block of 2 at once"),
    ],
)
def test_a_head_for_another_target_is_refused_before_weights_load(
    fields: dict[str, object], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = block_head()
    config = json.loads((source / "config.json").read_text())
    inner = config["dflash_config"]
    for name, value in fields.items():
        (inner if name in inner else config)[name] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    monkeypatch.setattr(FolderSource, "target", lambda *_: pytest.fail("the target was loaded"))
    with pytest.raises(PeregrineError, match=problem):
        build(drafter=str(tmp_path), num_drafts=5)


def test_more_drafts_than_a_block_holds_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_drafts=7: this head drafts a block of 6 at once"):
        build(drafter=str(block_head()), num_drafts=7)
    with pytest.raises(ConfigError, match=r"tree=\(7, 2, 9\): this head drafts a block of 6"):
        build(drafter=str(block_head()), tree=(7, 2, 9))


@pytest.mark.parametrize("name", ["dflash", "dspark", "dspark, rnn"])
def test_trees_hold_the_chain_and_change_no_token(name: str) -> None:
    """At temperature 0 a tree's likeliest path is the chain, so its drafts are among the tree's."""
    head, given = HEADS[name], str(block_head(**HEADS[name]))
    some = cases(6, max_tokens=20, seed=79)
    engine, blocks = build(drafter=given, tree=(6, 8, 64)).engine, 0
    drafter = engine.runner.drafter
    assert isinstance(drafter, BlockDrafter)
    forward = drafter.head.forward

    def counted(*given: Any) -> torch.Tensor:
        nonlocal blocks
        blocks += 1
        return forward(*given)

    drafter.head.forward = counted  # type: ignore[method-assign]
    assert tokens(run(engine, some)) == tokens(run(build().engine, some))
    assert 0 < blocks <= engine.runner.launched, "64 nodes, and one forward a round"
    reference = BlockReference.of(Path(given), tiny_model(), head.get("markov"))
    for text, drafts in offered({"drafter": given, "tree": (3, 4, 28)}, greedy(2, 6), tiny_model()):
        assert reference.drafts(text, 3)[0] in drafts[:4]  # children of the newest token come first


def test_a_tree_of_a_head_that_knows_bigrams_is_accepted_more_often_than_its_chain() -> None:
    some = cases(10, max_tokens=48, seed=78)
    given = {"drafter": str(block_head(**BIGRAMS))}
    chain = run(build(calm_model(), num_drafts=4, **given).engine, some)
    tree = run(build(calm_model(), tree=(4, 4, 32), **given).engine, some)
    assert tokens(tree) == tokens(chain)
    assert accept_length(tree) > 1.1 * accept_length(chain)
