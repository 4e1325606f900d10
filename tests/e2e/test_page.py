"""The page in a real browser: asking, stopping, what is shown of the wire, and what is said when something is away."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import models
import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright
from stack import ServerProcess

from sordino.server.split import split_model

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)")

# As quiet as a browser can be: no sandbox for root in a container, and no request of its own.
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
WAIT_MS = 60_000  # for what should come at once, on a machine under load
SHOTS = Path(__file__).parents[2] / "build" / "page"
PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without an end token, and deeper than others: there is time to stop an answer."""
    folder = tmp_path_factory.mktemp("deep")
    sizes = {"num_hidden_layers": 4, "max_position_embeddings": 192}
    model = models.make_tiny("llama", folder / "model", eos_token_id=None, **sizes)
    split_model(model, folder / "bundle", rounding="nearest")
    return folder / "bundle"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, timeout=WAIT_MS)
        yield chromium
        chromium.close()


class Gateway:
    """``sordino gateway`` in a process of its own, with everything it keeps below ``tmp``."""

    def __init__(self, server: ServerProcess, tmp: Path, *arguments: str) -> None:
        self.groups = server.manifest.groups
        key_file, port_file = tmp / "key", tmp / "port"
        command = [Path(sys.executable).with_name("sordino"), "gateway", "--server", server.target, "--ca", server.ca]
        command += ["--token-file", server.state / "token", "--key-file", key_file, "--port-file", port_file]
        homes = {name: str(tmp / name) for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")}
        log = tmp / "gateway.log"
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [str(part) for part in [*command, "--port", "0", "--wait", "1", *arguments]],
                stdout=out, stderr=out, env={**os.environ, **homes},
            )  # fmt: skip
        until = time.monotonic() + WAIT_MS / 1e3
        while not (port_file.is_file() and port_file.read_text()):
            if self._process.poll() is not None or time.monotonic() > until:
                self.close()
                raise AssertionError(f"the gateway did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.02)
        self.port, self.key = int(port_file.read_text()), key_file.read_text().strip()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)


@contextmanager
def gateway(server: ServerProcess, tmp: Path, *arguments: str) -> Iterator[Gateway]:
    with closing(Gateway(server, tmp, *arguments)) as served:
        yield served


@pytest.fixture(scope="module")
def sordino(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(bundle, tmp_path_factory.mktemp("server"), allow_clear=True) as server:
        yield server


@pytest.fixture(scope="module")
def clear(sordino: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(sordino, tmp_path_factory.mktemp("clear"), "--protocol", "clear") as served:
        yield served


Open = Callable[..., Page]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """``open_page(gateway, with_key=..., **context)``: a page in a browser profile of its own.

    Whatever a test does, the page must ask nobody but its gateway, keep the key out of addresses and cookies, and give
    its content security policy and its script no reason to complain.
    """
    contexts, wrong = [], []

    def opened(served: Gateway, *, with_key: bool = True, **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        context.set_default_timeout(WAIT_MS)
        contexts.append(context)

        def heed(request: Any) -> None:
            if not request.url.startswith(served.url) or served.key in request.url:
                wrong.append(request.url)

        context.on("request", heed)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        # Requests that fail are tests' own doing; the browser reports them, too.
        page.on("console", lambda said: None if "Failed to load resource" in said.text else wrong.append(said.text))
        page.goto(served.url + (f"#key={served.key}" if with_key else ""))
        return page

    yield opened
    for context in contexts:
        assert not context.cookies()
        context.close()
    assert not wrong


def ready(page: Page) -> None:
    """The page knows the model, and its pictures the first layer."""
    expect(page.locator("#group option")).not_to_have_count(0, timeout=WAIT_MS)


def send(page: Page, text: str = PROMPT) -> None:
    page.locator("#prompt").fill(text)
    page.keyboard.press("Enter")


def begun(page: Page) -> None:
    """The newest answer has some text."""
    page.locator(".said.model:last-child:not(:empty)").wait_for()


def whole(page: Page) -> str:
    """The text of the newest answer, once it has come to its end."""
    expect(page.locator("#send")).to_be_visible(timeout=WAIT_MS)
    return page.locator(".model").last.inner_text()


def stopped(page: Page) -> str:
    """The text that had come of the newest answer when it was stopped."""
    begun(page)
    page.keyboard.press("Escape")
    return whole(page)


def pictures(page: Page) -> tuple[dict[str, Any], dict[str, Any]]:
    """The true row and the sent one: sizes of the canvases, and their colours block by block. Both are of one moment:
    another row may be drawn between two looks."""
    true, sent = page.evaluate(
        """() => ["true", "sent"].map((id) => {
            const canvas = document.getElementById(id);
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            const blocks = [];
            for (let at = 0; at < data.length; at += 4) blocks.push(data.slice(at, at + 3).join());
            return { width: canvas.width, height: canvas.height, blocks };
        })"""
    )
    return true, sent


def shot(page: Page, name: str) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png", full_page=True)


def overflow(page: Page) -> int:
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


@pytest.fixture(scope="module")
def masked(sordino: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(sordino, tmp_path_factory.mktemp("masked"), "--protocol", "masked", "--batch", "192") as served:
        yield served


def test_an_answer_streams_in_and_the_row_beside_it_is_hidden(masked: Gateway, open_page: Open) -> None:
    page = open_page(masked)
    ready(page)
    assert page.url == masked.url  # the key is out of the address
    expect(page.locator("#protocol")).to_have_text("masked")
    expect(page.locator("#up")).to_have_text("–")
    expect(page.locator("#masks")).to_have_text("192")
    lengths = page.evaluate_handle(
        """() => {
            const seen = new Set();
            new MutationObserver(() => {
                const line = document.querySelector(".model[aria-busy]");
                if (line) seen.add(line.textContent.length);
            }).observe(document.getElementById("talk"), { childList: true, subtree: true, characterData: true });
            return seen;
        }"""
    )
    send(page)
    text = whole(page)
    assert text.strip()
    assert page.evaluate("(seen) => seen.size", lengths) > 3  # it grew piece by piece
    group = masked.groups[0]
    true, sent = pictures(page)
    for shown in (true, sent):
        assert shown["width"] * shown["height"] == len(shown["blocks"]) == group.in_features
        assert len(set(shown["blocks"])) > group.in_features / 3
    assert true["blocks"] != sent["blocks"]
    # Of two rows that know nothing of each other: 0, with a standard deviation of 1 / sqrt(n).
    assert abs(float(page.locator("#correlation").inner_text())) < 6 / group.in_features**0.5
    expect(page.locator("#ttft")).to_have_text(re.compile(r"^\d+\.\d\d s$"))
    expect(page.locator("#speed")).to_have_text(re.compile(r"^\d+\.\d tokens/s$"))
    for figure in ("#up", "#down"):
        expect(page.locator(figure)).to_have_text(re.compile(r"^[1-9][\d.]* (k|M)?B$"))
    expect(page.locator("#masks")).not_to_have_text("192")
    shot(page, "masked")


def test_ciphertexts_and_a_gateway_that_ends(sordino: ServerProcess, tmp_path: Path, open_page: Open) -> None:
    """With protocol rlwe there are bytes to look at, and no correlation to speak of."""
    with gateway(sordino, tmp_path, "--protocol", "rlwe") as served:
        page = open_page(served)
        ready(page)
        wide = max(served.groups, key=lambda group: group.in_features)
        page.locator("#group").select_option(wide.name)
        send(page)
        expect(page.locator("#sent-size")).to_contain_text("4,096 of", timeout=WAIT_MS)
        stopped(page)
        true, sent = pictures(page)
        assert len(true["blocks"]) == wide.in_features
        assert len(sent["blocks"]) == 4096
        assert len(set(sent["blocks"])) > 150  # of 256 shades
        expect(page.locator("#correlation")).to_have_text("–")
        expect(page.locator("#note")).to_contain_text("encrypted")
        expect(page.locator("#masks")).to_have_text("none needed")
        shot(page, "rlwe")
    send(page)
    expect(page.locator(".error")).to_contain_text("gateway does not answer", timeout=WAIT_MS)
    expect(page.locator("#live-error")).to_contain_text("gateway does not answer", timeout=WAIT_MS)
    expect(page.locator("#prompt")).to_have_value(PROMPT)


def test_with_nothing_hidden_the_page_says_so_in_red(clear: Gateway, open_page: Open) -> None:
    page = open_page(clear)
    ready(page)
    send(page)
    expect(page.locator("#correlation")).to_have_text("1.000", timeout=WAIT_MS)
    stopped(page)
    true, sent = pictures(page)
    assert true == sent
    note = page.locator("#note")
    expect(note).to_contain_text("Nothing is hidden")
    red, green, blue = map(int, re.findall(r"\d+", note.evaluate("(one) => getComputedStyle(one).color"))[:3])
    assert red > 2 * max(green, blue)
    shot(page, "clear")


def test_keyboard_alone(clear: Gateway, open_page: Open) -> None:
    """Sends, breaks a line, stops, chooses a layer, begins anew, and shows where it is."""
    page = open_page(clear)
    ready(page)
    keys = page.keyboard
    expect(page.locator("#prompt")).to_be_focused()
    keys.type("one")
    keys.press("Shift+Enter")
    keys.type("two")
    keys.press("Enter")
    expect(page.locator(".you")).to_have_text("one\ntwo")
    stopped(page)
    expect(page.locator("#prompt")).to_be_focused()
    expect(page.locator("#prompt")).to_have_value("")

    def go_to(name: str) -> None:
        for _ in range(12):
            if page.evaluate("document.activeElement.id") == name:
                break
            keys.press("Tab")
        expect(page.locator(f"#{name}")).to_be_focused()
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"

    go_to("group")
    before = page.locator("#group").input_value()
    keys.press("ArrowDown")
    assert page.locator("#group").input_value() != before
    go_to("fresh")
    keys.press("Enter")
    expect(page.locator(".said")).to_have_count(0)
    expect(page.locator("#prompt")).to_be_focused()


def test_stop(sordino: ServerProcess, clear: Gateway, open_page: Open) -> None:
    """Esc ends an answer whose server has fallen silent; what has come stays, and the conversation goes on."""
    page = open_page(clear)
    ready(page)
    send(page)
    begun(page)
    sordino.signal(signal.SIGSTOP)
    try:
        expect(page.locator("#stop")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator(".aside")).to_have_text("Stopped.")
        expect(page.locator("#send")).to_be_visible()
        assert page.locator(".model").inner_text()
        assert not page.locator(".error").count()
    finally:
        sordino.signal(signal.SIGCONT)
    send(page, "go on")
    assert stopped(page)
    expect(page.locator(".model")).to_have_count(2)


def test_the_server_dies_and_comes_back(sordino: ServerProcess, clear: Gateway, open_page: Open) -> None:
    page = open_page(clear)
    ready(page)
    sordino.kill()
    try:
        send(page)
        expect(page.locator(".error")).to_contain_text("the server was away", timeout=WAIT_MS)
        expect(page.locator("#prompt")).to_have_value(PROMPT)
        expect(page.locator("#prompt")).to_be_editable()
        expect(page.locator("#send")).to_be_visible()
        shot(page, "server-gone")
    finally:
        sordino.restart()
    page.locator("#prompt").press("Enter")
    assert stopped(page)
    expect(page.locator(".error")).to_have_count(1)


def test_without_the_key_and_with_a_wrong_one(clear: Gateway, open_page: Open) -> None:
    page = open_page(clear, with_key=False)
    expect(page.locator("#key")).to_be_focused()
    assert not page.locator("#group option").count()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key-error")).to_contain_text("does not take this key", timeout=WAIT_MS)
    page.locator("#prompt").fill(PROMPT)
    page.locator("#prompt").press("Enter")
    expect(page.locator(".error")).to_have_text("The key is missing.")
    expect(page.locator("#prompt")).to_have_value(PROMPT)
    shot(page, "key")
    page.locator("#key").fill("schlüssel")
    page.keyboard.press("Enter")
    expect(page.locator("#key-error")).to_contain_text("no key")
    page.locator("#key").fill(clear.key)
    page.keyboard.press("Enter")
    ready(page)
    expect(page.locator("#key-form")).to_be_hidden()
    page.locator("#prompt").press("Enter")
    assert stopped(page)
    page.reload()
    ready(page)  # the tab still has it
    assert page.context.new_page().goto(clear.url)
    assert page.context.pages[-1].locator("#key-form").is_visible()  # another has not


def test_text_of_strangers_is_text(clear: Gateway, open_page: Open) -> None:
    """Whatever a model says (here written by the test, where the gateway would send it), nothing of it is markup."""
    page = open_page(clear)
    ready(page)
    text = "<img src=x onerror=alert(1)><script>alert(2)</script> **bold** [a](javascript:alert(3))"
    events = [{"choices": [{"index": 0, "delta": {"content": text[:30]}}]}]
    events += [{"choices": [{"index": 0, "delta": {"content": text[30:]}}]}]
    body = "".join(f"data: {json.dumps(event)}\r\n\r\n" for event in events) + "data: [DONE]\r\n\r\n"

    def answer(route: Route) -> None:
        route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", answer)
    send(page, "<b>me</b>")
    assert whole(page) == text
    expect(page.locator(".you")).to_have_text("<b>me</b>")
    assert not page.locator("#talk :is(img, script, b, a)").count()
    # An error in the middle of a stream, and a stream that is cut off.
    for end, said in ((f"data: {json.dumps({'error': {'message': '<i>no</i>'}})}\n\n", "<i>no</i>"), ("", "broke off")):
        body = f"data: {json.dumps(events[0])}\n\n{end}"
        send(page)
        expect(page.locator(".error").last).to_contain_text(said)
    assert not page.locator("#talk i").count()


def test_narrow_and_dark(clear: Gateway, open_page: Open) -> None:
    page = open_page(clear, viewport={"width": 360, "height": 740}, color_scheme="dark")
    ready(page)
    send(page)
    expect(page.locator("#true-size")).to_have_text("64 values", timeout=WAIT_MS)
    stopped(page)
    assert overflow(page) <= 0
    chat, side = page.locator("#chat").bounding_box(), page.locator("aside").bounding_box()
    assert chat
    assert side
    assert side["y"] >= chat["y"] + chat["height"]
    for name in ("#prompt", "#send", "#fresh", "#group"):
        box = page.locator(name).bounding_box()
        assert box
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="light")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    page.emulate_media(color_scheme="dark")
    shot(page, "narrow")


def get(served: Gateway, path: str, headers: dict[str, str]) -> tuple[int, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)) as connection:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


@pytest.mark.parametrize("path", ["/sordino/about", "/sordino/seen?group=x"])
@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer wrong"}, {"Host": "evil.example"}, {"Origin": "http://evil.example"}],
    ids=["no key", "wrong key", "host", "origin"],
)
def test_rows_are_for_the_user_alone(clear: Gateway, path: str, headers: dict[str, str]) -> None:
    foreign = {"Host", "Origin"} & set(headers)
    own = {"Authorization": f"Bearer {clear.key}"}
    status, body = get(clear, path, {**(own if foreign else {}), **headers})
    assert status in ((403, 421) if foreign else (401,))
    assert set(body) == {"error"}


def test_a_group_that_there_is_not(clear: Gateway) -> None:
    status, body = get(clear, "/sordino/seen?group=x", {"Authorization": f"Bearer {clear.key}"})
    assert status == 404
    assert "no group" in body["error"]["message"]
