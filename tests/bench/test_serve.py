"""`peregrine bench serve`: exact arithmetic, and exact times from a scripted server.

tests/serve/test_bench.py runs it against the real server.
"""

import asyncio
import json
import math
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from bench.fake_server import DONE, Clock, FakeServer, Script, chat_chunk, serving, text_chunk, usage_chunk
from peregrine.bench import prompts as prompt_sets
from peregrine.bench import serve
from peregrine.bench.serve_client import Client
from peregrine.bench.serve_counters import Counters, read_counters
from peregrine.bench.serve_metrics import Exchange, Limits, figures, summarise
from peregrine.bench.serve_table import show
from peregrine.cli.bench_result import command_line
from peregrine.errors import ConfigError

CHAT = [{"role": "user", "content": "Hello"}]
FLUSHES = {"/flush_cache": [(200, "{}")]}
# The first token after 0.5 s, two more chunks 0.25 s and 0.125 s later; 5 tokens in 3 chunks.
STORY = Script(
    [
        (0.25, chat_chunk("", role="assistant")),
        (0.25, chat_chunk("Once")),
        (0.25, chat_chunk(" upon a")),
        (0.125, chat_chunk(" time", reason="stop")),
        (4.0, usage_chunk(7, 5)),
        (0.0, DONE),
    ]
)


def exchange(sent: float, *times: float, tokens: int, from_usage: bool = True) -> Exchange:
    return Exchange(sent, times, tokens, 3, from_usage, connect_s=0.0)


# Arithmetic.


def test_times_of_one_request_follow_their_definitions() -> None:
    one = exchange(10.0, 10.5, 11.0, 12.5, tokens=6)
    assert (one.ttft_s, one.latency_s, one.tpot_s, one.gaps_s) == (0.5, 2.5, 0.4, [0.5, 1.5])
    assert exchange(1.0, 1.5, tokens=1).tpot_s is None


def test_percentiles_lie_between_neighbours() -> None:
    # Of 0, 1, ..., 10 seconds: p90 is the tenth value, p99 nine tenths of the way from the tenth to the last.
    assert figures([float(n) for n in range(11)]) == {
        "mean": 5000.0,
        "p50": 5000.0,
        "p90": 9000.0,
        "p99": pytest.approx(9900.0),
    }
    assert figures([]) is None


def test_rates_are_over_the_whole_case_and_failures_are_counted_separately() -> None:
    done = [exchange(0.0, 0.1, 0.5, tokens=5), exchange(0.0, 0.3, 1.1, tokens=9), exchange(0.0, 0.2, tokens=1)]
    lost = [Exchange.failed(0.0, "HTTP 429: full")] * 2 + [Exchange.failed(0.0, "TimeoutError")]
    told = summarise([*done, *lost], 4.0, Limits())
    assert (told["completed"], told["failed"]) == (3, 3)
    assert told["errors"] == {"HTTP 429: full": 2, "TimeoutError": 1}
    assert told["output_tokens"] == 15
    assert told["output_tokens_per_s"] == 3.75
    assert told["requests_per_s"] == 0.75
    assert told["ttft_ms"]["p50"] == pytest.approx(200.0)  # type: ignore[index]
    assert told["tpot_ms"]["mean"] == pytest.approx(100.0)  # type: ignore[index] # the single token has none
    assert told["itl_ms"]["p50"] == pytest.approx(600.0)  # type: ignore[index]
    assert told["good_requests_per_s"] is None


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        (Limits(ttft_ms=250), 2),
        (Limits(tpot_ms=90), 1),  # only the single token, which has no TPOT
        (Limits(ttft_ms=150, tpot_ms=150), 1),
        (Limits(ttft_ms=1000, tpot_ms=1000), 3),
    ],
)
def test_goodput_counts_requests_that_keep_every_limit(limits: Limits, good: int) -> None:
    done = [exchange(0.0, 0.1, 0.5, tokens=5), exchange(0.0, 0.3, 1.1, tokens=9), exchange(0.0, 0.2, tokens=1)]
    told = summarise([*done, Exchange.failed(0.0, "no")], 2.0, limits)
    assert told["good_requests_per_s"] == good / 2.0
    assert told["good_share"] == good / 4  # a failed request is not good


def test_tokens_counted_by_chunks_are_marked() -> None:
    mixed = [exchange(0.0, 1.0, 2.0, tokens=2, from_usage=False), exchange(0.0, 1.0, tokens=4)]
    assert summarise(mixed, 1.0, Limits())["tokens_from"] == "chunks"
    assert summarise(mixed[1:], 1.0, Limits())["tokens_from"] == "usage"


def test_arrivals_are_poisson_seeded_and_scaled() -> None:
    times = serve.arrivals(rate=4.0, count=2000, seed=3)
    assert times == serve.arrivals(4.0, 2000, 3) != serve.arrivals(4.0, 2000, 4)
    assert times[-1] == pytest.approx(500.0)
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    assert min(gaps) > 0
    # Of exponential gaps 1 - 1/e are below the mean.
    assert sum(gap < 0.25 for gap in gaps) / 2000 == pytest.approx(0.632, abs=0.03)


# Counters.

OURS = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{model_name="m"} 10.0
vllm:spec_decode_num_draft_tokens_total{model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_total{model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="1"} 4.0
vllm:spec_decode_num_drafts_created{model_name="m"} 1.7e+09
"""


def test_counters_are_read_with_and_without_the_suffix() -> None:
    expected = Counters(10, 30, 12, (8, 4))
    assert read_counters(OURS) == expected
    assert read_counters(OURS.replace("_total", "")) == expected
    assert read_counters(OURS + OURS.replace("_total", "")) == expected  # the counters appear under both names


def test_counters_of_several_engines_are_added() -> None:
    second = OURS.replace('model_name="m"', 'model_name="m",engine="1"')
    assert read_counters(OURS + second) == Counters(20, 60, 24, (16, 8))


def test_no_counters_no_acceptance() -> None:
    assert read_counters("peregrine_rounds_total 3\n") is None
    assert Counters(10, 30, 12, (8, 4)).since(Counters(10, 30, 12, (8, 4))) is None


def test_acceptance_is_the_difference_of_counters() -> None:
    told = Counters(30, 90, 42, (28, 10, 4)).since(Counters(10, 30, 12, (8, 4)))
    assert told == {
        "rounds": 20,
        "drafted": 60,
        "correct": 30,
        "accept_length": 2.5,
        "accept_rate": 0.5,
        "by_position": [1.0, 0.3, 0.2],
    }


# The client, against a script.


def play(server: FakeServer, act: Callable[[Client], Awaitable[Any]], key: str | None = None) -> Any:
    """What `act` returns with a client of this server; its sleeps advance the server's clock."""

    async def run() -> Any:
        async def sleep(seconds: float) -> None:
            server.clock.now += seconds

        async with serving(server), Client(server.url, key, clock=server.clock, sleep=sleep) as client:
            return await act(client)

    return asyncio.run(run())


def stream(script: Script) -> Exchange:
    server = FakeServer(Clock(), [script])
    result: Exchange = play(server, lambda client: client.stream("/v1/chat/completions", {"messages": CHAT}))
    return result


@pytest.mark.parametrize("chunked", [True, False])
def test_chunks_are_timed_as_they_come(chunked: bool) -> None:
    seen = stream(Script(STORY.events, chunked=chunked))
    assert seen.error is None
    # The chunk that only names the role is no token, and the one with the usage ends nothing.
    assert (seen.ttft_s, seen.gaps_s, seen.latency_s) == (0.5, [0.25, 0.125], 0.875)
    assert (seen.output_tokens, seen.prompt_tokens, seen.from_usage) == (5, 7, True)
    assert seen.tpot_s == 0.375 / 4


def test_without_usage_chunks_are_counted() -> None:
    seen = stream(Script([(1.0, text_chunk("a")), (1.0, text_chunk("", "length")), (0.0, DONE)]))
    assert (seen.output_tokens, seen.from_usage, seen.latency_s) == (2, False, 2.0)


def test_comments_and_split_events_are_read() -> None:
    halves = b": ping\n\ndata: " + json.dumps(text_chunk("a")).encode()
    events = [(0.5, halves[:20]), (0.0, halves[20:] + b"\r\n\r\n"), (0.5, text_chunk("b", "stop")), (0.0, DONE)]
    assert stream(Script(events)).output_tokens == 2


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (Script([(0.0, b'{"error": {"message": "queue full"}}')], status=429), "HTTP 429: queue full"),
        (Script([(0.0, b"<html>")], status=502), "HTTP 502: <html>"),
        (Script([(0.0, text_chunk("a")), (0.0, {"error": {"message": "went wrong"}})]), "HTTP 200: went wrong"),
        (Script([(0.0, text_chunk("a"))]), "the stream broke off"),
        (Script([(0.0, usage_chunk(1, 0)), (0.0, DONE)]), "the stream held no token"),
        (Script([(0.0, b"data: {nonsense\n\n")]), "JSONDecodeError: Expecting property name"),
    ],
)
def test_a_failure_is_an_error_of_its_request(script: Script, error: str) -> None:
    assert (stream(script).error or "").startswith(error)


def test_no_server_is_an_error_of_the_request() -> None:
    async def run() -> Exchange:
        async with Client("http://127.0.0.1:9") as client:
            return await client.stream("/v1/completions", {})

    assert "ClientConnectorError: Cannot connect to host 127.0.0.1:9" in (asyncio.run(run()).error or "")


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://"])
def test_a_malformed_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"url=.*http://HOST:PORT"):
        Client(url)


def test_the_url_may_end_in_v1_and_the_key_is_sent() -> None:
    server = FakeServer(Clock(), [STORY], {"/v1/models": [(200, '{"data": [{"id": "m"}]}')]})

    async def act(client: Client) -> str:
        async with Client(client.url + "/v1/", "secret") as other:
            return await serve.first_model(other)

    assert play(server, act) == "m"
    [(path, headers, _)] = server.heard
    assert (path, headers["authorization"]) == ("/v1/models", "Bearer secret")


# Flushing.


@pytest.mark.parametrize(
    ("answers", "tries"),
    [
        ([(200, "{}")], 1),
        ([(409, "{}"), (200, "{}")], 2),
        ([(0, ""), (0, ""), (200, "{}")], 3),  # connections that break are tried again, too
    ],
)
def test_a_flush_is_tried_three_times_two_seconds_apart(answers: list[tuple[int, str]], tries: int) -> None:
    server = FakeServer(Clock(), [STORY], {"/flush_cache": list(answers)})
    assert play(server, serve.flush) is True
    assert server.paths() == ["/flush_cache"] * tries
    assert server.clock.now == 2.0 * (tries - 1)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([(409, '{"error": {"message": "3 run"}}')], "HTTP 409: 3 run"),
        ([(500, ""), (500, ""), (0, "")], "ServerDisconnectedError: Server disconnected"),
        ([(0, ""), (0, ""), (401, '{"error": "no key"}')], "HTTP 401: no key"),
    ],
)
def test_the_last_failed_flush_is_raised(answers: list[tuple[int, str]], said: str) -> None:
    server = FakeServer(Clock(), [STORY], {"/flush_cache": list(answers)})
    with pytest.raises(ConfigError, match=f"failed 3 times, the last time with .*{said}.*--no-flush"):
        play(server, serve.flush)
    assert server.paths() == ["/flush_cache"] * 3


def test_a_server_with_another_route_is_flushed_there() -> None:
    server = FakeServer(Clock(), [STORY], {"/reset_prefix_cache": [(200, "")]})
    assert play(server, serve.flush) is True
    assert server.paths() == ["/flush_cache", "/reset_prefix_cache"]


# Whole runs.


def measured(server: FakeServer, plan: serve.Plan) -> dict[str, Any]:
    result: dict[str, Any] = play(server, lambda client: serve.measure(plan, client))
    return result


def test_a_run_flushes_before_each_case_and_reads_counters_around_it() -> None:
    after = OURS.replace("10.0", "14.0").replace("12.0", "18.0")
    routes = {**FLUSHES, "/metrics": [(200, OURS), (200, after)]}
    server = FakeServer(Clock(), [STORY], routes)
    plan = serve.Plan(cases=(serve.Case(1), serve.Case(1)), prompts=[CHAT, "Once"], model="m", requests=3, seed=5)
    result = measured(server, plan)
    paths = server.paths()
    chat, text = "/v1/chat/completions", "/v1/completions"
    case = ["/flush_cache", "/metrics", chat, text, chat, "/metrics"]
    assert paths == [chat, *case, *case, "/server_info"]
    bodies = [body for _, _, body in server.heard if body]
    assert [body["seed"] for body in bodies] == [5, 5, 6, 7, 5, 6, 7]
    assert bodies[0] == {
        "messages": CHAT,
        "model": "m",
        "max_tokens": 128,
        "temperature": 0.0,
        "seed": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first = result["cases"][0]
    assert first["ttft_ms"] == {"mean": 500.0, "p50": 500.0, "p90": 500.0, "p99": 500.0}
    assert first["itl_ms"]["mean"] == pytest.approx(187.5)
    assert first["e2e_ms"]["p99"] == 875.0
    assert first["seconds"] == pytest.approx(3 * 4.875)  # the usage chunk came four seconds after the last token
    assert first["output_tokens_per_s"] == pytest.approx(15 / (3 * 4.875))
    assert first["acceptance"]["accept_length"] == 2.5
    assert (result["flushed"], result["server"]) == (True, None)


def test_a_server_that_cannot_flush_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(serve.logger, "warning", lambda text, *parts: warnings.append(text % parts))
    server = FakeServer(Clock(), [STORY])
    plan = serve.Plan(cases=(serve.Case(1),) * 3, prompts=[CHAT], model="m", requests=1)
    result = measured(server, plan)
    [said] = warnings
    assert said.startswith("the server cannot empty its prefix cache (no /flush_cache or /reset_prefix_cache)")
    assert server.paths().count("/flush_cache") == 1
    assert result["flushed"] is False
    assert result["cases"][0]["acceptance"] is None


def test_no_flush_leaves_the_server_alone() -> None:
    server = FakeServer(Clock(), [STORY], FLUSHES)
    measured(server, serve.Plan(cases=(serve.Case(1),), prompts=[CHAT], model="m", requests=1, flush=False))
    assert "/flush_cache" not in server.paths()


def test_failed_requests_are_counted_and_shown() -> None:
    full = Script([(0.0, b'{"error": {"message": "queue full"}}')], status=429)
    server = FakeServer(Clock(), [STORY, STORY, full, STORY, full, STORY], FLUSHES)
    plan = serve.Plan(cases=(serve.Case(1),), prompts=[CHAT], model="m", requests=4, limits=Limits(ttft_ms=600))
    result = measured(server, plan)
    [case] = result["cases"]
    assert (case["completed"], case["failed"], case["errors"]) == (2, 2, {"HTTP 429: queue full": 2})
    assert case["good_share"] == 0.5
    table = show(result)
    assert "2 requests failed:\n    2 x HTTP 429: queue full" in table
    assert "50% of all (TTFT <= 600 ms)" in table
    assert "prompts repeat within a case" in table


def test_a_case_without_successes_has_no_latencies() -> None:
    full = Script([(1.0, b"{}")], status=500)
    server = FakeServer(Clock(), [STORY, full, full, full], FLUSHES)
    result = measured(server, serve.Plan(cases=(serve.Case(1),), prompts=[CHAT], model="m", requests=2))
    assert result["cases"][0]["ttft_ms"] is None
    assert "TTFT      none" in show(result)


def test_a_first_request_that_fails_ends_the_run() -> None:
    server = FakeServer(Clock(), [Script([(0.0, b'{"error": {"message": "no such model"}}')], status=404)])
    with pytest.raises(ConfigError, match=r"the first request failed \(HTTP 404: no such model"):
        measured(server, serve.Plan(cases=(serve.Case(1),), prompts=[CHAT], model="m"))


def test_a_server_without_models_is_refused() -> None:
    server = FakeServer(Clock(), [STORY], {"/v1/models": [(200, '{"data": []}')]})
    with pytest.raises(ConfigError, match=r"names no model .*--model"):
        measured(server, serve.Plan(cases=(serve.Case(1),), prompts=[CHAT]))
    server = FakeServer(Clock(), [STORY], {"/v1/models": [(401, '{"error": {"message": "no key"}}')]})
    with pytest.raises(ConfigError, match=r"HTTP 401: no key.*; pass --api-key"):
        measured(server, serve.Plan(cases=(serve.Case(1),), prompts=[CHAT]))


def test_an_address_without_a_server_is_refused(peregrine: Callable[..., tuple[int, str, str]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    code, _, errors = peregrine("bench", "serve", "--url", f"http://127.0.0.1:{port}", "--requests", "1")
    assert (code, "no server answers" in errors, "check the address" in errors) == (2, True, True)


# Loops, without a server.


def test_a_closed_loop_keeps_its_concurrency() -> None:
    open_now, most = 0, 0

    async def ask(order: serve.Order) -> Exchange:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        for _ in range(1 + order[0] % 3):
            await asyncio.sleep(0)
        open_now -= 1
        return exchange(float(order[0]), 1.0, tokens=1)

    orders: list[serve.Order] = [(index, "x") for index in range(20)]
    done = asyncio.run(serve.closed_loop(ask, orders, 4))
    assert most == 4
    assert sorted(each.sent for each in done) == [float(index) for index in range(20)]


def test_an_open_loop_sends_at_the_given_times_regardless_of_load() -> None:
    clock = Clock()
    sent: list[float] = []
    release = asyncio.Event()

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(0)  # let sent requests start before time advances
        clock.now += seconds

    async def ask(order: serve.Order) -> Exchange:
        sent.append(clock.now)
        if len(sent) == 3:
            release.set()
        await release.wait()  # no request is answered before all were sent
        return exchange(0.0, 1.0, tokens=1)

    client = Client("http://x", clock=clock, sleep=sleep)
    orders: list[serve.Order] = [(index, "x") for index in range(3)]
    asyncio.run(serve.open_loop(ask, orders, [0.5, 0.75, 2.0], client))
    assert [round(time, 9) for time in sent] == [0.5, 0.75, 2.0]


# Prompts.


@pytest.mark.parametrize("name", prompt_sets.SETS)
def test_built_in_prompts_are_chats_that_differ(name: str) -> None:
    found = prompt_sets.load_prompts(None, name)
    said = [prompt_sets.last_words(prompt) for prompt in found]
    assert len(set(said)) == len(said) >= 10
    if name == "long":
        assert min(map(len, said)) > 5000
        assert len({text[:40] for text in said}) == len(said)  # no prefix is shared


def test_a_file_holds_text_and_chats(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"prompt": "Once"}) + "\n\n" + json.dumps({"messages": CHAT}) + "\n")
    assert prompt_sets.load_prompts(file, "ignored") == ["Once", CHAT]
    assert prompt_sets.repeated(["a", "b"], 5) == ["a", "b", "a", "b", "a"]


@pytest.mark.parametrize(
    "line", ["{", '{"prompt": ""}', '{"messages": [{"role": "user"}]}', '"text"', '{"messages": []}']
)
def test_a_line_that_is_not_a_prompt_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"p\.jsonl:2: .*a line is"):
        prompt_sets.load_prompts(file, "")


@pytest.mark.parametrize("rate", [-1.0, 0.0, math.inf, math.nan])
def test_impossible_loads_are_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match=f"rate={rate:g}: .*--concurrency"):
        serve.Case(rate=rate)


def test_more_at_a_time_than_there_are_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"concurrency=9: only 8 requests .*--requests 9"):
        serve.Plan(cases=(serve.Case(1), serve.Case(9)), prompts=["x"], requests=8)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://[::1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not the address of a server"):
        Client(url)


@pytest.mark.parametrize("words", [["--api-key", "secret"], ["--api-key=secret"]])
def test_a_recorded_command_holds_no_key(words: list[str]) -> None:
    written = command_line(["/usr/bin/peregrine", "bench", "serve", *words, "--url", "http://x"])
    assert "secret" not in written
    assert written.startswith("peregrine bench serve --api-key")
    assert written.endswith("--url http://x")
