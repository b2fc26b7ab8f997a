"""Loading checkpoint folders; those that cannot be loaded are refused with a remedy."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from peregrine.errors import CheckpointError
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT
from peregrine.models.checkpoint.plan import Plan
from peregrine.models.checkpoint.weights import INDEX, Weights
from peregrine.models.layers import Linear
from peregrine.models.loading import decoder_plan, load_decoder, stored_dtype


@pytest.fixture
def folder(write_checkpoint: Callable[..., Path]) -> Path:
    return write_checkpoint("Llama")


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Load the only weight file, let `change` edit the tensors, write it back."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder: Path) -> list[str]:
    """Cut the only weight file into three and write the index; returns their names."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-0000{i + 1}-of-00003.safetensors" for i in range(3)]
    table = {name: names[i % 3] for i, name in enumerate(sorted(tensors))}
    for file in names:
        save_file({name: tensors[name] for name in table if table[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return names


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_decoder(folder)
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "changes", "factor"),
    [
        ("Granite", {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}, 12.0 / 0.22),  # as it is
        ("Gemma2", {}, float(torch.tensor(48**0.5).bfloat16())),  # rounded, as in training
    ],
)
def test_a_scaled_embedding(
    write_checkpoint: Callable[..., Path], family: str, changes: dict[str, Any], factor: float
) -> None:
    folder = write_checkpoint(family, **changes)
    stored = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].bfloat16()
    held = load_decoder(folder, dtype=torch.bfloat16, pack=False).embedding
    assert torch.equal(held, (stored.double() * factor).bfloat16())


def test_missing_folder_is_named(tmp_path: Path) -> None:
    assert "'" + str(tmp_path / "nowhere") + "' does not exist" in refusal(tmp_path / "nowhere")


def test_a_file_is_not_a_folder(folder: Path) -> None:
    assert "is a file; give the folder" in refusal(folder / "config.json")


def test_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "no config.json in" in refusal(folder)


def test_config_that_cannot_be_read(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    assert "config.json is not a regular file" in refusal(folder)
    assert "cannot be read" in refusal(Path("x" * 5000))


@pytest.mark.parametrize("text", ['{"vocab_size": ', "[1, 2]", "\xff\xfe"])
def test_malformed_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    message = refusal(folder)
    assert "config.json" in message
    assert any(problem in message for problem in ("not valid JSON", "not an object", "not UTF-8"))


def test_missing_unexpected_and_misshaped_tensors_are_named_together(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(3)
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(3)
        tensors["lm_head.weight"] = torch.zeros(256, 48)

    rewrite(folder, change)
    message = refusal(folder)
    assert "2 missing: model.layers.1.self_attn.k_proj.weight, model.norm.weight" in message
    assert "2 unexpected: model.layers.0.self_attn.q_proj.bias, model.layers.7.mlp.up_proj.weight" in message
    assert "1 of the wrong shape: lm_head.weight is [256, 48], not [257, 48]" in message


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "mlp" in name])
    assert "9 missing: " in refusal(folder)
    assert "and 1 more" in refusal(folder)


def test_integer_weights_are_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}))
    assert "1 not float32, float16 or bfloat16: model.norm.weight is I8" in refusal(folder)


def test_rotary_frequencies_and_a_tied_head_are_ignorable(write_checkpoint: Callable[..., Path]) -> None:
    folder = write_checkpoint("Llama", tie_word_embeddings=True)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["lm_head.weight"] = torch.zeros(257, 48)

    rewrite(folder, change)
    decoder = load_decoder(folder)
    assert decoder.head.weight is decoder.embedding
    assert decoder.embedding.abs().sum() > 0


def test_truncated_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert "model.safetensors' is not a whole safetensors file" in refusal(folder)


def test_pickles_are_never_opened(folder: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (folder / "exploded",))

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    message = refusal(folder)
    assert "pytorch_model.bin" in message
    assert "safetensors.torch.save_file" in message
    assert not (folder / "exploded").exists()


def test_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no safetensors weights in" in refusal(folder)


def test_several_files_without_an_index(folder: Path) -> None:
    names = shard(folder)
    (folder / INDEX).unlink()
    assert f"{len(names)} safetensors files" in refusal(folder)


def test_sharded_checkpoint_is_the_same_model(folder: Path) -> None:
    whole = load_decoder(folder, pack=False)
    shard(folder)
    for (name, ours), theirs in zip(
        load_decoder(folder, pack=False).named_parameters(), whole.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_index_naming_a_missing_shard(folder: Path) -> None:
    (folder / shard(folder)[1]).unlink()
    assert "names files that are not there: model-00002-of-00003.safetensors" in refusal(folder)


@pytest.mark.parametrize(
    ("index", "part"),
    [
        ({"weight_map": {"a": "../other.safetensors"}}, "names files outside the folder: ../other.safetensors"),
        ({"weight_map": ["a"]}, "has no weight_map"),
        ({}, "has no weight_map"),
    ],
)
def test_index_that_cannot_be_followed(folder: Path, index: dict[str, Any], part: str) -> None:
    (folder / INDEX).write_text(json.dumps(index))
    assert part in refusal(folder)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("asked", [torch.bfloat16, torch.float32])
def test_weights_are_cast_to_the_given_dtype(folder: Path, stored: torch.dtype, asked: torch.dtype) -> None:
    rewrite(folder, lambda tensors: tensors.update({n: t.to(stored) for n, t in tensors.items()}))
    tensors = load_file(folder / "model.safetensors")
    decoder = load_decoder(folder, dtype=asked, pack=False)
    assert {parameter.dtype for parameter in decoder.parameters()} == {asked}
    assert decoder.rope_table.dtype == torch.float32
    assert torch.equal(decoder.embedding, tensors["model.embed_tokens.weight"].to(asked))
    q = tensors["model.layers.0.self_attn.q_proj.weight"].to(asked)
    assert torch.equal(decoder.get_parameter("layers.0.attention.qkv.weight")[: len(q)], q)


def test_the_stored_dtype_is_the_embeddings(folder: Path) -> None:
    assert stored_dtype(folder) is torch.float32
    name = "model.embed_tokens.weight"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].bfloat16()}))
    assert stored_dtype(folder) is torch.bfloat16
    rewrite(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match="no tensor"):
        stored_dtype(folder)


def test_prediction_layers_beside_the_decoder_are_left_for_the_head(
    folder: Path, edit_json: Callable[..., None]
) -> None:
    extra = {"model.layers.3.eh_proj.weight": torch.zeros(48, 96), "model.mtp_layers.0.x": torch.zeros(1)}
    rewrite(folder, lambda tensors: tensors.update(extra))
    assert "2 unexpected" in refusal(folder)
    edit_json(folder / "config.json", num_nextn_predict_layers=1)
    assert load_decoder(folder).config.num_extra_layers == 1


def test_each_linear_is_packed_before_the_next_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill, behind = Weights.fill, []

    def watched(self: Weights, module: nn.Module, plan: Plan, held: torch.dtype | None) -> None:
        linears = [part for part in module.modules() if isinstance(part, Linear)]
        filled = [part for part in linears if part.weight is None or part.packed is not None]
        behind.append(len(filled))
        assert all(part.weight is None for part in filled), "a packed linear still holds its plain weight"
        fill(self, module, plan, held)

    monkeypatch.setattr(Weights, "fill", watched)
    load_decoder(folder)
    assert sorted(set(behind)) == list(range(14))  # 4 linears in each layer, one more in the last, the head


def test_weights_held_in_bfloat16_are_those_of_the_rounded_checkpoint(folder: Path) -> None:
    held = load_decoder(folder, dtype=torch.bfloat16)
    rewrite(folder, lambda tensors: tensors.update({name: value.bfloat16() for name, value in tensors.items()}))
    rounded = load_decoder(folder)
    assert torch.equal(held.embedding, rounded.embedding)
    assert torch.equal(held.norm.weight, rounded.norm.weight)
    for one, other in zip(held.modules(), rounded.modules(), strict=True):
        if isinstance(one, Linear) and isinstance(other, Linear):
            x = torch.randn(3, one.format.shape[1])
            assert torch.equal(one.forward(x), other.forward(x))
            assert one.format.num_bytes == other.format.num_bytes // (2 if NUMBA_PRESENT else 1)


def test_plan_covers_every_parameter_and_every_tensor(folder: Path) -> None:
    decoder = load_decoder(folder, pack=False)
    plan = decoder_plan(decoder.config)
    assert set(plan) == {name for name, _ in decoder.named_parameters()}
    assert {piece.name for pieces in plan.values() for piece in pieces} == Weights(folder).names()
