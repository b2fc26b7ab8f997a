"""Shapes of public models: parameter counts as published, and random weights that run."""

from dataclasses import replace

import pytest
import torch

from peregrine.errors import ConfigError
from peregrine.models.experts import Experts
from peregrine.models.loading import num_weights
from peregrine.sampling import SamplingParams
from peregrine.synthetic import heads, shapes
from peregrine.synthetic.heads import DRAFT_VOCAB, draw_head, draw_prediction_layer
from peregrine.synthetic.shapes import SHAPES, draw_decoder, shape_config
from spec.harness import Case, build, run, tokens

# Billions of parameters, as the models' cards have them.
KNOWN = {"llama-3.1-8b": 8.03, "llama-3.2-1b": 1.236, "qwen3-8b": 8.19, "qwen3-0.6b": 0.596, "qwen2.5-1.5b": 1.544}
KNOWN |= {"qwen3-30b-a3b": 30.53, "mixtral-8x7b": 46.7, "deepseek-v2-lite": 15.71}
KNOWN |= {"deepseek-v3": 671.03, "kimi-k2": 1026.4, "glm-4.7-flash": 30.0}
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 8192,  # the embedded tokenizer has as many
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


TINY_MLA = TINY | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    """A shape of its own, too small to measure anything."""
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    return "shape:tiny"


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_size_its_model_is_known_for(name: str) -> None:
    config = shape_config(f"shape:{name}")
    assert num_weights(config) / 1e9 == pytest.approx(KNOWN[name], rel=0.005)
    assert config.qk_norm == name.startswith("qwen3")


@pytest.mark.parametrize(
    ("name", "entries", "experts"),
    [
        ("deepseek-v2-lite", 576, (64, 6, 2, 26)),
        ("deepseek-v3", 576, (256, 8, 1, 58)),
        ("kimi-k2", 576, (384, 8, 1, 60)),
        ("glm-4.7-flash", 576, (64, 4, 1, 46)),
        ("qwen3-30b-a3b", 1024, (128, 8, 0, 48)),
        ("mixtral-8x7b", 2048, (8, 2, 0, 32)),
    ],
)
def test_shapes_with_experts(name: str, entries: int, experts: tuple[int, ...]) -> None:
    """Numbers cached per token and layer; experts in all, chosen per token, shared; layers with experts."""
    config = shape_config(f"shape:{name}")
    found = config.experts
    assert found is not None
    assert config.kv_shape.num_entries == entries
    assert (found.num_experts, found.top_k, found.num_shared, sum(found.layers)) == experts
    assert config.num_extra_layers == (1 if name.startswith(("deepseek", "glm")) else 0)


def test_an_unknown_shape_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="model='shape:llama-9': no such shape") as raised:
        shape_config("shape:llama-9")
    assert all(f"shape:{name}" in str(raised.value) for name in SHAPES)


def test_weights_are_drawn_from_the_seed(tiny: str) -> None:
    config, cpu = shape_config(tiny), torch.device("cpu")
    one, other, third = (draw_decoder(config, cpu, torch.float32, seed) for seed in (1, 1, 2))
    assert torch.equal(one.embedding, other.embedding)
    assert not torch.equal(one.embedding, third.embedding)
    assert float(one.embedding.std()) == pytest.approx(0.02, rel=0.05)


def test_a_head_fits_its_target(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = draw_decoder(shape_config(tiny), torch.device("cpu"), torch.float32)
    head = draw_head(target)
    assert head.draft_to_target is not None
    assert len(head.draft_to_target) == min(DRAFT_VOCAB, 8192)
    assert not head.layer_config.qk_norm  # public heads are Llama layers for every target
    monkeypatch.setattr(heads, "DRAFT_VOCAB", 1000)
    ids = draw_head(target).draft_to_target
    assert ids is not None
    assert len(ids) == 1000
    assert int(ids.max()) < 8192
    assert len(set(ids.tolist())) == 1000


def test_an_engine_of_a_shape_runs_and_its_head_changes_no_token(tiny: str) -> None:
    case = Case((5, 6, 7), SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    options: dict[str, object] = {"num_pages": 40, "max_len": 100, "device": "cpu"}
    plain = build(tiny, drafter="none", **options)  # type: ignore[arg-type]
    expected = tokens(run(plain.engine, [case]))
    for name in ("eagle3", "dflash", "dspark"):
        drafted = build(tiny, drafter=name, **options)  # type: ignore[arg-type]
        assert tokens(run(drafted.engine, [case])) == expected
    assert "for measuring only" in next(d.because for d in plain.decisions if d.field == "model")


@pytest.fixture
def mla_shape(monkeypatch: pytest.MonkeyPatch) -> str:
    """A tiny shape with MLA, experts and a prediction layer."""
    monkeypatch.setitem(SHAPES, "mla", TINY_MLA)
    return "shape:mla"


def test_a_prediction_layer_is_made_like_the_last_layer(mla_shape: str) -> None:
    target = draw_decoder(shape_config(mla_shape), torch.device("cpu"), torch.float32)
    head = draw_prediction_layer(target)
    assert isinstance(head.get_submodule("layers.0.mlp"), Experts)
    assert head.kv_shape == target.config.kv_shape
    assert (head.embedding, head.head, head.taps) == (None, None, (6,))


@pytest.mark.parametrize("drafter", ["auto", "eagle3", "dspark"])
def test_drafters_of_an_mla_shape_change_no_token(mla_shape: str, drafter: str) -> None:
    case = Case((5, 6, 7), SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    options: dict[str, object] = {"num_pages": 40, "max_len": 100, "device": "cpu"}
    plain = build(mla_shape, drafter="none", **options)  # type: ignore[arg-type]
    drafted = build(mla_shape, drafter=drafter, **options)  # type: ignore[arg-type]
    assert tokens(run(plain.engine, [case])) == tokens(run(drafted.engine, [case]))
    chosen = next(d for d in drafted.decisions if d.field == "drafter")
    assert chosen.value == ("mtp" if drafter == "auto" else drafter)


def test_draw_here_sets_norms_to_one_and_biases_to_zero(tiny: str) -> None:
    config = replace(shape_config(tiny), qkv_bias=True)
    decoder = shapes.Decoder(config)
    shapes.draw_here(decoder, seed=0)
    for name, parameter in decoder.named_parameters():
        if parameter.dim() == 1:
            assert bool((parameter == (0.0 if name.endswith("bias") else 1.0)).all()), name
