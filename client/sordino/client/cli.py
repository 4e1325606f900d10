"""Commands of the user: ``sordino generate``, ``provision``, ``bench`` and ``audit``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from sordino.shared.errors import AuthError, RangeError

if TYPE_CHECKING:
    from sordino.client.session import Connected

console = Console(stderr=True)

Server = Annotated[str, typer.Option(help="grpcs://host:port of the server.", envvar="SORDINO_SERVER")]
Ca = Annotated[Path | None, typer.Option(help="CA of the server's certificate (PEM).", envvar="SORDINO_CA")]
TokenFile = Annotated[Path | None, typer.Option(help="File with the token.", envvar="SORDINO_TOKEN_FILE")]
Pool = Annotated[Path | None, typer.Option(help="Folder of the mask pool; per model in your data folder by default.")]
Batch = Annotated[int, typer.Option(help="Masks (tokens) made at a time, a multiple of 64.")]
Seal = Annotated[
    bool, typer.Option("--seal", help="Ask for a passphrase that seals the pool (or set SORDINO_PASSPHRASE).")
]


def add(app: typer.Typer) -> None:
    """Adds the client's commands to the ``sordino`` command."""
    app.command()(generate)
    app.command()(provision)
    bench = typer.Typer(no_args_is_help=True, help="Measurements, side by side in one run.")
    bench.command("decode")(bench_decode)
    app.add_typer(bench, name="bench")
    audit = typer.Typer(no_args_is_help=True, help="What a server, or the wire, can see.")
    audit.command("wire")(audit_wire)
    app.add_typer(audit, name="audit")


def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; '-' reads standard input.")],
    server: Server,
    ca: Ca = None,
    token_file: TokenFile = None,
    pool: Pool = None,
    seal: Seal = False,
    batch: Batch = 2048,
    protocol: Annotated[str, typer.Option(help="masked, or clear (hides nothing; for tests).")] = "masked",
    max_new_tokens: Annotated[
        int, typer.Option(help="Longest answer; it also ends at the model's last position.", min=1)
    ] = 256,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the model's own setting.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: the prompt as it is.")] = False,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    show_ids: Annotated[bool, typer.Option("--show-ids", help="Print the prompt's token ids, here alone.")] = False,
) -> None:
    """Stream a private answer to the terminal."""
    text = sys.stdin.read() if prompt == "-" else prompt
    options: dict[str, Any] = {"ca": ca, "token_file": token_file, "pool": pool, "seal": seal, "batch": batch}
    # No batch in the background: it would be cut short, and its traffic lost, at the end of the answer.
    with connected(server, **options, protocol=protocol, low_water=0) as link:
        inputs = encode_prompt(link, text, raw=raw, system=system)
        ids = inputs["input_ids"][0].tolist()
        settings = _settings(link, temperature, max_new_tokens, len(ids))
        console.print(_effective(link, settings), style="dim", highlight=False, markup=False)
        if show_ids:
            console.print(f"prompt ids: {ids}", style="dim", highlight=False, markup=False)
        before = link.session.traffic.up.get("online", 0), link.session.traffic.down.get("online", 0)
        streamer = timed_streamer(link.tokenizer)
        start = time.perf_counter()
        link.model.generate(**inputs, **settings, streamer=streamer)
        times = streamer.times
        after = link.session.traffic.up["online"], link.session.traffic.down["online"]
        count = len(times)
        rate = (count - 1) / (times[-1] - times[0]) if count > 1 else float("nan")
        masks = link.session.masks_left
        console.print(
            f"[dim]{count} tokens · first after {times[0] - start:.2f} s · {rate:.1f} tokens/s · "
            f"{(after[0] - before[0]) / 1e6:.1f} MB up · {(after[1] - before[1]) / 1e6:.1f} MB down"
            + (f" · {masks} masks left" if masks is not None else " · [red]nothing was hidden[/]")
            + "[/]",
            highlight=False,
        )


def provision(
    server: Server,
    ca: Ca = None,
    token_file: TokenFile = None,
    pool: Pool = None,
    seal: Seal = False,
    batch: Batch = 2048,
) -> None:
    """Make masks ahead of need."""
    from sordino.client.provision import plan_batch
    from sordino.client.session import describe_plan

    options: dict[str, Any] = {"ca": ca, "token_file": token_file, "pool": pool, "seal": seal, "batch": batch}
    with connected(server, **options, provision=False) as link:
        console.print(describe_plan(plan_batch(link.session.manifest, batch, checks=0)), highlight=False)
        link.session.provision()
        console.print(f"{link.session.masks_left} masks in the pool")


def bench_decode(
    bundle: Annotated[Path, typer.Option(help="Folder made by `sordino split`.")] = Path(".demo/bundle"),
    model: Annotated[Path | None, typer.Option(help="The original model, for the reference.")] = None,
    protocols: Annotated[str, typer.Option(help="Comma-separated: masked, clear.")] = "masked,clear",
    reference: Annotated[str, typer.Option(help="transformers, or none.")] = "transformers",
    tokens: Annotated[int, typer.Option(help="Tokens per answer.", min=2)] = 64,
    repeats: Annotated[int, typer.Option(help="Answers per protocol, interleaved.", min=1)] = 3,
    batch: Batch = 2048,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Decode speed of each protocol and of plain transformers, as ratios in one run (two processes, loopback, TLS)."""
    from sordino.client.bench import run_decode

    run_decode(
        bundle,
        model=model,
        protocols=[name.strip() for name in protocols.split(",") if name.strip()],
        reference=reference,
        tokens=tokens,
        repeats=repeats,
        batch=batch,
        json_path=json_path,
        console=console,
    )


def audit_wire(
    bundle: Annotated[Path, typer.Option(help="Folder made by `sordino split`.")] = Path(".demo/bundle"),
    tokens: Annotated[int, typer.Option(help="Tokens per answer.", min=2)] = 32,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
) -> None:
    """Record the wire between client and server, and test that it looks like noise. Exit code 1 when it does not."""
    from sordino.client.audit import run_audit

    report = run_audit(bundle, tokens=tokens, json_path=json_path, console=console)
    if not report["passed"]:
        raise typer.Exit(1)


# -- pieces shared with the benchmark and the demo -------------------------------------------------------------------


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

    try:
        token = token_file.read_text().strip() if token_file else os.environ.get("SORDINO_TOKEN")
    except OSError as error:
        raise AuthError(f"the token file cannot be read: {error.strerror}") from error
    passphrase = None
    if seal:
        passphrase = os.environ.get("SORDINO_PASSPHRASE") or typer.prompt(
            "Passphrase of the pool", hide_input=True, err=True
        )
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    downloads = Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=console, transient=True
    )
    with _on_demand(bars, "provisioning groups") as on_provision:
        with _on_demand(downloads, "client bundle") as on_bundle:
            link = connect(
                server,
                token=token,
                ca=ca,
                pool=pool,
                passphrase=passphrase,
                batch=batch,
                protocol=cast(Literal["masked", "clear"], protocol),
                on_bundle=on_bundle,
                on_provision=on_provision,
                on_plan=lambda text: console.print(text, highlight=False),
                on_notice=lambda text: console.print(f"[yellow]{text}[/]"),
                **more,
            )
        with link.session:
            yield link


@contextmanager
def _on_demand(bars: Progress, title: str) -> Iterator[Any]:
    """A progress callback whose bar appears at the first call and goes when the work is done."""
    task = None

    def update(done: int, total: int) -> None:
        nonlocal task
        if task is None or bars.finished:
            bars.start()
            if task is not None:
                bars.remove_task(task)
            task = bars.add_task(title, total=total)
        bars.update(task, completed=done, total=total)
        if done >= total:
            bars.stop()

    try:
        yield update
    finally:
        bars.stop()


def encode_prompt(link: Connected, text: str, *, raw: bool = False, system: str | None = None) -> dict[str, Any]:
    """Token ids of a prompt, through the chat template unless ``raw``; one beginning-of-text token at most either way.

    Raises:
        RangeError: nothing to ask, messages that the template does not take, or a prompt longer than the model's
            positions.
    """
    from jinja2 import TemplateError

    tokenizer = link.tokenizer
    if not text.strip():
        raise RangeError("the prompt is empty: there is nothing to send")
    if raw or tokenizer.chat_template is None:
        # A prompt that was rendered elsewhere brings its own.
        own = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
        encoded = tokenizer(text, return_tensors="pt", add_special_tokens=not own)
    else:
        messages = [{"role": "system", "content": system}] if system else []
        try:
            encoded = tokenizer.apply_chat_template(
                [*messages, {"role": "user", "content": text}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
        except TemplateError:
            raise RangeError(
                "the model's chat template refuses these messages: leave out --system, or use --raw"
            ) from None
    limit = getattr(link.model.config, "max_position_embeddings", None)
    length = encoded["input_ids"].shape[1]
    if limit and length >= limit:
        raise RangeError(f"the prompt has {length} tokens, the model takes {limit} with the answer: shorten it")
    return {key: encoded[key] for key in ("input_ids", "attention_mask")}


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

        def end(self) -> None:
            if not silent:
                super().end()

    return Timed()


# What a sampled answer depends on, with the values that transformers takes where nobody says otherwise.
_SAMPLING: Final = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
_ONLY_SAMPLING: Final = {*_SAMPLING, "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
# What a generation_config.json may say without changing which tokens are chosen.
_SILENT: Final = {"bos_token_id", "eos_token_id", "pad_token_id", "do_sample", "max_length", "transformers_version",
                  "use_cache", "output_attentions", "output_hidden_states", "_from_model_config"}  # fmt: skip


def _settings(link: Connected, temperature: float | None, max_new_tokens: int, prompt_tokens: int) -> dict[str, Any]:
    """Arguments of ``generate()``: what the user said, then what the model's repository says."""
    config = link.model.generation_config
    if temperature is not None and not 0 <= temperature < float("inf"):
        raise RangeError(f"temperature must be 0 or more, not {temperature}")
    limit = getattr(link.model.config, "max_position_embeddings", None)
    room = min(max_new_tokens, limit - prompt_tokens) if limit else max_new_tokens
    settings: dict[str, Any] = {"max_new_tokens": room}
    settings["do_sample"] = bool(config.do_sample) if temperature is None else temperature > 0
    for name, default in _SAMPLING.items():
        own = getattr(config, name, None)
        # Where nothing is drawn, the repository's values are put out of action, or transformers warns about them.
        settings[name] = own if settings["do_sample"] and own is not None else default
    if temperature:
        settings["temperature"] = temperature
    return settings


def _effective(link: Connected, settings: dict[str, Any]) -> str:
    """One line on how tokens are chosen, whoever asked for it."""
    values = link.model.generation_config.to_diff_dict() | settings
    hidden = _SILENT if settings["do_sample"] else _SILENT | _ONLY_SAMPLING
    shown = ", ".join(f"{name}={value}" for name, value in values.items() if name not in hidden)
    return f"{'sampled' if settings['do_sample'] else 'greedy'}: {shown}"


def two_columns(title: str, rows: list[tuple[str, str]]) -> Table:
    """A small table of names and values."""
    table = Table(title=title, show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    return table
