"""``sordino bench block`` and ``bench/two_party.py`` on a tiny bundle: figures, errors, and what they cannot do."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from two_party import measure

from sordino.client import bench_block
from sordino.client.bench_block import LAST_NORM_ROUNDS, first_layers, run_block
from sordino.server.store import MatrixStore
from sordino.server.twoparty.session import TwoPartyModel
from sordino.shared.errors import RangeError, SordinoError
from sordino.shared.twoparty.amounts import size, steps_of

CONTEXT = 40  # more rows before it than one pass takes
REPEATS = 3


def run(bundle: Path, protocols: str = "mpc", **options: Any) -> dict[str, Any]:
    chosen: dict[str, Any] = {"context": CONTEXT, "repeats": REPEATS, "json_path": None, "console": Console(quiet=True)}
    return run_block(bundle, protocols=protocols.split(",") if protocols else [], **{**chosen, **options})


def test_figures_of_the_two_party_profile(bundles: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "block.json"
    result = run(bundles("llama"), json_path=path)
    assert json.loads(path.read_text()) == result
    (block,) = result["results"]
    assert block["protocol"] == "mpc"
    assert block["layers"] == [1, 2]
    assert block["rounds"] == 17
    assert len(block["ms"]) == REPEATS
    assert min(block["ms"]) <= block["ms_p50"] <= max(block["ms"])
    entry = block["whole_pass"]
    assert 0 < block["bytes"] < entry["bytes"]
    assert 0 < block["dealer_bytes"] < entry["dealer_bytes"]
    assert entry["dealer_ms_p50"] > 0
    assert len(entry["ms"]) == REPEATS
    assert min(entry["ms"]) <= entry["ms_p50"] <= max(entry["ms"])
    assert entry["rounds"] == 17 + LAST_NORM_ROUNDS
    assert entry["bytes"] == entry["bytes_up"] + entry["bytes_down"]
    # Passes under other masks of the same values: errors that are small (0.014 at most in 150), and not the same.
    errors = entry["max_errors"]
    assert 0 < min(errors) < max(errors) == entry["max_error"] < 0.03 < entry["max_output"]
    assert entry["ahead_rows"] == CONTEXT + 1 + REPEATS
    assert entry["ahead_bytes"] > 0
    assert result["ratios"] == {}
    assert not [note for note in result["notes"] if "_" in note or note.startswith("both")], "keys of the JSON file"

    # What the dealer sent is what the steps of this layer, and of the norm after it, take for one row.
    first_layers(bundles("llama"), tmp_path / "one", 1)
    plan = TwoPartyModel(MatrixStore(tmp_path / "one")).plan
    assert plan.shape.layers == 1
    sizes = [size(step) for layer in (0, 1) for step in steps_of(plan, layer, 1, CONTEXT)]
    assert entry["dealer_bytes_client"] == sum(points for points, _ in sizes)
    assert entry["dealer_bytes_server"] == sum(map(sum, sizes))
    assert entry["dealer_bytes"] == entry["dealer_bytes_client"] + entry["dealer_bytes_server"]


def test_figures_of_the_whole_model(bundles: Callable[..., Path]) -> None:
    prompt, tokens = "the quick brown fox", 4
    result = measure(bundles("llama"), prompt, tokens)
    assert result["tokens_equal_clear"] == tokens
    distributions = result["over_the_tokens_of_clear"]
    assert distributions["places"] == distributions["same_top_token"] == tokens
    assert 0 < distributions["kl_mean"] <= distributions["kl_max"] < 1e-5
    text = result["over_a_text"]
    assert text["places"] > 20
    assert 0 < abs(text["perplexity_shared"] / text["perplexity_clear"] - 1) < 1e-3
    assert distributions["logit_error_max"] < 0.02 * distributions["logit_deviation"]
    online = result["online_a_token"]
    assert len(online["token_s"]) == tokens - 1
    assert online["rounds"] == 17 * 2 + LAST_NORM_ROUNDS
    assert online["bytes_up"] > online["bytes_down"] > 0  # u of four products a layer goes up
    dealt = result["dealer_bytes"]
    assert dealt["prompt_to_client"] > dealt["token_to_client"] > 0
    assert dealt["token_to_server"] > dealt["token_to_client"]
    assert result["ahead_a_row"]["rows_at_a_time"] == 2 * (result["prompt_tokens"] + tokens)
    assert all(size > 0 for size in result["resident_mib"].values())


@pytest.mark.peers
@pytest.mark.skipif(importlib.util.find_spec("crypten") is None, reason="make test-peers installs it")
def test_beside_crypten(bundles: Callable[..., Path]) -> None:
    result = run(bundles("llama"), "mpc,crypten")
    mpc, crypten = result["results"]
    assert [mpc["protocol"], crypten["protocol"]] == ["mpc", "crypten"]
    assert len(mpc["ms"]) == len(crypten["ms"]) == REPEATS
    ratios = result["ratios"]["crypten/mpc"]
    assert ratios["rounds"] == round(crypten["rounds"] / mpc["rounds"], 2) > 8
    assert ratios["bytes"] == round(crypten["bytes"] / mpc["bytes"], 2) > 1
    whole = result["ratios"]["crypten/mpc, a whole pass of one layer"]
    assert whole["rounds"] == round(crypten["rounds"] / (17 + LAST_NORM_ROUNDS), 2)
    assert mpc["whole_pass"]["max_output"] == pytest.approx(crypten["max_output"])


@pytest.mark.parametrize(("protocols", "text"), [("", "not nothing"), ("mpc,rlwe", "takes mpc, crypten, not rlwe")])
def test_unknown_protocols_are_refused(bundles: Callable[..., Path], protocols: str, text: str) -> None:
    with pytest.raises(SordinoError, match=text):
        run(bundles("llama"), protocols)


def test_what_it_cannot_measure_is_said_at_once(
    bundles: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RangeError, match="context of 2"):
        run(bundles("llama"), context=1)
    with pytest.raises(SordinoError, match="no such folder"):
        run(bundles("llama"), json_path=tmp_path / "no" / "block.json")
    with pytest.raises(SordinoError, match="another family"):
        run(bundles("qwen2"))
    monkeypatch.setitem(sys.modules, "crypten", None)  # as if it were not installed
    with pytest.raises(SordinoError, match=r"CrypTen is not installed: run pip install .* --no-deps crypten"):
        run(bundles("llama"), "mpc,crypten")
    monkeypatch.setattr(bench_block, "_PEERS_FOLDER", tmp_path)
    with pytest.raises(SordinoError, match=r"in a checkout of Sordino \(bench/peers\)"):
        run(bundles("llama"))
