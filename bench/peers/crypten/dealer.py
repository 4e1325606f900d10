"""CrypTen's trusted third party on :class:`~peers.crypten.channel.Link`: a third process that makes what masks need.

The protocol is CrypTen's own. Each party has a seed from the dealer, and draws its shares of a tuple from it; the
dealer draws the same, and sends party 0 the share that makes the tuple right. So party 1 receives its seed and nothing
else.
Generators are torch's (Mersenne Twister), which is CrypTen's choice and no cryptographic one.
"""

from __future__ import annotations

import json
import os
from typing import Any, Final

import numpy as np
import torch

from peers.crypten.channel import Link, Listener
from peers.crypten.communicator import crypten
from sordino.shared.errors import ProtocolError, TransportError

_provider: Final[Any] = crypten.mpc.provider.ttp_provider
_SEED_BYTES: Final = 8


class DealerClient:
    """What CrypTen's ``TTPClient`` is to its provider."""

    def __init__(self, link: Link, rank: int) -> None:
        self._link = link
        link.send(bytes([rank]))
        self._generator = _generator(link.receive())

    def get(self) -> DealerClient:
        """CrypTen asks the class for its instance."""
        return self

    def get_generator(self, device: object = None) -> torch.Generator:
        del device
        return self._generator

    def ttp_request(self, function: str, device: object, *args: Any) -> torch.Tensor:
        """Party 0's share of what ``function`` makes for these sizes."""
        del device
        self._link.send(json.dumps([function, *args]).encode())
        words = np.frombuffer(self._link.receive(), np.int64)
        dimensions = int(words[0])
        shape, data = words[1 : 1 + dimensions], words[1 + dimensions :]
        return torch.from_numpy(data.reshape(shape).copy())


class Dealer(_provider.TTPServer):  # type: ignore[misc]
    """CrypTen's arithmetic of the third party, without its loop over torch.distributed."""

    def __init__(self, seeds: list[bytes]) -> None:
        self.device = "cpu"
        self.generators = [_generator(seed) for seed in seeds]

    def answer(self, request: bytes) -> bytes:
        function, *args = json.loads(request)
        if function not in _provider.TTP_FUNCTIONS:
            raise ProtocolError(f"CrypTen's dealer makes no {function!r}")
        share = getattr(self, function)(*args).numpy()
        return np.concatenate([[share.ndim, *share.shape], share.ravel()]).astype(np.int64).tobytes()


def use(link: Link, rank: int) -> None:
    """Has CrypTen take its tuples from the dealer at ``link`` from here on."""
    _provider.TTPClient = DealerClient(link, rank)
    crypten.cfg.mpc.provider = "TTP"


def deal(listener: Listener) -> None:
    """Serves two parties until party 0 closes its stream."""
    seeds = [os.urandom(_SEED_BYTES) for _ in range(2)]
    links: dict[int, Link] = {}
    for _ in seeds:
        link = listener.accept()
        rank = link.receive()[0]
        link.send(seeds[rank])
        links[rank] = link
    dealer = Dealer(seeds)
    while True:
        try:
            request = links[0].receive()
        except TransportError:
            return
        links[0].send(dealer.answer(request))


def _generator(seed: bytes) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(seed, "little", signed=True))
