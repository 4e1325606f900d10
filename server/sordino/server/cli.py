"""Commands of the provider: ``sordino split``, ``sordino serve``, ``sordino token``."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from sordino.shared.errors import AuthError, SordinoError, TransportError, UnsupportedModelError
from sordino.shared.logs import LogFormat, use_json

if TYPE_CHECKING:
    from sordino.server.app import DealerAddress
    from sordino.server.ray_engine import Fleet

console = Console(stderr=True)
DEFAULT_STATE = Path(".sordino-server")
_THREADS_A_CORE = 4


class Engine(StrEnum):
    local = "local"
    ray = "ray"


class Rounding(StrEnum):
    gptq = "gptq"
    search = "search"
    nearest = "nearest"


class Opens(StrEnum):
    hidden = "hidden"
    chosen = "token"


class KvPolicy(StrEnum):
    evict = "evict"
    spill = "spill"
    refuse = "refuse"


def add(app: typer.Typer) -> None:
    """Adds the provider's commands to the ``sordino`` command."""
    app.command()(split)
    app.command()(serve)
    app.command()(token)


def split(
    model: Annotated[str, typer.Argument(help="A transformers folder, or a .gguf file.")],
    out: Annotated[Path, typer.Argument(help="Folder to make; must not exist yet.")],
    weight_bits: Annotated[int, typer.Option(help="8, or 12 for less error and twice the server work.")] = 8,
    local_layers: Annotated[str, typer.Option(help="Layers that stay with the client, e.g. '0,29'.")] = "",
    local_modules: Annotated[str, typer.Option(help="Modules that stay with the client, e.g. 'o_proj'.")] = "",
    remote_head: Annotated[
        bool, typer.Option("--remote-head/--local-head", help="Where the output head runs.")
    ] = False,
    rounding: Annotated[Rounding, typer.Option(help="How weights are rounded.")] = Rounding.gptq,
) -> None:
    """Cut a model into a client bundle and integer matrices for the server."""
    try:
        from sordino.server.split import split_model
    except ModuleNotFoundError as error:
        raise SordinoError(
            f"splitting needs the extra: pip install 'sordino[split]' (no module {error.name})"
        ) from error
    if weight_bits not in (8, 12):
        raise UnsupportedModelError(f"--weight-bits is 8 or 12, not {weight_bits}")
    try:
        layers = tuple(int(part) for part in local_layers.split(",") if part.strip())
    except ValueError as error:
        raise UnsupportedModelError(f"--local-layers takes numbers, as in 0,29, not {local_layers!r}") from error
    modules = tuple(part.strip() for part in local_modules.split(",") if part.strip())
    report = split_model(
        model,
        out,
        weight_bits=12 if weight_bits == 12 else 8,
        local_layers=layers,
        local_modules=modules,
        remote_head=remote_head,
        rounding=rounding.value,
    )
    console = Console()
    console.print(report.table())
    console.print(f"to host it: sordino serve {escape(shlex.quote(str(out)))}", highlight=False, soft_wrap=True)


def serve(
    bundle: Annotated[Path, typer.Argument(help="Folder made by `sordino split`.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 50551,
    state: Annotated[Path, typer.Option(help="Where certificates and tokens live.")] = DEFAULT_STATE,
    hostnames: Annotated[
        str | None,
        typer.Option(help="Names that the certificate must have; a self-made one has localhost,127.0.0.1,::1 without."),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Your own certificate (PEM), with --tls-key.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS; loopback only.")] = False,
    no_auth: Annotated[bool, typer.Option("--no-auth", help="No tokens; loopback only.")] = False,
    allow_clear: Annotated[bool, typer.Option("--allow-clear", help="Answer unmasked rows too; for tests.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    threads: Annotated[
        int, typer.Option(help="CPU threads of the kernels, at most four a core, of each rank; 0 is one for each core.")
    ] = 0,
    grace: Annotated[float, typer.Option(help="Seconds for running calls after SIGTERM.")] = 10.0,
    max_message_mib: Annotated[int, typer.Option(help="Largest message.")] = 8,
    encoded_mib: Annotated[
        int, typer.Option(help="Memory for weights in the form that encrypted products need, 8 bytes a weight.", min=0)
    ] = 2048,
    kv_mib: Annotated[int, typer.Option(help="Memory for encrypted KV caches, of all sessions.", min=0)] = 4096,
    kv_session_mib: Annotated[int, typer.Option(help="The same, of one session.", min=0)] = 2048,
    kv_token_mib: Annotated[
        int | None,
        typer.Option(help="The same, of all sessions of one token; no limit by default.", min=0, show_default=False),
    ] = None,
    kv_policy: Annotated[
        KvPolicy,
        typer.Option(
            help="When that memory is full: sessions at rest lose their pages, or have them on disk, or newcomers are "
            "refused."
        ),
    ] = KvPolicy.evict,
    kv_spill: Annotated[
        Path | None,
        typer.Option(help="Folder for pages on disk, closed to others; with --kv-policy spill.", show_default=False),
    ] = None,
    kv_spill_mib: Annotated[int, typer.Option(help="Disk for them.", min=0)] = 16384,
    max_streams: Annotated[
        int, typer.Option(help="Evaluation streams at a time; each takes up to 100 MB while it works.", min=1)
    ] = 256,
    layers: Annotated[
        str, typer.Option(help="Hold these layers alone, as in 0-14: a stage of several servers, for one client.")
    ] = "",
    tensor_parallel: Annotated[
        int, typer.Option(help="Processes that share each matrix, on this machine; torchrun for several.", min=1, max=8)
    ] = 1,
    engine: Annotated[Engine, typer.Option(help="Where processes run: on this machine, or over a Ray cluster.")] = (
        Engine.local
    ),
    replicas: Annotated[int, typer.Option(help="Servers of this model; with --engine ray.", min=1)] = 1,
    ray_address: Annotated[
        str, typer.Option(help="The Ray cluster, host:port; auto is the one that this machine belongs to.")
    ] = "auto",
    dealer: Annotated[
        str | None,
        typer.Option(help="Offer profile two-party, with this dealer: grpcs://host:port.", show_default=False),
    ] = None,
    dealer_ca: Annotated[Path | None, typer.Option(help="Its ca.pem.", show_default=False)] = None,
    dealer_token_file: Annotated[
        Path | None, typer.Option(help="This server's token there.", show_default=False)
    ] = None,
    opens: Annotated[
        Opens,
        typer.Option(
            help="What profile two-party opens of a row: its hidden state, which gives the logits, or its next token "
            "alone, drawn on shares."
        ),
    ] = Opens.hidden,
    opened_rows: Annotated[
        int,
        typer.Option(
            help="Rows of a pass of profile two-party whose results a client may open; 1 is the next token's alone.",
            min=1,
            max=128,
        ),
    ] = 32,
    batching: Annotated[
        bool, typer.Option("--batching/--no-batching", help="Join what sessions wait for; for comparisons.")
    ] = True,
    metrics_port: Annotated[
        int, typer.Option(help="Port for Prometheus and for probes, by HTTP; 0 is none.", min=0, max=65535)
    ] = 0,
    metrics_host: Annotated[
        str, typer.Option(help="Its address; whoever reaches it sees figures, and the names of tokens.")
    ] = "127.0.0.1",
    log_format: Annotated[LogFormat, typer.Option(help="What the log is for: people, or machines.")] = LogFormat.text,
    port_file: Annotated[Path | None, typer.Option(help="Write the port here when ready.")] = None,
) -> None:
    """Host a split model over gRPC."""
    import torch

    from sordino.server.app import ServerConfig, work
    from sordino.server.app import serve as run
    from sordino.server.pagestore import Policy
    from sordino.server.parallel import LOCAL_RANK, RANK
    from sordino.server.service import Limits
    from sordino.shared import address
    from sordino.shared.auth import TokenFile
    from sordino.shared.files import replace
    from sordino.shared.manifest import ModelManifest
    from sordino.shared.tls import TlsFiles, make_certificates

    if log_format == LogFormat.json:
        use_json(console)
    names = None if hostnames is None else [name.strip() for name in hostnames.split(",") if name.strip()]
    if (tls_cert is None) != (tls_key is None):
        raise SordinoError("--tls-cert and --tls-key belong together")
    dealing = _dealer(dealer, dealer_ca, dealer_token_file)
    if opens is Opens.chosen and not dealing:
        raise SordinoError("--opens token belongs to --dealer: only in profile two-party is anything opened")
    if engine == Engine.ray:
        from sordino.server.ray_engine import Fleet

        if host != "127.0.0.1":
            raise SordinoError("--engine ray has each server listen on the address of its node: leave --host out")
        if insecure or no_auth:
            raise SordinoError("--engine ray has servers in a network: they need TLS and tokens")
        if port_file:
            raise SordinoError("--engine ray has no one port to write to --port-file: it prints where each server is")
        if device not in ("cpu", "cuda"):
            raise SordinoError(f"--engine ray gives each rank a device: --device cpu or cuda, not {device}")
        fleet = Fleet(
            arguments=sys.argv[1:],
            replicas=replicas,
            ranks=tensor_parallel,
            threads=threads,
            gpu=device == "cuda",
            port=port,
            metrics_port=metrics_port,
            hostnames=names or (),
            bundle=bundle,
            state=state,
            certificate=tls_cert,
            others=[path for path in (tls_key, kv_spill, dealer_ca, dealer_token_file) if path],
            grace_s=grace,
        )
        _serve_over_ray(fleet, ray_address)
        return
    if replicas > 1:
        raise SordinoError("--replicas wants a cluster, --engine ray; on one machine start so many servers")
    most = _THREADS_A_CORE * (os.cpu_count() or 1)
    if not 0 <= threads <= most:
        raise SordinoError(f"--threads is 0 to {most}, {_THREADS_A_CORE} for each core of this machine, not {threads}")
    if threads:
        torch.set_num_threads(threads)
    if port_file:
        _check_port_file(port_file)
    stage = _layers(layers)
    ranked = RANK in os.environ
    if tensor_parallel > 1 and not ranked:
        from sordino.server.launch import launch

        _check_device_count(device, tensor_parallel)
        ModelManifest.load(bundle)
        address.check(host, port)
        # All starts of the ranks listen on one port, so that clients find them again.
        launch(tensor_parallel, [*sys.argv[1:], *(() if port else ("--port", str(address.free_port(host))))], grace)
        return
    if ranked and device == "cuda":
        device = f"cuda:{os.environ[LOCAL_RANK]}"
    tls = None if insecure else TlsFiles.self_made(state)
    if tls_cert and tls_key:
        tls = TlsFiles(ca=tls_cert, certificate=tls_cert, key=tls_key)
        tls.check(names)
    tokens = None if no_auth else state / "tokens.json"
    config = ServerConfig(
        bundle=bundle,
        host=host,
        port=port,
        tls=tls,
        tokens=tokens,
        device=device,
        allow_clear=allow_clear,
        grace_s=grace,
        layers=stage,
        parallel=ranked,
        metrics_host=metrics_host,
        metrics_port=metrics_port or None,
        limits=Limits(
            max_message_bytes=max_message_mib << 20,
            max_streams=max_streams,
            max_encoded_bytes=encoded_mib << 20,
            batching=batching,
            max_opened_rows=opened_rows,
            max_page_bytes=kv_mib << 20,
            max_page_bytes_per_session=kv_session_mib << 20,
            max_page_bytes_per_identity=None if kv_token_mib is None else kv_token_mib << 20,
            kv_policy=Policy(kv_policy.value),
            kv_spill=kv_spill,
            max_spill_bytes=kv_spill_mib << 20,
        ),
        dealer=dealing,
        opens_tokens=opens is Opens.chosen,
    )
    if ranked and os.environ[RANK] != "0":
        work(config)
        return
    fingerprint = ModelManifest.load(bundle).fingerprint
    address.check(host, port)
    if metrics_port:
        address.check(metrics_host, metrics_port, "--metrics-")
    known = tokens is not None and TokenFile(tokens).check()
    # Nothing is written before all that can be refused at once was looked at.
    if tls and not tls_cert:
        make_certificates(state, names)
    if tokens and not known:
        _issue_first(tokens)

    def ready(bound: int) -> None:
        scheme = "grpcs" if tls else "grpc"
        where = f"{scheme}://{address.join(host, bound)}"
        console.print(f"serving on {escape(where)}" + ("  [bold red]protocol=clear allowed[/]" if allow_clear else ""))
        console.print(f"fingerprint {fingerprint}", highlight=False, soft_wrap=True)
        if dealing:
            console.print(
                f"profile two-party, with the dealer {escape(dealing.target)}: of the rows that are sent together, "
                f"{'next tokens' if opens is Opens.chosen else 'hidden states'} of at most {opened_rows} are opened",
                highlight=False,
                soft_wrap=True,
            )
        if tls and not tls_cert:
            here = host in ("127.0.0.1", "localhost", "::1", "[::1]")
            # Whoever listens everywhere listens there.
            name = "localhost" if here or host in ("0.0.0.0", "::", "[::]") else host  # noqa: S104
            if not here:
                console.print(f"clients elsewhere use a name in --hostnames, and a copy of {tls.ca}", soft_wrap=True)
            command = (
                f'sordino generate "Hello" --server grpcs://{address.join(name, bound)} --ca {tls.ca} '
                f"--token-file {state / 'token' if (state / 'token').exists() else 'FILE'}"
            )
            console.print(f"try: {escape(command)}", soft_wrap=True)
            if dealing:
                own_ca = " --dealer-ca FILE" if dealing.ca else ""
                command += f" --profile two-party --dealer {dealing.target}{own_ca} --dealer-token-file FILE"
                console.print(f"or, on shares: {escape(command)}", soft_wrap=True)
        if port_file:
            replace(port_file, str(bound).encode(), 0o644)

    run(config, ready=ready)


def _dealer(target: str | None, ca: Path | None, token_file: Path | None) -> DealerAddress | None:
    """
    Raises:
        SordinoError: half of it is missing, or no dealer can be reached so.
    """
    from sordino.server.app import DealerAddress
    from sordino.shared.transport import DEFAULT_MAX_MESSAGE_BYTES, authorization, open_channel

    if target is None:
        if ca or token_file:
            raise SordinoError("--dealer-ca and --dealer-token-file belong to --dealer")
        return None
    if token_file is None:
        raise SordinoError("--dealer needs --dealer-token-file: the dealer's operator gives each server a token")
    try:
        token = token_file.read_text("utf-8", "replace").strip()
    except (OSError, ValueError) as error:  # the latter of a name with a NUL
        why = getattr(error, "strerror", None) or error
        raise AuthError(f"the token file {token_file} cannot be read: {why}") from error
    try:
        authorization(token)
        open_channel(target, ca, DEFAULT_MAX_MESSAGE_BYTES).close()
    except (AuthError, TransportError) as error:
        raise type(error)(f"of the dealer: {error}") from None
    return DealerAddress(target, ca, token)


def _issue_first(tokens: Path) -> None:
    """Makes a token file, with one token in a file beside it, unless another process has done so."""
    from sordino.shared.auth import TokenFile

    tokens.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    copy = tokens.with_name("token")
    gone = copy.exists()
    if TokenFile(tokens).issue_first(copy):
        if gone:
            console.print(f"[bold red]{tokens} is gone[/]: all tokens that were given out are void", soft_wrap=True)
        console.print(f"first client token written to {copy}", soft_wrap=True)


def _serve_over_ray(fleet: Fleet, cluster: str) -> None:
    from sordino.server.ray_engine import joined, run_fleet
    from sordino.shared.auth import TokenFile

    tokens = fleet.state / "tokens.json"

    def ready(targets: Sequence[str], fingerprint: str) -> None:
        console.print(f"serving on {escape(','.join(targets))}", highlight=False, soft_wrap=True)
        console.print(f"fingerprint {fingerprint}", highlight=False, soft_wrap=True)
        if fleet.certificate is None:
            console.print(f"clients need a copy of {fleet.state / 'ca.pem'}, and a token", soft_wrap=True)

    with joined(cluster):
        if not TokenFile(tokens).check():
            _issue_first(tokens)
        run_fleet(fleet, ready)


def _layers(text: str) -> tuple[int, int] | None:
    """``first-last``, both included."""
    if not text:
        return None
    first, dash, last = text.partition("-")
    if not (first.isdecimal() and (last or first).isdecimal() and int(first) <= int(last or first)):
        raise SordinoError(f"--layers takes a range such as 0-14, not {text!r}")
    return int(first), int(last) if dash else int(first)


def _check_device_count(device: str, ranks: int) -> None:
    import torch

    if device.startswith("cuda:"):
        raise SordinoError(f"--tensor-parallel takes the devices in their order: --device cuda, not {device}")
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise SordinoError(
            f"--tensor-parallel {ranks} wants as many CUDA devices, torch finds {torch.cuda.device_count()}"
        )


def _check_port_file(path: Path) -> None:
    if path.is_dir() or not path.name:
        raise SordinoError(f"--port-file {path} is a folder: name a file")
    if not path.parent.is_dir():
        raise SordinoError(f"--port-file {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise SordinoError(f"--port-file {path}: the folder {path.parent} cannot be written")


def token(
    name: Annotated[
        str | None, typer.Argument(help="Whose token; shown in metrics, never the token itself.", show_default=False)
    ] = None,
    state: Annotated[Path, typer.Option(help="The server's state folder.")] = DEFAULT_STATE,
    days: Annotated[float | None, typer.Option(help="Valid for so many days; for ever by default.")] = None,
    show: Annotated[bool, typer.Option("--list", help="Say whose tokens there are, and until when.")] = False,
    revoke: Annotated[bool, typer.Option("--revoke", help="Take all tokens of this name away.")] = False,
) -> None:
    """Issue a client token (printed once, stored as a hash), list or revoke tokens; a running server is told."""
    from sordino.shared.auth import TokenFile, day

    file = TokenFile(state / "tokens.json")
    if show or revoke:
        if not file.check():
            raise SordinoError(f"there is no {state / 'tokens.json'}")
        if show and not revoke and name is None:
            for record in file.records():
                until = "for ever" if record.expires is None else f"until {day(record.expires)}"
                typer.echo(f"{record.name}\t{until}\tsha256 {record.sha256[:12]}")
            return
        if show or name is None:
            raise SordinoError("sordino token --list takes no name, sordino token NAME --revoke takes one")
        console.print(f"{file.revoke(name)} of {escape(name)} taken away", highlight=False)
        return
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    known = (state / "tokens.json").exists()
    typer.echo(file.issue(name or "", days=days))
    if not known:
        console.print(f"{state} is new: only a server started with this --state takes the token", soft_wrap=True)
