"""`peregrine serve`: OpenAI's API over HTTP."""

import argparse
import os
from pathlib import Path

from peregrine.cli.flags import (
    Commands,
    add_engine_flags,
    add_flags,
    add_parser,
    engine_options,
    flags_of,
    given,
    open_llm,
)
from peregrine.config import EngineConfig
from peregrine.errors import ConfigError, need_packages, read_user_text
from peregrine.log import start_logging
from peregrine.serve.settings import ServeConfig

KEY_VARIABLE = "PEREGRINE_API_KEY"
SERVE_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
SERVER_FLAGS = flags_of(ServeConfig)
EPILOG = """examples:
  peregrine serve
  peregrine serve --model /models/llama --drafter /models/llama-eagle3 --max-rows 32 --host 0.0.0.0 --port 8000
  peregrine serve --api-key-file keys.txt --max-queue 64 --drain-seconds 60
  curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "Once upon a time"}' -H 'Content-Type: application/json'
"""


def add_command(commands: Commands) -> None:
    """Add the command and its flags."""
    description = "Serve a model with OpenAI's API. SIGTERM lets requests in flight finish, then ends."
    parser = add_parser(commands, "serve", run, "answer requests over HTTP", description, EPILOG)
    group = add_flags(parser, "server", SERVER_FLAGS)
    keys = f"keys, one per line; those in the variable {KEY_VARIABLE} count, too"
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help=keys)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes, and return 0; 1 if the engine failed, so that a supervisor starts it again."""
    need_packages(*SERVE_PACKAGES)
    from peregrine.serve.run import serve

    start_logging("info")
    asked = given(args, SERVER_FLAGS)
    variable = os.environ.get(KEY_VARIABLE, "").split()
    asked["api_keys"] = (*asked.get("api_keys", ()), *read_keys(args.api_key_file), *variable)
    options = engine_options(args)
    return serve(str(options.get("model", EngineConfig().model)), lambda: open_llm(options), ServeConfig(**asked))


def read_keys(file: Path | None) -> list[str]:
    """The keys in a file, blank lines left out; a file that names none is refused."""
    if file is None:
        return []
    keys = [line.strip() for line in read_user_text("api_key_file", file).splitlines() if line.strip()]
    if not keys:
        raise ConfigError(f"api_key_file={str(file)!r}: holds no key; write one in a line")
    return keys
