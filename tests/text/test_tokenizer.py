"""Encoding and decoding agree with transformers on the same folder; malformed folders are refused with the reason."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from peregrine.errors import CheckpointError, RequestError
from peregrine.text.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "hello there",
    "  two  spaces\n\tand a tab ",
    "The <|user|>peregrine<|eos|> flew<tool>by",
    "naïve 你好 🦅 👩‍🚀 e\u0301 \u0000 鳥 bird",
    "<|bos|>twice",
]


@pytest.fixture(scope="session")
def oracle(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("add_special", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_encode_agrees_with_transformers(
    tokenizer: Tokenizer, oracle: PreTrainedTokenizerFast, text: str, add_special: bool
) -> None:
    assert tokenizer.encode(text, add_special) == oracle.encode(text, add_special_tokens=add_special)


@settings(max_examples=40, deadline=None)
@given(text=st.text(max_size=40))
def test_encode_of_any_text_agrees_with_transformers(
    tokenizer: Tokenizer, oracle: PreTrainedTokenizerFast, text: str
) -> None:
    assert tokenizer.encode(text) == oracle.encode(text)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), skip_special=st.booleans())
def test_decode_of_any_ids_agrees_with_transformers(
    tokenizer: Tokenizer, oracle: PreTrainedTokenizerFast, data: st.DataObject, skip_special: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=20))
    assert tokenizer.decode(ids, skip_special) == oracle.decode(ids, skip_special_tokens=skip_special)


def test_names_and_sizes_agree_with_transformers(tokenizer: Tokenizer, oracle: PreTrainedTokenizerFast) -> None:
    assert (tokenizer.bos_id, tokenizer.eos_id) == (oracle.bos_token_id, oracle.eos_token_id)
    assert tokenizer.vocab_size == len(oracle)
    assert set(oracle.all_special_ids) <= tokenizer.special_ids
    assert tokenizer.special_ids == {id for id, token in oracle.added_tokens_decoder.items() if token.special}
    assert [tokenizer.token(id) for id in range(len(oracle))] == oracle.convert_ids_to_tokens(range(len(oracle)))
    assert tokenizer.token(tokenizer.vocab_size) == ""


def test_token_bytes_spell_the_text(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer, text = tokenizers["byte_level"], "".join(TEXTS)
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, add_special=False))) == text.encode()


def test_only_a_byte_fallback_decoder_has_byte_ids(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    assert sorted(tokenizers["byte_fallback"].byte_ids.values()) == list(range(256))
    # Under another decoder <0x0A> is text like any other.
    backend = Backend.from_str(tokenizers["byte_fallback"].backend.to_str())
    backend.decoder = decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    assert not Tokenizer.read(tmp_path).byte_ids


def test_add_bos_token_is_honoured_where_the_post_processor_adds_none(write) -> None:
    config = {"bos_token": "<|bos|>", "add_bos_token": True}
    tokenizer = Tokenizer.read(write(config, with_bos=False))
    assert tokenizer.encode("bird") == [tokenizer.bos_id, *tokenizer.encode("bird", add_special=False)]


def test_add_bos_token_adds_no_second_bos(write) -> None:
    tokenizer = Tokenizer.read(write({"bos_token": "<|bos|>", "add_bos_token": True}, with_bos=True))
    assert tokenizer.encode("bird").count(tokenizer.bos_id) == 1


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": "fast"},  # in the vocabulary, but tokenizer.json does not call it special
        {"additional_special_tokens": ["<tool>"]},
        {"extra_special_tokens": {"image_token": "fast"}},
        {"added_tokens_decoder": {"__TOOL__": {"content": "<tool>", "special": True, "normalized": False}}},
        {"added_tokens_decoder": {"__NEXT__": {"content": "<new>", "special": True, "normalized": False}}},
        {"bos_token": None, "eos_token": None},
        {},
    ],
)
def test_special_tokens_of_the_config_agree_with_transformers(write, config) -> None:
    folder = write({})
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    text = json.dumps(config).replace("__TOOL__", str(backend.token_to_id("<tool>")))
    text = text.replace("__NEXT__", str(backend.get_vocab_size()))
    (folder / "tokenizer_config.json").write_text(text)
    tokenizer, oracle = Tokenizer.read(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    prompt = "a fast bird<tool> and <new>faster<|eos|>"
    assert tokenizer.encode(prompt) == oracle.encode(prompt)
    assert tokenizer.decode(oracle.encode(prompt)) == oracle.decode(oracle.encode(prompt), skip_special_tokens=True)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (oracle.bos_token_id, oracle.eos_token_id)
    assert tokenizer.named_tokens == oracle.special_tokens_map


def test_special_tokens_map_counts_where_the_config_lists_no_added_tokens(write) -> None:
    folder = write({"bos_token": "<|user|>"})
    (folder / "special_tokens_map.json").write_text('{"bos_token": {"content": "<|bos|>"}}')
    oracle = PreTrainedTokenizerFast.from_pretrained(folder)
    assert Tokenizer.read(folder).bos_id == oracle.bos_token_id == oracle.convert_tokens_to_ids("<|bos|>")


def test_a_tokenizer_without_a_config_works(write) -> None:
    folder = write()
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.read(folder)
    assert tokenizer.decode(tokenizer.encode("a bird")) == "a bird"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.chat_template) == (None, None, None)


def test_limits_for_training_batches_do_not_cut_prompts(write) -> None:
    folder = write()
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.read(folder)
    assert tokenizer.decode(tokenizer.encode("a bird that is fast")) == "a bird that is fast"


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="lone surrogate at character 2"):
        tokenizer.encode("ab\ud83e")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is not a folder"):
        Tokenizer.read(tmp_path / "nowhere")


def test_a_missing_tokenizer_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        Tokenizer.read(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_another_vocabulary_format_is_named_with_the_remedy(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=rf"has {name} but no tokenizer\.json; convert it"):
        Tokenizer.read(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(("content", "problem"), [("{", "not valid JSON"), ("[1]", "holds a list")])
def test_a_malformed_file_is_named(write, name: str, content: str, problem: str) -> None:
    folder = write()
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=rf"{name} .*{problem}"):
        Tokenizer.read(folder)


def test_json_that_is_not_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(CheckpointError, match="is JSON but not a tokenizer"):
        Tokenizer.read(tmp_path)


def test_an_eos_token_outside_the_vocabulary_is_refused(write) -> None:
    with pytest.raises(CheckpointError, match="eos_token is '<nope>'"):
        Tokenizer.read(write({"eos_token": "<nope>"}))


def test_added_tokens_with_other_ids_are_refused(write) -> None:
    config = {"added_tokens_decoder": {"7": {"content": "<tool>", "normalized": False}}}
    with pytest.raises(CheckpointError, match=r"gives '<tool>' the id 7, but tokenizer\.json makes it"):
        Tokenizer.read(write(config))


@pytest.mark.parametrize(
    "decoder", [decoders.CTC(), decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])]
)
def test_a_decoder_that_cannot_be_streamed_is_refused(write, decoder: decoders.Decoder) -> None:
    folder = write()
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.decoder = decoder
    backend.save(str(folder / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="cannot be streamed because of"):
        Tokenizer.read(folder)


def test_the_bytes_of_a_token_are_found_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are asked for in every round of every stream."""
    fresh, asked = replace(tokenizer), list[int]()
    find = Tokenizer.token
    monkeypatch.setattr(Tokenizer, "token", lambda self, id: (asked.append(id), find(self, id))[1])
    ids = tokenizer.encode("naïve 鳥")
    expected = [tokenizer.token_bytes(id) for id in ids]
    asked.clear()
    assert [fresh.token_bytes(id) for id in [*ids, *ids]] == [*expected, *expected]
    assert sorted(asked) == sorted(set(ids))
