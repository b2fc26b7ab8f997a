"""Flags made from the fields of config dataclasses (EngineConfig, SamplingParams, ServeConfig).

A field's annotation says how its value is read; its metadata (`peregrine.config.option`) holds the help text. A flag
that was not given is not passed on, so that defaults stand in the dataclasses alone.
"""

import argparse
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeAlias, get_args, get_origin, get_type_hints

from peregrine.config import EngineConfig, TreeShape
from peregrine.errors import ConfigError, read_user_text
from peregrine.sampling import SamplingParams

if TYPE_CHECKING:
    from peregrine.llm import LLM

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


@dataclass(frozen=True, slots=True)
class Flag:
    """A dataclass field as a command-line flag."""

    field: str
    option: str
    help: str
    default: object  # the field's own, shown in help
    how: dict[str, Any]  # arguments of add_argument: type and metavar, or the action of a switch


def at_least(least: float, kind: type[float] = int) -> Callable[[str], float]:
    """A type for `add_argument`: numbers from `least` on."""

    def read(text: str) -> float:
        if not (value := kind(text)) >= least:
            raise argparse.ArgumentTypeError(f"{text} is too small; pass {least:g} or more")
        return value

    read.__name__ = kind.__name__  # argparse names it where the text is no number
    return read


def whole_or_none(text: str) -> int | None:
    """A whole number, or the word none or auto."""
    try:
        return None if text.lower() in ("none", "auto") else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor none or auto") from None


def tree_shape(text: str) -> tuple[int, int, int]:
    """DEPTH,WIDTH,NODES as three whole numbers."""
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not DEPTH,WIDTH,NODES, such as 3,2,8")
    depth, width, nodes = (int(part) for part in parts)
    return depth, width, nodes


def tree_or_auto(text: str) -> tuple[int, int, int] | None:
    """DEPTH,WIDTH,NODES, or None for auto."""
    return None if text.lower() == "auto" else tree_shape(text)


def bias_entry(text: str) -> tuple[int, float]:
    """ID=BIAS as a pair."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=BIAS, such as 42=-5") from None


def above_zero(text: str) -> float:
    """A finite number above 0."""
    if not 0 < (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no limit; pass a number above 0")
    return value


def new_file(text: str) -> Path:
    """A file to write: tried now, so that nobody works for a result that cannot be kept."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        found = path.exists() or path.is_symlink()
        path.open("a").close()
        if not found:
            path.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written ({reason}); name a file in a folder where you may write"
        ) from None
    return path


def text_of(path: str) -> str:
    """The text of a file."""
    try:
        return read_user_text("file", Path(path))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# How a value is read from the command line, by its type.
PARSERS: dict[Any, Callable[[str], object]] = {
    int: int,
    float: float,
    str: str,
    TreeShape: tree_or_auto,
    Mapping[int, float]: bias_entry,
}


def flags_of(owner: type, without: Collection[str] = ()) -> tuple[Flag, ...]:
    """A flag for every field of a dataclass except those named in `without`."""
    hints = get_type_hints(owner)
    return tuple(flag_of(entry, hints[entry.name]) for entry in fields(owner) if entry.name not in without)


def flag_of(entry: "Field[Any]", hint: Any) -> Flag:
    """The flag of one field: X | None is read as X, a sequence of X is a repeatable X."""
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    kind = [kind for kind in kinds if kind is not NoneType][-1]  # str | Sequence[str] is read as the latter
    if kind is bool:
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    else:
        parse = PARSERS[kind] if kind in PARSERS else PARSERS[get_args(kind)[0]]
        if entry.metadata["metavar"] == "FILE":
            parse = text_of
        if "auto" in entry.metadata["metavar"] and kind is int:
            parse = whole_or_none
        if NoneType in kinds and entry.default is not None:
            parse = whole_or_none  # None differs from the default, so there is a word for it
        repeated = get_origin(kind) in (Sequence, tuple, Mapping)
        how = {"type": parse, "metavar": entry.metadata["metavar"], "action": "append" if repeated else "store"}
    option = "--" + (entry.metadata["flag"] or entry.name).replace("_", "-")
    return Flag(entry.name, option, entry.metadata["help"], entry.default, how)


# EngineConfig fields that only tests, benchmarks and embedding programs set.
WITHOUT_ENGINE_FLAG = {"lag", "row_sizes", "simulate_accept"}
ENGINE_FLAGS = flags_of(EngineConfig, WITHOUT_ENGINE_FLAG)
# num_drafts and tree are of one request of many; on the command line --num-drafts and --tree set the engine's own. The
# rest is for programs.
WITHOUT_SAMPLING_FLAG = {"n", "num_drafts", "tree", "detokenize", "report_drafts", "grammar_after", "store"}
LOGPROBS = {"logprobs", "prompt_logprobs"}  # for commands that show them
SAMPLING_FLAGS = flags_of(SamplingParams, WITHOUT_SAMPLING_FLAG)


def add_parser(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    help: str,
    description: str | None = None,
    epilog: str | None = None,
) -> argparse.ArgumentParser:
    """The parser of a new command, which calls `run`; the epilog is printed as it is written."""
    parser = commands.add_parser(name, help=help, description=description, epilog=epilog)
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_flags(
    parser: argparse.ArgumentParser, title: str, flags: Collection[Flag], **defaults: object
) -> "argparse._ArgumentGroup":
    """Add the flags to the parser as one group; `defaults` are this command's own, instead of the dataclass's."""
    group = parser.add_argument_group(title)
    for flag in flags:
        default = defaults.get(flag.field, flag.default)
        if default is None and flag.field in defaults:
            default = "none"
        shown = "" if default in (None, (), MISSING) else f" (default: {default})"
        group.add_argument(
            flag.option,
            dest=flag.field,
            default=defaults.get(flag.field, argparse.SUPPRESS),
            help=(flag.help + shown).replace("%", "%%"),
            **flag.how,
        )
    return group


def add_number(
    parser: "argparse.ArgumentParser | argparse._MutuallyExclusiveGroup",
    flag: str,
    default: float | list[int],
    text: str = "",
    metavar: str = "N",
    least: float = 1,
) -> None:
    """Add the flag of a number, or of several if the default is a list. None may be below `least` and the default."""
    values = default if isinstance(default, list) else [default]
    shown = " ".join(f"{value:g}" for value in values)
    parser.add_argument(
        flag,
        type=at_least(min(least, *values), type(values[0])),
        nargs="+" if isinstance(default, list) else None,
        default=default,
        metavar=metavar,
        help=f"{text} (default: {shown})".strip(),
    )


def add_engine_flags(parser: argparse.ArgumentParser, **defaults: object) -> None:
    """Flags for everything an engine may be asked for; `defaults` are this command's own."""
    add_flags(parser, "engine", ENGINE_FLAGS, **defaults)


def add_generation_flags(parser: argparse.ArgumentParser, shows_logprobs: bool = False, **defaults: object) -> None:
    """Flags for the sampling parameters and the engine; `defaults` of sampling parameters are this command's own."""
    shown = [flag for flag in SAMPLING_FLAGS if shows_logprobs or flag.field not in LOGPROBS]
    add_flags(parser, "sampling", shown, **defaults)
    add_engine_flags(parser)


def given(args: argparse.Namespace, flags: Collection[Flag]) -> dict[str, Any]:
    """The values of those flags that stood on the command line, by field."""
    return {flag.field: vars(args)[flag.field] for flag in flags if flag.field in args}


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given, by name."""
    return given(args, ENGINE_FLAGS)


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given, by name."""
    options = given(args, SAMPLING_FLAGS)
    if "logit_bias" in options:
        options["logit_bias"] = dict(options["logit_bias"])
    return options


def engine_flags(args: argparse.Namespace) -> list[str]:
    """The engine options that were given, written as flags for another command line."""
    written: list[str] = []
    for flag in ENGINE_FLAGS:
        if flag.field not in args:
            continue
        value = vars(args)[flag.field]
        if isinstance(value, bool):
            written.append(flag.option if value else flag.option.replace("--", "--no-", 1))
        elif value is None:
            written += [flag.option, "auto"]
        else:
            written += [flag.option, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return written


def open_llm(options: dict[str, Any]) -> "LLM":
    """Load a model with these options; torch is imported here, not before."""
    from peregrine.llm import LLM

    return LLM(**options)
