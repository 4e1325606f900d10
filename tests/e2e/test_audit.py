"""The audit of the wire passes on a masked run, fails without masks, and finds the faults it is made for."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console
from scipy import stats
from stack import masks_message

from sordino.client import audit
from sordino.client.audit import ProvisionTally, Transcript, audit_wire, read_transcript, run_audit
from sordino.client.proxy import WireMessage
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.shared.errors import BundleError, ProtocolError
from sordino.shared.manifest import ModelManifest
from sordino.shared.ring import P

U32 = NDArray[np.uint32]


@pytest.fixture(scope="module")
def report(bundles: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of one real audit; what it wrote, and its table."""
    path, out = tmp_path_factory.mktemp("audit") / "deep" / "audit.json", StringIO()
    returned = run_audit(bundles("llama"), tokens=5, json_path=path, console=Console(file=out, width=140))
    written: dict[str, Any] = json.loads(path.read_text())
    assert written == json.loads(json.dumps(returned))
    return {**written, "table": out.getvalue()}


# -- a real run ------------------------------------------------------------------------------------------------------


def test_masked_run_passes(report: dict[str, Any]) -> None:
    failed = [entry for entry in report["statistics"] + report["checks"] if not entry["passed"]]
    assert not failed
    assert report["passed"]
    assert report["tests"] == len(report["statistics"]) > 30
    assert report["threshold"] == pytest.approx(audit.ALPHA / report["tests"])


def test_control_fails(report: dict[str, Any]) -> None:
    control = report["control"]
    flagged = {entry["test"] for entry in control["statistics"] if not entry["passed"]}
    assert control["passed"]
    assert {"uniform: byte 3", "uniform: high bits", "difference, element by element"} <= flagged
    assert control["flagged"] > control["tests"] / 2


def test_leakage_is_what_is_documented(report: dict[str, Any], bundles: Callable[..., Path]) -> None:
    leakage, groups = report["leakage"], len(ModelManifest.load(bundles("llama")).groups)
    assert leakage["model"] == [report["fingerprint"]]
    assert len(leakage["identity"]) == 1
    assert "sord_" not in json.dumps(report)
    for prompt in leakage["prompts"]:
        assert (prompt["prompt_tokens"], prompt["answer_tokens"]) == (audit.PROMPT_TOKENS, 5)
        assert prompt["rows_by_pass"] == [audit.PROMPT_TOKENS, 1, 1, 1, 1]
        assert len(prompt["messages"]) == 1 + 5 * groups
        assert prompt["messages"][-1]["time"] > 0
    first, second = ([m["bytes"] for m in prompt["messages"]] for prompt in leakage["prompts"])
    assert first == second


def test_table_says_what_failed_and_what_leaks(report: dict[str, Any]) -> None:
    assert "FAIL" not in report["table"]
    assert f"{audit.PROMPT_TOKENS} tokens in, 5 out" in report["table"]
    assert "cannot prove secrecy" in report["table"]


def test_more_tokens_than_positions(bundles: Callable[..., Path]) -> None:
    with pytest.raises(BundleError, match="256 positions"):
        run_audit(bundles("llama"), tokens=1000)


# -- faults ----------------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(20_240_601)


def _uniform(*shape: int) -> U32:
    return RNG.integers(0, P, shape, dtype=np.uint32)


def _plain(*shape: int) -> U32:
    """What activations look like in the ring: small, of both signs."""
    return (np.rint(RNG.normal(0, 3000, shape)).astype(np.int64) % P).astype(np.uint32)


def _transcript(rows: dict[int, U32], *, extra: int = 0) -> Transcript:
    messages, requests = [], []
    for number, (group, values) in enumerate(rows.items()):
        request = pb.EvaluateRequest(id=number, group=group, rows=values.shape[0], data=values.astype("<u4").tobytes())
        requests.append(request)
        for direction, size in (("up", request.ByteSize()), ("down", 100 + extra)):
            raw = request.SerializeToString() if direction == "up" else b""
            messages.append(
                WireMessage(
                    time=number / 1000,
                    method="Evaluate",
                    direction=direction,
                    stream=0,
                    index=number,
                    size=size,
                    raw=raw,
                )  # type: ignore[arg-type]
            )
    return Transcript(messages=tuple(messages), requests=tuple(requests), rows=rows)


def _rows() -> dict[int, U32]:
    return {group: _uniform(40, 128) for group in range(6)}


def _failures(first: dict[int, U32], second: dict[int, U32], **options: Any) -> set[str]:
    pair = [_transcript(first), _transcript(second, **options)]
    result = audit_wire(pair, None, protocol="masked")
    return {entry["test"] for entry in result["statistics"] + result["checks"] if not entry["passed"]}


def test_noise_passes() -> None:
    for _ in range(20):
        assert not _failures(_rows(), _rows())


def test_plain_rows() -> None:
    plain = {group: _plain(40, 128) for group in range(6)}
    assert "uniform: high bits" in _failures(plain, _rows())


def test_one_plain_group_among_many() -> None:
    rows = _rows()
    rows[3] = _plain(40, 128)
    assert "uniform: high bits, by group" in _failures(rows, _rows())


def test_one_mask_for_both_prompts() -> None:
    masks = _rows()
    first, second = (
        {group: ((_plain(*r.shape).astype(np.int64) - r) % P).astype(np.uint32) for group, r in masks.items()}
        for _ in range(2)
    )
    failures = _failures(first, second)
    assert "difference, element by element" in failures
    assert "uniform: high bits" not in failures, "each alone looks like noise"


def test_one_mask_for_consecutive_rows() -> None:
    rows = {g: ((_plain(40, 128).astype(np.int64) - _uniform(1, 128)) % P).astype(np.uint32) for g in range(6)}
    assert "difference of consecutive rows" in _failures(rows, _rows())


def test_one_mask_for_two_groups() -> None:
    rows = _rows()
    rows[5] = ((rows[4].astype(np.int64) + _plain(40, 128)) % P).astype(np.uint32)
    assert "difference of groups" in _failures(rows, _rows())


def test_mask_of_too_few_bits() -> None:
    rows = {group: _uniform(40, 128) & np.uint32(0xFFFFFF) for group in range(6)}
    assert "uniform: byte 3" in _failures(rows, _rows())


def test_element_that_is_not_below_p() -> None:
    rows = _rows()
    rows[0][7, 7] = 2**32 - 1
    assert _failures(rows, _rows()) == {"every element is below p"}


def test_repeated_row() -> None:
    first, second = _rows(), _rows()
    second[2][5] = first[2][9]
    assert _failures(first, second) == {"no masked row sent twice"}


def test_other_sizes() -> None:
    assert _failures(_rows(), _rows(), extra=1) == {"transcripts have one shape"}


def test_generator_with_a_short_period() -> None:
    rows = {group: np.tile(_uniform(40, 2), 64) for group in range(6)}
    assert "serial correlation, lag 2" in _failures(rows, _rows())


def test_seeds_and_ciphertexts_used_twice(bundles: Callable[..., Path]) -> None:
    manifest = ModelManifest.load(bundles("llama"))
    tally = ProvisionTally(manifest)
    for index, raw in enumerate(
        [masks_message(manifest), masks_message(manifest, seed=b"s" * 32), masks_message(manifest, 1, seed=b"s" * 32)]
    ):
        message = WireMessage(
            time=0, method="Provision", direction="up", stream=0, index=index, size=len(raw), raw=None
        )
        tally.observe(message, raw)
    assert {check.test: check.passed for check in tally.checks()} == {
        "no seed used twice": False,
        "no ciphertext sent twice": False,
    }
    assert len(list(tally.findings())) == 4


def test_residues_of_poor_randomness(bundles: Callable[..., Path]) -> None:
    manifest = ModelManifest.load(bundles("llama"))
    tally = ProvisionTally(manifest)
    raw = masks_message(manifest, points=64, c0=bytes(27 * 2 * 64 * 64 // 8))
    message = WireMessage(time=0, method="Provision", direction="up", stream=0, index=0, size=len(raw), raw=None)
    tally.observe(message, raw)
    assert all(finding.p < 1e-12 for finding in tally.findings())


def test_records_that_cannot_be_read(bundles: Callable[..., Path]) -> None:
    manifest = ModelManifest.load(bundles("llama"))
    message = _transcript({0: _uniform(1, 64)}).messages[0]
    assert read_transcript([message], manifest).rows[0].shape == (1, 64)
    for raw in (None, pb.EvaluateRequest(group=0, rows=2, data=bytes(256)).SerializeToString()):
        bad = WireMessage(time=0, method="Evaluate", direction="up", stream=0, index=0, size=1, raw=raw)
        with pytest.raises(ProtocolError, match="record"):
            read_transcript([bad], manifest)
    with pytest.raises(ProtocolError, match="two prompts"):
        audit_wire([_transcript(_rows())], None, protocol="masked")


# -- statistics, against scipy's -------------------------------------------------------------------------------------


def test_p_values_are_scipys() -> None:
    counts = RNG.integers(80, 120, 64)
    shares = np.full(64, 1 / 64)
    assert audit.chi_square(counts, shares) == pytest.approx(stats.chisquare(counts).pvalue)
    other = RNG.integers(80, 120, 64)
    expected = stats.chi2_contingency(np.stack([counts, other]), correction=False).pvalue
    assert audit.homogeneity(counts, other) == pytest.approx(expected)
    for shift in (0.0, 0.02, 0.05):
        a, b = _uniform(5000), (_uniform(4000) * (1 - shift)).astype(np.uint32)
        expected = stats.ks_2samp(a, b, method="asymp").pvalue
        assert audit.kolmogorov_smirnov(a, b) == pytest.approx(expected, rel=0.25, abs=1e-12)


@pytest.mark.parametrize("modulus", [P, 134176769, 134111233])
def test_shares_are_exact(modulus: int) -> None:
    for lane in range(4):
        shares = audit.byte_shares(modulus, lane)
        assert shares.sum() == pytest.approx(1, abs=1e-12)
    small = 1000
    counts = audit.by_byte(np.arange(small, dtype=np.uint32), 0)
    assert np.array_equal(counts, np.rint(audit.byte_shares(small, 0) * small))
    counts = audit.by_height(np.arange(small, dtype=np.uint32), small, 64)
    assert np.array_equal(counts, np.rint(audit.height_shares(small, 64) * small))


def test_p_values_of_noise_are_uniform() -> None:
    values = [
        finding.p for _ in range(12) for finding in audit.row_findings([_transcript(_rows()), _transcript(_rows())])
    ]
    assert stats.kstest(values, "uniform").pvalue > 1e-6
