"""``sordino batch``: answers as from single calls, options and seeds of each line, and a file of answers that survives
kill -9, a dead server and a second start."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import random
import re
import resource
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from pairs import InProcessServer
from rich.console import Console
from stack import ServerProcess

from sordino.client import Connected, connect
from sordino.client.answers import Generation
from sordino.client.batch import AnswersFile, defaults_of, plan_calls, read_prompts, run_batch
from sordino.client.options import Options
from sordino.client.terminal import encode_prompt
from sordino.server.split import split_model
from sordino.shared.cli import main
from sordino.shared.errors import RangeError

NOWHERE = "grpc://127.0.0.1:9"
TEXTS = ["a", "hello there", "the quick brown fox", "1 2 3 4 5 6 7 8 9", "to be", "zzz" * 9, "Dear Sir or Madam,", "?"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target(bundles: Callable[..., Path]) -> Iterator[str]:
    with closing(InProcessServer(bundles("llama"))) as server:
        yield f"grpc://127.0.0.1:{server.port}"


@pytest.fixture(scope="module", params=["clear", "masked"])
def link(request: pytest.FixtureRequest, target: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connected]:
    tmp = tmp_path_factory.mktemp(request.param)
    pool = {} if request.param == "clear" else {"pool": tmp / "pool", "state_dir": tmp / "state", "low_water": 0}
    connected = connect(target, protocol=request.param, cache=tmp / "cache", retry_s=5, provision=False, **pool)
    with connected.session:
        yield connected


@pytest.fixture(scope="module")
def clear(target: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connected]:
    connected = connect(target, protocol="clear", cache=tmp_path_factory.mktemp("cache"), retry_s=5)
    with connected.session:
        yield connected


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def answer(
    link: Connected, prompts: Path, out: Path, *, rows: int = 8, said: Console | None = None, **defaults: Any
) -> dict[Any, dict[str, Any]]:
    """Answers a file; the records by id."""
    lines = read_prompts(prompts, defaults, raw=True, system=None)
    with AnswersFile(out, lines) as answers:
        run_batch(
            link,
            lines,
            answers,
            prompts=prompts,
            rows=rows,
            batch=2048,
            raw=True,
            system=None,
            draft_model=None,
            console=said or Console(quiet=True),
        )
    return records(out)


def records(out: Path) -> dict[Any, dict[str, Any]]:
    found = [json.loads(line) for line in out.read_text().splitlines()]
    by_id = {record["id"]: record for record in found}
    assert len(by_id) == len(found), "a prompt was answered twice"
    return by_id


def tokens(record: dict[str, Any], number: int = 0) -> list[int]:
    ids: list[int] = record["answers"][number]["tokens"]
    return ids


def alone(link: Connected, text: str, **options: Any) -> list[int]:
    said = Generation(link, encode_prompt(link, text, raw=True), Options(**options)).run()
    return [token.id for token in said.answers[0].tokens]


# -- answers -----------------------------------------------------------------------------------------------------------


def test_answers_are_those_of_single_calls(link: Connected, tmp_path: Path) -> None:
    """Padded and together, or each for itself; usage is what the file says was chosen (case 3.6)."""
    prompts = write(tmp_path / "prompts", [{"id": f"p{i}", "prompt": text} for i, text in enumerate(TEXTS)])
    options = {"temperature": 0, "max_tokens": 12}
    together = answer(link, prompts, tmp_path / "together", rows=3, **options)
    single = answer(link, prompts, tmp_path / "single", rows=1, **options)
    for number, text in enumerate(TEXTS):
        record = together[f"p{number}"]
        assert tokens(record) == tokens(single[f"p{number}"]) == alone(link, text, temperature=0, max_tokens=12)
        count = len(tokens(record))
        assert record["usage"] == {
            "prompt_tokens": len(text),
            "completion_tokens": count,
            "total_tokens": len(text) + count,
        }
        [said] = record["answers"]
        assert said["finish"] == ("stop" if said["tokens"][-1] == 1 else "length")
        assert said["text"] == link.tokenizer.decode(said["tokens"], skip_special_tokens=True)
        assert record["line"] == number + 1


@pytest.mark.parametrize("protocol", ["auto", "rlwe"])
def test_protocols_without_a_pool(clear: Connected, target: str, tmp_path: Path, protocol: Any) -> None:
    prompts = write(tmp_path / "prompts", [{"id": text, "prompt": text} for text in TEXTS[1:3]])
    options = {"temperature": 0, "max_tokens": 3}
    connected = connect(
        target, protocol=protocol, cache=tmp_path / "c", pool=tmp_path / "p", state_dir=tmp_path / "s", refill=False
    )
    with connected.session:
        got = answer(connected, prompts, tmp_path / "out", **options)
    assert got == answer(clear, prompts, tmp_path / "clear", **options)


def test_rows_that_travel_are_said_before(link: Connected, tmp_path: Path) -> None:
    """Exactly, where no answer ends early: prompts, padding, and a row for every token but the last."""
    prompts = write(tmp_path / "prompts", [{"prompt": "x" * size} for size in (9, 10, 11, 3, 40)])
    with (tmp_path / "said").open("w") as file:
        said = Console(file=file, width=500)
        before = link.session.traffic.up.get("online", 0)
        answer(link, prompts, tmp_path / "out", temperature=0, max_tokens=5, min_tokens=5, said=said)
    sent = link.session.traffic.up["online"] - before
    text = (tmp_path / "said").read_text()
    found = re.search(r"5 of 5 prompts to answer, in (\d+) calls: at most (\d+) rows", text)
    assert found, text
    rows = int(found[2])
    assert (int(found[1]), rows) == (3, 3 * (11 + 4) + (3 + 4) + (40 + 4))
    element_bytes = 4 * sum(group.in_features for group in link.session.manifest.groups)
    assert rows <= sent / element_bytes < rows * 1.1, "envelopes are a few bytes a message"
    assert ("masks in the pool" in text) == (link.session.masks_left is not None)
    assert text.endswith("5 of 5 answered\n")


def test_rows_stop_each_for_itself(clear: Connected, tmp_path: Path) -> None:
    """Case 3.5: two rows at their own stop text, one never; what follows the end of a row is not in its answer."""
    options = {"temperature": 0, "max_tokens": 20}
    whole = {text: Generation(clear, encode_prompt(clear, text, raw=True), Options(**options)).run() for text in TEXTS}
    said = {text: [token.text for token in answers.answers[0].tokens] for text, answers in whole.items()}

    def place(text: str, stop: str) -> int | None:
        return next((n for n, piece in enumerate(said[text], 1) if stop in piece), None)

    early, late, never, stops = next(
        (one, two, three, (said[one][1], said[two][4]))
        for one, two, three in itertools.permutations(TEXTS, 3)
        if said[one][1].isprintable() and said[two][4].isprintable()
        for stops in [(said[one][1], said[two][4])]
        if all(stops)
        and [min((p for stop in stops if (p := place(text, stop))), default=0) for text in (one, two, three)]
        == [2, 5, 0]
    )
    prompts = write(tmp_path / "prompts", [{"id": text, "prompt": text} for text in (early, late, never)])
    got = answer(clear, prompts, tmp_path / "out", **options, stop=list(stops))
    assert [len(tokens(got[text])) for text in (early, late)] == [2, 5]
    assert got[early]["answers"][0]["finish"] == got[late]["answers"][0]["finish"] == "stop"
    assert (got[early]["answers"][0]["stop"], got[late]["answers"][0]["stop"]) == stops
    assert got[early]["answers"][0]["text"] == said[early][0]
    assert tokens(got[never]) == [token.id for token in whole[never].answers[0].tokens]


def test_a_seeded_line_gets_the_same_whoever_is_beside_it(clear: Connected, tmp_path: Path) -> None:
    """Case 3.9: alone, with unseeded mates, and in another order; lines without a seed differ from run to run."""
    seeded = [{"id": n, "prompt": "tell me something", "seed": n} for n in (1, 2)]
    free = [{"id": f"free {n}", "prompt": "tell me something new"[: 17 + n]} for n in range(3)]
    options = {"temperature": 1.2, "max_tokens": 12, "n": 2}
    runs = [
        answer(clear, write(tmp_path / f"prompts {i}", lines), tmp_path / f"out {i}", rows=5, **options)
        for i, lines in enumerate(([seeded[0]], [*seeded, *free], [free[1], seeded[1], free[0], seeded[0]]))
    ]
    for number in (0, 1):
        assert tokens(runs[0][1], number) == tokens(runs[1][1], number) == tokens(runs[2][1], number)
        assert tokens(runs[1][2], number) == tokens(runs[2][2], number) != tokens(runs[1][1], number)
    assert tokens(runs[1]["free 0"]) != tokens(runs[2]["free 0"])
    assert tokens(runs[0][1], 0) != tokens(runs[0][1], 1)
    assert runs[0][1]["usage"]["completion_tokens"] == len(tokens(runs[0][1], 0)) + len(tokens(runs[0][1], 1))


def test_options_of_each_line(clear: Connected, tmp_path: Path) -> None:
    lines = [
        {"id": "plain", "prompt": "the fox the fox"},
        {"id": "short", "prompt": "the fox the fox", "max_tokens": 3},
        {"id": "likely", "prompt": "the fox the fox", "logprobs": 2, "max_tokens": 2},
        {"id": "drafted", "prompt": "the fox the fox", "speculate": "ngram", "draft_tokens": 3},
        {"id": "beams", "prompt": "the fox the fox", "beams": 2, "temperature": None},
        {"id": "biased", "prompt": "the fox the fox", "logit_bias": {"77": 100}, "max_tokens": 4},
        {"id": "asked", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]},
    ]
    prompts = tmp_path / "prompts"
    got = answer(clear, write(prompts, lines), tmp_path / "out", **defaults_of(["temperature=0", "max_tokens=6"]))
    assert list(got) == [line["id"] for line in lines]
    assert (
        tokens(got["drafted"]) == tokens(got["plain"]) == alone(clear, "the fox the fox", temperature=0, max_tokens=6)
    )
    assert got["drafted"]["speculation"]["rows"] >= len("the fox the fox") + got["drafted"]["speculation"]["passes"]
    assert "speculation" not in got["plain"]
    assert tokens(got["short"]) == tokens(got["plain"])[:3]
    likely = got["likely"]["answers"][0]
    assert [entry["top"][0] for entry in likely["logprobs"]] == [
        [token, entry["value"]] for token, entry in zip(likely["tokens"], likely["logprobs"], strict=True)
    ]
    assert tokens(got["beams"]) == alone(clear, "the fox the fox", beams=2, max_tokens=6)
    assert tokens(got["biased"]) == [77] * 4
    rendered = clear.tokenizer.apply_chat_template(lines[-1]["messages"], add_generation_prompt=True)["input_ids"]
    assert got["asked"]["usage"]["prompt_tokens"] == len(rendered)


def test_a_longer_mate_takes_no_positions_away(tmp_path: Path) -> None:
    """Near the model's last position the shorter prompt keeps the length of answer that it has alone, and rules over
    the whole text find no padding in it."""
    model = models.make_tiny("gpt2", tmp_path / "model")  # 128 positions
    split_model(model, tmp_path / "bundle", rounding="nearest")
    with closing(InProcessServer(tmp_path / "bundle")) as server:
        link = connect(f"grpc://127.0.0.1:{server.port}", protocol="clear", cache=tmp_path / "cache")
        with link.session:
            prompts = write(tmp_path / "prompts", [{"id": n, "prompt": "ab" * n} for n in (52, 56, 60)])
            options: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "min_tokens": 20}
            got = answer(link, prompts, tmp_path / "out", **options)
            assert [len(tokens(got[n])) for n in (52, 56, 60)] == [20, 16, 8]
            # No pair of tokens comes twice: two of token 0, which pads, might be there already.
            link.model.generation_config.no_repeat_ngram_size = 2
            options |= {"max_tokens": 4, "min_tokens": 4, "logit_bias": {0: 100}}
            prompts = write(tmp_path / "close", [{"id": n, "prompt": "ab" * n} for n in (20, 21)])
            got = answer(link, prompts, tmp_path / "out 2", **options | {"logit_bias": {"0": 100}})
            for n in (20, 21):
                assert tokens(got[n]) == alone(link, "ab" * n, **options)
                assert tokens(got[n])[:2] == [0, 0]


def test_calls_are_of_similar_length_and_equal_options(tmp_path: Path) -> None:
    sizes = [4, 100, 5, 98, 5, 99, 4, 30]
    path = write(tmp_path / "prompts", [{"prompt": "x" * size, "seed": size} for size in sizes])
    lines = read_prompts(path, {}, raw=True, system=None)
    lines += read_prompts(write(tmp_path / "more", [{"prompt": "x", "temperature": 0.5}]), {}, raw=True, system=None)
    for line in lines:
        line.inputs, line.room = {"input_ids": torch.zeros((1, len(line.prompt)))}, 10

    def plan(rows: int, exact: bool) -> list[list[int]]:
        return [[one.length for one in call.lines] for call in plan_calls(lines, rows, exact=lambda _: exact)]

    assert plan(8, False) == [[4, 4, 5, 5], [1], [98, 99, 100], [30]]
    assert plan(3, False) == [[4, 4, 5], [1], [98, 99, 100], [5], [30]]
    assert sorted(plan(8, True)) == [[1], [4, 4], [5, 5], [30], [98], [99], [100]]


# -- lines that cannot be answered -------------------------------------------------------------------------------------


def refused(*arguments: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", ["sordino", "batch", *arguments])
    monkeypatch.setenv("COLUMNS", "500")
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    [line] = capfd.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"prompt": "secret", "temprature": 1}', "there is no field 'temprature': known are id, prompt, messages, "),
        ('{"prompt": "secret", "temperature": -1}', "temperature is 0, for greedy, or a number"),
        ('{"prompt": "secret", "temperature": NaN}', "temperature is 0"),
        ('{"prompt": "secret", "n": "2"}', "n is a whole number"),
        ('{"prompt": "secret", "fixed_length": 1}', "fixed_length is true or false"),
        ('{"prompt": "secret", "logit_bias": [1]}', "logit_bias is an object"),
        ('{"prompt": "secret", "end_ids": 3}', "end_ids is a list"),
        ('{"prompt": "secret", "guide": {"value": 1}}', "guide is an object with a kind"),
        ('{"prompt": "secret", "guide": {"kind": "json", "engine": []}}', "the engine of a guide is"),
        ('{"prompt": "secret", "logit_bias": {"' + "1" * 5000 + '": 1}}', "logit_bias is an object"),
        ('{"prompt": "secret", "bad_words": ["\\ud800"]}', "bad_words has halves of characters"),
        ('{"prompt": "secret", "beams": 2, "n": 3}', "2 beams do not give 3 answers"),
        ('{"prompt": "secret"', "it is not JSON: Expecting ',' delimiter at character 20"),
        ('{"prompt": "secret", "prompt": "two"}', "a field is there twice"),
        ('["secret"]', "it is not a JSON object"),
        ('{"prompt": " "}', "prompt is a text that is not empty"),
        ('{"prompt": "\\ud800 secret"}', "it has bytes that are not UTF-8"),
        ('{"prompt": ["secret"]}', "prompt is a text"),
        ('{"id": 1}', "it needs prompt or messages, one of them"),
        ('{"prompt": "secret", "messages": []}', "it needs prompt or messages, one of them"),
        ('{"messages": []}', "messages is a list of objects"),
        ('{"messages": [{"role": "user", "content": "secret", "name": "x"}]}', "messages is a list of objects"),
        ('{"prompt": "secret", "id": true}', "id is a text or a whole number"),
        ('{"prompt": "secret", "id": "first"}', "line 1 has the same id"),
        ("[" * 100000, "nested too deeply"),
        ('{"prompt": "secret", "seed": ' + "1" * 5000 + "}", "a number too long to read"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_sent(
    line: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing listens there; case 3.12."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text('{"id": "first", "prompt": "good"}\n\n' + line + "\n")
    said = refused(str(prompts), "--out", str(out), "--server", NOWHERE, monkeypatch=monkeypatch, capfd=capfd)
    assert said.startswith("error: RangeError: prompts.jsonl line 3: ")
    assert text in said
    assert "secret" not in said
    assert not out.exists()


@pytest.mark.parametrize(
    ("option", "text"),
    [("temperature", "--set takes NAME=VALUE"), ("top=1", "--set takes NAME=VALUE, not 'top=1'"), ("n=0", "n is a")],
)
def test_a_bad_default_is_refused(
    option: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts = write(tmp_path / "prompts", [{"prompt": "a"}])
    arguments = (str(prompts), "--out", str(tmp_path / "out"), "--server", NOWHERE, "--set", option)
    assert text in refused(*arguments, monkeypatch=monkeypatch, capfd=capfd)


def test_files_that_are_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts = write(tmp_path / "prompts", [{"prompt": "a"}])

    def said(asked: Path, out: Path) -> str:
        arguments = (str(asked), "--out", str(out), "--server", NOWHERE)
        return refused(*arguments, monkeypatch=monkeypatch, capfd=capfd)

    assert "--out is the file of prompts" in said(prompts, prompts)
    assert "No such file or directory" in said(tmp_path / "none", tmp_path / "out")
    assert "No such file or directory" in said(prompts, tmp_path / "none" / "out")
    assert "--out full is no file" in said(prompts, Path("/dev/full"))
    (tmp_path / "empty").write_text("\n\n")
    assert "empty has no prompts" in said(tmp_path / "empty", tmp_path / "out")


def test_what_the_model_does_not_take_is_named_before_anything_is_sent(clear: Connected, tmp_path: Path) -> None:
    for line, text in (
        ({"prompt": "x" * 300}, "line 2: the prompt has 300 tokens"),
        ({"prompt": "x" * 250, "pad_prompt": 256}, "line 2: the prompt's 256 rows leave no position"),
        ({"prompt": "x", "logit_bias": {"300": 1}}, "line 2: logit_bias names token 300"),
        ({"prompt": "x", "speculate": "draft"}, "line 2: speculate='draft' needs a draft model"),
    ):
        before = dict(clear.session.traffic.up)
        prompts = write(tmp_path / "prompts", [{"prompt": "fine"}, line])
        with pytest.raises(RangeError, match=text):
            answer(clear, prompts, tmp_path / "out")
        assert clear.session.traffic.up == before
        assert (tmp_path / "out").read_bytes() == b""


# -- the file of answers -----------------------------------------------------------------------------------------------


def record_of(line: Any, model: str = "m") -> dict[str, Any]:
    return {"id": line.id, "line": line.number, "answers": [], "digest": line.digest, "model": model}


@pytest.fixture
def lines(tmp_path: Path) -> list[Any]:
    names = ["a", "ü", 3]
    path = write(tmp_path / "prompts", [{"id": name, "prompt": "p"} for name in names])
    return read_prompts(path, {}, raw=True, system=None)


def test_a_torn_line_is_dropped_wherever_it_ends(tmp_path: Path, lines: list[Any]) -> None:
    out = tmp_path / "out"
    with AnswersFile(out, lines) as answers:
        answers.append([record_of(lines[0])])
        answers.append([record_of(line) for line in lines[1:]])
        assert answers.left() == []
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    whole = out.read_bytes()
    ends = [0, *(n + 1 for n, byte in enumerate(whole) if byte == ord("\n"))]
    for cut in range(len(whole) + 1):
        out.write_bytes(whole[:cut])
        kept = sum(end <= cut for end in ends) - 1
        with AnswersFile(out, lines) as answers:
            assert answers.left() == lines[kept:]
            assert out.read_bytes() == whole[: ends[kept]]
            answers.append([record_of(line) for line in answers.left()])
        assert out.read_bytes() == whole


def test_a_full_disk_costs_what_was_not_written(tmp_path: Path, lines: list[Any]) -> None:
    """Half a line fits: the error is the system's, and the next run begins where whole lines end."""
    out = tmp_path / "out"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with AnswersFile(out, lines) as answers:
        answers.append([record_of(lines[0])])
        whole = out.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 20, before[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                answers.append([record_of(lines[1])])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(out.read_bytes()) == len(whole) + 20
    with AnswersFile(out, lines) as answers:
        assert answers.left() == lines[1:]
    assert out.read_bytes() == whole


def test_a_file_of_something_else_is_left_as_it_is(tmp_path: Path, lines: list[Any]) -> None:
    out = tmp_path / "out"
    good = json.dumps(record_of(lines[0])) + "\n"
    for content, text in (
        ("notes", "out line 1 is no answer of sordino batch: use another --out"),
        ("notes\n", "out line 1 is no answer"),
        (good + '{"prompt"', "out line 2 is no answer"),
        ('{"id": "a", "prompt": "the only line of a file of prompts"}', "out line 1 is no answer"),
        ('{"id": "z", "line": 1, "ans', "out line 1 is no answer"),
        (good + "[1]\n", "out line 2 is no answer"),
        (good + good, 'out line 2 answers id "a" again'),
        (json.dumps(record_of(lines[0]) | {"id": "b"}) + "\n", 'line 1 answers id "b", which is not among the prompts'),
        (json.dumps(record_of(lines[0]) | {"digest": "0"}) + "\n", "whose prompt or options are not the same any more"),
    ):
        out.write_text(content)
        with pytest.raises(RangeError, match=re.escape(text)):
            AnswersFile(out, lines)
        assert out.read_text() == content


def test_answers_belong_to_prompts_options_and_model(tmp_path: Path, lines: list[Any]) -> None:
    """Also to an option from the command line; a line that is added later is one more to answer."""
    prompts, out = tmp_path / "prompts", tmp_path / "out"
    with AnswersFile(out, lines) as answers:
        answers.append([record_of(line) for line in lines])
        answers.check_model("m")
        with pytest.raises(RangeError, match="answers of another model than the server's"):
            answers.check_model("other")
    for changed in (
        read_prompts(prompts, {"temperature": 0}, raw=True, system=None),
        read_prompts(prompts, {}, raw=False, system=None),
        read_prompts(write(tmp_path / "new", [{"id": "a", "prompt": "other"}]), {}, raw=True, system=None),
    ):
        with pytest.raises(RangeError, match="line 1 answers id"):
            AnswersFile(out, changed)
    with prompts.open("a") as file:
        file.write('{"id": 4, "prompt": "p"}')
    with AnswersFile(out, read_prompts(prompts, {}, raw=True, system=None)) as answers:
        assert [line.id for line in answers.left()] == [4]


def test_nothing_is_left_to_answer(
    tmp_path: Path, lines: list[Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing listens there."""
    with AnswersFile(tmp_path / "out", lines) as answers:
        answers.append([record_of(line) for line in lines])
    arguments = [str(tmp_path / "prompts"), "--out", str(tmp_path / "out"), "--server", NOWHERE, "--raw"]
    monkeypatch.setattr(sys, "argv", ["sordino", "batch", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert (end.value.code, capfd.readouterr().err) == (0, "all 3 are answered\n")


def test_a_second_process_is_kept_out(tmp_path: Path, lines: list[Any]) -> None:
    with AnswersFile(tmp_path / "out", lines), pytest.raises(RangeError, match="in use by another process"):
        AnswersFile(tmp_path / "out", lines)
    with AnswersFile(tmp_path / "out", lines) as answers:
        assert len(answers.left()) == 3


# -- processes ---------------------------------------------------------------------------------------------------------

_RUN = "import os, sys; os.environ.update({env!r}); sys.argv = {argv!r}; from sordino.shared.cli import main; main()"


class Batch:
    """``sordino batch`` in processes of their own, one after the other."""

    def __init__(self, server: ServerProcess, tmp: Path, count: int, *options: str) -> None:
        rng = random.Random(2)
        self.ids = [f"p{n}" for n in range(count)]
        self.asked = {name: "".join(rng.choices("abcdef ", k=rng.randint(3, 24))) + "." for name in self.ids}
        lines = [{"id": name, "prompt": text} for name, text in self.asked.items()]
        self.prompts, self.out, self.log = write(tmp / "prompts", lines), tmp / "out", tmp / "log"
        self._argv = ["sordino", "batch", str(self.prompts), "--out", str(self.out), "--server", server.target]
        self._argv += ["--ca", str(server.ca), "--token-file", str(server.state / "token"), "--raw", *options]
        names = ("XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")
        self._env = {name: str(tmp / name) for name in names} | {"COLUMNS": "300", "OMP_NUM_THREADS": "1"}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["sordino.client.session", "sordino.client.batch"])

    def start(self) -> Any:
        code = f"import os; os.dup2(os.open({str(self.log)!r}, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2); "
        code += "import torch; torch.set_num_threads(1); "
        process = self._context.Process(target=exec, args=(code + _RUN.format(env=self._env, argv=self._argv),))
        process.start()
        return process

    def size(self) -> int:
        return self.out.stat().st_size if self.out.exists() else 0

    def wait_for_more(self, process: Any, size: int) -> None:
        deadline = time.monotonic() + 60
        while self.size() <= size and process.is_alive():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.005)

    def done(self) -> list[dict[str, Any]]:
        whole, _, _ = self.out.read_bytes().rpartition(b"\n")
        return [json.loads(line) for line in whole.split(b"\n")] if whole else []


def test_sigkill_at_any_moment(clear_server: ServerProcess, tmp_path: Path) -> None:
    """Nothing is answered twice or lost, and the answers are those of single calls."""
    options = ("--protocol", "clear", "--batch-rows", "2", "--set", "temperature=0", "--set", "max_tokens=16")
    batch = Batch(clear_server, tmp_path, 40, *options)
    rng, kept = random.Random(3), 0
    for _ in range(4):
        process = batch.start()
        batch.wait_for_more(process, batch.size())
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, batch.log.read_text()
        done = batch.done()
        assert len(done) > kept, "what was done before the kill is kept"
        kept = len(done)
    assert kept < len(batch.ids)
    process = batch.start()
    process.join(120)
    assert process.exitcode == 0, batch.log.read_text()
    got = records(batch.out)
    assert sorted(got) == sorted(batch.ids)
    link = connect(
        clear_server.target, ca=clear_server.ca, token=clear_server.token, protocol="clear", cache=tmp_path / "cache"
    )
    with link.session:
        for name in batch.ids[::7]:
            assert tokens(got[name]) == alone(link, batch.asked[name], temperature=0, max_tokens=16)


def test_a_server_that_dies(bundles: Callable[..., Path], tmp_path: Path) -> None:
    """What is done is kept, with exit code 1 and how to go on; with masks, of which the pool has what is left."""
    with ServerProcess(bundles("llama"), tmp_path / "server") as server:
        options = ("--batch-rows", "2", "--batch", "1024", "--wait", "0.5", "--pool", str(tmp_path / "pool"))
        batch = Batch(server, tmp_path, 30, *options, "--set", "max_tokens=16", "--set", "temperature=0")
        process = batch.start()
        batch.wait_for_more(process, 0)
        server.kill()
        process.join(120)
        said, done = batch.log.read_text(), batch.done()
        assert process.exitcode == 1
        assert 0 < len(done) < len(batch.ids)
        last = said.splitlines()
        assert last[-2] == f"{len(done)} of 30 answered: the same command goes on from there"
        assert last[-1].startswith("error: ")
        assert "Traceback" not in said
        server.restart()
        process = batch.start()
        process.join(120)
        assert process.exitcode == 0, batch.log.read_text()
        got = records(batch.out)
        assert sorted(got) == sorted(batch.ids)
        assert [got[record["id"]] for record in done] == done


def test_an_interrupt_says_how_to_go_on(clear: Connected, tmp_path: Path) -> None:
    """Ctrl-C comes to the main thread, in the middle of a call."""
    prompts = write(tmp_path / "prompts", [{"prompt": "x" * 5} for _ in range(40)])
    out = tmp_path / "out"

    def interrupt() -> None:
        while not out.exists() or not out.stat().st_size:
            time.sleep(0.002)
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with (tmp_path / "said").open("w") as file, pytest.raises(KeyboardInterrupt):
        answer(clear, prompts, out, rows=1, said=Console(file=file, width=300), temperature=0, max_tokens=50)
    thread.join()
    done = len(records(out))
    assert 0 < done < 40
    assert (tmp_path / "said").read_text().endswith(f"{done} of 40 answered: the same command goes on from there\n")
