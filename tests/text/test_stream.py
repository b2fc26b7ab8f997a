"""Streamed text equals the text decoded at the end, however the tokens are split into pushes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peregrine.text.stream import Detokenizer, TextStream
from peregrine.text.tokenizer import Tokenizer

ALPHABET = [*"abtheng .,\n 0", "é", "e\u0301", "ß", "你", "好", "世", "🦅", "👩\u200d🚀", "\ufffd", "▁", "\u0000"]
WORDS = ["the", " the", "bird", " 你好", "🦅🦅", "<|eos|>", "<tool>", "鳥 bird", "\n\n", "  "]
texts = st.lists(st.sampled_from(ALPHABET + WORDS), max_size=12).map("".join)


@st.composite
def generations(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Ids a model may emit: parts of texts, and random ids, with unknown ones and broken bytes."""
    stretches = st.one_of(
        texts.map(lambda text: tokenizer.encode(text, add_special=False)),
        st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=8),
        st.lists(st.sampled_from(sorted(tokenizer.byte_ids) or [0]), max_size=6),
    )
    return [id for ids in draw(st.lists(stretches, max_size=4)) for id in ids]


def cut(data: st.DataObject, ids: Sequence[int]) -> list[Sequence[int]]:
    places = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [ids[start:end] for start, end in zip([0, *places], [*places, len(ids)], strict=True)]


def reference(tokenizer: Tokenizer, prompt: list[int], ids: Sequence[int], skip_special: bool) -> str:
    """What the ids add to the prompt's text, by decoding everything twice."""
    return tokenizer.decode([*prompt, *ids], skip_special)[len(tokenizer.decode(prompt, skip_special)) :]


def draw_prompt(data: st.DataObject, tokenizer: Tokenizer) -> list[int]:
    """A prompt that ends with a whole character (and not in a run of bytes: see the tests that do).

    Special ids after the run do not end it: they are skipped when text is decoded.
    """
    prompt = tokenizer.encode(data.draw(texts), add_special=data.draw(st.booleans()))
    while next((id for id in reversed(prompt) if id not in tokenizer.special_ids), None) in tokenizer.byte_ids:
        prompt.pop()
    return prompt


@settings(max_examples=60)
@given(data=st.data(), skip_special=st.booleans())
def test_pushes_add_up_to_the_whole_text(tokenizer: Tokenizer, data: st.DataObject, skip_special: bool) -> None:
    prompt, ids = draw_prompt(data, tokenizer), data.draw(generations(tokenizer))
    expected = reference(tokenizer, prompt, ids, skip_special)
    detokenizer = Detokenizer(tokenizer, prompt, skip_special)
    text = ""
    for part in cut(data, ids):
        text += detokenizer.push(part)
        assert expected.startswith(text)
    assert text + detokenizer.finish() == expected
    assert detokenizer.finish() == ""


@settings(max_examples=60)
@given(data=st.data(), skip_special=st.booleans())
def test_texts_that_are_looked_up_are_those_of_their_ids(
    tokenizer: Tokenizer, data: st.DataObject, skip_special: bool
) -> None:
    """A stream without stop strings looks up what was met before: all ids, the second time."""
    prompt, ids = draw_prompt(data, tokenizer), data.draw(generations(tokenizer))
    expected = reference(tokenizer, prompt, ids, skip_special)
    for parts in ([[id] for id in ids], cut(data, ids)):
        stream, text = TextStream(tokenizer, prompt, skip_special=skip_special), ""
        for part in parts:
            text += stream.push(part)
            assert expected.startswith(text)
        assert text + stream.finish() == expected
        assert stream.num_final == len(ids)


@settings(max_examples=40)
@given(data=st.data())
def test_no_more_is_held_back_than_must_be(tokenizer: Tokenizer, data: st.DataObject) -> None:
    prompt, ids = draw_prompt(data, tokenizer), data.draw(generations(tokenizer))
    detokenizer, text = Detokenizer(tokenizer, prompt), ""
    for count, id in enumerate(ids, start=1):
        text += detokenizer.push([id])
        now = reference(tokenizer, prompt, ids[:count], skip_special=True)
        if tokenizer.byte_level:
            assert len(now) - len(text) <= 1  # the beginning of one character
        elif not any(id in tokenizer.byte_ids for id in ids):
            assert now == text


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    ids = [tokenizer.backend.token_to_id(token) for token in tokens]
    assert None not in ids
    return [id for id in ids if id is not None]


def byte_ids(tokenizer: Tokenizer, spelled: bytes) -> list[int]:
    """Ids that spell these bytes, one id each."""
    if tokenizer.byte_level:
        of_byte = {tokenizer.token_bytes(id): id for id in range(tokenizer.vocab_size)}
        return [of_byte[bytes([byte])] for byte in spelled]
    return ids_of(tokenizer, *(f"<0x{byte:02X}>" for byte in spelled))


@pytest.fixture(params=["byte_level", "byte_fallback", "metaspace_fallback"])
def bytewise(request: pytest.FixtureRequest, tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers[request.param]


def test_a_text_that_is_looked_up_does_not_pass_what_is_held(tokenizers: dict[str, Tokenizer]) -> None:
    """Nor is the text of a character's last byte that byte's own."""
    tokenizer = tokenizers["byte_level"]
    (letter,), first, rest = byte_ids(tokenizer, b"a"), byte_ids(tokenizer, b"\xe4"), byte_ids(tokenizer, b"\xbd\xa0")
    for parts, pieces in (
        ([[letter], [letter]], ["a", "a"]),
        ([first, [letter]], ["", "\ufffda"]),
        ([first, rest], ["", "你"]),
        ([[letter], rest], ["a", "\ufffd\ufffd"]),
        ([[letter], rest, [letter, *first, *rest, letter]], ["a", "\ufffd\ufffd", "a你a"]),
    ):
        stream = TextStream(tokenizer, [])
        assert [stream.push(part) for part in parts] == pieces
        assert stream.finish() == ""


def test_a_character_comes_out_whole(bytewise: Tokenizer) -> None:
    detokenizer = Detokenizer(bytewise, bytewise.encode("a bird"))
    parts = [detokenizer.push([id]) for id in byte_ids(bytewise, "🦅".encode())]
    assert "".join(parts) + detokenizer.finish() == "🦅"
    assert "\ufffd" not in "".join(parts)


def test_half_a_character_at_the_end_is_a_replacement(bytewise: Tokenizer) -> None:
    detokenizer = Detokenizer(bytewise, bytewise.encode("a bird"))
    assert detokenizer.push(byte_ids(bytewise, b"\xf0")) == ""
    assert detokenizer.finish() == "\ufffd"


@pytest.mark.parametrize("split", [1, 2, 3])
def test_a_character_the_prompt_began_belongs_to_the_generation(bytewise: Tokenizer, split: int) -> None:
    spelled = byte_ids(bytewise, "🦅".encode())
    detokenizer = Detokenizer(bytewise, [*bytewise.encode("a bird"), *spelled[:split]])
    assert detokenizer.push(spelled[split:]) + detokenizer.finish() == "🦅"


def test_a_whole_character_of_the_prompt_is_not_returned_again(bytewise: Tokenizer) -> None:
    prompt = [*bytewise.encode("a bird"), *byte_ids(bytewise, "\ufffd\n".encode())]
    detokenizer = Detokenizer(bytewise, prompt)
    assert detokenizer.push(byte_ids(bytewise, b"\nx")) + detokenizer.finish() == "\nx"
    assert Detokenizer(bytewise, prompt).finish() == ""


def test_a_bad_byte_after_a_prompt_ending_in_bytes_changes_no_earlier_text(bytewise: Tokenizer) -> None:
    prompt = [*bytewise.encode("a bird"), *byte_ids(bytewise, "é".encode())]
    detokenizer = Detokenizer(bytewise, prompt)
    assert detokenizer.push(byte_ids(bytewise, b"\xff")) + detokenizer.finish() == "\ufffd"


@pytest.mark.parametrize("name", ["byte_fallback", "metaspace", "metaspace_fallback"])
def test_only_the_first_word_of_the_text_loses_its_space(tokenizers: dict[str, Tokenizer], name: str) -> None:
    tokenizer = tokenizers[name]
    word = tokenizer.encode("the", add_special=False)
    assert tokenizer.decode(word) == "the"
    assert Detokenizer(tokenizer, []).push(word) == "the"
    assert Detokenizer(tokenizer, tokenizer.encode("", add_special=True)).push(word) == "the"
    assert Detokenizer(tokenizer, tokenizer.encode("bird")).push(word) == " the"


def test_a_skipped_id_does_not_end_a_run_of_bytes(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_fallback"]
    first, *rest = byte_ids(tokenizer, "é".encode())
    ids = [first, *ids_of(tokenizer, "<|eos|>"), *rest]
    assert Detokenizer(tokenizer, []).push([*ids, *ids_of(tokenizer, "b")]) == "éb"
    shown = Detokenizer(tokenizer, [], skip_special=False)
    assert shown.push([*ids, *ids_of(tokenizer, "b")]) == "\ufffd<|eos|>\ufffdb"


def test_a_skipped_id_does_not_end_a_character_of_the_prompt(bytewise: Tokenizer) -> None:
    *begun, last = byte_ids(bytewise, "🦅".encode())
    detokenizer = Detokenizer(bytewise, [*begun, *ids_of(bytewise, "<|eos|>")])
    assert detokenizer.push([last]) + detokenizer.finish() == "🦅"


def test_a_word_after_leading_bytes_keeps_its_space(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_fallback"]
    word = tokenizer.encode("the", add_special=False)
    assert Detokenizer(tokenizer, []).push([*byte_ids(tokenizer, b"\n"), *word]) == "\n the"
    assert Detokenizer(tokenizer, byte_ids(tokenizer, b"\n")).push(word) == " the"


def test_each_id_gets_the_characters_it_completes(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_fallback"]
    detokenizer = Detokenizer(tokenizer, [])
    # The decoder drops the space that begins the whole text; the others keep their places.
    assert detokenizer.push_each([*byte_ids(tokenizer, " é\n".encode()), *ids_of(tokenizer, "<|eos|>", "b")]) == [
        *["", "", "é", "\n"],
        *["", "b"],
    ]


class CountingBackend:
    """Counts the ids that are passed to the library."""

    def __init__(self, backend: Any) -> None:
        self.backend, self.num_ids = backend, 0

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        self.num_ids += len(ids)
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, id: int) -> str | None:
        self.num_ids += 1
        return self.backend.id_to_token(id)


@pytest.mark.parametrize("spelled", [b"\xff", b"\x80", b"a", "\ufffd".encode(), "你".encode()])
def test_decoding_is_linear_in_the_text(bytewise: Tokenizer, spelled: bytes) -> None:
    counting = CountingBackend(bytewise.backend)
    detokenizer = Detokenizer(replace(bytewise, backend=counting), bytewise.encode("a bird"))  # type: ignore[arg-type]
    ids = byte_ids(bytewise, spelled) * 500
    for id in ids:
        detokenizer.push([id])
    detokenizer.finish()
    assert counting.num_ids <= 8 * len(ids)


def push_all(stream: TextStream, parts: Sequence[Sequence[int]]) -> tuple[str, int, str | None]:
    """Text of a whole generation, the number of ids it needs, and the stop string."""
    text = ""
    for part in parts:
        text += stream.push(part)
        if stream.stopped is not None:
            break
    return text + stream.finish(), stream.num_final, stream.stopped


@settings(max_examples=60)
@given(data=st.data(), stops=st.lists(st.text("ab \nh你🦅", min_size=1, max_size=3), max_size=3))
def test_a_stream_ends_at_the_first_stop(tokenizer: Tokenizer, data: st.DataObject, stops: list[str]) -> None:
    prompt, ids = draw_prompt(data, tokenizer), data.draw(generations(tokenizer))
    whole = reference(tokenizer, prompt, ids, skip_special=True)
    ends = [(whole.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in whole]
    end, negative, stop = min(ends, default=(len(whole), 0, None))
    expected = whole[: end + negative]

    needed = len(ids)
    if stop is not None:  # the shortest beginning of the ids that already reads so
        lengths = range(len(ids) + 1)
        needed = next(n for n in lengths if reference(tokenizer, prompt, ids[:n], True)[:end] == whole[:end])
    for parts in (cut(data, ids), [ids]):
        assert push_all(TextStream(tokenizer, prompt, stops), parts) == (expected, needed, stop)


def push(stream: TextStream, ids: Sequence[int]) -> tuple[str, int, str | None]:
    """Text of one push, how many ids the text so far needs, and the stop string."""
    return stream.push(ids), stream.num_final, stream.stopped


def test_ids_after_the_one_that_completes_the_stop_do_not_count(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    stream = TextStream(tokenizer, [], stops=["st"])
    assert push(stream, ids_of(tokenizer, "kil")) == ("kil", 1, None)
    assert push(stream, ids_of(tokenizer, "s")) == ("", 2, None)
    assert push(stream, ids_of(tokenizer, "turn", "the", "upon")) == ("", 3, "st")
    assert push(stream, ids_of(tokenizer, "the")) == ("", 3, "st")
    assert stream.finish() == ""


def test_a_newline_byte_stops_at_its_own_id(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_fallback"]
    bird, newline = ids_of(tokenizer, "b"), byte_ids(tokenizer, b"\n")
    at_once = TextStream(tokenizer, bird, stops=["\n"])
    assert push(at_once, [*bird, *newline, *newline, *bird]) == ("b", 2, "\n")
    # Held until the run of bytes ends.
    stream = TextStream(tokenizer, bird, stops=["\n"])
    assert push(stream, [*bird, *newline]) == ("b", 1, None)
    assert push(stream, [*newline]) == ("", 1, None)
    assert push(stream, bird) == ("", 2, "\n")


def test_a_stop_in_the_text_held_to_the_end_is_found(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_fallback"]
    stream = TextStream(tokenizer, ids_of(tokenizer, "b"), stops=["\n"])
    assert push(stream, [*ids_of(tokenizer, "b"), *byte_ids(tokenizer, b"\n.")]) == ("b", 1, None)
    assert stream.finish() == ""
    assert (stream.num_final, stream.stopped) == (2, "\n")


def test_half_a_stop_at_the_end_is_text(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    stream = TextStream(tokenizer, [], stops=["fast bird"])
    assert push(stream, ids_of(tokenizer, "fast")) == ("", 1, None)
    assert stream.finish() == "fast"
    assert stream.stopped is None
