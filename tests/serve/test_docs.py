"""docs/server.md names every field, route, metric and setting; wrong settings are refused."""

import importlib.util
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from peregrine.cli.main import build_parser
from peregrine.cli.serve import read_keys
from peregrine.errors import ConfigError
from peregrine.serve import run
from peregrine.serve.app import make_app
from peregrine.serve.protocol import (
    REFUSED,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Speculation,
    StreamOptions,
    TokenizeBody,
)
from peregrine.serve.service import Service
from peregrine.serve.settings import ServeConfig

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "server.md").read_text()


@pytest.mark.parametrize("model", [CompletionBody, ChatBody, TokenizeBody, DetokenizeBody, StreamOptions, Speculation])
def test_every_field_is_named(model: type) -> None:
    missing = [name for name in model.model_fields if not re.search(rf'[`"]{name}[`"]', DOCS)]  # type: ignore[attr-defined]
    assert not missing


def test_every_refused_field_route_and_metric_is_named() -> None:
    service = Service("merlin", ServeConfig())
    assert not [name for name in REFUSED if f"`{name}`" not in DOCS]
    assert not [path for path in make_app(service).openapi()["paths"] if path not in DOCS]
    names = {family.name for family in service.metrics.registry.collect()}
    assert not [name for name in names if name.removeprefix("vllm:") not in DOCS]


def test_every_setting_has_a_flag_and_is_documented() -> None:
    commands = next(a for a in build_parser()._actions if a.metavar == "COMMAND").choices
    assert isinstance(commands, dict)
    flags = {option for action in commands["serve"]._actions for option in action.option_strings}
    for entry in fields(ServeConfig):
        flag = "--" + (entry.metadata["flag"] or entry.name).replace("_", "-")
        assert flag in flags
        assert f"`{flag}`" in DOCS


@pytest.mark.parametrize("argv", [("serve",), ("batch", "a", "b")])
def test_without_the_extra_the_command_says_what_to_install(
    peregrine: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, err = peregrine(*argv)
    assert code == 2
    assert (
        "fastapi, uvicorn, prometheus_client not installed; run: pip install fastapi uvicorn prometheus_client" in err
    )


def test_keys_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n\n two \n")
    assert read_keys(tmp_path / "keys") == ["one", "two"]
    (tmp_path / "none").write_text("\n")
    for name, said in (("none", "holds no key"), ("absent", "cannot be read")):
        with pytest.raises(ConfigError, match=said):
            read_keys(tmp_path / name)


def test_keys_come_from_a_variable(
    peregrine: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from the command line, which every user of the machine can see."""
    given: list[ServeConfig] = []
    monkeypatch.setattr(run, "serve", lambda model, open_llm, settings: given.append(settings) or 0)
    monkeypatch.setenv("PEREGRINE_API_KEY", "one two")
    assert peregrine("serve", "--api-key", "three")[0] == 0
    assert given[0].api_keys == ("three", "one", "two")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"port": 70000}, "port=70000"),
        ({"max_queue": -1}, "max_queue=-1"),
        ({"max_body_bytes": 5}, "max_body_bytes=5"),
        ({"drain_seconds": float("nan")}, "drain_seconds=nan"),
        ({"api_keys": ("a b ",)}, "api_keys"),
        ({"api_keys": ("",)}, "api_keys"),
        ({"hang_seconds": 0}, "hang_seconds=0"),
        ({"max_connections": 0}, "max_connections=0"),
        ({"stream_interval": 0}, "stream_interval=0"),
        ({"allow_origins": ("example.org",)}, "allow_origin='example.org'"),
        ({"allow_origins": ("https://example.org/",)}, "allow_origin='https://example.org/'"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ServeConfig(**wrong)  # type: ignore[arg-type]


def test_an_address_in_use_is_reported(peregrine: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = peregrine("serve", "--host", "203.0.113.7", "--port", "1")
    assert code == 2
    assert "host='203.0.113.7', port=1: cannot listen there" in err
