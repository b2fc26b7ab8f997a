"""`peregrine chat`: talk to a model in the terminal, and see which of its tokens were drafted."""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from peregrine.cli.flags import Commands, add_generation_flags, add_parser, engine_options, open_llm, sampling_options
from peregrine.cli.parser import meant
from peregrine.cli.printing import DraftMarks, acceptance, print_note, print_stream
from peregrine.errors import RequestError, reading_utf8
from peregrine.log import style
from peregrine.sampling import SamplingParams, sampling_params

if TYPE_CHECKING:
    from peregrine.engine.output import Delta
    from peregrine.llm import LLM

EPILOG = """examples:
  peregrine chat
  peregrine chat --temperature 0.7 --seed 7
  peregrine chat --model /models/llama --drafter /models/llama-eagle3 --system "Answer briefly."
  printf 'Tell me a story.\\n/temperature 0\\nAnother one.\\n' | peregrine chat

Lines that begin with / are commands; /help lists them. Ctrl-C stops an answer, Ctrl-D ends.
"""
HELP = """  /reset            forget the conversation
  /system TEXT      what the model is told before the conversation, from now on; /system none: nothing
  /seed N           the same seed gives the same answer; /seed none: a new one each time
  /temperature X    0: the likeliest token each time, 1: the model's own distribution
  /drafts K         tokens drafted per round, 0: no speculation; changes speed, never the text
  /tree WHEN        drafts branch: always (tree), never (chain), or where that pays (auto); changes speed alone
  /quit             end (Ctrl-D, too); Ctrl-C stops an answer"""


def add_command(commands: Commands) -> None:
    """Add the command and its flags."""
    description = "Talk to a model. Tokens that were drafted and correct are green and underlined."
    parser = add_parser(commands, "chat", run, "talk to a model in the terminal", description, EPILOG)
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    add_generation_flags(parser, max_tokens=None)


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends; lines may come from a pipe, and then 1 is returned if one of them failed."""
    options = sampling_options(args)
    sampling_params(**options)  # refused before the model is loaded
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):  # editing and history of lines, where Python was built with it
            import readline  # noqa: F401
    with open_llm(engine_options(args)) as llm:
        chat = Chat(llm, llm.sampling(options), args.system)
        if interactive:
            chat.greet()
        while (line := read_line(interactive)) is not None and chat.take(line):
            pass
    return 1 if chat.failed and not interactive else 0


def read_line(interactive: bool) -> str | None:
    """The next line; None at the end of the input."""
    while True:
        try:
            with reading_utf8("standard input"):
                return input("> " if interactive else "")
        except EOFError:
            if interactive:
                print()  # the shell's prompt goes on a line of its own
            return None
        except KeyboardInterrupt:
            print_note("\n/quit or Ctrl-D ends the chat")


@dataclass
class Chat:
    """A conversation, and the parameters of the next turn."""

    llm: "LLM"
    params: SamplingParams
    system: str | None

    def __post_init__(self) -> None:
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: print_note(HELP),
            "/reset": self._reset,
            "/system": self._set_system,
            "/seed": self._set_seed,
            "/temperature": self._set_temperature,
            "/drafts": self._set_drafts,
            "/tree": self._set_tree,
        }
        self.failed = False  # whether a line was refused or an answer failed
        self._reset("")

    def greet(self) -> None:
        """What the user should know first."""
        chosen = {made.field: made.value for made in self.llm.decisions}
        mark = style("underlined", "green", "underline")
        print(f"{chosen['model']}, drafter {chosen['drafter']}; {mark}: drafted and correct. /help lists commands.")

    def take(self, line: str) -> bool:
        """Answer a line or run its command; False if it ends the chat. A refusal is printed, and the chat goes on."""
        word, _, rest = line.strip().partition(" ")
        try:
            if word == "/quit":
                return False
            if not word.startswith("/"):
                self._answer(line.strip())
            elif word in self._commands:
                self._commands[word](rest.strip())
            else:
                remedy = f"/help lists all{meant(word, self._commands)}"
                raise RequestError("command", word, "there is no such command", remedy)
        except RequestError as error:
            self.failed = True
            print_note(f"error: {error}")
        return True

    def _reset(self, _: str) -> None:
        self.messages: list[dict[str, str]] = []

    def _set_system(self, text: str) -> None:
        if not text:
            raise RequestError("system", text, "is empty", "write /system TEXT, or /system none for nothing")
        self.system = None if text == "none" else text

    def _set_seed(self, text: str) -> None:
        self.params = replace(self.params, seed=None if text == "none" else whole("seed", text))

    def _set_temperature(self, text: str) -> None:
        try:
            temperature = float(text)
        except ValueError:
            raise RequestError("temperature", text, "is not a number", "use 0 to 100") from None
        self.params = replace(self.params, temperature=temperature)

    def _set_drafts(self, text: str) -> None:
        count, most = whole("drafts", text), self.llm.engine.limits.num_drafts
        if not 0 <= count <= most:
            raise RequestError("drafts", count, f"the engine drafts {most} deep", f"use 0 to {most}")
        self.params = replace(self.params, num_drafts=count)

    def _set_tree(self, text: str) -> None:
        self.params = replace(self.params, tree=text)

    def _answer(self, text: str) -> None:
        """One turn. A refused turn leaves the conversation as it was; one that was stopped keeps the text so far."""
        from peregrine.text.harmony import HarmonyStream
        from peregrine.text.stream import Detokenizer
        from peregrine.text.tool_formats import HARMONY, format_of

        if not text:
            return
        told = [{"role": "system", "content": self.system}] if self.system else []
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = self.llm.encode_chat([*told, *asked])
        harmony = format_of(self.llm.tokenizer.chat_template) == HARMONY
        params = replace(self.params, skip_special_tokens=self.params.skip_special_tokens and not harmony)
        marks = DraftMarks(Detokenizer(self.llm.tokenizer, prompt, params.skip_special_tokens))
        turn, begun = Turn(), time.perf_counter()
        try:
            print_stream(turn.watch(self.llm.stream(prompt, params)), marks)
        except KeyboardInterrupt:
            print()
            turn.ending = "stopped"
        answer = HarmonyStream(()).push(turn.text, final=True)[1].text if harmony else turn.text
        self.messages = [*asked, {"role": "assistant", "content": answer}]
        self.failed |= turn.ending.startswith("failed")
        print_note(turn.line(time.perf_counter() - begun))


class Turn:
    """Text and figures of one answer."""

    def __init__(self) -> None:
        from peregrine.engine.stats import Stats

        self.text, self.ending, self.stats = "", "", Stats()

    def watch(self, deltas: "Iterable[Delta]") -> "Iterator[Delta]":
        """Pass deltas on and count them."""
        for delta in deltas:
            self.text += delta.text
            if delta.token_ids:
                self.stats.count(delta.offered, sum(delta.drafted), len(delta.token_ids))
            if delta.output is not None:
                failed = delta.output.finish_reason == "error"
                self.ending = f"failed: {delta.output.error}" if failed else f"seed {delta.output.seed}"
            yield delta

    def line(self, seconds: float) -> str:
        """The turn in one line."""
        tokens = self.stats.accepted
        speed = f"{tokens} tokens, {tokens / max(seconds, 1e-9):.1f} tokens/s"
        return "; ".join([speed, *acceptance(self.stats), self.ending])


def whole(name: str, text: str) -> int:
    """A whole number from a command."""
    try:
        return int(text)
    except ValueError:
        raise RequestError(name, text, "is not a whole number", f"write /{name} 3, for example") from None
