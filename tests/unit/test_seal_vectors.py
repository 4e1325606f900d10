"""Ciphertexts made and decrypted by Microsoft SEAL once (tests/vectors/make_seal.py), checked without it."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from sordino.client.rlwe import SecretKey
from sordino.shared.ring import P
from sordino.shared.rlwe import PARAMS, U32, expand_uniform, ntt, unpack

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors" / "seal.json").read_text())
N = PARAMS.n


def key_of(signs: str) -> SecretKey:
    s = np.array([["-0+".index(sign) - 1 for sign in signs]] * 2) % np.array(PARAMS.primes)[:, None]
    points = s.astype(np.uint32)[:, :, None]
    ntt(points)
    key = SecretKey()
    key._s = np.ascontiguousarray(points[:, :, 0])
    return key


def column(text: str) -> U32:
    return unpack(base64.b64decode(text), (2, N, 1))


def test_we_decrypt_what_seal_encrypted() -> None:
    known = VECTORS["by_seal"]
    c0, c1 = column(known["c0"]), column(known["c1"])
    ntt(c0)
    ntt(c1)
    got = key_of(known["secret"]).decrypt(c0, c1)[:, 0]
    assert got.tolist() == [pow(known["base"], k + 1, P) for k in range(N)]


def test_seal_decrypted_what_we_encrypted() -> None:
    known = VECTORS["by_sordino"]
    c1 = expand_uniform(bytes.fromhex(known["seed"]), 0, (N, 1))
    got = key_of(known["secret"]).decrypt(column(known["c0"]), c1)[:, 0]
    assert got[:8].tolist() == known["first"]
    assert hashlib.sha256(got.astype("<u4").tobytes()).hexdigest() == known["sha256"]
