"""Who may ask, and what is known of a request: hosts, origins, ids, the log, headers, the liveness probe."""

import logging
import re
from collections.abc import Iterator

import httpx
import pytest

from peregrine.log import logger
from serve.conftest import Lent, Served, start, wait_ready

ORIGIN = "https://app.example.org"
ASKED = {"prompt": "Once upon", "max_tokens": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def guarded(server: Served) -> Iterator[Served]:
    """A server with a key, an origin and a host of a proxy, which logs prompts."""
    settings = {
        "api_keys": ("key",),
        "allow_origins": (ORIGIN,),
        "allow_hosts": ("proxy.example",),
        "log_prompts": True,
    }
    served = start(lambda: Lent(server.llm), **settings)  # type: ignore[arg-type, return-value]
    wait_ready(served)
    yield served
    served.stop()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log with a line per request. A line is written after its response, so look at it after one more request."""
    level = logger.level
    logger.setLevel(logging.INFO)
    yield caplog
    logger.setLevel(level)


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:1", "127.0.0.9", "[::1]", "[::1]:8000"])
def test_names_of_this_machine_are_answered(http: httpx.Client, host: str) -> None:
    assert http.get("/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example:8000", "10.0.0.1", "127.0.0.1.evil", "[::2]:80"]
)
def test_other_names_are_refused_on_a_loopback_address(http: httpx.Client, host: str) -> None:
    """A page may have pointed its own name here (DNS rebinding), and would be of the same origin."""
    for path in ("/health", "/", "/v1/models"):
        refused = http.get(path, headers={"Host": host})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "wrong_host")
        assert host in refused.json()["error"]["message"]


def test_a_proxys_name_may_be_allowed(guarded: Served) -> None:
    with guarded.http() as http:
        assert http.get("/health", headers={"Host": "Proxy.example:443"}).status_code == 200
        assert http.get("/health", headers={"Host": "evil.example"}).status_code == 403


def test_pages_of_an_allowed_origin_may_ask(guarded: Served, http: httpx.Client) -> None:
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    with guarded.http() as asked:
        before = asked.options("/v1/completions", headers={"Origin": ORIGIN, **wanted})  # needs no key
        assert before.status_code == 200
        assert before.headers["access-control-allow-origin"] == ORIGIN
        assert "authorization" in before.headers["access-control-allow-headers"]
        for key, status in (("key", 200), ("wrong", 401)):  # a refusal can be read, too
            headers = {"Origin": ORIGIN, "Authorization": f"Bearer {key}"}
            answer = asked.post("/v1/completions", json=ASKED, headers=headers)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == ORIGIN
            assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
        other = asked.options("/v1/completions", headers={"Origin": "https://other.example", **wanted})
        assert "access-control-allow-origin" not in other.headers
    assert "access-control-allow-origin" not in http.get("/health", headers={"Origin": ORIGIN}).headers


@pytest.mark.parametrize(("sent", "kept"), [("my-id/1", True), ("x" * 129, False), ("a b", False), (None, False)])
def test_a_request_keeps_the_id_its_client_gave_it(http: httpx.Client, sent: str | None, kept: bool) -> None:
    headers = {} if sent is None else {"X-Request-Id": sent}
    for answer in (
        http.get("/version", headers=headers),
        http.post("/v1/completions", json=ASKED, headers=headers),
        http.post("/v1/completions", json={**ASKED, "stream": True}, headers=headers),
        http.get("/nothing", headers=headers),
    ):
        assert (answer.headers["x-request-id"] == sent) is kept
        assert kept or re.fullmatch("[0-9a-f]{24}", answer.headers["x-request-id"])


def test_the_log_has_a_line_for_each_request(server: Served, http: httpx.Client, log: pytest.LogCaptureFixture) -> None:
    http.post("/v1/completions", json={**ASKED, "n": 2}, headers={"X-Request-Id": "mine"})
    http.post("/v1/completions", json={**ASKED, "colour": "red"}, headers={"X-Request-Id": "wrong"})
    for path in ("/health", "/livez", "/metrics", "/"):
        http.get(path)
    http.get("/version")  # the one before has been logged by now
    size = len(server.llm.encode("Once upon"))  # the prompt counts once, as in a response's usage
    pattern = rf"POST /v1/completions 200 id=mine ms=\d+ model=merlin prompt_tokens={size} tokens=6 finish=length"
    lines = log.messages
    found = [match for line in lines if (match := re.fullmatch(pattern, line))]
    assert len(found) == 1
    assert [line for line in lines if re.fullmatch(r"POST /v1/completions 400 id=wrong ms=\d+", line)]
    assert not [line for line in lines if "GET" in line and "version" not in line]
    assert "Once upon" not in "".join(lines)


def test_prompts_are_logged_if_that_is_asked_for(guarded: Served, log: pytest.LogCaptureFixture) -> None:
    headers = {"Authorization": "Bearer key"}
    with guarded.http() as http:
        http.post("/v1/completions", json={**ASKED, "prompt": "Once\nupon \x1b[31m"}, headers=headers)
        http.get("/version")
    assert [line for line in log.messages if r"text='Once\nupon \x1b[31m'" in line]


def test_a_client_that_left_is_in_the_log(server: Served, log: pytest.LogCaptureFixture) -> None:
    body = {**ASKED, "max_tokens": 2000}
    with server.http() as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json=body, timeout=0.3, headers={"X-Request-Id": "hasty"})
    server.wait_idle()
    with server.http() as http:
        http.get("/version")
    [line] = [line for line in log.messages if "id=hasty" in line]
    assert "/v1/completions 499 " in line
    prompt, tokens = map(int, re.search(r" prompt_tokens=(\d+) tokens=(\d+) finish=abort", line).groups())  # type: ignore[union-attr]
    assert prompt == len(server.llm.encode(ASKED["prompt"]))
    assert 0 < tokens < 2000  # those that were generated until then


def test_a_scored_prompt_has_no_tokens_of_its_own_in_the_log(http: httpx.Client, log: pytest.LogCaptureFixture) -> None:
    http.post("/v1/completions", json={**ASKED, "max_tokens": 0, "echo": True}, headers={"X-Request-Id": "scored"})
    http.get("/version")
    assert [line for line in log.messages if "id=scored" in line and " tokens=0 finish=length" in line]


def test_headers_for_browsers(http: httpx.Client) -> None:
    for path in ("/", "/docs", "/static/index.html", "/static/playground.js"):
        headers = http.get(path).headers
        for said in ("default-src 'self'", "frame-ancestors 'none'", "form-action 'none'", "base-uri 'none'"):
            assert said in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    assert http.get("/health").headers["x-content-type-options"] == "nosniff"


def test_a_body_that_any_page_could_send_is_refused(http: httpx.Client) -> None:
    """Browsers ask before they send JSON to another site; plain text they send at once."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        refused = http.post("/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": kind})
        assert refused.status_code == 400
        assert "application/json" in refused.json()["error"]["message"]
    as_json = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert http.post("/v1/completions", content=b'{"prompt": "x"}', headers=as_json).status_code == 200


def test_livez_is_red_only_after_a_fault(http: httpx.Client, server: Served) -> None:
    assert http.get("/livez").json() == {"status": "ready"}
    server.service.draining = True
    try:
        assert (http.get("/health").status_code, http.get("/livez").status_code) == (503, 200)
    finally:
        server.service.draining = False
