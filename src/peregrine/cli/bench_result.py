"""What all benchmarks' commands share: their flags, and where a result goes."""

import argparse
import inspect
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

from peregrine.cli.flags import new_file

T = TypeVar("T")


def add_result_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say where the result goes."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=new_file, metavar="FILE", help="also write the JSON here")


def plan_from(plan: Callable[..., T], args: argparse.Namespace, **more: object) -> T:
    """A plan from the flags named like its fields, lists as tuples, and from `more`."""
    given = {name: vars(args)[name] for name in inspect.signature(plan).parameters if name in args}
    return plan(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()} | more)


def finish(result: dict[str, Any], show: Callable[[dict[str, Any]], str], args: argparse.Namespace) -> None:
    """Print the result, and write it if a file was named; its JSON begins with the command and this machine's facts."""
    from peregrine.hardware import read_hardware

    origin = {"command": command_line(sys.argv), "machine": asdict(read_hardware())}
    written = json.dumps(origin | result, indent=2)
    print(written if args.json else show(result))
    if args.out is not None:
        args.out.write_text(written + "\n", encoding="utf-8")


def command_line(argv: list[str]) -> str:
    """The command as it may be shown to others: without the API key."""
    words = ["peregrine", *argv[1:]]
    for index, word in enumerate(words):
        flag, joined, _ = word.partition("=")
        if flag == "--api-key":
            place = index if joined else index + 1
            words[place : place + 1] = [f"{flag}=..." if joined else "..."]
    return shlex.join(words)
