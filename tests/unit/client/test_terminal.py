"""Progress at the terminal: one live display at a time, whoever reports from which thread; the token file."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import grpc
import models
import pytest
import torch
from rich.console import Console
from rich.live import Live

from sordino.client import terminal
from sordino.client.answers import Piece
from sordino.client.terminal import connected, encode_prompt, progress_bar, timed_streamer
from sordino.shared.errors import AuthError, BundleError
from sordino.shared.transport import error_of


class Screen:
    """What was printed, and how many live displays there were at most."""

    def __init__(self) -> None:
        self.file = io.StringIO()
        self.live = self.most = 0

    @property
    def text(self) -> str:
        return self.file.getvalue()


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    screen = Screen()
    start, stop = Live.start, Live.stop

    def counted_start(self: Live, refresh: bool = False) -> None:
        if not self.is_started:
            screen.live += 1
            screen.most = max(screen.most, screen.live)
        start(self, refresh)

    def counted_stop(self: Live) -> None:
        screen.live -= self.is_started
        stop(self)

    monkeypatch.setattr(Live, "start", counted_start)
    monkeypatch.setattr(Live, "stop", counted_stop)
    monkeypatch.setattr(terminal, "console", Console(file=screen.file, force_terminal=True, width=100))
    yield screen
    assert screen.live == 0, "a display was left running"


def test_a_bar_comes_with_the_first_report_and_goes_when_the_work_is_done(screen: Screen) -> None:
    with progress_bar("work") as report:
        assert not screen.live
        for _ in range(2):  # once more: the next batch
            report(0, 2)
            report(1, 2)
            assert screen.live
            report(2, 2)
            assert not screen.live
        report(2, 2)
        report(1, 2)
    assert "work" in screen.text
    assert screen.most == 1


def test_no_bar_fills_a_file(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "console", Console(file=screen.file, force_terminal=False))
    with progress_bar("work") as report:
        for done in range(3):
            report(done, 2)
    assert not screen.text
    assert not screen.most


def test_a_bar_stays_away_while_another_is_shown(screen: Screen) -> None:
    with progress_bar("outer") as outer, progress_bar("inner") as inner:
        outer(0, 3)
        inner(0, 2)
        inner(1, 2)
        inner(2, 2)
        assert "inner" not in screen.text
        outer(3, 3)
        inner(0, 2)
        inner(1, 2)
    assert "inner" in screen.text
    assert screen.most == 1


def test_bars_from_many_threads(screen: Screen) -> None:
    failures: list[BaseException] = []
    with progress_bar("one") as one, progress_bar("two") as two:

        def work() -> None:
            try:
                for _ in range(20):
                    for report in (one, two):
                        for done in range(4):
                            report(done, 3)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    assert screen.most == 1


@pytest.mark.parametrize(("content", "text"), [(b"", "empty"), (b" \n", "empty"), (b"\xff\xfe\x00", "outside ASCII")])
def test_a_token_file_without_a_token(tmp_path: Path, content: bytes, text: str) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(AuthError, match=text), connected("grpc://127.0.0.1:9", ca=None, token_file=tmp_path / "token"):
        pass


@pytest.mark.parametrize(
    ("texts", "shown"), [(["a", "b"], "ab\n"), (["a\n"], "a\n"), (["a", ""], "a\n"), ([], ""), (["a\n", "b"], "a\nb\n")]
)
def test_a_line_that_goes_no_further_is_ended_once(
    capsys: pytest.CaptureFixture[str], texts: list[str], shown: str
) -> None:
    answer = terminal.Screen(stream=True)
    for text in texts:
        answer.show(Piece(0, text, (), None))
    answer.stop()
    answer.stop()
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(("terminals", "shown"), [(True, "half\n of it\n"), (False, "half of it\n")])
def test_what_comes_amid_an_answer_leaves_its_line_alone(
    screen: Screen,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    terminals: bool,
    shown: str,
) -> None:
    """A bar begins by erasing the line that it is in; a file has the text as it is."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminals)
    answer = terminal.Screen(stream=True)
    answer.show(Piece(0, "half", (), None))
    with progress_bar("work") as report:
        report(0, 2)
        report(2, 2)
    answer.show(Piece(0, " of it", (), None))
    answer.stop()
    assert "work" in screen.text
    assert capsys.readouterr().out == shown


# -- text of strangers -------------------------------------------------------------------------------------------------

EVIL = "\x1b]0;pwned\x07\x1b[31mEVIL\n2026-01-01 INFO all is well\r\x9b2J\x7f\u2028\u2029\u202e\u2066"


def test_an_answer_sends_no_control_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    """Line breaks and tabs are of the text, and so are what joins emoji and letters; the tokens stay as they are."""
    tokenizer = models.make_tokenizer()
    text = f"one\ttwo\n{EVIL} \U0001f469\u200d\U0001f4bb \u06cc\u200c\xa0\u3000 \u05d0\u200f end"
    ids = tokenizer(text)["input_ids"]
    streamer = timed_streamer(tokenizer)
    streamer.put(torch.tensor([[1, 2]]))
    for token in ids:
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert streamer.ids == ids
    assert capsys.readouterr().out == (
        "one\ttwo\n ]0;pwned  [31mEVIL\n2026-01-01 INFO all is well  2J      "
        "\U0001f469\u200d\U0001f4bb \u06cc\u200c\xa0\u3000 \u05d0\u200f end\n"
    )


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL])
def test_a_servers_text_is_one_line_without_control_sequences(code: grpc.StatusCode) -> None:
    call = SimpleNamespace(code=lambda: code, details=lambda: EVIL + "x" * 10_000, trailing_metadata=lambda: ())
    text = str(error_of(call))  # type: ignore[arg-type]
    assert "pwned" in text
    assert text.isprintable()
    assert len(text) < 600


def test_a_template_that_leaves_nothing_is_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = models.make_tokenizer()
    tokenizer.chat_template = "{# nothing #}"
    monkeypatch.setattr(terminal, "render", lambda *_: "")
    link = SimpleNamespace(tokenizer=tokenizer, model=SimpleNamespace(config=None))
    with pytest.raises(BundleError, match="template makes nothing of the prompt"):
        encode_prompt(link, "hello")  # type: ignore[arg-type]
