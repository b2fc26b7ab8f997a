"""Tokenizers rebuilt from GGUF metadata, against published pre-tokenizers and SentencePiece's law."""

import itertools
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from models.gguf_files import MERGES, byte_tokens, tokenizer_fields
from peregrine.errors import CheckpointError, RequestError
from peregrine.text.gguf import SPLITS, tokenizer_of
from peregrine.text.tokenizer import Tokenizer as Ours

TEXTS = (
    *("the thin 12 12345 in\n\nthe  the\t1", "I'll don't THE'S x", "naïve Größe — …", "١٢ ½ 日本語 한국어", ""),
    *("  two\r\n\r\n  ", "👩‍👩‍👧 🇩🇪", "a\x00b\x01", "in the 1 2 12 the<|im_end|>the"),
)
PUBLISHED = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
}


def rebuilt(**changes: Any) -> Ours:
    fields = tokenizer_fields(**changes)
    return tokenizer_of("x.gguf", {name.replace("__", "."): value for name, value in fields.items()})


@pytest.mark.parametrize("pre", PUBLISHED)
def test_byte_level_ids_are_those_of_the_published_pre_tokenizer(pre: str) -> None:
    vocabulary = {token: id for id, token in enumerate(byte_tokens())}
    merges = [(left, right) for left, right in (merge.split() for merge in MERGES)]
    published = Tokenizer(models.BPE(vocabulary, merges))
    published.add_special_tokens(byte_tokens()[-2:])
    published.pre_tokenizer = pre_tokenizers.Sequence(PUBLISHED[pre])
    tokenizer = rebuilt(pre=pre)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == published.encode(text).ids, text
        assert tokenizer.decode(ids, skip_special=False) == text


def test_every_way_to_split_keeps_the_text() -> None:
    for pre in SPLITS:
        tokenizer = rebuilt(pre=pre, add_bos_token=False)
        for text in TEXTS:
            assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text, pre


def test_bos_and_eos_are_added_where_the_file_says_so() -> None:
    bos = len(byte_tokens()) - 2
    plain = rebuilt().encode("the")
    assert rebuilt(add_bos_token=True).encode("the") == [bos, *plain]
    assert rebuilt(pre="llama-bpe").encode("the")[0] == bos  # by default, as llama.cpp does
    assert rebuilt(add_bos_token=True, add_eos_token=True).encode("the") == [bos, *plain, bos]
    assert rebuilt(add_bos_token=True).encode("the", add_special=False) == plain


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
PIECES += ["▁", "t", "h", "e", "n", "i", "▁t", "th", "he", "▁the", "in", "hin", "▁th", "▁▁", "nn"]
SCORES = [0.0] * 259 + [-9.0, -9.1, -9.2, -9.3, -9.4, -9.5, -1.0, -2.0, -0.5, -3.0, -1.5, -0.7, -2.5, -0.2, -4.0]


def sentencepiece_ids(text: str) -> list[int]:
    """SentencePiece's law: join the two neighbours that make the best token, the leftmost first, until none do."""
    ids = {piece: id for id, piece in enumerate(PIECES)}
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [a + b for a, b in itertools.pairwise(symbols)]
        pairs = [(-SCORES[ids[piece]], i) for i, piece in enumerate(joined) if piece in ids]
        if not pairs:
            break
        at = min(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    found: list[int] = []
    for symbol in symbols:
        found += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


def test_sentencepiece_ids_follow_the_scores() -> None:
    kinds = [2, 3, 3] + [6] * 256 + [1] * 15
    fields = {"model": "llama", "pre": None, "tokens": PIECES, "scores": SCORES, "token_type": kinds, "merges": None}
    tokenizer = rebuilt(**fields, bos_token_id=1, eos_token_id=2, unknown_token_id=0)
    for text in ("the thin", "then  the   hinn", "é 日本 the", "nnn thth e", "t"):
        assert tokenizer.encode(text) == [1, *sentencepiece_ids(text)], text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_file_without_a_tokenizer_serves_token_ids() -> None:
    absent = tokenizer_of("x.gguf", {"general.architecture": "llama"})
    assert absent.missing is not None
    with pytest.raises(RequestError, match=r"no tokenizer: x\.gguf has none.*send token ids"):
        absent.encode("hello")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "bert"}, ["tokenizer.ggml.model='bert'", "supported are gpt2 and llama"]),
        ({"tokens": None}, ["tokenizer.ggml.tokens=None", "missing"]),
        ({"pre": "martian"}, ["tokenizer.ggml.pre='martian'", "known are gpt-2"]),
        ({"pre": None}, ["tokenizer.ggml.pre=None"]),
        ({"merges": ["a b c"]}, ["merges", "not two tokens"]),
        ({"merges": ["a q"]}, ["merges", "no token of the vocabulary"]),
        ({"token_type": [1, 1]}, ["token_type", "not one for each"]),
        ({"eos_token_id": 9999}, ["eos_token_id=9999", "not one of"]),
    ],
)
def test_what_cannot_be_rebuilt_is_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as refused:
        rebuilt(**changes)
    for word in ["x.gguf", *words]:
        assert word in str(refused.value)
