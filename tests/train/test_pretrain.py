"""Training the engine's own decoder: it learns, resuming changes nothing, and the result loads anywhere."""

import json
from dataclasses import replace

import pytest
import torch

from peregrine.attention import LayerAttention
from peregrine.errors import ConfigError
from peregrine.models.families import read_config
from peregrine.models.loading import decoder_plan, load_decoder
from peregrine.train.attend import dense_attend
from peregrine.train.merlin.pretrain import Pretraining, PretrainOptions, fresh_decoder
from peregrine.train.merlin.recipe import Shape, stored_tensors, write_configs, write_sharded
from peregrine.train.merlin.token_rows import TokenShard
from peregrine.train.run import load_state, read_log
from peregrine.train.samples import Samples

TOY = Shape(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    intermediate_size=48,
    max_position_embeddings=64,
)
OPTIONS = PretrainOptions(
    row_len=24, batch_rows=4, steps=30, rate=1e-2, warmup_steps=3, eval_every=15, save_every=10, epoch_tokens=2000
)
CPU = torch.device("cpu")


@pytest.fixture
def config(tmp_path):
    write_configs(TOY, tmp_path / "model")
    return read_config(tmp_path / "model")


@pytest.fixture
def shards():
    """Documents that count upwards: every token but the first is predictable."""
    documents = [[3 + (first + i) % 60 for i in range(10)] + [0] for first in range(60)]
    return [TokenShard("counting", 1.0, Samples.pack(documents, [0] * 60))]


@pytest.fixture
def start(config, shards, tmp_path):
    """Starts or resumes a run in a folder of the test."""

    def start_run(name="run", **changes):
        return Pretraining(config, replace(OPTIONS, **changes), tmp_path / name, CPU, shards, shards)

    return start_run


def trained_tensors(module):
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def test_a_toy_learns_to_count(start, tmp_path):
    start(steps=120).train()
    held_out = read_log(tmp_path / "run", "held_out")
    # One token in eleven is a draw among sixty; a model that knows the rest has a loss of ln(60) / 11.
    assert held_out[-1]["losses"]["all"] < 0.8 < 2.0 < held_out[0]["losses"]["all"]
    assert set(held_out[-1]["losses"]) == {"counting", "all"}


def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(start, tmp_path):
    whole = start("whole")
    whole.train()
    killed = start("parts")
    killed.save = lambda: (_ for _ in ()).throw(KeyboardInterrupt) if killed.step == 20 else Pretraining.save(killed)
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    resumed = start("parts")
    assert resumed.step == 10
    resumed.train()
    assert load_state(tmp_path / "parts")["step"] == 30
    for name, tensor in trained_tensors(whole.decoder).items():
        assert torch.equal(tensor, trained_tensors(resumed.decoder)[name]), name


def test_a_run_is_not_resumed_with_other_options(start):
    start().save()
    with pytest.raises(ConfigError, match=r"rate=0.5: the run .* was started with rate=0.01"):
        start(rate=0.5)


def test_a_time_limit_becomes_a_number_of_steps_that_a_resumed_run_keeps(start):
    run = start(steps=None, minutes=0.02)
    run.train()
    assert run.step == run.total_steps > 50
    assert start(steps=None, minutes=0.02).total_steps == run.total_steps
    with pytest.raises(ConfigError, match="steps=None: the run would have no end"):
        start(steps=None)


def test_an_interrupted_save_leaves_the_old_state(start, tmp_path, monkeypatch):
    run = start()
    run.save()

    def cut_short(state, path):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", cut_short)
    run.step = 7
    with pytest.raises(KeyboardInterrupt):
        run.save()
    assert load_state(tmp_path / "run")["step"] == 0
    assert start().step == 0


def test_what_was_trained_is_what_is_loaded(config, tmp_path):
    decoder = fresh_decoder(config, 0, CPU)
    write_sharded(stored_tensors(decoder, decoder_plan(config)), tmp_path / "model", shard_bytes=10_000)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    loaded = load_decoder(tmp_path / "model", pack=False)
    for name, tensor in trained_tensors(decoder).items():
        assert torch.equal(trained_tensors(loaded)[name], tensor.bfloat16().float()), name


def test_transformers_gives_the_same_logits(config, tmp_path):
    transformers = pytest.importorskip("transformers")
    decoder = fresh_decoder(config, 0, CPU)
    write_sharded(stored_tensors(decoder, decoder_plan(config)), tmp_path / "model")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ours = load_decoder(tmp_path / "model", pack=False)
    rows = torch.randint(0, 64, (3, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        attend = dense_attend(ours.layer_attention(), 3)
        hidden, _ = ours(rows.flatten(), torch.arange(20).repeat(3), attend)
        torch.testing.assert_close(ours.logits(hidden).view(3, 20, -1), theirs(rows).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_dense_attention_follows_windows_and_sinks(window, with_sinks):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2 * 7, heads, 8, generator=generator) for heads in (4, 2, 2))
    sinks = torch.randn(4, generator=generator) if with_sinks else None
    out = dense_attend([LayerAttention(0.3, window, sinks)], 2)(0, q, k, v).view(2, 7, 4, 8)
    for row in range(2):
        for place in range(7):
            first = 0 if window is None else max(0, place - window + 1)
            keys, values = (x.view(2, 7, 2, 8)[row, first : place + 1] for x in (k, v))
            for head in range(4):
                scores = keys[:, head // 2] @ q.view(2, 7, 4, 8)[row, place, head] * 0.3
                weights = scores.exp() / (scores.exp().sum() + (sinks[head].exp() if with_sinks else 0.0))
                expected = weights @ values[:, head // 2]
                torch.testing.assert_close(out[row, place, head], expected, atol=1e-5, rtol=1e-4)
