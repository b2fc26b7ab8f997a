"""Batches: every line appears exactly once even if the run is killed; an error concerns its line alone."""

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from peregrine import LLM, SamplingParams
from peregrine.config import EngineConfig
from peregrine.errors import ConfigError, EngineFault
from peregrine.serve import batch_engines
from peregrine.serve.batch import Batch, check_source
from peregrine.serve.batch_engines import Answer, EngineProcesses, LocalEngine
from peregrine.serve.batch_identity import served_hash
from peregrine.serve.batch_output import BatchOutput
from peregrine.spec.seat_entry import SeatEntry, Words
from serve.conftest import Served
from spec.harness import tiny_model

SRC = Path(__file__).parents[2] / "src"
Run = Callable[..., tuple[int, str, str]]


def request(custom_id: str, url: str = "/v1/completions", method: str = "POST", **body: object) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": method, "url": url, "body": body}


def write(path: Path, requests: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in requests))
    return path


def read(path: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines), "a line is there twice"
    return {line["custom_id"]: line for line in lines}


def run(server: Served, source: Path, target: Path, served: str = "", redo: bool = False) -> BatchOutput:
    wanted = check_source(source, served)
    with BatchOutput(target) as output:
        output.resume(wanted, redo)
        Batch(source, output, LocalEngine(server.llm, "merlin"), wanted).run()
    return output


def test_answers_equal_offline_ones_and_errors_stay_with_their_line(server: Served, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Tell me a story."}]
    source = write(
        tmp_path / "in.jsonl",
        [
            request("one", prompt="Once upon a time", seed=3, max_tokens=12),
            request("chat", "/v1/chat/completions", messages=chat, seed=4, max_tokens=9, n=2),
            request("wrong", prompt="x", temperature=-1),
            request("unknown", prompt="x", colour=1),
            request("nowhere", "/v1/embeddings", input="x"),
            request("other", prompt="x", model="falcon"),
            request("stream", prompt="x", stream=True),
            request("method", method="GET", prompt="x"),
            {"custom_id": "text", "method": "POST", "url": "/v1/completions", "body": "x"},
        ],
    )
    output = run(server, source, tmp_path / "out.jsonl")
    lines = read(tmp_path / "out.jsonl")
    assert output.num_refused == 7
    one = lines["one"]["response"]
    expected = server.llm.generate("Once upon a time", SamplingParams(seed=3, max_tokens=12))[0]
    assert (one["status_code"], one["body"]["choices"][0]["text"]) == (200, expected.text)
    assert lines["one"]["error"] is None
    assert lines["one"]["id"].startswith("batch_req_")
    told = [choice["message"]["content"] for choice in lines["chat"]["response"]["body"]["choices"]]
    ids = server.llm.encode_chat(chat)
    assert told == [server.llm.generate([ids], SamplingParams(seed=s, max_tokens=9))[0].text for s in (4, 5)]
    statuses = {name: lines[name]["response"]["status_code"] for name in lines if name not in ("one", "chat")}
    assert statuses == {
        "wrong": 400,
        "unknown": 400,
        "nowhere": 404,
        "other": 404,
        "stream": 400,
        "method": 400,
        "text": 400,
    }
    assert lines["unknown"]["response"]["body"]["error"]["param"] == "colour"


def test_a_line_that_overflows_or_cannot_be_seated_ends_alone(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = server.llm.engine.runner.seats.buffers
    pack = buffers.pack

    def fail_for_seed_13(entry: SeatEntry) -> dict[str, Words]:
        if entry.seed == 13:
            raise OverflowError("number too large")
        return pack(entry)

    monkeypatch.setattr(buffers, "pack", fail_for_seed_13)
    bad = [request(name, prompt="x", **{name: 2**63}) for name in ("top_k", "min_tokens", "max_tokens", "seed")]
    fault, good = request("fault", prompt="Once", seed=13), request("good", prompt="Once", max_tokens=2, seed=1)
    batch = run(server, write(tmp_path / "in.jsonl", [*bad, fault, good]), tmp_path / "out.jsonl")
    statuses = {name: line["response"]["status_code"] for name, line in read(tmp_path / "out.jsonl").items()}
    assert statuses == {"top_k": 400, "min_tokens": 400, "max_tokens": 400, "seed": 400, "fault": 500, "good": 200}
    assert batch.num_refused == 5


def test_a_line_that_no_code_expects_ends_alone(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = {"type": "function", "function": {"name": "fly", "parameters": {"properties": {}, "required": [{}]}}}
    chat = [{"role": "user", "content": "Hi"}]
    odd = request("odd", "/v1/chat/completions", messages=chat, tools=[tool], tool_choice="required")
    make = batch_engines.writer_of

    def fails_once(line: dict[str, Any], *more: Any) -> Any:
        if line["custom_id"] == "bug":
            raise ZeroDivisionError("a defect of ours")
        return make(line, *more)

    monkeypatch.setattr(batch_engines, "writer_of", fails_once)
    lines = [request("good", prompt="Once", max_tokens=2), odd, request("bug", prompt="x")]
    run(server, write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    statuses = {name: line["response"]["status_code"] for name, line in read(tmp_path / "out.jsonl").items()}
    assert (statuses["good"], statuses["odd"], statuses["bug"]) == (200, 400, 500)


def test_lines_are_in_the_order_of_the_requests(server: Served, tmp_path: Path) -> None:
    """Those that end late come first in the file, also when some were answered by an earlier run."""
    long = [request(str(i), prompt="Once", max_tokens=60 - 10 * i, seed=i, ignore_eos=True) for i in range(6)]
    source, target = write(tmp_path / "in.jsonl", long[3:]), tmp_path / "out.jsonl"
    run(server, source, target)
    early = read(target)
    run(server, write(source, long), target)
    assert list(read(target)) == [str(i) for i in range(6)]
    assert {name: read(target)[name] for name in early} == early


class ScriptedProcess:
    """Stands for an engine's process: a thread with the other end of its connection."""

    pid, exitcode = 7, -9

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> None:
        own = Connection(os.dup(args[0].fileno()))  # a process would have its own
        self._thread = threading.Thread(target=target, args=(own, *args[1:]))

    def start(self) -> None:
        self._thread.start()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def terminate(self) -> None: ...
    def kill(self) -> None: ...


@pytest.mark.parametrize("dies", [False, True])
def test_several_engines_share_a_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dies: bool) -> None:
    """Each has a part of the requests, answers come in any order, and one that dies ends the run with an error."""
    num_answered: Counter[int] = Counter()

    def answer_some(connection: Connection, index: int, count: int, options: dict[str, object], name: str) -> None:
        connection.send(4)
        with contextlib.suppress(EOFError, OSError):
            while True:
                asked = connection.recv()
                if dies and index == 1:
                    break
                num_answered[index] += 1
                connection.send([Answer(asked["custom_id"], 200, {"by": index}, num_tokens=3)])
        connection.close()

    context = multiprocessing.get_context("spawn")
    monkeypatch.setattr(context, "Process", ScriptedProcess)
    monkeypatch.setattr("peregrine.serve.batch_engines.answer_all", answer_some)
    source = write(tmp_path / "in.jsonl", [request(str(i), prompt="x") for i in range(60)])
    wanted = check_source(source, "")
    with BatchOutput(tmp_path / "out.jsonl") as output:
        output.resume(wanted)
        gone = pytest.raises(EngineFault, match=r"process 7 of the batch has ended \(exit code -9\)")
        with gone if dies else nullcontext(), EngineProcesses(2, {}, "m") as engines:
            Batch(source, output, engines, wanted).run()
    lines = read(tmp_path / "out.jsonl")
    if not dies:
        assert list(lines) == [str(i) for i in range(60)]
        assert (min(num_answered.values()) > 5, sum(num_answered.values())) == (True, 60)
    assert all(line["response"]["body"]["by"] in (0, 1) for line in lines.values())


def test_engines_in_processes_give_the_same_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What runs in each process, here in a thread; `make test-batch` has real ones."""
    monkeypatch.setattr(multiprocessing.get_context("spawn"), "Process", ScriptedProcess)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    bodies = [{"prompt": [5 + i], "max_tokens": 8, "seed": i} for i in range(12)]
    asked = [request(str(i), **body) for i, body in enumerate(bodies)] + [request("bad", prompt="x", temperature=-1)]
    source = write(tmp_path / "in.jsonl", asked)
    wanted, options = check_source(source, ""), {"model": str(tiny_model()), "drafter": "none", "num_pages": 100}
    with BatchOutput(tmp_path / "out.jsonl") as output:
        output.resume(wanted)
        with EngineProcesses(2, dict(options), "tiny") as engines:
            Batch(source, output, engines, wanted).run()
        assert engines.num_tokens > 12
    lines = read(tmp_path / "out.jsonl")
    assert list(lines) == [line["custom_id"] for line in asked]
    with LLM(**options) as llm:  # type: ignore[arg-type]
        for i, body in enumerate(bodies):
            [expected] = llm.generate([body["prompt"]], SamplingParams(max_tokens=8, seed=i), progress=False)
            assert lines[str(i)]["response"]["body"]["choices"][0]["text"] == expected.text
    assert lines["bad"]["response"]["status_code"] == 400
    with pytest.raises(ConfigError, match="max_rows=-1"):
        EngineProcesses(2, {**options, "max_rows": -1}, "tiny")


def test_a_second_run_does_nothing(server: Served, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [request(str(i), prompt="Once", max_tokens=2) for i in range(5)])
    run(server, source, tmp_path / "out.jsonl")
    before = (tmp_path / "out.jsonl").read_bytes()
    run(server, source, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_a_torn_line_is_dropped_and_done_again(server: Served, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [request(str(i), prompt="Once", max_tokens=2) for i in range(5)])
    target = tmp_path / "out.jsonl"
    run(server, source, target)
    whole = target.read_bytes()
    target.write_bytes(whole[:-40])
    run(server, source, target)
    assert set(read(target)) == set("01234")
    assert target.read_bytes().startswith(b"\n".join(whole.split(b"\n")[:4]))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('{"custom_id": "a"\n', "line 1: is not JSON"),
        ("[1]\n", "line 1: is not an object with the fields"),
        (json.dumps({**request("a"), "extra": 1}), "line 1: is not an object with the fields"),
        (json.dumps({**request("a"), "custom_id": 5}), "custom_id=5: is not a name"),
        (json.dumps(request("a")) + "\n\n" + json.dumps(request("a")), "custom_id='a' is there twice"),
    ],
)
def test_a_file_that_is_not_a_batch_is_refused_before_anything_runs(
    peregrine: Run, tmp_path: Path, lines: str, said: str
) -> None:
    (tmp_path / "in.jsonl").write_text(lines)
    code, _, err = peregrine("batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"))
    assert code == 2
    assert said in err
    assert not (tmp_path / "out.jsonl").exists()


@pytest.fixture
def batch(server: Served, peregrine: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """The command on in.jsonl and out.jsonl, with the server's model."""
    monkeypatch.setattr("peregrine.cli.batch.open_llm", lambda options: nullcontext(server.llm))
    return lambda *more: peregrine("batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), *more)


def test_answers_to_something_else_do_not_count(batch: Run, tmp_path: Path) -> None:
    """The same custom_id with another body: the command stops, and --redo asks that one again."""
    target = tmp_path / "out.jsonl"
    asked = [request(name, prompt="Once", max_tokens=2, seed=1) for name in "abc"]
    write(tmp_path / "in.jsonl", asked)
    assert batch()[0] == 0
    before = target.read_bytes()
    write(tmp_path / "in.jsonl", [{**line, "body": dict(reversed(line["body"].items()))} for line in asked])
    assert batch()[0] == 0  # the order of keys means nothing
    asked[1]["body"]["prompt"] = "One day"
    write(tmp_path / "in.jsonl", asked)
    code, _, err = batch()
    assert code == 2
    assert "have changed since it answered 1 of the requests ('b' first)" in err
    assert "--redo" in err
    assert target.read_bytes() == before
    assert batch("--name", "other")[0] == 2
    target.chmod(0o600)
    assert batch("--redo")[0] == 0
    old, new = {line["custom_id"]: line for line in map(json.loads, before.splitlines())}, read(target)
    assert [new[name] == old[name] for name in "abc"] == [True, False, True]
    assert target.stat().st_mode & 0o777 == 0o600
    assert len(list(tmp_path.iterdir())) == 2  # nothing is left beside the two files
    assert batch()[0] == 0


def test_refusals_stand_until_they_are_redone(batch: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = [request("good", prompt="x", max_tokens=1), request("bad", prompt="x", max_tokens=1, temperature=-1)]
    write(tmp_path / "in.jsonl", asked)
    code, _, err = batch()
    assert (code, "2 requests answered, 1 of them refused; --redo asks those again" in err) == (1, True)
    with monkeypatch.context() as patch:
        patch.delattr("peregrine.cli.batch.open_llm")  # all is answered: no model is loaded
        assert batch()[0] == 1
    good = read(tmp_path / "out.jsonl")["good"]
    assert batch("--redo")[0] == 1
    asked[1]["body"]["temperature"] = 1
    write(tmp_path / "in.jsonl", asked)
    assert batch("--redo")[0] == 0
    lines = read(tmp_path / "out.jsonl")
    assert lines["good"] == good
    assert lines["bad"]["response"]["status_code"] == 200


@pytest.mark.parametrize("link", [Path.samefile, Path.symlink_to, Path.hardlink_to])
def test_the_input_is_not_the_output(peregrine: Run, tmp_path: Path, link: Callable[..., object]) -> None:
    source = write(tmp_path / "in.jsonl", [request("a", prompt="x")])
    target = source if link == Path.samefile else tmp_path / "out.jsonl"
    link(target, source)
    before = source.read_bytes()
    code, _, err = peregrine("batch", str(source), str(target))
    assert (code, "is the input, too" in err) == (2, True)
    assert source.read_bytes() == before


ANSWER = {
    "id": "batch_req_1",
    "custom_id": "a",
    "response": {"status_code": 200, "request_id": "r", "body": {}},
    "error": None,
}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hello\n", "line 1: is not a line of a batch's output"),
        ("my thesis, without a line break at its end", "line 1: is not a line"),
        ('{"custom_id": "a"}\n', "line 1: is not a line"),
        (json.dumps({**ANSWER, "response": None}) + "\n", "line 1: is not a line"),
        (json.dumps(request("a")) + "\n", "line 1: is not a line"),
        (json.dumps(ANSWER) + "\nnotes", "line 2: is not a line"),
        (2 * (json.dumps(ANSWER) + "\n"), "line 2: answers 'a' again"),
        (json.dumps(ANSWER) + "\n", "1 of the requests ('a' first)"),  # of another program
        (json.dumps({**ANSWER, "custom_id": "b"}) + '\n{"id": "batch_req_', "answers 'b', which is not asked"),
    ],
)
def test_files_of_something_else_are_left_alone(batch: Run, tmp_path: Path, text: str, said: str) -> None:
    write(tmp_path / "in.jsonl", [request("a", prompt="x", max_tokens=1)])
    (tmp_path / "out.jsonl").write_text(text)
    code, _, err = batch()
    assert (code, said in err) == (2, True)
    assert (tmp_path / "out.jsonl").read_text() == text


def test_one_batch_at_a_time_and_regular_files_alone(batch: Run, peregrine: Run, tmp_path: Path) -> None:
    source = str(write(tmp_path / "in.jsonl", [request("a", prompt="x", max_tokens=1)]))
    with BatchOutput(tmp_path / "out.jsonl"):
        assert "another batch is writing" in batch()[2]
    for argv in ((source, "/dev/null"), (source, str(tmp_path)), ("/dev/null", str(tmp_path / "new"))):
        code, _, err = peregrine("batch", *argv)
        assert (code, "is not a regular file" in err) == (2, True)
    assert not (tmp_path / "new").exists()


def test_what_is_served_is_told_by_its_contents(tmp_path: Path) -> None:
    """Weights, tokenizer, generation_config and dtype change answers; path, drafter and pages do not."""
    folder, moved = tmp_path / "m", tmp_path / "moved"
    shutil.copytree(tiny_model(), folder)
    shutil.copytree(folder, moved)
    first = served_hash("m", EngineConfig(model=str(folder)))
    assert served_hash("m", EngineConfig(model=str(moved), drafter="none", num_drafts=0, max_rows=2)) == first
    assert served_hash("n", EngineConfig(model=str(folder))) != first
    assert served_hash("m", EngineConfig(model=str(folder), dtype="bfloat16")) != first
    (moved / "generation_config.json").write_text('{"temperature": 0.6}')
    second = served_hash("m", EngineConfig(model=str(moved)))
    (moved / "chat_templates").mkdir()
    (moved / "chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    third = served_hash("m", EngineConfig(model=str(moved)))
    [weights] = moved.glob("*.safetensors")
    stored = bytearray(weights.read_bytes())
    stored[-1] ^= 1
    weights.write_bytes(stored)
    assert len({first, second, third, served_hash("m", EngineConfig(model=str(moved)))}) == 4


def test_killed_ten_times_it_ends_with_every_line_once(tmp_path: Path) -> None:
    """SIGKILL at random moments; each run goes on where the last one was."""
    draw = random.Random(7)
    source = write(
        tmp_path / "in.jsonl",
        [request(str(i), prompt=[5 + i % 200], max_tokens=draw.randint(3, 20), seed=i) for i in range(300)],
    )
    target, script = tmp_path / "out.jsonl", str(Path(__file__).parent / "kill_batch.py")
    command = [sys.executable, script, str(tiny_model()), str(source), str(target)]
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=True)
    told = json.loads(done.stdout)
    assert (told["killed"], told["last"]) == (10, 0)
    assert told["sizes"] == sorted(told["sizes"])
    lines = read(target)
    assert set(lines) == {str(i) for i in range(300)}
    assert all(line["response"]["status_code"] == 200 for line in lines.values())
