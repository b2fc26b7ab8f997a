"""`peregrine generate`: one prompt in, its text out, streamed to the terminal or as JSON."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from peregrine.cli.flags import (
    Commands,
    add_engine_flags,
    add_parser,
    add_sampling_flags,
    engine_options,
    open_llm,
    sampling_options,
)
from peregrine.errors import ConfigError, EngineFault
from peregrine.log import style
from peregrine.sampling import sampling_params

if TYPE_CHECKING:
    from collections.abc import Iterable

    from peregrine.engine.request import Delta, Output

EPILOG = """examples:
  peregrine generate "Once upon a time"
  peregrine generate --file prompt.txt --max-tokens 200 --temperature 0.8 --top-p 0.95 --seed 7
  echo "Once upon a time" | peregrine generate --temperature 0 --stop "The end"
  peregrine generate --chat "Why is the sky blue?" --model /models/llama --drafter ngram --num-drafts 5
  peregrine generate "Once upon a time" --json | jq .stats
"""


def add_command(commands: Commands) -> None:
    """Add the command and its flags."""
    description = "Continue a prompt. The prompt is the argument, --file, or standard input."
    parser = add_parser(commands, "generate", run, "continue a prompt", description, EPILOG)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue")
    parser.add_argument("--file", metavar="PATH", help="read the prompt from a file (its last line break is dropped)")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's message in the chat format")
    parser.add_argument("--json", action="store_true", help="print the whole result as JSON when it is complete")
    add_sampling_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Generate, print, and return 0; a generation that failed raises EngineFault with its reason."""
    prompt = read_prompt(args.prompt, args.file)
    params = sampling_params(**sampling_options(args))
    with open_llm(engine_options(args)) as llm:
        asked = llm.encode_chat([{"role": "user", "content": prompt}]) if args.chat else prompt
        if args.json:
            output = llm.generate([asked], params, progress=False)[0]
            print(json.dumps(output.to_json(), ensure_ascii=False, indent=2))
        else:
            output = print_stream(llm.stream(asked, params))
            print(style(stats_line(output), "dim", stream=sys.stderr), file=sys.stderr)
    if output.finish_reason == "error":
        raise EngineFault(f"the generation failed: {output.error}")
    return 0


def print_stream(deltas: "Iterable[Delta]") -> "Output":
    """Print the text as it comes, and return the output its last delta carries."""
    for delta in deltas:
        print(delta.text, end="", flush=True)
        if delta.output is not None:
            print("" if delta.output.text.endswith("\n") else "\n", end="", flush=True)
            return delta.output
    raise EngineFault("the stream ended without an output")


def read_prompt(argument: str | None, file: str | None) -> str:
    """The prompt from wherever it was given; refused if that is nowhere, or two places."""
    if argument is not None and file is not None:
        raise ConfigError(f"prompt={argument!r} and file={file!r}: both were given; keep one of them")
    if argument is not None:
        return argument
    if file is not None:
        try:
            return Path(file).read_text(encoding="utf-8").removesuffix("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"file={file!r}: cannot be read as text ({error}); check the path") from error
    if sys.stdin.isatty():
        raise ConfigError("prompt: none was given; pass it as an argument, with --file, or on standard input")
    return sys.stdin.read().removesuffix("\n")


def stats_line(output: "Output") -> str:
    """How the generation went, in one line."""
    count, timing, stats = len(output.token_ids), output.timing, output.stats
    parts = [
        f"{count} tokens in {timing.total_s:.2f} s ({count / max(timing.total_s, 1e-9):.1f} tokens/s)",
        f"first after {timing.first_token_s * 1000:.0f} ms",
        f"{stats.accept_length:.2f} tokens per round (bonus included)",
        *([f"{stats.correct} of {stats.drafted} drafts right"] if stats.drafted else []),
        f"ended by {output.finish_reason}",
        f"seed {output.seed}",
    ]
    return "; ".join(parts)
