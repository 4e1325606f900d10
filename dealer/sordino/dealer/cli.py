"""The dealer's command, ``sordino deal``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from sordino.shared.errors import SordinoError
from sordino.shared.logs import LogFormat, use_json

if TYPE_CHECKING:
    from sordino.dealer.service import Tokens

console = Console(stderr=True)
DEFAULT_STATE = Path(".sordino-dealer")


def add(app: typer.Typer) -> None:
    """Adds the dealer's command to the ``sordino`` command."""
    app.command()(deal)


def deal(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 50552,
    state: Annotated[Path, typer.Option(help="Where certificates and tokens live.")] = DEFAULT_STATE,
    hostnames: Annotated[
        str | None,
        typer.Option(help="Names that the certificate must have; a self-made one has localhost,127.0.0.1,::1 without."),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Your own certificate (PEM), with --tls-key.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS; loopback only.")] = False,
    threads: Annotated[int, typer.Option(help="Threads that make material.", min=1, max=256)] = 2,
    grace: Annotated[float, typer.Option(help="Seconds for running passes after SIGTERM.", min=0, max=86_400)] = 10.0,
    max_sessions: Annotated[int, typer.Option(help="Sessions at a time.", min=1)] = 256,
    max_sessions_each: Annotated[int, typer.Option(help="The same, of one client's token.", min=1)] = 16,
    held_mib: Annotated[
        int, typer.Option(help="Memory for material that a party has still to fetch, of all sessions.", min=1)
    ] = 4096,
    held_token_mib: Annotated[
        int | None, typer.Option(help="The same, of one client's token; a quarter of it without.", min=1)
    ] = None,
    held_session_mib: Annotated[int, typer.Option(help="The same, of one session.", min=1)] = 512,
    idle: Annotated[float, typer.Option(help="Seconds after which an unused session ends.", min=1)] = 900.0,
    away: Annotated[
        float, typer.Option(help="Seconds after which a session ends that no party has a stream of.", min=1)
    ] = 60.0,
    wait: Annotated[
        float, typer.Option(help="Seconds that a party waits for room until the other fetches its material.", min=0)
    ] = 30.0,
    metrics_port: Annotated[
        int, typer.Option(help="Port for Prometheus and for probes, by HTTP; 0 is none.", min=0, max=65535)
    ] = 0,
    metrics_host: Annotated[
        str, typer.Option(help="Its address; whoever reaches it sees figures, and the names of tokens.")
    ] = "127.0.0.1",
    log_format: Annotated[LogFormat, typer.Option(help="What the log is for: people, or machines.")] = LogFormat.text,
    port_file: Annotated[Path | None, typer.Option(help="Write the port here when ready.")] = None,
) -> None:
    """Make correlated randomness for profile two-party: to be run by neither its clients nor its servers."""
    from sordino.dealer.app import DealerConfig, run
    from sordino.dealer.service import Tokens
    from sordino.dealer.sessions import Limits
    from sordino.shared import address
    from sordino.shared.files import replace
    from sordino.shared.tls import TlsFiles, make_certificates

    if log_format == LogFormat.json:
        use_json(console)
    if (tls_cert is None) != (tls_key is None):
        raise SordinoError("--tls-cert and --tls-key belong together")
    names = None if hostnames is None else [name.strip() for name in hostnames.split(",") if name.strip()]
    tls = None if insecure else TlsFiles.self_made(state)
    if tls_cert and tls_key:
        tls = TlsFiles(ca=tls_cert, certificate=tls_cert, key=tls_key)
        tls.check(names)
    config = DealerConfig(
        state=state,
        host=host,
        port=port,
        tls=tls,
        threads=threads,
        grace_s=grace,
        metrics_host=metrics_host,
        metrics_port=metrics_port or None,
        limits=Limits(
            sessions=max_sessions,
            sessions_each=max_sessions_each,
            held_bytes=held_mib << 20,
            held_bytes_token=(held_mib << 20) // 4 if held_token_mib is None else held_token_mib << 20,
            held_bytes_each=held_session_mib << 20,
            idle_s=idle,
            away_s=away,
            wait_s=wait,
        ),
    )
    address.check(host, port)
    if metrics_port:
        address.check(metrics_host, metrics_port, "--metrics-")
    tokens = Tokens(state)
    known = [file.check() for file in tokens.files]
    # Nothing is written before all that can be refused at once was looked at.
    if tls and not tls_cert:
        make_certificates(state, names)
    if not all(known):
        _issue_first(tokens)

    def ready(bound: int) -> None:
        where = f"{'grpcs' if tls else 'grpc'}://{address.join(host, bound)}"
        console.print(f"dealing on {escape(where)}", highlight=False, soft_wrap=True)
        if tls and not tls_cert:
            console.print(f"clients and servers need a copy of {escape(str(tls.ca))}", soft_wrap=True)
        if port_file:
            replace(port_file, str(bound).encode(), 0o644)

    run(config, ready=ready)


def _issue_first(tokens: Tokens) -> None:
    """Makes each party's token file, with one token in a file beside it, unless it is there."""
    for folder, file in zip(tokens.folders, tokens.files, strict=True):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if file.issue_first(folder / "token"):
            console.print(
                f"first token of a {folder.name} written to {escape(str(folder / 'token'))}; more: "
                f"sordino token NAME --state {escape(str(folder))}",
                soft_wrap=True,
            )
