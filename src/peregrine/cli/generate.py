"""`peregrine generate`: one prompt in, its text out, streamed to the terminal or as JSON."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from peregrine.cli.flags import Commands, add_generation_flags, add_parser, engine_options, open_llm, sampling_options
from peregrine.cli.printing import acceptance, check_output, print_json, print_logprobs, print_note, print_stream
from peregrine.errors import ConfigError, read_user_text, reading_utf8
from peregrine.sampling import sampling_params

if TYPE_CHECKING:
    from peregrine.engine.output import Output

EPILOG = """examples:
  peregrine generate "Once upon a time"
  peregrine generate --file prompt.txt --max-tokens 200 --temperature 0.8 --top-p 0.95 --seed 7
  echo "Once upon a time" | peregrine generate --temperature 0 --stop "The end"
  peregrine generate --chat "Why is the sky blue?" --model /models/llama --drafter ngram --num-drafts 5
  peregrine generate "Once upon a time" --json | jq .stats
  peregrine generate "A bird as JSON:" --json-schema bird.json        # the text is JSON that the schema allows
  peregrine generate "Is it blue?" --choice yes --choice no
"""


def add_command(commands: Commands) -> None:
    """Add the command and its flags."""
    description = "Continue a prompt. The prompt is the argument, --file, or standard input."
    parser = add_parser(commands, "generate", run, "continue a prompt", description, EPILOG)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue")
    parser.add_argument("--file", metavar="PATH", help="read the prompt from a file (its last line break is dropped)")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's message in the chat format")
    parser.add_argument("--json", action="store_true", help="print the whole result as JSON when it is complete")
    add_generation_flags(parser, shows_logprobs=True)


def run(args: argparse.Namespace) -> int:
    """Generate, print, and return 0; a generation that failed raises EngineFault with its reason."""
    prompt = read_prompt(args.prompt, args.file)
    options = sampling_options(args)
    sampling_params(**options)  # refused before the model is loaded
    with open_llm(engine_options(args)) as llm:
        params = llm.sampling(options)
        asked = llm.encode_chat([{"role": "user", "content": prompt}]) if args.chat else prompt
        if args.json:
            output = llm.generate([asked], params, progress=False)[0]
            print_json(output.to_json())
        else:
            output = print_stream(llm.stream(asked, params))
            for title, logprobs in (("prompt", output.prompt_logprobs), ("token", output.logprobs)):
                if logprobs is not None:
                    print_logprobs(title, logprobs, llm.tokenizer)
            print_note(stats_line(output))
    check_output(output)
    return 0


def read_prompt(argument: str | None, file: str | None) -> str:
    """The prompt from the argument, the file, or standard input; ConfigError unless exactly one has it."""
    if argument is not None and file is not None:
        raise ConfigError(f"prompt={argument!r} and file={file!r}: both were given; keep one of them")
    if argument is not None:
        return argument
    if file is not None:
        return read_user_text("file", Path(file)).removesuffix("\n")
    if sys.stdin.isatty():
        raise ConfigError("prompt: none was given; pass it as an argument, with --file, or on standard input")
    with reading_utf8("standard input"):
        return sys.stdin.read().removesuffix("\n")


def stats_line(output: "Output") -> str:
    """How the generation went, in one line."""
    count, timing = len(output.token_ids), output.timing
    parts = [
        f"{count} tokens in {timing.total_s:.2f} s ({count / max(timing.total_s, 1e-9):.1f} tokens/s)",
        f"first after {timing.first_token_s * 1000:.0f} ms",
        *acceptance(output.stats),
        f"ended by {output.finish_reason}",
        f"seed {output.seed}",
    ]
    return "; ".join(parts)
