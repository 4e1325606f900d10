"""Microsoft SEAL as a second implementation of the RLWE scheme: its objects from arrays, and arrays from its objects.

SEAL is reached through ``tenseal.sealapi``, which can read coefficients but not set them; objects are handed in as
files in SEAL's own format, uncompressed (github.com/microsoft/SEAL, native/src/seal: serialization.h, ciphertext.cpp,
plaintext.cpp, dynarray.h).

SEAL sets the last prime of a context aside for key switching, so the context has a third one that no ciphertext uses.
Its BFV ciphertexts are in coefficient form, ours travel in NTT form; its secret keys are in NTT form, bit-reversed as
ours but at the *smallest* primitive 2N-th root of unity. The transforms here are plain sums, none of Sordino's.
"""

from __future__ import annotations

import struct
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tenseal import sealapi

from sordino.shared.ring import P
from sordino.shared.rlwe import PARAMS

U32 = NDArray[np.uint32]
I64 = NDArray[np.int64]
N: Final = PARAMS.n
_PRIMES: Final = (*PARAMS.primes, 134025217)


def seal_context(*, strict: bool = False) -> Any:
    """SEAL's context for our parameters; ``strict``: without the third prime, held to SEAL's table for 128 bits."""
    parameters = sealapi.EncryptionParameters(sealapi.SCHEME_TYPE.BFV)
    parameters.set_poly_modulus_degree(N)
    parameters.set_coeff_modulus([sealapi.Modulus(q) for q in (PARAMS.primes if strict else _PRIMES)])
    parameters.set_plain_modulus(P)
    level = sealapi.SEC_LEVEL_TYPE.TC128 if strict else sealapi.SEC_LEVEL_TYPE.NONE
    return sealapi.SEALContext(parameters, True, level)


class Seal:
    """SEAL with one secret key: a fresh one of its own, or one given by its coefficients ``[N]`` in {-1, 0, 1}."""

    def __init__(self, secret: I64 | None = None) -> None:
        self._context = seal_context()
        if secret is None:
            self._key = sealapi.KeyGenerator(self._context).secret_key()
        else:
            points = np.concatenate([_sums(_exponents(), secret, q) for q in _PRIMES])
            self._key = _loaded(sealapi.SecretKey(), self._context, _plaintext(self._context.key_parms_id(), points))
        self._decryptor = sealapi.Decryptor(self._context, self._key)
        self._evaluator = sealapi.Evaluator(self._context)

    def secret(self) -> I64:
        """The coefficients of the key, ``[N]`` in {-1, 0, 1}, from its points modulo each prime."""
        data = self._key.data()
        found = []
        for i, q in enumerate(_PRIMES):
            points = np.array([data.data(i * N + k) for k in range(N)])
            scaled = _sums(-_exponents().T, points, q) * pow(N, -1, q) % q
            found.append(np.where(scaled > q // 2, scaled - q, scaled))
        assert all((coefficients == found[0]).all() for coefficients in found)
        return found[0]

    def encrypt(self, message: U32) -> Any:
        """A fresh ciphertext of the polynomial ``message [N]``, elements of Z_p."""
        ciphertext = sealapi.Ciphertext(self._context)
        sealapi.Encryptor(self._context, self._key).encrypt_symmetric(self._polynomial(message), ciphertext)
        return ciphertext

    def decrypt(self, ciphertext: Any) -> U32:
        """``[N]`` elements of Z_p."""
        out = sealapi.Plaintext()
        self._decryptor.decrypt(ciphertext, out)
        filled = [out.data(k) for k in range(out.coeff_count())]
        return np.array(filled + [0] * (N - len(filled)), np.uint32)

    def times(self, ciphertext: Any, weights: I64) -> Any:
        """The product with a polynomial ``[N]`` of signed integers."""
        out = sealapi.Ciphertext(self._context)
        self._evaluator.multiply_plain(ciphertext, self._polynomial((weights % P).astype(np.uint32)), out)
        return out

    def noise_budget(self, ciphertext: Any) -> int:
        """Bits that the noise may still grow by, as SEAL reckons."""
        return int(self._decryptor.invariant_noise_budget(ciphertext))

    def ciphertext(self, c0: U32, c1: U32) -> Any:
        """SEAL's ciphertext of two halves ``[2 primes, N]`` in coefficient form."""
        words = np.concatenate([c0.reshape(-1), c1.reshape(-1)])
        # Not in NTT form, two halves, N, two primes, scale 1 (CKKS only), correction factor 1 (BGV only).
        fields = struct.pack("<?QQQdQ", False, 2, N, len(PARAMS.primes), 1.0, 1)
        body = _parms(self._context.first_parms_id()) + fields + _array(words)
        return _loaded(sealapi.Ciphertext(), self._context, body)

    def halves(self, ciphertext: Any) -> tuple[U32, U32]:
        """Inverse of :meth:`ciphertext`."""
        assert not ciphertext.is_ntt_form()
        assert ciphertext.size() == 2
        words = np.array([ciphertext[k] for k in range(4 * N)], np.uint32).reshape(2, 2, N)
        return words[0], words[1]

    def _polynomial(self, coefficients: U32) -> Any:
        return _loaded(sealapi.Plaintext(), self._context, _plaintext((0, 0, 0, 0), coefficients))


def _loaded(target: Any, context: Any, body: bytes) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "object"
        path.write_bytes(_framed(body))
        target.load(context, str(path))
    return target


def _plaintext(parms: Any, coefficients: NDArray[Any]) -> bytes:
    """The body of a Plaintext, and of a SecretKey, which is one."""
    return _parms(parms) + struct.pack("<Qd", coefficients.size, 1.0) + _array(coefficients)


def _array(words: NDArray[Any]) -> bytes:
    return _framed(struct.pack("<Q", words.size) + words.astype("<u8").tobytes())


def _parms(parms: Any) -> bytes:
    return struct.pack("<4Q", *parms)


def _framed(body: bytes) -> bytes:
    """SEAL's header: magic, its own size, version, compression (none), reserved, size of the whole."""
    return _version() + struct.pack("<BHQ", 0, 0, 16 + len(body)) + body


@cache
def _version() -> bytes:
    """Magic, header size and version as the installed SEAL writes them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "object"
        sealapi.Plaintext("1").save(str(path))
        return path.read_bytes()[:5]


@cache
def _exponents() -> I64:
    """Output k of SEAL's transform is the polynomial at psi^(2 rev(k) + 1): ``[N points, N coefficients]``."""
    bits = N.bit_length() - 1
    points = np.array([2 * int(f"{k:0{bits}b}"[::-1], 2) + 1 for k in range(N)])
    return points[:, None] * np.arange(N)[None, :] % (2 * N)


@cache
def _powers(q: int) -> I64:
    """psi^k for k < 2N, psi the smallest primitive 2N-th root of unity modulo q."""
    root = next(r for g in range(2, 100) if pow(r := pow(g, (q - 1) // (2 * N), q), N, q) == q - 1)
    psi = min(pow(root, k, q) for k in range(1, 2 * N, 2))
    return np.array([pow(psi, k, q) for k in range(2 * N)])


def _sums(exponents: I64, values: I64, q: int) -> I64:
    """sum_j psi^exponents[k, j] values[j] mod q, products reduced one by one: below 2^54 before, 2^38 after the sum."""
    sums: I64 = (_powers(q)[exponents % (2 * N)] * (values % q) % q).sum(axis=1) % q
    return sums
