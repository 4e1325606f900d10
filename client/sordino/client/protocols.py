"""Linear protocols: exact W x over the integers, without showing x to the server (or, for ``clear``, showing it)."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sordino.client.kernels import I32, U32, dot_mod_p, from_ring, mask, to_ring, unmask
from sordino.client.provision import verify_expected
from sordino.client.refill import PoolKeeper
from sordino.client.transport import Connection
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.shared.errors import IntegrityError
from sordino.shared.manifest import GroupSpec


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
    """

    name = "masked"

    def __init__(self, connection: Connection, keeper: PoolKeeper) -> None:
        self._stream = connection.evaluation(pb.PROTOCOL_MASKED)
        self._keeper = keeper
        self._timings = connection.timings
        self._index = {group.name: i for i, group in enumerate(connection.manifest.groups)}
        self._failure: IntegrityError | None = None
        self._failing = threading.Lock()

    def apply(self, group: GroupSpec, rows: I32) -> I32:
        if self._failure is not None:
            raise self._failure
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

        try:
            y = self._stream.product(self._index[group.name], group, u, meanwhile=expect)
            now = timings.lap("wait", now)
            if check is not None:
                verify_expected(group, check, expected, y)
                now = timings.lap("verify", now)
        except IntegrityError as error:
            self._fail(error)
            raise
        self._keeper.raise_failure()
        out = np.empty(y.shape, np.int32)
        unmask(y, wr, out)
        timings.lap("unmask", now)
        return out

    def cost(self, group: GroupSpec, rows: int) -> Cost:
        return _online_cost(group, rows, rows)

    def close(self) -> None:
        self._stream.close()

    def _fail(self, error: IntegrityError) -> None:
        with self._failing:
            if self._failure is None:
                self._failure = error
                self._stream.close()
                self._keeper.destroy()


class ClearProtocol:
    """The same quantised model with nothing hidden: the reference for tests. The server must allow it."""

    name = "clear"

    def __init__(self, connection: Connection) -> None:
        self._stream = connection.evaluation(pb.PROTOCOL_CLEAR)
        self._timings = connection.timings
        self._index = {group.name: i for i, group in enumerate(connection.manifest.groups)}

    def apply(self, group: GroupSpec, rows: I32) -> I32:
        u = np.empty(rows.shape, np.uint32)
        to_ring(rows, u)
        now = time.perf_counter()
        y: U32 = self._stream.product(self._index[group.name], group, u)
        self._timings.lap("wait", now)
        out = np.empty(y.shape, np.int32)
        from_ring(y, out)
        return out

    def cost(self, group: GroupSpec, rows: int) -> Cost:
        return _online_cost(group, rows, 0)

    def close(self) -> None:
        self._stream.close()
