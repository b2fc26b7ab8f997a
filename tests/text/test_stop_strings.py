"""Stop strings are found as a plain search finds them, and text is held back no longer than it must be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peregrine.errors import RequestError
from peregrine.text.stop_strings import StopStrings

letters = st.sampled_from("abc你🦅")
stop_lists = st.lists(st.lists(letters, min_size=1, max_size=5).map("".join), max_size=4)
pushes = st.lists(st.lists(letters, max_size=5).map("".join), max_size=12)


def search(text: str, stops: list[str], first_end: int = 1) -> tuple[str, str | None]:
    """Text before the stop that is completed first, and that stop; of several with the same end, the longest."""
    for end in range(first_end, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(stops=stop_lists, parts=pushes)
def test_any_split_agrees_with_a_plain_search(stops: list[str], parts: list[str]) -> None:
    finder, emitted, stopped = StopStrings(stops), "", None
    for part in parts:
        text, stopped = finder.push(part)
        emitted += text
        if stopped is not None:
            assert finder.push("abc") == ("", stopped)
            break
    assert (emitted + finder.finish(), stopped) == search("".join(parts), stops)
    assert finder.stopped == stopped


@given(stops=stop_lists, parts=pushes)
def test_only_the_beginning_of_a_stop_is_held_back(stops: list[str], parts: list[str]) -> None:
    finder, emitted, seen = StopStrings(stops), "", ""
    for part in parts:
        text, stopped = finder.push(part)
        emitted, seen = emitted + text, seen + part
        if stopped is not None:
            return
        beginnings = [stop[:length] for stop in stops for length in range(1, len(stop))]
        held = max((len(beginning) for beginning in beginnings if seen.endswith(beginning)), default=0)
        assert emitted == seen[: len(seen) - held]


@pytest.mark.parametrize(
    ("stops", "parts", "expected"),
    [
        (["END"], ["the E", "N", "D of"], ("the ", "END")),
        (["abc", "b"], ["xabc"], ("xa", "b")),  # complete first, though it begins later
        (["bc", "abc"], ["xabc"], ("x", "abc")),  # complete together: the longer
        (["aab"], ["aaab"], ("a", "aab")),  # a false start that overlaps the match
        (["abab"], ["abaabab"], ("aba", "abab")),
        (["\n\n"], ["a\n", "b\n", "\n"], ("a\nb", "\n\n")),
        ([], ["abc"], ("abc", None)),
    ],
)
def test_which_stop_wins(stops: list[str], parts: list[str], expected: tuple[str, str | None]) -> None:
    finder = StopStrings(stops)
    results = [finder.push(part) for part in parts]
    assert ("".join(text for text, _ in results), results[-1][1]) == expected


def test_half_a_stop_at_the_end_is_text() -> None:
    finder = StopStrings(["abc"])
    assert finder.push("xab") == ("x", None)
    assert finder.finish() == "ab"
    assert finder.finish() == ""


@given(stops=stop_lists, before=pushes, after=pushes)
def test_a_stop_completed_while_not_armed_is_text(stops: list[str], before: list[str], after: list[str]) -> None:
    """It may begin before the finder is armed, if it ends after."""
    finder, emitted, stopped = StopStrings(stops), "", None
    for part in before:
        text, stopped = finder.push(part, armed=False)
        assert stopped is None
        emitted += text
    for part in after:
        text, stopped = finder.push(part)
        emitted += text
        if stopped is not None:
            break
    first = len("".join(before)) + 1  # the first end that counts
    assert (emitted + finder.finish(), stopped) == search("".join(before + after), stops, first)


@pytest.mark.parametrize("stops", ["abc", [""], ["a", 3]])
def test_stops_that_are_not_strings_are_refused(stops) -> None:
    with pytest.raises(RequestError, match="stop="):
        StopStrings(stops)
