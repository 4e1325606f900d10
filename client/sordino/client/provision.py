"""Provisioning: check vectors once, then W r for batches of future rows, encrypted under keys that live for one batch.

What is encrypted is always a mask r or a check vector v, both fresh and uniform, never anything that depends on a
prompt. See docs/protocol.md; the packing of masks has one ciphertext per input channel and one slot per coefficient.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sordino.client.blocks import check_blocks
from sordino.client.kernels import all_in_ring, dot_mod_p
from sordino.client.pool import CheckVector, MaskPool
from sordino.client.prg import uniform_mod_p
from sordino.client.rlwe import SecretKey
from sordino.client.transport import Connection
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.shared.errors import IntegrityError, PoolError, ProtocolError, TransportError
from sordino.shared.manifest import GroupSpec, ModelManifest
from sordino.shared.prg import random_key
from sordino.shared.ring import P, combine_planes
from sordino.shared.rlwe import PARAMS, SEED_BYTES, U32, expand_uniform, pack, packed_bytes, unpack
from sordino.shared.transport import DEFAULT_MAX_MESSAGE_BYTES

Progress = Callable[[int, int], None]
"""Called with (groups done, groups in all)."""

_IN_FLIGHT = 2  # groups encrypted ahead of the answers: enough to keep both sides busy, little to hold in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisionPlan:
    """What one batch costs, before it starts. Bytes are payload on the wire; disk is what the pool file grows by."""

    slots: int
    groups: int
    up_bytes: int
    down_bytes: int
    check_bytes: int
    disk_bytes: int

    @property
    def bytes_per_token(self) -> float:
        return (self.up_bytes + self.down_bytes) / self.slots


def plan_batch(
    manifest: ModelManifest, slots: int, *, checks: int, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
) -> ProvisionPlan:
    """The cost of one batch of ``slots`` (a batch travels as full polynomials, so fewer slots save disk alone).

    Check vectors of large groups cost more with smaller messages: what one part needs is sent again for the next.
    """
    up = sum(packed_bytes(2 * PARAMS.n * g.in_features) for g in manifest.groups)
    down = sum(2 * packed_bytes(2 * PARAMS.n * g.planes * g.out_features) for g in manifest.groups)
    blocks = [b for i, g in enumerate(manifest.groups) for b in check_blocks(i, g, checks, max_message_bytes)]
    return ProvisionPlan(
        slots=slots,
        groups=len(manifest.groups),
        up_bytes=up,
        down_bytes=down,
        check_bytes=sum(block.bytes_up() + block.bytes_down() for block in blocks),
        disk_bytes=4 * slots * sum(g.out_features for g in manifest.groups),
    )


def points_per_block(group: GroupSpec, max_message_bytes: int) -> int:
    """Evaluation points in one message, a power of two, so that request and answer both fit."""
    points = PARAMS.n
    while (
        points > 1
        and max(
            packed_bytes(2 * points * group.in_features),
            2 * packed_bytes(2 * points * group.planes * group.out_features),
        )
        > max_message_bytes
    ):
        points //= 2
    return min(points, 256)


# -- check vectors (§4.4) --------------------------------------------------------------------------------------------


def fetch_check_vectors(connection: Connection, count: int, progress: Progress | None = None) -> dict[str, CheckVector]:
    """c = v^T W for ``count`` secret random v per group, as encrypted products with W^T; large ones part by part.

    Of no vectors there are none: an empty dictionary, and nothing is sent.

    Raises:
        ProtocolError: an answer of the wrong size.
        TransportError: the server went away; nothing is kept.
    """
    if not count:
        return {}
    groups = connection.manifest.groups
    blocks = [check_blocks(i, group, count, connection.max_message_bytes) for i, group in enumerate(groups)]
    keys = [SecretKey() for _ in groups]
    vs = [uniform_mod_p(random_key(), b"check vector", count * g.out_features).reshape(count, -1) for g in groups]

    def requests() -> Iterator[pb.ProvisionRequest]:
        for index, v in enumerate(vs):
            for block in blocks[index]:
                # Entries of v that several messages need are encrypted anew for each.
                seed, c0, wanted = block.encrypt(v, keys[index])
                yield pb.ProvisionRequest(group=index, seed=seed, c0=c0, block=wanted)

    vectors: dict[str, CheckVector] = {}
    with closing(connection.provision(requests())) as answers:
        for index, group in enumerate(groups):
            c = np.zeros((count, group.in_features), np.uint64)
            for block in blocks[index]:
                response = next(answers, None)
                if response is None:
                    raise TransportError("the server ended the stream before all check vectors were answered")
                _expected(groups, index, response)
                c[:, block.part.outputs] += block.decrypt(response.c0, response.c1, keys[index])[:count]
            vectors[group.name] = CheckVector(v=vs[index], c=(c % P).astype(np.uint32))
            if progress:
                progress(index + 1, len(groups))
        if next(answers, None) is not None:
            raise ProtocolError("the server sent more answers than there were requests")
    return vectors


def verify(group: GroupSpec, check: CheckVector, rows: U32, answers: U32, answerer: str = "the server") -> None:
    """v.y = c.u mod p for every row u and answer y (Freivalds): a wrong answer passes with probability 2^-32 a vector.

    Which server made c makes no difference: all of them hold the same matrix.

    Args:
        answerer: who is named when it fails; see :meth:`sordino.client.route.Route.answerer`.

    Raises:
        IntegrityError: an answer is not this group's matrix times its row.
    """
    expected = np.empty((rows.shape[0], check.v.shape[0]), np.uint32)
    dot_mod_p(check.c, rows, expected)
    verify_expected(group, check, expected, answers, answerer)


def verify_expected(group: GroupSpec, check: CheckVector, expected: U32, answers: U32, answerer: str) -> None:
    """:func:`verify` with c.u computed beforehand (while the server worked)."""
    got = np.empty_like(expected)
    dot_mod_p(check.v, answers, got)
    if not np.array_equal(got, expected) or not all_in_ring(answers):
        raise IntegrityError(
            f"the answer of {answerer} for group {group.name!r} is not its matrix times the rows sent: the session "
            "ends and all masks and keys made with it are thrown away"
        )


# -- mask batches (§4.2) ---------------------------------------------------------------------------------------------


def fill(
    connection: Connection,
    pool: MaskPool,
    checks: Mapping[str, CheckVector],
    slots: int,
    progress: Progress | None = None,
    cancelled: threading.Event | None = None,
) -> None:
    """Provisions one batch of ``slots`` masks for every group, group by group, and commits it to the pool.

    A stream that breaks is taken up again at the group it was in, under fresh seeds and errors. Nothing is visible in
    the pool before every group has been answered and checked.

    Raises:
        IntegrityError: an answer fails its check; the batch is dropped (the caller destroys the pool).
        PoolError: the disk is full.
        TransportError: the server stayed away for ``retry_s``.
    """
    groups = connection.manifest.groups
    if slots > PARAMS.n:
        raise PoolError(f"a batch has at most {PARAMS.n} slots, not {slots}: make several")
    with pool.new_batch(slots) as batch:
        key = SecretKey()
        done = 0

        def attempt() -> None:
            nonlocal done
            for filled in _stream_groups(connection, checks, batch.masks, batch.write, key, done, cancelled):
                done = filled
                if progress:
                    progress(done, len(groups))
            if cancelled and cancelled.is_set():
                raise PoolError("provisioning was stopped: the session closed")
            if done != len(groups):
                raise TransportError("the server ended the stream before the batch was complete")

        connection.retrying(attempt, lambda: done)
        batch.commit()


def _stream_groups(
    connection: Connection,
    checks: Mapping[str, CheckVector],
    masks: Callable[[str], U32],
    write: Callable[[str, U32], None],
    key: SecretKey,
    first: int,
    cancelled: threading.Event | None,
) -> Iterator[int]:
    groups = connection.manifest.groups
    room = threading.Semaphore(_IN_FLIGHT)
    sent: dict[int, U32] = {}
    closed = threading.Event()

    def requests() -> Iterator[pb.ProvisionRequest]:
        for index in range(first, len(groups)):
            while not room.acquire(timeout=0.5):
                if closed.is_set():
                    return
            if closed.is_set() or (cancelled and cancelled.is_set()):
                return
            group = groups[index]
            points = points_per_block(group, connection.max_message_bytes)
            r = masks(group.name)
            padded = np.zeros((PARAMS.n, group.in_features), np.uint32)
            padded[: r.shape[0]] = r
            seed = os.urandom(SEED_BYTES)
            c1 = np.concatenate(
                [expand_uniform(seed, b, (points, group.in_features)) for b in range(PARAMS.n // points)], axis=1
            )
            c0 = key.encrypt(padded, c1)
            sent[index] = r
            for block in range(PARAMS.n // points):
                part = np.ascontiguousarray(c0[:, block * points : (block + 1) * points])
                yield pb.ProvisionRequest(
                    group=index, seed=seed, c0=pack(part), masks=pb.MaskBlock(block=block, points=points)
                )

    answers = connection.provision(requests())
    try:
        for index in range(first, len(groups)):
            group = groups[index]
            points = points_per_block(group, connection.max_message_bytes)
            columns = group.planes * group.out_features
            halves: NDArray[np.uint32] = np.empty((2, 2, PARAMS.n, columns), np.uint32)
            for block in range(PARAMS.n // points):
                response = next(answers, None)
                if response is None:
                    return
                _expected(groups, index, response)
                span = slice(block * points, (block + 1) * points)
                halves[0, :, span] = unpack(response.c0, (2, points, columns))
                halves[1, :, span] = unpack(response.c1, (2, points, columns))
            r = sent.pop(index)
            wr = combine_planes(key.decrypt(halves[0], halves[1]), group.planes)[: r.shape[0]]
            check = checks.get(group.name)
            if check is not None:
                verify(group, check, r, wr, connection.route.answerer())
            write(group.name, wr)
            room.release()
            yield index + 1
    finally:
        closed.set()
        answers.close()  # an error that is kept keeps this frame, and with it the call


def _expected(groups: tuple[GroupSpec, ...], index: int, response: pb.ProvisionResponse) -> GroupSpec:
    if index >= len(groups) or response.group != index:
        raise ProtocolError("the server answered another group than was asked")
    return groups[index]
