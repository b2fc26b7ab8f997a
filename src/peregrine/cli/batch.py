"""`peregrine batch`: a file of requests in, a file of responses out."""

import argparse
import sys
from pathlib import Path

from peregrine.cli.flags import Commands, add_engine_flags, add_parser, engine_options, open_llm
from peregrine.cli.serve import SERVE_PACKAGES
from peregrine.config import EngineConfig
from peregrine.errors import need_packages

EPILOG = """examples:
  peregrine batch in.jsonl out.jsonl
  peregrine batch in.jsonl out.jsonl --model /models/llama --max-rows 64

A line of the input: {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once"}}
Lines of the output come in the order they are finished. Run the same command again after an interruption:
finished requests are not repeated.
"""


def add_command(commands: Commands) -> None:
    """Add the command and its flags."""
    description = "Answer a file of requests in OpenAI's batch format, on this machine."
    parser = add_parser(commands, "batch", run, "answer a file of requests", description, EPILOG)
    parser.add_argument("source", type=Path, metavar="IN", help="requests, one JSON object in a line")
    parser.add_argument("target", type=Path, metavar="OUT", help="responses; made, or continued")
    parser.add_argument("--name", metavar="NAME", help="the model's name in bodies (default: the folder's)")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Answer what has no answer yet; 1 if some requests were refused."""
    need_packages(*SERVE_PACKAGES)
    from peregrine.serve.batch import Batch, check_source
    from peregrine.serve.batch_output import BatchOutput

    options = engine_options(args)
    name = args.name or Path(str(options.get("model", EngineConfig().model))).name
    check_source(args.source)
    with BatchOutput(args.target) as output, open_llm(options) as llm:
        batch = Batch(args.source, output, llm, name)
        batch.run()
    print(f"{len(batch.ids)} requests answered, {batch.num_refused} of them refused in this run", file=sys.stderr)
    return 1 if batch.num_refused else 0
