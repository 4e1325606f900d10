"""Encrypted KV caches of many sessions: full memory, disks, cancels at any moment, and nothing shared by tenants."""

from __future__ import annotations

import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from pairs import InProcessServer
from stack import ServerProcess, answer

from sordino.client import connect
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.proto.v1 import sordino_pb2_grpc as pb_grpc
from sordino.server.pagepool import PageFile
from sordino.server.pagestore import Policy
from sordino.server.service import Limits
from sordino.shared.errors import RangeError
from sordino.shared.pages import KEYS, VALUES, N
from sordino.shared.rlwe import PAGE_PARAMS, pack

PAGE_BYTES = KEYS.page_bytes
PROMPT = "the quick brown fox jumps"


def ciphertexts(count: int, seed: int = 0) -> pb.Ciphertexts:
    c0 = np.random.default_rng(seed).integers(0, min(PAGE_PARAMS.primes), (3, count, N), dtype=np.uint32)
    return pb.Ciphertexts(count=count, seed=bytes([seed]) * 32, c0=pack(c0), primes=3)


def append(count: int, first: int = 0, seed: int = 0) -> pb.AttendRequest:
    return pb.AttendRequest(append=pb.PageAppend(first=first, pages=ciphertexts(count, seed)))


def products(pages: int) -> pb.AttendRequest:
    """One operand with each page, and all in one sum."""
    sums = [pb.PageSum(operands=[0] * len(each), pages=each) for each in ([0], list(range(pages)))]
    return pb.AttendRequest(
        products=pb.PageProducts(operands=ciphertexts(pages), sums=sums, first=63, step=64, count=64)
    )


class Stream:
    """An ``Attend`` stream by hand.

    Args:
        token: whose it is, for limits; a server without authentication counts by it too.
    """

    def __init__(self, channel: grpc.Channel, fingerprint: str, token: str = "one", **options: Any) -> None:
        self._outgoing: queue.SimpleQueue[pb.AttendRequest | None] = queue.SimpleQueue()
        metadata = options.pop("metadata", (("authorization", f"Bearer {token}"),))
        self.call = pb_grpc.SordinoStub(channel).Attend(iter(self._outgoing.get, None), metadata=metadata, timeout=60)
        self.send(pb.AttendRequest(open=pb.Open(fingerprint=fingerprint, protocol=pb.PROTOCOL_RLWE)))

    def send(self, request: pb.AttendRequest) -> None:
        self._outgoing.put(request)

    def ask(self, request: pb.AttendRequest) -> tuple[bytes, bytes, bytes]:
        self.send(request)
        return self.read()

    def read(self) -> tuple[bytes, bytes, bytes]:
        got = next(self.call)
        return got.c0, got.c1, got.c2

    def close(self) -> None:
        """Waits for the end."""
        self._outgoing.put(None)
        assert list(self.call) == []

    def cancel(self) -> None:
        self.call.cancel()
        self._outgoing.put(None)


@contextmanager
def hosting(bundle: Path, **limits: Any) -> Iterator[tuple[InProcessServer, Callable[..., Stream]]]:
    """A server, and a function that opens streams to it, which are cancelled at the end."""
    server = InProcessServer(bundle, Limits(**limits))
    opened: list[Stream] = []
    try:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:

            def enter(token: str = "one") -> Stream:
                stream = Stream(channel, server.store.manifest.fingerprint, token)
                opened.append(stream)
                stream.read()
                return stream

            yield server, enter
            for stream in opened:
                stream.cancel()
            assert wait_until(lambda: not server.pages.used_bytes and not server.pages.sessions)
    finally:
        server.close()


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


# -- memory that is full -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", list(Policy))
def test_what_remains_is_exact(bundles: Callable[..., Path], tmp_path: Path, policy: Policy) -> None:
    """Two sessions of four pages where there is memory for six."""
    limits: dict[str, Any] = {"max_page_bytes": 6 * PAGE_BYTES, "kv_evict_s": 0.0, "kv_policy": policy}
    if policy is Policy.SPILL:
        limits |= {"kv_spill": tmp_path / "spill"}
    with hosting(bundles("llama"), **limits) as (server, enter):
        one, two = enter(), enter("two")
        one.ask(append(4, seed=1))
        truth = one.ask(products(4))
        if policy is Policy.REFUSE:
            with pytest.raises(grpc.RpcError) as refused:
                two.ask(append(4, seed=2))
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert one.ask(products(4)) == truth
            return
        two.ask(append(4, seed=2))
        other = two.ask(products(4))
        assert other != truth
        if policy is Policy.EVICT:
            with pytest.raises(grpc.RpcError) as evicted:
                one.ask(products(4))
            assert evicted.value.code() is grpc.StatusCode.ABORTED
            assert server.pages.evictions == 1
            assert two.ask(products(4)) == other
            return
        for _ in range(3):
            assert server.pages.spilled_bytes == 2 * PAGE_BYTES
            assert one.ask(products(4)) == truth
            assert two.ask(products(4)) == other
        assert server.pages.evictions == 0


def test_a_disk_that_fails_ends_the_newcomer_alone(
    bundles: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    limits = {"max_page_bytes": 6 * PAGE_BYTES, "kv_policy": Policy.SPILL, "kv_spill": tmp_path / "spill"}
    with hosting(bundles("llama"), **limits) as (_, enter):
        one, two = enter(), enter("two")
        one.ask(append(4, seed=1))
        truth = one.ask(products(4))
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(grpc.RpcError, match="disk for pages is full or fails") as refused:
                two.ask(append(4, seed=2))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert one.ask(products(4)) == truth


def test_answers_of_several_with_pages_on_disk_are_right(
    bundles: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three clients at the same time, where there is memory for a part of one."""
    written: list[int] = []
    write = PageFile.write

    def counted(self: PageFile, memory: Any, slots: Any) -> list[int]:
        written.append(len(slots))
        return write(self, memory, slots)

    monkeypatch.setattr(PageFile, "write", counted)
    limits = {"max_page_bytes": 2 * 2 * 5 * PAGE_BYTES, "kv_policy": Policy.SPILL, "kv_spill": tmp_path / "spill"}
    with hosting(bundles("llama"), **limits) as (server, _):
        target, options = f"grpc://127.0.0.1:{server.port}", {"protocol": "clear", "cache": tmp_path / "cache"}
        with (plain := connect(target, **options)).session:
            truth = answer(plain, PROMPT)
        links = [connect(target, attention="rlwe", page_tokens=4, **options) for _ in range(3)]
        answers: list[list[int]] = []
        threads = [threading.Thread(target=lambda link=link: answers.append(answer(link, PROMPT))) for link in links]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for link in links:
            link.session.close()
        assert answers == [truth] * 3
        assert written


def test_nothing_of_pages_stays_on_disk(bundles: Callable[..., Path], tmp_path: Path) -> None:
    """Even of a server that was killed."""
    folder = tmp_path / "spill"
    options = ("--kv-mib", "1", "--kv-policy", "spill", "--kv-spill", str(folder))
    with ServerProcess(bundles("llama"), tmp_path / "server", arguments=options) as server:
        with server.channel() as channel:
            stream = Stream(channel, server.manifest.fingerprint, metadata=server.metadata)
            stream.read()
            for number in range(5):
                stream.ask(append(4, first=4 * number))
            first = stream.ask(products(4))
            assert stream.ask(products(4)) == first
            assert folder.stat().st_mode & 0o777 == 0o700
            server.kill()
        assert not list(folder.iterdir())


def test_the_policy_and_the_folder_belong_together(tmp_path: Path) -> None:
    for limits in ({"kv_policy": Policy.SPILL}, {"kv_spill": tmp_path}):
        with pytest.raises(RangeError, match="belong together"):
            Limits(**limits)


def test_a_token_has_a_limit_of_its_own(bundles: Callable[..., Path]) -> None:
    with hosting(bundles("llama"), max_page_bytes_per_identity=5 * PAGE_BYTES) as (server, enter):
        first, second, other = enter(), enter(), enter("two")
        first.ask(append(4))
        with pytest.raises(grpc.RpcError, match="a token may keep") as refused:
            second.ask(append(4))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        other.ask(append(4))
        assert server.pages.used_bytes == 8 * PAGE_BYTES


# -- sessions that end -------------------------------------------------------------------------------------------------


def test_two_hundred_cancels_leave_nothing(bundles: Callable[..., Path]) -> None:
    """After any message that was sent, with any of the answers read, at any moment of the work; late messages do
    nothing."""
    draw = random.Random(5)
    messages = [append(3, seed=1), products(3), append(3, first=3, seed=2), products(6), products(6)]
    late = append(3, first=6, seed=3)
    with hosting(bundles("llama")) as (server, enter):
        steady = enter("steady")
        steady.ask(append(2))
        truth = steady.ask(products(2))
        for _ in range(200):
            stream = enter()
            sent = draw.randrange(len(messages) + 1)
            for message in messages[:sent]:
                stream.send(message)
            for _ in range(draw.randint(0, sent)):
                stream.read()
            time.sleep(draw.random() * 0.004)
            stream.cancel()
            stream.send(late)
        assert wait_until(lambda: server.pages.sessions == 1)
        assert server.pages.used_bytes == 2 * PAGE_BYTES
        assert steady.ask(products(2)) == truth


def test_a_session_that_ends_leaves_another_right(bundles: Callable[..., Path]) -> None:
    """Its slots go to a third while the other's products run."""
    with hosting(bundles("llama"), max_page_bytes=16 * PAGE_BYTES, kv_policy=Policy.REFUSE) as (server, enter):
        steady = enter("steady")
        steady.ask(append(8, seed=1))
        wanted, over = products(8), threading.Event()
        truth = steady.ask(wanted)
        wrong: list[int] = []
        asked = 0

        def compute() -> None:
            nonlocal asked
            while not over.is_set():
                asked += 1
                if steady.ask(wanted) != truth:
                    wrong.append(asked)

        thread = threading.Thread(target=compute)
        thread.start()
        for number in range(60):
            stream = enter("other")
            stream.ask(append(8, seed=2 + number % 3))
            stream.close()
        over.set()
        thread.join(60)
        assert asked > 10
        assert not wrong
        assert server.pages.used_bytes == 8 * PAGE_BYTES


def test_five_hundred_sessions_take_no_more_memory(server: ServerProcess) -> None:
    message = append(4)
    with server.channel() as channel:

        def sessions(count: int) -> int:
            for _ in range(count):
                stream = Stream(channel, server.manifest.fingerprint, metadata=server.metadata)
                stream.read()
                stream.ask(message)
                stream.close()
            return server.rss()

        before = sessions(100)
        assert sessions(500) - before < 500 * PAGE_BYTES // 4  # where one page of each stayed, 500


# -- nothing is shared -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["one", "two"])
def test_equal_pages_are_kept_twice(bundles: Callable[..., Path], token: str) -> None:
    """Of another tenant, and of the same one: whoever sends what somebody sent before learns nothing from it."""
    with hosting(bundles("llama")) as (server, enter):
        one = enter("one")
        one.ask(append(4))
        assert server.pages.used_bytes == 4 * PAGE_BYTES
        two = enter(token)
        two.ask(append(4))
        assert server.pages.used_bytes == 8 * PAGE_BYTES
        truth = two.ask(products(4))
        one.close()
        assert wait_until(lambda: server.pages.used_bytes == 4 * PAGE_BYTES)
        assert two.ask(products(4)) == truth


def test_a_prompt_costs_the_next_tenant_as_much(bundles: Callable[..., Path], tmp_path: Path) -> None:
    """The same pages, messages and bytes as the first, and as another prompt of its length."""
    with hosting(bundles("llama")) as (server, _):
        target = f"grpc://127.0.0.1:{server.port}"
        costs = []
        for prompt in (PROMPT, PROMPT, PROMPT[::-1]):
            link = connect(target, protocol="clear", attention="rlwe", page_tokens=4, cache=tmp_path / "cache")
            with link.session as session:
                ids = link.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
                before = server.pages.used_bytes
                kept = link.model(**ids, use_cache=True).past_key_values
                traffic = session.traffic
                used = server.pages.used_bytes - before
                costs.append((used, traffic.up["attention"], traffic.down["attention"]))
                del kept
            assert wait_until(lambda: not server.pages.used_bytes)
        assert costs[0][0] >= 2 * 2 * 6 * (KEYS.page_bytes + VALUES.page_bytes)
        assert costs == [costs[0]] * 3
