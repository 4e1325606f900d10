"""Linear protocols: exact W x over the integers, without showing x to the server (or, for ``clear``, showing it)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sordino.client.blocks import Round, rounds
from sordino.client.kernels import I32, U32, dot_mod_p, from_ring, mask, to_ring, unmask
from sordino.client.pool import CheckVector
from sordino.client.provision import verify, verify_expected
from sordino.client.refill import MaskSource
from sordino.client.rlwe import SecretKey
from sordino.client.transport import Connection, EvaluationStream
from sordino.client.watch import Watch
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.shared.errors import IntegrityError, SordinoError
from sordino.shared.manifest import GroupSpec
from sordino.shared.packing import Prices


@dataclass(frozen=True, slots=True)
class Cost:
    """What one application costs online: rounds, payload bytes (element data, without envelopes), mask slots."""

    rounds: int
    bytes_up: int
    bytes_down: int
    masks: int


class LinearProtocol(Protocol):
    """Evaluates a group's matrix on integer rows. Safe for several threads."""

    name: str

    def apply(self, group: GroupSpec, rows: I32) -> I32:
        """Exactly W x for each of ``rows [R, n]`` (|x| <= group.x_max): ``[R, m]`` centred integers."""
        ...

    def cost(self, group: GroupSpec, rows: int) -> Cost: ...

    def close(self) -> None: ...


def _online_cost(group: GroupSpec, rows: int, masks: int) -> Cost:
    return Cost(rounds=1, bytes_up=4 * rows * group.in_features, bytes_down=4 * rows * group.out_features, masks=masks)


class MaskedProtocol:
    """u = x - r goes out, y = W u comes back, W x = y + W r (§4.3); every answer is checked (§4.4).

    After a failed check every later call raises the same error.

    Args:
        name: ``masked``, or ``auto`` where masks are also made just in time.
    """

    def __init__(
        self, connection: Connection, keeper: MaskSource, watch: Watch | None = None, name: str = "masked"
    ) -> None:
        self.name = name
        self._stream = EvaluationStream(connection, pb.PROTOCOL_MASKED)
        self._route = connection.route
        self._keeper = keeper
        self._watch = watch or Watch()
        self._timings = connection.timings
        self._index = {group.name: i for i, group in enumerate(connection.manifest.groups)}

    def apply(self, group: GroupSpec, rows: I32) -> I32:
        self._keeper.raise_failure()
        try:
            return self._apply(group, rows)
        except IntegrityError as error:
            self._keeper.fail(error)
            raise
        except SordinoError:
            # Where a check failed elsewhere meanwhile, this is what came of it: no pool, no connection.
            self._keeper.raise_failure()
            raise

    def _apply(self, group: GroupSpec, rows: I32) -> I32:
        timings, now = self._timings, time.perf_counter()
        r, wr = self._keeper.take(group.name, rows.shape[0])
        now = timings.lap("masks", now)
        u = np.empty(rows.shape, np.uint32)
        mask(rows, r, u)
        now = timings.lap("mask", now)
        check = self._keeper.check(group.name)
        expected = np.empty((rows.shape[0], 0 if check is None else check.v.shape[0]), np.uint32)

        def expect() -> None:
            if check is not None:
                dot_mod_p(check.c, u, expected)

        y = self._stream.product(self._index[group.name], group, u, meanwhile=expect)
        now = timings.lap("wait", now)
        if check is not None:
            verify_expected(group, check, expected, y, self._route.answerer())
            now = timings.lap("verify", now)
        self._keeper.raise_failure()
        if self._watch.groups:
            self._watch.see(group, rows, u)
        out = np.empty(y.shape, np.int32)
        unmask(y, wr, out)
        timings.lap("unmask", now)
        return out

    def cost(self, group: GroupSpec, rows: int) -> Cost:
        return _online_cost(group, rows, rows)

    def close(self) -> None:
        self._stream.close()


class RlweProtocol:
    """Rows go out encrypted and come back as encrypted products (§5.1): no masks, no provisioning.

    Only against a semi-honest server: here x itself is encrypted, and a server that adds ct_j - Enc(guess) to an answer
    learns from the abort, or its absence, whether it guessed. So nothing is tried again after a failed check: every
    later call raises the same error. ``auto`` keeps to masks for this reason.

    Args:
        checks: the check vectors by group; none turns the check off.
        choices: how to price blocks; see :func:`sordino.client.blocks.prices`.
    """

    name = "rlwe"

    def __init__(
        self,
        connection: Connection,
        checks: Mapping[str, CheckVector],
        choices: Sequence[Prices],
        watch: Watch | None = None,
    ) -> None:
        self._stream = EvaluationStream(connection, pb.PROTOCOL_RLWE)
        self._route = connection.route
        self._watch = watch or Watch()
        self._max_message_bytes = connection.max_message_bytes
        self._timings = connection.timings
        self._index = {group.name: i for i, group in enumerate(connection.manifest.groups)}
        self._checks = checks
        self._choices = choices
        self._key = SecretKey(parallel=True)
        self._failure: IntegrityError | None = None

    def apply(self, group: GroupSpec, rows: I32) -> I32:
        if self._failure is not None:
            raise self._failure.with_traceback(None)  # not the frames, and tensors, of all who met it before
        timings, now = self._timings, time.perf_counter()
        x = np.empty(rows.shape, np.uint32)
        to_ring(rows, x)
        parts, first = [], 0
        for product in self._rounds(group, rows.shape[0]):
            some = x[first : first + product.rows]
            first += product.rows
            messages = product.requests(some, self._key)
            now = timings.lap("encrypt", now)
            try:
                answers = self._stream.exchange(messages)
                now = timings.lap("wait", now)
                y = product.result(answers, self._key, product.rows)
                now = timings.lap("decrypt", now)
                if (check := self._checks.get(group.name)) is not None:
                    verify(group, check, some, y, self._route.answerer())
                    now = timings.lap("verify", now)
            except IntegrityError as error:
                self._failure = error
                self._stream.close()
                raise
            if self._watch.groups:
                self._watch.see(group, rows[:first], messages[0].data)
            parts.append(y)
        y = parts[0] if len(parts) == 1 else np.concatenate(parts)
        out = np.empty(y.shape, np.int32)
        from_ring(y, out)
        return out

    def cost(self, group: GroupSpec, rows: int) -> Cost:
        products = list(self._rounds(group, rows))
        return Cost(
            rounds=len(products),
            bytes_up=sum(product.bytes_up() for product in products),
            bytes_down=sum(product.bytes_down() for product in products),
            masks=0,
        )

    def close(self) -> None:
        self._stream.close()

    def _rounds(self, group: GroupSpec, rows: int) -> Iterator[Round]:
        index, limit = self._index[group.name], self._max_message_bytes
        return rounds(index, group, rows, max_message_bytes=limit, choices=self._choices)


class ClearProtocol:
    """The same quantised model with nothing hidden: the reference for tests. The server must allow it."""

    name = "clear"

    def __init__(self, connection: Connection, watch: Watch | None = None) -> None:
        self._stream = EvaluationStream(connection, pb.PROTOCOL_CLEAR)
        self._watch = watch or Watch()
        self._timings = connection.timings
        self._index = {group.name: i for i, group in enumerate(connection.manifest.groups)}

    def apply(self, group: GroupSpec, rows: I32) -> I32:
        u = np.empty(rows.shape, np.uint32)
        to_ring(rows, u)
        now = time.perf_counter()
        y: U32 = self._stream.product(self._index[group.name], group, u)
        self._timings.lap("wait", now)
        if self._watch.groups:
            self._watch.see(group, rows, u)
        out = np.empty(y.shape, np.int32)
        from_ring(y, out)
        return out

    def cost(self, group: GroupSpec, rows: int) -> Cost:
        return _online_cost(group, rows, 0)

    def close(self) -> None:
        self._stream.close()
