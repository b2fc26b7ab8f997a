"""The playground: its files, and the page in a real browser against a real server."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from peregrine import LLM, SamplingParams
from peregrine.serve.static_files import LOOK, STATIC
from serve.browser import CTRL, SHIFT, Page, browse, browser_path
from serve.conftest import Served, start, wait_ready

PROMPT = "One day, a little fox found a key in the snow."
SVG = "http://www.w3.org/2000/svg"  # a name, not a place
NO_BROWSER = "no Chromium or Chrome on the path; install one: apt-get install -y chromium"
FILES = sorted([*STATIC.iterdir(), LOOK])
ENDED = "/^(Done|Stopped|Failed)/.test(document.getElementById('status').textContent)"
READY = "!document.getElementById('run').disabled"


class Addresses(HTMLParser):
    """Every address an element of the page refers to, and every id."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href"):
                self.found.append(value or "")
            if name == "id":
                self.ids.append(value or "")


@pytest.fixture(scope="module")
def index() -> Addresses:
    parsed = Addresses()
    parsed.feed((STATIC / "index.html").read_text())
    return parsed


def test_page_and_its_parts_are_served(http: httpx.Client, index: Addresses) -> None:
    page = http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    parts = [address for address in index.found if not address.startswith("data:")]
    own = {"/static/look.css", "/static/playground.css", "/static/playground.js"}
    assert own | {"/docs", "/metrics", "/server_info"} == set(parts)
    for address in parts:
        answer = http.get(address)
        assert answer.status_code == 200, address
        if address.startswith("/static"):
            assert answer.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_names_another_host(path: Path) -> None:
    assert not re.findall(r"(?:https?:)?//[\w-]+\.[\w.-]+", path.read_text().replace(SVG, ""))


def test_ids_used_by_the_script_exist(index: Addresses) -> None:
    script = (STATIC / "playground.js").read_text()
    wanted = set(re.findall(r'find\("([\w-]+)"\)', script))
    assert len(wanted) > 20
    assert wanted <= set(index.ids)
    assert len(index.ids) == len(set(index.ids))


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on the path; install it: apt-get install -y nodejs")
def test_script_parses() -> None:
    script = (STATIC / "playground.js").read_text()
    check = ["node", "--input-type=module", "--check"]
    assert subprocess.run(check, input=script, text=True, capture_output=True).returncode == 0
    assert subprocess.run(check, input=script + "}", text=True, capture_output=True).returncode != 0


def test_server_reports_its_draft_shape(http: httpx.Client) -> None:
    assert http.get("/server_info").json()["draft_shape"] == {"depth": 3, "width": 1, "nodes": 4}


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    program = browser_path()
    if program is None:
        pytest.skip(NO_BROWSER)
    with browse(program) as page:
        yield page


def open_page(page: Page, served: Served) -> Page:
    """The playground as on a first visit, on a desktop, with the recorded run put away."""
    page.send("Storage.clearDataForOrigin", origin=served.url, storageTypes="all")
    page.complaints.clear()
    page.requests.clear()
    page.resize(1280, 900)
    page.prefer()
    page.open(served.url)
    page.click("[value=chat]")
    page.click("[value=text]")
    return page


@pytest.fixture
def page(browser: Page, server: Served) -> Iterator[Page]:
    """A fresh page; by the end of the test it may have neither errors nor requests to other hosts."""
    opened = open_page(browser, server)
    opened.wait(READY)
    yield opened
    assert opened.complaints == []
    hosts = {urlsplit(url).netloc for url in opened.requests if not url.startswith("data:")}
    assert hosts == {urlsplit(server.url).netloc}


def run(page: Page, button: str = "#run") -> None:
    page.click(button)
    page.wait(ENDED)


def shown_tokens(page: Page, lane: int = 0) -> list[dict[str, object]]:
    """Text and provenance of each token of a lane, as the page has them."""
    tokens = page.value(
        f"[...document.querySelectorAll('.lane')[{lane}].querySelectorAll('.token')]"
        ".map(t => ({text: t.textContent, drafted: t.classList.contains('drafted')}))"
    )
    return list(tokens)


def test_api_page_lists_every_endpoint(page: Page, server: Served) -> None:
    page.open(server.url + "/docs")
    page.wait("document.querySelectorAll('.endpoint').length > 0")
    paths = httpx.get(server.url + "/openapi.json").json()["paths"]
    wanted = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert set(page.value("[...document.querySelectorAll('.endpoint h2')].map(e => e.textContent)")) == wanted
    fields = page.value("[...document.querySelectorAll('.endpoint td:first-child')].map(e => e.textContent)")
    assert fields[:2] == ["model", "messages *"]  # what most readers look for
    assert fields.index("temperature") < fields.index("user")  # what has no effect comes last
    assert {"prompt", "logit_bias", "return_speculation"} <= set(fields)


def test_tokens_come_with_their_provenance(page: Page, server: Served) -> None:
    page.fill(prompt=PROMPT, temperature=0, max_tokens=60)
    run(page)
    expected = server.llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=60))[0]
    tokens = shown_tokens(page)
    assert [token["drafted"] for token in tokens] == expected.drafted
    assert 0 < sum(expected.drafted) < 60
    assert page.text(".lane .text") == expected.text.strip()
    assert page.text("[data-figure=acceptance]") == f"{expected.stats.accept_length:.2f}"
    assert page.text("[data-figure=count]") == "60"
    assert float(page.text("[data-figure=speed]")) > 0
    assert re.fullmatch(r"\d+ ms", page.text("[data-figure=first]"))
    stats = expected.stats
    said = f"{stats.rounds} rounds: {stats.drafted} drafted, {stats.correct} accepted"
    assert page.value("document.querySelector('.strip').getAttribute('aria-label')") == said
    assert page.value("document.querySelectorAll('.lane .round').length") == stats.rounds
    assert page.value("document.querySelectorAll('.lane .cell.correct').length") == stats.correct
    assert page.text("#status").startswith(f"Done: max tokens reached. 60 tokens in {stats.rounds} rounds, seed ")


def test_provenance_reads_without_colour(page: Page) -> None:
    page.fill(prompt=PROMPT, temperature=0, max_tokens=60)
    run(page)
    lines = [
        page.value(f"(s => s.textDecorationLine + ' ' + s.textDecorationStyle)(getComputedStyle({element}))")
        for element in (
            "document.querySelector('.lane .token.drafted')",
            "document.querySelector('.lane .token.rejected')",
            "document.querySelector('.lane .token:not(.drafted, .rejected)')",
        )
    ]
    assert lines == ["underline solid", "underline dotted", "none solid"]


def rejections(served: Served) -> list[tuple[int, int, str, str, list[str]]]:
    """(place, round, rejected draft, the target's choice, drafts after it) of every rejection in a greedy run."""
    params = SamplingParams(temperature=0, max_tokens=60, report_drafts=True)
    found, place = [], 0
    deltas = [delta for delta in served.llm.stream(PROMPT, params) if delta.token_ids]
    for number, delta in enumerate(deltas, start=1):
        place += len(delta.token_ids)
        if delta.drafts and not delta.drafted[-1] and len(delta.drafts.correct) < len(delta.drafts.tokens):
            wrong = [served.llm.tokenizer.decode([t]) for t in delta.drafts.tokens[len(delta.drafts.correct) :]]
            chosen = served.llm.tokenizer.decode(delta.token_ids[-1:])
            found.append((place, number, wrong[0], chosen, wrong[1:]))
    return found


def visible(text: str) -> str:
    return text.replace("\n", "↵").replace(" ", "␣")


def test_a_token_shows_the_draft_that_was_rejected(page: Page, server: Served) -> None:
    page.fill(prompt=PROMPT, temperature=0, max_tokens=60)
    run(page)
    expected = rejections(server)
    assert page.value("document.querySelectorAll('.lane .rejected').length") == len(expected) > 2
    place, number, draft, chosen, fell = expected[1]
    page.hover(f".lane .text .token:nth-child({place})")
    card = page.wait("(c => c.hidden ? '' : c.textContent)(document.getElementById('card'))")
    assert f"token {place}, round {number}" in card
    assert f"Drafted {visible(draft)}: rejected." in card
    assert f"The target chose {visible(chosen)}." in card
    assert all(visible(text) in card for text in fell)
    assert page.value("[...document.querySelectorAll('.round')].findIndex(r => r.matches('.lane .here'))") == number
    page.hover("h1")
    assert page.value("document.getElementById('card').hidden")


def test_race_is_checked_token_by_token(page: Page) -> None:
    page.fill(prompt=PROMPT, temperature=0.8, seed=3, max_tokens=80)
    # Record the verdict's texts, to check that it was updated live.
    page.value(
        "window.said = [], new MutationObserver(() => said.push(verdict.textContent))"
        ".observe(document.getElementById('verdict'), {childList: true})"
    )
    run(page, "#race")
    plain, fast = shown_tokens(page, 0), shown_tokens(page, 1)
    assert [token["text"] for token in plain] == [token["text"] for token in fast]
    assert not any(token["drafted"] for token in plain)
    assert any(token["drafted"] for token in fast)
    said = r"Identical: all (\d+) tokens\. Speculation was done when plain decoding had (\d+)\."
    verdict = re.fullmatch(said, page.text("#verdict"))
    assert verdict is not None
    assert int(verdict[1]) == len(plain)
    assert int(verdict[2]) < 0.8 * len(plain)
    assert page.value("document.getElementById('verdict').dataset.state") == "identical"
    live = [line for line in page.value("said") if line.startswith("Identical so far")]
    assert len(live) > 5
    assert any("Speculation is" in line and line.endswith("ahead.") for line in live)


def test_a_race_without_drafts_says_so(page: Page) -> None:
    """As a server that plans windows may run it; here the request is changed on its way."""
    page.value(
        "(whole => { window.fetch = (path, options) => whole(path, options?.body ?"
        " {...options, body: options.body.replace('\"num_drafts\":3', '\"num_drafts\":0')} : options) })(window.fetch)"
    )
    page.fill(prompt=PROMPT, temperature=0, max_tokens=8)
    run(page, "#race")
    said = "Identical: all 8 tokens. Nothing was drafted: beside another request it did not pay."
    assert page.text("#verdict") == said


def test_a_race_that_differs_is_reported(page: Page) -> None:
    """Tests the check: tokens of the second response are changed before the page reads them."""
    page.value(
        "(whole => { window.fetch = async (path, options) => { const answer = await whole(path, options);"
        " if (!(options.body ?? '').includes('\"num_drafts\":3')) return answer;"
        ' return new Response((await answer.text()).replaceAll(/"id":(\\d+),/g, \'"id":$19,\')); } })(window.fetch)'
    )
    page.fill(prompt=PROMPT, temperature=0, max_tokens=20)
    run(page, "#race")
    assert page.text("#verdict").startswith("Not identical: token 1 is")


def aborted(served: Served) -> float:
    """Number of generations aborted so far."""
    metrics = httpx.get(served.url + "/metrics").text
    found = re.search(r'^peregrine_generations_total\{.*finish_reason="abort".*\} (\S+)', metrics, re.M)
    return float(found[1]) if found else 0.0


def test_stop_ends_the_page_and_the_generation(page: Page, server: Served) -> None:
    before = aborted(server)
    # Esc at the first token, long before the server can be done.
    page.value(
        "new MutationObserver((_, watch) => document.querySelector('.lane .token') && (watch.disconnect(),"
        " document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))))"
        ".observe(document.getElementById('lanes'), {childList: true, subtree: true})"
    )
    page.fill(prompt=PROMPT, temperature=100, max_tokens=1500)  # a temperature so high that it does not end by itself
    run(page)
    assert page.text("#status").startswith("Stopped")
    assert 0 < len(shown_tokens(page)) < 1500
    assert page.value("document.getElementById('stop').hidden")  # it would stop nothing
    server.wait_idle()
    assert aborted(server) == before + 1


def test_slow_motion_can_be_stopped_by_its_button(page: Page) -> None:
    page.fill(prompt=PROMPT, temperature=0, max_tokens=100, slowdown=25)
    page.click("#run")
    page.wait("document.querySelectorAll('.lane .token').length > 1")
    page.click("#stop")
    page.wait(ENDED)
    assert page.text("#status").startswith("Stopped")
    assert len(shown_tokens(page)) < 100


def test_keyboard_alone_is_enough(page: Page) -> None:
    page.fill(temperature=0, max_tokens=40)
    page.value("document.getElementById('prompt').focus()")
    page.press("Enter", CTRL)
    page.wait(ENDED)
    assert len(shown_tokens(page)) == 40
    page.value("document.getElementById('prompt').focus()")
    stops = []
    while not stops or stops[-1] != "text":
        page.press("Tab")
        stops.append(page.value("document.activeElement.id || document.activeElement.className"))
        assert len(stops) < 30, stops
    assert stops[:3] == ["drafts", "run", "race"]
    for key in ("ArrowRight", "ArrowRight", "End", "ArrowLeft"):
        page.press(key)
    assert "token 39" in page.text("#card")
    assert page.value("document.activeElement.getAttribute('aria-describedby')") == "card"
    page.press("Escape")
    assert page.value("document.getElementById('card').hidden")
    page.press("Enter", CTRL | SHIFT)
    page.wait("document.querySelectorAll('.lane').length === 2 && " + ENDED)
    assert page.text("#verdict").startswith("Identical: all 40 tokens")


def test_speculation_slider(page: Page) -> None:
    assert page.value("document.getElementById('drafts').max") == "3"
    assert page.text("#drafts-said") == "up to 3 per round"
    assert "fixed when the server starts" in page.text("#shape")
    page.fill(temperature=0, max_tokens=30, drafts=0)
    assert page.text("#drafts-said") == "off"
    run(page)
    assert page.text("[data-figure=acceptance]") == "1.00"
    assert page.value("document.querySelectorAll('.lane .cell').length") == 0
    page.fill(drafts=1)
    run(page)
    assert page.value("Math.max(...[...document.querySelectorAll('.lane .round')].map(r => r.children.length))") == 1


def test_chat_remembers(page: Page, server: Served) -> None:
    page.click("[value=chat]")
    page.fill(temperature=0, max_tokens=30, prompt="Tell me a story.")
    page.value("document.getElementById('prompt').focus()")
    page.press("Enter")
    page.wait(ENDED)
    first = [{"role": "user", "content": "Tell me a story."}]
    params = SamplingParams(temperature=0, max_tokens=30)
    answer = server.llm.generate([server.llm.encode_chat(first)], params)[0].text
    assert page.text(".lane .text") == answer.strip()
    page.fill(prompt="What was the name?")
    run(page)
    both = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "What was the name?"}]
    second = server.llm.generate([server.llm.encode_chat(both)], params)[0].text
    assert second != server.llm.generate([server.llm.encode_chat(both[-1:])], params)[0].text
    assert page.text(".lane .text") == second.strip()
    assert page.value("[...document.getElementById('transcript').children].map(e => e.className)") == [
        *("question", "text", "question")
    ]
    page.click("#forget")
    assert page.value("document.querySelectorAll('.lane, #transcript > *').length") == 0
    assert page.value("document.getElementById('forget').hidden")  # there is nothing left to forget


def test_refusals_are_shown_in_words(page: Page) -> None:
    page.fill(prompt=PROMPT, max_tokens=100000)
    run(page)
    assert "max_tokens=100000: the prompt's" in page.text("#problem")
    assert "use at most" in page.text("#problem")
    assert page.text("#status").startswith("Failed")
    assert page.value("document.querySelectorAll('.lane').length") == 0  # no figures
    assert page.value("(b => b.top >= 0 && b.bottom <= innerHeight)(problem.getBoundingClientRect())")
    page.fill(max_tokens=5)
    run(page)
    assert page.value("document.getElementById('problem').hidden")
    # The browser itself notes an answer of 400 in its console; nothing else may stand there.
    assert [line for line in page.complaints if "status of 400" not in line] == []
    page.complaints.clear()


def test_half_characters_wait_for_the_rest(page: Page) -> None:
    """With a made-up response, since the embedded model writes plain English."""
    tokens = [
        {"id": 1, "text": "bytes:\\xe2\\x82", "drafted": False},
        {"id": 2, "text": "bytes:\\xac", "drafted": True},
        {"id": 3, "text": "<b>", "drafted": False},
    ]
    drafts = [
        {"id": 2, "text": "bytes:\\xac", "parent": 0, "correct": True},
        {"id": 7, "text": "left", "parent": 0, "correct": False},
        {"id": 8, "text": "lost", "parent": 1, "correct": False},
        {"id": 9, "text": "under", "parent": 2, "correct": False},
        {"id": 6, "text": "deep", "parent": 3, "correct": False},
    ]
    rounds = [{"num_tokens": 1, "offered": 0, "drafts": []}, {"num_tokens": 2, "offered": 5, "drafts": drafts}]
    choice = {"text": "€<b>", "finish_reason": "length", "speculation": {"tokens": tokens, "rounds": rounds}}
    answer_with(page, {"choices": [choice]})
    run(page)
    assert [token["text"] for token in shown_tokens(page)] == ["", "€", "<b>"]
    assert page.value("[...document.querySelectorAll('.lane .round')].map(r => r.children.length)") == [0, 3]
    page.hover(".lane .text .token:nth-child(2)")
    assert "Also drafted here: left." in page.text("#card")
    page.hover(".lane .text .token:nth-child(3)")
    assert "Drafted lost: rejected." in page.text("#card")
    assert "fell, too: deep." in page.text("#card")


def answer_with(page: Page, *events: object) -> None:
    """Let the page read these events instead of asking the server."""
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page.value(f"window.fetch = async () => new Response({json.dumps(body)})")


def one_round(ids: list[int], **ending: object) -> dict[str, object]:
    """A chunk of one round without drafts."""
    tokens = [{"id": i, "text": f" {i}", "drafted": False} for i in ids]
    speculation = {"tokens": tokens, "rounds": [{"num_tokens": len(ids), "offered": 0, "drafts": []}]}
    return {"choices": [{"text": "", "finish_reason": None, "speculation": speculation, **ending}]}


@pytest.mark.parametrize(
    ("ending", "said", "shown"),
    [
        ({"finish_reason": "stop", "stop_reason": 2}, "the model ended the text", " 1"),
        ({"finish_reason": "stop", "stop_reason": " 2"}, "the stop string “ 2” came", " 1 2"),
        ({"finish_reason": "length", "stop_reason": None}, "the context is full", " 1 2"),
        ({"finish_reason": "abort", "stop_reason": None}, "abort", " 1 2"),
    ],
)
def test_done_says_why_and_an_end_token_is_no_text(
    page: Page, ending: dict[str, object], said: str, shown: str
) -> None:
    page.fill(max_tokens=9, seed=3)
    answer_with(page, one_round([1, 2], **ending))
    run(page)
    assert page.text("#status") == f"Done: {said}. 2 tokens in 1 round, seed 3."
    assert page.text(".lane .text") == shown.strip()
    assert page.text("[data-figure=count]") == "2"


def test_what_fails_in_the_middle_has_text_but_no_figures(page: Page) -> None:
    answer_with(page, one_round([1, 2]), {"error": {"message": "The engine is ill."}})
    run(page)
    assert page.text("#problem") == "The engine is ill."
    assert page.text(".lane .text") == "1 2"
    assert page.value("getComputedStyle(document.querySelector('.lane .figures')).display") == "none"


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return dict(json.loads((STATIC / "example.json").read_text()))


def test_the_recorded_run_is_merlins(server: Served, recorded: dict[str, Any]) -> None:
    """Its tokens are the tokenizer's, and its rounds cover them."""
    tokens, rounds = recorded["choice"]["speculation"]["tokens"], recorded["choice"]["speculation"]["rounds"]
    ids = [token["id"] for token in tokens]
    assert server.llm.tokenizer.decode(ids[:-1]) == recorded["choice"]["text"]
    assert ids[-1] == recorded["choice"]["stop_reason"]
    assert sum(each["num_tokens"] for each in rounds) == len(ids)
    assert all(sum(draft["correct"] for draft in each["drafts"]) + 1 >= each["num_tokens"] for each in rounds)


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_before_the_first_run_a_recorded_one_plays(
    browser: Page, server: Served, recorded: dict[str, Any], motion: str
) -> None:
    browser.resize(1280, 900)
    browser.prefer(prefers_reduced_motion=motion)
    browser.open(server.url)
    browser.wait("document.querySelector('.example .token') && " + READY)
    if motion == "reduce":
        count = len(recorded["choice"]["speculation"]["tokens"]) - 1  # the last one ends the text
        assert len(shown_tokens(browser)) == count
        assert browser.text(".example .text") == recorded["choice"]["text"].strip()
    assert browser.value("document.querySelector('.example .text').dataset.prompt") == recorded["prompt"]
    assert "Recorded with merlin" in browser.text("#status")
    assert browser.value("getComputedStyle(document.querySelector('.example .timed')).display") == "none"
    browser.fill(temperature=0, max_tokens=5)
    run(browser)
    assert len(shown_tokens(browser)) == 5  # the recorded run made way, and does not go on
    browser.prefer()


def test_a_phone_begins_with_the_text_box(page: Page) -> None:
    page.resize(390, 844)
    page.open(page.value("location.href"))
    page.wait(READY)
    tops = page.value(
        "Object.fromEntries(['h1', '#prompt', '.modes', '.result', '.intro', 'nav']"
        ".map(s => [s, document.querySelector(s).getBoundingClientRect().top]))"
    )
    assert sorted(tops, key=lambda name: tops[name]) == list(tops)
    assert tops["#prompt"] < 100
    assert tops[".result"] < 600


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ("decisions: [{field: 'windows', value: 'auto', because: 'it pays'}]", "Each round drafts what pays, up to 3"),
        ("draft_shape: {depth: 3, width: 2, nodes: 8}", "3 levels, 2 children per node, 8 nodes with the root."),
    ],
)
def test_other_shapes_of_drafts_are_said(page: Page, info: str, said: str) -> None:
    """The shared server has chains of fixed length; of planned windows the slider is a limit, of trees the depth."""
    page.value(
        "(whole => { window.fetch = async (path, options) => { const answer = await whole(path, options);"
        " return path !== '/server_info' ? answer :"
        f" Response.json({{...await answer.json(), {info}}}); }} }})(window.fetch)"
    )
    page.value("document.getElementById('key-form').dispatchEvent(new Event('submit', {cancelable: true}))")
    page.wait(f"document.getElementById('shape').textContent.startsWith('{said}')")
    assert page.value("document.getElementById('trees').hidden")


def test_no_control_controls_nothing(browser: Page, server: Served, page: Page) -> None:
    """Everything that can be operated is enabled; a server without a drafter offers neither slider nor race."""
    active = "[...document.querySelectorAll('button, input, select')].filter(e => e.checkVisibility())"
    assert page.value(f"{active}.filter(e => e.disabled).map(e => e.id)") == []
    page.value(
        "(whole => { window.fetch = async (path, options) => { const answer = await whole(path, options);"
        " return path !== '/server_info' ? answer : Response.json({...await answer.json(),"
        " draft_shape: {depth: 0, width: 1, nodes: 1}}); } })(window.fetch)"
    )
    page.value("document.getElementById('key-form').dispatchEvent(new Event('submit', {cancelable: true}))")
    page.wait("document.getElementById('shape').textContent.startsWith('This server has no drafter')")
    shown = page.value(f"{active}.map(e => e.id)")
    assert "run" in shown
    assert not {"drafts", "race", "stop", "forget"} & set(shown)


def test_small_screens_dark_mode_and_no_motion(page: Page) -> None:
    light = page.value("getComputedStyle(document.body).backgroundColor")
    page.resize(360, 740)
    page.prefer(prefers_color_scheme="dark", prefers_reduced_motion="reduce")
    page.open(page.value("location.href"))
    page.wait(READY)
    page.fill(temperature=0, max_tokens=60)
    run(page, "#race")
    assert page.value("document.documentElement.scrollWidth") <= 360
    assert page.value("getComputedStyle(document.body).backgroundColor") != light
    assert page.value("getComputedStyle(document.querySelector('.lane .token')).animationName") == "none"
    assert page.value("document.getElementById('run').getBoundingClientRect().bottom <= innerHeight")


def test_structured_output(page: Page) -> None:
    """A schema, wrong ones, and a regular expression, on a phone."""
    page.resize(360, 740)
    page.click("#structure summary")
    page.click("#schema-example")
    wanted = json.loads(page.value("document.getElementById('schema').value"))["required"]
    page.fill(temperature=0, max_tokens=120)
    run(page)
    value = json.loads(page.text(".lane .text"))
    assert list(value) == wanted
    assert page.text(".lane .value") == json.dumps(value, indent=2, ensure_ascii=False)
    assert page.value("document.documentElement.scrollWidth") <= 360
    for schema, problem in (("{", "is not valid JSON"), ('{"type": "strin"}', "Invalid type: strin")):
        page.fill(schema=schema)
        run(page)
        assert problem in page.text("#schema-problem")
        assert page.value("document.getElementById('problem').hidden")
    kind = "document.getElementById('constraint')"
    page.value(f"{kind}.value = 'regex', {kind}.dispatchEvent(new Event('change'))")
    assert page.value("document.getElementById('schema-problem').hidden")
    page.click("#run")  # an empty box is pointed at, nothing is sent
    assert page.value("document.activeElement.id") == "schema"
    page.fill(schema="[a-c]{3}")
    run(page)
    assert re.fullmatch("[a-c]{3}", page.text(".lane .text"))
    assert page.value("document.querySelector('.lane .value').hidden")
    assert [line for line in page.complaints if "status of 400" not in line] == []
    page.complaints.clear()


def test_introduction_is_for_the_first_visit(page: Page) -> None:
    assert page.value("document.getElementById('intro').open")
    page.click("#intro summary")
    page.wait("localStorage.getItem('intro') === 'closed'")
    page.open(page.value("location.href"))
    page.wait(READY)
    assert not page.value("document.getElementById('intro').open")


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    """A server with a key, which plans its windows."""
    served = start(lambda: LLM("merlin", num_pages=100, num_drafts=3), api_keys=("sesame",))
    wait_ready(served)
    yield served
    served.stop()


def test_key_is_asked_for_and_the_shape_of_drafts_is_switched(browser: Page, locked: Served) -> None:
    """Chains and trees, one run after the other on one engine: the same text."""
    page = open_page(browser, locked)
    page.wait("!document.getElementById('key-form').hidden")
    assert "the API key is missing or wrong" in page.text("#problem")
    page.fill(key="sesame")
    page.click("#key-form button")
    page.wait(READY)
    assert page.value("document.getElementById('key-form').hidden")
    assert "In trees the drafter's next choices hang beside its first." in page.text("#shape")
    page.fill(prompt=PROMPT, temperature=0, max_tokens=40)
    planner = locked.llm.engine.runner.planner
    assert planner is not None
    shown, trees = {}, {}
    for shape in ("tree", "chain"):
        before = planner.record.rounds["tree"]
        page.click(f"[name=tree][value={shape}]")
        run(page)
        shown[shape] = [token["text"] for token in shown_tokens(page)]
        trees[shape] = planner.record.rounds["tree"] - before
    assert shown["tree"] == shown["chain"]
    assert trees["tree"] > 5
    assert trees["chain"] == 0
    page.click("[name=tree][value=tree]")
    run(page, "#race")
    assert page.text("#verdict").startswith("Identical: all 40 tokens")
    assert page.value("Math.max(...[...document.querySelectorAll('.lane .round')].map(r => r.children.length))") == 3
