"""CrypTen on a :class:`~peers.crypten.channel.Link`: its communicator for two parties, and its import.

CrypTen (Knott et al., "CrypTen: secure multi-party computation meets machine learning", NeurIPS 2021; MIT) exchanges
shares through one object, usually torch.distributed's process group. :class:`GrpcCommunicator` takes its place. What a
method of CrypTen opens in one go is one message each way, so a round of CrypTen's is a round of the link.

Version 0.4.1 of December 2022 imports parts of ``onnx`` and of PyTorch's exporter for converting models, which nothing
here does and which today's PyTorch no longer has; empty modules stand in for these while it is imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import ReduceOp

from peers.crypten.channel import Link
from sordino.shared.errors import ProtocolError

I64 = NDArray[np.int64]
_ABSENT: Final = ("onnx", "onnx.numpy_helper", "torch.onnx.symbolic_registry")
_PARTIES: Final = 2


def _import() -> ModuleType:
    for name in _ABSENT:
        sys.modules[name] = ModuleType(name)
        parent, _, child = name.rpartition(".")
        if parent in _ABSENT:
            setattr(sys.modules[parent], child, sys.modules[name])
    try:
        return importlib.import_module("crypten")
    finally:
        for name in _ABSENT:
            del sys.modules[name]


crypten: Final[Any] = _import()


class _Done:
    """What CrypTen waits for after a transfer that was not to block: there is nothing left to wait for."""

    def wait(self) -> None:
        pass


class GrpcCommunicator(crypten.communicator.Communicator):  # type: ignore[misc]
    """The methods that CrypTen calls for two parties; tensors are int64. The others raise NotImplementedError."""

    instance: GrpcCommunicator

    def __init__(self, link: Link, rank: int) -> None:
        self._link, self._rank = link, rank

    @classmethod
    def is_initialized(cls) -> bool:
        return hasattr(cls, "instance")

    @classmethod
    def get(cls) -> GrpcCommunicator:
        return cls.instance

    def get_world_size(self) -> int:
        return _PARTIES

    def get_rank(self) -> int:
        return self._rank

    def isend(self, tensor: torch.Tensor, dst: int) -> _Done:
        del dst
        self._send([tensor])
        return _Done()

    def irecv(self, tensor: torch.Tensor, src: int | None = None) -> _Done:
        del src
        tensor.copy_(torch.from_numpy(self._receive([tensor])[0].copy()))
        return _Done()

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        if self._rank == src:
            self.isend(tensor, src)
        else:
            self.irecv(tensor, src)
        return tensor

    def all_reduce(self, input: Any, op: ReduceOp.RedOpType = ReduceOp.SUM, batched: bool = False) -> Any:
        """Sum or exclusive or of both parties' tensors, to both; of a list at once, if ``batched``."""
        mine = input if batched else [input]
        self._send(mine)
        both = self._joined(mine, op)
        return both if batched else both[0]

    def reduce(self, input: Any, dst: int, op: ReduceOp.RedOpType = ReduceOp.SUM, batched: bool = False) -> Any:
        """As :meth:`all_reduce`, but to ``dst`` alone; the other gets None."""
        mine = input if batched else [input]
        if self._rank != dst:
            self._send(mine)
            return None
        both = self._joined(mine, op)
        return both if batched else both[0]

    def barrier(self) -> None:
        self._send([])
        self._receive([])

    def _joined(self, mine: Sequence[torch.Tensor], op: ReduceOp.RedOpType) -> list[torch.Tensor]:
        join = {ReduceOp.SUM: np.add, ReduceOp.BXOR: np.bitwise_xor}[op]
        theirs = self._receive(mine)
        return [torch.from_numpy(np.asarray(join(a.numpy(), b))) for a, b in zip(mine, theirs, strict=True)]

    def _send(self, tensors: Sequence[torch.Tensor]) -> None:
        if any(tensor.dtype != torch.int64 for tensor in tensors):
            raise ProtocolError(f"shares are int64, not {[str(tensor.dtype) for tensor in tensors]}")
        self._link.send(b"".join(np.ascontiguousarray(tensor.numpy()).data for tensor in tensors))

    def _receive(self, like: Sequence[torch.Tensor]) -> list[I64]:
        """Tensors of these shapes, read-only."""
        words = np.frombuffer(self._link.receive(), np.int64)
        sizes = [tensor.numel() for tensor in like]
        if words.size != sum(sizes):
            raise ProtocolError(f"{words.size} words came where {sum(sizes)} were due: the parties are out of step")
        parts = np.split(words, np.cumsum(sizes)[:-1]) if sizes else []
        return [part.reshape(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def start(link: Link, rank: int) -> None:
    """Has CrypTen use ``link`` from here on, as party ``rank``, and agrees on its common seeds: once in a process."""
    GrpcCommunicator.instance = GrpcCommunicator(link, rank)
    crypten.communicator.DistributedCommunicator = GrpcCommunicator
    crypten._setup_prng()
