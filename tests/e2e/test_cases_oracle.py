"""What a client sends under encryption: no evaluation keys, nothing twice, and nothing that it has decrypted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stack import ServerProcess, answer, connect_to

from sordino.client.pages import PageKey
from sordino.client.proxy import RecordingProxy
from sordino.client.rlwe import SecretKey
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.shared.errors import IntegrityError

TOKENS = 6
WINDOW = 16  # bytes that two unrelated random texts share with probability 2^-128 a pair of places


def encrypted(server: ServerProcess, tmp: Path, **options: Any) -> Any:
    return connect_to(server, tmp, protocol="rlwe", attention="rlwe", page_tokens=4, ca=None, **options)


@pytest.mark.parametrize("protocol", ["masked", "auto"])
def test_encrypted_attention_with_masks(
    server: ServerProcess, clear_server: ServerProcess, tmp_path: Path, protocol: str
) -> None:
    with (link := connect_to(clear_server, tmp_path, protocol="clear")).session:
        truth = answer(link, tokens=TOKENS)
    pooled = {"pool": tmp_path / "pool", "state_dir": tmp_path / "client-state", "refill": protocol == "masked"}
    link = connect_to(server, tmp_path, protocol=protocol, attention="rlwe", page_tokens=4, **pooled)
    with link.session:
        assert answer(link, tokens=TOKENS) == truth
        assert link.session.traffic.up["attention"]


def test_there_are_no_evaluation_keys(server: ServerProcess, tmp_path: Path) -> None:
    """Case 2.8: nothing is uploaded before the first product, under any key, but the check vectors if there are any."""
    with RecordingProxy(server.target, ca=server.ca) as proxy:
        with encrypted(server, tmp_path, target=proxy.target, check_vectors=0).session:
            pass
        assert sum(message.size for message in proxy.messages(direction="up")) < 1000


@pytest.fixture
def decrypted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Everything that a key of this process decrypts, as the bytes it has there and as int32 and float32."""
    seen: list[bytes] = []

    def noted(function: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            values = function(*args, **more)
            seen.extend(np.ascontiguousarray(values, kind).tobytes() for kind in (values.dtype, np.float32))
            return values

        return call

    for key, name in ((SecretKey, "decrypt"), (SecretKey, "decrypt_switched"), (PageKey, "decrypt")):
        monkeypatch.setattr(key, name, noted(getattr(key, name)))
    return seen


def windows(texts: list[bytes]) -> set[bytes]:
    """All aligned windows that are not mostly zeros."""
    found = (text[at : at + WINDOW] for text in texts for at in range(0, len(text) - WINDOW + 1, 4))
    return {window for window in found if len(set(window)) > 4}


def test_nothing_that_was_decrypted_is_sent(
    bundles: Callable[..., Path], tmp_path: Path, decrypted: list[bytes]
) -> None:
    """Case 2.9, over an answer that outlives its server, and one that ends with a failed check."""

    def restarts(method: str, direction: str, index: int, raw: bytes) -> bytes:
        if (method, direction, index) == ("Evaluate", "down", 30):
            own.kill()
            own.restart()
        return raw

    def lies(method: str, direction: str, index: int, raw: bytes) -> bytes:
        if (method, direction, index) != ("Evaluate", "down", 30):
            return raw
        response = pb.EvaluateResponse.FromString(raw)
        response.data = response.data[:4] + bytes([response.data[4] ^ 0x10]) + response.data[5:]
        return response.SerializeToString()

    sent = []
    with ServerProcess(bundles("llama"), tmp_path / "server") as own:
        with RecordingProxy(own.target, ca=own.ca, tamper=restarts) as proxy:
            link = connect_to(own, tmp_path, target=proxy.target, ca=None, protocol="rlwe")
            with link.session:
                answer(link, tokens=TOKENS)
            assert link.session.traffic.retries
            sent += proxy.messages(direction="up")
        with RecordingProxy(own.target, ca=own.ca, tamper=lies) as proxy:
            link = encrypted(own, tmp_path, target=proxy.target)
            with link.session, pytest.raises(IntegrityError):
                answer(link, tokens=TOKENS)
            assert link.session.traffic.up["attention"]
            sent += proxy.messages(direction="up")
    assert len(decrypted) > 50
    known = windows(decrypted)
    assert len(known) > 10_000
    repeated = Counter[bytes]()
    for message in sent:
        assert message.raw is not None
        assert not known & windows([message.raw[shift:] for shift in range(4)])
        if message.method == "Evaluate":
            request = pb.EvaluateRequest.FromString(message.raw)
            repeated[request.seed] += bool(request.seed)
        elif message.method == "Attend":
            attend = pb.AttendRequest.FromString(message.raw)
            for part in (attend.append.pages, attend.products.operands):
                repeated[part.seed] += bool(part.seed)
    # A retry after a broken stream sends the same bytes once more; nothing else is encrypted under the same seed.
    assert sum(count > 1 for count in repeated.values()) <= 1
    assert len(repeated) > 30
