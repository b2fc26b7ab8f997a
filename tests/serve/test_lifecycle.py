"""Loading, disconnects, faults and shutdown: what the server answers, and that nothing hangs."""

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from peregrine import LLM
from peregrine.engine.output import Delta
from peregrine.engine.request import Request
from peregrine.errors import EngineFault
from peregrine.grammar import GrammarCompiler
from peregrine.serve import run
from peregrine.serve.gateway import Gateway
from peregrine.serve.job import Job
from serve.conftest import Lent, Served, start, wait_ready
from serve.processes import HANG, breaking, process
from spec.harness import check_pages

PLAIN = ("--drafter", "none")  # nothing to load or to measure but the model
ENDLESS = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True}


def test_a_loading_server_says_so(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, phases = threading.Event(), list[str]()
    monkeypatch.setattr(GrammarCompiler, "load", lambda self: phases.append(served.service.status.phase))

    def slowly() -> LLM:
        go_on.wait()
        return Lent(server.llm)  # type: ignore[return-value]

    served = start(slowly)
    try:
        with served.http() as http:
            health = http.get("/health")
            assert (health.status_code, health.json()["error"]["code"]) == (503, "loading")
            assert http.get("/version").status_code == http.get("/metrics").status_code == 200
            for path in ("/v1/completions", "/tokenize"):
                early = http.post(path, json={"prompt": "x"})
                assert (early.status_code, early.headers["retry-after"]) == (503, "5")
            go_on.set()
            wait_ready(served)
            assert http.get("/health").status_code == 200
            assert phases == ["loading"]  # what would stop every thread at the first grammar is done before
            assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    finally:
        go_on.set()
        served.stop()


def test_a_disconnect_aborts_the_request(server: Served, http: httpx.Client) -> None:
    with http.stream("POST", "/v1/completions", json={**ENDLESS, "n": 2, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert server.service.gateway.num_open == 2
    server.wait_idle()
    with server.http() as impatient, pytest.raises(httpx.ReadTimeout):
        impatient.post("/v1/completions", json=ENDLESS, timeout=0.3)  # also without streaming
    server.wait_idle()
    pool, tree = server.llm.engine.ledger.pool, server.llm.engine.ledger.tree
    assert pool.num_free + tree.num_cached == pool.num_pages - 1


def test_a_reader_that_does_not_read_delays_no_other_request(server: Served, http: httpx.Client) -> None:
    body = json.dumps({**ENDLESS, "max_tokens": 300, "stream": True, "logprobs": 10, "seed": 1}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect((host, int(port)))
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        lazy.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        done = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 20})
        assert done.status_code == 200
        server.wait_idle()  # its request has run to its end, though its client has read nothing
        text = b""
        while b"[DONE]" not in text[-200:]:
            part = lazy.recv(1 << 20)
            assert part, "the stream broke off"
            text += part
    finished = json.loads(text[text.rindex(b'data: {"id"') :].split(b"\r\n")[0][6:].strip())
    assert finished["choices"][0]["finish_reason"] == "length"
    # What piled up meanwhile came as one piece: a round brings 4 tokens at most.
    assert len(finished["choices"][0]["logprobs"]["tokens"]) > 4


@contextmanager
def breakable(monkeypatch: pytest.MonkeyPatch, **settings: object) -> Iterator[tuple[Served, httpx.Client]]:
    """A server that may fail; it says so until it is stopped."""
    monkeypatch.setattr(run, "FAULT_S", 600)
    served = start(lambda: LLM("merlin", num_pages=300), **settings)
    try:
        wait_ready(served)
        with served.http() as http:
            yield served, http
    finally:
        served.stop()


def ask_two_ways(served: Served, http: httpx.Client, breaks: Callable[[], None]) -> list[dict[str, str]]:
    """The errors of a streamed and of a whole response that are open while the engine breaks."""
    with http.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        whole: list[httpx.Response] = []
        asked = threading.Thread(target=lambda: whole.append(http.post("/v1/completions", json=ENDLESS)))
        asked.start()
        while served.service.gateway.num_open < 2:
            time.sleep(0.01)
        breaks()
        last = [line for line in lines if line][-1]
        asked.join()
    assert whole[0].status_code == 500
    return [json.loads(last.removeprefix("data: "))["error"], whole[0].json()["error"]]


def check_faulted(served: Served, http: httpx.Client, secret: str) -> None:
    """Everybody hears that the engine failed, and nobody why."""
    for path in ("/health", "/livez"):
        answer = http.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "faulted")
        assert secret not in answer.text
    refused = http.post("/v1/completions", json={"prompt": "x"})
    assert refused.status_code == 503
    assert secret not in refused.text
    assert served.service.gateway.num_open == 0


@pytest.mark.parametrize("kind", [MemoryError, SystemExit])  # a panic in a library is no Exception either
def test_an_engine_fault_reaches_everybody_and_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    with breakable(monkeypatch) as (served, http):

        def explode(*_: object) -> None:
            raise kind("no more in /secret/place")

        def breaks() -> None:
            served.llm.engine.runner.launch = explode  # type: ignore[method-assign]

        for error in ask_two_ways(served, http, breaks):
            assert (error["code"], "/secret/place" in error["message"]) == ("engine_fault", False)
        check_faulted(served, http, "/secret/place")
        assert http.post("/flush_cache").status_code == 500
    assert isinstance(served.result[0], EngineFault)  # the process ends with code 1
    [logged] = [record for record in caplog.records if record.message == "the engine has failed"]
    assert logged.exc_info is not None
    assert "/secret/place" in str(logged.exc_info[1])
    assert logged.exc_info[1].__cause__.__traceback__ is not None  # type: ignore[union-attr]


def test_an_engine_that_hangs_is_noticed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    go_on = threading.Event()
    with breakable(monkeypatch, hang_seconds=1.0) as (served, http):

        def hang_here() -> list[Delta]:
            go_on.wait()
            return []

        def breaks() -> None:
            served.llm.engine.step = hang_here  # type: ignore[method-assign]

        for error in ask_two_ways(served, http, breaks):
            assert error["code"] == "engine_fault"
        check_faulted(served, http, "hang_here")
    assert "hangs" in str(served.result[0])
    assert "in hang_here" in caplog.text  # the log says where
    go_on.set()
    served.llm.close()


def test_a_fault_of_one_request_is_reported_to_it_alone(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN logits end one generation; the server stays healthy."""
    from peregrine.engine.round_result import FINISH_REASONS
    from peregrine.kernels.round import FINISH_LENGTH

    monkeypatch.setitem(FINISH_REASONS, FINISH_LENGTH, "error")
    broken = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "ignore_eos": True})
    assert broken.status_code == 500
    assert "NaN" in broken.json()["error"]["message"]
    assert http.get("/health").status_code == 200


def test_a_hang_ends_the_process_with_code_1() -> None:
    with process("--hang-seconds", "1", *PLAIN, script=breaking(HANG)) as (running, http):
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 500
        assert running.wait(timeout=60) == 1


def test_sigterm_ends_a_process_in_which_everything_hangs() -> None:
    """The engine's step does not end, and neither does a call in the event loop."""
    with process("--drain-seconds", "1", *PLAIN, script=breaking(HANG)) as (running, http):
        for request in (("POST", "/v1/completions", {"prompt": "x"}), ("GET", "/server_info", None)):
            with pytest.raises(httpx.ReadTimeout):
                http.request(request[0], request[1], json=request[2], timeout=0.5)
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=60) == 1


def test_sigterm_drains_then_cuts_off() -> None:
    """Requests that can end before the deadline do; others get an error; new ones are refused; exit code 0."""
    with process("--drain-seconds", "4", "--max-rows", "4", *PLAIN) as (running, http):
        with http.stream("POST", "/v1/completions", json={**ENDLESS, "n": 3, "stream": True}) as endless:
            lines = endless.iter_lines()
            next(lines)
            body = {"prompt": "Once", "max_tokens": 8, "ignore_eos": True, "stream": True}
            with http.stream(
                "POST", "/v1/completions", json={**body, "stream_options": {"include_usage": True}}
            ) as short:
                rest = short.iter_lines()
                next(rest)
                running.send_signal(signal.SIGTERM)
                while http.get("/health").status_code == 200:
                    time.sleep(0.01)
                health = http.get("/health").json()["error"]
                assert (health["code"], "shutting down" in health["message"]) == ("draining", True)
                assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
                *_, usage, done = (line.removeprefix("data: ") for line in rest if line)
            assert (json.loads(usage)["usage"]["completion_tokens"], done) == (8, "[DONE]")
            last = [line for line in lines if line][-1]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert running.wait(timeout=60) == 0


@pytest.mark.parametrize(("drain_seconds", "status"), [(30, 200), (0.1, 503)])
def test_a_request_that_is_still_prepared_is_drained_too(
    server: Served, monkeypatch: pytest.MonkeyPatch, drain_seconds: float, status: int
) -> None:
    """It has its response if it can begin before the deadline, else an error that says why."""
    go_on, begun, answers = threading.Event(), threading.Event(), list[httpx.Response]()
    prepare = Gateway.prepare

    def slowly(gateway: Gateway, job: Job) -> list[Request]:
        begun.set()
        go_on.wait()
        return prepare(gateway, job)

    monkeypatch.setattr(Gateway, "prepare", slowly)
    monkeypatch.setattr(run, "SHUTDOWN_S", 2)
    served = start(lambda: Lent(server.llm), drain_seconds=drain_seconds)  # type: ignore[arg-type, return-value]
    wait_ready(served)
    with served.http() as http:
        body = {"prompt": "Once", "max_tokens": 2}
        asked = threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=body)))
        asked.start()
        begun.wait()
        ends = threading.Thread(target=served.stop)
        ends.start()
        time.sleep(2.5 if status == 200 else 0.5)  # longer than open responses are waited for; than the deadline
        go_on.set()
        asked.join()
        ends.join()
    assert answers[0].status_code == status
    if status == 503:
        assert answers[0].json()["error"]["code"] == "shutting_down"


def test_a_model_that_cannot_be_loaded_ends_the_server_in_one_line(
    peregrine: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PEREGRINE_LOG", "warning")
    code, out, err = peregrine("serve", "--port", "0", "--model", str(tmp_path))
    assert (code, out) == (2, "")
    [line] = err.strip().splitlines()
    assert line.startswith("error: ")
    assert str(tmp_path) in line


def test_a_limit_of_prompts_past_the_context_ends_the_server_in_one_line(
    peregrine: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients are told the limit, and would find that it does not hold."""
    monkeypatch.setenv("PEREGRINE_LOG", "warning")
    code, out, err = peregrine("serve", "--port", "0", "--max-len", "64", "--max-prompt", "65", "--num-pages", "100")
    assert (code, out) == (2, "")
    [line] = err.strip().splitlines()
    assert line.startswith("error: max_prompt=65: exceeds the context of 64 tokens; lower it")


def test_a_signal_while_the_model_loads_ends_the_server_at_once() -> None:
    """Loading is not waited for, and its late result is dropped."""
    go_on, begun = threading.Event(), threading.Event()

    def slowly() -> LLM:
        begun.set()
        go_on.wait()
        raise MemoryError("too late to matter")

    served = start(slowly)
    begun.wait()
    served.stop()
    assert served.service.status.phase == "loading"
    go_on.set()


def test_all_pages_are_free_or_cached_in_the_end(server: Served) -> None:
    server.wait_idle()
    check_pages(server.llm.engine)
