"""The `peregrine` command: finds the subcommand, runs it, and turns refusals into one line."""

import os
import sys
from collections.abc import Sequence

from peregrine import __version__
from peregrine.cli import batch, bench, chat, conformance, demo, doctor, generate, serve, train
from peregrine.cli.parser import Parser
from peregrine.errors import PeregrineError
from peregrine.log import start_logging, style, visible

COMMANDS = (demo, chat, generate, serve, batch, bench, train, conformance, doctor)
EPILOG = """examples:
  peregrine demo                                     see speculation at work
  peregrine chat                                     talk to a model
  peregrine generate "Once upon a time" --seed 7
  peregrine generate --chat "Why is the sky blue?" --model /models/llama
  peregrine serve --port 8000                        OpenAI's API on this machine
  peregrine batch in.jsonl out.jsonl                 a file of requests, resumable
  peregrine train head --target MODEL --data FILES --out FOLDER
  peregrine doctor                                   what this machine can do
  peregrine COMMAND --help                           all options of a command

PEREGRINE_LOG=debug|info|warning|error sets how much is logged; NO_COLOR=1 turns colour off.
"""
EXIT_REFUSED, EXIT_INTERRUPTED, EXIT_PIPE_CLOSED = 2, 130, 141


def build_parser() -> Parser:
    """The parser of every command; `run` in its result is the command's function."""
    parser = Parser(
        prog="peregrine", description="An LLM inference engine built around speculative decoding.", epilog=EPILOG
    )
    parser.add_argument("--version", action="version", version=f"peregrine {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        command.add_command(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; what Peregrine refuses is one line and code 2."""
    parser = build_parser()
    try:
        args = parser.parse(argv)
        if "run" not in args:
            parser.print_help()
            return 0
        start_logging()
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except PeregrineError as error:
        print_error(str(error))
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone; Python flushes stdout once more on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE_CLOSED


def print_error(message: str) -> None:
    """One red line on stderr."""
    line = "; ".join(message.splitlines())
    print(style(f"error: {visible(line, sys.stderr)}", "red", stream=sys.stderr), file=sys.stderr)
