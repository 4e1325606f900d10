"""``sordino bench decode --speculate`` on a tiny bundle: figures that add up, here and a round trip away."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from sordino.client.bench_speculate import PROMPTS, load_prompts, run_speculation
from sordino.shared.errors import RangeError, SordinoError
from sordino.shared.manifest import ModelManifest

RTT_MS = 5.0
TEXT = "the fox and the dog and the fox and the dog and the "


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def run(bundle: Path, **options: Any) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "model": bundle.parent / "model",
        "speculate": "ngram",
        "prompts": ["edit"],
        "tokens": 16,
        "repeats": 2,
        "batch": 512,
        "rtt_ms": None,
        "json_path": None,
        "console": Console(quiet=True),
    }
    return run_speculation(bundle, **{**chosen, **options})


def test_figures_here_and_a_round_trip_away(bundles: Callable[..., Path], tmp_path: Path) -> None:
    bundle, figures = bundles("llama"), tmp_path / "figures.json"
    (tmp_path / "fox.txt").write_text(TEXT)
    result = run(bundle, prompts=[str(tmp_path / "fox.txt")], rtt_ms=RTT_MS, json_path=figures)
    assert json.loads(figures.read_text()) == result
    near, far = result["speculation"]["fox"], result["speculation_rtt"]["fox"]
    rounds = len(ModelManifest.load(bundle).groups)
    assert far["rtt_ms"] == RTT_MS
    for measured, repeats in ((near, 2), (far, 1)):
        assert measured["drafted"] >= measured["accepted"] >= 0
        assert measured["acceptance"] == round(measured["accepted"] / measured["drafted"], 3)
        assert repeats < measured["tokens"] <= 16 * repeats
        # Each pass gives a token beside the drafts that were right, as the prompt's own does.
        given = measured["passes"] + repeats + measured["accepted"]
        assert measured["tokens"] <= given <= measured["tokens"] + repeats * 32
        assert measured["masks_per_token"] >= 1 - repeats / measured["tokens"]
        for key in ("tpot_ms", "tpot_ratio_vs_plain", "tpot_ratio_vs_transformers_lookup", "gain_vs_unspeculated"):
            assert measured[key] > 0
        assert measured["flips"]["answers"] == repeats
        assert measured["plain"]["tpot_ratio_vs_plain"] == 1
        assert measured["time_of_a_pass_ms"]["wait"] > 0
    # A pass waits for every group in turn, drafts or not.
    least = rounds * RTT_MS
    assert far["masked"]["tpot_ms"] > least
    assert far["time_of_a_pass_ms"]["wait"] > least
    assert far["tpot_ms"] * far["tokens_per_pass"] > 0.99 * least
    assert near["flips"]["differ"] == 0, near["flips"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"speculate": "draft"}, "--speculate ngram, not 'draft'"),
        ({"prompts": ["rewrite"]}, "--prompts takes summarise, translate, edit or .txt files"),
        ({"prompts": []}, "--prompts names none"),
        ({"prompts": ["missing.txt"]}, "not 'missing.txt'"),
        ({"tokens": 1}, "2 tokens and 1 repeat"),
        ({"rtt_ms": 0.0}, "--rtt-ms is above 0"),
        ({"rtt_ms": float("nan")}, "--rtt-ms is above 0"),
        ({"json_path": Path("nosuch/figures.json")}, "no such folder"),
        ({"model": Path("nosuch")}, "--model nosuch: there is no such file"),
        ({"batch": 65}, "a multiple of 64"),
    ],
)
def test_what_cannot_be_measured(bundles: Callable[..., Path], options: dict[str, Any], text: str) -> None:
    with pytest.raises(SordinoError, match=text):
        run(bundles("llama"), **options)


def test_a_prompt_without_positions_for_its_answer(bundles: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("x" * 200)
    with pytest.raises(RangeError, match=r"prompt long: its 2\d\d and 100 tokens are over the model's 256 positions"):
        run(bundles("llama"), prompts=[str(tmp_path / "long.txt")], tokens=100)


def test_prompts_by_name_and_by_file(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("my own")
    assert load_prompts(["edit", str(tmp_path / "mine.txt")]) == {"edit": PROMPTS["edit"], "mine": "my own"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--speculate", "ngram", "--contexts", "64"), "ask for one of them"),
        (("--rtt-ms", "20"), "--rtt-ms goes with --speculate"),
        (("--speculate", "mixed"), "--speculate ngram, not 'mixed'"),
    ],
)
def test_options_that_do_not_go_together(
    options: tuple[str, ...], text: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from sordino.shared.cli import main

    monkeypatch.setattr("sys.argv", ["sordino", "bench", "decode", *options])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert text in capfd.readouterr().err
