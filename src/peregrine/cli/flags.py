"""Flags for engine options and sampling parameters, each tied to a field of EngineConfig or SamplingParams.

A flag that was not given is not passed on: defaults live in those two classes alone.
"""

import argparse
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING

from peregrine.config import EngineConfig
from peregrine.sampling import SamplingParams

if TYPE_CHECKING:
    from peregrine.llm import LLM


@dataclass(frozen=True, slots=True)
class Flag:
    """One field as a flag. Without `parse` it is a switch (--x, --no-x); `many` flags may be repeated."""

    field: str
    help: str
    metavar: str = ""
    parse: Callable[[str], object] | None = None
    many: bool = False
    name: str = ""  # where it differs from the field's

    @property
    def option(self) -> str:
        return "--" + (self.name or self.field).replace("_", "-")


def whole_or_none(text: str) -> int | None:
    """A whole number, or the word none."""
    return None if text.lower() == "none" else int(text)


def tree_shape(text: str) -> tuple[int, int, int]:
    """DEPTH,WIDTH,NODES as three whole numbers."""
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not DEPTH,WIDTH,NODES, such as 3,2,8")
    depth, width, nodes = (int(part) for part in parts)
    return depth, width, nodes


def bias_entry(text: str) -> tuple[int, float]:
    """ID=BIAS as a pair."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=BIAS, such as 42=-5") from None


ENGINE_FLAGS = (
    Flag("model", "a folder in Hugging Face format, or the name of an embedded model", "MODEL", str),
    Flag(
        "drafter",
        "auto, none, ngram, eagle3, mtp (the checkpoint's own layer), or a folder with a draft head or a small model",
        "DRAFTER",
        str,
    ),
    Flag("num_drafts", "tokens guessed per round; 0: plain decoding", "K", int),
    Flag("tree", "guess a tree: levels, children per node, nodes with the root", "D,W,N", tree_shape),
    Flag("device", "auto, cpu, cuda or cuda:INDEX", "DEVICE", str),
    Flag("dtype", "auto, float32, bfloat16 or float16", "DTYPE", str),
    Flag("kv_dtype", "of keys and values: auto or float8", "DTYPE", str),
    Flag("graphs", "record rounds as device graphs"),
    Flag("attention", "auto, or the name of an attention backend (see peregrine doctor)", "BACKEND", str),
    Flag("page_size", "tokens per page of the KV cache", "TOKENS", int),
    Flag("num_pages", "pages of the KV cache", "PAGES", int),
    Flag("max_rows", "requests that run together", "ROWS", int),
    Flag("max_len", "tokens per request, prompt included", "TOKENS", int),
    Flag("prefill_chunk", "prompt tokens read in one go", "TOKENS", int),
    Flag("prefix_cache", "keep the KV of prompts for later ones that start alike"),
)
# EngineConfig fields that only tests, benchmarks and embedders set.
WITHOUT_ENGINE_FLAG = {"lag", "row_sizes", "simulate_accept"}

SAMPLING_FLAGS = (
    Flag("temperature", "0 takes the likeliest token, 1 follows the model's distribution", "T", float),
    Flag("top_k", "choose among the k likeliest tokens; 0: all", "K", int),
    Flag("top_p", "choose among the likeliest tokens that hold this share of the mass", "P", float),
    Flag("min_p", "drop tokens below this share of the largest probability", "P", float),
    Flag("repetition_penalty", "divide the logits of tokens seen before; 1: off", "X", float),
    Flag("presence_penalty", "subtract once from tokens generated before", "X", float),
    Flag("frequency_penalty", "subtract for each time a token was generated", "X", float),
    Flag("logit_bias", "add to a token's logit; repeatable", "ID=BIAS", bias_entry, many=True),
    Flag("seed", "the same seed gives the same tokens; drawn and reported if absent", "SEED", int),
    Flag("max_tokens", "tokens to generate at most; none: as many as the context holds", "N", whole_or_none),
    Flag("min_tokens", "tokens to generate before the text may end", "N", int),
    Flag("stop", "end before this text; repeatable", "TEXT", str, many=True),
    Flag("stop_token_ids", "end at this token; repeatable", "ID", int, many=True, name="stop_token_id"),
    Flag("ignore_eos", "do not end at the model's end-of-text token"),
    Flag("logprobs", "report log-probabilities: the token's and the N likeliest (with --json)", "N", int),
    Flag("prompt_logprobs", "the same for the prompt's own tokens (with --json)", "N", int),
    Flag("skip_special_tokens", "leave special tokens out of the text"),
)
# num_drafts caps one request of many; on the command line --num-drafts sets the engine's own. The rest is for programs.
WITHOUT_SAMPLING_FLAG = {"num_drafts", "detokenize", "report_drafts"}


def add_flags(parser: argparse.ArgumentParser, title: str, flags: tuple[Flag, ...], owner: type) -> None:
    """Add the flags to the parser as one group; help shows the defaults `owner` holds."""
    group = parser.add_argument_group(title)
    defaults = {entry.name: entry.default for entry in fields(owner)}
    for flag in flags:
        default = defaults[flag.field]
        shown = "" if default in (None, (), MISSING) else f" (default: {default})"
        text = (flag.help + shown).replace("%", "%%")
        if flag.parse is None:
            switch = argparse.BooleanOptionalAction
            group.add_argument(flag.option, dest=flag.field, action=switch, default=argparse.SUPPRESS, help=text)
            continue
        group.add_argument(
            flag.option,
            dest=flag.field,
            type=flag.parse,
            action="append" if flag.many else "store",
            metavar=flag.metavar,
            default=argparse.SUPPRESS,
            help=text,
        )


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Flags for everything an engine may be asked for."""
    add_flags(parser, "engine", ENGINE_FLAGS, EngineConfig)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Flags for every sampling parameter."""
    add_flags(parser, "sampling", SAMPLING_FLAGS, SamplingParams)


def engine_options(args: argparse.Namespace) -> dict[str, object]:
    """The engine options that were given, by name."""
    return given(args, ENGINE_FLAGS)


def engine_flags(args: argparse.Namespace) -> list[str]:
    """The same as they would be written on another command line."""
    written: list[str] = []
    for flag in ENGINE_FLAGS:
        if flag.field not in args:
            continue
        value = vars(args)[flag.field]
        if flag.parse is None:
            written.append(flag.option if value else flag.option.replace("--", "--no-", 1))
        else:
            written += [flag.option, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return written


def sampling_options(args: argparse.Namespace) -> dict[str, object]:
    """The sampling parameters that were given, by name."""
    options = given(args, SAMPLING_FLAGS)
    if "logit_bias" in options:
        options["logit_bias"] = dict(args.logit_bias)
    return options


def open_llm(options: dict[str, object]) -> "LLM":
    """Load a model with these options; torch is imported here, not before."""
    from peregrine.llm import LLM

    return LLM(**options)  # type: ignore[arg-type]


def given(args: argparse.Namespace, flags: tuple[Flag, ...]) -> dict[str, object]:
    """The values of those flags that stood on the command line."""
    return {flag.field: vars(args)[flag.field] for flag in flags if flag.field in args}
