"""`peregrine serve`: OpenAI's API over HTTP."""

import argparse
import importlib.util
from dataclasses import fields
from pathlib import Path

from peregrine.cli.flags import add_engine_flags, engine_options, open_llm
from peregrine.config import EngineConfig
from peregrine.errors import ConfigError
from peregrine.log import start_logging

NEEDED = ("fastapi", "uvicorn", "prometheus_client")
EPILOG = """examples:
  peregrine serve
  peregrine serve --model /models/llama --drafter /models/llama-eagle3 --max-rows 32 --host 0.0.0.0 --port 8000
  peregrine serve --api-key-file keys.txt --max-queue 64 --drain-seconds 60
  curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "Once upon a time"}' -H 'Content-Type: application/json'
"""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command and its flags; a flag that is not given is not passed on."""
    parser = commands.add_parser(
        "serve",
        help="answer requests over HTTP",
        description="Serve a model with OpenAI's API. SIGTERM lets requests in flight finish, then ends.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    group = parser.add_argument_group("server")
    group.add_argument("--host", metavar="HOST", help="address to listen on (default: 127.0.0.1)")
    group.add_argument("--port", type=int, metavar="PORT", help="0: any free one (default: 8000)")
    group.add_argument("--name", metavar="NAME", help="the model's name in the API (default: the folder's)")
    group.add_argument(
        "--api-key", dest="api_keys", action="append", metavar="KEY", help="who knows it may ask; repeatable"
    )
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="more keys, one in a line")
    group.add_argument("--max-queue", type=int, metavar="N", help="generations that may wait (default: 256)")
    group.add_argument("--max-prompt", type=int, metavar="TOKENS", help="(default: what the context holds)")
    group.add_argument("--max-body-bytes", type=int, metavar="BYTES", help="(default: 2 MiB)")
    group.add_argument(
        "--drain-seconds", type=float, metavar="S", help="how long requests may go on after SIGTERM (default: 30)"
    )
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes, and return 0."""
    need_serve_extra()
    from peregrine.serve.run import serve
    from peregrine.serve.settings import ServeConfig

    start_logging("info")
    given = vars(args)
    keys = [*given.get("api_keys", ()), *read_keys(given.get("api_key_file"))]
    known = {entry.name for entry in fields(ServeConfig)} - {"api_keys"}
    settings = ServeConfig(**{name: value for name, value in given.items() if name in known}, api_keys=tuple(keys))
    options = engine_options(args)
    serve(str(options.get("model", EngineConfig().model)), lambda: open_llm(options), settings)
    return 0


def need_serve_extra() -> None:
    """Refuse in one line where the packages of the extra are not installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)} not installed; run: pip install 'peregrine[serve]'")


def read_keys(file: Path | None) -> list[str]:
    """The keys in a file, blank lines left out; a file that names none is refused."""
    if file is None:
        return []
    try:
        keys = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file={str(file)!r}: cannot be read ({error}); check the path") from error
    if not keys:
        raise ConfigError(f"api_key_file={str(file)!r}: holds no key; write one in a line")
    return keys
