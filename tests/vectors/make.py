"""Makes ``v1.json``: known answers for everything whose bytes must never change between releases.

A second implementation: Python integers and AES one block at a time, nothing of Sordino. Run it only for a new format:

    python tests/vectors/make.py > tests/vectors/v1.json
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterator
from typing import Any

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

P = 2**32 - 5
PRIMES = (134176769, 134111233)
N = 2048


def keystream(key: bytes, counter: int) -> Iterator[int]:
    """AES-256-CTR as little-endian 32-bit words."""
    block = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    while True:
        out = block.update(counter.to_bytes(16, "big"))
        counter += 1
        for i in range(0, 16, 4):
            yield int.from_bytes(out[i : i + 4], "little")


def hkdf(key: bytes, salt: bytes, info: bytes) -> bytes:
    """RFC 5869 with SHA-256, one block of output."""
    extracted = hmac.new(salt, key, hashlib.sha256).digest()
    return hmac.new(extracted, info + b"\x01", hashlib.sha256).digest()


def masks(key: bytes, label: bytes, count: int) -> list[int]:
    words = (w for w in keystream(hkdf(key, b"sordino/v1", b"prg/" + label), 0) if w < P)
    return [next(words) for _ in range(count)]


def uniform(seed: bytes, block: int, prime: int, count: int) -> list[int]:
    counter = (block << 64) + (prime << 48)
    words = (w & 0x7FFFFFF for w in keystream(seed, counter))
    residues = (w for w in words if w < PRIMES[prime])
    return [next(residues) for _ in range(count)]


def pack(values: list[int]) -> bytes:
    """Value k * lanes + c is the k-th 27-bit field of lane c; word w of lane c stands at w * lanes + c."""
    lanes = len(values) // 64
    fields = [sum(values[k * lanes + c] << (27 * k) for k in range(64)) for c in range(lanes)]
    return b"".join(
        ((fields[c] >> (64 * w)) & (2**64 - 1)).to_bytes(8, "little") for w in range(27) for c in range(lanes)
    )


def evaluate(coefficients: list[int], prime: int, index: int) -> int:
    """The NTT's output at ``index``: the polynomial at psi^(2 rev(index) + 1)."""
    q = PRIMES[prime]
    psi = next(r for g in range(2, 100) if pow(r := pow(g, (q - 1) // (2 * N), q), N, q) == q - 1)
    point = pow(psi, 2 * int(f"{index:011b}"[::-1], 2) + 1, q)
    value = 0
    for c in reversed(coefficients):
        value = (value * point + c) % q
    return value


def main() -> None:
    key = bytes(range(32))
    weights = [[(7 * i * i + 13 * j + i * j) % 255 - 127 for j in range(20)] for i in range(6)]
    rows = [[*masks(key, b"row %d" % r, 18), 0, P - 1] for r in range(2)]
    values = [pow(3, i, 2**27 - 39) % PRIMES[1] for i in range(128)]
    sparse = [(i, pow(5, i + 1, PRIMES[0] - 1)) for i in (0, 1, 77, 1024, 2047)]
    coefficients = [dict(sparse).get(i, 0) for i in range(N)]
    vectors: dict[str, Any] = {
        "generator": "tests/vectors/make.py: Python integers, AES by single blocks",
        "masks": {"key": key.hex(), "label": "row 0", "values": masks(key, b"row 0", 16)},
        "uniform": [
            {"seed": key.hex(), "block": b, "prime": i, "values": uniform(key, b, i, 4000)[-8:], "skip": 3992}
            for b in (0, 5)
            for i in (0, 1)
        ],
        "pack": {"values": values, "bytes": pack(values).hex()},
        "ntt": [
            {
                "prime": i,
                "coefficients": sparse,
                "at": [[k, evaluate(coefficients, i, k)] for k in (0, 1, 2, 1000, 2047)],
            }
            for i in (0, 1)
        ],
        "product": {
            "weights": weights,
            "rows": rows,
            "values": [[sum(w * u for w, u in zip(line, row, strict=True)) % P for line in weights] for row in rows],
        },
    }
    print(json.dumps(vectors, indent=1))


if __name__ == "__main__":
    main()
