"""Flags are derived from the two config classes: none missing, none extra, defaults in one place."""

import argparse
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from peregrine.cli import flags
from peregrine.config import EngineConfig, option
from peregrine.sampling import Constraint, SamplingParams


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    flags.add_generation_flags(parser)
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


def test_schemas_and_grammars_are_read_from_files(
    parser: argparse.ArgumentParser, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "integer"}')
    options = flags.sampling_options(parser.parse_args(["--json-schema", str(file)]))
    assert SamplingParams(**options).constraint == Constraint("json_schema", '{"type": "integer"}')
    options = flags.sampling_options(parser.parse_args(["--choice", "a", "--choice", "b"]))
    assert SamplingParams(**options).constraint == Constraint("choice", '["a", "b"]')
    assert flags.sampling_options(parser.parse_args(["--regex", "a+"])) == {"regex": "a+"}
    with pytest.raises(SystemExit):
        parser.parse_args(["--grammar", str(tmp_path / "missing")])
    assert "check the path" in capsys.readouterr().err


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
    assert f"(default: {EngineConfig().page_size})" in text
    assert f"(default: {SamplingParams().max_tokens})" in text


def test_a_new_field_is_a_new_flag() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Config:
        colour: str = option("red", "50% of the light", "NAME")
        sizes: tuple[int, ...] = option((), "repeatable", "N", flag="size")
        loud: bool | None = option(None, "a switch")
        limit: int | None = option(5, "none: no limit", "N")

    parser = argparse.ArgumentParser()
    table = flags.flags_of(Config)
    flags.add_flags(parser, "new", table, limit=None)
    text = " ".join(parser.format_help().split())
    assert "--colour NAME 50% of the light (default: red)" in text
    assert "--limit N none: no limit (default: none)" in text  # a command's own default, not the dataclass's
    argv = ["--size", "3", "--size", "4", "--no-loud", "--limit", "none"]
    assert flags.given(parser.parse_args(argv), table) == {"sizes": [3, 4], "loud": False, "limit": None}


def test_commands_show_their_own_defaults() -> None:
    from peregrine.cli.main import build_parser

    commands = next(a for a in build_parser()._actions if a.metavar == "COMMAND").choices
    assert isinstance(commands, dict)
    helps = {name: " ".join(commands[name].format_help().split()) for name in ("demo", "chat", "generate")}
    assert "holds (default: 96)" in helps["demo"]
    assert "holds (default: none)" in helps["chat"]
    assert "holds (default: 128)" in helps["generate"]


def test_a_file_to_write_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    kept, link = tmp_path / "kept.json", tmp_path / "link.json"
    kept.write_text("old")
    link.symlink_to(tmp_path / "elsewhere.json")
    for path in (kept, link, tmp_path / "new.json", tmp_path / "folder" / "new.json"):
        assert flags.new_file(str(path)) == path
    assert (kept.read_text(), link.is_symlink(), (tmp_path / "new.json").exists()) == ("old", True, False)
    with pytest.raises(argparse.ArgumentTypeError, match="cannot be written"):
        flags.new_file(str(tmp_path))
