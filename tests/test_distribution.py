"""The distribution's name, and that every hint about installing is right in a clone and beside a wheel."""

import re
import tomllib
from pathlib import Path

import pytest

from peregrine import __version__
from peregrine.errors import ConfigError, need_packages

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXTS = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".html", ".js"}
# On PyPI `peregrine` is a stranger's; ours is not there, and until it is, anybody could take the name.
OURS = r"peregrine(-llm|_llm)?"
FROM_PYPI = re.compile(rf"install[^\n;|&:]*?[ '\"`]{OURS}(?![\w.-]*\.whl)(?=[\s'\"`\[=<>~!.,;)]|$)", re.I)
EXTRA = re.compile(rf"\b{OURS}\[[a-z]", re.I)


def hints(text: str) -> list[str]:
    """What in a text would install a distribution of our name from PyPI."""
    return [found.group() for pattern in (FROM_PYPI, EXTRA) for found in pattern.finditer(text)]


def files() -> list[Path]:
    """Everything that is read by people or printed: sources, documents, recipes."""
    below = (path for top in ("src", "docs", "deploy", "benchmarks") for path in (ROOT / top).rglob("*"))
    found = [*ROOT.glob("*"), *below]
    return [path for path in found if path.suffix in TEXTS or path.name in ("Makefile", "Dockerfile")]


def test_no_text_installs_a_strangers_package() -> None:
    assert (ROOT / "docs" / "server.md") in files()
    assert {str(path): found for path in files() if (found := hints(path.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("pip install 'peregrine[serve]'", True),
        ("run: pip install peregrine", True),
        ("pip install -U peregrine-llm==0.1", True),
        ("install peregrine[test] or pass --no-peer", True),
        ("pip install '.[cpu,serve]'", False),
        ("pip install 'dist/peregrine_llm-0.1.0-py3-none-any.whl[cpu]'", False),
        ("pip install fastapi uvicorn", False),
        ("make install; peregrine serve", False),
    ],
)
def test_what_counts_as_such_a_text(text: str, wrong: bool) -> None:
    assert bool(hints(text)) is wrong


def test_names_and_the_wheel_in_the_readme() -> None:
    assert PROJECT["name"] == "peregrine-llm"
    assert set(PROJECT["scripts"]) == {"peregrine"}
    wheel = f"{PROJECT['name'].replace('-', '_')}-{__version__}-py3-none-any.whl"
    assert wheel in (ROOT / "README.md").read_text()


def test_a_missing_package_is_named_as_pip_wants_it() -> None:
    need_packages("pytest", "json")
    with pytest.raises(ConfigError, match=r"^no_such_thing not installed; run: pip install no_such_thing, or wait$"):
        need_packages("pytest", "no_such_thing", instead=", or wait")
