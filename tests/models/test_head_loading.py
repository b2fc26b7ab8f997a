"""Head folders that do not fit are refused with names and numbers; saved heads load again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from models.head_files import SHAPE, VD, H, V, eagle3_tensors, layer_tensors, write
from peregrine.errors import CheckpointError
from peregrine.models.decoder import Decoder
from peregrine.models.draft_heads import Eagle3Head, default_taps, is_head, load_head, save_head
from peregrine.models.draft_heads.saving import head_tensors

EAGLE3: dict[str, Any] = SHAPE | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": VD,
    "taps": (2, 4, 5),
}


def refusal(folder: Path, target: Decoder) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_head(folder, target, "cpu", torch.float32)
    return str(caught.value)


def changed(tmp_path: Path, tensors: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    """An EAGLE-3 folder with a changed config or changed tensors; a tensor None is left out."""
    config = {name: value for name, value in (EAGLE3 | changes).items() if value is not ...}
    stored = eagle3_tensors(EAGLE3) | (tensors or {})
    return write(tmp_path / "head", config, {n: t for n, t in stored.items() if t is not None})


def test_missing_unexpected_and_misshaped_tensors_are_named(target: Decoder, tmp_path: Path) -> None:
    wrong = {
        "midlayer.self_attn.q_proj.weight": torch.zeros(48, H),
        "midlayer.hidden_norm.weight": None,
        "norm.weight": None,
        "mask_hidden": torch.zeros(3),
    }
    message = refusal(changed(tmp_path, wrong), target)
    assert "2 missing: midlayer.hidden_norm.weight, norm.weight" in message
    assert "1 unexpected: mask_hidden" in message
    assert "midlayer.self_attn.q_proj.weight is [48, 24], not [48, 48]" in message


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"vocab_size": 99}, ["vocab_size=99", "vocabulary is 99, the target's 61"]),
        ({"hidden_size": 32}, ["idea of the hidden size is 32, the target's 24"]),
        ({"target_hidden_size": 32}, ["target_hidden_size=32", "is 32, the target's 24"]),
        ({"eagle_config": {"use_aux_hidden_state": False}}, ["use_aux_hidden_state=False", "only true"]),
        ({"eagle_config": {"use_last_layernorm": False}}, ["use_last_layernorm=False", "only true"]),
        ({"eagle_config": {"parallel_draft_step": 4}}, ["parallel_draft_step=4", "parallel drafting"]),
        ({"mask_token_id": 5}, ["mask_token_id=5", "P-EAGLE heads (parallel drafting) are not supported"]),
        ({"parallel_drafting": True, "ptd_token_id": 5}, ["parallel_drafting=True", "P-EAGLE heads"]),
        ({"architectures": ["PEagleDraftModel"]}, ["architectures=['PEagleDraftModel']", "P-EAGLE heads"]),
        ({"logit_scale": 0.5}, ["logit_scale=0.5"]),
        ({"fc_norm": True, "norm_before_fc": True}, ["fc_norm=True", "norm_before_fc"]),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 8]}, ["tap 8", "target's 8 layers"]),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
            },
            ["[1, 2, 3]", "counts outputs"],
        ),
        ({"model_type": "mamba", "architectures": ["MambaEagle3"]}, ["model_type='mamba'", "llama, mistral"]),
        ({"hidden_act": "relu"}, ["hidden_act='relu'"]),
        ({"speculators_model_type": "peagle"}, ["speculators_model_type='peagle'", "eagle3, mtp, dflash, dspark"]),
        (
            {"speculators_model_type": "eagle3", "transformer_layer_config": SHAPE},
            ["norm_before_residual=None", "missing"],
        ),
    ],
)
def test_refusals_name_field_and_numbers(
    changes: dict[str, Any], parts: list[str], target: Decoder, tmp_path: Path
) -> None:
    message = refusal(changed(tmp_path, **changes), target)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("d2t", "part"),
    [
        (None, "the head guesses 37 of the target's 61 tokens"),
        (torch.zeros(12, dtype=torch.int64), "I64 [12], not whole numbers [37]"),
        (torch.zeros(VD), "F32 [37], not whole numbers [37]"),
        (torch.full((VD,), V), "maps outside the target's 61 tokens"),
        (torch.full((VD,), -1), "maps outside the target's 61 tokens"),
    ],
)
def test_draft_vocabulary_that_does_not_map(d2t: Tensor | None, part: str, target: Decoder, tmp_path: Path) -> None:
    assert part in refusal(changed(tmp_path, {"d2t": d2t}), target)


def test_small_targets_must_have_their_taps_named(target: Decoder, tmp_path: Path) -> None:
    config = target.config
    folder = changed(tmp_path)
    assert load_head(folder, target, "cpu", torch.float32).taps == default_taps(config.num_layers) == (2, 4, 5)
    small = Decoder(replace(config, num_layers=5, windows=(None,) * 5))
    assert "too small for the default taps" in refusal(folder, small)


def test_eagle_of_another_width(target: Decoder, tmp_path: Path) -> None:
    config = SHAPE | {"architectures": ["EagleLlamaForCausalLM"], "hidden_size": 32}
    folder = write(tmp_path / "head", config, {"fc.weight": torch.zeros(32, 64)})
    assert "hidden_size=32: the head's hidden size is 32, the target's 24" in refusal(folder, target)


def test_two_prediction_layers(target: Decoder, tmp_path: Path) -> None:
    config = SHAPE | {"architectures": ["LlamaForCausalLM"], "num_nextn_predict_layers": 2}
    tensors = {f"model.layers.{i}.eh_proj.weight": torch.zeros(H, 2 * H) for i in (8, 9)}
    message = refusal(write(tmp_path / "head", config, tensors), target)
    assert "2 prediction layers (model.layers.8., model.layers.9.)" in message


def test_a_decoder_is_not_a_head(target: Decoder, tmp_path: Path) -> None:
    def new(*shape: int, about: float = 0.0) -> Tensor:
        return torch.full(shape, about)

    config = SHAPE | {"architectures": ["LlamaForCausalLM"]}
    tensors = layer_tensors("model.layers.0", config, H, new) | {"model.norm.weight": new(H)}
    folder = write(tmp_path / "model", config, tensors)
    assert not is_head(folder)
    assert "holds no draft head" in refusal(folder, target)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fc_norm": True, "norm_output": True, "eagle_aux_hidden_state_layer_ids": [0, 4, 7]},
        {"norm_before_fc": True, "norm_before_residual": True, "num_hidden_layers": 2},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}, "attention_bias": True},
        {
            "model_type": "qwen3",
            "rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 1, "high_freq_factor": 3},
        },
    ],
)
def test_a_saved_head_is_the_same_head(changes: dict[str, Any], target: Decoder, tmp_path: Path) -> None:
    config = EAGLE3 | changes
    tensors = eagle3_tensors(config, own_embedding=True)
    first = load_head(write(tmp_path / "a", config, tensors), target, "cpu", torch.float32, pack=False)
    assert isinstance(first, Eagle3Head)
    save_head(first, tmp_path / "b")
    stored = load_file(tmp_path / "b" / "model.safetensors")
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[name], tensors[name]) for name in tensors)
    again = load_head(tmp_path / "b", target, "cpu", torch.float32, pack=False)
    assert isinstance(again, Eagle3Head)
    assert again.config == first.config
    assert again.draft_to_target is not None
    assert torch.equal(again.draft_to_target, first.draft_to_target)


def test_saving_casts_weights_but_not_ids(target: Decoder, tmp_path: Path) -> None:
    head = load_head(changed(tmp_path), target, "cpu", torch.float32, pack=False)
    assert isinstance(head, Eagle3Head)
    save_head(head, tmp_path / "b", torch.bfloat16)
    stored = load_file(tmp_path / "b" / "model.safetensors")
    assert stored["fc.weight"].dtype == torch.bfloat16
    assert (stored["d2t"].dtype, stored["t2d"].dtype) == (torch.int64, torch.bool)
    ids = json.loads((tmp_path / "b" / "config.json").read_text())
    assert ids["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert ids["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_weights_stay_in_bfloat16_on_a_cpu_if_stored_in_it(
    stored: torch.dtype, target: Decoder, tmp_path: Path
) -> None:
    pytest.importorskip("numba")
    plain = load_head(changed(tmp_path), target, "cpu", torch.float32, pack=False)
    save_head(plain, tmp_path / "b", stored)
    head, wide = (load_head(tmp_path / "b", target, "cpu", torch.float32, pack=pack) for pack in (True, False))
    assert isinstance(head, Eagle3Head)
    assert isinstance(wide, Eagle3Head)
    assert head.fc.format.unpack().weight.equal(wide.fc.weight)
    assert head.fc.format.panels.dtype is stored  # type: ignore[attr-defined]


def test_a_packed_head_cannot_be_saved(target: Decoder, tmp_path: Path) -> None:
    head = load_head(changed(tmp_path), target, "cpu", torch.float32)
    assert isinstance(head, Eagle3Head)
    with pytest.raises(ValueError, match="pack=False"):
        head_tensors(head)
