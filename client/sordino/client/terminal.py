"""A connection at the terminal: progress bars, the prompt's tokens, a streamer that keeps time."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from sordino.client.chat import render
from sordino.shared.errors import AuthError, BundleError, PoolSealedError, RangeError, TransportError, printable

if TYPE_CHECKING:
    from sordino.client.answers import Answers, Piece
    from sordino.client.session import Connected, ProtocolName
    from sordino.client.twoparty.connect import TwoPartyConnected

console = Console(stderr=True)
_screen = threading.Lock()  # of the one live display that a terminal has


class _Output:
    """Standard output, with a line of an answer that may go on."""

    def __init__(self) -> None:
        self._amid = False

    def write(self, text: str) -> None:
        if text:
            self._amid = not text.endswith("\n")
        # The weights are a stranger's, and a terminal obeys control sequences.
        sys.stdout.write(printable(text, keep="\n\t"))
        sys.stdout.flush()

    def end_line(self) -> None:
        if self._amid:
            self.write("\n")

    def make_room(self) -> None:
        """For what is shown beside it, which else would overwrite the line at a terminal."""
        if self._amid and console.is_terminal and sys.stdout.isatty():
            self.end_line()


_output: Final = _Output()


def _tell(text: str) -> None:
    _output.make_room()
    console.print(text, highlight=False, soft_wrap=True)


@contextmanager
def connected(
    server: str,
    *,
    ca: Path | None,
    token_file: Path | None,
    pool: Path | None = None,
    seal: bool = False,
    batch: int = 2048,
    protocol: str = "masked",
    **more: Any,
) -> Iterator[Connected]:
    """:func:`sordino.client.connect` with progress bars; closes the session at the end."""
    from sordino.client.session import connect

    token = _token(token_file, "SORDINO_TOKEN")
    passphrase = None
    if seal and protocol not in ("masked", "auto"):
        raise PoolSealedError(f"--seal is for a pool of masks, and protocol {protocol} has none: leave it out")
    if seal:
        passphrase = os.environ.get("SORDINO_PASSPHRASE") or typer.prompt(
            "Passphrase of the pool", hide_input=True, err=True
        )
    with progress_bar("provisioning groups") as on_provision:
        with progress_bar("client bundle", DownloadColumn()) as on_bundle:
            link = connect(
                server,
                token=token,
                ca=ca,
                pool=pool,
                passphrase=passphrase,
                batch=batch,
                protocol=cast("ProtocolName", protocol),
                on_bundle=on_bundle,
                on_provision=on_provision,
                on_plan=_tell,
                on_notice=lambda text: _tell(f"[yellow]{escape(text)}[/]"),
                **more,
            )
        with link.session:
            yield link


@contextmanager
def shared(
    server: str,
    *,
    ca: Path | None,
    token_file: Path | None,
    dealer: str | None,
    dealer_ca: Path | None,
    dealer_token_file: Path | None,
    **more: Any,
) -> Iterator[TwoPartyConnected]:
    """:func:`sordino.client.twoparty.connect.connect` with progress bars; closes the session at the end."""
    token, dealer_token = _token(token_file, "SORDINO_TOKEN"), _token(dealer_token_file, "SORDINO_DEALER_TOKEN")
    if dealer is None or dealer_token is None:
        given = {"--dealer": dealer, "--dealer-token-file (or SORDINO_DEALER_TOKEN)": dealer_token}
        missing = " and ".join(name for name, value in given.items() if value is None)
        raise AuthError(f"profile two-party needs a dealer that both sides trust: {missing} is missing")
    _check_dealer(dealer, dealer_ca)
    from sordino.client.twoparty.connect import connect  # takes seconds

    with progress_bar("rows ahead, matrix") as on_provision:
        with progress_bar("client bundle", DownloadColumn()) as on_bundle:
            link = connect(
                server,
                token=token,
                ca=ca,
                dealer=dealer,
                dealer_ca=dealer_ca,
                dealer_token=dealer_token,
                on_bundle=on_bundle,
                on_plan=_tell,
                on_provision=on_provision,
                **more,
            )
        with link.session:
            yield link


def _check_dealer(target: str, ca: Path | None) -> None:
    """
    Raises:
        TransportError: no dealer can be reached so: a malformed address, or a CA file that is none.
    """
    from sordino.shared.transport import DEFAULT_MAX_MESSAGE_BYTES, open_channel

    try:
        open_channel(target, ca, DEFAULT_MAX_MESSAGE_BYTES).close()
    except TransportError as error:
        raise TransportError(f"of the dealer: {error}") from None


def _token(file: Path | None, variable: str) -> str | None:
    """From the file, if there is one, or else from the environment."""
    try:
        # Bytes that are no text become characters that no token has.
        return file.read_text("utf-8", "replace").strip() if file else os.environ.get(variable) or None
    except (OSError, ValueError) as error:  # the latter of a name with a NUL
        why = getattr(error, "strerror", None) or error
        raise AuthError(f"the token file {file} cannot be read: {why}") from error


@contextmanager
def progress_bar(title: str, *columns: ProgressColumn) -> Iterator[Callable[[int, int], None]]:
    """A progress callback, for any thread, whose bar appears at the first call and goes when the work is done.

    Where another bar is on the screen, this one stays away; in a file there are none.
    """
    columns = columns or (MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    lock = threading.Lock()
    bars: Progress | None = None

    def update(done: int, total: int) -> None:
        nonlocal bars
        with lock:
            if bars is None:
                if not console.is_terminal or done >= total or not _screen.acquire(blocking=False):
                    return
                bars = Progress(
                    TextColumn("{task.description}"), BarColumn(), *columns, console=console, transient=True
                )
                bars.add_task(title)
                _output.make_room()
                bars.start()
            bars.update(bars.task_ids[0], completed=done, total=total)
            if done >= total:
                stop()

    def stop() -> None:
        nonlocal bars
        if bars is not None:
            try:
                bars.stop()
            finally:
                bars = None
                _screen.release()

    try:
        yield update
    finally:
        with lock:
            stop()


def check_text(what: str, text: str) -> None:
    """Refuses bytes that were no text: the shell hands them on, and Python keeps them as lone surrogates.

    Raises:
        RangeError: there are some.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RangeError(f"{what} has bytes that are not UTF-8: nothing was sent") from None


def encode_prompt(link: Connected, text: str, *, raw: bool = False, system: str | None = None) -> dict[str, Any]:
    """Token ids of a prompt, through the chat template unless ``raw``; one beginning-of-text token at most either way.

    Raises:
        RangeError: nothing to ask, messages that the template does not take, or a prompt longer than the model's
            positions.
        BundleError: the template fails, takes far too long, or leaves nothing to send.
    """
    tokenizer = link.tokenizer
    check_text("the prompt", text)
    check_text("the system message", system or "")
    if not text.strip():
        raise RangeError("the prompt is empty: there is nothing to send")
    if raw or tokenizer.chat_template is None:
        # A prompt that was rendered elsewhere brings its own.
        own = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
        encoded = tokenizer(text, return_tensors="pt", add_special_tokens=not own)
    else:
        messages = [{"role": "system", "content": system}] if system else []
        rendered = render(tokenizer, [*messages, {"role": "user", "content": text}])
        encoded = tokenizer(rendered, return_tensors="pt", add_special_tokens=False)
        if not encoded["input_ids"].numel():
            raise BundleError(
                "the model's chat template makes nothing of the prompt: use --raw, or ask the provider for a sound "
                "bundle"
            )
    limit = getattr(link.model.config, "max_position_embeddings", None)
    length = encoded["input_ids"].shape[1]
    if limit and length >= limit:
        raise RangeError(f"the prompt has {length} tokens, the model takes {limit} with the answer: shorten it")
    return {key: encoded[key] for key in ("input_ids", "attention_mask")}


class Screen:
    """Prints an answer as it comes, to standard output, and keeps time.

    Args:
        stream: False prints at the end: several answers, or one that is not known before.
    """

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream
        self._start = time.perf_counter()
        self._times: list[float] = []
        self._tokens = 0

    def show(self, piece: Piece) -> None:
        """Whatever follows the first token of a pass came with it."""
        self._times += [time.perf_counter()] * len(piece.tokens)
        if self._stream:
            _output.write(piece.text)

    def stop(self) -> None:
        """For an answer that goes no further: what is said of it stands in a line of its own."""
        _output.end_line()

    def end(self, answers: Answers) -> None:
        """The rest, once all is there."""
        self._tokens = sum(len(answer.tokens) for answer in answers.answers)
        if self._stream:
            _output.write("\n")
            return
        for number, answer in enumerate(answers.answers, 1):
            console.print(f"answer {number} of {len(answers.answers)}", style="dim", highlight=False)
            _output.write(answer.text + "\n")

    def summary(self) -> str:
        """One line: tokens, time to the first, and speed after it."""
        times = self._times or [time.perf_counter()]
        seconds = times[-1] - times[0]
        rate = (len(times) - 1) / seconds if seconds > 0 else float("nan")
        shown = f" · {rate:.1f} tokens/s" if len(times) > 1 else ""
        return f"{self._tokens} tokens · first after {times[0] - self._start:.2f} s{shown}"


def timed_streamer(tokenizer: Any, *, silent: bool = False, on_first: Callable[[], None] | None = None) -> Any:
    """A transformers TextStreamer that notes when each token came (``times``) and which (``ids``)."""
    from transformers import TextStreamer

    class Timed(TextStreamer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.times: list[float] = []
            self.ids: list[int] = []
            self._prompt_seen = False

        def put(self, value: Any) -> None:
            if self._prompt_seen:
                if on_first and not self.times:
                    on_first()
                self.times.append(time.perf_counter())
                self.ids.extend(value.reshape(-1).tolist())
            self._prompt_seen = True
            if not silent:
                super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            # The weights are a stranger's, and a terminal obeys control sequences.
            super().on_finalized_text(printable(text, keep="\n\t"), stream_end)

        def end(self) -> None:
            if not silent:
                super().end()

    return Timed()
