"""The unrolled head equals the chain drafter: the same hidden states step by step, on the same tokens."""

from pathlib import Path

import numpy as np
import pytest
import torch

from peregrine.attention import LayerAttention
from peregrine.attention.torch_backend import TorchBackend
from peregrine.cache.store import KVStore
from peregrine.errors import ConfigError
from peregrine.kernels.round import slots_of
from peregrine.models.checkpoint.folder import Fields
from peregrine.models.draft_heads import load_head, save_head
from peregrine.models.draft_heads.parts import dense_layers
from peregrine.models.families import parse_config
from peregrine.models.loading import load_decoder
from peregrine.models.rope_table import read_rope, rope_fields, rope_table
from peregrine.spec.bound import BoundModel
from peregrine.spec.readers import HeadReader
from peregrine.spec.row_pages import RowPages, even_starts
from peregrine.spec.types import Chunk
from peregrine.train.attend import UnrolledAttend, packed_attend
from peregrine.train.head import COVERAGE, draft_ids, fresh_head, head_loss, learnable, pick_taps, read_target, unroll
from peregrine.train.rows import PAD, Rows, SampleRows, fitting_row_len
from peregrine.train.samples import Samples
from spec.harness import CONTEXT, VOCAB, eagle3_head, tiny_model

PAGE = 16
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
LONG |= {"original_max_position_embeddings": 16}


def make_samples(lens: list[int], prompt_len: int = 3, vocab_size: int = VOCAB) -> Samples:
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, vocab_size, sum(lens)).astype(np.int32)
    starts = np.cumsum([0, *lens], dtype=np.int64)
    return Samples(tokens, starts, np.full(len(lens), prompt_len, dtype=np.int64))


def all_rows(samples: Samples, row_len: int) -> Rows:
    packed = SampleRows(samples, row_len)
    return packed.rows(np.arange(len(packed.bins)))


@torch.no_grad()
def test_every_step_has_the_hidden_states_of_the_engines_chain_drafter() -> None:
    """Engine side: prefill through pages, `read` at index p, then `step` over tokens p + 2, p + 3, ..."""
    samples = make_samples([30, 21, 12])
    rows = all_rows(samples, 64)
    target = load_decoder(tiny_model(), pack=False)
    head = load_head(eagle3_head(), target, "cpu", torch.float32, pack=False)
    tapped = read_target(target, head, rows).tapped
    steps = 4
    ours = [hidden.view(*rows.tokens.shape, -1) for hidden in unroll(head, rows, tapped, steps)]

    packed_target = load_decoder(tiny_model())
    packed_head = load_head(eagle3_head(), packed_target, "cpu", torch.float32)
    checked = 0
    for row in range(len(rows.tokens)):
        for document in range(int(rows.documents[row].max()) + 1):
            places = (rows.documents[row] == document).nonzero()[:, 0]
            tokens = rows.tokens[row, places]
            for index in range(2, len(tokens) - steps - 1, 4):
                theirs = chain_states(packed_target, packed_head, tokens, index, steps)
                for step in range(steps):
                    found = ours[step][row, places[index]]
                    torch.testing.assert_close(found, theirs[step], atol=1e-4, rtol=1e-4)
                    checked += 1
    assert checked >= 40


def chain_states(target, head, tokens, index, steps):  # type: ignore[no-untyped-def]
    """Hidden states of the engine's chain drafter: entries up to `index` absorbed, then `steps` - 1 steps ahead."""
    backend, config = TorchBackend(), target.config
    num_pages = CONTEXT // PAGE
    stores = [
        KVStore(layers, num_pages, PAGE, shape, torch.float32, torch.device("cpu"))
        for layers, shape in ((config.num_layers, config.kv_shape), (head.num_layers, head.kv_shape))
    ]
    bound = BoundModel(target, target.layer_attention(), stores[0], backend)
    reader = HeadReader(head, stores[1], backend)
    pages = RowPages(torch.arange(1, num_pages)[None], PAGE, CONTEXT, even_starts(1, CONTEXT, "cpu"))

    def metadata(first: int, count: int):  # type: ignore[no-untyped-def]
        positions = torch.arange(first, first + count)[None]
        return pages.uniform(
            positions, torch.tensor([first]), slots_of(positions, pages.table, pages.page_size).view(-1)
        )

    before = metadata(0, index)
    _, taps = bound.read(tokens[:index], before, head.taps)
    reader.absorb(Chunk(tokens[:index], tokens[1 : index + 1], taps, before))
    here = metadata(index, 1)
    _, taps = bound.read(tokens[index : index + 1], here, head.taps)
    states = [reader.step(tokens[index + 1 : index + 2], head.fuse(taps), here)]
    for step in range(1, steps):
        token = tokens[index + 1 + step : index + 2 + step]
        states.append(reader.step(token, states[-1], metadata(index + step, 1)))
    return [state[0] for state in states]


@torch.no_grad()
def test_a_sample_does_not_see_its_neighbours_in_the_row() -> None:
    target = load_decoder(tiny_model(), pack=False)
    head = load_head(eagle3_head(), target, "cpu", torch.float32, pack=False)
    together, alone = make_samples([20, 20]), make_samples([20])
    all_labels, states = [], []
    for rows in (all_rows(together, 40), all_rows(alone, 20)):
        all_labels.append(read_target(target, head, rows))
        states.append([h.view(*rows.tokens.shape, -1)[0, :15] for h in unroll(head, rows, all_labels[-1].tapped, 3)])
    torch.testing.assert_close(
        all_labels[0].probabilities[0, :20], all_labels[1].probabilities[0], atol=1e-5, rtol=1e-4
    )
    for first, second in zip(*states, strict=True):
        torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_unrolled_attention_is_one_softmax_over_the_past_and_its_own_chain(
    window: int | None, with_sinks: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    samples = make_samples([5, 4])
    rows, steps = all_rows(samples, 9), 4
    sinks = torch.randn(4, generator=generator) if with_sinks else None
    layers = [LayerAttention(0.3, window, sinks)]
    drawn = [[torch.randn(9, heads, 8, generator=generator) for heads in (4, 2, 2)] for _ in range(steps)]
    unrolled = UnrolledAttend(layers, rows)
    outputs = [unrolled.next_step()(0, *qkv) for qkv in drawn]
    torch.testing.assert_close(outputs[0], packed_attend(layers, rows)(0, *drawn[0]), atol=1e-5, rtol=1e-4)
    for step in range(steps):
        q = drawn[step][0]
        for place in range(9):
            begin = 0 if place < 5 else 5
            seen = [(0, other, other) for other in range(begin, place + 1)]
            seen += [(i, place, place + i) for i in range(1, step + 1)]
            seen = [(s, p) for s, p, lies in seen if window is None or lies > place + step - window]
            for head in range(4):
                keys, values = (torch.stack([drawn[s][part][p, head // 2] for s, p in seen]) for part in (1, 2))
                weights = (keys @ q[place, head] * 0.3).exp()
                total = weights.sum() + (sinks[head].exp() if sinks is not None else 0.0)
                torch.testing.assert_close(outputs[step][place, head], weights / total @ values, atol=1e-5, rtol=1e-4)


def test_only_places_whose_next_token_is_in_the_sample_are_trained() -> None:
    rows = all_rows(make_samples([6, 4], prompt_len=2), 12)
    # Places 1 to 3 have a token two places on in their sample; the second sample begins at place 6.
    assert learnable(rows, 1)[0].nonzero()[:, 0].tolist() == [1, 2, 3, 7]
    assert learnable(rows, 3)[0].nonzero()[:, 0].tolist() == [1]
    assert rows.documents[0].tolist() == [0] * 6 + [1] * 4 + [PAD] * 2
    assert rows.positions[0, :10].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]


def test_the_loss_is_the_cross_entropy_with_the_targets_distribution() -> None:
    target = load_decoder(tiny_model(), pack=False).requires_grad_(False)
    head = load_head(eagle3_head(), target, "cpu", torch.float32, pack=False)
    rows = all_rows(make_samples([14, 9], prompt_len=2), 23)
    labels = read_target(target, head, rows)
    outcome = head_loss(head, rows, labels, 3, 0.5)
    with torch.no_grad():
        hidden, _ = target(
            rows.tokens[0, :14],
            torch.arange(14),
            packed_attend(target.layer_attention(), all_rows(make_samples([14]), 14)),
        )
        full = target.logits(hidden).softmax(dim=1)[:, head.draft_to_target]
        torch.testing.assert_close(labels.probabilities[0, :14], full, atol=1e-5, rtol=1e-3)
        expected = []
        for step, states in enumerate(unroll(head, rows, labels.tapped, 3)):
            scores, terms = head.logits(states).log_softmax(dim=1), []
            for begin, length in ((0, 14), (14, 9)):
                for place in range(begin + 1, begin + length - 2 - step):
                    terms.append(-(labels.probabilities[0, place + 1 + step] * scores[place]).sum())
            expected.append(torch.stack(terms).mean())
    torch.testing.assert_close(outcome.losses, torch.stack(expected), atol=1e-4, rtol=1e-4)
    weights = torch.tensor([1.0, 0.5, 0.25])
    torch.testing.assert_close(outcome.loss.detach(), (outcome.losses * weights).sum() / weights.sum())
    outcome.loss.backward()
    assert all(parameter.grad is not None for parameter in head.parameters())


def test_rows_come_by_number_and_every_sample_once_an_epoch() -> None:
    lens = np.random.default_rng(1).integers(5, 30, 60).tolist()
    samples = make_samples(lens)
    packed = SampleRows(samples, fitting_row_len(samples))
    assert packed.row_len == 64
    assert sorted(sample for members in packed.bins for sample in members) == list(range(60))
    assert sum(lens) > 0.8 * 64 * len(packed.bins)
    whole, later = packed.batches(3, seed=5), packed.batches(3, seed=5, skip=7)
    for _ in range(7):
        next(whole)
    for _ in range(5):
        assert torch.equal(next(whole).tokens, next(later).tokens)
    with pytest.raises(ConfigError, match=r"batch=500: the samples fill only \d+ rows"):
        next(packed.batches(500, seed=0))


def test_taps_and_vocabulary_are_chosen_for_the_target() -> None:
    assert [pick_taps(n) for n in (1, 2, 4, 10, 32)] == [(0,), (0, 1), (1, 2, 3), (2, 5, 7), (2, 16, 29)]
    tokens = np.repeat(np.arange(20, dtype=np.int32), np.arange(20, 0, -1) ** 2)
    samples = Samples(tokens, np.array([0, len(tokens)]), np.array([0]))
    ids = draft_ids(samples, "6", 32, (30,))
    assert ids is not None
    assert ids.tolist() == [0, 1, 2, 3, 4, 30]
    assert draft_ids(samples, "full", 32, (30,)) is None
    assert draft_ids(samples, "32", 32, (30,)) is None
    assert draft_ids(samples, "auto", 32, (30,)) is None  # half of them would cover too little
    found = draft_ids(samples, "auto", 64, (30,))
    assert found is not None
    assert len(found) == 32
    # The ids that must be there take the place of three that cover much.
    tokens = np.concatenate([np.repeat(np.arange(8, dtype=np.int32), 1000), np.arange(8, 10, dtype=np.int32)])
    found = draft_ids(Samples(tokens, np.array([0, len(tokens)]), np.array([0])), "auto", 64, (60, 61, 62))
    assert found is not None
    assert np.isin(tokens, found).mean() >= COVERAGE
    with pytest.raises(ConfigError, match="draft_vocab=33"):
        draft_ids(samples, "33", 32, (30,))
    with pytest.raises(ConfigError, match="token 19 is not in the target's vocabulary of 10"):
        draft_ids(samples, "full", 10, ())


@pytest.mark.parametrize("given", [{"rope_theta": 5e4}, {"rope_scaling": LONG}])
def test_heads_of_targets_that_rotate_a_part_of_a_head_rotate_all_of_it(given: dict[str, object]) -> None:
    """As layers of the families do that heads are saved as."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    fields = {"architectures": ["Phi3ForCausalLM"], "vocab_size": 100, "partial_rotary_factor": 0.75, **shape, **given}
    target = parse_config(Fields("config.json", fields))
    layer = dense_layers(target, "llama", 1)
    assert target.rope.share == 0.75
    assert layer.rope == read_rope(Fields("config.json", rope_fields(layer.rope)), 64)
    assert rope_table(layer.rope, layer.head_dim, 64, "cpu").shape[1] == layer.head_dim


def test_a_fresh_head_is_saved_under_public_names_and_loads_again(tmp_path: Path) -> None:
    target = load_decoder(tiny_model(), pack=False)
    ids = np.arange(0, VOCAB, 2)
    head = fresh_head(target, (1, 2, 3), ids, seed=0)
    save_head(head, tmp_path)
    loaded = load_head(tmp_path, target, "cpu", torch.float32, pack=False)
    assert loaded.taps == (1, 2, 3)
    for name, tensor in head.named_parameters():
        assert torch.equal(tensor, loaded.get_parameter(name)), name
    with pytest.raises(ConfigError, match=r"taps=\(1, 99\)"):
        fresh_head(target, (1, 99), ids, seed=0)
