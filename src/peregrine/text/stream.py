"""Text as tokens arrive: only what can no longer change is given out, each character once, in linear time.

Three parts, each usable alone: `Detokenizer` turns ids into final text, `StopStrings` finds where text must
end, and `TextStream` joins the two for the engine and says which ids the kept text needs.

The text of a generation is read in the context of its prompt:
    decode(prompt + generated) = decode(prompt) + text
A character that the prompt only begins belongs wholly to the generation.
"""

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from peregrine.errors import RequestError
from peregrine.text.tokenizer import Tokenizer

_UTF8_BYTES = 4  # the longest character


class _Speller(Protocol):
    """How one kind of tokenizer settles text."""

    def settle(self, ids: Iterable[int]) -> list[str]:
        """Take in ids; return the text that is now final, one string per id, in order of arrival."""
        ...

    def finish(self) -> list[str]:
        """The text of the ids still held, as it reads if nothing follows."""
        ...


class Detokenizer:
    """Turns generated ids into text that is final: no half characters, nothing twice."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special: bool = True) -> None:
        kind = _ByteSpeller if tokenizer.byte_level else _TokenSpeller
        self._speller: _Speller = kind(tokenizer, prompt_ids, skip_special)

    def push(self, ids: Iterable[int]) -> str:
        """The text that became final with these ids."""
        return "".join(self.settle(ids))

    def settle(self, ids: Iterable[int]) -> list[str]:
        """The same as one string per id, in order of arrival; the newest ids may still be held back."""
        return self._speller.settle(ids)

    def finish(self) -> str:
        """The text still held back, as it reads if nothing follows."""
        return "".join(self.rest())

    def rest(self) -> list[str]:
        """The text still held back as one string per id, in order of arrival."""
        return self._speller.finish()


class _ByteSpeller:
    """Byte-level vocabularies: ids spell bytes; an unfinished character waits for the rest of its bytes."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special else frozenset()
        self._waiting = b""  # the start of a character, at most 3 bytes
        self._waiting = self._unfinished_tail(prompt_ids)

    def settle(self, ids: Iterable[int]) -> list[str]:
        return [self._settle_one(id) for id in ids]

    def finish(self) -> list[str]:
        waiting, self._waiting = self._waiting, b""
        return [waiting.decode(errors="replace")]

    def _settle_one(self, id: int) -> str:
        if id in self._hidden:
            return ""
        spelled = self._waiting + self._tokenizer.token_bytes(id)
        text, used = codecs.utf_8_decode(spelled, "replace", False)
        self._waiting = spelled[used:]
        return text

    def _unfinished_tail(self, ids: Sequence[int]) -> bytes:
        tail = b""
        for id in reversed(ids):
            if id not in self._hidden:
                tail = self._tokenizer.token_bytes(id) + tail
            if len(tail) >= _UTF8_BYTES:
                break
        # The tail may begin inside a character, but the first byte of the last one is always recognised.
        return tail[codecs.utf_8_decode(tail, "replace", False)[1] :]


class _TokenSpeller:
    """Vocabularies of text pieces: an id's text depends on the visible id before it, if any, and on no other.

    Byte-fallback ids are the exception: the decoder reads a run of them as one, and a single bad byte turns
    all of it into U+FFFD. So a run is held until an id that is no byte ends it.

        |-- prompt --|-- settled --| context |-- run, held --|
                                      one id    may begin in the prompt
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special else frozenset()
        self._context: list[int] = []  # empty at the very start of the text only
        run: list[int] = []
        for id in filter(self._visible, reversed(prompt_ids)):
            if id not in tokenizer.byte_ids:
                self._context = [id]
                break
            run.append(id)
        self._run = run[::-1]
        self._num_prompt_ids = len(run)  # these head the run, but their text is not ours to return

    def settle(self, ids: Iterable[int]) -> list[str]:
        settled: list[str] = []
        for id in ids:
            visible = self._visible(id)
            if visible and id in self._tokenizer.byte_ids:
                self._run.append(id)
            elif visible:
                settled += self.finish()
                settled.append(self._after_context([id]))
                self._context = [id]
            elif self._run:  # keeps its place; the decoder never sees it, so the run goes on
                self._run.append(id)
            else:
                settled.append("")
        return settled

    def finish(self) -> list[str]:
        if not self._run:
            return []
        places = [place for place, id in enumerate(self._run) if self._visible(id)]
        byte_run = [self._run[place] for place in places]
        pieces = [""] * len(self._run)
        ends = _character_ends(bytes(self._tokenizer.byte_ids[id] for id in byte_run))
        # From the back: a decoder may strip the space that begins the whole text.
        for end, character in zip(reversed(ends), reversed(self._after_context(byte_run)), strict=False):
            pieces[places[end]] = character
        settled = pieces[self._num_prompt_ids :]
        self._context, self._run, self._num_prompt_ids = byte_run[-1:], [], 0
        return settled

    def _visible(self, id: int) -> bool:
        return id not in self._hidden and self._tokenizer.token(id) != ""

    def _after_context(self, ids: list[int]) -> str:
        before = self._tokenizer.decode(self._context, skip_special=False)
        return self._tokenizer.decode(self._context + ids, skip_special=False)[len(before) :]


def _character_ends(run: bytes) -> list[int]:
    """Indices of the bytes that complete a character; of all bytes where the run as a whole is no UTF-8."""
    try:
        text = run.decode()
    except UnicodeDecodeError:
        return list(range(len(run)))
    return [end - 1 for end in accumulate(len(character.encode()) for character in text)]


class StopStrings:
    """Finds the first stop string to be completed in a text, however the text is cut into pushes.

    Where several are completed by the same character the longest wins. Text is held back only while its end
    is the beginning of a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise RequestError("stop", stops, "is not a list of non-empty strings", "send the strings, or none")
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._links = [_border_lengths(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # how much of each stop string the text now ends with
        self._held = ""
        self._stopped: str | None = None

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stopped

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """(text that may go out now, the stop string if it is complete); after a stop, ('', stop).

        While not `armed`, a stop string that is completed ends nothing and stays part of the text.
        """
        if self._stopped is not None:
            return "", self._stopped
        if not self._held and self._first_characters.isdisjoint(text):
            return text, None
        for index, character in enumerate(text):
            self._stopped = self._advance(character, armed)
            if self._stopped is not None:
                seen, self._held = self._held + text[: index + 1], ""
                return seen[: -len(self._stopped)], self._stopped
        seen = self._held + text
        num_free = len(seen) - max(self._matched, default=0)
        self._held = seen[num_free:]
        return seen[:num_free], None

    def finish(self) -> str:
        """The text held back, which no stop string completed."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str, armed: bool) -> str | None:
        """Take in one character; the longest stop string it completes, if any, while armed."""
        for which, (stop, links) in enumerate(zip(self._stops, self._links, strict=True)):
            matched = self._matched[which]
            while matched and stop[matched] != character:
                matched = links[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                if armed:
                    return stop
                matched = links[-1]
            self._matched[which] = matched
        return None


def _border_lengths(stop: str) -> list[int]:
    """For each prefix of a stop string, the longest shorter prefix it ends with (Knuth, Morris, Pratt)."""
    lengths = [0] * len(stop)
    for index in range(1, len(stop)):
        border = lengths[index - 1]
        while border and stop[border] != stop[index]:
            border = lengths[border - 1]
        lengths[index] = border + (stop[border] == stop[index])
    return lengths


@dataclass(frozen=True, slots=True)
class Piece:
    """What one push brought."""

    text: str  # final text, to be appended to the output
    kept: int  # how many of the pushed ids belong to the output, from the first on
    stopped: str | None  # the stop string that ended the text


class TextStream:
    """The text of one generation, up to a stop string: what the engine feeds its tokens to."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special)
        self._stops = StopStrings(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens  # a stop string completed by one of the first so many ids ends nothing
        self._num_ids = 0  # pushed
        self._num_settled = 0  # of these, the ones whose text is final

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.stopped

    def push(self, ids: Sequence[int]) -> Piece:
        """Take in ids. Kept are all up to the one that completes a stop string; after a stop, none.

        An id once kept stays kept, since it may have been sent: if the stop turns out to have been completed
        by an id of an earlier push, whose text was held back, none of these ids is kept.
        """
        if self.stopped is not None:
            return Piece("", 0, self.stopped)
        earlier, self._num_ids = self._num_ids, self._num_ids + len(ids)
        text = self._until_stop(self._detokenizer.settle(ids))
        if self.stopped is not None:
            return Piece(text, max(0, self._num_settled - earlier), self.stopped)
        return Piece(text, len(ids), None)

    def finish(self) -> str:
        """The rest of the text, when no more ids come; `stopped` tells if a stop string was found in it."""
        if self.stopped is not None:
            return ""
        return self._until_stop(self._detokenizer.rest()) + self._stops.finish()

    def _until_stop(self, pieces: list[str]) -> str:
        """The text that may go out; counts the ids that were looked at to find it, one for each piece."""
        emitted = ""
        for piece in pieces:
            # The last half character is a piece of its own, but belongs to the last id.
            self._num_settled = min(self._num_settled + 1, self._num_ids)
            text, stopped = self._stops.push(piece, self._min_tokens == 0 or self._num_settled > self._min_tokens)
            emitted += text
            if stopped is not None:
                return emitted + (stopped if self._include_stop else "")
        return emitted
