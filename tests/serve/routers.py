"""Real routers in front of two servers, unchanged: sglang-router and vllm-router, by `make test-routers`.

What they ask of a server is tested without them in `test_bodies.py`, `test_service.py` and `test_metrics.py`.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from peregrine import LLM, SamplingParams
from serve.processes import process

POLICIES = {
    "sglang_router": ("cache_aware", "power_of_two", "round_robin"),
    "vllm_router": ("cache_aware", "power_of_two", "consistent_hash"),
}
CASES = [(name, policy) for name, policies in POLICIES.items() for policy in policies]
MODEL = "merlin-1"
STORY = "Once upon a time there was a girl who lived near a forest. One day she found a small "


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def wait_for(url: str, running: "subprocess.Popen[bytes]", log: Path) -> None:
    for _ in range(600):
        assert running.poll() is None, log.read_text()
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(log.read_text())


@contextmanager
def router(name: str, policy: str, servers: list[str], log: Path) -> Iterator[str]:
    """The URL of a router process that knows both servers."""
    port, metrics_port = free_port(), free_port()
    command = [sys.executable, "-m", f"{name}.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(metrics_port), "--policy", policy, "--worker-startup-check-interval", "1"]
    command += ["--retry-max-retries", "3", "--worker-urls", *servers]
    with log.open("wb") as written:
        running = subprocess.Popen(command, stdout=written, stderr=written, env={**os.environ, "NO_COLOR": "1"})
    try:
        wait_for(f"http://127.0.0.1:{port}/readiness", running, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        running.kill()
        running.wait()


@pytest.fixture(scope="module")
def servers() -> Iterator[list[httpx.Client]]:
    """Two servers in processes of their own, with a name that is not the folder's."""
    with ExitStack() as stack:
        yield [stack.enter_context(process("--name", MODEL))[1] for _ in range(2)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("merlin") as made:
        yield made


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_both_servers_answer_through_the_router(
    name: str, policy: str, servers: list[httpx.Client], llm: LLM, tmp_path: Path
) -> None:
    urls = [str(server.base_url) for server in servers]
    before = [answered(server) for server in servers]
    with router(name, policy, urls, tmp_path / "log") as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == [MODEL]
        check_texts(client, llm)
        check_chat(client, llm)
        check_refusal(client, url)
        if name == "sglang_router" and policy == "power_of_two":
            loads = httpx.get(f"{url}/get_loads").json()
            assert "-1" not in json.dumps(loads), "the router could not read a server's load"
    grown = [answered(server) - count for server, count in zip(servers, before, strict=True)]
    assert sum(grown) == 24 + 2
    assert min(grown) > 0 or policy == "cache_aware", "one server had all requests"


def check_texts(client: openai.OpenAI, llm: LLM) -> None:
    """24 completions at once have the text of their seed, whichever server wrote it."""

    def ask(seed: int) -> str:
        prompt, sent = f"{STORY}{seed}", {"X-Session-ID": str(seed)}
        return (
            client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=12, seed=seed, user=str(seed), extra_headers=sent
            )
            .choices[0]
            .text
        )

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, range(24)))
    for seed, text in enumerate(texts):
        params = SamplingParams(max_tokens=12, seed=seed)
        assert text == llm.generate(f"{STORY}{seed}", params, progress=False)[0].text


def check_chat(client: openai.OpenAI, llm: LLM) -> None:
    """A chat, whole and as a stream, has the text of its seed."""
    chat = [{"role": "user", "content": "Tell me a story."}]
    asked = {"model": MODEL, "messages": chat, "max_tokens": 16, "seed": 5}
    expected = llm.generate([llm.encode_chat(chat)], SamplingParams(max_tokens=16, seed=5), progress=False)[0].text
    assert client.chat.completions.create(**asked).choices[0].message.content == expected  # type: ignore[call-overload]
    chunks = list(client.chat.completions.create(**asked, stream=True))  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert len(chunks) > 2, "the router collected the stream"


def check_refusal(client: openai.OpenAI, url: str) -> None:
    """What a server refuses reaches the client with its status."""
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=MODEL, prompt="x", max_tokens=100_000)


def answered(server: httpx.Client) -> int:
    """Completions and chats that a server has answered with 200."""
    lines = server.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("peregrine_http_responses_total") and 'status="200"' in line]
    return int(sum(float(line.split()[-1]) for line in found if "completions" in line))


@pytest.mark.parametrize("name", POLICIES)
def test_a_server_that_dies_is_left_out(name: str, servers: list[httpx.Client], tmp_path: Path) -> None:
    """With one server gone, requests go on: the router retries those it sent there."""
    with process("--name", MODEL) as (doomed, third):
        urls = [str(servers[0].base_url), str(third.base_url)]
        with router(name, "round_robin", urls, tmp_path / "log") as url:
            body = {"model": MODEL, "prompt": STORY, "max_tokens": 12, "seed": 3}

            def ask(number: int) -> tuple[int, str]:
                if number == 12:
                    doomed.kill()
                answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
                return answer.status_code, answer.text

            with ThreadPoolExecutor(4) as pool:
                answers = list(pool.map(ask, range(40)))
            good = [json.loads(text)["choices"][0]["text"] for status, text in answers if status == 200]
            assert len(set(good)) == 1
            assert len(good) >= 36, answers  # at most those in flight to the dead server failed
            assert all(status in (200, 500, 502, 503) for status, _ in answers)
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
