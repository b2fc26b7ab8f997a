"""Drafted tokens are marked in the streamed text, which is printed unchanged."""

import json
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.conftest import Terminal
from peregrine.cli.main import main
from peregrine.cli.printing import DraftMarks, print_json, print_note, print_stream
from peregrine.engine.folders import find_model
from peregrine.engine.output import Delta
from peregrine.errors import EngineFault
from peregrine.llm import LLM
from peregrine.log import logger
from peregrine.sampling import SamplingParams
from peregrine.text.stream import Detokenizer, TextStream
from peregrine.text.tokenizer import Tokenizer

MERLIN = Tokenizer.read(find_model("merlin"))


def test_half_a_character_waits_for_its_other_half() -> None:
    class Bytes:
        byte_level, special_ids, whole_texts = True, frozenset[int](), dict[int, str]()

        def token_bytes(self, token: int) -> bytes:
            return bytes([token])

    marks = DraftMarks(Detokenizer(Bytes(), []))  # type: ignore[arg-type]
    assert list(marks.cut(Delta(0, "", [0xC3], [True], None, None))) == []
    assert list(marks.cut(Delta(0, "é!", [0xA9, 0x21], [False, True], None, None))) == [("é", False), ("!", True)]


@given(data=st.data(), text=st.text("ab é\u4e16<", min_size=1, max_size=30), stop=st.sampled_from(["", "b", "é<"]))
def test_pieces_are_the_text_cut_at_its_tokens(data: st.DataObject, text: str, stop: str) -> None:
    """Text that may begin a stop string is held back by the engine and comes with a later delta."""
    ids = MERLIN.encode(text)
    stream, marks = TextStream(MERLIN, [5], [stop] if stop else []), DraftMarks(Detokenizer(MERLIN, [5]))
    pieces: list[tuple[str, bool]] = []
    while ids and stream.stopped is None:
        count = data.draw(st.integers(1, 4))
        step, ids = ids[:count], ids[count:]
        before = stream.num_final
        more = stream.push(step) + ("" if ids else stream.finish())
        ended = object() if not ids or stream.stopped is not None else None
        kept = step[: stream.num_final - before]
        delta = Delta(0, more, kept, [token % 2 == 0 for token in kept], None, ended)  # type: ignore[arg-type]
        cut = list(marks.cut(delta))
        assert "".join(piece for piece, _ in cut) == more
        pieces += cut
    assert "".join(piece for piece, _ in pieces) == (text.split(stop)[0] if stop else text)


def test_marks_follow_the_tokens() -> None:
    ids = MERLIN.encode("Once upon a time")
    drafted = [index % 2 == 1 for index in range(len(ids))]
    marks = DraftMarks(Detokenizer(MERLIN, [5]))
    pieces = list(marks.cut(Delta(0, "Once upon a time", ids, drafted, None, None)))
    assert pieces == [(MERLIN.decode([token]), mark) for token, mark in zip(ids, drafted, strict=True)]


def test_a_stop_string_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    params = SamplingParams(temperature=0, stop=" it", max_tokens=60)
    with LLM("merlin", num_pages=64) as llm:
        prompt = llm.encode("One day, a little fox")
        output = print_stream(llm.stream(prompt, params), DraftMarks(Detokenizer(llm.tokenizer, prompt)))
    assert output.stop_reason == " it"
    assert capsys.readouterr().out == output.text + "\n"


FOUL = "\033]0;owned\007\033[2J\x9b31m\r\x7f\ttab\n"  # a title, a cleared screen, a C1 introducer; then text
SHOWN = "␛]0;owned␇␛[2J\\x9b31m␍␡\ttab\n"


def deltas(text: str) -> list[Delta]:
    ended: Any = SimpleNamespace(text=text)
    return [Delta(0, text[:1]), Delta(0, text[1:], output=ended)]  # a sequence may be cut anywhere


def test_a_model_cannot_steer_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], calls: Any
) -> None:
    print_stream(deltas(FOUL))
    assert capsys.readouterr().out == FOUL  # a pipe carries the text itself
    for kind in ("xterm", "dumb"):
        monkeypatch.setenv("TERM", kind)
        terminals = Terminal(), Terminal()
        for name, terminal in zip(("stdout", "stderr"), terminals, strict=True):
            monkeypatch.setattr(sys, name, terminal)
        print_stream(deltas(FOUL))
        print_note(FOUL)
        main(["generate", "hi", "--file", FOUL])  # its error quotes it
        logger.warning("a header held %s", FOUL)
        assert terminals[0].getvalue() == SHOWN
        assert SHOWN in terminals[1].getvalue()
        assert not re.search("\033(?!\\[[0-9;]*m)|[\007\r\x7f\x9b]", terminals[1].getvalue())


def test_json_escapes_every_control_character(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"text": FOUL + "é"})
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"text": FOUL + "é"}
    assert r"\u001b]0;owned\u0007\u001b[2J\u009b31m\r\u007f\ttab\né" in printed


def test_a_stream_without_an_output_is_a_fault() -> None:
    with pytest.raises(EngineFault, match="without an output"):
        print_stream(iter([]))
