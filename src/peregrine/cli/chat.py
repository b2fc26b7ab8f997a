"""`peregrine chat`: talk to a model in the terminal, and see which of its tokens were drafted."""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from peregrine.cli.demo import print_pieces
from peregrine.cli.flags import (
    Commands,
    add_engine_flags,
    add_parser,
    add_sampling_flags,
    engine_options,
    open_llm,
    sampling_options,
)
from peregrine.errors import RequestError
from peregrine.log import style
from peregrine.sampling import SamplingParams, sampling_params

if TYPE_CHECKING:
    from peregrine.engine.request import Delta
    from peregrine.llm import LLM

EPILOG = """examples:
  peregrine chat
  peregrine chat --temperature 0.7 --seed 7
  peregrine chat --model /models/llama --drafter /models/llama-eagle3 --system "Answer briefly."
  printf 'Tell me a story.\\n/temperature 0\\nAnother one.\\n' | peregrine chat

Lines that begin with / are commands; /help lists them. Ctrl-C stops an answer, Ctrl-D ends.
"""
HELP = """  /reset            forget the conversation
  /seed N           the same seed gives the same answer; /seed none: a new one each time
  /temperature X    0: the likeliest token each time, 1: the model's own distribution
  /drafts K         tokens guessed per round, 0: no speculation; changes speed, never the text
  /quit             end (Ctrl-D, too); Ctrl-C stops an answer"""


def add_command(commands: Commands) -> None:
    """Add the command and its flags."""
    description = "Talk to a model. Tokens that were drafted and correct are green and underlined."
    parser = add_parser(commands, "chat", run, "talk to a model in the terminal", description, EPILOG)
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    add_sampling_flags(parser, max_tokens=None)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends, and return 0; piped lines are taken one after another."""
    params = sampling_params(**sampling_options(args))
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):  # editing and history of lines, where Python was built with it
            import readline  # noqa: F401
    with open_llm(engine_options(args)) as llm:
        chat = Chat(llm, params, args.system)
        if interactive:
            chat.greet()
        while (line := read_line(interactive)) is not None and chat.take(line):
            pass
    return 0


def read_line(interactive: bool) -> str | None:
    """The next line; None at the end of the input."""
    while True:
        try:
            return input("> " if interactive else "")
        except EOFError:
            if interactive:
                print()  # the shell's prompt goes on a line of its own
            return None
        except KeyboardInterrupt:
            tell("\n/quit or Ctrl-D ends the chat")


@dataclass
class Chat:
    """A conversation and how it goes on."""

    llm: "LLM"
    params: SamplingParams
    system: str | None
    messages: list[dict[str, str]] = field(default_factory=list)
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._reset("")

    def greet(self) -> None:
        """What the user should know first."""
        chosen = {made.field: made.value for made in self.llm.decisions}
        mark = style("underlined", "green", "underline")
        print(f"{chosen['model']}, drafter {chosen['drafter']}; {mark}: drafted and correct. /help lists commands.")

    def take(self, line: str) -> bool:
        """Answer a line or obey it; False if it ends the chat. What cannot be done is said, and the chat goes on."""
        word, _, rest = line.strip().partition(" ")
        try:
            if word == "/quit":
                return False
            if not word.startswith("/"):
                self._answer(line.strip())
            elif word in self._commands:
                self._commands[word](rest.strip())
            else:
                tell(f"{word}: no such command; /help lists them")
        except RequestError as error:
            tell(f"error: {error}")
        return True

    @property
    def _commands(self) -> dict[str, Callable[[str], None]]:
        return {
            "/help": lambda _: tell(HELP),
            "/reset": self._reset,
            "/seed": self._set_seed,
            "/temperature": self._set_temperature,
            "/drafts": self._set_drafts,
        }

    def _reset(self, _: str) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def _set_seed(self, text: str) -> None:
        self.params = replace(self.params, seed=None if text == "none" else whole("seed", text))

    def _set_temperature(self, text: str) -> None:
        try:
            self.params = replace(self.params, temperature=float(text))
        except ValueError as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError("temperature", text, "is not a number", "use 0 to 100") from None

    def _set_drafts(self, text: str) -> None:
        count, most = whole("drafts", text), self.llm.engine.limits.num_drafts
        if not 0 <= count <= most:
            raise RequestError("drafts", count, f"the engine drafts {most} deep", f"use 0 to {most}")
        self.params = replace(self.params, num_drafts=count)

    def _answer(self, text: str) -> None:
        """One turn. A turn that was refused leaves no trace; one that was stopped keeps what was said."""
        if not text:
            return
        asked = [*self.messages, {"role": "user", "content": text}]
        turn, begun = Turn(), self.clock()
        try:
            deltas = turn.watch(self.llm.stream(self.llm.encode_chat(asked), self.params))
            print_pieces(deltas, self.llm.tokenizer.decode, marked=True)
        except KeyboardInterrupt:
            print()
            turn.ending = "stopped"
        self.messages = [*asked, {"role": "assistant", "content": turn.text}]
        tell(turn.line(self.clock() - begun))


@dataclass
class Turn:
    """What one answer came to."""

    text: str = ""
    tokens: int = 0
    rounds: int = 0
    offered: int = 0
    correct: int = 0
    ending: str = ""

    def watch(self, deltas: "Iterable[Delta]") -> "Iterator[Delta]":
        """Pass deltas on and count them."""
        for delta in deltas:
            self.text += delta.text
            self.tokens += len(delta.token_ids)
            self.rounds += bool(delta.token_ids)
            self.offered += delta.offered
            self.correct += sum(delta.drafted)
            if delta.output is not None:
                failed = delta.output.finish_reason == "error"
                self.ending = f"failed: {delta.output.error}" if failed else f"seed {delta.output.seed}"
            yield delta

    def line(self, seconds: float) -> str:
        """The turn in one line."""
        length = self.tokens / self.rounds if self.rounds else 0.0
        parts = [
            f"{self.tokens} tokens, {self.tokens / max(seconds, 1e-9):.1f} tokens/s",
            f"{length:.2f} tokens per round (bonus included)",
            *([f"{self.correct} of {self.offered} drafts right"] if self.offered else []),
            self.ending,
        ]
        return "; ".join(parts)


def whole(name: str, text: str) -> int:
    """A whole number from a command."""
    try:
        return int(text)
    except ValueError:
        raise RequestError(name, text, "is not a whole number", f"write /{name} 3, for example") from None


def tell(text: str) -> None:
    """A line that is no part of the conversation; on stderr, so that a pipe carries answers alone."""
    sys.stdout.flush()
    print(style(text, "dim", stream=sys.stderr), file=sys.stderr, flush=True)
