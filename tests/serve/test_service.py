"""Routes other than generation: tokenizing, health, info, cache, keys, limits, and transport errors."""

import asyncio
import json
import threading
import time

import httpx
import pytest

from peregrine import LLM, SamplingParams, __version__
from peregrine.engine.output import Delta
from peregrine.serve import job
from peregrine.serve.gateway import Reply
from serve.conftest import Lent, Served, start, wait_ready

ENDLESS = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}


def test_tokenize_and_back(server: Served, http: httpx.Client) -> None:
    told = http.post("/tokenize", json={"prompt": "Once upon é"}).json()
    assert told["tokens"] == server.llm.encode("Once upon é")
    assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 2048)
    assert http.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": "Once upon é"}
    messages = [{"role": "user", "content": "Hello"}]
    chat = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert chat == server.llm.encode_chat(messages)
    plain, special = (
        http.post("/detokenize", json={"tokens": chat, "skip_special_tokens": skip}).json()["prompt"]
        for skip in (True, False)
    )
    assert "<|user|>" in special
    assert "<|user|>" not in plain
    refused = http.post("/detokenize", json={"tokens": [9999]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")


def test_health_version_and_the_page(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ready"}
    assert http.get("/version").json() == {"version": __version__}
    assert "Peregrine" in http.get("/").text
    assert http.get("/static/index.html").text == http.get("/").text


def test_server_info(server: Served, http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "Once upon a time", "max_tokens": 30, "temperature": 0})
    info = http.get("/server_info").json()
    assert {d["field"]: d["because"] for d in info["decisions"]} == {d.field: d.because for d in server.llm.decisions}
    assert info["limits"]["max_model_len"] == 2048
    assert info["acceptance"]["accept_length"] > 1
    assert info["internal_states"][0]["avg_spec_accept_length"] == info["acceptance"]["accept_length"]


def test_routers_learn_the_model_and_the_load(server: Served, http: httpx.Client) -> None:
    """As sglang-router reads them: its list of models and its choice by load come from these fields."""
    for path in ("/server_info", "/get_server_info", "/model_info", "/get_model_info"):
        told = http.get(path).json()
        assert (told["model_path"], told["served_model_name"]) == ("merlin", "merlin")
    server.wait_idle()
    idle = {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}
    assert http.get("/get_load").json() == [idle]
    with http.stream("POST", "/v1/completions", json=ENDLESS | {"prompt": [5] * 40, "n": 2}) as stream:
        lines = stream.iter_lines()
        next(lines)
        load = http.get("/get_load").json()[0]
    assert load["num_reqs"] == 2
    assert load["num_tokens"] > 80


def test_cache_is_dropped_only_when_nothing_runs(server: Served, http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": list(range(200, 264)), "max_tokens": 1})
    server.wait_idle()
    assert server.llm.engine.ledger.tree.num_cached > 0
    with http.stream("POST", "/v1/completions", json=ENDLESS) as stream:
        lines = stream.iter_lines()  # keep a reference: dropping it would close the connection
        next(lines)
        busy = http.post("/flush_cache")
        assert busy.status_code == 409
        assert "1 generations are running or waiting" in busy.json()["error"]["message"]
        assert http.post("/flush_cache?timeout=0.05").status_code == 409
    freed = http.post("/flush_cache?timeout=30").json()["pages_freed"]
    assert freed >= 4
    pool = server.llm.engine.ledger.pool
    assert pool.num_free == pool.num_pages - 1
    assert http.post("/flush_cache?timeout=-1").json()["error"]["param"] == "timeout"


def test_those_who_wait_for_an_idle_engine_hold_nobody(server: Served, http: httpx.Client) -> None:
    """Each of them took a thread, and there are few; now a hundred may wait, and bodies are still parsed."""
    with http.stream("POST", "/v1/completions", json=ENDLESS) as stream:
        lines = stream.iter_lines()
        next(lines)

        async def wait() -> list[int]:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as asked:
                flushes = [asyncio.create_task(asked.post("/flush_cache?timeout=600")) for _ in range(100)]
                await asyncio.sleep(0.5)
                large = {"prompt": "Once upon a time. " * 5000}
                assert (await asked.post("/tokenize", json=large)).status_code == 200
                stream.close()
                return [(await flush).status_code for flush in flushes]

        assert asyncio.run(wait()) == [200] * 100


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("GET", "/v1/models/falcon", 404, "model_not_found"),
    ],
)
def test_wrong_routes_have_the_same_shape(http: httpx.Client, method: str, path: str, status: int, code: str) -> None:
    response = http.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert status != 405 or "use POST" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1]",
        b'"prompt"',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "model": "\\ud800"}',
        b'{"prompt": "x", "\\ud800": 1}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "x", "temperature": 1e999}',
        b"[" * 50_000,
        b'{"prompt": ""}',
        b'{"prompt": []}',
        b'{"prompt": [[]]}',
        b'{"prompt": [-1], "echo": true}',
        b'{"prompt": [9223372036854775808], "echo": true}',
    ],
)
def test_no_body_causes_a_server_error(http: httpx.Client, content: bytes) -> None:
    response = http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code in (400, 404)
    assert response.json()["error"]["message"]


def test_keys(server: Served) -> None:
    served = start(lambda: Lent(server.llm), api_keys=("old", "new"))  # type: ignore[arg-type, return-value]
    try:
        wait_ready(served)
        with served.http() as http:
            for path in ("/health", "/version", "/metrics", "/", "/docs", "/openapi.json"):
                assert http.get(path).status_code == 200
            for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "old"}):
                refused = http.get("/v1/models", headers=headers)
                assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
                assert http.post("/flush_cache", headers=headers).status_code == 401
            for key in ("old", "new"):
                headers = {"Authorization": f"Bearer {key}"}
                assert http.get("/v1/models", headers=headers).status_code == 200
    finally:
        served.stop()


def test_limits() -> None:
    """Limits of body, prompt and queue: each is refused with its own status and leaves nothing behind."""
    settings = {"max_body_bytes": 2048, "max_prompt": 40, "max_queue": 1}
    served = start(lambda: LLM("merlin", num_pages=300, max_rows=1), **settings)
    try:
        wait_ready(served)
        with served.http() as http:
            large = json.dumps({"prompt": "x" * 3000}).encode()
            assert http.post("/v1/completions", content=large).status_code == 413
            assert http.post("/v1/completions", content=iter([large[:1500], large[1500:]])).status_code == 413
            long = http.post("/v1/completions", json={"prompt": list(range(1, 42))})
            assert long.status_code == 400
            assert "41 tokens" in long.json()["error"]["message"]
            assert "limit of 40" in long.json()["error"]["message"]
            many = http.post("/v1/completions", json={"prompt": "x", "n": 3})
            assert (many.status_code, many.json()["error"]["param"]) == (400, "n")
            several = http.post("/v1/completions", json={"prompt": ["x"] * 3}).json()["error"]
            assert "prompt='3 prompts'" in several["message"]
            with http.stream("POST", "/v1/completions", json=ENDLESS) as first:
                lines = first.iter_lines()
                next(lines)
                waiting = threading.Thread(
                    target=lambda: http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
                )
                waiting.start()
                while served.service.gateway.num_open < 2:
                    time.sleep(0.01)
                full = http.post("/v1/completions", json={"prompt": "x"})
                assert full.status_code == 429
                assert int(full.headers["retry-after"]) >= 1
                assert full.json()["error"]["type"] == "rate_limit_error"
            waiting.join()
            served.wait_idle()
            assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    finally:
        served.stop()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": ""}, "prompt='': has no tokens; pass a longer text"),
        ({"prompt": []}, "prompt=[]: is empty"),
        (
            {"prompt": "x", "max_tokens": 0},
            "max_tokens=0: generates nothing; use at least 1 (default: 16), or 0 with echo",
        ),
        ({"prompt": "x", "max_tokens": -1, "echo": True}, "max_tokens=-1: generates nothing"),
        ({"prompt": "x", "max_tokens": 2**31}, "max_tokens=2147483648: is above 2147483647; use 1 to 2147483647"),
        ({"prompt": "x", "return_speculation": True}, "return_speculation=True: the response may have"),
        ({"prompt": "x", "logprobs": 3}, "logprobs=3: the response may have"),
    ],
)
def test_a_refusal_names_what_was_sent(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, body: dict[str, object], said: str
) -> None:
    monkeypatch.setattr(job, "MAX_DETAILS", 1)
    refused = http.post("/v1/completions", json=body)
    assert refused.status_code == 400
    assert said in refused.json()["error"]["message"]


def test_the_default_length_gives_way_to_a_long_prompt(server: Served, http: httpx.Client) -> None:
    """Of several prompts each has what is left for it; a length that was asked for is refused instead."""
    max_len = server.llm.engine.limits.max_len
    body = {"prompt": [[5] * (max_len - 5), [5, 6]], "ignore_eos": True}
    assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 5 + 16
    refused = http.post("/v1/completions", json={**body, "max_tokens": 16})
    assert "use at most 5" in refused.json()["error"]["message"]


@pytest.mark.parametrize(("interval", "events"), [(1, [1] * 8), (3, [1, 3, 3, 1]), (99, [1, 7])])
def test_tokens_of_a_stream_wait_for_each_other_if_asked(server: Served, interval: int, events: list[int]) -> None:
    """The first token and the end do not wait."""
    output = server.llm.generate("A", SamplingParams(max_tokens=1))[0]

    async def counts() -> list[int]:
        reply, seen = Reply(1, True, interval), []
        fetching = asyncio.create_task(reply.fetch())
        for token in range(8):
            reply.put(0, Delta(0, token_ids=[token], output=output if token == 7 else None))
            for _ in range(5):  # the event loop's turns until a reader that was woken is done
                await asyncio.sleep(0)
            if fetching.done():
                seen.append(sum(len(delta.token_ids) for _, deltas in fetching.result() for delta in deltas))
                fetching = asyncio.create_task(reply.fetch())
        fetching.cancel()
        return seen

    assert asyncio.run(counts()) == events
