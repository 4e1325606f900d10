"""What the wire shows: statistical and exact tests on a recorded run, and the leakage that remains (``audit wire``).

A recording proxy stands between a client and a server of their own; two prompts of one length get answers of one
length. If masks do what they should, everything but the leakage L (docs/threat-model.md) is uniform noise: the tests
look for what typical faults would leave (plain values, a mask used twice, a poor generator). They can find a fault; no
test can prove secrecy. The same tests on a run without masks, the control, must fail, or they prove nothing.

Statistics (p-values, Bonferroni over all of them): Pearson's chi-square for uniformity and homogeneity, the two-sample
Kolmogorov-Smirnov test with its asymptotic distribution, and lagged correlation against its normal limit.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from sordino.client.bundle import read_json
from sordino.client.local_server import server_process
from sordino.client.proxy import RecordingProxy, WireCall, WireMessage
from sordino.client.session import connect
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.shared.errors import BundleError, ProtocolError
from sordino.shared.manifest import CLIENT_DIR, ModelManifest
from sordino.shared.ring import P
from sordino.shared.rlwe import PARAMS, unpack

U32 = NDArray[np.uint32]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]

# The chance that an audit of perfect masks fails, all its tests together.
ALPHA: Final = 1e-6
PROMPT_TOKENS: Final = 24
_CELLS: Final = 1024
_SLACK_SLOTS: Final = 256  # a session reserves slots in chunks and gives none back
_TEXTS: Final = (
    """The harbour lay quiet that morning, and the last of the fishing boats had come in before the wind turned. Nobody
    on the quay spoke of the letter, although all of them had read it twice by then.""",
    """To compute the determinant of a triangular matrix, multiply the entries on its diagonal; for any other matrix,
    reduce it by row operations first, and keep count of every exchange of two rows.""",
)


# -- statistics ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A statistical test: ``p`` is the probability of a result at least as odd if the data were uniform noise."""

    test: str
    scope: str
    samples: int
    p: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A test without chance in it."""

    test: str
    detail: str
    passed: bool


def chi_square(counts: I64, shares: F64) -> float:
    """Pearson's test that ``counts`` fall on cells with these ``shares`` of the probability."""
    if counts[shares == 0].any():
        return 0.0
    counts, shares = counts[shares > 0], shares[shares > 0]
    expected = shares * counts.sum()
    return _chi_square_tail(float(((counts - expected) ** 2 / expected).sum()), counts.size - 1)


def homogeneity(a: I64, b: I64) -> float:
    """Pearson's test that two rows of counts come from one distribution; cells empty in both are left out."""
    table = np.stack([a, b]).astype(np.float64)
    table = table[:, table.sum(axis=0) > 0]
    if table.shape[1] < 2:
        return 1.0
    expected = table.sum(axis=1, keepdims=True) * table.sum(axis=0, keepdims=True) / table.sum()
    return _chi_square_tail(float(((table - expected) ** 2 / expected).sum()), table.shape[1] - 1)


def kolmogorov_smirnov(a: U32, b: U32) -> float:
    """Two-sample test that ``a`` and ``b`` come from one distribution (asymptotic, with Stephens' correction)."""
    a, b = np.sort(a), np.sort(b)
    both = np.concatenate([a, b])
    gap: F64 = np.abs(np.searchsorted(a, both, side="right") / a.size - np.searchsorted(b, both, side="right") / b.size)
    root = math.sqrt(a.size * b.size / (a.size + b.size))
    x = (root + 0.12 + 0.11 / root) * float(gap.max())
    if x < 0.2:
        return 1.0  # to twelve digits; the series converges slowly there
    return min(1.0, max(0.0, 2 * sum((1 if k % 2 else -1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101))))


def correlation(a: U32, b: U32) -> float:
    """Two-sided test that independent, uniform elements of the ring are uncorrelated (normal limit)."""
    x, y = (values.astype(np.float64) / P - 0.5 for values in (a, b))
    z = float((x * y).sum()) * 12 / math.sqrt(x.size)
    return math.erfc(abs(z) / math.sqrt(2))


def by_height(values: U32, modulus: int, cells: int) -> I64:
    """Counts over ``cells`` equal ranges of [0, modulus)."""
    cell = values.astype(np.uint64) * np.uint64(cells) // np.uint64(modulus)
    # A value that is not below the modulus is another check's business.
    return np.bincount(np.minimum(cell, cells - 1).astype(np.int64), minlength=cells).astype(np.int64)


@cache
def height_shares(modulus: int, cells: int) -> F64:
    """Probabilities of those ranges for uniform values, exactly."""
    edges = np.array([-(-k * modulus // cells) for k in range(cells + 1)], np.float64)
    return np.diff(edges) / modulus


def by_byte(values: U32, lane: int) -> I64:
    """Counts of byte ``lane`` (0 is the lowest)."""
    byte = values >> np.uint32(8 * lane) & np.uint32(255)
    return np.bincount(byte.astype(np.int64), minlength=256).astype(np.int64)


@cache
def byte_shares(modulus: int, lane: int) -> F64:
    """Probabilities of that byte's values for uniform values in [0, modulus), exactly."""
    step = 1 << (8 * lane)
    whole, rest = divmod(modulus, 256 * step)
    return np.array([whole * step + min(max(rest - byte * step, 0), step) for byte in range(256)], np.float64) / modulus


def _chi_square_tail(statistic: float, degrees: int) -> float:
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _cells(samples: int) -> int:
    """Cells for ``samples``: a power of two, 32 samples to a cell or more (with fewer the tail bends)."""
    return min(_CELLS, 1 << max(1, int(math.log2(max(samples, 64) / 32))))


def _difference(a: U32, b: U32) -> U32:
    """a - b mod p."""
    return ((a.astype(np.int64) - b.astype(np.int64)) % P).astype(np.uint32)


# -- what was recorded -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """The evaluation of one prompt as it passed: the messages in order, and the rows by group, ``[R, n]`` each."""

    messages: tuple[WireMessage, ...]
    requests: tuple[pb.EvaluateRequest, ...]
    rows: Mapping[int, U32]

    def shape(self) -> list[tuple[str, str, int, int, int]]:
        """(method, direction, group, rows, bytes) of every message, each direction in its order.

        Which of two messages that travel in opposite directions passes first is the scheduler's choice, not the
        prompt's. An answer names no group; it is that of the request in the same place.
        """
        shape = []
        for direction in ("up", "down"):
            sizes = [message.size for message in self.messages if message.direction == direction]
            asked = [(request.group, request.rows) for request in self.requests]
            asked += [(-1, -1)] * (len(sizes) - len(asked))
            shape += [
                ("Evaluate", direction, group, rows, size) for (group, rows), size in zip(asked, sizes, strict=False)
            ]
        return shape


def read_transcript(messages: Sequence[WireMessage], manifest: ModelManifest) -> Transcript:
    """Parses the evaluation messages of one prompt.

    Raises:
        ProtocolError: a message was recorded without its bytes, or does not hold what it states.
    """
    chosen = tuple(message for message in messages if message.method == "Evaluate")
    requests: list[pb.EvaluateRequest] = []
    parts: dict[int, list[U32]] = {}
    for message in chosen:
        if message.direction != "up":
            continue
        if message.raw is None:
            raise ProtocolError("the record keeps no bytes of the evaluation")
        request = pb.EvaluateRequest.FromString(message.raw)
        requests.append(request)
        if request.HasField("open"):
            continue
        width = manifest.groups[request.group].in_features
        values = np.frombuffer(request.data, "<u4")
        if values.size != request.rows * width:
            raise ProtocolError("a recorded message does not hold the rows that it states")
        parts.setdefault(request.group, []).append(values.reshape(request.rows, width))
    rows = {group: np.concatenate(blocks) for group, blocks in sorted(parts.items())}
    return Transcript(messages=chosen, requests=tuple(requests), rows=rows)


class ProvisionTally:
    """Counts what provisioning shows while gigabytes of it pass: cells of the residues, seeds, sizes."""

    def __init__(self, manifest: ModelManifest) -> None:
        self._groups = manifest.groups
        self._heights: dict[tuple[str, int], I64] = {}
        self._bytes: dict[tuple[str, int], I64] = {}
        self._seeds: Counter[tuple[bytes, int]] = Counter()
        self._owners: dict[bytes, set[int]] = {}
        self._bodies: Counter[bytes] = Counter()
        self.bytes: Counter[str] = Counter()

    def observe(self, message: WireMessage, raw: bytes) -> None:
        """For the proxy's ``observe``; provisioning has one stream at a time, so nothing is locked."""
        if message.method != "Provision":
            return
        self.bytes[message.direction] += message.size
        if message.direction == "down":
            return
        request = pb.ProvisionRequest.FromString(raw)
        self._seeds[request.seed, request.masks.block] += 1
        self._owners.setdefault(request.seed, set()).add(request.group)
        self._bodies[hashlib.blake2b(request.c0, digest_size=16).digest()] += 1
        what, half = "check vectors", len(request.c0) * 8 // 27 // 2
        if request.HasField("masks"):
            what, half = "masks", request.masks.points * self._groups[request.group].in_features
        for prime, values in enumerate(unpack(request.c0, (2, half))):
            key = (what, prime)
            self._heights[key] = self._heights.get(key, 0) + by_height(values, PARAMS.primes[prime], _CELLS)
            self._bytes[key] = self._bytes.get(key, 0) + by_byte(values, 0)

    def findings(self) -> Iterator[Finding]:
        """Uniformity of the residues, for each kind and prime."""
        for (what, prime), counts in sorted(self._heights.items()):
            q, scope, samples = PARAMS.primes[prime], f"{what}, prime {prime + 1}", int(counts.sum())
            p = chi_square(counts, height_shares(q, _CELLS))
            yield Finding(test="provisioning residues: high bits", scope=scope, samples=samples, p=p)
            p = chi_square(self._bytes[what, prime], byte_shares(q, 0))
            yield Finding(test="provisioning residues: lowest byte", scope=scope, samples=samples, p=p)

    def checks(self) -> Iterator[Check]:
        """No seed and no ciphertext twice."""
        twice = sum(count > 1 for count in self._seeds.values())
        twice += sum(len(groups) > 1 for groups in self._owners.values())
        yield Check(test="no seed used twice", detail=f"{len(self._owners)} seeds, {twice} twice", passed=not twice)
        twice = sum(count > 1 for count in self._bodies.values())
        yield Check(test="no ciphertext sent twice", detail=f"{len(self._bodies)}, {twice} twice", passed=not twice)


# -- the tests -------------------------------------------------------------------------------------------------------


def row_findings(transcripts: Sequence[Transcript]) -> Iterator[Finding]:
    """The statistical tests on the rows of two prompts."""
    pooled = [np.concatenate([rows.reshape(-1) for rows in t.rows.values()]) for t in transcripts]
    for number, (transcript, values) in enumerate(zip(transcripts, pooled, strict=True), 1):
        yield from _one_prompt(transcript, values, f"prompt {number}")
    a, b = pooled
    scope = "prompt 1 and 2"
    for lane in range(4):
        p = homogeneity(by_byte(a, lane), by_byte(b, lane))
        yield Finding(test=f"same distribution: byte {lane}", scope=scope, samples=a.size + b.size, p=p)
    yield Finding(
        test="same distribution: Kolmogorov-Smirnov",
        scope=scope,
        samples=a.size + b.size,
        p=kolmogorov_smirnov(a, b),
    )
    if a.size == b.size:
        yield Finding(test="correlation, element by element", scope=scope, samples=a.size, p=correlation(a, b))
        # A mask used for both prompts leaves the difference of two plain rows, which is small.
        yield _uniform("difference, element by element", scope, _difference(a, b))


def _one_prompt(transcript: Transcript, values: U32, scope: str) -> Iterator[Finding]:
    for lane in range(4):
        p = chi_square(by_byte(values, lane), byte_shares(P, lane))
        yield Finding(test=f"uniform: byte {lane}", scope=scope, samples=values.size, p=p)
    yield _uniform("uniform: high bits", scope, values)
    for group, rows in transcript.rows.items():
        yield _uniform("uniform: high bits, by group", f"{scope}, group {group}", rows.reshape(-1))
    for lag in (1, 2, 4):
        p = correlation(values[:-lag], values[lag:])
        yield Finding(test=f"serial correlation, lag {lag}", scope=scope, samples=values.size - lag, p=p)
    later = np.concatenate([rows[1:].reshape(-1) for rows in transcript.rows.values()])
    earlier = np.concatenate([rows[:-1].reshape(-1) for rows in transcript.rows.values()])
    if later.size:
        yield Finding(test="correlation of rows", scope=scope, samples=later.size, p=correlation(earlier, later))
        yield _uniform("difference of consecutive rows", scope, _difference(later, earlier))
    neighbours = [_difference(a, b).reshape(-1) for a, b in _pairs_of_one_width(list(transcript.rows.values()))]
    if neighbours:
        yield _uniform("difference of groups", scope, np.concatenate(neighbours))


def _pairs_of_one_width(groups: Sequence[U32]) -> Iterator[tuple[U32, U32]]:
    last: dict[tuple[int, ...], U32] = {}
    for rows in groups:
        if rows.shape in last:
            yield rows, last[rows.shape]
        last[rows.shape] = rows


def _uniform(test: str, scope: str, values: U32) -> Finding:
    cells = _cells(values.size)
    p = chi_square(by_height(values, P, cells), height_shares(P, cells))
    return Finding(test=test, scope=scope, samples=values.size, p=p)


def row_checks(transcripts: Sequence[Transcript]) -> Iterator[Check]:
    """Exact tests on the rows of two prompts, and on the shape of what passed."""
    seen: Counter[bytes] = Counter()
    for transcript in transcripts:
        for group, rows in transcript.rows.items():
            prefix = group.to_bytes(4, "little")
            seen.update(hashlib.blake2b(prefix + row.tobytes(), digest_size=16).digest() for row in rows)
    twice = sum(count > 1 for count in seen.values())
    yield Check(test="no masked row sent twice", detail=f"{seen.total():,} rows, {twice} twice", passed=not twice)
    over = sum(int((rows >= P).sum()) for t in transcripts for rows in t.rows.values())
    yield Check(test="every element is below p", detail=f"{over} are not", passed=not over)
    shapes = [transcript.shape() for transcript in transcripts]
    same = all(shape == shapes[0] for shape in shapes)
    yield Check(
        test="transcripts have one shape",
        detail=" and ".join(f"{len(shape)} messages, {sum(s[-1] for s in shape):,} bytes" for shape in shapes),
        passed=same,
    )


def leakage(transcripts: Sequence[Transcript], calls: Sequence[WireCall], manifest: ModelManifest) -> dict[str, Any]:
    """The leakage L as the record shows it: what a server knows of the two prompts, computed from the wire alone."""
    prompts = []
    for transcript in transcripts:
        passes = _passes(transcript, len(manifest.groups))
        start = transcript.messages[0].time if transcript.messages else 0.0
        up = [message for message in transcript.messages if message.direction == "up"]
        prompts.append(
            {
                "prompt_tokens": passes[0] if passes else 0,
                # The first pass gives the first token, every other pass one more.
                "answer_tokens": len(passes),
                "seconds": round(transcript.messages[-1].time - start, 6) if transcript.messages else 0.0,
                "rows_by_pass": passes,
                "messages": [
                    {
                        "time": round(message.time - start, 6),
                        "group": request.group,
                        "rows": request.rows,
                        "bytes": message.size,
                    }
                    for message, request in zip(up, transcript.requests, strict=True)
                ],
            }
        )
    opened = sorted({r.open.fingerprint for t in transcripts for r in t.requests if r.HasField("open")})
    return {
        "identity": sorted({call.identity for call in calls if call.identity}),
        "model": opened,
        "calls": [{"time": round(call.time, 6), "method": call.method} for call in calls],
        "prompts": prompts,
    }


def _passes(transcript: Transcript, groups: int) -> list[int]:
    """Rows of each forward pass: a new one begins where the group's number falls back."""
    passes: list[int] = []
    last, first = groups, -1
    for request in transcript.requests:
        if request.HasField("open"):
            continue
        if request.group < last or (groups == 1 and request.group == last):
            passes.append(0)
            first = request.group
        if request.group == first:
            passes[-1] += request.rows  # a long prompt's rows come in several messages
        last = request.group
    return passes


def audit_wire(
    transcripts: Sequence[Transcript],
    tally: ProvisionTally | None,
    *,
    protocol: Literal["masked", "clear"],
) -> dict[str, Any]:
    """Runs all tests on the record of two prompts.

    Returns:
        ``{"protocol", "tests", "threshold", "passed", "statistics": [...], "checks": [...]}``; a statistic passes when
        its p is at least ``threshold`` = ALPHA / tests.

    Raises:
        ProtocolError: the record does not hold two prompts.
    """
    if len(transcripts) != 2 or not all(transcript.rows for transcript in transcripts):
        raise ProtocolError("an audit takes the record of two prompts")
    findings = [*row_findings(transcripts), *(tally.findings() if tally else ())]
    checks = [*row_checks(transcripts), *(tally.checks() if tally else ())]
    threshold = ALPHA / len(findings)
    statistics = [{**asdict(finding), "passed": finding.p >= threshold} for finding in findings]
    return {
        "protocol": protocol,
        "tests": len(findings),
        "threshold": threshold,
        "passed": all(entry["passed"] for entry in statistics) and all(check.passed for check in checks),
        "statistics": statistics,
        "checks": [asdict(check) for check in checks],
    }


# -- a whole audit ---------------------------------------------------------------------------------------------------


def run_audit(
    bundle: Path,
    *,
    tokens: int,
    json_path: Path | None = None,
    console: Console | None = None,
    prompt_tokens: int = PROMPT_TOKENS,
) -> dict[str, Any]:
    """Audits a bundle: two prompts through a recording proxy, masked; then the control, the same without masks.

    It starts servers of its own from ``bundle`` (``sordino serve``, TLS, token), uses a fresh pool in a temporary
    folder and leaves nothing behind but the report.

    Args:
        tokens: length of both answers.
        json_path: where the report is written.
        console: for progress and the table; None prints nothing.
        prompt_tokens: length of both prompts.

    Returns:
        The report, see :func:`audit_wire`; also ``leakage``, ``provisioning``, and ``control``. ``passed`` means that
        all tests pass and that the control fails.

    Raises:
        BundleError: the bundle is damaged, or its model takes fewer positions than were asked for.
        TransportError: the server does not start.
    """
    say = (console or Console(quiet=True)).print
    manifest = ModelManifest.load(bundle)
    positions = read_json(bundle / CLIENT_DIR / "config.json").get("max_position_embeddings")
    if isinstance(positions, int) and prompt_tokens + tokens > positions:
        raise BundleError(f"the model has {positions} positions: ask for fewer than {tokens} tokens")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sordino-audit-") as name:
        folder = Path(name)
        say(f"masked: provisioning, then two prompts of {prompt_tokens} tokens, answers of {tokens}")
        record = _record(bundle, manifest, folder / "masked", "masked", prompt_tokens, tokens)
        report = audit_wire(record.transcripts, record.tally, protocol="masked")
        say("control: the same prompts without masks")
        bare = _record(
            bundle, manifest, folder / "clear", "clear", prompt_tokens, tokens, cache=folder / "masked/cache"
        )
        control = audit_wire(bare.transcripts, None, protocol="clear")
    seen = leakage(record.transcripts, record.calls, manifest)
    flagged = [entry for entry in control["statistics"] if not entry["passed"]]
    uniformity = [entry for entry in flagged if entry["test"].startswith("uniform")]
    derived = all((p["prompt_tokens"], p["answer_tokens"]) == (prompt_tokens, tokens) for p in seen["prompts"])
    checks = [
        *report["checks"],
        asdict(Check(test="masked and clear give the same tokens", detail="", passed=record.answers == bare.answers)),
        asdict(
            Check(test="lengths derived from the wire are right", detail="the leakage is as documented", passed=derived)
        ),
    ]
    report |= {
        "model": manifest.model_name,
        "fingerprint": manifest.fingerprint,
        "prompt_tokens": prompt_tokens,
        "answer_tokens": tokens,
        "seconds": round(time.monotonic() - started, 3),
        "checks": checks,
        "provisioning": {"bytes_up": record.tally.bytes["up"], "bytes_down": record.tally.bytes["down"]},
        "leakage": seen,
        "control": {
            "protocol": "clear",
            "tests": control["tests"],
            "flagged": len(flagged),
            "passed": bool(uniformity),
            "statistics": control["statistics"],
        },
    }
    report["passed"] = report["passed"] and bool(uniformity) and all(check["passed"] for check in checks)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(report, indent=1) + "\n")
    say(table(report))
    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    transcripts: list[Transcript]
    answers: list[list[int]]
    calls: list[WireCall]
    tally: ProvisionTally


def _record(
    bundle: Path,
    manifest: ModelManifest,
    folder: Path,
    protocol: Literal["masked", "clear"],
    prompt_tokens: int,
    tokens: int,
    cache: Path | None = None,
) -> _Record:
    """Two prompts, each in a session of its own (so that counters start alike), over one pool."""
    tally = ProvisionTally(manifest)
    slots = 64 * math.ceil((2 * (prompt_tokens + tokens) + _SLACK_SLOTS) / 64)
    transcripts, answers = [], []
    with ExitStack() as stack:
        serving = server_process(bundle, folder / "server", allow_clear=protocol == "clear")
        target, ca, token_file, _ = stack.enter_context(serving)
        token = token_file.read_text().strip()
        proxy = stack.enter_context(RecordingProxy(target, ca=ca, keep_bytes=("Evaluate",), observe=tally.observe))
        for text in _TEXTS:
            model, tokenizer, session = connect(
                proxy.target,
                token=token,
                protocol=protocol,
                pool=folder / "pool",
                state_dir=folder / "state",
                cache=cache or folder / "cache",
                batch=slots,
                low_water=0,
            )
            with session:
                ids = _exactly(tokenizer, text, prompt_tokens)
                begin = proxy.mark()
                out = model.generate(
                    torch.tensor([ids]),
                    attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                    do_sample=False,
                    num_beams=1,
                    min_new_tokens=tokens,
                    max_new_tokens=tokens,
                )
            transcripts.append(read_transcript(proxy.messages()[begin:], manifest))
            answers.append([int(token) for token in out[0, len(ids) :]])
        return _Record(transcripts=transcripts, answers=answers, calls=proxy.calls(), tally=tally)


def _exactly(tokenizer: Any, text: str, count: int) -> list[int]:
    """The first ``count`` tokens of ``text``, repeated as often as needed."""
    ids: list[int] = tokenizer(text, truncation=True, max_length=count)["input_ids"]
    if not ids:
        raise BundleError("the tokenizer makes no tokens of a plain English text")
    return (ids * math.ceil(count / len(ids)))[:count]


def table(report: Mapping[str, Any]) -> Table:
    """The report for a terminal: one line for each kind of test, with its smallest p."""
    out = Table(
        title=f"What the wire shows: {report['model']}",
        caption=(
            f"{report['tests']} statistical tests; one fails below p = {report['threshold']:.1e}. "
            "They can find a fault, they cannot prove secrecy."
        ),
    )
    for heading, justify in (
        ("test", "left"),
        ("samples", "right"),
        ("smallest p", "right"),
        ("control, smallest p", "right"),
        ("", "left"),
    ):
        out.add_column(heading, justify=justify)  # type: ignore[arg-type]
    control: dict[str, float] = {}
    for entry in report["control"]["statistics"]:
        control[entry["test"]] = min(entry["p"], control.get(entry["test"], 1.0))
    kinds = list(dict.fromkeys(entry["test"] for entry in report["statistics"]))
    for kind in kinds:
        entries = [entry for entry in report["statistics"] if entry["test"] == kind]
        bare = f"{control[kind]:.1e}" if kind in control else ""
        out.add_row(
            kind,
            f"{sum(entry['samples'] for entry in entries):,}",
            f"{min(entry['p'] for entry in entries):.1e}",
            bare,
            _verdict(all(entry["passed"] for entry in entries)),
        )
    out.add_section()
    for check in report["checks"]:
        out.add_row(check["test"], check["detail"], "", "", _verdict(check["passed"]))
    control_report = report["control"]
    out.add_row(
        "control: without masks the tests fail",
        f"{control_report['flagged']} of {control_report['tests']} fail",
        "",
        "",
        _verdict(control_report["passed"]),
    )
    out.add_section()
    for number, prompt in enumerate(report["leakage"]["prompts"], 1):
        out.add_row(
            f"the server knows of prompt {number}",
            f"{prompt['prompt_tokens']} tokens in, {prompt['answer_tokens']} out, {prompt['seconds']:.2f} s",
            "",
            "",
            "leaks",
        )
    out.add_row("and who asked", f"{len(report['leakage']['identity'])} token(s), seen as a digest", "", "", "leaks")
    return out


def _verdict(passed: bool) -> str:
    return "[green]pass[/]" if passed else "[bold red]FAIL[/]"
