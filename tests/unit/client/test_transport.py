"""The client's connection beside a server that breaks off, falls silent, or answers what nobody asked."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from sordino.client.bundle import fetch_bundle
from sordino.client.provision import fetch_check_vectors
from sordino.client.transport import Connection, EvaluationStream
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.proto.v1 import sordino_pb2_grpc as pb_grpc
from sordino.shared.errors import AuthError, BundleError, ProtocolError, SessionLostError, TransportError
from sordino.shared.manifest import ModelManifest
from sordino.shared.tls import make_certificates

NOWHERE = "grpc://127.0.0.1:9"


class Fake(pb_grpc.SordinoServicer):  # type: ignore[misc]
    """A server of scripted calls; what is not scripted takes every message and never answers."""

    def __init__(self, bundle: Path) -> None:
        self.bundle = bundle
        self.manifest = ModelManifest.load(bundle)
        self.evaluate: Callable[[Iterator[Any], Any], Iterator[Any]] = self.silence
        self.provision: Callable[[Iterator[Any], Any], Iterator[Any]] = self.silence
        self.fetch: Callable[[Any, Any], Iterator[Any]] = lambda request, context: self.silence(
            iter([request]), context
        )
        self.calls = 0
        self._over = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_SordinoServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def silence(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        for _ in requests:
            pass
        while context.is_active() and not self._over.wait(0.05):
            pass
        yield from ()

    def GetManifest(self, request: Any, context: Any) -> pb.GetManifestResponse:
        manifest = self.manifest.to_json()
        return pb.GetManifestResponse(manifest=manifest, max_message_bytes=8 << 20, protocols=[pb.PROTOCOL_MASKED])

    def FetchFile(self, request: Any, context: Any) -> Iterator[Any]:
        self.calls += 1
        return self.fetch(request, context)

    def Provision(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        self.calls += 1
        return self.provision(requests, context)

    def Evaluate(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        self.calls += 1
        return self.evaluate(requests, context)

    def close(self) -> None:
        self._over.set()
        self._server.stop(0).wait(10)


@pytest.fixture
def fake(bundles: Callable[..., Path]) -> Iterator[Fake]:
    server = Fake(bundles("llama"))
    yield server
    server.close()


@pytest.fixture
def link(fake: Fake) -> Iterator[Callable[..., Connection]]:
    made: list[Connection] = []

    def make(**options: Any) -> Connection:
        made.append(Connection(f"grpc://127.0.0.1:{fake.port}", **options))
        return made[-1]

    yield make
    for connection in made:
        connection.close()


class Clock:
    """How long a block took, in seconds."""

    def __enter__(self) -> Clock:
        self._start = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.took = time.monotonic() - self._start


# -- retrying ----------------------------------------------------------------------------------------------------------


def test_only_time_without_progress_counts(link: Callable[..., Connection]) -> None:
    connection, done = link(retry_s=0.5), 0

    def attempt() -> str:
        nonlocal done
        done += 1
        time.sleep(0.3)
        if done < 6:
            raise TransportError("broken")
        return "whole"

    with Clock() as clock:
        assert connection.retrying(attempt, lambda: done) == "whole"
    assert clock.took > 3 * connection.retry_s
    assert connection.traffic.retries == 5


def test_no_progress_of_another_thread_counts(link: Callable[..., Connection]) -> None:
    connection, done, over = link(retry_s=0.5), 0, threading.Event()

    def moving() -> None:
        nonlocal done
        done += 1
        if not over.wait(0.05):
            raise TransportError("broken")

    def stuck() -> None:
        raise TransportError("stuck")

    thread = threading.Thread(target=connection.retrying, args=(moving, lambda: done))
    thread.start()
    with Clock() as clock, pytest.raises(TransportError, match="stuck"):
        connection.retrying(stuck)
    over.set()
    thread.join()
    assert clock.took < 2


def test_an_attempt_that_took_longer_than_retry_s_is_followed_by_another(link: Callable[..., Connection]) -> None:
    connection, tries = link(retry_s=0.3), 0

    def attempt() -> None:
        nonlocal tries
        tries += 1
        time.sleep(0.5)
        raise TransportError("broken")

    with pytest.raises(TransportError):
        connection.retrying(attempt)
    assert tries == 2


def test_an_answer_that_moves_on_between_breaks_is_not_given_up(fake: Fake, link: Callable[..., Connection]) -> None:
    """Two rows for each stream, then it breaks: the whole takes several times ``retry_s``."""
    group = ModelManifest.load(fake.bundle).groups[0]

    def evaluate(requests: Iterator[Any], context: Any) -> Iterator[Any]:
        yield pb.EvaluateResponse(id=next(requests).id)
        for _ in range(2):
            request = next(requests)
            time.sleep(0.2)
            yield pb.EvaluateResponse(id=request.id, data=bytes(4 * group.out_features))
        context.abort(grpc.StatusCode.UNAVAILABLE, "broken")

    fake.evaluate = evaluate
    connection = link(retry_s=0.5)
    connection.max_message_bytes = 4 * max(group.in_features, group.out_features)
    stream = EvaluationStream(connection, pb.PROTOCOL_MASKED)
    with Clock() as clock:
        assert stream.product(0, group, np.zeros((9, group.in_features), np.uint32)).shape == (9, group.out_features)
    assert clock.took > 3 * connection.retry_s
    stream.close()


def test_opening_a_stream_is_no_progress(fake: Fake, link: Callable[..., Connection]) -> None:
    """A server that every product kills answers the first message of each stream, and is given up all the same."""

    def evaluate(requests: Iterator[Any], context: Any) -> Iterator[Any]:
        yield pb.EvaluateResponse(id=next(requests).id)
        next(requests)
        context.abort(grpc.StatusCode.UNAVAILABLE, "broken")

    fake.evaluate = evaluate
    connection = link(retry_s=0.5)
    group = connection.manifest.groups[0]
    stream = EvaluationStream(connection, pb.PROTOCOL_MASKED)
    with Clock() as clock, pytest.raises(SessionLostError, match="away"):
        stream.product(0, group, np.zeros((1, group.in_features), np.uint32))
    assert clock.took < 3
    stream.close()


def test_a_download_that_moves_on_between_breaks_is_not_given_up(
    fake: Fake, link: Callable[..., Connection], tmp_path: Path
) -> None:
    def fetch(request: Any, context: Any) -> Iterator[Any]:
        data = (fake.bundle / "client" / request.name).read_bytes()[request.offset :]
        time.sleep(0.2)
        yield pb.FileChunk(offset=request.offset, data=data[:15_000])
        if len(data) > 15_000:
            context.abort(grpc.StatusCode.UNAVAILABLE, "broken")

    fake.fetch = fetch
    connection = link(retry_s=0.5)
    with Clock() as clock:
        assert (fetch_bundle(connection, cache=tmp_path) / "client.safetensors").is_file()
    assert clock.took > 2 * connection.retry_s


# -- room on the disk --------------------------------------------------------------------------------------------------


def _announce(fake: Fake, name: str, size: int) -> None:
    files = dict(fake.manifest.client_files)
    fake.manifest = replace(fake.manifest, client_files=files | {name: replace(files[name], size=size)})


def _send(fake: Fake) -> None:
    def fetch(request: Any, context: Any) -> Iterator[Any]:
        data = (fake.bundle / "client" / request.name).read_bytes()[request.offset :]
        yield pb.FileChunk(offset=request.offset, data=data)

    fake.fetch = fetch


def test_more_than_the_disk_has_is_refused_before_a_byte(
    fake: Fake, link: Callable[..., Connection], tmp_path: Path
) -> None:
    _announce(fake, "tokenizer.json", (1 << 48) - 1)
    with pytest.raises(BundleError, match=r"needs 281,\d{3},\d{3} MB in .* of which [\d,]+ MB are free"):
        fetch_bundle(link(), cache=tmp_path)
    assert not fake.calls


@pytest.mark.parametrize(
    ("name", "size"),
    [("client.safetensors", 1 << 30), ("tokenizer.json", 600 << 20), ("generation_config.json", 20 << 20)],
)
def test_a_file_far_larger_than_its_kind_is_refused(
    fake: Fake, link: Callable[..., Connection], tmp_path: Path, name: str, size: int
) -> None:
    """Of the tiny model's config, which is there by then, follows that its weights have no gigabyte."""
    _send(fake)
    _announce(fake, name, size)
    connection = link()
    with pytest.raises(BundleError, match=f"{name}: the manifest says"):
        fetch_bundle(connection, cache=tmp_path)
    assert not list(tmp_path.rglob(f"{name}*"))


def test_a_disk_that_fills_up_ends_it_in_one_line(fake: Fake, link: Callable[..., Connection], tmp_path: Path) -> None:
    _send(fake)
    connection = link()
    part = tmp_path / connection.manifest.fingerprint / "client.safetensors.part"
    part.parent.mkdir()
    part.symlink_to("/dev/full")
    with pytest.raises(BundleError, match=r"client.safetensors needs .* MB are free: No space left"):
        fetch_bundle(connection, cache=tmp_path)
    assert not part.is_symlink(), "what came of it still takes room"
    assert (fetch_bundle(connection, cache=tmp_path) / "client.safetensors").is_file()


@pytest.mark.parametrize(("cache", "why"), [("file", "exists|directory"), ("x" * 300, "too long"), ("a\0b", "null")])
def test_a_cache_that_is_no_folder(
    fake: Fake, link: Callable[..., Connection], tmp_path: Path, cache: str, why: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BundleError, match=f"cannot be kept in .*({why})"):
        fetch_bundle(link(), cache=tmp_path / cache)
    assert not fake.calls


# -- silence -----------------------------------------------------------------------------------------------------------


def _fetch(connection: Connection) -> object:
    return connection.retrying(lambda: list(connection.fetch("config.json", 0)))


def _provision(connection: Connection) -> object:
    return connection.retrying(lambda: fetch_check_vectors(connection, 1))


def _evaluate(connection: Connection) -> object:
    group = connection.manifest.groups[0]
    with closing(EvaluationStream(connection, pb.PROTOCOL_MASKED)) as stream:
        return stream.product(0, group, np.zeros((1, group.in_features), np.uint32))


WORK = [_fetch, _provision, _evaluate]


@pytest.mark.parametrize("work", WORK)
def test_a_silent_server_is_given_up(
    fake: Fake, link: Callable[..., Connection], work: Callable[[Connection], object]
) -> None:
    with Clock() as clock, pytest.raises(TransportError, match="sent nothing for"):
        work(link(timeout_s=0.5, retry_s=0.5))
    assert clock.took < 5
    assert fake.calls == 2, "after a silence there is one more attempt at least"


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("after", [0.0, 0.5])
def test_closing_ends_every_wait(
    fake: Fake, link: Callable[..., Connection], work: Callable[[Connection], object], after: float
) -> None:
    connection = link(timeout_s=60, retry_s=60)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(work, connection)
        time.sleep(after)
        with Clock() as clock:
            connection.close()
            with pytest.raises(SessionLostError, match="closed"):
                waiting.result(10)
    assert clock.took < 2
    connection.close()


def test_closing_ends_the_pause_between_attempts(fake: Fake, link: Callable[..., Connection]) -> None:
    connection = link(retry_s=60)
    fake.close()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(_fetch, connection)
        time.sleep(1.5)
        assert not waiting.done()
        with Clock() as clock:
            connection.close()
            with pytest.raises(SessionLostError, match="closed"):
                waiting.result(10)
    assert clock.took < 1


def test_a_slow_client_is_no_silent_server(fake: Fake, link: Callable[..., Connection]) -> None:
    """Each request takes as long to make as the server may be silent, nearly; answers come when all are there."""

    def provision(requests: Iterator[Any], context: Any) -> Iterator[Any]:
        for request in list(requests):
            yield pb.ProvisionResponse(group=request.group)

    def requests() -> Iterator[pb.ProvisionRequest]:
        for index in range(4):
            time.sleep(0.6)
            yield pb.ProvisionRequest(group=index)

    fake.provision = provision
    assert [answer.group for answer in link(timeout_s=1).provision(requests())] == [0, 1, 2, 3]


def test_answers_that_nobody_asked_for(fake: Fake, link: Callable[..., Connection]) -> None:
    asking = threading.Event()

    def provision(requests: Iterator[Any], context: Any) -> Iterator[Any]:
        yield pb.ProvisionResponse(group=0)

    def requests() -> Iterator[pb.ProvisionRequest]:
        asking.wait(10)
        yield pb.ProvisionRequest(group=0)

    fake.provision = provision
    with pytest.raises(ProtocolError, match="before it was asked"):
        list(link().provision(requests()))
    asking.set()


def test_no_watchdog_is_left(fake: Fake, link: Callable[..., Connection]) -> None:
    before = set(threading.enumerate())  # sessions of other tests may be open
    connection = link(timeout_s=0.2, retry_s=0)
    for work in WORK:
        with pytest.raises(TransportError):
            work(connection)
    deadline = time.monotonic() + 5
    while any(thread.name == "sordino-watchdog" for thread in set(threading.enumerate()) - before):
        assert time.monotonic() < deadline
        time.sleep(0.05)


# -- what is wrong before anything is sent -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "text"),
    [("", "empty"), *((t, "line break") for t in ("abc\n", "abc\r", "a\nb", "a b", "schlüssel", "\ufeffabc", "a\0b"))],
)
def test_a_token_that_cannot_be_one(token: str, text: str) -> None:
    with Clock() as clock, pytest.raises(AuthError, match=text):
        Connection(NOWHERE, token=token, retry_s=60)
    assert clock.took < 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no certificate",
        b"\x30\x82\x01\x0a\xff\xfe",
        b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    ],
)
def test_a_ca_file_without_a_certificate(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ca.pem").write_bytes(content)
    with Clock() as clock, pytest.raises(TransportError, match="no PEM certificate"):
        Connection(NOWHERE.replace("grpc:", "grpcs:"), ca=tmp_path / "ca.pem", retry_s=60)
    assert clock.took < 1


def test_a_ca_file_with_remarks(tmp_path: Path) -> None:
    """Of any encoding, beside its certificate: the connection is tried."""
    ca = make_certificates(tmp_path, ["localhost"]).ca
    ca.write_bytes(b"# f\xfcr die Pr\xfcfung\r\n" + ca.read_bytes())
    with pytest.raises(TransportError, match="nothing listens"):
        Connection(NOWHERE.replace("grpc:", "grpcs:"), ca=ca, retry_s=0)


def test_a_stopped_process_does_not_hold_up_others(fake: Fake, link: Callable[..., Connection], tmp_path: Path) -> None:
    connection = link(timeout_s=0.5)
    folder = tmp_path / connection.manifest.fingerprint
    folder.mkdir(parents=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BundleError, match="another process fetches this bundle"):
            fetch_bundle(connection, cache=tmp_path)
    assert not fake.calls
