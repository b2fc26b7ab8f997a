"""`peregrine chat`: turns with their history, commands, what was drafted, Ctrl-C, and pipes."""

import io
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cli.conftest import Terminal
from peregrine.cli import chat as chats
from peregrine.cli.main import main
from peregrine.engine.output import Delta
from peregrine.errors import RequestError
from peregrine.sampling import SamplingParams, sampling_params

WORDS = ["A", " bird", " fell", " down"]


class Speaker:
    """A fake LLM: generates its words in rounds of two, the first of each drafted."""

    tokenizer = SimpleNamespace(
        byte_level=True,
        special_ids=frozenset(),
        token_bytes=lambda i: WORDS[i].encode(),
        whole_texts={},
        chat_template=None,
    )
    engine = SimpleNamespace(limits=SimpleNamespace(num_drafts=3))
    decisions = (SimpleNamespace(field="model", value="m"), SimpleNamespace(field="drafter", value="d"))

    def __init__(self) -> None:
        self.chats: list[list[dict[str, str]]] = []
        self.params: list[SamplingParams] = []
        self.interrupt_after = 99
        self.closed = 0

    def __enter__(self) -> "Speaker":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def sampling(self, params: dict[str, object]) -> SamplingParams:
        return sampling_params(**params)

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        if messages[-1]["content"] == "too long":
            raise RequestError("prompt", "9 tokens", "leave no room", "shorten it")
        self.chats.append(messages)
        return [1]

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[Delta]:
        self.params.append(params)
        try:
            for start in (0, 2):
                if start >= self.interrupt_after:
                    raise KeyboardInterrupt
                ids = [start, start + 1]
                said = "".join(WORDS)
                output: Any = SimpleNamespace(finish_reason="stop", error=None, seed=params.seed or 77, text=said)
                last = start == 2
                text = "".join(WORDS[i] for i in ids)
                yield Delta(0, text, ids, [True, False], "stop" if last else None, output if last else None, offered=3)
        finally:
            self.closed += 1


@pytest.fixture
def speaker(monkeypatch: pytest.MonkeyPatch) -> Speaker:
    made = Speaker()
    monkeypatch.setattr(chats, "open_llm", lambda options: made)
    return made


def talk(monkeypatch: pytest.MonkeyPatch, *lines: str, flags: tuple[str, ...] = ()) -> int:
    """The command with these lines piped in."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return main(["chat", *flags])


def test_a_conversation_keeps_its_history_until_reset(
    speaker: Speaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, "Hello", "", "And?", "/reset", "Again", flags=("--system", "Be brief.")) == 0
    system = {"role": "system", "content": "Be brief."}
    first = {"role": "user", "content": "Hello"}
    answer = {"role": "assistant", "content": "A bird fell down"}
    assert speaker.chats == [
        [system, first],
        [system, first, answer, {"role": "user", "content": "And?"}],
        [system, {"role": "user", "content": "Again"}],
    ]
    printed = capsys.readouterr()
    assert printed.out == "A bird fell down\n" * 3  # a pipe carries answers alone, without prompts or colours
    assert printed.err.count("; 2.00 tokens per round (bonus included); 2 of 6 drafts right; seed 77\n") == 3


def test_speed_is_tokens_over_the_turns_own_time() -> None:
    turn = chats.Turn()
    list(turn.watch(Speaker().stream([1], SamplingParams(seed=5))))
    assert (
        turn.line(0.5) == "4 tokens, 8.0 tokens/s; 2.00 tokens per round (bonus included); 2 of 6 drafts right; seed 5"
    )


def test_commands_change_what_comes_after_them(speaker: Speaker, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("a", "/seed 9", "/temperature 0.5", "/drafts 0", "b", "/seed none", "/drafts 3", "c", "/quit", "never")
    talk(monkeypatch, *lines, flags=("--top-k", "5"))
    seen = [(p.seed, p.temperature, p.num_drafts, p.top_k, p.max_tokens) for p in speaker.params]
    assert seen == [(None, 1.0, None, 5, None), (9, 0.5, 0, 5, None), (None, 0.5, 3, 5, None)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/drafts 4", "drafts=4: the engine drafts 3 deep; use 0 to 3"),
        ("/drafts -1", "use 0 to 3"),
        ("/tree oak", "tree='oak': is not a choice; use auto, chain, tree"),
        ("/drafts many", "drafts='many': is not a whole number; write /drafts 3"),
        ("/seed x", "seed='x': is not a whole number"),
        ("/seed -3", "seed=-3"),
        ("/temperature hot", "temperature='hot': is not a number"),
        ("/temperature -1", "temperature=-1.0"),
        ("/bogus", "command='/bogus': there is no such command; /help lists all\n"),
        ("/sytem x", "/help lists all; did you mean /system?"),
        ("/system", "system='': is empty; write /system TEXT"),
        ("too long", "error: prompt='9 tokens': leave no room; shorten it"),
    ],
)
def test_errors_are_printed_and_the_chat_goes_on(
    speaker: Speaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    assert talk(monkeypatch, line, "Hello") == 1  # who pipes lines in learns that one of them failed
    assert said in capsys.readouterr().err
    assert speaker.chats == [[{"role": "user", "content": "Hello"}]]  # a refused turn leaves no trace
    assert speaker.params == [SamplingParams(max_tokens=None)]


def test_help_is_no_error(
    speaker: Speaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, "/help") == 0
    assert "/temperature X" in capsys.readouterr().err


def test_an_answer_that_fails_is_an_error(speaker: Speaker, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: Any = SimpleNamespace(finish_reason="error", error="NaN", seed=1, text="")
    monkeypatch.setattr(speaker, "stream", lambda *_: iter([Delta(0, "", [], [], "error", failed)]))
    assert talk(monkeypatch, "Hello") == 1


def test_at_a_terminal_a_mistake_is_not_the_exit_code(speaker: Speaker, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["/bogus", "/quit"])
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert main(["chat"]) == 0


def test_the_system_message_can_be_changed_in_a_chat(speaker: Speaker, monkeypatch: pytest.MonkeyPatch) -> None:
    talk(monkeypatch, "a", "/system Be brief.", "b", "/reset", "c", "/system none", "d", flags=("--system", "Sing."))
    told = [[message["content"] for message in chat if message["role"] == "system"] for chat in speaker.chats]
    assert told == [["Sing."], ["Be brief."], ["Be brief."], []]
    assert [len(chat) for chat in speaker.chats] == [2, 4, 2, 3]  # only /reset forgets the conversation


def test_an_answer_in_channels_is_kept_without_its_thoughts(speaker: Speaker, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["<|channel|>analysis<|message|>", "Hm<|end|>", "<|start|>assistant<|channel|>final<|message|>", "Yes"]
    monkeypatch.setattr(speaker.tokenizer, "chat_template", "<|start|>assistant<|channel|>final<|message|>")
    monkeypatch.setitem(globals(), "WORDS", words)
    talk(monkeypatch, "a", "b")
    assert speaker.chats[1][1] == {"role": "assistant", "content": "Yes"}
    assert not speaker.params[0].skip_special_tokens  # the marks are special tokens


def test_lines_in_another_encoding_are_refused(
    speaker: Speaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", piped)
    assert main(["chat"]) == 2
    assert "standard input: is not UTF-8 (byte 0xe9 at 3)" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_not_the_chat(
    speaker: Speaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speaker.interrupt_after = 2
    assert talk(monkeypatch, "Hello", "And?") == 0
    printed = capsys.readouterr()
    assert printed.out == "A bird\nA bird\n"
    assert printed.err.count("1 of 3 drafts right; stopped") == 2
    assert speaker.chats[1][1] == {"role": "assistant", "content": "A bird"}  # the partial answer stays in the history


def test_ctrl_c_while_printing_ends_the_request(speaker: Speaker, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(io.StringIO):
        def write(self, text: str) -> int:
            if text == " bird":
                raise KeyboardInterrupt
            return super().write(text)

    chat = chats.Chat(speaker, SamplingParams(), None)  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "stdout", Interrupted())
    assert chat.take("Hello") is True
    assert speaker.closed == 1


def test_ctrl_c_at_the_prompt_explains_how_to_quit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([KeyboardInterrupt(), EOFError()])

    def ask(prompt: str) -> str:
        raise next(answers)

    monkeypatch.setattr("builtins.input", ask)
    assert chats.read_line(interactive=True) is None
    assert "/quit or Ctrl-D" in capsys.readouterr().err


def test_drafted_tokens_are_underlined_on_a_terminal(speaker: Speaker, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    talk(monkeypatch, "Hello")
    assert terminal.getvalue() == "\033[4mA\033[0m bird\033[4m fell\033[0m down\n"
    monkeypatch.delenv("NO_COLOR")
    talk(monkeypatch, "Hello")
    assert "\033[32;4mA\033[0m bird" in terminal.getvalue()


def test_merlin_answers_the_same_with_and_without_drafts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ("Tell me about a cat.", "/reset", "/drafts 0", "Tell me about a cat.")
    flags = ("--seed", "4", "--max-tokens", "24", "--num-pages", "64")
    assert talk(monkeypatch, *lines, flags=flags) == 0
    printed = capsys.readouterr()
    half = len(printed.out) // 2
    assert printed.out[:half] == printed.out[half:] != ""
    # A machine that runs this for the first time shows a bar while it compiles.
    with_drafts, without = (line for line in printed.err.splitlines() if "tokens/s" in line)
    assert "drafts right" in with_drafts
    assert "1.00 tokens per round" in without
