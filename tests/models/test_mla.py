"""Multi-head latent attention (MLA): the absorbed form equals the expanded one, trains, and refuses bad sizes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.deepseek_fields import DEEPSEEK_FIELDS
from peregrine.errors import CheckpointError
from peregrine.kernels.residual import Residual
from peregrine.models.checkpoint.folder import Fields
from peregrine.models.checkpoint.weights import Weights
from peregrine.models.config import ModelConfig
from peregrine.models.families import parse_config
from peregrine.models.layers import Packable
from peregrine.models.loading import decoder_plan, load_decoder
from peregrine.models.mla import MLAAttention
from peregrine.models.rope_table import rope_table

FIELDS: dict[str, Any] = DEEPSEEK_FIELDS | {
    "routed_scaling_factor": 1.0,
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 257,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 96,
}


def read(**changes: Any) -> ModelConfig:
    return parse_config(Fields("config.json", FIELDS | changes))


def refusal(**changes: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(**changes)
    return str(caught.value)


def test_sizes_and_switches() -> None:
    config = read()
    assert config.mla is not None
    assert (config.mla.key_dim, config.mla.q_dim, config.rope_dim) == (40, 20, 8)
    assert config.kv_shape.num_entries == 40
    assert (config.kv_shape.num_heads, config.kv_shape.value_dim, config.kv_shape.shared) == (1, 32, True)
    assert config.layer_attention()[0].scale == 20**-0.5
    assert [config.has_experts(i) for i in range(3)] == [False, True, True]
    assert read(q_lora_rank=None).mla.q_rank is None
    kimi = read(model_type="kimi_k2", n_group=1, topk_group=1, n_routed_experts=24)
    assert kimi.family == "deepseek_v3"


def test_a_config_without_q_lora_rank_has_the_published_one() -> None:
    fields = {name: value for name, value in FIELDS.items() if name != "q_lora_rank"}
    config = parse_config(Fields("config.json", fields))
    assert config.mla is not None
    assert config.mla.q_rank == 1536


def test_yarn_scales_scores() -> None:
    yarn = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    config = read(rope_scaling={**yarn, "mscale": 0.707, "mscale_all_dim": 0.707})
    magnitude = 0.1 * 0.707 * torch.tensor(40.0).log().item() + 1
    assert config.layer_attention()[0].scale == pytest.approx(20**-0.5 * magnitude**2)
    assert config.rope.scaling.attention_factor == 1.0  # type: ignore[union-attr]
    assert config.max_positions == 163840
    plain = read(rope_scaling=yarn)
    assert plain.layer_attention()[0].scale == 20**-0.5


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"num_key_value_heads": 2}, ["num_key_value_heads=2", "num_attention_heads=6"]),
        ({"qk_rope_head_dim": 7}, ["qk_rope_head_dim=7", "odd"]),
        ({"kv_lora_rank": 0}, ["kv_lora_rank=0", "at least 1"]),
        ({"v_head_dim": "10"}, ["v_head_dim='10'", "whole number"]),
        ({"q_lora_rank": None, "attention_bias": True}, ["attention_bias=True", "q_lora_rank is null"]),
        ({"rope_interleave": 1}, ["rope_interleave=1", "neither true nor false"]),
        ({"n_group": 3}, ["n_group=3", "does not divide"]),
        ({"num_experts_per_tok": 9}, ["num_experts_per_tok=9", "experts (8)"]),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, ["DeepseekV32ForCausalLM", "not supported"]),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], parts: list[str]) -> None:
    message = refusal(**changes)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("q_rank", [None, 20])
def test_plan_covers_every_parameter_and_every_tensor(
    write_checkpoint: Callable[..., Path], q_rank: int | None
) -> None:
    folder = write_checkpoint("DeepseekV3", **{**DEEPSEEK_FIELDS, "q_lora_rank": q_rank})
    decoder = load_decoder(folder, pack=False)
    plan = decoder_plan(decoder.config)
    assert set(plan) == {name for name, _ in decoder.named_parameters()}
    assert {piece.name for pieces in plan.values() for piece in pieces} == Weights(folder).names()


@pytest.mark.parametrize(
    ("field", "value", "tensor"),
    [
        ("kv_lora_rank", 16, "kv_b_proj.weight is [132, 32], not [132, 16]"),
        ("qk_nope_head_dim", 16, "q_b_proj.weight is [120, 20], not [144, 20]"),
        ("v_head_dim", 8, "o_proj.weight is [48, 60], not [48, 48]"),
        ("q_lora_rank", 24, "q_a_proj.weight is [20, 48], not [24, 48]"),
        ("qk_rope_head_dim", 16, "kv_a_proj_with_mqa.weight is [40, 48], not [48, 48]"),
    ],
)
def test_sizes_that_disagree_with_tensors_are_named(
    write_checkpoint: Callable[..., Path], edit_json: Callable[..., None], field: str, value: int, tensor: str
) -> None:
    folder = write_checkpoint("DeepseekV3", num_hidden_layers=1, **DEEPSEEK_FIELDS)
    edit_json(folder / "config.json", **{field: value})
    with pytest.raises(CheckpointError) as caught:
        load_decoder(folder)
    assert f"model.layers.0.self_attn.{tensor}" in str(caught.value)


def test_prediction_layers_are_left_for_the_head(
    write_checkpoint: Callable[..., Path], edit_json: Callable[..., None]
) -> None:
    folder = write_checkpoint("DeepseekV3", **DEEPSEEK_FIELDS)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(48, 96)
    save_file(tensors, folder / "model.safetensors")
    edit_json(folder / "config.json", num_nextn_predict_layers=1)
    assert load_decoder(folder).config.num_extra_layers == 1
    edit_json(folder / "config.json", num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"1 unexpected: model\.layers\.3\.eh_proj\.weight"):
        load_decoder(folder)


def expanded(attention: MLAAttention, tensors: dict[str, Tensor], x: Tensor, scale: float) -> Tensor:
    """The expanded form of the paper in float64: keys and values of every head, made from the latents.

    Without rotation: every x is at position 0.
    """
    latent, heads = attention.latent, attention.num_heads
    weight = {name.rsplit(".", 2)[1]: tensor.double() for name, tensor in tensors.items()}

    def norm(values: Tensor, name: str) -> Tensor:
        return values / (values.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight[name]

    q = norm(x @ weight["q_a_proj"].T, "q_a_layernorm") @ weight["q_b_proj"].T
    q = q.view(-1, heads, latent.q_dim)
    kept, k_rope = (x @ weight["kv_a_proj_with_mqa"].T).split((latent.kv_rank, latent.rope_dim), 1)
    made = (norm(kept, "kv_a_layernorm") @ weight["kv_b_proj"].T).view(len(x), heads, -1)
    k_nope, v = made.split((latent.nope_dim, latent.value_dim), 2)
    k = torch.cat((k_nope, k_rope[:, None].expand(-1, heads, -1)), dim=2)
    scores = torch.einsum("nhd,shd->hns", q, k) * scale
    seen = torch.ones(len(x), len(x)).tril().bool()
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hns,shd->nhd", weights, v).flatten(1)


@torch.no_grad()
@pytest.mark.parametrize("layer", [0, 2])  # queries projected together with keys, and separately
def test_absorbed_equals_expanded(write_checkpoint: Callable[..., Path], dense_cache: Any, layer: int) -> None:
    folder = write_checkpoint("DeepseekV3", **DEEPSEEK_FIELDS)
    decoder = load_decoder(folder)
    attention, own = decoder.layer(layer).attention, decoder.layer_attention()
    assert isinstance(attention, MLAAttention)
    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(3))
    zeros = torch.zeros(9, dtype=torch.int64)  # every token is at position 0: nothing is rotated
    table = rope_table(decoder.config.rope, decoder.config.rope_dim, 4, "cpu")
    heads = attention.project(Residual(x, x), zeros, table)
    attended = heads.attend(dense_cache(own).bind(torch.arange(9)), layer)
    prefix = f"model.layers.{layer}.self_attn."
    stored = {name: t for name, t in load_file(folder / "model.safetensors").items() if prefix in name}
    expected = expanded(attention, stored, x.double(), own[layer].scale)
    torch.testing.assert_close(attention.merge_heads(attended).double(), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_live_rows_equal_the_rows_of_a_full_forward(write_checkpoint: Callable[..., Path], dense_cache: Any) -> None:
    decoder = load_decoder(write_checkpoint("DeepseekV3", **DEEPSEEK_FIELDS))
    tokens = torch.randint(0, 257, (17,), generator=torch.Generator().manual_seed(1))
    positions, live = torch.arange(17), torch.tensor([16, 3, 8])
    caches = [dense_cache(decoder.layer_attention()) for _ in range(2)]
    whole, _ = decoder(tokens, positions, caches[0].bind(positions))
    some, _ = decoder(tokens, positions, caches[1].bind(positions, live), (), live)
    torch.testing.assert_close(some, whole[live], atol=1e-6, rtol=0)
    for layer in range(3):
        assert torch.equal(caches[0].keys[layer], caches[1].keys[layer])


@pytest.mark.parametrize("pack", [False, True])
def test_packed_and_plain_agree_and_gradients_reach_every_parameter(
    write_checkpoint: Callable[..., Path], dense_cache: Any, pack: bool
) -> None:
    folder = write_checkpoint("DeepseekV3", **DEEPSEEK_FIELDS)
    decoder = load_decoder(folder, pack=pack)
    tokens, positions = torch.arange(12) * 7, torch.arange(12)
    hidden, _ = decoder(tokens, positions, dense_cache(decoder.layer_attention()).bind(positions))
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float()
    expected = model(tokens[None]).logits[0]
    logits = decoder.logits(hidden)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    if pack:
        assert all(part.packed is not None for part in decoder.modules() if isinstance(part, Packable))
        return
    logits.log_softmax(-1)[torch.arange(11), tokens[1:]].sum().backward()
    expected.log_softmax(-1)[torch.arange(11), tokens[1:]].sum().backward()
    theirs = model.model.embed_tokens.weight.grad
    torch.testing.assert_close(decoder.embedding.grad, theirs, atol=1e-4, rtol=1e-3)
    for name, parameter in decoder.named_parameters():
        if not name.endswith("choice_bias"):
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name
