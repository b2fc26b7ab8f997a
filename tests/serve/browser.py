"""A browser for tests: headless Chromium, driven through a pair of pipes. No package, no port, no driver binary.

Chromium reads commands of its DevTools protocol from descriptor 3 and writes answers and events to descriptor 4,
each a JSON value with a zero byte behind it.
"""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--force-color-profile=srgb"),
)
# Moves two pipes to descriptors 3 and 4, by way of free numbers, and executes Chromium.
LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for end, place in zip(ends, (3, 4)):
    os.dup2(end, place)
os.execv(sys.argv[3], sys.argv[3:])
"""
PATIENCE_S = 60
KEY_CODES = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, "Home": 36, "End": 35}
CTRL, SHIFT = 2, 8


def browser_path() -> str | None:
    """The path of an installed browser, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab, with the errors and requests seen in it."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._pending = b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.complaints: list[str] = []  # of the console, and uncaught exceptions
        self.requests: list[str] = []  # addresses the page asked for
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Give a command and wait for its result; events that come first are noted."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != number:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]  # type: ignore[no-any-return]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._from], [], [], PATIENCE_S)
            assert ready, f"the browser said nothing for {PATIENCE_S} s"
            data = os.read(self._from, 2**20)
            assert data, "the browser has ended"
            self._pending += data
        message, _, self._pending = self._pending.partition(b"\0")
        return json.loads(message)  # type: ignore[no-any-return]

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(str([value.get("value") for value in params["args"]]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"{params['entry']['text']} ({params['entry'].get('url')})")
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && document.URL !== 'about:blank'")

    def value(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait(self, script: str) -> Any:
        """Wait until an expression is true in the page; returns its value."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if found := self.value(script):
                return found
            time.sleep(0.02)
        raise AssertionError(f"never came true: {script}\n{self.value('document.body.innerText')}")

    def text(self, selector: str) -> str:
        return str(self.value(f"document.querySelector({selector!r}).textContent.trim()"))

    def click(self, selector: str) -> None:
        self.value(f"document.querySelector({selector!r}).click()")

    def fill(self, **values: str | int | float) -> None:
        """Put values into the fields with these ids, with the events that typing would send."""
        for name, value in values.items():
            field = f"document.getElementById({name!r})"
            self.value(
                f"{field}.value = {json.dumps(value)}, {field}.dispatchEvent(new Event('input', {{bubbles: true}}))"
            )

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press and release a key, wherever the focus is."""
        about = {"key": key, "code": key, "windowsVirtualKeyCode": KEY_CODES[key], "modifiers": modifiers}
        typed = {"text": "\r"} if key == "Enter" else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", **about, **typed)
        self.send("Input.dispatchKeyEvent", type="keyUp", **about)

    def hover(self, selector: str) -> None:
        """Move the pointer over the middle of an element's first line."""
        x, y = self.value(
            f"(e => (e.scrollIntoView({{block: 'center'}}), (r => [r.x + r.width / 2, r.y + r.height / 2])"
            f"(e.getClientRects()[0])))(document.querySelector({selector!r}))"
        )
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )

    def prefer(self, **features: str) -> None:
        """Media features by name, such as prefers_color_scheme="dark"."""
        media = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.send("Emulation.setEmulatedMedia", features=media)

    def screenshot(self, path: Path) -> None:
        data = self.send("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def browse(program: str) -> Iterator[Page]:
    """A fresh browser with one tab; the browser and its files are removed when the block ends."""
    commands, answers = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(prefix="peregrine-browser-", ignore_cleanup_errors=True) as profile:
        flags = [*FLAGS, f"--user-data-dir={profile}"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # Chromium's sandbox refuses to run as root
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(commands[0]), str(answers[1]), program, *flags],
            pass_fds=(commands[0], answers[1]),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(commands[0])
        os.close(answers[1])
        try:
            yield Page(commands[1], answers[0])
        finally:
            os.close(commands[1])  # the browser ends when its command pipe is closed
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(answers[0])
