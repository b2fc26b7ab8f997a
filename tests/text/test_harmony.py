"""Answers in harmony's channels: thoughts, calls and text, the same however the text is cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peregrine.text.harmony import MAX_HEADER, HarmonyStream
from peregrine.text.tool_formats import Call, format_of

THOUGHT = "<|channel|>analysis<|message|>Hm: 1 < 2.<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
FLY = "to=functions.fly"
# text -> thoughts, text, calls
CASES: dict[str, tuple[str, str, list[Call]]] = {
    f"{THOUGHT}{NEXT}{FINAL}Four.<|return|>": ("Hm: 1 < 2.", "Four.", []),
    f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}{FINAL}4": ("Hm: 1 < 2.\nHm: 1 < 2.", "4", []),
    f'{THOUGHT}{NEXT}<|channel|>commentary {FLY} <|constrain|>json<|message|>{{"to": "Oslo"}}<|call|>': (
        "Hm: 1 < 2.",
        "",
        [Call("fly", '{"to": "Oslo"}')],
    ),
    f'<|channel|>commentary {FLY}<|message|>{{"to": "<|end|> \\\\\\"<|call|>"}}<|call|>': (
        "",
        "",
        [Call("fly", '{"to": "<|end|> \\\\\\"<|call|>"}')],
    ),
    f'<|channel|>commentary {FLY}<|message|>{{"to": "a"}} "x <|end|>" y<|call|>': (
        "",
        '" y',
        [Call("fly", '{"to": "a"} "x ')],
    ),
    f'{FINAL}She said "no.<|end|>{NEXT}{FINAL}"': ("", 'She said "no.\n"', []),
    # The recipient may stand behind the role, and the first role is the prompt's.
    f" {FLY}<|channel|>commentary json<|message|>{{}}": ("", "", [Call("fly", "{}")]),
    f"{NEXT} {FLY}<|channel|>analysis<|message|>{{}}<|call|>": ("", "", [Call("fly", "{}")]),
    "<|channel|>commentary to=land<|constrain|>json<|message|><|call|>": ("", "", [Call("land", "{}")]),
    # A preamble is for the user.
    f"<|channel|>commentary<|message|>First I fly.<|end|>{NEXT}<|channel|>commentary {FLY}<|message|>{{": (
        "",
        "First I fly.",
        [Call("fly", "{")],
    ),
    f"<|channel|>commentary<|message|>One.<|end|>{NEXT}{FINAL}Two.": ("", "One.\nTwo.", []),
    # What is for a tool that is not there stays in its channel.
    "<|channel|>analysis to=browser.search<|message|>{}<|call|>": ("{}", "", []),
    "<|channel|>commentary to=functions.swim<|message|>{}<|call|>": ("", "{}", []),
    # Cut off, without headers, or without ends.
    "<|channel|>analysis<|mess": ("", "<|mess", []),
    f"{NEXT}<|channel|>commentary {FLY} <|constrain|>js": ("", "", []),
    "<|channel|>final Hello": ("", "Hello", []),
    "Hello <|there": ("", "Hello <|there", []),
    f"Hello <|end|>\n{NEXT}{FINAL}you": ("", "Hello \nyou", []),
    f"<|channel|>analysis<|message|>Hm{FINAL}Yes": ("Hm", "Yes", []),
    f"<|message|>Yes<|end|>{NEXT}<|channel|>final <|constrain|>json<|message|>[1]": ("", "Yes\n[1]", []),
    f"<|channel|>{'x' * MAX_HEADER}<|message|>Yes": ("", f"{'x' * 11}<|message|>Yes", []),
    " \n": ("", "", []),
}


def parse(pieces: list[str]) -> tuple[str, str, list[Call]]:
    stream = HarmonyStream(("fly", "land"))
    thoughts, text, calls = "", "", list[Call]()
    for place, piece in enumerate([*pieces, ""]):
        thought, parsed = stream.push(piece, final=place == len(pieces))
        thoughts, text = thoughts + thought, text + parsed.text
        for part in parsed.pieces:
            before = calls.pop() if part.name is None else Call(part.name, "")
            calls.append(Call(before.name, before.arguments + part.arguments))
    return thoughts, text, calls


@pytest.mark.parametrize("text", CASES)
def test_thoughts_calls_and_text_are_told_apart(text: str) -> None:
    assert parse([text]) == parse(list(text)) == CASES[text]


@given(st.sampled_from(sorted(CASES)), st.lists(st.integers(0, 300), max_size=12))
def test_any_cut_gives_the_same(text: str, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert parse([text[a:b] for a, b in pairwise(places)]) == CASES[text]


MARKS = ("start", "channel", "constrain", "message", "end", "call", "return")
PIECES = st.sampled_from(
    [
        *(f"<|{mark}|>" for mark in MARKS),
        *("analysis", "final", "commentary", f" {FLY} ", "assistant", "to=", "{}", "<", "|>", " \n", "x" * 100),
    ]
)


@given(st.lists(PIECES, max_size=12))
def test_any_text_gives_the_same_by_characters_and_at_once(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert parse(list(text)) == parse([text]) == parse(pieces)


def test_what_is_settled_is_sent_at_once() -> None:
    stream = HarmonyStream(("fly",))
    assert stream.push("<|channel|>analysis<|message|>Let me <|")[0] == "Let me "
    assert stream.push("see<|end|><|start|>assistant<|channel|>final<|message|>Yes")[1].text == "Yes"
    assert stream.push(", I")[1].text == ", I"


def test_the_format_follows_from_the_template() -> None:
    assert format_of("<|start|>assistant<|channel|>final<|message|> <tool_call>") == "harmony"
