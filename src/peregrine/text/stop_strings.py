"""Stop strings are found in text that comes in pieces."""

from collections.abc import Sequence
from functools import lru_cache

from peregrine.errors import RequestError


class StopStrings:
    """Finds the stop string that is completed first, however the text is cut into pushes.

    If one character completes several, the longest wins. Text is held only while it may begin a stop string.
    Stop strings have no maximum length, so each is matched by Knuth-Morris-Pratt: constant amortised work per
    character, where `str.find` over a held tail can take time quadratic in a hostile stop string's length.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise RequestError("stop", stops, "is not a list of non-empty strings", "send the strings, or none")
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._starts: dict[str, list[int]] = {}  # by first character
        for which, stop in enumerate(self._stops):
            self._starts.setdefault(stop[0], []).append(which)
        self._begun = set[int]()  # those of which a prefix is matched
        self._links = [_border_lengths(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # length of each stop string's prefix that the text ends with
        self._held = ""
        self._stopped: str | None = None

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stopped

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """Add text; returns (text that can be sent now, the completed stop string). After a stop: ('', stop).

        While not `armed`, a completed stop string is ordinary text.
        """
        if self._stopped is not None:
            return "", self._stopped
        if not self._held and self._starts.keys().isdisjoint(text):
            return text, None
        for index, character in enumerate(text):
            self._stopped = self._advance(character, armed)
            if self._stopped is not None:
                pending, self._held = self._held + text[: index + 1], ""
                return pending[: -len(self._stopped)], self._stopped
        pending = self._held + text
        num_free = len(pending) - max((self._matched[which] for which in self._begun), default=0)
        self._held = pending[num_free:]
        return pending[:num_free], None

    def finish(self) -> str:
        """The held text, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str, armed: bool) -> str | None:
        """Add one character; returns the longest stop string it completes, if any and if armed."""
        for which in sorted(self._begun.union(self._starts.get(character, ()))):  # the longest first
            stop, links, matched = self._stops[which], self._links[which], self._matched[which]
            while matched and stop[matched] != character:
                matched = links[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                if armed:
                    return stop
                matched = links[-1]
            self._matched[which] = matched
            if matched:
                self._begun.add(which)
            else:
                self._begun.discard(which)
        return None


@lru_cache(maxsize=256)  # the generations of one request share their stop strings
def _border_lengths(stop: str) -> list[int]:
    """The Knuth-Morris-Pratt table: for each prefix, the length of the longest shorter prefix it ends with."""
    lengths = [0] * len(stop)
    for index in range(1, len(stop)):
        border = lengths[index - 1]
        while border and stop[border] != stop[index]:
            border = lengths[border - 1]
        lengths[index] = border + (stop[border] == stop[index])
    return lengths
