"""Takes the pictures of docs/playground.md: python -m serve.pictures URL FOLDER, with tests/ on PYTHONPATH."""

import sys
import time
from pathlib import Path

from serve.browser import Page, browse, browser_path

DONE = "document.getElementById('status').textContent.startsWith('Done')"
FADE_S = 0.5  # tokens appear over a moment


def main(url: str, folder: Path) -> None:
    program = browser_path()
    assert program is not None, "no browser; install one: apt-get install -y chromium"
    with browse(program) as page:
        page.resize(1280, 880)
        page.open(url)
        page.wait("!document.getElementById('run').disabled")
        page.fill(seed=7)
        take_run(page, folder / "playground.png")
        take_race(page, folder / "playground-race.png")


def take_run(page: Page, path: Path) -> None:
    """A finished text by day, with the card of a rejected draft."""
    page.click("#run")
    page.wait(DONE)
    time.sleep(FADE_S)
    page.hover(".text .token.rejected:nth-of-type(n+20)")
    page.value("scrollTo(0, 0)")
    time.sleep(FADE_S)
    page.screenshot(path)


def take_race(page: Page, path: Path) -> None:
    """A race by night, halfway."""
    page.prefer(prefers_color_scheme="dark")
    page.resize(1280, 760)
    page.hover("h1")
    page.click("#intro summary")
    page.fill(slowdown=5)
    page.click("#race")
    page.wait("document.querySelectorAll('.lane:last-child .token').length > 120")
    page.screenshot(path)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
