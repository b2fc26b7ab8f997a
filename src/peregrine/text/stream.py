"""Incremental detokenisation: text is returned once no later token can change it, each character once.

`Detokenizer` turns ids into final text, which `TextStream` searches for stop strings. Generated text is decoded in the
context of its prompt:

    decode(prompt + generated) == decode(prompt) + text

A character whose first bytes end the prompt belongs to the generated text. `tokenizers.DecodeStream` cannot serve
here: with byte-fallback vocabularies it raises on, or differs from the whole decode of, bytes that are no UTF-8; it
has no way to flush held text, and it does not say which id completed a character.
"""

import codecs
from collections.abc import Iterable, Sequence
from itertools import accumulate

from peregrine.text.stop_strings import StopStrings
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

    def whole(self, ids: Iterable[int]) -> str | None:
        """Add ids that are all known to be whole characters, after others, and return their text; None: they are not.

        Most tokens are, and to look them up takes a fifth of the time of `push`. Nothing is added if it is None.
        """
        return self._decoder.whole(ids)

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
        self._known = tokenizer.whole_texts

    def push_each(self, ids: Iterable[int]) -> list[str]:
        return [self._push(id) for id in ids]

    def whole(self, ids: Iterable[int]) -> str | None:
        if self._held:
            return None
        try:
            return "".join(map(self._known.__getitem__, ids))
        except KeyError:
            return None

    def finish(self) -> list[str]:
        held, self._held = self._held, b""
        return [held.decode(errors="replace")]

    def _push(self, id: int) -> str:
        if id in self._hidden:
            return ""
        own = self._tokenizer.token_bytes(id)
        pending = self._held + own
        text, used = codecs.utf_8_decode(pending, "replace", False)
        self._held = pending[used:]
        if used == len(pending) == len(own) and id not in self._tokenizer.special_ids:
            self._known[id] = text  # no character begins or ends outside
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

    def whole(self, _ids: Iterable[int]) -> None:
        """No id has a text of its own."""

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
        if not self._may_stop and (text := self._detokenizer.whole(ids)) is not None:
            self._num_final += len(ids)
            return text
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
