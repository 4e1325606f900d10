"""``sordino generate`` at the edges: empty and too long prompts, templates, settings that the repository hides; what
``sordino provision`` and ``sordino bench`` refuse, and the smallest benchmark there is."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import models
import pytest
from pairs import InProcessServer
from rich.console import Console
from tokenizers.processors import TemplateProcessing

from sordino.client import Connected, cli, connect, terminal
from sordino.client.answers import Piece
from sordino.client.cli import encode_prompt
from sordino.client.options import Options
from sordino.client.twoparty.connect import MOST_AHEAD
from sordino.server.split import split_model
from sordino.shared.cli import main
from sordino.shared.errors import RangeError
from sordino.shared.manifest import ModelManifest

HIDDEN = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.3}


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


def serve(bundle: Path) -> Iterator[str]:
    with closing(InProcessServer(bundle)) as server:
        yield f"grpc://127.0.0.1:{server.port}"


@pytest.fixture(scope="module")
def gpt2(bundles: Callable[..., Path]) -> Iterator[str]:
    """Learned positions: 128 of them, and one byte is one token."""
    yield from serve(bundles("gpt2"))


@pytest.fixture(scope="module")
def opinionated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A model whose repository sets the sampling, and whose tokenizer adds a BOS by itself, as Llama's does."""
    folder = tmp_path_factory.mktemp("opinionated")
    model = models.make_tiny("llama", folder / "model")
    path = model / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | HIDDEN))
    tokenizer = models.make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{models.BOS} $A", special_tokens=[(models.BOS, tokenizer.bos_token_id)]
    )
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system ' + messages[0].content) }}{% endif %}"
    )
    tokenizer.chat_template = template + models.CHAT_TEMPLATE
    tokenizer.save_pretrained(model)
    split_model(model, folder / "bundle", rounding="nearest")
    yield from serve(folder / "bundle")


@pytest.fixture
def sordino(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """``sordino(*arguments)``: the command as a shell would run it."""
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("COLUMNS", "300")

    def command(*arguments: str) -> Outcome:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["sordino", *arguments])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        captured = capfd.readouterr()
        return Outcome(code, captured.out, captured.err)

    return command


@pytest.fixture
def run(sordino: Run) -> Run:
    """``run(server, prompt, *options)``: ``sordino generate``, nothing hidden unless told."""

    def command(server: str, prompt: str, *options: str, protocol: str = "clear") -> Outcome:
        return sordino("generate", prompt, "--server", server, "--protocol", protocol, *options)

    return command


@pytest.fixture
def link(opinionated: str, tmp_path: Path) -> Iterator[Connected]:
    connected = connect(opinionated, protocol="clear", cache=tmp_path / "cache")
    with connected.session:
        yield connected


def tokens_of(outcome: Outcome) -> int:
    found = re.search(r"(\d+) tokens · first after", outcome.err)
    assert found, outcome
    return int(found[1])


# -- settings ----------------------------------------------------------------------------------------------------------


def test_settings_of_the_repository_are_reported(opinionated: str, run: Run) -> None:
    """Case 1.16: the model's own generation file is in effect, and said so, penalties too."""
    outcome = run(opinionated, "hello", "--max-new-tokens", "4")
    assert outcome.code == 0
    [line] = [line for line in outcome.err.splitlines() if line.startswith("sampled:")]
    for setting in ("temperature=0.6", "top_p=0.9", "top_k=50", "repetition_penalty=1.3", "max_new_tokens=4"):
        assert setting in line


@pytest.fixture(scope="module")
def imaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A model of text whose tokenizer knows a token for images, as Gemma 3 is published."""
    folder = tmp_path_factory.mktemp("imaged")
    model = models.make_tiny("gemma3", folder / "model")
    tokenizer = models.make_tokenizer()
    assert tokenizer.add_tokens(["<image>"], special_tokens=True) == 1
    assert tokenizer.convert_tokens_to_ids("<image>") >= models.VOCABULARY
    tokenizer.save_pretrained(model)
    split_model(model, folder / "bundle", rounding="nearest")
    yield from serve(folder / "bundle")


def test_a_token_without_an_embedding_is_named(imaged: str, run: Run) -> None:
    outcome = run(imaged, "what is <image> there", "--raw")
    assert (outcome.code, outcome.out, "Traceback" in outcome.err) == (1, "", False)
    assert (
        "error: RangeError: the tokenizer has a token '<image>', for which this model has no embedding" in outcome.err
    )
    assert run(imaged, "what is there", "--max-new-tokens", "2").code == 0


@pytest.mark.parametrize(("given", "kind", "shown"), [("0", "greedy", None), ("1.7", "sampled", "temperature=1.7")])
def test_an_explicit_temperature_wins_also_zero(
    opinionated: str, run: Run, given: str, kind: str, shown: str | None
) -> None:
    """Case 1.16: 0 is greedy; what is left in effect of the repository's file is still reported."""
    outcome = run(opinionated, "hello", "--temperature", given, "--max-new-tokens", "4")
    assert outcome.code == 0
    [line] = [line for line in outcome.err.splitlines() if line.startswith(f"{kind}:")]
    assert "repetition_penalty=1.3" in line
    assert "0.6" not in line
    assert ("temperature" in line) == (shown is not None)
    assert shown is None or shown in line
    assert "not valid" not in outcome.err, "transformers warns about the repository's values"
    if kind == "greedy":
        assert run(opinionated, "hello", "--temperature", given, "--max-new-tokens", "4").out == outcome.out


@pytest.mark.parametrize("wrong", ["-1", "nan", "inf", "1e-45", "1e-30"])
def test_temperatures_that_mean_nothing_are_refused(opinionated: str, run: Run, wrong: str) -> None:
    outcome = run(opinionated, "hello", "--temperature", wrong)
    assert (outcome.code, "temperature is 0, for greedy, or a number from 1e-06" in outcome.err) == (1, True)


def test_settings_of_the_repository_send_no_control_sequences(link: Connected) -> None:
    link.model.generation_config.cache_implementation = "\x1b]0;pwned\x07"
    assert "cache_implementation= ]0;pwned " in cli._effective(link, Options(max_tokens=4).settings(link, 1), Options())


def test_a_model_without_settings_of_its_own_is_greedy(gpt2: str, run: Run) -> None:
    outcome = run(gpt2, "hello", "--max-new-tokens", "3")
    assert "greedy: max_new_tokens=3\n" in outcome.err


# -- edge values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", " ", "\n\t "])
def test_nothing_to_ask_is_an_error_of_one_line(gpt2: str, run: Run, prompt: str) -> None:
    """Case 1.17."""
    outcome = run(gpt2, prompt)
    assert (outcome.code, outcome.out) == (1, "")
    assert "error: RangeError: the prompt is empty" in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("wrong", ["0", "-1", "", "null"])
def test_impossible_lengths_are_usage_errors(gpt2: str, run: Run, wrong: str) -> None:
    """Case 1.17: before anything is connected."""
    outcome = run(gpt2, "hello", "--max-new-tokens", wrong)
    assert (outcome.code, "--max-new-tokens" in outcome.err) == (2, True)


@pytest.mark.parametrize("length", [[], ["--max-new-tokens", str(2**31)]])
def test_an_answer_ends_at_the_last_position(gpt2: str, run: Run, length: list[str]) -> None:
    """Cases 1.17 and 1.18: also one that the default length, or 2^31, would carry past the model's 128 positions."""
    outcome = run(gpt2, "x" * 100, "--raw", *length)
    assert outcome.code == 0
    assert tokens_of(outcome) <= 28
    assert "max_new_tokens=28" in outcome.err
    assert run(gpt2, "x", "--raw", "--max-new-tokens", "2").code == 0


@pytest.mark.parametrize(("length", "works"), [(127, True), (128, False), (129, False), (5000, False)])
def test_prompts_around_the_last_position(gpt2: str, run: Run, length: int, works: bool) -> None:
    """Case 1.18: the answer needs one position; a prompt that leaves none is refused with both numbers."""
    outcome = run(gpt2, "y" * length, "--raw")
    assert outcome.code == (0 if works else 1)
    if works:
        assert tokens_of(outcome) == 1
    else:
        assert f"the prompt has {length} tokens, the model takes 128" in outcome.err
        assert "yyy" not in outcome.err


def test_a_prompt_far_too_long_is_refused_within_a_second(link: Connected) -> None:
    """Case 1.18."""
    sent, start = dict(link.session.traffic.up), time.monotonic()
    with pytest.raises(RangeError, match="200001 tokens"):
        encode_prompt(link, "z" * 200_000, raw=True)
    assert time.monotonic() - start < 1
    assert link.session.traffic.up == sent


# -- templates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "raw"), [("hello", False), ("hello", True), (models.BOS + "hello", True)], ids=["chat", "raw", "rendered"]
)
def test_exactly_one_bos(link: Connected, text: str, raw: bool) -> None:
    """Case 1.19: a template that writes one, a tokenizer that adds one, a prompt that was rendered elsewhere."""
    ids = encode_prompt(link, text, raw=raw)["input_ids"][0].tolist()
    assert ids[0] == link.tokenizer.bos_token_id
    assert ids.count(link.tokenizer.bos_token_id) == 1


def test_raw_leaves_the_template_out_and_ids_are_shown_on_demand(opinionated: str, run: Run, link: Connected) -> None:
    """Case 1.19."""
    common = ("--max-new-tokens", "1", "--temperature", "0")
    chat, raw = (run(opinionated, "hi", *common, "--show-ids", *more) for more in ((), ("--raw",)))
    shown = [json.loads(re.search(r"prompt ids: (\[.*\])", outcome.err)[1]) for outcome in (chat, raw)]  # type: ignore[index]
    assert link.tokenizer.decode(shown[0]) == f"{models.BOS}[user] hi\n[assistant] "
    assert link.tokenizer.decode(shown[1]) == f"{models.BOS}hi"
    assert "prompt ids" not in run(opinionated, "hi", *common).err


def test_a_template_that_refuses_the_messages(opinionated: str, run: Run) -> None:
    """Case 1.19: one line, without the template's own words, which may repeat the prompt."""
    outcome = run(opinionated, "hi", "--system", "my secret role")
    assert outcome.code == 1
    assert "chat template refuses" in outcome.err
    assert "secret" not in outcome.err
    assert "Traceback" not in outcome.err


def test_the_prompt_may_come_from_standard_input(gpt2: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    piped: Any = run(gpt2, "-", "--max-new-tokens", "5")
    assert piped.out == run(gpt2, "hello", "--max-new-tokens", "5").out


def test_standard_input_that_is_closed(sordino: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after ``<&-`` in a shell."""
    monkeypatch.setattr(sys, "stdin", None)
    outcome = sordino("generate", "-", "--server", "grpc://127.0.0.1:9")
    [line] = outcome.err.splitlines()
    assert (outcome.code, outcome.out) == (1, "")
    assert line == "error: RangeError: the prompt should come from standard input, which is closed"


def test_the_help_says_who_sees_the_prompt(sordino: Run) -> None:
    assert "All users of this machine can see it" in sordino("generate", "--help").out


# -- bytes -------------------------------------------------------------------------------------------------------------

LATIN = os.fsdecode(b"gr\xfc\xdfe")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([LATIN], "RangeError: the prompt has bytes that are not UTF-8"),
        (["hello", "--system", LATIN], "RangeError: --system has bytes that are not UTF-8"),
        (["hello", "--server", f"grpcs://{LATIN}:1"], "TransportError: target"),
        (["hello", "--fingerprint", LATIN, "--server", "grpcs://[::1"], "TransportError: target"),
        (["hello", "--token-file", LATIN], "AuthError: the token file"),
        (["hello", "--protocol", LATIN], "ProtocolError: protocol"),
    ],
)
def test_bytes_that_are_no_text_are_an_error_of_one_line(sordino: Run, arguments: list[str], text: str) -> None:
    """Before anything is sent: nothing listens there."""
    outcome = sordino("generate", "--server", "grpc://127.0.0.1:9", *arguments)
    assert (outcome.code, outcome.out) == (1, "")
    [line] = outcome.err.splitlines()
    assert line.startswith(f"error: {text}")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_bytes_from_standard_input(sordino: Run, monkeypatch: pytest.MonkeyPatch, errors: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"gr\xfc\xdfe"), "utf-8", errors))
    outcome = sordino("generate", "-", "--server", "grpc://127.0.0.1:9")
    assert outcome.err.splitlines() == ["error: RangeError: the prompt has bytes that are not UTF-8: nothing was sent"]


def test_a_passphrase_of_other_bytes(sordino: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SORDINO_PASSPHRASE", LATIN)
    outcome = sordino("generate", "hello", "--server", "grpc://127.0.0.1:9", "--seal")
    assert outcome.err.splitlines() == ["error: PoolSealedError: the passphrase has bytes that are not UTF-8"]


def test_an_answer_that_the_output_cannot_show(opinionated: str, run: Run) -> None:
    """As a process with ASCII output: other characters are written as escapes, and no bar fills the log."""
    options = ["--max-new-tokens", "20", "--temperature", "0"]
    whole = run(opinionated, "hello", *options).out
    assert not whole.isascii()
    command = [Path(sys.executable).with_name("sordino"), "generate", "hello", "--server", opinionated]
    done = subprocess.run(
        [*command, "--protocol", "clear", *options],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        timeout=120,
        check=True,
    )
    assert done.stdout == whole.encode("ascii", "backslashreplace")
    kinds = [line.split()[0] for line in done.stderr.decode("ascii").splitlines()]
    assert kinds[0] == "greedy:", "something stands before it"


# -- what is at the other end ------------------------------------------------------------------------------------------


def test_masked_prints_what_is_left_and_clear_says_that_nothing_is_hidden(
    opinionated: str, run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = ("--temperature", "0", "--max-new-tokens", "4", "--pool", str(tmp_path / "pool"), "--batch", "128")
    masked, again, clear = (
        run(opinionated, "hello", *options, protocol=name) for name in ("masked", "masked", "clear")
    )
    assert masked.out == again.out == clear.out
    assert "nothing was hidden" in clear.err
    assert "nothing was hidden" not in masked.err
    assert "provisioning 128 tokens" in masked.err
    assert re.search(r"[1-9]\d* masks left", masked.err)
    # Neither at the start nor in the background, where a command that ends would throw the batch away.
    assert "provisioning" not in again.err
    assert not caplog.records


def test_a_prompt_longer_than_a_batch(opinionated: str, run: Run) -> None:
    options = ("--temperature", "0", "--max-new-tokens", "20", "--raw")
    masked = run(opinionated, "x" * 150, *options, "--batch", "64", protocol="masked")
    assert masked.code == 0, masked.err
    assert "out of masks" in masked.err
    assert masked.out == run(opinionated, "x" * 150, *options).out


def test_the_fingerprint_decides_whom_to_ask(bundles: Callable[..., Path], gpt2: str, run: Run) -> None:
    right = ModelManifest.load(bundles("gpt2")).fingerprint
    assert run(gpt2, "hello", "--max-new-tokens", "2", "--fingerprint", right).code == 0
    wrong = run(gpt2, "hello", "--fingerprint", right[:-1] + ("0" if right[-1] != "0" else "1"))
    assert (wrong.code, wrong.out) == (1, "")
    assert "error: FingerprintError: the server holds another split" in wrong.err
    assert "Traceback" not in wrong.err


@pytest.mark.parametrize("protocol", ["plain", ""])
def test_an_unknown_protocol_is_an_error_of_one_line(gpt2: str, run: Run, protocol: str) -> None:
    outcome = run(gpt2, "hello", protocol=protocol)
    assert (outcome.code, "ProtocolError" in outcome.err, "Traceback" in outcome.err) == (1, True, False)


def test_the_version(sordino: Run) -> None:
    assert sordino("--version") == (0, f"sordino {version('sordino')}\n", "")


def test_libraries_draw_no_bars_into_a_log(sordino: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQDM_DISABLE", "")
    monkeypatch.delenv("TQDM_DISABLE")
    sordino("--version")
    bar = "from transformers.utils.logging import tqdm; print(sum(tqdm(range(3))))"
    done = subprocess.run([sys.executable, "-c", bar], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("3\n", "")


# -- profile two-party -------------------------------------------------------------------------------------------------

_WITHOUT_A_MODEL = """
import sys
from sordino.shared.cli import main
sys.argv[0] = "sordino"
try:
    main()
finally:
    print("imported" if {"torch", "transformers"} & set(sys.modules) else "light")
"""


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (
            ("--protocol", "rlwe", "--attention=rlwe", "--pool", "x", "--seal", "--batch", "65"),
            1,
            "error: RangeError: profile two-party takes no --pool, --seal, --batch, --protocol, --attention: leave out",
        ),
        (("--protocol", "masked"), 1, "profile two-party takes no --protocol:"),  # it is the default, too
        (("--ahead", "5000"), 2, "'--ahead'"),
        ((), 1, "AuthError: profile two-party needs a dealer that both sides trust: --dealer and --dealer-token-file"),
        (("--dealer", "grpcs://localhost:9"), 1, "trust: --dealer-token-file (or SORDINO_DEALER_TOKEN) is missing"),
        (("--dealer", "localhost:9", "--dealer-token-file", "{token}"), 1, "of the dealer: target 'localhost:9'"),
        (
            ("--dealer", "grpcs://localhost:9", "--dealer-token-file", "{token}", "--dealer-ca", "nowhere.pem"),
            1,
            "error: TransportError: of the dealer: the CA file nowhere.pem cannot be read: No such file",
        ),
    ],
    ids=["other profile's", "a default", "ahead", "no dealer", "no token", "address", "no CA"],
)
def test_what_two_party_cannot_do_is_said_at_once(
    tmp_path: Path, arguments: tuple[str, ...], code: int, text: str
) -> None:
    """In one line, before libraries are loaded, which takes seconds; nothing listens there."""
    (tmp_path / "token").write_text("sord_x")
    given = [part.format(token=tmp_path / "token") for part in arguments]
    command = ["generate", "hello", "--server", "grpc://127.0.0.1:9", "--wait", "0", "--profile", "two-party", *given]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SORDINO_")}
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_A_MODEL, *command],
        capture_output=True,
        text=True,
        env=environment | {"COLUMNS": "300"},
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (code, "light\n"), done.stderr
    assert text in done.stderr
    assert code == 2 or len(done.stderr.splitlines()) == 1


def test_a_dealer_is_for_profile_two_party(gpt2: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who names one thinks that it is used; in the environment it may be for other calls."""
    outcome = run(gpt2, "hello", "--dealer", "grpcs://localhost:9", "--ahead", "8")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.splitlines() == [
        "error: RangeError: profile client-aided takes no --dealer, --ahead: leave out, or ask for --profile two-party"
    ]
    monkeypatch.setenv("SORDINO_DEALER", "grpcs://localhost:9")
    assert run(gpt2, "hello", "--max-new-tokens", "2").code == 0


def test_most_rows_ahead_are_those_of_the_profile() -> None:
    assert cli._MOST_AHEAD == MOST_AHEAD


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def _fail() -> None:
    raise RangeError("in the middle")


@pytest.mark.parametrize(("event", "code", "err"), [(_interrupt, 130, ""), (_fail, 1, "error: RangeError: in the")])
def test_an_answer_that_breaks_off_ends_its_line(
    gpt2: str, run: Run, monkeypatch: pytest.MonkeyPatch, event: Callable[[], None], code: int, err: str
) -> None:
    """What is said of it is not glued to its text, at a terminal where both are shown."""

    class Breaking(terminal.Screen):
        def show(self, piece: Piece) -> None:
            super().show(replace(piece, text="half a"))
            event()

    monkeypatch.setattr(cli, "Screen", Breaking)
    outcome = run(gpt2, "hello", "--max-new-tokens", "9", "--temperature", "0")
    assert (outcome.code, outcome.out) == (code, "half a\n")
    assert err in outcome.err.splitlines()[-1]


# -- provision and bench -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", ["-64", "0", "65", "4096"])
def test_a_batch_that_cannot_be_made_is_refused_before_anything_is_sent(sordino: Run, batch: str) -> None:
    """Nothing listens there."""
    outcome = sordino("provision", "--server", "grpc://127.0.0.1:9", "--batch", batch)
    assert outcome.code == 1
    assert outcome.err.splitlines() == [
        f"error: PoolError: a batch has a multiple of 64 slots, from 64 to 2048; not {batch}"
    ]


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (["--tokens", "1"], 2, "--tokens"),
        (["--repeats", "0"], 2, "--repeats"),
        (["--batch", "-64"], 1, "a multiple of 64 slots"),
        (["--batch", "4096"], 1, "a multiple of 64 slots"),
        (["--tokens", "300", "--reference", "none"], 1, "positions"),
        (["--model", "nosuch"], 1, "--model nosuch: there is no such file or folder"),
        (["--model", "."], 1, "--model . cannot be loaded"),
        (["--json", "nosuch/figures.json"], 1, "no such folder"),
        (["--reference", "torch"], 1, "--reference is transformers or none"),
    ],
)
def test_a_benchmark_that_cannot_be_run(
    bundles: Callable[..., Path],
    sordino: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    code: int,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = sordino("bench", "decode", "--bundle", str(bundles("llama")), *options)
    assert (outcome.code, text in outcome.err) == (code, True), outcome.err
    assert "Traceback" not in outcome.err
    assert code == 2 or outcome.err.splitlines()[-1].startswith("error: ")


def test_the_smallest_benchmark(
    bundles: Callable[..., Path], sordino: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tokens once, of a prompt longer than a batch, at a terminal: refills come amid answers and beside them."""
    console = Console(stderr=True, force_terminal=True)
    for module in (cli, terminal):
        monkeypatch.setattr(module, "console", console)
    figures = tmp_path / "figures.json"
    small = ("--tokens", "2", "--repeats", "1", "--batch", "64", "--reference", "none", "--json", str(figures))
    outcome = sordino("bench", "decode", "--bundle", str(bundles("llama")), *small)
    assert outcome.code == 0, outcome.err
    assert "Traceback" not in outcome.err
    [masked, clear] = json.loads(figures.read_text())["protocols"].values()
    assert masked["tokens_equal_clear"]
    assert masked["tpot_ms_p95"] == masked["tpot_ms_p50"] > 0
    assert clear["rounds_per_token"] == masked["rounds_per_token"]


def test_a_benchmark_of_encrypted_attention(bundles: Callable[..., Path], sordino: Run, tmp_path: Path) -> None:
    """At the longest contexts that the model has positions for."""
    figures, bundle = tmp_path / "figures.json", str(bundles("llama", remote_head=False))
    small = ("--tokens", "2", "--repeats", "1", "--reference", "none", "--protocols", "clear", "--json", str(figures))
    outcome = sordino("bench", "decode", "--bundle", bundle, *small, "--contexts", "250,254")
    assert outcome.code == 0, outcome.err
    for measured in json.loads(figures.read_text())["attention"]:
        assert measured["tokens_equal_local_attention"]
    for text, why in (("64,many", "numbers with commas"), ("300", "over the model's 256 positions"), ("0", "contexts")):
        outcome = sordino("bench", "decode", "--bundle", bundle, *small, "--contexts", text)
        assert why in outcome.err
