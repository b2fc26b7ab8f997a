"""Incremental detokenisation: text is returned once no later token can change it, each character once.

`Detokenizer` turns ids into final text, `StopStrings` searches text for stop strings, and `TextStream` combines
both for the engine. Generated text is decoded in the context of its prompt:

    decode(prompt + generated) == decode(prompt) + text

A character whose first bytes end the prompt belongs to the generated text. `tokenizers.DecodeStream` cannot serve
here: with byte-fallback vocabularies it raises on, or differs from the whole decode of, bytes that are no UTF-8; it
has no way to flush held text, and it does not say which id completed a character.
"""

import codecs
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate

from peregrine.errors import RequestError
from peregrine.text.tokenizer import Tokenizer

_UTF8_BYTES = 4  # the longest character


class Detokenizer:
    """Turns generated ids into final text: no partial characters, nothing twice, in linear time."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special: bool = True) -> None:
        kind = _ByteDecoder if tokenizer.byte_level else _PieceDecoder
        self._decoder: _ByteDecoder | _PieceDecoder = kind(tokenizer, prompt_ids, skip_special)

    def push(self, ids: Iterable[int]) -> str:
        """Add ids; returns the text that became final."""
        return "".join(self.push_each(ids))

    def push_each(self, ids: Iterable[int]) -> list[str]:
        """Add ids; returns the final text of each id in order. The newest ids may be missing: they are held."""
        return self._decoder.push_each(ids)

    def finish(self) -> str:
        """Text of the ids still held, decoded as if nothing followed."""
        return "".join(self.finish_each())

    def finish_each(self) -> list[str]:
        """The result of `finish` as one string per held id, in order."""
        return self._decoder.finish()


class _ByteDecoder:
    """Byte-level vocabularies: every id stands for bytes; an incomplete character is held."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special else frozenset()
        self._held = self._incomplete_tail(prompt_ids)  # the first bytes of a character, at most 3

    def push_each(self, ids: Iterable[int]) -> list[str]:
        return [self._push(id) for id in ids]

    def finish(self) -> list[str]:
        held, self._held = self._held, b""
        return [held.decode(errors="replace")]

    def _push(self, id: int) -> str:
        if id in self._hidden:
            return ""
        pending = self._held + self._tokenizer.token_bytes(id)
        text, used = codecs.utf_8_decode(pending, "replace", False)
        self._held = pending[used:]
        return text

    def _incomplete_tail(self, ids: Sequence[int]) -> bytes:
        tail = b""
        for id in reversed(ids):
            if id not in self._hidden:
                tail = self._tokenizer.token_bytes(id) + tail
            if len(tail) >= _UTF8_BYTES:
                break
        # The tail may begin inside a character; the decoder resynchronises at the first byte of the next one.
        return tail[codecs.utf_8_decode(tail, "replace", False)[1] :]


class _PieceDecoder:
    """Vocabularies of text pieces: an id's text depends on the visible id before it and on no other.

    Byte-fallback ids are the exception: the decoder takes a run of them as one string, and a single bad byte turns
    all of it into U+FFFD. So a run is held until an id that is no byte ends it.

        |-- prompt --|-- final --| context |-- run, held --|
                                    one id    may begin in the prompt
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special else frozenset()
        self._context: list[int] = []  # empty only at the start of the text
        run: list[int] = []
        for id in filter(self._visible, reversed(prompt_ids)):
            if id not in tokenizer.byte_ids:
                self._context = [id]
                break
            run.append(id)
        self._run = run[::-1]
        self._num_prompt_ids = len(run)  # the first ids of the run, whose text belongs to the prompt

    def push_each(self, ids: Iterable[int]) -> list[str]:
        final: list[str] = []
        for id in ids:
            visible = self._visible(id)
            if visible and id in self._tokenizer.byte_ids:
                self._run.append(id)
            elif visible:
                final += self.finish()
                final.append(self._after_context([id]))
                self._context = [id]
            elif self._run:  # an invisible id keeps its place in the output and does not end the run
                self._run.append(id)
            else:
                final.append("")
        return final

    def finish(self) -> list[str]:
        if not self._run:
            return []
        places = [place for place, id in enumerate(self._run) if self._visible(id)]
        byte_run = [self._run[place] for place in places]
        pieces = [""] * len(self._run)
        ends = _character_ends(bytes(self._tokenizer.byte_ids[id] for id in byte_run))
        # Aligned at the end, because a decoder may strip the space that begins the whole text.
        for end, character in zip(reversed(ends), reversed(self._after_context(byte_run)), strict=False):
            pieces[places[end]] = character
        final = pieces[self._num_prompt_ids :]
        self._context, self._run, self._num_prompt_ids = byte_run[-1:], [], 0
        return final

    def _visible(self, id: int) -> bool:
        return id not in self._hidden and self._tokenizer.token(id) != ""

    def _after_context(self, ids: list[int]) -> str:
        before = self._tokenizer.decode(self._context, skip_special=False)
        return self._tokenizer.decode(self._context + ids, skip_special=False)[len(before) :]


def _character_ends(run: bytes) -> list[int]:
    """Indices of the bytes that complete a character; every index if the run is not valid UTF-8."""
    try:
        text = run.decode()
    except UnicodeDecodeError:
        return list(range(len(run)))
    return [end - 1 for end in accumulate(len(character.encode()) for character in text)]


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


class TextStream:
    """The text of one generation, up to but without its stop string."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stops: Sequence[str] = (),
        skip_special: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """A stop string that one of the first `min_tokens` ids completes is ordinary text."""
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special)
        self._stops, self._may_stop = StopStrings(stops), bool(stops)
        self._min_tokens = min_tokens
        self._num_ids = 0  # pushed
        self._num_final = 0  # of these, ids whose text is final

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.stopped

    @property
    def num_final(self) -> int:
        """Number of ids whose text is final; after a stop, of those up to the id that completed it."""
        return self._num_final

    def push(self, ids: Sequence[int]) -> str:
        """Add ids; returns the text that is final now. See `stopped` for a stop string, after which ids are ignored.

        The stop may have been completed by an id of an earlier push, whose text was held: see `num_final`.
        """
        if self.stopped is not None:
            return ""
        self._num_ids += len(ids)
        return self._until_stop(self._detokenizer.push_each(ids))

    def finish(self) -> str:
        """The rest of the text, when no more ids come; it may contain a stop string: see `stopped`."""
        if self.stopped is not None:
            return ""
        return self._until_stop(self._detokenizer.finish_each()) + self._stops.finish()

    def _until_stop(self, pieces: list[str]) -> str:
        """The text that can be sent, from the final text of one id after the other."""
        if not self._may_stop:
            self._num_final = min(self._num_final + len(pieces), self._num_ids)
            return "".join(pieces)
        sent = ""
        for piece in pieces:
            # `finish_each` gives an incomplete character as a piece of its own, though its id was counted before.
            self._num_final = min(self._num_final + 1, self._num_ids)
            text, stopped = self._stops.push(piece, self._min_tokens == 0 or self._num_final > self._min_tokens)
            sent += text
            if stopped is not None:
                break
        return sent
