"""What commands print while text is generated: the text with drafted tokens marked, and how speculation went."""

import json
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from peregrine.errors import EngineFault
from peregrine.log import style, visible

if TYPE_CHECKING:
    from peregrine.engine.output import Delta, Output, TokenLogprob
    from peregrine.engine.stats import Stats
    from peregrine.text.stream import Detokenizer
    from peregrine.text.tokenizer import Tokenizer


class DraftMarks:
    """Cuts streamed text where its tokens end, so that the text of drafted tokens can be marked."""

    def __init__(self, detokenizer: "Detokenizer") -> None:
        """`detokenizer` must be new and made for the request's prompt."""
        self._detokenizer = detokenizer
        self._drafted: deque[bool] = deque()  # of tokens whose text is not final yet
        self._lengths: deque[tuple[int, bool]] = deque()  # of tokens whose text is final and not streamed yet

    def cut(self, delta: "Delta") -> Iterator[tuple[str, bool]]:
        """The delta's text in pieces: the text of one token, and whether it was drafted."""
        self._drafted.extend(delta.drafted)
        texts = self._detokenizer.push_each(delta.token_ids)
        if delta.output is not None:
            texts += self._detokenizer.finish_each()
        self._lengths.extend((len(text), self._drafted.popleft() if self._drafted else False) for text in texts)
        rest = delta.text
        while rest:
            length, drafted = self._lengths.popleft() if self._lengths else (len(rest), False)
            if length > len(rest):  # what is missing is held back: a stop string may begin in it
                self._lengths.appendleft((length - len(rest), drafted))
            piece, rest = rest[:length], rest[length:]
            if piece:
                yield piece, drafted


def print_stream(deltas: "Iterable[Delta]", marks: DraftMarks | None = None) -> "Output":
    """Print text as it comes, with `marks` drafted tokens green and underlined; returns the output."""
    for delta in deltas:
        for text, drafted in [(delta.text, False)] if marks is None else marks.cut(delta):
            shown = visible(text)
            print(style(shown, "green", "underline") if drafted else shown, end="", flush=True)
        if delta.output is not None:
            print("" if delta.output.text.endswith("\n") else "\n", end="", flush=True)
            return delta.output
    raise EngineFault("the stream ended without an output")


def check_output(output: "Output") -> None:
    """Raise EngineFault with the reason if the generation failed."""
    if output.finish_reason == "error":
        raise EngineFault(f"the generation failed: {output.error}")


def acceptance(stats: "Stats") -> list[str]:
    """How speculation went: tokens per round, and how many drafts were right if there were any."""
    drafts = [f"{stats.correct} of {stats.drafted} drafts right"] if stats.drafted else []
    return [f"{stats.accept_length:.2f} tokens per round (bonus included)", *drafts]


def print_note(text: str) -> None:
    """A line on stderr, so that a pipe carries the generated text alone."""
    sys.stdout.flush()
    print(style(visible(text, sys.stderr), "dim", stream=sys.stderr), file=sys.stderr, flush=True)


def print_json(value: object) -> None:
    """Print JSON; control characters that JSON need not escape are escaped, too, since a terminal may obey them."""
    written = json.dumps(value, ensure_ascii=False, indent=2)
    print(re.sub(r"[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", written))


def print_logprobs(title: str, logprobs: "Sequence[TokenLogprob]", tokenizer: "Tokenizer") -> None:
    """Log-probabilities as a table on stderr: each token, and the likeliest ones in its place."""

    def text(token: int) -> str:
        return repr(tokenizer.decode([token]))

    rows = [(text(line.token_id), line.logprob, [f"{text(i)} {p:.3f}" for i, p in line.top]) for line in logprobs]
    width = max(len(title), *(len(shown) for shown, _, _ in rows)) if rows else len(title)
    print_note(f"{title:<{width}}    logprob   likeliest")
    for shown, logprob, top in rows:
        print_note(f"{shown:<{width}} {logprob:10.3f}   {', '.join(top)}".rstrip())
