"""Connections: their number is limited, slow ones are closed, and trouble with them does not flood the log."""

import asyncio
import errno
import json
import resource
import socket
import time
from collections.abc import Iterator

import h11
import pytest

from peregrine.serve import connections
from peregrine.serve.connections import LeanConnection, SeldomLog, fit_connections
from serve.conftest import Lent, Served, start, wait_ready

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b"
)


@pytest.fixture(scope="module")
def narrow(server: Served) -> Iterator[Served]:
    """A server with room for three connections."""
    settings = {"max_connections": 3, "api_keys": ("key",)}
    served = start(lambda: Lent(server.llm), **settings)  # type: ignore[arg-type, return-value]
    wait_ready(served)
    yield served
    served.stop()


def connect(served: Served, send: bytes = b"") -> socket.socket:
    client = socket.create_connection(served.address, timeout=30)
    client.sendall(send)
    return client


def read_health(client: socket.socket) -> bytes:
    """One response to HEALTH."""
    text = b""
    while not text.endswith(b"}"):
        part = client.recv(1 << 16)
        assert part, text
        text += part
    return text


def read_all(client: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    text = b""
    try:
        while part := client.recv(1 << 16):
            text += part
    except ConnectionError:
        pass
    client.close()
    return text


def wait_empty(served: Served) -> None:
    """Wait until the server has seen that its clients have gone."""
    for _ in range(1000):
        with connect(served, HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")) as client:
            if b" 200 " in read_all(client):
                return
        time.sleep(0.01)
    raise AssertionError("connections stay open")


def test_one_connection_too_many_is_refused_and_the_others_go_on(narrow: Served) -> None:
    wait_empty(narrow)
    held = [connect(narrow, HEALTH) for _ in range(3)]
    assert all(read_health(client).startswith(b"HTTP/1.1 200") for client in held)
    head, _, body = read_all(connect(narrow)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 Service Unavailable")
    assert b"Retry-After: 5" in head
    assert json.loads(body)["error"]["code"] == "too_many_connections"
    held[0].sendall(HEALTH)
    assert read_health(held[0]).startswith(b"HTTP/1.1 200")
    for client in held:
        client.close()
    wait_empty(narrow)


@pytest.mark.parametrize("before", [b"", HEALTH], ids=["first", "next"])
def test_a_head_that_does_not_end_is_not_waited_for(
    narrow: Served, monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    wait_empty(narrow)
    client = connect(narrow, before)
    if before:
        assert read_health(client).startswith(b"HTTP/1.1 200")

    def dribble() -> None:
        for byte in b"GET / HTTP/1.1\r\n" + b"x" * 2000:  # a byte now and then, so that it is never idle
            client.sendall(bytes([byte]))
            time.sleep(0.02)

    with pytest.raises(ConnectionError):
        dribble()
    client.close()


def test_a_client_that_does_not_read_is_not_waited_for(narrow: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "READ_SECONDS", 0.3)
    wait_empty(narrow)
    body = b'{"prompt": "x", "max_tokens": 300, "ignore_eos": true, "logprobs": 20, "stream": true}'
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(narrow.address)
    request = POST % (len(body), body)
    client.sendall(request.replace(b"Content-Length", b"Authorization: Bearer key\r\nContent-Length"))
    narrow.wait_idle()
    others = [connect(narrow, HEALTH), connect(narrow, HEALTH)]
    wait_empty(narrow)  # there is room for one more: the connection was closed from here
    for each in (client, *others):
        each.close()


def test_a_wrong_key_closes_the_connection(narrow: Served) -> None:
    wait_empty(narrow)
    told = read_all(connect(narrow, POST % (1_000_000, b"{")))  # the rest of the body is not waited for
    assert told.startswith(b"HTTP/1.1 401")
    assert b"connection: close" in told.lower()


def test_the_same_trouble_is_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    log, loop = SeldomLog(), asyncio.new_event_loop()
    try:
        for _ in range(1000):
            log(loop, {"message": "socket.accept() out of system resource", "exception": OSError(errno.EMFILE, "x")})
        log(loop, {"message": "something else"})
    finally:
        loop.close()
    assert [record.message for record in caplog.records] == [
        "socket.accept() out of system resource: OSError",
        "something else: NoneType",
    ]


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "room"),
    [
        (1024, 4096, 4096, 1000),
        (1024, 1_000_000, 65536, 1000),
        (512, 512, None, 448),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, 1000),
        (100_000, 100_000, None, 1000),
    ],
)
def test_connections_fit_the_limit_on_open_files(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int | None, room: int
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: given.append(limits))
    assert fit_connections(1000) == room
    assert given == ([] if raised is None else [(raised, hard)])


@pytest.mark.parametrize("head", ["GET / HTTP/1.1", "HEAD / HTTP/1.1", "GET / HTTP/1.0"])
@pytest.mark.parametrize("headers", [[], [("Content-Length", "7")]], ids=["open", "announced"])
def test_streams_are_framed_as_h11_does_it(head: str, headers: list[tuple[str, str]]) -> None:
    """Two responses on one connection, in pieces, one of them empty."""
    framed = []
    for connection in (h11.Connection(h11.SERVER), LeanConnection(h11.SERVER)):
        sent = []
        for _ in range(2):
            connection.receive_data(f"{head}\r\nHost: a\r\nConnection: keep-alive\r\n\r\n".encode())
            assert isinstance(connection.next_event(), h11.Request)
            connection.next_event()
            pieces = [b"", b""] if head.startswith("HEAD") else [b"fal", b"", b"cons"]
            events = [h11.Response(status_code=200, headers=headers), *(h11.Data(data=piece) for piece in pieces)]
            sent += [connection.send(event) for event in (*events, h11.EndOfMessage())]
            if connection.our_state is not h11.DONE:
                break
            connection.start_next_cycle()
        framed.append(b"".join(part or b"" for part in sent))
    assert framed[0] == framed[1]
    assert framed[0]
