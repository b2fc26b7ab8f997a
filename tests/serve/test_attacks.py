"""Small bodies that make much work do not hold the event loop, and the server serves the others meanwhile."""

import pytest

from peregrine.text import chat_sandbox
from serve.attacks import ATTACKS, Attack, as_json, longest_gap, run_attack, texts
from serve.conftest import Served

LONGEST_S = 2.0  # 0.05 on a free machine
LOOPING = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("name", ATTACKS)
def test_no_body_holds_the_event_loop(server: Served, name: str) -> None:
    attack = ATTACKS[name]
    with longest_gap(server.event_loop) as gap:
        assert run_attack(server.address, attack) == [attack.status] * attack.copies
    assert gap.seconds < LONGEST_S


def test_a_looping_template_does_not_hold_the_event_loop(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(server.llm.tokenizer.chat_templates, "default", LOOPING)  # type: ignore[arg-type]
    monkeypatch.setattr(chat_sandbox, "MAX_RENDER_SECONDS", 1.5 * LONGEST_S)
    with longest_gap(server.event_loop) as gap:
        assert run_attack(server.address, Attack("/v1/chat/completions", as_json(messages=texts(1, "Hi")))) == [400]
    assert gap.seconds < LONGEST_S
