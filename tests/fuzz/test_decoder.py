"""Damaged requests to a real server: always a clean status, never INTERNAL or UNKNOWN, and it lives on.

Cases 1.7 (hostile input kills the server) and 1.8 (a small message that declares a huge tensor).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stack import ServerProcess, check_message, masks_message, opening, rows_message, send_raw

from sordino.proto.v1 import sordino_pb2 as pb
from sordino.shared.manifest import ModelManifest

CLEAN = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
Send = Callable[[str, list[bytes]], grpc.StatusCode]
FUZZ = settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
U32 = st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 2, 63, 64, 2047, 2048, 2**20, 2**31, 2**32 - 1])


@pytest.fixture(scope="module")
def manifest(server: ServerProcess) -> ModelManifest:
    return server.manifest


@pytest.fixture(scope="module")
def send(server: ServerProcess) -> Iterator[Send]:
    """Sends messages on one call over a shared channel and checks that the status is a clean one."""
    with server.channel() as channel:

        def sent(method: str, messages: list[bytes]) -> grpc.StatusCode:
            _, status, details = send_raw(server, method, messages, channel=channel)
            assert status in CLEAN, f"{status}: {details}"
            return status

        yield sent
    assert server.running
    assert "Traceback" not in server.log()


@pytest.fixture(autouse=True)
def lives_on(server: ServerProcess) -> Iterator[None]:
    before = server.rss()
    yield
    assert server.serves()
    assert server.rss() - before < 64 << 20


def valid(manifest: ModelManifest) -> dict[str, tuple[str, list[bytes], bytes]]:
    """(method, what goes before, a valid message) by name."""
    return {
        "open": ("Evaluate", [], opening(manifest)),
        "rows": ("Evaluate", [opening(manifest)], rows_message(manifest, rows=33)),
        "masks": ("Provision", [], masks_message(manifest)),
        "check": ("Provision", [], check_message(manifest)),
    }


NAMES = st.sampled_from(["open", "rows", "masks", "check"])


@pytest.mark.parametrize("name", ["open", "rows", "masks", "check"])
def test_valid_messages_are_answered(send: Send, manifest: ModelManifest, name: str) -> None:
    method, before, message = valid(manifest)[name]
    assert send(method, [*before, message]) is grpc.StatusCode.OK


@pytest.mark.parametrize("name", ["open", "rows", "masks", "check"])
def test_truncated_at_every_kibibyte(send: Send, manifest: ModelManifest, name: str) -> None:
    method, before, message = valid(manifest)[name]
    ends = {*range(0, len(message), 1024), *range(min(len(message), 48)), *range(len(message) - 8, len(message))}
    for end in sorted(ends):
        status = send(method, [*before, message[:end]])
        # A cut between two fields leaves a well-formed message: `open` without its last field, for one.
        assert status is not grpc.StatusCode.OK or name == "open", f"cut at {end} of {len(message)}"


@pytest.mark.parametrize("name", ["open", "rows", "masks", "check"])
def test_every_bit_of_the_envelope_flipped(send: Send, manifest: ModelManifest, name: str) -> None:
    method, before, message = valid(manifest)[name]
    for bit in range(8 * min(len(message), 16)):
        damaged = bytearray(message)
        damaged[bit // 8] ^= 1 << bit % 8
        send(method, [*before, bytes(damaged)])


@FUZZ
@given(data=st.data())
def test_flipped_bits_and_spliced_bytes(send: Send, manifest: ModelManifest, data: st.DataObject) -> None:
    method, before, message = valid(manifest)[data.draw(NAMES)]
    damaged = bytearray(message)
    for _ in range(data.draw(st.integers(1, 4))):
        # Half of the damage goes where the fields and lengths are.
        top = data.draw(st.sampled_from([min(64, len(damaged)), len(damaged)]))
        at = data.draw(st.integers(0, max(top - 1, 0)))
        match data.draw(st.sampled_from(["flip", "replace", "insert", "delete"])):
            case "flip" if damaged:
                damaged[at] ^= 1 << data.draw(st.integers(0, 7))
            case "replace":
                damaged[at : at + 4] = data.draw(st.binary(min_size=4, max_size=4))
            case "insert":
                damaged[at:at] = data.draw(st.binary(max_size=16))
            case _:
                del damaged[at : at + data.draw(st.integers(1, 2000))]
    send(method, [*before, bytes(damaged)])


@FUZZ
@given(method=st.sampled_from(["Evaluate", "Provision", "FetchFile", "GetManifest"]), raw=st.binary(max_size=200))
def test_any_bytes(send: Send, manifest: ModelManifest, method: str, raw: bytes) -> None:
    before = [opening(manifest)] if method == "Evaluate" and len(raw) % 2 else []
    send(method, [*before, raw])


@FUZZ
@given(group=U32, rows=U32, size=st.integers(0, 300), number=st.integers(0, 2**64 - 1))
def test_declared_shapes(send: Send, manifest: ModelManifest, group: int, rows: int, size: int, number: int) -> None:
    request = pb.EvaluateRequest(id=number, group=group, rows=rows, data=bytes(size))
    send("Evaluate", [opening(manifest), request.SerializeToString()])


@FUZZ
@given(group=st.integers(0, 9), a=U32, b=U32, c=U32, kind=st.sampled_from(["masks", "check"]), size=st.integers(0, 999))
def test_declared_blocks(
    send: Send, manifest: ModelManifest, group: int, a: int, b: int, c: int, kind: str, size: int
) -> None:
    request = pb.ProvisionRequest(group=group, seed=bytes(32), c0=bytes(size))
    if kind == "masks":
        request.masks.CopyFrom(pb.MaskBlock(block=a, points=b))
    else:
        request.block.CopyFrom(pb.BlockProduct(rows=a, inputs=b, outputs=c))
    send("Provision", [request.SerializeToString()])


def test_messages_of_the_other_call(send: Send, manifest: ModelManifest) -> None:
    messages = valid(manifest)
    send("Evaluate", [messages["masks"][2]])
    send("Evaluate", [opening(manifest), messages["check"][2]])
    send("Provision", [messages["open"][2]])
    send("Provision", [messages["rows"][2]])
