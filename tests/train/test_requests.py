"""Requests for stories: the words asked for are in the story, and a held-out story stays held out."""

import re
from pathlib import Path

import pytest

from peregrine.train.documents import Source, held_out, read_source
from peregrine.train.merlin.requests import NOUNS, as_plain, as_requested, cast_of, request_for, with_requests

SOUP = (
    "Once upon a time there was a dragon. The dragon loved soup. Every day he cooked a big pot of soup. "
    "One day a bird came and ate with him. The bird said it was the best meal ever. They were friends."
)
KEY = (
    "Once upon a time, there was a brave rabbit named Max. One day Max found a shiny key under a bush. "
    "He took the key to the owl. She said the key was hers. Max gave it back and she was glad."
)
PARTY = "The door was open. Behind the door was a candle. The candle was lit and the door was red."
EMPTY = "It was late. They were tired. Then they went home and slept until the next day came."
STORIES = (SOUP, KEY, PARTY)


def test_the_cast_is_the_first_character_and_the_repeated_things():
    assert cast_of(SOUP).character == "dragon"
    assert cast_of(SOUP).things == ("soup", "bird")
    assert cast_of(KEY).things == ("key",)
    assert cast_of(PARTY).character is None


def test_a_thing_named_once_or_late_is_not_asked_for():
    assert "bush" not in cast_of(KEY).things
    late = SOUP + " " + "They sang and sang. " * 40 + "Then a kite came. The kite was red."
    assert "kite" not in cast_of(late).things


@pytest.mark.parametrize("story", STORIES)
def test_every_noun_asked_for_is_in_the_story(story):
    # Random choices are seeded by the text, so another ending gives other requests.
    seen = set()
    for number in range(60):
        ending = "!" * number
        request = request_for(story + ending)
        assert request is not None
        asked = set(re.findall(r"[a-z]+", request.lower())) & NOUNS
        assert len(asked) >= 2, request
        assert asked <= set(re.findall(r"[a-z]+", story.lower())), request
        seen.add(request)
    assert len(seen) >= 8


def test_verbs_are_the_storys_own():
    requests = [request_for(SOUP + "!" * number) for number in range(80)]
    assert "Tell me a story about a dragon who loves soup." in requests
    clauses = {re.sub(r"^.* who |[.?]( in it\.)?$", "", r) for r in requests if r and " who " in r}
    assert clauses == {"loves soup"}
    finds = {request_for(KEY + "!" * number) for number in range(80)}
    assert any("rabbit who finds a key" in request for request in finds if request)


def test_a_story_without_nouns_of_its_own_stays_plain():
    assert request_for(EMPTY) is None
    assert as_requested(EMPTY) is None
    assert as_plain(EMPTY) == EMPTY


def test_a_storys_request_is_deterministic():
    texts = [story + "!" * number for story in STORIES for number in range(40)]
    requested = [as_requested(text) for text in texts]
    assert requested == [as_requested(text) for text in texts]
    assert 40 < sum(text is not None for text in requested) < 100
    for text, chat in zip(texts, requested, strict=True):
        assert (as_plain(text) is None) == (chat is not None)
        if chat is not None:
            assert chat.startswith("<|user|>\n")
            assert chat.endswith("\n<|assistant|>\n" + text)


def test_sources_split_and_the_story_decides_on_the_hold_out(tmp_path: Path):
    stories = [f"{story} Number {i}." for i in range(400) for story in STORIES]
    path = tmp_path / "stories_tiny_0.txt"
    path.write_text("".join(f"{story}\n<|endoftext|>\n" for story in stories))
    other = Source("chat", (path,), 0.6)
    plain, asked, same = with_requests([Source("stories_tiny", (path,), 0.4), other])
    assert (plain.name, asked.name, same) == ("stories_tiny", "requested_stories_tiny", other)
    assert plain.share + asked.share == pytest.approx(0.4)
    parts = [*read_source(plain), *read_source(asked)]
    assert len(parts) == len(stories)
    for document in parts:
        assert held_out(document.key) == held_out(document.text.rpartition("<|assistant|>\n")[2])
    assert any(held_out(document.key) for document in parts)
