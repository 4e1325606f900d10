"""Commands of the user: ``sordino generate``, ``provision``, ``batch``, ``gateway``, ``bench`` and ``audit``."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from sordino.client.options import Options
from sordino.client.terminal import Screen, check_text, connected, console, encode_prompt, shared
from sordino.shared.errors import RangeError, SordinoError, printable

if TYPE_CHECKING:
    from sordino.client.guide import GuideSpec
    from sordino.client.options import Speculation
    from sordino.client.session import Connected

_CHOICE: Final = "How tokens are chosen"
_ROWS: Final = "How many rows travel, and what that shows"
_SHARES: Final = "Profile two-party"
_MOST_AHEAD: Final = 4096  # sordino.client.twoparty.connect takes seconds to import
# Options of `sordino generate` that one profile has, and not the other.
_OF_PROFILE: Final = {
    "client-aided": ("pool", "seal", "batch", "protocol", "attention"),
    "two-party": ("dealer", "dealer_ca", "dealer_token_file", "ahead"),
}
Fingerprint = Annotated[
    str | None, typer.Option(help="Refuse a server with any other split; `sordino serve` and `split` print it.")
]
Server = Annotated[
    str,
    typer.Option(
        help="grpcs://host:port of the server; several of one model with commas between them.", envvar="SORDINO_SERVER"
    ),
]
Ca = Annotated[Path | None, typer.Option(help="CA of the server's certificate (PEM).", envvar="SORDINO_CA")]
TokenFile = Annotated[
    Path | None, typer.Option(help="File with the token; or set SORDINO_TOKEN to it.", envvar="SORDINO_TOKEN_FILE")
]
Pool = Annotated[Path | None, typer.Option(help="Folder of the mask pool; per model in your data folder by default.")]
Batch = Annotated[int, typer.Option(help="Masks (tokens) made at a time, a multiple of 64.")]
Seal = Annotated[
    bool, typer.Option("--seal", help="Ask for a passphrase that seals the pool (or set SORDINO_PASSPHRASE).")
]
ProtocolOption = Annotated[str, typer.Option(help="masked, auto (starts at once), rlwe, clear (for tests).")]
AttentionOption = Annotated[
    str, typer.Option(help="local, or rlwe: full pages of the KV cache go to the server, encrypted.")
]


def add(app: typer.Typer) -> None:
    """Adds the client's commands to the ``sordino`` command."""
    app.command()(generate)
    app.command()(provision)
    app.command("batch")(answer_batch)
    app.command()(gateway)
    bench = typer.Typer(no_args_is_help=True, help="Measurements, side by side in one run.")
    bench.command("decode")(bench_decode)
    bench.command("linear")(bench_linear)
    bench.command("serve")(bench_serve)
    bench.command("block")(bench_block)
    app.add_typer(bench, name="bench")
    audit = typer.Typer(no_args_is_help=True, help="What a server, or the wire, can see.")
    audit.command("wire")(audit_wire)
    app.add_typer(audit, name="audit")


def generate(
    context: typer.Context,
    prompt: Annotated[
        str, typer.Argument(help="What to ask. All users of this machine can see it; '-' reads standard input.")
    ],
    server: Server,
    ca: Ca = None,
    token_file: TokenFile = None,
    pool: Pool = None,
    seal: Seal = False,
    batch: Batch = 2048,
    fingerprint: Fingerprint = None,
    protocol: ProtocolOption = "masked",
    attention: AttentionOption = "local",
    wait: Annotated[float, typer.Option(help="Seconds that the server may be away.", min=0)] = 60,
    max_new_tokens: Annotated[
        int, typer.Option(help="Longest answer; it also ends at the model's last position.", min=1)
    ] = 256,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the model's own setting.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: the prompt as it is.")] = False,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    show_ids: Annotated[bool, typer.Option("--show-ids", help="Print the prompt's token ids, here alone.")] = False,
    top_k: Annotated[int | None, typer.Option(help="Draw from the likeliest k.", rich_help_panel=_CHOICE)] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the top p.", rich_help_panel=_CHOICE)] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Of the likeliest's probability, at least.", rich_help_panel=_CHOICE)
    ] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1.", rich_help_panel=_CHOICE)] = None,
    seed: Annotated[int | None, typer.Option(help="The same tokens each time.", rich_help_panel=_CHOICE)] = None,
    beams: Annotated[int, typer.Option(help="Width of a beam search.", rich_help_panel=_CHOICE)] = 1,
    n: Annotated[int, typer.Option("--answers", help="Answers to the prompt.", rich_help_panel=_CHOICE)] = 1,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.", rich_help_panel=_CHOICE)
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="File with a JSON schema that the answer matches.", rich_help_panel=_CHOICE)
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="Expression that the answer matches.", rich_help_panel=_CHOICE)
    ] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="One of the possible answers; may be repeated.", rich_help_panel=_CHOICE)
    ] = None,
    grammar: Annotated[
        Path | None, typer.Option(help="File with a grammar (EBNF) that the answer matches.", rich_help_panel=_CHOICE)
    ] = None,
    engine: Annotated[
        str,
        typer.Option(help="xgrammar, llguidance, outlines, lm-format-enforcer.", rich_help_panel=_CHOICE),
    ] = "xgrammar",
    speculate: Annotated[
        str, typer.Option(help="off, ngram, draft, mixed: several tokens in a round.", rich_help_panel=_ROWS)
    ] = "off",
    draft_model: Annotated[
        Path | None, typer.Option(help="Folder of a small model with the same tokens.", rich_help_panel=_ROWS)
    ] = None,
    draft_tokens: Annotated[
        int | None, typer.Option(help="Most drafts in a round; default: by measurement.", rich_help_panel=_ROWS)
    ] = None,
    fixed_drafts: Annotated[
        bool, typer.Option("--fixed-drafts", help="As many rows in every round.", rich_help_panel=_ROWS)
    ] = False,
    pad_prompt: Annotated[
        int, typer.Option(help="Make the prompt's rows a multiple of this.", rich_help_panel=_ROWS)
    ] = 1,
    fixed_length: Annotated[
        bool, typer.Option("--fixed-length", help="Go on to --max-new-tokens, unseen.", rich_help_panel=_ROWS)
    ] = False,
    profile: Annotated[
        str,
        typer.Option(help="client-aided, or two-party: neither side sees an activation.", rich_help_panel=_SHARES),
    ] = "client-aided",
    dealer: Annotated[
        str | None,
        typer.Option(help="grpcs://host:port of the dealer.", envvar="SORDINO_DEALER", rich_help_panel=_SHARES),
    ] = None,
    dealer_ca: Annotated[
        Path | None, typer.Option(help="Its ca.pem.", envvar="SORDINO_DEALER_CA", rich_help_panel=_SHARES)
    ] = None,
    dealer_token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with your token there; or set SORDINO_DEALER_TOKEN to it.",
            envvar="SORDINO_DEALER_TOKEN_FILE",
            rich_help_panel=_SHARES,
        ),
    ] = None,
    ahead: Annotated[
        int,
        typer.Option(
            help="Rows for which products are made before the answer.",
            min=0,
            max=_MOST_AHEAD,
            rich_help_panel=_SHARES,
        ),
    ] = 64,
) -> None:
    """Stream a private answer to the terminal."""
    _check_profile(context, profile)
    text = _standard_input() if prompt == "-" else prompt
    check_text("the prompt", text)
    check_text("--system", system or "")
    options = Options(
        max_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        beams=beams,
        n=n,
        stop=tuple(stop or ()),
        guide=_guide(engine, json_schema=json_schema, regex=regex, choice=choice, grammar=grammar),
        speculate=cast("Speculation", speculate),
        draft_tokens=draft_tokens,
        fixed_drafts=fixed_drafts,
        pad_prompt=pad_prompt,
        fixed_length=fixed_length,
    )
    how: dict[str, Any] = {"ca": ca, "token_file": token_file, "fingerprint": fingerprint, "retry_s": wait}
    if profile == "two-party":
        how |= {"dealer": dealer, "dealer_ca": dealer_ca, "dealer_token_file": dealer_token_file, "ahead": ahead}
        protocol = profile
    else:
        # No batch in the background: it would be cut short, and its traffic lost, at the end of the answer.
        how |= {"pool": pool, "seal": seal, "batch": batch, "low_water": 0, "refill": protocol != "auto"}
        how |= {"protocol": protocol, "attention": attention}
    opened: AbstractContextManager[Any] = (shared if profile == "two-party" else connected)(server, **how)
    with opened as link:
        from sordino.client.answers import Generation
        from sordino.client.speculate import load_draft_model

        inputs = encode_prompt(link, text, raw=raw, system=system)
        screen = Screen(stream=n == 1 and beams == 1)
        draft = load_draft_model(draft_model) if draft_model else None
        generation = Generation(link, inputs, options, draft_model=draft, on_piece=screen.show)
        effective = _effective(link, generation.settings, options)
        console.print(effective, style="dim", highlight=False, markup=False, soft_wrap=True)
        if show_ids:
            ids = inputs["input_ids"][0].tolist()
            console.print(f"prompt ids: {ids}", style="dim", highlight=False, markup=False, soft_wrap=True)
        before = _carried(link)
        try:
            answers = generation.run()
        except BaseException:  # Ctrl-C, too
            screen.stop()
            raise
        screen.end(answers)
        after = _carried(link)
        masks = link.session.masks_left
        console.print(
            f"[dim]{screen.summary()} · {(after[0] - before[0]) / 1e6:.1f} MB up · "
            f"{(after[1] - before[1]) / 1e6:.1f} MB down"
            + (f" · {masks} masks left" if masks is not None and protocol == "masked" else "")
            + (f" · {masks} rows ahead" if protocol == "two-party" else "")
            + (
                " · masks made just in time (`sordino provision` makes them ahead)"
                if protocol == "auto" and not masks
                else ""
            )
            + (" · [red]nothing was hidden[/]" if protocol == "clear" else "")
            + "[/]",
            highlight=False,
            soft_wrap=True,
        )
        if (counts := answers.speculation) and counts.drafted:
            console.print(
                f"[dim]{counts.passes} rounds · {counts.drafted} drafts, {counts.accepted} right · {counts.rows} rows "
                f"of masks[/]",
                highlight=False,
            )


def _check_profile(context: typer.Context, profile: str) -> None:
    """
    Raises:
        RangeError: there is no such profile, or an option was given that means nothing in it. What the environment says
            stands there for other calls, too.
    """
    if profile not in _OF_PROFILE:
        raise RangeError(f"--profile is client-aided or two-party, not {profile}")
    for other, names in _OF_PROFILE.items():
        given = [
            f"--{name.replace('_', '-')}"
            for name in names
            if other != profile and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
        ]
        if given:
            raise RangeError(f"profile {profile} takes no {', '.join(given)}: leave out, or ask for --profile {other}")


def _guide(engine: str, **said: Any) -> GuideSpec | None:
    """What an answer must match, by the one of the options that was given."""
    given = {name: value for name, value in said.items() if value}
    if not given:
        return None
    if len(given) > 1:
        raise RangeError(f"an answer matches one of --{', --'.join(given).replace('_', '-')}, not all")
    from sordino.client.guide import GuideSpec

    for kind, value in given.items():
        if not isinstance(value, Path):
            return GuideSpec(kind=cast("Any", kind), value=value, engine=cast("Any", engine))
        try:
            text = value.read_text("utf-8")
        except (OSError, ValueError) as error:  # the latter of bytes that are not UTF-8, or a name with a NUL
            why = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise RangeError(f"--{kind.replace('_', '-')} {value} cannot be read: {why}") from None
        return GuideSpec(kind=cast("Any", kind), value=text, engine=cast("Any", engine))
    return None


def _standard_input() -> str:
    if sys.stdin is None:  # closed before the start
        raise RangeError("the prompt should come from standard input, which is closed")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise RangeError("the prompt has bytes that are not UTF-8: nothing was sent") from None


def _carried(link: Connected) -> tuple[int, int]:
    """Bytes up and down so far, but for the bundle: of products, of attention, and of masks made meanwhile."""
    traffic = link.session.traffic
    up, down = (sum(way.values()) - way.get("bundle", 0) for way in (traffic.up, traffic.down))
    return up, down


def provision(
    server: Server,
    ca: Ca = None,
    token_file: TokenFile = None,
    pool: Pool = None,
    seal: Seal = False,
    batch: Batch = 2048,
    fingerprint: Fingerprint = None,
) -> None:
    """Make masks ahead of need."""
    from sordino.client.provision import plan_batch
    from sordino.client.session import describe_plan

    options: dict[str, Any] = {"ca": ca, "token_file": token_file, "pool": pool, "seal": seal, "batch": batch}
    with connected(server, **options, fingerprint=fingerprint, provision=False) as link:
        console.print(describe_plan(plan_batch(link.session.manifest, batch, checks=0)), highlight=False)
        link.session.provision()
        console.print(f"{link.session.masks_left} masks in the pool")


def answer_batch(
    prompts: Annotated[
        Path, typer.Argument(help="File of JSON lines, each with a prompt or messages, perhaps an id, and options.")
    ],
    out: Annotated[Path, typer.Option(help="File of answers, as JSON lines; where it has some, the others follow.")],
    server: Server,
    ca: Ca = None,
    token_file: TokenFile = None,
    pool: Pool = None,
    seal: Seal = False,
    batch: Batch = 2048,
    fingerprint: Fingerprint = None,
    protocol: ProtocolOption = "masked",
    attention: AttentionOption = "local",
    rows: Annotated[
        int, typer.Option("--batch-rows", help="Prompts of similar length that go together.", min=1, max=1024)
    ] = 8,
    defaults: Annotated[
        list[str] | None,
        typer.Option("--set", help="An option of lines that do not set it, such as temperature=0; may be repeated."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: prompts as they are.")] = False,
    system: Annotated[str | None, typer.Option(help="System message of every prompt.")] = None,
    draft_model: Annotated[
        Path | None, typer.Option(help="Folder of a small model with the same tokens, for speculation.")
    ] = None,
    retry_s: Annotated[float, typer.Option("--wait", help="How long the server may be away, in seconds.", min=0)] = 60,
) -> None:
    """Answer a file of prompts; killed at any moment, the same command goes on from there."""
    from sordino.client.batch import AnswersFile, defaults_of, read_prompts, run_batch
    from sordino.client.speculate import load_draft_model

    lines = read_prompts(prompts, defaults_of(defaults or []), raw=raw, system=system)
    if out.exists() and out.samefile(prompts):
        raise RangeError("--out is the file of prompts: name another")
    draft = load_draft_model(draft_model) if draft_model else None
    with AnswersFile(out, lines) as answers:
        if not answers.left():
            console.print(f"all {len(lines)} are answered", highlight=False)
            return
        how: dict[str, Any] = {"ca": ca, "token_file": token_file, "pool": pool, "seal": seal, "batch": batch}
        how |= {"fingerprint": fingerprint, "protocol": protocol, "attention": attention, "retry_s": retry_s}
        # Masks are made when it is known how many: a batch in the background might be for nothing.
        with connected(server, **how, low_water=0, provision=False) as link:
            run_batch(
                link,
                lines,
                answers,
                prompts=prompts,
                rows=rows,
                batch=batch,
                raw=raw,
                system=system,
                draft_model=draft,
                console=console,
            )


def gateway(
    server: Server,
    ca: Ca = None,
    token_file: TokenFile = None,
    pool: Pool = None,
    seal: Seal = False,
    batch: Batch = 2048,
    fingerprint: Fingerprint = None,
    protocol: Annotated[
        str, typer.Option(help="auto (starts at once, then fills the pool), masked, rlwe, clear (for tests).")
    ] = "auto",
    attention: AttentionOption = "local",
    host: Annotated[str, typer.Option(help="127.0.0.1 or ::1.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    key_file: Annotated[
        Path | None, typer.Option(help="The key that clients need; made where there is none, in your data folder.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What clients call the model, such as gpt-4o; its own name by default.")
    ] = None,
    parallel: Annotated[int, typer.Option(help="Answers made at a time.", min=1, max=64)] = 1,
    queue: Annotated[int, typer.Option(help="Requests that may wait behind them; more are refused.", min=0)] = 16,
    max_tokens: Annotated[int, typer.Option(help="Longest answer in a chat, where a request says none.", min=1)] = 1024,
    draft_model: Annotated[
        Path | None, typer.Option(help="Folder of a small model with the same tokens, for speculation.")
    ] = None,
    retry_s: Annotated[float, typer.Option("--wait", help="How long the server may be away, in seconds.", min=0)] = 60,
    port_file: Annotated[Path | None, typer.Option(help="Write the port here when ready.")] = None,
) -> None:
    """An OpenAI-compatible endpoint on this machine; prompts and answers stay on it."""
    try:
        from sordino.client.gateway.app import Settings
        from sordino.client.gateway.run import bind, default_key_file, serve
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "starlette", "uvicorn"):
            raise
        raise SordinoError("the gateway needs an extra: pip install 'sordino[client,gateway]'") from None
    from sordino.client.provision import plan_batch
    from sordino.client.session import describe_plan
    from sordino.client.speculate import load_draft_model

    draft = load_draft_model(draft_model) if draft_model else None
    how: dict[str, Any] = {"ca": ca, "token_file": token_file, "pool": pool, "seal": seal, "batch": batch}
    how |= {"fingerprint": fingerprint, "protocol": protocol, "attention": attention, "retry_s": retry_s}
    with bind(host, port) as opened, connected(server, **how) as link:
        settings = Settings(
            model=name or link.session.manifest.model_name,
            max_tokens=max_tokens,
            parallel=parallel,
            queue=queue,
            draft_model=draft,
        )
        if protocol == "auto" and not link.session.masks_left:
            plan = describe_plan(plan_batch(link.session.manifest, batch, checks=0))
            console.print(
                f"slower until there are masks, which are made beside the first answer: {plan}",
                highlight=False,
                soft_wrap=True,
            )
        serve(link, opened, key_file or default_key_file(), settings, console, port_file)


def bench_decode(
    bundle: Annotated[Path, typer.Option(help="Folder made by `sordino split`.")] = Path(".demo/bundle"),
    model: Annotated[Path | None, typer.Option(help="The original model, for the reference.")] = None,
    protocols: Annotated[str, typer.Option(help="Comma-separated: masked, auto, rlwe, clear.")] = "masked,clear",
    reference: Annotated[str, typer.Option(help="transformers, or none.")] = "transformers",
    tokens: Annotated[int, typer.Option(help="Tokens per answer.", min=2)] = 64,
    repeats: Annotated[int, typer.Option(help="Answers per protocol, interleaved.", min=1)] = 3,
    contexts: Annotated[
        str, typer.Option(help="Lengths of prompt, such as 64,256,512, at which encrypted attention is measured, too.")
    ] = "",
    batch: Batch = 2048,
    speculate: Annotated[
        str, typer.Option(help="ngram: measures drafts instead, with masks, on prompts whose answers repeat them.")
    ] = "off",
    prompts: Annotated[
        str, typer.Option(help="Of --speculate: summarise, translate, edit, or .txt files.")
    ] = "summarise,translate,edit",
    rtt_ms: Annotated[
        float | None, typer.Option(help="Of --speculate: measure once more with a round trip of so many ms.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Decode speed of each protocol and of plain transformers, as ratios in one run (two processes, loopback, TLS)."""
    from sordino.client.bench import run_decode
    from sordino.client.bench_speculate import run_speculation

    if speculate != "off":
        if contexts:
            raise RangeError("--contexts measures attention, --speculate drafts: ask for one of them")
        run_speculation(
            bundle,
            model=model,
            speculate=speculate,
            prompts=[name.strip() for name in prompts.split(",") if name.strip()],
            tokens=tokens,
            repeats=repeats,
            batch=batch,
            rtt_ms=rtt_ms,
            json_path=json_path,
            console=console,
        )
        return
    if rtt_ms is not None:
        raise RangeError("--rtt-ms goes with --speculate")
    run_decode(
        bundle,
        model=model,
        protocols=[name.strip() for name in protocols.split(",") if name.strip()],
        reference=reference,
        tokens=tokens,
        repeats=repeats,
        batch=batch,
        contexts=_numbers("--contexts", contexts),
        json_path=json_path,
        console=console,
    )


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise RangeError(f"{option} takes numbers with commas between them, not {text!r}") from None


def bench_linear(
    bundle: Annotated[Path, typer.Option(help="Folder made by `sordino split`.")] = Path(".demo/bundle"),
    protocols: Annotated[
        str, typer.Option(help="Comma-separated: rlwe, masked, clear, fp32; tenseal, concrete in a checkout.")
    ] = "rlwe,masked,fp32",
    repeats: Annotated[int, typer.Option(help="Products of one row; fewer of what is slow.", min=1)] = 20,
    patience: Annotated[float, typer.Option(help="Leave out shapes that take longer, in seconds.", min=0)] = 60,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Time and bytes of single products: Sordino's protocols, other encrypted ones, and plain fp32, in one run."""
    from sordino.client.bench_linear import run_linear

    run_linear(
        bundle,
        protocols=[name.strip() for name in protocols.split(",") if name.strip()],
        repeats=repeats,
        patience_s=patience,
        json_path=json_path,
        console=console,
    )


def bench_serve(
    bundle: Annotated[Path, typer.Option(help="Folder made by `sordino split`.")] = Path(".demo/bundle"),
    synthetic: Annotated[
        str | None, typer.Option(help="Random matrices instead, of a hidden size and so many layers: 2048x8.")
    ] = None,
    concurrency: Annotated[str, typer.Option(help="Numbers of clients.")] = "1,2,4,8,16",
    tokens: Annotated[int, typer.Option(help="Tokens of a client in a turn, at least.", min=2)] = 32,
    repeats: Annotated[int, typer.Option(help="Turns for each number of clients.", min=1)] = 3,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """A server under the load of several clients, with continuous batching and without, in one run."""
    from sordino.client.bench_serve import run_serve

    run_serve(
        bundle,
        synthetic=synthetic,
        concurrency=_numbers("--concurrency", concurrency),
        tokens=tokens,
        repeats=repeats,
        json_path=json_path,
        console=console,
    )


def bench_block(
    bundle: Annotated[Path, typer.Option(help="Folder made by `sordino split`.")] = Path(".demo/bundle"),
    protocols: Annotated[str, typer.Option(help="mpc (profile two-party), crypten; in a checkout.")] = "mpc,crypten",
    context: Annotated[int, typer.Option(help="Rows that the new one sees, itself among them.", min=2)] = 64,
    repeats: Annotated[int, typer.Option(help="Passes of each protocol.", min=1)] = 20,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """One transformer block on shares, by profile two-party and by CrypTen: time, rounds, bytes, error."""
    from sordino.client.bench_block import run_block

    run_block(
        bundle,
        protocols=[name.strip() for name in protocols.split(",") if name.strip()],
        context=context,
        repeats=repeats,
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


# What changes nothing where nothing is drawn.
_ONLY_SAMPLING: Final = {"temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
_JUST_IN_TIME: Final = " · masks made just in time (`sordino provision` makes them ahead)"
# What a generation_config.json may say without changing which tokens are chosen.
_SILENT: Final = {"bos_token_id", "eos_token_id", "pad_token_id", "do_sample", "max_length", "transformers_version",
                  "use_cache", "output_attentions", "output_hidden_states", "_from_model_config"}  # fmt: skip


def _effective(link: Connected, settings: dict[str, Any], options: Options) -> str:
    """One line on how tokens are chosen, whoever asked for it."""
    values = link.model.generation_config.to_diff_dict() | settings
    hidden = _SILENT if settings["do_sample"] else _SILENT | _ONLY_SAMPLING
    hidden |= {name for name in ("num_beams", "num_return_sequences") if values[name] == 1}
    shown = {name: value for name, value in values.items() if name not in hidden and value is not None}
    chosen = {name: getattr(options, name) for name in ("seed", "stop", "draft_tokens", "fixed_drafts", "fixed_length")}
    shown |= {name: value for name, value in chosen.items() if value not in (None, (), False)}
    if options.speculate != "off":
        shown["speculate"] = options.speculate
    if options.guide is not None:
        shown["guide"] = f"{options.guide.kind} by {options.guide.engine}"
    if options.pad_prompt > 1:
        shown["pad_prompt"] = options.pad_prompt
    text = ", ".join(f"{name}={value}" for name, value in shown.items())
    return printable(f"{'sampled' if settings['do_sample'] else 'greedy'}: {text}")
