"""Training of block heads: what a block sees, its loss, and that it learns."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from peregrine.models.draft_heads import BlockHead, load_head, save_head
from peregrine.models.loading import load_decoder
from peregrine.train.block import block_loss, block_states, draw_starts, fresh_block_head, pick_block_taps
from peregrine.train.head import learnable, read_target
from peregrine.train.options import HeadOptions, HeadOrder
from peregrine.train.rows import Rows, SampleRows
from peregrine.train.samples import Samples
from spec.block_heads import BLOCK, BlockReference, block_head
from spec.harness import VOCAB, tiny_model

HEADS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash, causal": {"causal": True},
    "dspark": {"layout": "deepspec", "markov": "vanilla", "confidence": True},
}


def all_rows(lens: list[int], row_len: int, prompt_len: int = 3) -> Rows:
    tokens = np.random.default_rng(0).integers(0, VOCAB, sum(lens)).astype(np.int32)
    starts = np.cumsum([0, *lens], dtype=np.int64)
    packed = SampleRows(Samples(tokens, starts, np.full(len(lens), prompt_len, dtype=np.int64)), row_len)
    return packed.rows(np.arange(len(packed.bins)))


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_a_block_has_the_hidden_states_of_a_plain_implementation(name: str) -> None:
    folder = block_head(**HEADS[name])
    reference = BlockReference.of(folder, tiny_model(), HEADS[name].get("markov"), HEADS[name].get("causal", False))
    target = load_decoder(tiny_model(), pack=False)
    head = load_head(folder, target, "cpu", torch.float32, pack=False)
    assert isinstance(head, BlockHead)
    rows = all_rows([30, 17, 11], 64)
    starts, allowed = draw_starts(rows, 9, torch.Generator().manual_seed(2))
    states = block_states(head, rows, read_target(target, head, rows).tapped, starts)
    assert allowed.all()
    depth = head.config.max_drafts
    assert states.shape[2] == depth == (BLOCK if head.config.drafts_from_newest else BLOCK - 1)
    for row, start in zip(states[0], starts[0].tolist(), strict=True):
        begin = start - int(rows.positions[0, start])
        text = rows.tokens[0, begin : start + 2].tolist()  # the newest token comes after the start
        torch.testing.assert_close(row.double(), reference.hidden(text, depth), atol=1e-4, rtol=1e-3)


def test_blocks_start_at_different_places_where_a_drafter_may_start() -> None:
    rows = all_rows([20, 9], 40)
    possible = learnable(rows, 1)
    starts, allowed = draw_starts(rows, 1000, torch.Generator().manual_seed(0))
    assert starts.shape == (1, 40)
    assert len(set(starts[0].tolist())) == 40
    assert torch.equal(allowed, possible.gather(1, starts))
    few, allowed = draw_starts(rows, 5, torch.Generator().manual_seed(0))
    assert allowed.all()
    assert not torch.equal(few, draw_starts(rows, 5, torch.Generator().manual_seed(1))[0])


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_the_loss_counts_the_drafts_inside_their_sample(kind: str) -> None:
    target = load_decoder(tiny_model(), pack=False).requires_grad_(False)
    head = load_head(block_head(**HEADS[kind]), target, "cpu", torch.float32, pack=False)
    assert isinstance(head, BlockHead)
    rows = all_rows([14, 9], 23, prompt_len=2)
    labels = read_target(target, head, rows)
    starts = draw_starts(rows, 23, torch.Generator().manual_seed(0))
    outcome = block_loss(head, rows, labels, *starts, 0.5)
    with torch.no_grad():
        places = torch.arange(21)[None]
        states, terms = block_states(head, rows, labels.tapped, places)[0], [[] for _ in range(head.config.max_drafts)]
        for begin, length in ((0, 14), (14, 9)):
            for start in range(begin + 1, begin + length - 2):
                for k in range(min(head.config.max_drafts, begin + length - 2 - start)):
                    scores = head.logits(states[start, k][None])[0]
                    if head.markov is not None:
                        before = rows.tokens[0, start + 1 + k][None]
                        scores = scores + head.markov(before, states[start, k][None], None)[0][0]
                    terms[k].append(-(labels.probabilities[0, start + 1 + k] * scores.log_softmax(0)).sum())
    expected = torch.stack([torch.stack(each).mean() for each in terms])
    torch.testing.assert_close(outcome.losses, expected, atol=1e-4, rtol=1e-4)
    outcome.loss.backward()
    assert all(parameter.grad is not None for parameter in head.parameters())


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_fresh_head_learns_and_is_saved_under_public_names(kind: str, tmp_path: Any) -> None:
    target = load_decoder(tiny_model(), pack=False).requires_grad_(False)
    order = HeadOrder("", (), tmp_path, kind=kind, options=HeadOptions(unroll=4))
    order = replace(order, markov_rank=16) if kind == "dspark" else order
    ids = np.arange(0, VOCAB, 2)
    head = fresh_block_head(target, (1, 3), ids, order, mask_token=7)
    rows = all_rows([40, 24], 64)
    labels = read_target(target, head, rows)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    losses = []
    for step in range(30):
        starts = draw_starts(rows, 16, torch.Generator().manual_seed(step % 3))
        outcome = block_loss(head, rows, labels, *starts, 0.9)
        optimizer.zero_grad()
        outcome.loss.backward()
        optimizer.step()
        losses.append(float(outcome.loss.detach()))
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    save_head(head, tmp_path)
    loaded = load_head(tmp_path, target, "cpu", torch.float32, pack=False)
    assert isinstance(loaded, BlockHead)
    layer = replace(loaded.config.layer, eos_ids=head.config.layer.eos_ids)  # a head's file has none
    assert replace(loaded.config, layer=layer) == head.config
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), head.parameters(), strict=True))
    assert loaded.draft_to_target is not None
    assert torch.equal(loaded.draft_to_target, torch.from_numpy(ids))


@pytest.mark.parametrize(("said", "causal"), [({}, True), ({"sliding_window_non_causal": True}, False)])
def test_blocks_of_window_layers_may_see_both_ways(said: dict[str, bool], causal: bool, tmp_path: Any) -> None:
    target = load_decoder(tiny_model(), pack=False)
    order = HeadOrder("", (), tmp_path, kind="dflash", layers=1, options=HeadOptions(unroll=4))
    save_head(fresh_block_head(target, (1, 3), None, order, mask_token=7), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"layer_types": ["sliding_attention"], "sliding_window": 9, "use_sliding_window": True, **said}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_head(tmp_path, target, "cpu", torch.float32, pack=False)
    assert isinstance(loaded, BlockHead)
    assert (loaded.config.layer.windows, loaded.config.causal) == ((9,), (causal,))


def test_taps_are_spread_over_deep_targets() -> None:
    assert pick_block_taps(36) == (2, 10, 18, 26, 34)
    assert pick_block_taps(10) == (2, 3, 5, 6, 8)
    assert pick_block_taps(4) == (1, 2, 3)
