"""Other systems' encrypted products, behind the interface of Sordino's own linear protocols.

A peer has a client half with the secret key and a server half with the matrices. They share nothing but bytes: the
public keys once, then a ciphertext each way for every row. Both run in one process, so what is measured is the work,
without a network. ``connect(matrices)`` of each module gives a :class:`Peer`, for ``sordino bench linear`` and for
:func:`sordino.client.model.attach`.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sordino.client.protocols import Cost
from sordino.client.transport import Traffic
from sordino.shared.manifest import GroupSpec

I32 = NDArray[np.int32]
F64 = NDArray[np.float64]
_LARGEST = 2**31 - 1
Matrix = NDArray[np.int8] | NDArray[np.int16]


class ClientHalf(Protocol):
    """Holds the secret key. Rows are scaled to what the scheme takes; the scale stays here."""

    public: bytes
    """What the server is given once: parameters and evaluation keys."""

    def encrypt(self, group: GroupSpec, row: I32) -> tuple[bytes, float]:
        """A ciphertext of ``row [n]`` times 1/scale, and scale.

        Raises:
            RangeError: the group is too large for the parameters.
        """
        ...

    def decrypt(self, group: GroupSpec, answer: bytes) -> F64:
        """``[m]``, for the row as it was scaled."""
        ...


class ServerHalf(Protocol):
    """Made of the client's public bytes and the matrices ``[m, n]`` by group."""

    def answer(self, group: str, request: bytes) -> bytes: ...


class Peer:
    """A :class:`sordino.client.protocols.LinearProtocol`, except that results are as near as the scheme gets.

    Attributes:
        traffic: bytes between the halves: the keys count as ``provision``, rows as ``online``.
    """

    def __init__(self, name: str, client: ClientHalf, server: ServerHalf) -> None:
        self.name = name
        self.traffic = Traffic()
        self.traffic.count("provision", up=len(client.public))
        self._client = client
        self._server = server
        self._bytes: dict[str, tuple[int, int]] = {}

    def apply(self, group: GroupSpec, rows: I32) -> I32:
        """W x for each of ``rows [R, n]``, rounded to integers: ``[R, m]``."""
        out = np.empty((rows.shape[0], group.out_features), np.int32)
        for row, product in zip(rows, out, strict=True):
            request, scale = self._client.encrypt(group, row)
            answer = self._server.answer(group.name, request)
            # An approximate result can lie beyond the largest exact one.
            product[:] = np.rint(self._client.decrypt(group, answer) * scale).clip(-_LARGEST, _LARGEST)
            self._bytes[group.name] = len(request), len(answer)
            self.traffic.count("online", up=len(request), down=len(answer))
            self.traffic.rounds += 1
        return out

    def cost(self, group: GroupSpec, rows: int) -> Cost:
        """As the last row of the group was; sizes differ by a few bytes, since ciphertexts are compressed."""
        if group.name not in self._bytes:
            self.apply(group, np.zeros((1, group.in_features), np.int32))
        up, down = self._bytes[group.name]
        return Cost(rounds=rows, bytes_up=rows * up, bytes_down=rows * down, masks=0)

    def close(self) -> None:
        pass
