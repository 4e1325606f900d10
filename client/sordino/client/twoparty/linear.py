"""What the client does ahead for linear layers: its key, Enc(r), and c = W r + s from the answer.

Parameters and bounds: :mod:`sordino.shared.twoparty.lwe`; the protocol and why the answer tells nothing else:
docs/two-party.md, section 3. The same r masks activations later, so its rows are used once; the caller sees to it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import NoReturn

import numpy as np

from sordino.shared.errors import ProtocolError
from sordino.shared.packing import useful
from sordino.shared.rlwe import SEED_BYTES, U32, U64, each_prime, expand_uniform, intt_of_prime, ntt_of_prime
from sordino.shared.twoparty.lwe import (
    WORD_PARAMS,
    WordParams,
    WordShape,
    add_products,
    decode,
    decode_words,
    encode,
    encode_words,
    lift,
    messages,
    pack_seeded,
    random_errors,
    random_ternary,
    unpack_answer,
)


class WordKey:
    """A ternary RLWE secret of one session, fresh from the system's CSPRNG. Never serialised; its repr shows nothing.

    Attributes:
        public: the public key, a message to the server: a seed for a, and b = -a s + e.
    """

    __slots__ = ("_parallel", "_params", "_s", "public")

    def __init__(self, params: WordParams = WORD_PARAMS, *, parallel: bool = False) -> None:
        self._params = params
        self._parallel = parallel
        s = random_ternary((params.n, 1))
        self._s = np.stack([lift(s, i, params) for i in range(len(params.primes))])
        self._each(lambda i: ntt_of_prime(self._s[i], i, params), len(params.primes))
        self.public = self._encrypted(np.zeros((params.n, 1), np.uint64))

    def __repr__(self) -> str:
        return "WordKey(hidden)"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a secret key is neither copied nor serialised")

    def requests(self, r: U64, shape: WordShape) -> list[bytes]:
        """The messages that ask for W r.

        Args:
            r: ``[R, n]``, R <= ``shape.rows``; what lies beyond R counts as 0.

        Raises:
            ProtocolError: another number of rows or columns.
        """
        if r.ndim != 2 or not 1 <= len(r) <= shape.rows or r.shape[1] != shape.in_features:
            raise ProtocolError(f"rows of shape {r.shape}, expected [1 to {shape.rows}, {shape.in_features}]")
        m = encode_words(r, shape)
        return [self._encrypted(np.ascontiguousarray(m[:, a:b])) for a, b in messages(shape.input_blocks)]

    def open(self, answers: Iterable[bytes], shape: WordShape) -> U64:
        """c = W r + s, ``[shape.rows, m]``, from all messages of an answer in their order.

        Raises:
            ProtocolError: of another length or number, or a residue is not below its prime.
        """
        found, left = [], iter(answers)
        for first, stop in messages(shape.output_blocks):
            answer = next(left, None)
            if answer is None:
                raise ProtocolError(f"an answer ends after {first} of {shape.output_blocks} blocks")
            c0, c1 = unpack_answer(answer, shape, stop - first, self._params)
            found.append(decode_words(decode(self._phase(c0, c1, shape), self._params), shape, first))
        if next(left, None) is not None:
            raise ProtocolError(f"an answer goes on after {shape.output_blocks} blocks")
        return np.concatenate(found, axis=1)

    def _encrypted(self, m: U64) -> bytes:
        """Encryptions of the columns of ``m [N, C]`` under a seed of their own."""
        params, seed = self._params, os.urandom(SEED_BYTES)
        c1, e = expand_uniform(seed, 0, (params.n, m.shape[1]), params), random_errors(m.shape)
        c0 = np.empty_like(c1)

        def work(i: int) -> None:
            c0[i] = encode(m, e, i, params)
            ntt_of_prime(c0[i], i, params)
            add_products(c0[i], c1[i], np.uint32(params.primes[i]) - self._s[i], i, params)

        self._each(work, len(params.primes))
        return pack_seeded(seed, c0)

    def _phase(self, c0: U32, c1: U32, shape: WordShape) -> U32:
        """c0 + c1 s modulo as many primes as are given, like c0: of coefficients, ``[primes, outputs * rows, C]`` those
        that are read, and ``[primes, N, C]``."""
        params, read, out = self._params, useful(shape), np.empty_like(c0)

        def work(i: int) -> None:
            points, product = c1[i].copy(), np.zeros_like(c1[i])
            ntt_of_prime(points, i, params)
            add_products(product, points, self._s[i], i, params)
            intt_of_prime(product, i, params)
            out[i] = (c0[i] + product[read]) % np.uint32(params.primes[i])

        self._each(work, len(c0))
        return out

    def _each(self, work: Callable[[int], None], primes: int) -> None:
        each_prime(work, self._parallel, primes)
