"""The random checkpoint: transformers can read it, and its text varies."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from peregrine.errors import ConfigError
from peregrine.synthetic.checkpoint import END_OF_TEXT, make_random_checkpoint

FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    first, again, other = (
        make_random_checkpoint(tmp_path / name, seed=seed) for name, seed in (("a", 5), ("b", 5), ("c", 6))
    )
    assert {path.name for path in first.iterdir()} == FILES
    for name in FILES:
        assert (first / name).read_bytes() == (again / name).read_bytes()
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


KINDS: dict[str, dict[str, int | bool | str]] = {
    "llama": {},
    "llama, tied": {"tied": True},
    "mla": {"kv_rank": 32},
    "mla and experts": {"kv_rank": 32, "q_rank": 24, "num_experts": 8, "num_layers": 3},
}


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_it_and_writes_varied_text(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = make_random_checkpoint(tmp_path, **KINDS[kind])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    prompt = tokenizer("Once upon a time", return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=48, do_sample=False)[0, prompt.input_ids.shape[1] :]
    assert tokens.unique().numel() >= 8
    chat = [{"role": "user", "content": "hello"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "User: hello\nAssistant:"


def test_tokenizer_spells_any_text_and_knows_the_end(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(make_random_checkpoint(tmp_path) / "tokenizer.json"))
    text = "The wind said: é, 鷹 and \U0001f985!"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("the valley").ids) < len("the valley")
    assert tokenizer.decode(tokenizer.encode(f"end{END_OF_TEXT}").ids) == "end"


def test_shape_and_dtype_are_as_given(tmp_path: Path) -> None:
    shape = {"num_layers": 1, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 1, "head_dim": 8}
    folder = make_random_checkpoint(tmp_path, dtype="bfloat16", vocab_size=300, **shape)
    weights = load_file(folder / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert weights["lm_head.weight"].shape == (300, 32)
    assert weights["model.layers.0.self_attn.k_proj.weight"].shape == (8, 32)
    assert "model.layers.1.input_layernorm.weight" not in weights


def test_too_small_a_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size=256"):
        make_random_checkpoint(tmp_path, vocab_size=256)


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="num_hidden_layers"):
        make_random_checkpoint(tmp_path, num_hidden_layers=2)
    with pytest.raises(ConfigError, match="dtype='int8'"):
        make_random_checkpoint(tmp_path, dtype="int8")
    with pytest.raises(ConfigError, match="num_experts=8: only with kv_rank"):
        make_random_checkpoint(tmp_path, num_experts=8)
