"""The command line's parser: options by their whole names, a mistake in one line with the word that was meant."""

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from peregrine.errors import ConfigError

INVALID_CHOICE = re.compile(r"(?:argument (--\S+): )?.*invalid choice: '(.*)' \(choose from (.*)\)")
INVALID_NUMBER = re.compile(r"(.*: )invalid (int|float) value: (.*)")


class Parser(argparse.ArgumentParser):
    """Of the command line and of each command, whose parser is `parser` in the result."""

    def __init__(self, **options: Any) -> None:
        # An abbreviation would change its meaning, or end to work, with the next option that begins alike.
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """Refuse the command line; ConfigError is printed in one line."""
        if found := INVALID_CHOICE.search(message):
            option, word, known = found[1], found[2], re.findall(r"[\w-]+", found[3])
            wrong = f"{option}: {word!r} is no choice of it" if option else f"{word!r}: no such command"
            message = wrong + (meant(word, known) or f"; choose from {', '.join(known)}")
        if found := INVALID_NUMBER.search(message):
            message = f"{found[1]}{found[3]} is not a {'whole ' if found[2] == 'int' else ''}number"
        raise ConfigError(f"{message}; {self.prog} --help lists all")

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """The command line's values; what is unknown in it is refused by the command it was given to."""
        found, rest = self.parse_known_args(argv)
        if rest:
            vars(found).get("parser", self).refuse(rest)
        return found

    def refuse(self, rest: Sequence[str]) -> NoReturn:
        """Refuse words that no option and no argument takes."""
        for word in (word.partition("=")[0] for word in rest if word.startswith("--")):
            self.error(f"{word}: {self.prog} has no such option{meant(word, self._option_string_actions)}")
        remedy = "write a text of several words in quotes, and an option again for each of several values"
        self.error(f"{rest[0]!r}: {self.prog} expects no such argument; {remedy}")


def meant(word: str, known: Iterable[str]) -> str:
    """A question for the known words that begin with this one, or for one that looks like it; else nothing."""
    likely = [name for name in known if name.startswith(word)] or difflib.get_close_matches(word, known, 1)
    return f"; did you mean {' or '.join(likely)}?" if likely else ""
