"""The gRPC service: turns messages into products. Of its clients it keeps the pages of open streams, and no more."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version

import grpc
import numpy as np
import torch
from numpy.typing import NDArray

from sordino.proto.v1 import sordino_pb2 as pb
from sordino.proto.v1 import sordino_pb2_grpc as pb_grpc
from sordino.server.auth import identity_of
from sordino.server.blockkernels import choose_block_kernel
from sordino.server.blocks import BlockProducts, Wanted
from sordino.server.decoding import Waits
from sordino.server.kernel import RingMatrix
from sordino.server.pages import PageSession, PageStore, evaluate
from sordino.server.places import Places, Room
from sordino.server.provision import product_of_masks, return_memory
from sordino.server.store import MatrixStore
from sordino.shared.errors import FingerprintError, LimitError, ProtocolError, RangeError, UnknownGroupError
from sordino.shared.packing import BlockShape, Part
from sordino.shared.pages import LEVELS, Level, N, Read, pack_answers
from sordino.shared.ring import P
from sordino.shared.rlwe import (
    PARAMS,
    RESIDUE_BITS,
    SEED_BYTES,
    SWITCH_BITS,
    RlweParams,
    expand_uniform,
    pack,
    packed_bytes,
    unpack,
)
from sordino.shared.transport import BUNDLE_CHUNK_BYTES, DEFAULT_MAX_MESSAGE_BYTES, MIN_MESSAGE_BYTES

Context = grpc.ServicerContext
SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Sordino"].full_name

# A product with fewer multiplications runs on one core: waking others costs more than they save, and small products of
# several sessions then run side by side.
_NARROW_PRODUCTS = 16_000_000


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
    max_attention: int = 64
    max_attention_per_identity: int = 16
    # Pages of KV caches: of all sessions, and of one. After kv_evict_s without a call a session's pages may make room
    # for others, after kv_idle_s they are gone.
    max_page_bytes: int = 4 << 30
    max_page_bytes_per_session: int = 2 << 30
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


class SordinoService(pb_grpc.SordinoServicer):
    """See ``sordino.proto`` for the calls.

    Args:
        store: the matrices.
        limits: see :class:`Limits`.
        allow_clear: answer ``PROTOCOL_CLEAR``, rows without masks; for tests and benchmarks only.

    Attributes:
        waits: the calls that wait for their client; the interceptor enters them.
        places: the calls that are open; the interceptor enters them too.
        pages: of the KV caches of all open ``Attend`` streams.
    """

    def __init__(self, store: MatrixStore, limits: Limits, *, allow_clear: bool = False) -> None:
        self.waits = Waits()
        self.places = _places(limits)
        self._store = store
        self._limits = limits
        self._protocols = [pb.PROTOCOL_MASKED, pb.PROTOCOL_RLWE, *([pb.PROTOCOL_CLEAR] if allow_clear else [])]
        self._cores = torch.get_num_threads()
        kernel = choose_block_kernel(store.device, parallel=self._cores > 1)
        self._blocks = BlockProducts(limits.max_encoded_bytes, kernel)
        self.pages = PageStore(limits.max_page_bytes, limits.max_page_bytes_per_session, limits.kv_evict_s)
        self._wide = threading.Lock()

    # -- calls -------------------------------------------------------------------------------------------------------

    def GetManifest(self, request: pb.GetManifestRequest, context: Context) -> pb.GetManifestResponse:  # noqa: N802
        del request, context
        return pb.GetManifestResponse(
            manifest=self._store.manifest.to_json(),
            max_message_bytes=self._limits.max_message_bytes,
            protocols=self._protocols,
            version=version("sordino"),
        )

    def FetchFile(self, request: pb.FetchFileRequest, context: Context) -> Iterator[pb.FileChunk]:  # noqa: N802
        del context
        path = self._store.client_file(request.name)
        if path is None:
            raise UnknownGroupError("no such file in the client bundle")
        size = self._store.manifest.client_files[request.name].size
        if request.offset > size:
            raise ProtocolError(f"offset {request.offset} is past the file's {size} bytes")
        with path.open("rb") as file:
            file.seek(request.offset)
            offset = request.offset
            while data := file.read(min(BUNDLE_CHUNK_BYTES, self._limits.max_message_bytes)):
                yield pb.FileChunk(offset=offset, data=data)
                offset += len(data)

    def Provision(  # noqa: N802
        self, request_iterator: Iterator[pb.ProvisionRequest], context: Context
    ) -> Iterator[pb.ProvisionResponse]:
        del context
        with _memory_returned():
            yield from self._provision(request_iterator)

    def _provision(self, requests: Iterator[pb.ProvisionRequest]) -> Iterator[pb.ProvisionResponse]:
        weights: tuple[int, torch.Tensor] | None = None
        for request in requests:
            kind = request.WhichOneof("kind")
            matrix = self._matrix(request.group)
            with self._all_cores():
                if kind == "masks":
                    if weights is None or weights[0] != request.group:
                        weights = (request.group, matrix.weights.to(torch.float64))
                    response = self._masks(request, matrix, weights[1])
                elif kind == "block":
                    c0, c1 = self._block(request.group, request.seed, request.c0, request.block, matrix)
                    response = pb.ProvisionResponse(group=request.group, c0=c0, c1=c1)
                else:
                    raise ProtocolError("a provisioning request holds masks or a block, this one neither")
            yield response

    def Evaluate(  # noqa: N802
        self, request_iterator: Iterator[pb.EvaluateRequest], context: Context
    ) -> Iterator[pb.EvaluateResponse]:
        del context
        with _memory_returned():
            yield from self._evaluate(request_iterator)

    def _evaluate(self, request_iterator: Iterator[pb.EvaluateRequest]) -> Iterator[pb.EvaluateResponse]:
        torch.set_num_threads(1)  # of this thread's products
        opened = False
        answer = self._product
        for request in request_iterator:
            if not opened:
                self._check_open(request)
                opened = True
                if request.open.protocol == pb.PROTOCOL_RLWE:
                    answer = self._encrypted_product
                yield pb.EvaluateResponse(id=request.id)
                continue
            if request.HasField("open"):
                raise ProtocolError("`open` belongs on the first message of a stream only")
            yield answer(request, self._matrix(request.group))

    def Attend(  # noqa: N802
        self, request_iterator: Iterator[pb.AttendRequest], context: Context
    ) -> Iterator[pb.AttendResponse]:
        with _memory_returned(), self.pages.session(identity_of(context)) as session:
            opened = False
            for request in request_iterator:
                if request.HasField("open") == opened:
                    raise ProtocolError("`open` belongs on the first message of a stream, and only there")
                if not opened:
                    if request.open.protocol != pb.PROTOCOL_RLWE:
                        raise ProtocolError("attention is protocol RLWE")
                    self._check_fingerprint(request.open)
                    opened = True
                    yield pb.AttendResponse(id=request.id)
                    continue
                with self.pages.using(session):
                    response = self._attend(request, session)
                yield response

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

    def _matrix(self, group: int) -> RingMatrix:
        if group >= len(self._store.matrices):
            raise UnknownGroupError(f"group {group} does not exist: the bundle has {len(self._store.matrices)}")
        return self._store.matrices[group]

    def _product(self, request: pb.EvaluateRequest, matrix: RingMatrix) -> pb.EvaluateResponse:
        expected = 4 * request.rows * matrix.in_features
        if not request.rows or len(request.data) != expected:
            raise ProtocolError(
                f"{len(request.data)} bytes for {request.rows} rows of {matrix.in_features}, expected {expected}"
            )
        self._bound_answer(4 * request.rows * matrix.out_features)
        rows = np.frombuffer(request.data, dtype="<u4").reshape(request.rows, matrix.in_features)
        if int(rows.max()) >= P:
            raise RangeError("an element is not below p")
        if rows.size * matrix.out_features < _NARROW_PRODUCTS:
            start = time.perf_counter()
            product = matrix.matmul(rows)
        else:
            with self._all_cores():
                start = time.perf_counter()
                product = matrix.matmul(rows)
        data = product.astype("<u4", copy=False).tobytes()
        return pb.EvaluateResponse(id=request.id, data=data, compute_us=_since(start))

    def _encrypted_product(self, request: pb.EvaluateRequest, matrix: RingMatrix) -> pb.EvaluateResponse:
        with self._all_cores():
            start = time.perf_counter()
            c0, c1 = self._block(request.group, request.seed, request.data, request.block, matrix)
            return pb.EvaluateResponse(id=request.id, data=c0, c1=c1, compute_us=_since(start))

    def _masks(self, request: pb.ProvisionRequest, matrix: RingMatrix, weights64: torch.Tensor) -> pb.ProvisionResponse:
        points = request.masks.points
        if not 1 <= points <= PARAMS.n or request.masks.block >= PARAMS.n:
            raise ProtocolError(f"a block has 1 to {PARAMS.n} points and an index below {PARAMS.n}")
        self._bound_answer(2 * packed_bytes(2 * points * matrix.weights.shape[0]))
        c0 = _residues(request.seed, request.c0, (2, points, matrix.in_features))
        out0, out1 = product_of_masks(weights64, request.seed, request.masks.block, c0)
        return pb.ProvisionResponse(group=request.group, c0=pack(out0), c1=pack(out1))

    def _block(
        self, group: int, seed: bytes, packed: bytes, block: pb.BlockProduct, matrix: RingMatrix
    ) -> tuple[bytes, bytes]:
        filled = block.rows * block.inputs * block.outputs
        if not filled or block.rows & (block.rows - 1) or filled > PARAMS.n:
            raise ProtocolError(f"a block has a power of two of rows and at most {PARAMS.n} coefficients")
        if 2 * filled <= PARAMS.n:
            # Small blocks make many polynomials of few weights: gigabytes, for a request of a few megabytes.
            raise ProtocolError(f"a block that leaves half of its {PARAMS.n} coefficients empty")
        if block.answer_bits not in (0, SWITCH_BITS):
            raise ProtocolError(f"answers are modulo q or 2^{SWITCH_BITS}, not 2^{block.answer_bits}")
        n, m = matrix.in_features, matrix.out_features
        if block.transposed:
            n, m = m, n
        inputs = _range("inputs", block.first_input, block.input_count, n)
        outputs = _range("outputs", block.first_output, block.output_count, m)
        shape = BlockShape(
            block.rows, block.inputs, block.outputs, inputs.stop - inputs.start, outputs.stop - outputs.start
        )
        self._bound_answer(matrix.planes * shape.download_bytes(block.answer_bits))
        c0 = _residues(seed, packed, (2, PARAMS.n, shape.input_blocks))
        wanted = Wanted(group, block.transposed, Part(inputs, outputs, shape), block.answer_bits)
        bits = block.answer_bits or RESIDUE_BITS
        out0, out1 = self._blocks.product(matrix, wanted, seed, c0)
        return pack(out0, bits), pack(out1, bits)

    def _attend(self, request: pb.AttendRequest, session: PageSession) -> pb.AttendResponse:
        start = time.perf_counter()
        kind = request.WhichOneof("kind")
        if kind == "append":
            # Each on its own, so that one that is dropped gives its memory back.
            self.pages.append(
                session, request.append.first, [page.copy() for page in _ciphertexts(request.append.pages)]
            )
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
        with self._all_cores():
            start = time.perf_counter()
            # First the operands, whose stated number is compared with their length: it bounds the copy of the pages.
            operands = _ciphertexts(wanted.operands)
            pages = session.find(numbers, level)
            answers = evaluate(operands, pages, sums, read, level, parallel=self._cores > 1)
        c0, c1, c2 = pack_answers(answers, level)
        return pb.AttendResponse(id=request.id, c0=c0, c1=c1, c2=c2, compute_us=_since(start))

    def _bound_answer(self, size: int) -> None:
        if size > self._limits.max_message_bytes:
            raise LimitError(
                f"the answer would have {size} bytes, the limit is {self._limits.max_message_bytes}: ask in parts"
            )

    @contextmanager
    def _all_cores(self) -> Iterator[None]:
        """One wide product at a time, on all cores; afterwards this thread is back to one."""
        with self._wide:
            torch.set_num_threads(self._cores)
            try:
                yield
            finally:
                torch.set_num_threads(1)


@contextmanager
def _memory_returned() -> Iterator[None]:
    """After a stream."""
    try:
        yield
    finally:
        return_memory()


def _places(limits: Limits) -> Places:
    streams = {
        "Evaluate": Room("evaluation streams", limits.max_streams, limits.max_streams_per_identity),
        "Attend": Room("attention streams", limits.max_attention, limits.max_attention_per_identity),
        "Provision": Room("provisioning streams", limits.max_provisioning, limits.max_provisioning_per_identity),
        "FetchFile": Room("downloads", limits.max_downloads, limits.max_downloads_per_identity),
    }
    return Places(
        {f"/{SERVICE_NAME}/{name}": room for name, room in streams.items()},
        Room("short calls", limits.max_short_calls, limits.max_short_calls_per_identity),
        Room("calls without a token", limits.max_tokenless, limits.max_tokenless_per_address),
    )


def _range(what: str, first: int, count: int, size: int) -> slice:
    stop = first + count if count else size
    if not first < stop <= size:
        raise ProtocolError(f"{what} {first} to {stop} are not a range of the {size} that this matrix has")
    return slice(first, stop)


def _residues(seed: bytes, packed: bytes, shape: tuple[int, ...], params: RlweParams = PARAMS) -> NDArray[np.uint32]:
    if len(seed) != SEED_BYTES:
        raise ProtocolError(f"a seed has {SEED_BYTES} bytes, this one {len(seed)}")
    return unpack(packed, shape, params)


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
    """Microseconds, never 0, which would not be sent: the size of an answer depends on its shape alone."""
    return max(1, int((time.perf_counter() - start) * 1e6))
