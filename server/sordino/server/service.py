"""The gRPC service: turns messages into products. Of its clients it keeps the pages of open streams, and no more.

Its calls run in one event loop. What takes longer than it takes to wake another thread is done in others, so that all
streams go on meanwhile.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from sordino.proto.v1 import sordino_pb2 as pb
from sordino.proto.v1 import sordino_pb2_grpc as pb_grpc
from sordino.server.blockkernels import Answer
from sordino.server.blocks import Wanted
from sordino.server.calls import Call, Waits
from sordino.server.engine import Engine, LocalEngine
from sordino.server.kernel import below_p
from sordino.server.metrics import Metrics
from sordino.server.pagepool import PageFile
from sordino.server.pages import evaluate
from sordino.server.pagestore import PageSession, PageStore, Policy
from sordino.server.places import Places, Room
from sordino.server.provision import return_memory
from sordino.server.scheduler import Scheduler, Stream
from sordino.server.store import MatrixStore
from sordino.server.twoparty.compute import compute
from sordino.server.twoparty.session import OPENED_ROWS, TwoPartyModel
from sordino.shared.errors import FingerprintError, LimitError, ProtocolError, RangeError, UnknownGroupError
from sordino.shared.manifest import GroupSpec
from sordino.shared.packing import BlockShape, Part
from sordino.shared.pages import LEVELS, Level, N, Read, pack_answers
from sordino.shared.rlwe import (
    PARAMS,
    RESIDUE_BITS,
    SEED_BYTES,
    SWITCH_BITS,
    U32,
    RlweParams,
    expand_uniform,
    pack,
    packed_bytes,
    unpack,
)
from sordino.shared.transport import BUNDLE_CHUNK_BYTES, DEFAULT_MAX_MESSAGE_BYTES, MIN_MESSAGE_BYTES
from sordino.shared.twoparty.source import Dealer

T = TypeVar("T")
SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Sordino"].full_name

_BATCH_ROWS = 256  # of a joint product; a wider request is done in pieces, so that others come in between
_BATCH_BLOCKS = 8  # requests: each has megabytes
_WAITING_ROWS = 1 << 18  # of all that wait together, in masked products
_ALIGNED_ROWS = 16  # of a request whose stream waits for others, and they for it: decoding, not prefill
# Streams are brought in step when their rows have so many multiplications by a group together. Measured with 2 cores: 8
# streams of SmolLM2-135M, 7 million, lose an eighth by it, 16 gain as much; 4 of 2048 x 2048 and more gain a half.
_WORTH_PRODUCTS = 10_000_000
_LARGE_BYTES = 1 << 20  # of a message: to look at it takes longer than to wake a thread
_SPARE_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one server takes on: over a number, a call gets RESOURCE_EXHAUSTED at once instead of waiting; over a time,
    DEADLINE_EXCEEDED."""

    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    max_streams: int = 256
    max_streams_per_identity: int = 32
    max_provisioning: int = 8
    max_provisioning_per_identity: int = 4
    max_encoded_bytes: int = 2 << 30
    # Products of several sessions that wait for the same group are made together.
    batching: bool = True
    max_two_party: int = 16
    max_two_party_per_identity: int = 4
    # Of a pass: of which a client may open something.
    max_opened_rows: int = OPENED_ROWS
    max_attention: int = 64
    max_attention_per_identity: int = 16
    # Pages of KV caches: of all sessions in memory, of one, and of one identity. After kv_evict_s without a call a
    # session's pages may make room for others by the policy "evict", after kv_idle_s they are gone.
    max_page_bytes: int = 4 << 30
    max_page_bytes_per_session: int = 2 << 30
    max_page_bytes_per_identity: int | None = None
    kv_policy: Policy = Policy.EVICT
    # The folder of the file for pages that do not fit in memory, by the policy "spill".
    kv_spill: Path | None = None
    max_spill_bytes: int = 16 << 30
    kv_evict_s: float = 10.0
    kv_idle_s: float = 600.0
    max_downloads: int = 32
    max_downloads_per_identity: int = 4
    # Manifests and reflection.
    max_short_calls: int = 128
    max_short_calls_per_identity: int = 32
    # Health checks, which need no token.
    max_tokenless: int = 64
    max_tokenless_per_address: int = 8
    first_message_s: float = 10.0
    # Between messages of a provisioning stream, and for an answer to be read. A message of the largest size takes over
    # a minute where a line does one megabit a second. An open evaluation stream may rest for ever.
    idle_s: float = 120.0

    def __post_init__(self) -> None:
        if not MIN_MESSAGE_BYTES <= self.max_message_bytes <= 1 << 30:
            raise LimitError(f"the message limit must be 64 KiB to 1 GiB, not {self.max_message_bytes} bytes")
        if (self.kv_policy is Policy.SPILL) != (self.kv_spill is not None):
            raise RangeError("--kv-policy spill and --kv-spill FOLDER belong together")


class SordinoService(pb_grpc.SordinoServicer):
    """See ``sordino.proto`` for the calls.

    Args:
        store: the matrices.
        engine: what computes; this process on its own if there is none.
        limits: see :class:`Limits`.
        allow_clear: answer ``PROTOCOL_CLEAR``, rows without masks; for tests and benchmarks only.
        metrics: what products are counted in.
        two_party: the model for profile ``two-party``, and the dealer of its sessions; None without.

    Attributes:
        waits: the calls that wait for their client; the interceptor enters them.
        places: the calls that are open; the interceptor enters them too.
        pages: of the KV caches of all open ``Attend`` streams.
    """

    def __init__(
        self,
        store: MatrixStore,
        limits: Limits,
        *,
        engine: Engine | None = None,
        allow_clear: bool = False,
        metrics: Metrics | None = None,
        two_party: tuple[TwoPartyModel, Dealer] | None = None,
    ) -> None:
        self._two_party = two_party
        self._metrics = metrics = metrics or Metrics()
        self.waits = Waits()
        self.places = _places(limits)
        self._store = store
        self._limits = limits
        self._protocols = [pb.PROTOCOL_MASKED, pb.PROTOCOL_RLWE, *([pb.PROTOCOL_CLEAR] if allow_clear else [])]
        if two_party is not None:
            self._protocols.append(pb.PROTOCOL_TWO_PARTY)
        self._parallel = torch.get_num_threads() > 1
        self._engine = engine = engine or LocalEngine(store, limits.max_encoded_bytes)
        together = limits.batching
        compute = self._compute = ThreadPoolExecutor(engine.places, thread_name_prefix="compute")
        # One thread for products that use all cores: each thread has helpers of its own, which take a while to wake.
        wide = self._wide = ThreadPoolExecutor(1, thread_name_prefix="wide")
        # Of these, threads begin when they are needed. Attention may wait in one for the pages of others.
        threads = (
            limits.max_attention
            + limits.max_two_party
            + limits.max_provisioning
            + limits.max_downloads
            + _SPARE_THREADS
        )
        self._closed = False
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="call")
        self._products: Scheduler[int, U32, U32] = Scheduler(
            metrics.timed("masked", self._joint_product, len),
            compute,
            places=engine.places,
            worth=_worth(store),
            brief=engine.is_brief,
            most=_BATCH_ROWS,
            waiting=_WAITING_ROWS,
            together=together,
        )
        self._blocks: Scheduler[Hashable, tuple[Wanted, bytes, U32], Answer] = Scheduler(
            metrics.timed("rlwe", self._joint_blocks, lambda work: work[0].part.shape.rows),
            wide,
            most=_BATCH_BLOCKS,
            together=together,
        )
        self._masks: Scheduler[int, tuple[bytes, int, U32], tuple[U32, U32]] = Scheduler(
            metrics.timed("masks", engine.masks, lambda work: work[2].shape[1]),
            wide,
            most=_BATCH_ROWS,
            together=together,
        )
        self.pages = PageStore(
            limits.max_page_bytes,
            limits.max_page_bytes_per_session,
            limits.kv_evict_s,
            per_holder=limits.max_page_bytes_per_identity,
            policy=limits.kv_policy,
            file=PageFile(limits.kv_spill, limits.max_spill_bytes) if limits.kv_spill else None,
        )

    @property
    def waiting(self) -> int:
        """How many requests wait for a product."""
        return self._products.waiting + self._blocks.waiting + self._masks.waiting

    def close(self) -> None:
        """To be called when no call is open any more. Threads end by themselves when their work is done."""
        self._closed = True
        for scheduler in (self._products, self._blocks, self._masks):
            scheduler.close()
        for pool in (self._compute, self._wide, self._pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def _afterwards(self, *functions: Callable[[], object]) -> None:
        """In a thread, and nobody waits for it."""
        for function in () if self._closed else functions:
            self._pool.submit(function)

    async def _here_or_in_thread(self, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """Its result; in a thread where ``size`` bytes take longer than it takes to wake one."""
        return await self._in_thread(function, *arguments) if size > _LARGE_BYTES else function(*arguments)

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Its result. When the call ends meanwhile, this still waits: the thread uses what the call gives back next."""
        job = self._pool.submit(function, *arguments)
        result = asyncio.wrap_future(job)
        cancelled: asyncio.CancelledError | None = None
        while not result.done():
            try:
                await asyncio.shield(result)
            except asyncio.CancelledError as error:
                if job.cancel():
                    raise
                cancelled = error
            except Exception:
                break  # raised below
        if cancelled is not None:
            raise cancelled
        return result.result()

    # -- calls -------------------------------------------------------------------------------------------------------

    async def GetManifest(self, request: pb.GetManifestRequest, call: Call) -> pb.GetManifestResponse:  # noqa: N802
        del request, call
        return self._introduction

    @cached_property
    def _introduction(self) -> pb.GetManifestResponse:
        return pb.GetManifestResponse(
            manifest=self._store.manifest.to_json(),
            max_message_bytes=self._limits.max_message_bytes,
            protocols=self._protocols,
            version=version("sordino"),
            first_group=self._store.held.start,
            group_count=0 if self._store.is_whole else len(self._store.held),
        )

    async def FetchFile(self, request: pb.FetchFileRequest, call: Call) -> None:  # noqa: N802
        path = self._store.client_file(request.name)
        if path is None:
            raise UnknownGroupError("no such file in the client bundle")
        size = self._store.manifest.client_files[request.name].size
        if request.offset > size:
            raise ProtocolError(f"offset {request.offset} is past the file's {size} bytes")
        with path.open("rb") as file:
            file.seek(request.offset)
            offset = request.offset
            while data := await self._in_thread(file.read, min(BUNDLE_CHUNK_BYTES, self._limits.max_message_bytes)):
                await call.write(pb.FileChunk(offset=offset, data=data))
                offset += len(data)

    async def Provision(self, requests: Call, call: Call) -> None:  # noqa: N802
        try:
            async for request in requests:
                kind = request.WhichOneof("kind")
                if kind == "masks":
                    c0, c1 = await self._mask_products(request, call)
                elif kind == "block":
                    c0, c1, _ = await self._block(request.group, request.seed, request.c0, request.block, call)
                else:
                    raise ProtocolError("a provisioning request holds masks or a block, this one neither")
                self._metrics.provisioned()
                await call.write(pb.ProvisionResponse(group=request.group, c0=c0, c1=c1))
        finally:
            self._afterwards(self._engine.rest, return_memory)

    async def Evaluate(self, requests: Call, call: Call) -> None:  # noqa: N802
        stream = self._products.enter()
        try:
            opened, encrypted = False, False
            async for request in requests:
                if not opened:
                    self._check_open(request)
                    opened, encrypted = True, request.open.protocol == pb.PROTOCOL_RLWE
                    await call.write(pb.EvaluateResponse(id=request.id))
                    continue
                if request.HasField("open"):
                    raise ProtocolError("`open` belongs on the first message of a stream only")
                if encrypted:
                    await call.write(await self._encrypted_product(request, call))
                else:
                    await call.write(await self._product(request, call, stream))
        finally:
            self._products.leave(stream)
            self._afterwards(return_memory)

    async def Attend(self, requests: Call, call: Call) -> None:  # noqa: N802
        # Whoever has the store's lock may be at work on a disk: the loop does not wait for it.
        held, entered = self.pages.session(call.holder), list[PageSession]()
        try:
            await self._in_thread(lambda: entered.append(held.__enter__()))
            (session,) = entered
            opened = False
            async for request in requests:
                if request.HasField("open") == opened:
                    raise ProtocolError("`open` belongs on the first message of a stream, and only there")
                if not opened:
                    if request.open.protocol != pb.PROTOCOL_RLWE:
                        raise ProtocolError("attention is protocol RLWE")
                    self._check_fingerprint(request.open)
                    opened = True
                    await call.write(pb.AttendResponse(id=request.id))
                    continue
                await call.write(await self._in_thread(self._attend, request, session))
        finally:
            if entered:
                self._afterwards(lambda: held.__exit__(None, None, None))
            self._afterwards(return_memory)

    async def Compute(self, requests: Call, call: Call) -> None:  # noqa: N802
        if self._two_party is None:
            raise ProtocolError("this server has no dealer, which profile two-party needs (`sordino serve --dealer`)")
        first = await requests.read()
        if first is None:
            return
        if not first.HasField("open") or first.open.protocol != pb.PROTOCOL_TWO_PARTY:
            raise ProtocolError("the first message of a stream must set `open`, for protocol TWO_PARTY")
        self._check_fingerprint(first.open)
        try:
            await compute(*self._two_party, requests, call, self._in_thread, self._limits.idle_s)
        finally:
            self._afterwards(return_memory)

    # -- one request -------------------------------------------------------------------------------------------------

    def _check_open(self, request: pb.EvaluateRequest) -> None:
        if not request.HasField("open"):
            raise ProtocolError("the first message of a stream must set `open`")
        if request.open.protocol not in self._protocols:
            if request.open.protocol == pb.PROTOCOL_CLEAR:
                raise ProtocolError("this server takes masked rows only (protocol=clear needs `serve --allow-clear`)")
            raise ProtocolError("`open` names no protocol that this server knows")
        self._check_fingerprint(request.open)

    def _check_fingerprint(self, first: pb.Open) -> None:
        if first.fingerprint != self._store.manifest.fingerprint:
            raise FingerprintError("the server holds another split than the client: connect again to fetch its bundle")

    def _group(self, index: int) -> GroupSpec:
        """
        Raises:
            UnknownGroupError: it does not exist, or another server has it.
        """
        groups, held = self._store.manifest.groups, self._store.held
        if index >= len(groups):
            raise UnknownGroupError(f"group {index} does not exist: the bundle has {len(groups)}")
        if index not in held:
            raise UnknownGroupError(f"group {index} is not here: this server has {held.start} to {held.stop - 1}")
        return groups[index]

    async def _product(self, request: pb.EvaluateRequest, call: Call, stream: Stream) -> pb.EvaluateResponse:
        group = self._group(request.group)
        expected = 4 * request.rows * group.in_features
        if not request.rows or len(request.data) != expected:
            raise ProtocolError(
                f"{len(request.data)} bytes for {request.rows} rows of {group.in_features}, expected {expected}"
            )
        self._bound_answer(4 * request.rows * group.out_features)
        rows = np.frombuffer(request.data, dtype="<u4").reshape(request.rows, group.in_features)
        size = max(len(request.data), 4 * request.rows * group.out_features)
        if not await self._here_or_in_thread(size, below_p, rows):
            raise RangeError("an element is not below p")
        parts, spent = [], 0.0
        for first in range(0, len(rows), _BATCH_ROWS):
            some = rows[first : first + _BATCH_ROWS]
            product, seconds = await self._products.run(
                request.group,
                some,
                size=len(some),
                holder=call.holder,
                stream=stream if len(rows) <= _ALIGNED_ROWS else None,
            )
            parts.append(product)
            spent += seconds
            if len(parts) > 1:
                await asyncio.sleep(0)  # a result that is there already lets nobody else in
        return await self._here_or_in_thread(size, _answer, request.id, parts, spent)

    def _joint_product(self, group: int, several: list[U32]) -> list[U32]:
        if len(several) == 1:
            return [self._engine.product(group, several[0])]
        product = self._engine.product(group, np.concatenate(several))
        return np.split(product, np.cumsum([len(rows) for rows in several])[:-1])

    def _joint_blocks(self, _: Hashable, several: list[tuple[Wanted, bytes, U32]]) -> list[Answer]:
        return self._engine.blocks(several[0][0], [(seed, c0) for _, seed, c0 in several])

    async def _encrypted_product(self, request: pb.EvaluateRequest, call: Call) -> pb.EvaluateResponse:
        c0, c1, seconds = await self._block(request.group, request.seed, request.data, request.block, call)
        return pb.EvaluateResponse(id=request.id, data=c0, c1=c1, compute_us=_microseconds(seconds))

    async def _mask_products(self, request: pb.ProvisionRequest, call: Call) -> tuple[bytes, bytes]:
        points, group = request.masks.points, self._group(request.group)
        if not 1 <= points <= PARAMS.n or request.masks.block >= PARAMS.n:
            raise ProtocolError(f"a block has 1 to {PARAMS.n} points and an index below {PARAMS.n}")
        self._bound_answer(2 * packed_bytes(2 * points * group.planes * group.out_features))
        c0 = await self._here_or_in_thread(
            len(request.c0), _residues, request.seed, request.c0, (2, points, group.in_features)
        )
        answer, _ = await self._masks.run(
            request.group, (request.seed, request.masks.block, c0), size=points, holder=call.holder
        )
        return await self._here_or_in_thread(answer[0].nbytes, _packed, answer)

    async def _block(
        self, index: int, seed: bytes, packed: bytes, block: pb.BlockProduct, call: Call
    ) -> tuple[bytes, bytes, float]:
        group = self._group(index)
        filled = block.rows * block.inputs * block.outputs
        if not filled or block.rows & (block.rows - 1) or filled > PARAMS.n:
            raise ProtocolError(f"a block has a power of two of rows and at most {PARAMS.n} coefficients")
        if 2 * filled <= PARAMS.n:
            # Small blocks make many polynomials of few weights: gigabytes, for a request of a few megabytes.
            raise ProtocolError(f"a block that leaves half of its {PARAMS.n} coefficients empty")
        if block.answer_bits not in (0, SWITCH_BITS):
            raise ProtocolError(f"answers are modulo q or 2^{SWITCH_BITS}, not 2^{block.answer_bits}")
        n, m = group.in_features, group.out_features
        if block.transposed:
            n, m = m, n
        inputs = _range("inputs", block.first_input, block.input_count, n)
        outputs = _range("outputs", block.first_output, block.output_count, m)
        shape = BlockShape(
            block.rows, block.inputs, block.outputs, inputs.stop - inputs.start, outputs.stop - outputs.start
        )
        self._bound_answer(group.planes * shape.download_bytes(block.answer_bits))
        c0 = await self._here_or_in_thread(len(packed), _residues, seed, packed, (2, PARAMS.n, shape.input_blocks))
        wanted = Wanted(index, block.transposed, Part(inputs, outputs, shape), block.answer_bits)
        bits = block.answer_bits or RESIDUE_BITS
        answer, seconds = await self._blocks.run(wanted.key, (wanted, seed, c0), holder=call.holder)
        out0, out1 = await self._here_or_in_thread(answer[0].nbytes, _packed, answer, bits)
        return out0, out1, seconds

    def _attend(self, request: pb.AttendRequest, session: PageSession) -> pb.AttendResponse:
        with self.pages.using(session):
            return self._attention(request, session)

    def _attention(self, request: pb.AttendRequest, session: PageSession) -> pb.AttendResponse:
        start = time.perf_counter()
        kind = request.WhichOneof("kind")
        if kind == "append":
            self.pages.append(session, request.append.first, _ciphertexts(request.append.pages))
            return pb.AttendResponse(id=request.id, compute_us=_since(start))
        if kind == "drop":
            self.pages.drop(session, request.drop.pages)
            return pb.AttendResponse(id=request.id, compute_us=_since(start))
        if kind != "products":
            raise ProtocolError("an attention request opens, appends, drops or multiplies, this one does nothing")
        wanted = request.products
        try:
            read = Read(wanted.first, wanted.step, wanted.count)
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        level, count = _level(wanted.operands), wanted.operands.count
        self._bound_answer(len(wanted.sums) * level.answer_bytes(read))
        if sum(len(one.pages) for one in wanted.sums) > count + len(wanted.sums):
            raise ProtocolError(f"{count} operands and {len(wanted.sums)} sums have more products than both together")
        numbers = sorted({number for one in wanted.sums for number in one.pages})
        place = {number: i for i, number in enumerate(numbers)}
        sums = []
        for one in wanted.sums:
            if not one.pages or len(one.pages) != len(one.operands) or max(one.operands) >= count:
                raise ProtocolError("a sum has as many operands, of those that are sent, as pages, and one at least")
            sums.append([(k, place[number]) for k, number in zip(one.operands, one.pages, strict=True)])
        if not sums:
            raise ProtocolError("a request for products without a sum")
        # Without the cores: it may wait for the requests of others, which need them.
        pages = self.pages.find(session, numbers, level)
        with self._engine.all_cores():
            start = time.perf_counter()
            operands = _ciphertexts(wanted.operands)
            answers = evaluate(operands, pages, sums, read, level, parallel=self._parallel)
        seconds = time.perf_counter() - start
        self._metrics.product("attention", requests=1, rows=len(sums), seconds=seconds)
        c0, c1, c2 = pack_answers(answers, level)
        return pb.AttendResponse(id=request.id, c0=c0, c1=c1, c2=c2, compute_us=_since(start))

    def _bound_answer(self, size: int) -> None:
        if size > self._limits.max_message_bytes:
            raise LimitError(
                f"the answer would have {size} bytes, the limit is {self._limits.max_message_bytes}: ask in parts"
            )


def _worth(store: MatrixStore) -> int:
    """How many streams must decode for it to pay to bring them in step."""
    products = [matrix.in_features * matrix.out_features for matrix in store.matrices.values()]
    return max(2, math.ceil(_WORTH_PRODUCTS * len(products) / max(1, sum(products))))


def _places(limits: Limits) -> Places:
    streams = {
        "Evaluate": Room("evaluation streams", limits.max_streams, limits.max_streams_per_identity),
        "Attend": Room("attention streams", limits.max_attention, limits.max_attention_per_identity),
        "Compute": Room("two-party sessions", limits.max_two_party, limits.max_two_party_per_identity),
        "Provision": Room("provisioning streams", limits.max_provisioning, limits.max_provisioning_per_identity),
        "FetchFile": Room("downloads", limits.max_downloads, limits.max_downloads_per_identity),
    }
    return Places(
        {f"/{SERVICE_NAME}/{name}": room for name, room in streams.items()},
        Room("short calls", limits.max_short_calls, limits.max_short_calls_per_identity),
        Room("calls without a token", limits.max_tokenless, limits.max_tokenless_per_address),
    )


def _answer(number: int, parts: Sequence[U32], seconds: float) -> pb.EvaluateResponse:
    data = b"".join(part.astype("<u4", copy=False).tobytes() for part in parts)
    return pb.EvaluateResponse(id=number, data=data, compute_us=_microseconds(seconds))


def _range(what: str, first: int, count: int, size: int) -> slice:
    stop = first + count if count else size
    if not first < stop <= size:
        raise ProtocolError(f"{what} {first} to {stop} are not a range of the {size} that this matrix has")
    return slice(first, stop)


def _residues(seed: bytes, packed: bytes, shape: tuple[int, ...], params: RlweParams = PARAMS) -> NDArray[np.uint32]:
    if len(seed) != SEED_BYTES:
        raise ProtocolError(f"a seed has {SEED_BYTES} bytes, this one {len(seed)}")
    return unpack(packed, shape, params)


def _packed(halves: Sequence[U32], bits: int = RESIDUE_BITS) -> tuple[bytes, bytes]:
    c0, c1 = halves
    return pack(c0, bits), pack(c1, bits)


def _level(sent: pb.Ciphertexts) -> Level:
    if sent.primes not in LEVELS:
        raise ProtocolError(f"a ciphertext of a page has 2 or 3 primes, not {sent.primes}")
    return LEVELS[sent.primes]


def _ciphertexts(sent: pb.Ciphertexts) -> NDArray[np.uint32]:
    """``[count, 2 halves, primes, N]``."""
    params = _level(sent).params
    if not sent.count:
        raise ProtocolError("a message without a ciphertext")
    # The length is checked first: the other half is made for no more than was sent.
    c0 = _residues(sent.seed, sent.c0, (len(params.primes), sent.count, N), params)
    c1 = expand_uniform(sent.seed, 0, (sent.count, N), params)
    return np.ascontiguousarray(np.stack([c0, c1]).transpose(2, 0, 1, 3))


def _since(start: float) -> int:
    return _microseconds(time.perf_counter() - start)


def _microseconds(seconds: float) -> int:
    """Never 0, which would not be sent: the size of an answer depends on its shape alone."""
    return max(1, int(seconds * 1e6))
