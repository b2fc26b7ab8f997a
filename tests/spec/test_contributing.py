"""The drafter in CONTRIBUTING.md runs unchanged, and the family shown there is the real one."""

import re
from pathlib import Path

import pytest

from peregrine.spec import registry
from spec.harness import accept_length, build, cases, run, tokens

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"


def test_the_example_drafter_works(monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert found is not None
    code = found.group(1)
    assert code.count("\n") < 100
    names: dict[str, object] = {}
    exec(code, names)
    monkeypatch.setitem(registry.DRAFTERS, "echo", names["EchoDrafter"])  # type: ignore[arg-type]
    some = cases(6, max_tokens=60)
    outputs = run(build(drafter="echo").engine, some)
    assert tokens(outputs) == tokens(run(build().engine, some))
    assert accept_length(outputs) > 1.05


def test_the_example_family_is_the_real_one() -> None:
    import peregrine.models.families.mistral as mistral

    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    shown = next(block for block in blocks if "(Family)" in block)
    assert shown in Path(mistral.__file__).read_text()
