"""Peer ``concrete``: the encrypted matrix product of concrete-ml-extensions (Zama, BSD-3-Clause-Clear).

It is what Concrete ML runs the linear layers of a "hybrid" language model with: a row is a GLWE ciphertext, each result
coefficient is extracted as an LWE ciphertext, and those are packed into GLWE ciphertexts again by a key switch, whose
key is the public input. Parameters are the package's defaults (degree 2048, modulus 2^64, 27 bits for results).

Precision: results have 27 bits, so |W x| < 2^26 after scaling: rows are rounded to about 12 bits (l1_max * max|x| <
2^26), where Concrete ML itself takes 8. Noise and the compression of answers add an error of their own, whatever the
row: measured, a standard deviation of 5 to 30 and at most 75, of those 2^26; 256 is what the tests allow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import concrete_ml_extensions as fhe
import numpy as np
from numpy.typing import NDArray

from peers import F64, I32, Matrix, Peer
from sordino.shared.errors import RangeError
from sordino.shared.manifest import GroupSpec

ERROR: Final = 256
"""Most that a result of a scaled row may be off by."""
_LARGEST: Final = (1 << 26) - 2 * ERROR


def connect(matrices: Mapping[str, Matrix]) -> Peer:
    """Both halves, for groups with these matrices ``[m, n]``."""
    client = Client()
    return Peer("concrete", client, Server(client.public, matrices))


class Client:
    def __init__(self) -> None:
        self._parameters = fhe.MatmulCryptoParameters.deserialize(fhe.default_params())
        self._key, compression = fhe.create_private_key(self._parameters)
        self.public: bytes = compression.serialize()

    def encrypt(self, group: GroupSpec, row: I32) -> tuple[bytes, float]:
        limit = _LARGEST // group.l1_max
        if not limit:
            raise RangeError(f"group {group.name!r} has results of more than 27 bits for every row: leave it out")
        scale = max(1.0, float(np.abs(row).max()) / limit)
        scaled = np.rint(row / scale).astype(np.int64)[None]
        encrypted = fhe.encrypt_matrix(pkey=self._key, crypto_params=self._parameters, data=scaled.view(np.uint64))
        return encrypted.serialize(), scale

    def decrypt(self, group: GroupSpec, answer: bytes) -> F64:
        degree = 2048
        result = fhe.decrypt_matrix(
            fhe.CompressedResultEncryptedMatrix.deserialize(answer),
            self._key,
            self._parameters,
            num_valid_glwe_values_in_last_ciphertext=(group.out_features - 1) % degree + 1,
        )
        row: F64 = result[0].view(np.int64).astype(np.float64)
        return row


class Server:
    def __init__(self, public: bytes, matrices: Mapping[str, Matrix]) -> None:
        self._compression = fhe.deserialize_compression_key(public)
        self._matrices = matrices
        self._weights: dict[str, NDArray[np.uint64]] = {}

    def answer(self, group: str, request: bytes) -> bytes:
        if group not in self._weights:
            transposed = np.ascontiguousarray(self._matrices[group].T, dtype=np.int64)
            self._weights[group] = transposed.view(np.uint64)
        product = fhe.matrix_multiplication(
            encrypted_matrix=fhe.EncryptedMatrix.deserialize(request),
            data=self._weights[group],
            compression_key=self._compression,
        )
        answer: bytes = product.serialize()
        return answer
