"""Attacks on a server: small bodies that make much work. None may hold the event loop, which serves everybody.

`longest_gap` measures how long the loop of a server in this process did not run. As a part of `stress.py` the attacks
run against a server process, and what is measured is how long /health took.
"""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

BEAT_S = 0.002
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@dataclass
class Gap:
    """The longest time in which nothing else ran."""

    seconds: float = 0.0


@contextlib.contextmanager
def longest_gap(loop: asyncio.AbstractEventLoop) -> Iterator[Gap]:
    """Measure the longest time in which an event loop of another thread did not get to its next call."""
    gap = Gap()

    async def beat() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(BEAT_S)
            now = time.perf_counter()
            gap.seconds, last = max(gap.seconds, now - last - BEAT_S), now

    task = asyncio.run_coroutine_threadsafe(beat(), loop)
    try:
        yield gap
    finally:
        task.cancel()


@dataclass(frozen=True)
class Attack:
    """What is sent, and the status it must get (0: the connection is closed)."""

    path: str
    body: bytes
    status: int = 400
    copies: int = 1  # sent at once, each by a client of its own
    chunk: int = 0  # bytes in a chunk of the body; 0: the body is sent as a whole


def as_json(**fields: object) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def texts(count: int, text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}] * count


LONG_TEXT = "Once upon a time. " * 58_000
# Each of these held the event loop, or the GIL, for many seconds when it was done there in one go.
ATTACKS = {
    "prompts times n": Attack("/v1/completions", as_json(prompt=[[1]] * 40_000, n=128)),
    "long stop strings": Attack("/v1/completions", as_json(prompt="x", n=128, stop=["ab" * 15_000] * 60)),
    "long texts": Attack("/v1/completions", as_json(prompt=LONG_TEXT), copies=3),
    "a long chat": Attack("/v1/chat/completions", as_json(messages=texts(1, LONG_TEXT))),
    "a text to tokenize": Attack("/tokenize", as_json(prompt=LONG_TEXT), status=200),
    "many messages": Attack("/v1/chat/completions", as_json(messages=texts(60_000, "x"))),
    "tiny chunks": Attack("/v1/completions", as_json(prompt="x" * 700_000), chunk=1),
    "too many log-probabilities": Attack("/v1/completions", as_json(prompt=[1], n=64, max_tokens=2000, logprobs=20)),
}
# These took shorter, or take long to run.
MORE_ATTACKS = {
    "a tiny penalty": Attack(
        "/v1/completions",
        as_json(
            prompt=[*range(5, 21)],
            stop_token_ids=[*range(5, 21)],
            min_tokens=1,
            max_tokens=2,
            repetition_penalty=1e-45,
            top_p=0.9,
        ),
    ),
    "a huge top_k": Attack("/v1/completions", as_json(prompt=[5], top_k=2**63)),
    "huge min_tokens": Attack("/v1/completions", as_json(prompt=[5], min_tokens=2**63)),
    "many ids": Attack("/v1/completions", as_json(prompt=[1] * 1_000_000)),
    "ids times n": Attack("/v1/completions", as_json(prompt=[1] * 2030, n=128, max_tokens=2), status=200),
    "ids without text": Attack("/detokenize", as_json(tokens=[9] * 1_000_000), status=200),
    "a large wrong value": Attack("/v1/completions", as_json(prompt="x", stop={"a": [[1] * 1000] * 900})),
    "parts of a message": Attack(
        "/v1/chat/completions",
        as_json(messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * 60_000}], max_tokens=2),
        status=200,
    ),
    "log-probabilities": Attack(
        "/v1/completions", as_json(prompt=[[*range(5, 2045)]] * 6, max_tokens=0, echo=True, logprobs=64), status=200
    ),
}


def raw_request(attack: Attack) -> bytes:
    """The bytes of the request."""
    head = f"POST {attack.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    if not attack.chunk:
        return f"{head}Content-Length: {len(attack.body)}\r\n\r\n".encode() + attack.body
    pieces = (attack.body[i : i + attack.chunk] for i in range(0, len(attack.body), attack.chunk))
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks + b"0\r\n\r\n"


def send(address: tuple[str, int], request: bytes) -> int:
    """Send a request, read the whole response, and return its status; 0 if there is none."""
    with socket.create_connection(address, timeout=120) as client:
        begun = b""
        with contextlib.suppress(ConnectionError):  # a refusal may come before the whole body is sent
            client.sendall(request)
        with contextlib.suppress(ConnectionError):
            while part := client.recv(1 << 20):
                begun = begun if len(begun) > 12 else begun + part
    return int(begun.split()[1]) if begun else 0


def run_attack(address: tuple[str, int], attack: Attack) -> list[int]:
    """The statuses that the copies of an attack got."""
    request, statuses = raw_request(attack), list[int]()
    clients = [threading.Thread(target=lambda: statuses.append(send(address, request))) for _ in range(attack.copies)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return statuses


def hold_connections(address: tuple[str, int], count: int) -> float:
    """Open connections that send nothing; seconds until one more is served. The server closes them by itself."""
    with contextlib.ExitStack() as held:
        for _ in range(count):
            with contextlib.suppress(OSError):
                held.enter_context(socket.create_connection(address, timeout=5))
        began = time.perf_counter()
        while time.perf_counter() - began < 60:
            with contextlib.suppress(OSError):
                if send(address, HEALTH) == 200:
                    break
            time.sleep(0.1)
        return time.perf_counter() - began


def slowest_health(address: tuple[str, int], attack: Callable[[], object]) -> float:
    """The longest time /health took while an attack ran, in seconds."""
    done, slowest = threading.Event(), Gap()

    def probe() -> None:
        while not done.is_set():
            began = time.perf_counter()
            send(address, HEALTH)
            slowest.seconds = max(slowest.seconds, time.perf_counter() - began)

    prober = threading.Thread(target=probe)
    prober.start()
    attack()
    done.set()
    prober.join()
    return slowest.seconds
