"""Where a benchmark's result goes: a table or JSON on the screen, and a file that says which command made it."""

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path


def add_result_flags(parser: argparse.ArgumentParser) -> None:
    """Where the result goes."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON here")


def finish(result: dict[str, object], show: Callable[[dict[str, object]], str], args: argparse.Namespace) -> None:
    """Print the result, and write it if a file was named, with the command that made it."""
    written = json.dumps({"command": command_line(sys.argv), **result}, indent=2)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(written + "\n", encoding="utf-8")
    print(written if args.json else show(result))


def command_line(argv: list[str]) -> str:
    """The command as it may be shown to others: without the key."""
    words = ["peregrine", *argv[1:]]
    for index, word in enumerate(words):
        if word.startswith("--api"):  # argparse takes beginnings of flags, too
            flag, joined, _ = word.partition("=")
            place = index if joined else index + 1
            words[place : place + 1] = [f"{flag}=..." if joined else "..."]
    return shlex.join(words)
