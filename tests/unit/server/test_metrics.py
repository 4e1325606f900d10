"""Metrics, readiness and log lines on their own: what is counted, who is told, what probes see."""

from __future__ import annotations

import io
import json
import logging
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from inprocess import InProcess
from rich.console import Console

from sordino.server import app, health
from sordino.server.health import KERNEL, LOADING, STUCK, SelfCheck
from sordino.server.kernel import Int8Kernel
from sordino.server.metrics import Metrics
from sordino.server.service import SERVICE_NAME, Limits, SordinoService
from sordino.server.store import MatrixStore
from sordino.shared.errors import BundleError, SordinoError
from sordino.shared.figures import OTHERS
from sordino.shared.logs import JsonFormatter, fields, use_json
from sordino.shared.probes import Readiness, pages
from sordino.shared.ring import P


def probe(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_product_of_several_requests() -> None:
    metrics = Metrics()
    joined = metrics.timed("masked", lambda _, works: [2 * rows for rows in works], len)
    assert [rows.tolist() for rows in joined("group", [np.ones(3), np.ones(1)])] == [[2, 2, 2], [2]]
    joined("group", [np.ones(2)])
    value = metrics.registry.get_sample_value
    kind = {"kind": "masked"}
    assert value("sordino_product_requests_count", kind) == 2
    assert value("sordino_product_requests_sum", kind) == 3
    assert value("sordino_product_requests_bucket", {**kind, "le": "1.0"}) == 1
    assert value("sordino_product_rows_total", kind) == 6
    assert (value("sordino_product_seconds_total", kind) or 0) > 0


def test_a_product_that_fails_is_none() -> None:
    metrics = Metrics()

    def broken(_: str, works: list[int]) -> int:
        raise SordinoError(f"{len(works)}")

    with pytest.raises(SordinoError):
        metrics.timed("rlwe", broken, int)("key", [1])
    assert metrics.registry.get_sample_value("sordino_product_requests_count", {"kind": "rlwe"}) == 0


def test_names_have_no_end_but_labels_do() -> None:
    metrics = Metrics()
    names = [metrics._bounded(f"client {number}") for number in range(1000)]
    assert len(set(names)) == 257
    assert names[255:257] == ["client 255", OTHERS]
    assert metrics._bounded("client 7") == "client 7"


def test_what_is_watched_is_asked_for_each_time() -> None:
    metrics, waiting = Metrics(), [1, 2, 3]
    metrics.watch(queue_depth=lambda: len(waiting), page_evictions=lambda: 5)
    assert metrics.registry.get_sample_value("sordino_queue_depth") == 3
    waiting.clear()
    assert metrics.registry.get_sample_value("sordino_queue_depth") == 0
    assert metrics.registry.get_sample_value("sordino_page_evictions_total") == 5


def test_two_servers_of_a_process_share_no_figures() -> None:
    one, other = Metrics(), Metrics()
    one.provisioned()
    assert one.registry.get_sample_value("sordino_provision_blocks_total") == 1
    assert other.registry.get_sample_value("sordino_provision_blocks_total") == 0


def test_calls_that_the_server_ends(bundles: Callable[..., Path]) -> None:
    """Unary ones and streams, served and overdue."""
    metrics, limits = Metrics(), Limits(first_message_s=0.1)
    config = app.ServerConfig(bundle=bundles("llama"), tls=None, tokens=None, limits=limits)
    service = SordinoService(MatrixStore(config.bundle), limits, metrics=metrics)
    server = InProcess(service, config, metrics)
    silence = threading.Event()

    def requests() -> Iterator[bytes]:
        silence.wait(60)
        yield from ()

    with grpc.insecure_channel(f"127.0.0.1:{server.port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        manifest = channel.unary_unary(f"/{SERVICE_NAME}/GetManifest")(b"", timeout=20)
        calls = [
            channel.stream_stream(f"/{SERVICE_NAME}/{name}")(requests(), timeout=20)
            for name in ("GetManifest", "FetchFile", "Evaluate")
        ]
        while not all(call.done() for call in calls):
            server.do(service.waits.end_overdue)
            time.sleep(0.01)
        assert {call.code() for call in calls} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        silence.set()
    server.close()
    value = metrics.registry.get_sample_value
    assert value("sordino_sent_bytes_total", {"method": "GetManifest"}) == len(manifest)
    assert value("sordino_client_calls_total", {"client": "anonymous"}) == 4
    for method, others in (("GetManifest", 1), ("FetchFile", 0), ("Evaluate", 0)):
        assert value("sordino_calls_open", {"method": method}) == 0
        assert value("sordino_calls_started_total", {"method": method}) == 1 + others
        overdue = {"method": method, "status": "DEADLINE_EXCEEDED"}
        assert value("sordino_calls_ended_total", overdue) == 1
    assert value("sordino_calls_ended_total", {"method": "GetManifest", "status": "OK"}) == 1


def test_ready_when_no_reason_is_left() -> None:
    readiness, told = Readiness(LOADING), list[bool]()
    readiness.listen(told.append)
    assert (readiness.reason, told) == (LOADING, [False])
    readiness.fail("a rank is gone")
    readiness.fail("a rank is gone")
    assert readiness.reason == f"{LOADING}; a rank is gone"
    readiness.clear(LOADING)
    assert (readiness.reason, told[-1]) == ("a rank is gone", False)
    readiness.clear("another")
    readiness.clear("a rank is gone")
    assert (readiness.reason, told[-1]) == (None, True)
    readiness.fail("a rank is gone")
    assert told[-1] is False


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_alive_and_ready_are_two_pages(host: str) -> None:
    readiness = Readiness("so it is")
    with pages(host, 0, Metrics().registry, readiness) as port:
        assert probe(port, "livez") == (200, "alive\n")
        assert probe(port, "readyz") == (503, "so it is\n")
        readiness.clear("so it is")
        assert probe(port, "readyz") == (200, "ready\n")
        assert probe(port, "metrics")[0] == 200
        assert probe(port, "")[0] == probe(port, "metrics/../readyz")[0] == 404
        with (
            pytest.raises(SordinoError, match=f"cannot serve metrics on {host}:{port}"),
            pages(host, port, Metrics().registry, readiness),
        ):
            pass
    with pytest.raises(urllib.error.URLError):
        probe(port, "livez")


def test_a_server_that_loads_is_alive_and_not_ready(
    bundles: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundle turns out to be damaged only after both probes were asked."""
    ports, seen = list[int](), list[tuple[int, str]]()

    @contextmanager
    def shown(*arguments: Any) -> Iterator[int]:
        with pages(*arguments) as port:
            ports.append(port)
            yield port

    def load(*_: object, **__: object) -> MatrixStore:
        seen.extend(probe(ports[0], path) for path in ("livez", "readyz"))
        raise BundleError("damaged")

    monkeypatch.setattr(app, "MatrixStore", load)
    monkeypatch.setattr(app, "pages", shown)
    config = app.ServerConfig(bundle=bundles("llama"), tls=None, tokens=None, metrics_port=0)
    with pytest.raises(BundleError, match="damaged"):
        app.serve(config, ready=lambda _: None)
    assert seen == [(200, "alive\n"), (503, f"{LOADING}\n")]
    with pytest.raises(urllib.error.URLError):
        probe(ports[0], "livez")


def test_a_bundle_that_goes_away_and_comes_back(bundles: Callable[..., Path], tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(bundles("llama"), bundle)
    readiness = Readiness()
    check = SelfCheck(MatrixStore(bundle), readiness)

    def reason() -> str | None:
        check.look_at_bundle()
        return readiness.reason

    assert reason() is None
    weights, config = next((bundle / "server").glob("*.safetensors")), bundle / "client" / "config.json"
    weights.rename(tmp_path / "weights")
    assert f"server/{weights.name} of the bundle is gone" in (reason() or "")
    text = config.read_text()
    config.write_text(text + " ")
    (tmp_path / "weights").rename(weights)
    assert reason() == "client/config.json of the bundle is gone, or has another size than when it was loaded"
    config.write_text(text)
    assert reason() is None


def test_a_kernel_that_computes_wrongly(bundles: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    class Worn(Int8Kernel):
        """Of a device that fails now and then."""

        fault: str | None = None

        def matmul(self, weights: torch.Tensor, rows: Any) -> Any:
            if self.fault == "raises":
                raise RuntimeError("CUDA error")
            product = super().matmul(weights, rows)
            product[0, 0] = (int(product[0, 0]) + (self.fault == "wrong")) % P
            return product

    store, readiness = MatrixStore(bundles("llama")), Readiness()
    store.kernel = kernel = Worn()
    check = SelfCheck(store, readiness)
    for fault, reason in ((None, None), ("wrong", KERNEL), (None, None), ("raises", KERNEL)):
        kernel.fault = fault
        check.look_at_kernel()
        assert readiness.reason == reason
    assert "CUDA error" in caplog.text


def test_a_self_check_runs_and_its_hang_is_noticed(
    bundles: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_LOOK_S", 0.01)
    monkeypatch.setattr(health, "_KERNEL_S", 0.01)
    looks, hang = threading.Semaphore(0), threading.Event()

    def look(*_: object) -> bool:
        looks.release()
        hang.wait(60)
        return True

    store, readiness = MatrixStore(bundles("llama")), Readiness()
    monkeypatch.setattr(health, "known_answer_test", look)
    with SelfCheck(store, readiness) as check:
        assert looks.acquire(timeout=20)
        check.notice_hang()
        assert readiness.reason is None
        monkeypatch.setattr(health, "_STUCK_S", -1.0)
        check.notice_hang()
        assert readiness.reason == STUCK
        monkeypatch.setattr(health, "_STUCK_S", 60.0)
        hang.set()
        assert looks.acquire(timeout=20), "it looks again and again"
        check.notice_hang()
        assert readiness.reason is None


def test_notes_for_people_are_lines_too(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    handler = logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    console = Console(force_terminal=True, color_system="standard")
    use_json(console)
    console.print("[bold red]all tokens[/] are void\nnow", soft_wrap=True)
    lines = [json.loads(line) for line in handler.stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["all tokens are void", "now"]


def test_a_line_of_json_is_one_line() -> None:
    made: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            made.append(self.format(record))

    log, handler = logging.Logger("test"), Lines()
    handler.setFormatter(JsonFormatter())
    log.addHandler(handler)
    log.info("a\nb %d", 1, extra=fields(method="Evaluate", seconds=0.5))
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("failed")
    assert not any("\n" in line for line in made)
    first, second = map(json.loads, made)
    assert first.pop("time").endswith("+00:00")
    assert first == {"level": "INFO", "logger": "test", "event": "a\nb 1", "method": "Evaluate", "seconds": 0.5}
    assert (second["level"], second["event"]) == ("ERROR", "failed")
    assert "ValueError: two" in second["trace"]
