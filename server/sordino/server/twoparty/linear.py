"""What the server does for linear layers: W r + s ahead, by encryption, and W u mod 2^64 online.

Ahead, an answer must tell the client, who holds the key, nothing on W beside W r + s. So to the products are added the
server's own mask s, a fresh encryption of zero under the client's public key, and noise that drowns theirs
(docs/two-party.md, section 3, Lemma 5; bounds: :mod:`sordino.shared.twoparty.lwe`).

Online, the arithmetic is that of :mod:`sordino.server.kernel`, whose word on oneDNN holds here too: a way to multiply
is taken when it passes a known-answer test.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from sordino.shared.errors import LimitError, ProtocolError
from sordino.shared.jit import compiled
from sordino.shared.packing import useful
from sordino.shared.rlwe import U32, U64, each_prime, intt_of_prime, ntt_of_prime, reduced
from sordino.shared.twoparty.lwe import (
    LIFETIME_LOG2,
    MESSAGE_BLOCKS,
    WORD_PARAMS,
    WordParams,
    WordShape,
    add_flood,
    add_products,
    decode_words,
    encode,
    lift,
    messages,
    pack_answer,
    random_errors,
    random_ternary,
    random_words,
    switch,
    unpack_seeded,
)

log = logging.getLogger(__name__)

I8 = NDArray[np.int8]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]

# Output blocks that are multiplied together: what they read of a request is made anew for each such slice.
_SLICE: Final = 8 * MESSAGE_BLOCKS
_LOW_BITS: Final = 14
# Up to so many rows the loop beats oneDNN's int8 product.
_FEW: Final = 3


# -- ahead -------------------------------------------------------------------------------------------------------------


class Provisioner:
    """Answers requests under one client's key.

    Attributes:
        coefficients: how many have been answered; after 2^44 a key is given up.

    Args:
        public: the client's public key. parallel: primes at the same time.

    Raises:
        ProtocolError: the key is malformed.
    """

    def __init__(self, public: bytes, params: WordParams = WORD_PARAMS, *, parallel: bool = False) -> None:
        self.coefficients = 0
        self._params = params
        self._parallel = parallel
        self._b, self._a = unpack_seeded(public, 1, params)

    def answers(self, weights: I8, requests: Sequence[bytes], shape: WordShape) -> Iterator[tuple[bytes, U64]]:
        """The messages that answer a request, and with each the server's s of its outputs, ``[rows, some outputs]``.

        The client finds W r + s; the s of all messages, side by side, are ``[rows, m]``.

        Args:
            weights: W, int8 ``[m, n]``. requests: all messages of one request.

        Raises:
            ProtocolError: a message is malformed, or their number or the matrix does not fit the shape.
            RangeError: the norm of W is over the bounds of the parameters.
            LimitError: the key has served its time.
        """
        if weights.shape != (shape.out_features, shape.in_features):
            raise ProtocolError(f"a matrix of {weights.shape}, expected {(shape.out_features, shape.in_features)}")
        blocks = messages(shape.input_blocks)
        if len(requests) != len(blocks):
            raise ProtocolError(f"{len(requests)} messages in a request, expected {len(blocks)}")
        self._params.check_l1("a matrix", largest_l1(weights, shape))
        parts = [unpack_seeded(r, b - a, self._params) for r, (a, b) in zip(requests, blocks, strict=True)]
        c0, c1 = (np.concatenate(half, axis=2) for half in zip(*parts, strict=True))
        return self._answers(weights, c0, c1, shape)

    def _answers(self, weights: I8, c0: U32, c1: U32, shape: WordShape) -> Iterator[tuple[bytes, U64]]:
        for start in range(0, shape.output_blocks, _SLICE):
            stop = min(start + _SLICE, shape.output_blocks)
            d0, d1 = self._products(weights, c0, c1, shape, start, stop)
            for a, b in messages(stop - start):
                some0, some1 = np.ascontiguousarray(d0[:, :, a:b]), np.ascontiguousarray(d1[:, :, a:b])
                e0, e1, s = self._hidden(some0, some1, shape)
                answer = pack_answer(switch(e0, self._params), switch(e1, self._params))
                yield answer, decode_words(s, shape, start + a)

    def _products(self, weights: I8, c0: U32, c1: U32, shape: WordShape, start: int, stop: int) -> tuple[U32, U32]:
        """Both halves ``[primes, N, C]`` of W times the request, of the output blocks from ``start`` to ``stop``."""
        out = np.empty((2, len(c0), self._params.n, stop - start), np.uint32)

        def work(i: int) -> None:
            factors = _weights64(weights, shape, start, stop, i, self._params)
            rows = _halves64(c0[i], c1[i], shape)
            sums = torch.bmm(torch.from_numpy(rows), torch.from_numpy(factors)).numpy()
            _recombine_halves(sums, self._params.primes[i], shape.rows, out[0, i], out[1, i])

        self._each(work)
        return out[0], out[1]

    def _hidden(self, c0: U32, c1: U32, shape: WordShape) -> tuple[U32, U32, U64]:
        """Products ``[primes, N, C]`` in NTT form, overwritten, to what may be shown of them: both halves as
        coefficients, of the first those that are read, and s ``[outputs * rows, C]``."""
        params, read = self._params, useful(shape)
        columns, count = c0.shape[2], len(read) * c0.shape[2]
        if self.coefficients + count > 1 << LIFETIME_LOG2:
            raise LimitError(f"a key has answered 2^{LIFETIME_LOG2} coefficients: begin a session with another")
        self.coefficients += count
        u, e1 = random_ternary((params.n, columns)), random_errors((params.n, columns))
        s, e0 = random_words((len(read), columns)), random_errors((len(read), columns))
        flood = random_words((2, *s.shape))
        first = np.empty((len(c0), *s.shape), np.uint32)

        def work(i: int) -> None:
            q, small = np.uint32(params.primes[i]), lift(u, i, params)
            ntt_of_prime(small, i, params)
            add_products(c0[i], small, self._b[i], i, params)
            add_products(c1[i], small, self._a[i], i, params)
            both = np.concatenate([c0[i], c1[i]], axis=1)
            intt_of_prime(both, i, params)
            first[i] = (both[read, :columns] + encode(s, e0, i, params)) % q
            add_flood(first[i], flood, i, params)
            c1[i] = (both[:, columns:] + lift(e1, i, params)) % q

        self._each(work)
        return first, c1, s

    def _each(self, work: Callable[[int], None]) -> None:
        each_prime(work, self._parallel, len(self._params.primes))


def largest_l1(weights: I8, shape: WordShape) -> int:
    """The largest sum of |W| over the rows of one block of outputs: what meets in a coefficient."""
    rows = np.zeros(shape.output_blocks * shape.outputs, np.int64)
    rows[: len(weights)] = np.abs(weights.astype(np.int16)).sum(axis=1, dtype=np.int64)
    return int(rows.reshape(-1, shape.outputs).sum(axis=1).max())


def _weights64(weights: I8, shape: WordShape, start: int, stop: int, i: int, params: WordParams) -> F64:
    """The polynomials of some output blocks, in NTT form modulo prime ``i``, centred: ``[points, input_blocks, C]``.

    Packed as by :func:`sordino.shared.packing.encode_weights`. With one point they are the weights themselves.
    """
    some = weights[start * shape.outputs : stop * shape.outputs]
    padded = np.zeros((stop - start, shape.outputs, shape.input_blocks, shape.inputs), np.int8)
    padded.reshape(-1, shape.input_blocks * shape.inputs)[: len(some), : shape.in_features] = some
    flat = np.ascontiguousarray(padded[..., ::-1].transpose(1, 3, 2, 0)).reshape(shape.outputs * shape.inputs, -1)
    out = np.empty((shape.points, flat.shape[1]))
    if shape.points == 1:
        out[:] = flat
    else:
        coefficients = np.zeros((shape.points, flat.shape[1]), np.int8)
        coefficients[: len(flat)] = flat
        residues = lift(coefficients, i, params)
        ntt_of_prime(residues, i, params)
        _centre(residues, params.primes[i], out)
    return out.reshape(shape.points, shape.input_blocks, stop - start)


@compiled
def _centre(residues: U32, q: int, out: F64) -> None:
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            v = np.int32(residues[i, j])
            out[i, j] = np.float64(np.int32(v - q) if v > q // 2 else v)


def _halves64(c0: U32, c1: U32, shape: WordShape) -> F64:
    """Both halves of ciphertexts ``[N, input_blocks]`` as ``[points, 2 * rows, input_blocks]``, for exact float64 sums.

    With one point a residue below 2^27 meets weights of magnitude up to 2^7. Else it meets residues of magnitude below
    2^26, and is cut into 14 and 13 bits, ``[points, 4 * rows, input_blocks]``. Sums of MAX_INPUT_BLOCKS = 2^13 stay
    below 2^53.
    """
    parts = 1 if shape.points == 1 else 2
    out = np.empty((shape.points, parts, 2, shape.rows, shape.input_blocks))
    for k, half in enumerate((c0, c1)):
        points = half.reshape(shape.points, shape.rows, shape.input_blocks)
        out[:, 0, k] = points if parts == 1 else points & np.uint32((1 << _LOW_BITS) - 1)
        if parts == 2:
            out[:, 1, k] = points >> np.uint32(_LOW_BITS)
    return out.reshape(shape.points, parts * 2 * shape.rows, shape.input_blocks)


@compiled
def _recombine_halves(sums: F64, q: int, rows: int, out0: U32, out1: U32) -> None:
    """Sums of :func:`_halves64`, of both parts, to residues ``[N, C]``; a floor by reciprocal is off by one at most."""
    points, lines, columns = sums.shape
    q64, per_one = np.float64(q), 1.0 / q
    for k in range(points):
        for t in range(2 * rows):
            out = out0[k * rows + t] if t < rows else out1[k * rows + t - rows]
            for c in range(columns):
                x = sums[k, t, c]
                x -= np.floor(x * per_one) * q64
                x = x + q64 if x < 0 else x
                x = x - q64 if x >= q64 else x
                out[c] = np.uint32(np.int64(x))
            if lines > 2 * rows:
                for c in range(columns):
                    x = sums[k, 2 * rows + t, c]
                    x -= np.floor(x * per_one) * q64
                    x = x + q64 if x < 0 else x
                    total = np.uint64(out[c]) + (np.uint64(np.int64(x)) << np.uint64(_LOW_BITS))
                    out[c] = np.uint32(reduced(total, q, per_one))


# -- online ------------------------------------------------------------------------------------------------------------


class WordKernel(Protocol):
    """One way to multiply. ``name`` goes to the log; up to ``few`` rows there is another way."""

    name: str
    few: int

    def matmul(self, weights: torch.Tensor, rows: U64) -> U64:
        """``weights`` int8 ``[m, n]`` times ``rows [R, n]`` words: ``[R, m]``, exact mod 2^64."""
        ...


@compiled
def _digits(rows: U64, out: I8) -> None:
    """Balanced digits ``[8, R, n]`` mod 2^64: adding 0x80 to every byte carries each borrow, then it is digit + 128."""
    ones = np.uint64(0x8080808080808080)
    for k in range(8):
        shift = np.uint64(8 * k)
        for r in range(rows.shape[0]):
            for j in range(rows.shape[1]):
                out[k, r, j] = np.int8((((rows[r, j] + ones) ^ ones) >> shift) & np.uint64(0xFF))


@compiled
def _recombine(sums: I32, out: U64) -> None:
    """``sums [8, R, m]`` to sum_k 256^k s_k mod 2^64."""
    for r in range(out.shape[0]):
        for i in range(out.shape[1]):
            total = np.int64(0)
            for k in range(8):
                total += np.int64(sums[k, r, i]) << np.int64(8 * k)
            out[r, i] = np.uint64(total)


@compiled
def _few_rows(weights: I8, rows: I64, out: I64) -> None:
    """``weights [m, n]`` times ``rows [R, n]``, wrapping."""
    m, n = weights.shape
    for i in range(m):
        for r in range(rows.shape[0]):
            total = np.int64(0)
            for j in range(n):
                total += np.int64(weights[i, j]) * rows[r, j]
            out[r, i] = total


def few_rows(weights: I8, rows: U64) -> U64:
    """W times some rows ``[R, n]`` by a compiled loop."""
    out = np.empty((len(rows), len(weights)), np.uint64)
    _few_rows(weights, rows.view(np.int64), out.view(np.int64))
    return out


class Int8Words:
    """CPU: a compiled loop for a few rows; for more, digits and recombination compiled and one product by oneDNN."""

    name = "int8-cpu"
    few = _FEW

    def matmul(self, weights: torch.Tensor, rows: U64) -> U64:
        count, n = rows.shape
        if count <= _FEW:
            return few_rows(weights.numpy(), rows)
        digits = np.empty((8, count, n), np.int8)
        _digits(rows, digits)
        sums = torch._int_mm(torch.from_numpy(digits).view(8 * count, n), weights.t())
        out = np.empty((count, weights.shape[0]), np.uint64)
        _recombine(sums.numpy().reshape(8, count, -1), out)
        return out


class TorchInt8Words:
    """Any torch device, made for CUDA: the same arithmetic in torch operations, no host round trip in between."""

    name = "int8-torch"
    few = 0

    def matmul(self, weights: torch.Tensor, rows: U64) -> U64:
        count, n = rows.shape
        m = weights.shape[0]
        ones = int.from_bytes(bytes([0x80] * 8), "little", signed=True)
        v = torch.from_numpy(rows.view(np.int64)).to(weights.device) + ones
        digits = torch.stack([((v >> 8 * k) & 0xFF) - 128 for k in range(8)]).to(torch.int8).view(8 * count, n)
        # CUDA's int8 GEMM wants more than 16 rows and all sizes multiples of 8.
        digits = torch.nn.functional.pad(digits, (0, -n % 8, 0, max(24 - 8 * count, 0)))
        padded = torch.nn.functional.pad(weights, (0, -n % 8, 0, -m % 8)) if n % 8 or m % 8 else weights
        sums = torch._int_mm(digits, padded.t())[: 8 * count, :m].view(8, count, m).to(torch.int64)
        total = sums[0]
        for k in range(1, 8):
            total = total + (sums[k] << 8 * k)
        result: U64 = total.cpu().numpy().view(np.uint64)
        return result


class Float64Words:
    """Exact fallback: three parts of 22 bits, |sum_j W_ij u_j| < 2^7 * 2^22 * n stays below 2^53 for n <= 2^17."""

    name = "float64"
    few = 0

    def matmul(self, weights: torch.Tensor, rows: U64) -> U64:
        total = np.zeros((len(rows), len(weights)), np.uint64)
        factors = weights.to(torch.float64).t()
        for shift in (0, 22, 44):
            part = ((rows >> np.uint64(shift)) & np.uint64((1 << 22) - 1)).astype(np.float64)
            product = (torch.from_numpy(part).to(weights.device) @ factors).cpu().numpy()
            total += product.astype(np.int64).view(np.uint64) << np.uint64(shift)
        return total


def known_answer_test(kernel: WordKernel, device: torch.device) -> bool:
    """Whether ``kernel`` multiplies full-range int8 by full-range words exactly (fixed data from SHAKE-256)."""
    n, m, count = 264, 24, 6
    stream = hashlib.shake_256(b"sordino word kernel known-answer test").digest(n * m + 8 * n * count)
    weights = np.frombuffer(stream[: n * m], np.int8).reshape(m, n).clip(-127, 127)
    rows = np.frombuffer(stream[n * m :], "<u8").astype(np.uint64).reshape(count, n)
    # The extremes, where 16-bit pairs saturate: all digits 127 and all -128 against weights of +-127.
    weights[0], weights[1] = 127, -127
    rows[0], rows[1] = 0x7F7F7F7F7F7F7F7F, 0x7F7F7F7F7F7F7F80
    expected = np.array(
        [[sum(int(w) * int(u) for w, u in zip(line, row, strict=True)) % 2**64 for line in weights] for row in rows],
        np.uint64,
    )
    on_device = torch.from_numpy(weights.copy()).to(device)
    # All rows at once, and one by one: a kernel may go two ways.
    alone = [kernel.matmul(on_device, rows[i : i + 1]) for i in range(count)]
    return np.array_equal(kernel.matmul(on_device, rows), expected) and np.array_equal(np.concatenate(alone), expected)


def choose_kernel(device: torch.device) -> WordKernel:
    """The fastest kernel for ``device`` that passes its known-answer test.

    Raises:
        RuntimeError: none does (a broken BLAS, never seen).
    """
    candidates: list[WordKernel] = [Int8Words()] if device.type == "cpu" else [TorchInt8Words()]
    candidates.append(Float64Words())
    for kernel in candidates:
        if known_answer_test(kernel, device):
            return kernel
        log.warning("kernel %s fails its known-answer test on %s: not used", kernel.name, device)
    raise RuntimeError(f"no kernel computes exactly on {device}")


class WordMatrix:
    """One matrix on its device, ``[m, n]`` int8, with the online product.

    Raises:
        ProtocolError: from :meth:`product`, when rows have another length.
    """

    def __init__(self, weights: torch.Tensor, kernel: WordKernel) -> None:
        self.weights = weights
        self._kernel = kernel
        self._array = weights.numpy() if kernel.few else None

    def product(self, rows: U64) -> U64:
        """W u mod 2^64: ``rows [R, n]`` to ``[R, m]``."""
        if rows.ndim != 2 or rows.shape[1] != self.weights.shape[1]:
            raise ProtocolError(f"rows of shape {rows.shape}, expected [*, {self.weights.shape[1]}]")
        if self._array is not None and len(rows) <= self._kernel.few:
            return few_rows(self._array, rows)
        return self._kernel.matmul(self.weights, rows)
