"""Tensor parallel: one server whose matrices are spread over the processes of ``torch.distributed``.

Rank 0 answers clients; for each product it broadcasts what came, every rank multiplies with its share, and rank 0
gathers the parts. Between two groups the client computes, so pairing column- with row-parallel layers (Shoeybi et al.,
"Megatron-LM", arXiv 1909.08053) would save nothing: products are by columns of the output, without a reduction.

* Masked rows and masks: each rank has a contiguous share of the rows of W, a view of the mapped file.
* Encrypted blocks: each rank answers a share of the output blocks; it keeps their encoded weights alone, eight bytes a
  weight, and reads what it encodes from the file.

All results are integers modulo p or q, so their bits are those of one process.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from sordino.server.blockkernels import Answer
from sordino.server.blocks import Wanted
from sordino.server.engine import LocalEngine
from sordino.server.parent import end_with_parent
from sordino.server.slices import share
from sordino.server.store import MatrixStore
from sordino.shared.errors import BundleError, RangeError, SordinoError, TransportError
from sordino.shared.packing import BlockShape, Part
from sordino.shared.rlwe import PARAMS, U32

log = logging.getLogger(__name__)
Arrays = Sequence[NDArray[Any]]

# What torchrun tells each rank.
RANK: Final = "RANK"
LOCAL_RANK: Final = "LOCAL_RANK"
MAX_RANKS: Final = 8
_FRAME: Final = 1 << 15  # bytes of the first broadcast of a message; most have room in it
_STATUS: Final = 8  # bytes before a part: how it went
_FINE, _OUT_OF_RANGE, _BROKEN = range(3)
_BEAT_S: Final = 5.0
_STUCK_S: Final = 60.0
_GONE: Final = "a rank of this server is gone: try another replica, or again when it has restarted"
# Loading a large model differs from rank to rank by minutes; a process that ends is noticed at once all the same.
_TIMEOUT: Final = timedelta(minutes=15)


class Link:
    """Messages from rank 0 to all, and parts back, over the default process group."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        # NCCL moves tensors of the device alone.
        self._device = device if dist.get_backend() == "nccl" else torch.device("cpu")

    def send(self, header: dict[str, Any], arrays: Arrays = ()) -> None:
        """To all other ranks."""
        described = [(array.dtype.str, array.shape) for array in arrays]
        head = json.dumps(header | {"arrays": described}).encode()
        body = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
        message = len(head).to_bytes(8, "little") + len(body).to_bytes(8, "little") + head + body
        frame = np.zeros(max(_FRAME, len(message)), np.uint8)
        frame[: len(message)] = np.frombuffer(message, np.uint8)
        self._broadcast(torch.from_numpy(frame[:_FRAME]))
        if len(message) > _FRAME:
            self._broadcast(torch.from_numpy(frame[_FRAME:]))

    def receive(self) -> tuple[dict[str, Any], list[NDArray[Any]]]:
        """What rank 0 sends."""
        frame = self._broadcast(torch.empty(_FRAME, dtype=torch.uint8)).numpy()
        head_size, body_size = (int.from_bytes(frame[at : at + 8].tobytes(), "little") for at in (0, 8))
        rest = 16 + head_size + body_size - _FRAME
        if rest > 0:
            frame = np.concatenate([frame, self._broadcast(torch.empty(rest, dtype=torch.uint8)).numpy()])
        header = json.loads(frame[16 : 16 + head_size].tobytes())
        arrays, at = [], 16 + head_size
        for kind, shape in header.pop("arrays"):
            size = int(np.prod(shape)) * np.dtype(kind).itemsize
            arrays.append(frame[at : at + size].copy().view(kind).reshape(shape))
            at += size
        return header, arrays

    def gather(self, status: int, part: bytes, most: int) -> list[tuple[int, bytes]]:
        """Status and part of every rank, at rank 0; ``most`` bytes is the size of the largest part."""
        own = np.zeros(_STATUS + most, np.uint8)
        own[0] = status
        own[_STATUS : _STATUS + len(part)] = np.frombuffer(part, np.uint8)
        sent = torch.from_numpy(own).to(self._device)
        places = [torch.empty_like(sent) for _ in range(self.ranks)] if self.rank == 0 else None
        dist.gather(sent, places)
        found = [place.cpu().numpy() for place in places or ()]
        return [(int(place[0]), place[_STATUS:].tobytes()) for place in found]

    def _broadcast(self, frame: torch.Tensor) -> torch.Tensor:
        frame = frame.to(self._device)
        dist.broadcast(frame, 0)
        return frame.cpu()


class _Shard:
    """What each rank does for a message, and how large the parts are."""

    def __init__(self, store: MatrixStore, engine: LocalEngine, link: Link) -> None:
        self._store = store
        self._engine = engine
        self._link = link

    def part(self, header: dict[str, Any], arrays: Arrays) -> tuple[int, bytes]:
        """How it went, and this rank's part."""
        try:
            return _FINE, b"".join(np.ascontiguousarray(array).tobytes() for array in self._compute(header, arrays))
        except RangeError:
            return _OUT_OF_RANGE, b""
        except (SordinoError, RuntimeError, ValueError, MemoryError):
            log.exception("rank %d cannot answer", self._link.rank)
            return _BROKEN, b""

    def _compute(self, header: dict[str, Any], arrays: Arrays) -> list[NDArray[Any]]:
        group = header["group"]
        if header["kind"] == "product":
            return [self._engine.product(group, arrays[0])]
        if header["kind"] == "masks":
            sent = [(arrays[2 * k].tobytes(), block, arrays[2 * k + 1]) for k, block in enumerate(header["blocks"])]
            return [half for answer in self._engine.masks(group, sent) for half in answer]
        wanted = _narrowed(_wanted(header), share(_wanted(header).part.shape.output_blocks, *self._store.shard))
        if wanted is None:
            return []
        answers = self._engine.blocks(wanted, [(arrays[k].tobytes(), arrays[k + 1]) for k in range(0, len(arrays), 2)])
        return [half for answer in answers for half in answer]


def _wanted(header: dict[str, Any]) -> Wanted:
    first_in, stop_in, first_out, stop_out = header["where"]
    part = Part(slice(first_in, stop_in), slice(first_out, stop_out), BlockShape(*header["shape"]))
    return Wanted(header["group"], header["transposed"], part, header["bits"])


def _narrowed(wanted: Wanted, blocks: slice) -> Wanted | None:
    """The part of an answer that has some of the output blocks; None if there are none."""
    shape, outputs = wanted.part.shape, wanted.part.outputs
    first = outputs.start + blocks.start * shape.outputs
    stop = min(outputs.stop, outputs.start + blocks.stop * shape.outputs)
    if first >= stop:
        return None
    part = Part(wanted.part.inputs, slice(first, stop), replace(shape, out_features=stop - first))
    return replace(wanted, part=part)


class TensorParallel:
    """The engine of rank 0. One message at a time goes through all ranks.

    Attributes:
        failure: why no more is answered, or None.
    """

    places = 1

    def __init__(self, store: MatrixStore, engine: LocalEngine, link: Link) -> None:
        self._store = store
        self._link = link
        self._local = engine
        self._shard = _Shard(store, engine, link)
        self._lock = threading.Lock()
        self._since: float | None = None  # when the message began that is under way
        self._last = time.monotonic()
        self._stopped = threading.Event()
        self.failure: str | None = None
        threading.Thread(target=self._beat, name="ranks", daemon=True).start()

    def is_brief(self, group: int, rows: int) -> bool:
        """Never: it waits for others."""
        del group, rows
        return False

    def product(self, group: int, rows: U32) -> U32:
        widths = [self._rows(group, rank) for rank in range(self._link.ranks)]
        parts = self._ask({"kind": "product", "group": group}, [rows], [4 * len(rows) * width for width in widths])
        return np.concatenate([_array(part, "<u4", (len(rows), -1)) for part in parts], axis=1)

    def masks(self, group: int, sent: Sequence[tuple[bytes, int, U32]]) -> list[tuple[U32, U32]]:
        arrays = [array for seed, _, c0 in sent for array in (np.frombuffer(seed, np.uint8), c0)]
        planes = self._store.manifest.groups[group].planes
        widths = [self._rows(group, rank) for rank in range(self._link.ranks)]
        points = [c0.shape[1] for _, _, c0 in sent]
        header = {"kind": "masks", "group": group, "blocks": [block for _, block, _ in sent]}
        parts = self._ask(header, arrays, [16 * sum(points) * planes * width for width in widths])
        results, at = [], [0] * len(parts)
        for count in points:
            halves = []
            for _ in range(2):
                found = []
                for rank, (part, width) in enumerate(zip(parts, widths, strict=True)):
                    size = 8 * count * planes * width
                    found.append(_array(part[at[rank] : at[rank] + size], "<u4", (2, count, planes, width)))
                    at[rank] += size
                halves.append(np.concatenate(found, axis=3).reshape(2, count, -1))
            results.append((halves[0], halves[1]))
        return results

    def blocks(self, wanted: Wanted, sent: Sequence[tuple[bytes, U32]]) -> list[Answer]:
        shape, planes = wanted.part.shape, self._store.manifest.groups[wanted.group].planes
        ins, outs = wanted.part.inputs, wanted.part.outputs
        header = {
            "kind": "blocks",
            "group": wanted.group,
            "transposed": wanted.transposed,
            "where": (ins.start, ins.stop, outs.start, outs.stop),
            "shape": (shape.rows, shape.inputs, shape.outputs, shape.in_features, shape.out_features),
            "bits": wanted.bits,
        }
        arrays = [array for seed, c0 in sent for array in (np.frombuffer(seed, np.uint8), c0)]
        cuts = [share(shape.output_blocks, rank, self._link.ranks) for rank in range(self._link.ranks)]
        widths = [cut.stop - cut.start for cut in cuts]
        kind = "<u8" if wanted.bits else "<u4"
        rows = (
            [(shape.outputs * shape.rows,), (PARAMS.n,)] if wanted.bits else [(2, PARAMS.n)] * 2
        )  # before the columns, of each half
        each = [np.dtype(kind).itemsize * int(np.prod(lead)) * planes for lead in rows]
        parts = self._ask(header, arrays, [len(sent) * sum(each) * width for width in widths])
        answers: list[Answer] = []
        at = [0] * len(parts)
        for _ in sent:
            halves = []
            for lead, size in zip(rows, each, strict=True):
                found = []
                for rank, (part, width) in enumerate(zip(parts, widths, strict=True)):
                    found.append(_array(part[at[rank] : at[rank] + size * width], kind, (*lead, planes, width)))
                    at[rank] += size * width
                halves.append(np.concatenate(found, axis=-1).reshape(*lead, -1))
            answers.append((halves[0], halves[1]))
        return answers

    def rest(self) -> None:
        """As of the local engine, on all ranks."""
        with self._turn():
            self._link.send({"kind": "rest"})
            self._local.rest()

    @contextmanager
    def all_cores(self) -> Iterator[None]:
        with self._local.all_cores():
            yield

    def stop(self) -> None:
        """Lets the other ranks end."""
        self._stopped.set()
        with suppress(TransportError), self._turn():
            self._link.send({"kind": "stop"})

    @property
    def lost(self) -> bool:
        """Whether a rank is gone, or does not answer for longer than any message should take."""
        since = self._since
        return self.failure is not None or (since is not None and time.monotonic() - since > _STUCK_S)

    def _rows(self, group: int, rank: int) -> int:
        rows = share(self._store.manifest.groups[group].out_features, rank, self._link.ranks)
        return len(range(rows.start, rows.stop))

    def _ask(self, header: dict[str, Any], arrays: Arrays, sizes: list[int]) -> list[bytes]:
        """Every rank's part, of these sizes.

        Raises:
            RangeError: the weights of a block are so large that the answer could decode wrongly.
            TransportError: a rank is gone.
        """
        with self._turn():
            header = header | {"most": max(sizes)}
            self._link.send(header, arrays)
            parts = self._link.gather(*self._shard.part(header, arrays), max(sizes))
        if any(status == _OUT_OF_RANGE for status, _ in parts):
            raise RangeError("the weights of a block are over the noise bound: ask for smaller blocks")
        if any(status != _FINE for status, _ in parts):
            raise RuntimeError("a rank failed, see its log")
        return [part[:size] for (_, part), size in zip(parts, sizes, strict=True)]

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with self._lock:
            if self.failure is not None:
                raise TransportError(_GONE)
            self._since = time.monotonic()
            try:
                yield
            except RuntimeError as error:  # what torch.distributed raises, whatever the backend
                self.failure = type(error).__name__
                log.error("a rank of this server is gone: %s", str(error).splitlines()[0] if str(error) else "")
                raise TransportError(_GONE) from None
            finally:
                self._since, self._last = None, time.monotonic()

    def _beat(self) -> None:
        """Notices ranks that end while nobody asks."""
        while not self._stopped.wait(_BEAT_S) and self.failure is None:
            if time.monotonic() - self._last >= _BEAT_S:
                try:
                    with self._turn():
                        self._link.send({"kind": "beat"})
                        self._link.gather(_FINE, b"", 0)
                except TransportError:
                    return


def _array(part: bytes, kind: str, shape: tuple[int, ...]) -> NDArray[Any]:
    return np.frombuffer(part, kind).reshape(shape)


def join(device: str) -> None:
    """Enters the process group that torchrun described in the environment; the process ends with torchrun's."""
    end_with_parent()
    backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
    store, rank, ranks = next(dist.rendezvous("env://", timeout=_TIMEOUT))  # type: ignore[attr-defined]
    # The agent's store outlives a restart, and with it the addresses of ranks that are gone.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"start-{start}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=_TIMEOUT)
    if not 1 < dist.get_world_size() <= MAX_RANKS:
        raise SordinoError(f"tensor parallel has 2 to {MAX_RANKS} ranks, not {dist.get_world_size()}")


def shard() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    return dist.get_rank(), dist.get_world_size()


def lead(store: MatrixStore, encoded_bytes: int) -> TensorParallel:
    """The engine of rank 0, when all ranks hold the same model.

    Raises:
        BundleError: another rank's share is not that of rank 0's bundle.
    """
    link = Link(store.device)
    own = [store.digest(rank, link.ranks) for rank in range(link.ranks)]
    try:
        theirs = [part for _, part in link.gather(_FINE, own[0], 32)]
    except RuntimeError as error:
        raise SordinoError("another rank ended before this server began: its own last lines say why") from error
    for rank, (mine, part) in enumerate(zip(own, theirs, strict=True)):
        if mine != part:
            raise BundleError(f"rank {rank} has other weights: give every node a copy of one bundle")
    return TensorParallel(store, LocalEngine(store, encoded_bytes), link)


def follow(store: MatrixStore, encoded_bytes: int) -> None:
    """Works for rank 0 until it says stop.

    Raises:
        SordinoError: rank 0 is gone.
    """
    link = Link(store.device)
    engine = LocalEngine(store, encoded_bytes)
    shard = _Shard(store, engine, link)
    try:
        link.gather(_FINE, store.digest(link.rank, link.ranks), 32)
        while True:
            header, arrays = link.receive()
            kind = header["kind"]
            if kind == "stop":
                return
            if kind == "beat":
                link.gather(_FINE, b"", 0)
            elif kind == "rest":
                engine.rest()
            else:
                link.gather(*shard.part(header, arrays), header["most"])
    except RuntimeError as error:
        raise SordinoError(f"rank 0 is gone: {str(error).splitlines()[0] if str(error) else ''}") from None
