"""`peregrine batch`: a file of requests in, a file of responses out."""

import argparse
import sys
from pathlib import Path

from peregrine.cli.flags import Commands, add_engine_flags, add_parser, at_least, engine_options, open_llm
from peregrine.cli.serve import SERVE_PACKAGES
from peregrine.config import EngineConfig
from peregrine.errors import ConfigError, need_packages

EPILOG = """examples:
  peregrine batch in.jsonl out.jsonl
  peregrine batch in.jsonl out.jsonl --model /models/llama --max-rows 64
  peregrine batch in.jsonl out.jsonl --model /models/llama --processes 8        one engine on each of 8 GPUs

A line of the input: {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once"}}
Lines are written as they are finished, and put into the order of the requests at the end. Run the same command again
after an interruption: what has an answer is not repeated. If the output holds answers to other bodies, or by another
model or other sampling defaults, the command stops and changes nothing, unless --redo says to ask those again. The exit
code is 1 while refusals stand.
"""


def add_command(commands: Commands) -> None:
    """Add the command and its flags."""
    description = "Answer a file of requests in OpenAI's batch format, on this machine."
    parser = add_parser(commands, "batch", run, "answer a file of requests", description, EPILOG)
    parser.add_argument("source", type=Path, metavar="IN", help="requests, one JSON object in a line")
    parser.add_argument("target", type=Path, metavar="OUT", help="responses; made, or continued")
    help = "ask again what was refused or has changed since it was answered; those old lines are dropped"
    parser.add_argument("--redo", action="store_true", help=help)
    help = "engines, each in a process of its own; they share the cores, and take the GPUs in turn (default: 1)"
    parser.add_argument("--processes", type=at_least(1), default=1, metavar="N", help=help)
    parser.add_argument("--name", metavar="NAME", help="the model's name in bodies (default: the folder's)")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Answer what has no answer yet; 1 while some answers are refusals."""
    need_packages(*SERVE_PACKAGES)
    from peregrine.llm import engine_config
    from peregrine.serve.batch import Batch, check_source
    from peregrine.serve.batch_engines import EngineProcesses, LocalEngine
    from peregrine.serve.batch_identity import served_hash
    from peregrine.serve.batch_output import BatchOutput

    options = engine_options(args)
    model = str(options.get("model", EngineConfig().model))
    name = args.name or Path(model).name
    config = engine_config(model, {field: value for field, value in options.items() if field != "model"})
    if args.source.exists() and args.target.exists() and args.source.samefile(args.target):
        raise ConfigError(f"{args.target}: is the input, too; name another output file")
    wanted = check_source(args.source, served_hash(name, config))
    with BatchOutput(args.target) as output:
        output.resume(wanted, args.redo)
        if len(output.answers) < len(wanted):
            if args.processes > 1:
                with EngineProcesses(args.processes, options, name) as engines:
                    Batch(args.source, output, engines, wanted).run()
            else:
                with open_llm(options) as llm:
                    Batch(args.source, output, LocalEngine(llm, name), wanted).run()
        refused = output.num_refused
    hint = "; --redo asks those again" if refused else ""
    print(f"{len(wanted)} request{'s' * (len(wanted) != 1)} answered, {refused} of them refused{hint}", file=sys.stderr)
    return 1 if refused else 0
