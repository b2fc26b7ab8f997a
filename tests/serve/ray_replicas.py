"""Two replicas of merlin on a local Ray: 200 mixed requests, and one replica killed in the middle. By `make test-ray`.

Every request is answered or fails with an error, none is lost, and every answer has the text of its seed. Replicas that
are replaced, added and removed under load lose nothing at all.
"""

import itertools
import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import ray
import yaml
from ray import serve
from ray.serve.schema import ServeDeploySchema

from peregrine import LLM, SamplingParams
from peregrine.errors import ConfigError
from peregrine.serve.replicas import Options, build
from serve.processes import SRC

STORY = "Once upon a time there was a girl who lived near a forest. One day she found a small "
REQUESTS, KILL_AT = 200, 60
LONG = 200  # tokens of a stream that is under way when its replica is to end
Answer = tuple[int, str, str]  # number, kind of ending, text


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """One URL with two replicas behind it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    options = Options(min_replicas=2, max_replicas=2, num_pages=400, drain_seconds=5)  # type: ignore[call-arg]
    serve.run(build(options), route_prefix="/")
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


def texts(num_tokens: int) -> list[str]:
    """What the seeds 0 to 9 say, from an engine of this process."""
    with LLM("merlin") as llm:
        params = [SamplingParams(max_tokens=num_tokens, seed=seed, ignore_eos=True) for seed in range(10)]
        return [output.text for output in llm.generate([STORY] * 10, params, progress=False)]


def ask(client: httpx.Client, number: int, num_tokens: int) -> Answer:
    """One of four kinds of requests, and how it ended: text, failed (with an error's status or event), or refused."""
    seed, kind = number % 10, number % 4
    body = {"prompt": STORY, "max_tokens": num_tokens, "seed": seed, "ignore_eos": True}
    body |= {"prompt_cache_key": f"session {number % 7}"}
    if kind == 3:
        refused = client.post("/v1/completions", json=body | {"temperature": -1})
        return number, "refused" if refused.status_code == 400 else "failed", refused.text
    if kind < 2:
        answer = client.post("/v1/completions", json=body)
        if answer.status_code != 200:
            return number, "failed", answer.json()["error"]["message"]
        return number, "text", answer.json()["choices"][0]["text"]
    text, ended = "", ""
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
        if stream.status_code != 200:
            return number, "failed", json.loads(stream.read())["error"]["message"]
        for line in stream.iter_lines():
            if line == "data: [DONE]":
                ended = "text"
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return number, "failed", event["error"]["message"]
                text += event["choices"][0]["text"] if event["choices"] else ""
    return number, ended or "lost", text


def pids(client: httpx.Client) -> set[int]:
    """The processes of the replicas that answer."""
    asked = (client.get("/server_info", headers={"X-Session-Id": str(key)}) for key in range(16))
    return {answer.json()["pid"] for answer in asked if answer.status_code == 200}


def test_no_request_is_lost_with_its_replica(url: str) -> None:
    expected = texts(16)
    with httpx.Client(base_url=url, timeout=120) as client:
        assert client.get("/health").json() == {"status": "ready"}
        before = pids(client)
        assert len(before) == 2
        doomed, killed = min(before), threading.Event()

        def ask_or_kill(number: int) -> Answer:
            if number == KILL_AT:
                os.kill(doomed, signal.SIGKILL)
                killed.set()
            return ask(client, number, 16)

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask_or_kill, range(REQUESTS)))
        assert killed.is_set()
        counts = Counter(kind for _, kind, _ in answers)
        assert sorted(number for number, _, _ in answers) == list(range(REQUESTS))
        assert counts["lost"] == 0
        assert counts["refused"] == REQUESTS // 4
        failed = [answer for answer in answers if answer[1] == "failed"]
        assert len(failed) <= 8, failed
        assert all(number % 4 == 2 for number, _, _ in failed), failed  # streams that had begun; others are asked again
        wrong = [(number, text) for number, kind, text in answers if kind == "text" and text != expected[number % 10]]
        assert not wrong, "a replica gave another text for a seed"
        for _ in range(120):  # Ray starts another one
            after = pids(client)
            if len(after) == 2 and doomed not in after:
                break
            time.sleep(1)
        assert len(after) == 2
        assert doomed not in after


def test_a_session_stays_with_its_replica_and_its_cache(url: str) -> None:
    with httpx.Client(base_url=url, timeout=120) as client:
        keys = [f"key {number}" for number in range(8)]
        homes = [
            {client.get("/server_info", headers={"X-Session-Id": k}).json()["pid"] for _ in range(4)} for k in keys
        ]
        assert all(len(home) == 1 for home in homes)
        assert len(set.union(*homes)) == 2
        chat = {"messages": [{"role": "user", "content": STORY * 4}], "max_tokens": 4, "seed": 1}
        usages = [client.post("/v1/chat/completions", json=chat).json()["usage"] for _ in range(3)]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        assert cached[0] == 0
        assert min(cached[1:]) > 0.8 * usages[0]["prompt_tokens"]


def test_what_is_about_one_replica_is_refused(url: str) -> None:
    with httpx.Client(base_url=url, timeout=60) as client:
        assert client.get("/metrics").status_code == 404
        assert client.post("/v1/completions", content=b"x" * (3 * 2**20)).status_code == 413
        assert "Peregrine" in client.get("/").text


class Load:
    """Clients that ask for one stream after the other, as many at a time as `clients` says."""

    def __init__(self, url: str, most: int) -> None:
        self.clients, self.answers, self._stopped = 0, list[Answer](), threading.Event()
        self._url, self._numbers = url, itertools.count()
        self._threads = [threading.Thread(target=self._ask, args=(place,)) for place in range(most)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, place: int) -> None:
        with httpx.Client(base_url=self._url, timeout=120) as client:
            while not self._stopped.wait(0.01):
                if place < self.clients:
                    self.answers.append(ask(client, 4 * next(self._numbers) + 2, LONG))


def wait_for_replicas(url: str, count: int) -> set[int]:
    """The processes of the replicas, once there are so many."""
    with httpx.Client(base_url=url, timeout=120) as client:
        for _ in range(240):
            if len(found := pids(client)) == count:
                return found
            time.sleep(1)
    raise AssertionError(f"there are {len(found)} replicas after four minutes, not {count}")


def test_replicas_are_replaced_added_and_removed_under_load_without_a_loss(url: str) -> None:
    expected, old = texts(LONG), wait_for_replicas(url, 2)
    scale = {"target_ongoing": 4, "scale_up_seconds": 2, "scale_down_seconds": 4, "num_pages": 401, "drain_seconds": 30}
    with Load(url, most=12) as load:
        load.clients = 4
        serve.run(build(Options.model_validate({"min_replicas": 1, "max_replicas": 2} | scale)), route_prefix="/")
        first = wait_for_replicas(url, 1)
        assert not first & old, "a replica with the old options still answers"
        load.clients = 12
        assert len(wait_for_replicas(url, 2) - first) == 1
        load.clients = 4
        wait_for_replicas(url, 1)
    assert len(load.answers) > 20
    assert [answer for answer in load.answers if answer[1:] != ("text", expected[answer[0] % 10])] == []


def test_the_recipe_for_a_cluster_is_one() -> None:
    recipe = yaml.safe_load((SRC.parent / "deploy" / "ray" / "serve.yaml").read_text())
    [application] = ServeDeploySchema.model_validate(recipe).applications
    assert application.import_path == f"{build.__module__}:{build.__name__}"
    build(Options.model_validate(application.args))


def test_a_wrong_option_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="page_size='many'"):
        build(Options(page_size="many"))  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="max_replicas=1"):
        build(Options(min_replicas=2))
    with pytest.raises(ConfigError, match="tensor_parallel=2: each rank needs a GPU, and gpus=1; use gpus=2"):
        build(Options(gpus=1, tensor_parallel="2"))  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="max_row"):
        build(Options(max_row=3))  # type: ignore[call-arg]
