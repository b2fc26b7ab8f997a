"""Flags and the two classes they stand for: nothing missing, nothing invented, defaults in one place."""

import argparse
from dataclasses import fields

import pytest

from peregrine.cli import flags
from peregrine.config import EngineConfig
from peregrine.sampling import SamplingParams


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    flags.add_sampling_flags(parser)
    flags.add_engine_flags(parser)
    return parser


@pytest.mark.parametrize(
    ("owner", "table", "without"),
    [
        (SamplingParams, flags.SAMPLING_FLAGS, flags.WITHOUT_SAMPLING_FLAG),
        (EngineConfig, flags.ENGINE_FLAGS, flags.WITHOUT_ENGINE_FLAG),
    ],
)
def test_each_field_has_a_flag_or_a_reason(owner: type, table: tuple[flags.Flag, ...], without: set[str]) -> None:
    names = [flag.field for flag in table]
    assert len(names) == len(set(names))
    assert set(names) | without == {entry.name for entry in fields(owner)}
    assert not set(names) & without


def test_what_is_not_given_is_not_passed_on(parser: argparse.ArgumentParser) -> None:
    args = parser.parse_args([])
    assert flags.sampling_options(args) == {}
    assert flags.engine_options(args) == {}


def test_sampling_values_arrive_as_their_types(parser: argparse.ArgumentParser) -> None:
    argv = "--temperature 0 --top-k 5 --logit-bias 3=-1.5 --logit-bias 4=2 --stop a --stop b --stop-token-id 9"
    more = "--max-tokens none --ignore-eos --no-skip-special-tokens --seed 7"
    options = flags.sampling_options(parser.parse_args([*argv.split(), *more.split()]))
    assert options == {
        "temperature": 0.0,
        "top_k": 5,
        "logit_bias": {3: -1.5, 4: 2.0},
        "stop": ["a", "b"],
        "stop_token_ids": [9],
        "max_tokens": None,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "seed": 7,
    }
    assert SamplingParams(**options).stops == ("a", "b")


def test_engine_values_arrive_as_their_types(parser: argparse.ArgumentParser) -> None:
    argv = "--model m --tree 3,2,8 --num-drafts 5 --num-pages 64 --no-prefix-cache"
    assert flags.engine_options(parser.parse_args(argv.split())) == {
        "model": "m",
        "tree": (3, 2, 8),
        "num_drafts": 5,
        "num_pages": 64,
        "prefix_cache": False,
    }


@pytest.mark.parametrize("argv", ["--tree 3,2", "--tree a,b,c", "--logit-bias 3", "--logit-bias x=1", "--top-k no"])
def test_malformed_values_are_refused_by_flag(
    argv: str, parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        parser.parse_args(argv.split())
    assert exit.value.code == 2
    assert argv.split()[0] in capsys.readouterr().err


def test_help_shows_the_defaults_of_the_classes(parser: argparse.ArgumentParser) -> None:
    text = " ".join(parser.format_help().split())
    assert f"(default: {EngineConfig().num_drafts})" in text
    assert f"(default: {SamplingParams().max_tokens})" in text
