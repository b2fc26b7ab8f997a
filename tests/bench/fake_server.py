"""An OpenAI-compatible server that answers from a script and moves the clock itself.

The clock advances only when the script says so, and only after the client has read it for the chunk before. So every
time a client measures is known exactly.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


class Clock:
    """A clock that stands still until it is moved; `wait_until_read` returns when it has been read."""

    def __init__(self) -> None:
        self.now = 0.0
        self._seen = asyncio.Event()

    def __call__(self) -> float:
        self._seen.set()
        return self.now

    async def advance(self, seconds: float) -> None:
        self.now += seconds
        self._seen.clear()

    async def wait_until_read(self) -> None:
        await self._seen.wait()


@dataclass
class Script:
    """What a generation does: (seconds, event) pairs; an event is a chunk, or raw bytes."""

    events: Sequence[tuple[float, object]]
    status: int = 200
    chunked: bool = True


@dataclass
class FakeServer:
    """Answers each generation by the next script (the last one repeats), and each route by its status."""

    clock: Clock
    scripts: list[Script]
    routes: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    heard: list[tuple[str, dict[str, str], dict[str, object]]] = field(default_factory=list)
    open_now: int = 0
    most_open: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def paths(self) -> list[str]:
        return [path for path, _, _ in self.heard]

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path, headers, body = await self.read(reader)
        self.heard.append((path, headers, body))
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        if path.startswith("/v1/") and body:
            await self.play(self.scripts[0] if len(self.scripts) == 1 else self.scripts.pop(0), writer)
        else:
            answers = self.routes.get(path, [(404, "{}")])
            status, text = answers[0] if len(answers) == 1 else answers.pop(0)
            if status:  # 0: hang up
                head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(text.encode())}\r\n\r\n"
                writer.write(head.encode() + text.encode())
        self.open_now -= 1
        writer.close()

    async def read(self, reader: asyncio.StreamReader) -> tuple[str, dict[str, str], dict[str, object]]:
        first = (await reader.readline()).decode()
        headers = {}
        while line := (await reader.readline()).decode().strip():
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
        length = int(headers.get("content-length", 0))
        sent = await reader.readexactly(length)
        return first.split()[1], headers, json.loads(sent) if sent else {}

    async def play(self, script: Script, writer: asyncio.StreamWriter) -> None:
        framing = "Transfer-Encoding: chunked\r\n" if script.chunked else ""
        writer.write(f"HTTP/1.1 {script.status} X\r\n{framing}\r\n".encode())
        for seconds, event in script.events:
            await self.clock.advance(seconds)
            data = event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\n\n"
            writer.write(b"%x\r\n%s\r\n" % (len(data), data) if script.chunked else data)
            await writer.drain()
            if not isinstance(event, bytes):
                await self.clock.wait_until_read()
        if script.chunked:
            writer.write(b"0\r\n\r\n")


@asynccontextmanager
async def serving(server: FakeServer) -> AsyncIterator[FakeServer]:
    """The server on a free port."""
    listening = await asyncio.start_server(server.answer, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    async with listening:
        yield server


def chat_chunk(text: str | None, reason: str | None = None, **more: object) -> dict[str, object]:
    """A chunk of a chat."""
    return {"choices": [{"index": 0, "delta": {"content": text, **more}, "finish_reason": reason}]}


def text_chunk(text: str, reason: str | None = None) -> dict[str, object]:
    """A chunk of a completion."""
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}


def usage_chunk(prompt: int, completion: int) -> dict[str, object]:
    """The last chunk of a stream that was asked for usage."""
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


DONE = b"data: [DONE]\n\n"
