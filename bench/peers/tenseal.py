"""Peer ``tenseal``: CKKS, by the vector-matrix product of TenSEAL (OpenMined, Apache-2.0), on Microsoft SEAL.

A row is one ciphertext, its entries in the slots; TenSEAL multiplies it by the matrix diagonal by diagonal, with a
rotation for each (Halevi and Shoup, "Algorithms in HElib", CRYPTO 2014), for which the server has the Galois keys.

Parameters: ring degree 8192 with 168 bits of modulus, of the 218 that the homomorphic encryption standard allows there
for 128 bits of security. 4096 allows 109, too few for the precision. The scale is 2^48; rows and weights go in as
fractions of the largest value.

Precision: measured, the error is below 2^-33 of the largest result that there could be, 128 n max|x|. That is less than
0.3 for every 8-bit group and row (|W x| < 2^31): the rounded results are the exact integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import tenseal

from peers import F64, I32, Matrix, Peer
from sordino.shared.errors import RangeError
from sordino.shared.manifest import GroupSpec

_DEGREE: Final = 8192
_PRIME_BITS: Final = (60, 48, 60)
_SCALE_BITS: Final = 48
# The integer part of a result, with its sign, has what the first prime leaves beside the scale.
_ROOM: Final = 1 << (_PRIME_BITS[0] - _SCALE_BITS - 1)


def connect(matrices: Mapping[str, Matrix]) -> Peer:
    """Both halves, for groups with these matrices ``[m, n]``."""
    client = Client()
    return Peer("tenseal", client, Server(client.public, matrices))


class Client:
    def __init__(self) -> None:
        self._context = tenseal.context(tenseal.SCHEME_TYPE.CKKS, _DEGREE, coeff_mod_bit_sizes=list(_PRIME_BITS))
        self._context.global_scale = 2.0**_SCALE_BITS
        self._context.generate_galois_keys()
        # With the public key: the product starts from an encryption of zero.
        self.public: bytes = self._context.serialize(
            save_public_key=True, save_secret_key=False, save_galois_keys=True, save_relin_keys=False
        )

    def encrypt(self, group: GroupSpec, row: I32) -> tuple[bytes, float]:
        unit = 1 << (group.weight_bits - 1)
        if max(group.in_features, group.out_features) > _DEGREE // 2 or group.l1_max >= _ROOM * unit:
            raise RangeError(f"group {group.name!r} does not fit in a ciphertext of {_DEGREE // 2} slots: leave it out")
        largest = float(max(1, np.abs(row).max()))
        return tenseal.ckks_vector(self._context, (row / largest).tolist()).serialize(), largest * unit

    def decrypt(self, group: GroupSpec, answer: bytes) -> F64:
        del group
        return np.array(tenseal.ckks_vector_from(self._context, answer).decrypt())


class Server:
    def __init__(self, public: bytes, matrices: Mapping[str, Matrix]) -> None:
        self._context = tenseal.context_from(public)
        self._matrices = matrices
        self._weights: dict[str, tenseal.PlainTensor] = {}

    def answer(self, group: str, request: bytes) -> bytes:
        if group not in self._weights:
            matrix = self._matrices[group]
            self._weights[group] = tenseal.plain_tensor(matrix.T / (128 if matrix.dtype == np.int8 else 2048))
        answer: bytes = tenseal.ckks_vector_from(self._context, request).mm(self._weights[group]).serialize()
        return answer
