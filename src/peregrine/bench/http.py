"""`peregrine bench http`: what HTTP costs. The same requests through LLM.generate and through a server, in one run.

The server is a process of its own, with the command line's flags. The client shares the machine with it, so its work is
part of the cost that is reported.
"""

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import IO

import aiohttp

from peregrine.bench.generation import first_prompts, generate
from peregrine.errors import ConfigError
from peregrine.llm import LLM

HOST = "127.0.0.1"
START_SECONDS = 600  # a first start compiles kernels
# First lines of a child process: it ends when its standard input does, which is when its starter ends, killed or not.
FOLLOW = """
import os, signal, sys, threading
def follow():
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=follow, daemon=True).start()
"""
SERVER = f"{FOLLOW}from peregrine.cli.main import main\nsys.exit(main(['serve', *sys.argv[1:]]))"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    streams: int = 32
    tokens: int = 128  # per stream
    repeats: int = 5  # the median counts
    temperature: float = 0.0


def run(plan: Plan, options: dict[str, object], flags: list[str]) -> dict[str, object]:
    """Measure both in turns; `flags` are `options` as the server's command line takes them."""
    if "max_rows" not in options:
        flags = [*flags, "--max-rows", str(plan.streams)]
    options = {"max_rows": plan.streams, **options}
    model = str(options.pop("model", "merlin"))
    with LLM(model, **options) as llm, running_server(flags) as port:
        prompts = first_prompts(plan.streams)
        outputs, _ = generate(llm, prompts, plan.tokens, plan.temperature)  # warm-up of both
        streamed_texts, _ = asyncio.run(streamed(port, prompts, plan))
        speeds = []
        for _ in range(plan.repeats):
            direct = generate(llm, prompts, plan.tokens, plan.temperature)[1]
            speeds.append((direct, asyncio.run(streamed(port, prompts, plan))[1]))
    return {
        "model": model,
        "streams": plan.streams,
        "tokens": plan.tokens,
        "offline_tokens_per_s": round(statistics.median(direct for direct, _ in speeds), 1),
        "http_tokens_per_s": round(statistics.median(through for _, through in speeds), 1),
        "http_cost": round(statistics.median(1 - through / direct for direct, through in speeds), 4),
        "runs": [[round(direct, 1), round(through, 1)] for direct, through in speeds],
        "identical": [output.text for output in outputs] == streamed_texts,
    }


async def streamed(port: int, prompts: list[str], plan: Plan) -> tuple[list[str], float]:
    """Texts and tokens/s of one stream per prompt, all at once; streams are parsed after the clock has stopped."""
    url = f"http://{HOST}:{port}/v1/completions"
    body = {
        "max_tokens": plan.tokens,
        "temperature": plan.temperature,
        "seed": 1,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }

    async def read_stream(session: aiohttp.ClientSession, prompt: str) -> bytes:
        async with session.post(url, json={"prompt": prompt, **body}) as response:
            return await response.read()

    headers = {"Accept-Encoding": "identity"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:
        start = time.perf_counter()
        answers = await asyncio.gather(*(read_stream(session, prompt) for prompt in prompts))
        seconds = time.perf_counter() - start
    texts, count = [], 0
    for answer in answers:
        chunks = [json.loads(line[6:]) for line in answer.split(b"\n") if line.startswith(b"data: {")]
        if not chunks or chunks[-1].get("usage") is None:
            raise ConfigError(f"the stream broke off: {answer[-300:]!r}")
        texts.append("".join(choice["text"] for chunk in chunks for choice in chunk["choices"]))
        count += chunks[-1]["usage"]["completion_tokens"]
    return texts, count / seconds


@contextmanager
def running_server(flags: list[str]) -> Iterator[int]:
    """The port of a server started with these flags, once it is ready."""
    with socket.create_server((HOST, 0)) as probe:
        port: int = probe.getsockname()[1]
    command = [sys.executable, "-c", SERVER, "--host", HOST, "--port", str(port), *flags]
    # A file holds all that the server says; a pipe that nobody reads would stop it once it is full.
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, stdin=subprocess.PIPE, stderr=said, text=True) as server,
    ):
        try:
            wait_until_ready(server, said, port)
            yield port
        finally:
            server.terminate()


def wait_until_ready(server: "subprocess.Popen[str]", said: IO[str], port: int) -> None:
    """Wait until /health answers 200; ConfigError with the last line the server said if it exits before."""
    for _ in range(START_SECONDS * 10):
        if server.poll() is not None:
            said.seek(0)
            lines = said.read().strip().splitlines()
            raise ConfigError(f"the server ended: {lines[-1] if lines else server.returncode}")
        with suppress(OSError), closing(HTTPConnection(HOST, port, timeout=5)) as connection:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.1)
    raise ConfigError(f"the server was not ready after {START_SECONDS} s")


def show(result: dict[str, object]) -> str:
    """The result as text."""
    return "\n".join(
        [
            f"model {result['model']}, {result['streams']} streams of {result['tokens']} tokens",
            f"  LLM.generate  {result['offline_tokens_per_s']:9} tok/s",
            f"  HTTP streams  {result['http_tokens_per_s']:9} tok/s   cost {float(str(result['http_cost'])):.1%}",
            f"  identical: {'yes' if result['identical'] else 'NO'}",
        ]
    )
