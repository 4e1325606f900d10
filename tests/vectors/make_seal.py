"""Makes ``seal.json``: a ciphertext and a key of Microsoft SEAL, and one of ours with what SEAL decrypts it to.

Needs TenSEAL (``pip install -c constraints.txt -e '.[peers]'``). Keys and noise are fresh, so each run gives another
file; run it only for other parameters:

    PYTHONPATH=tests python tests/vectors/make_seal.py > tests/vectors/seal.json
"""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.metadata import version
from typing import Any

import numpy as np
from seal import I64, N, Seal

from sordino.client.rlwe import SecretKey
from sordino.shared.ring import P
from sordino.shared.rlwe import PARAMS, expand_uniform, intt, pack


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def signs(secret: I64) -> str:
    return "".join("-0+"[value + 1] for value in secret)


def message(base: int) -> Any:
    return np.array([pow(base, k + 1, P) for k in range(N)], np.uint32)


def main() -> None:
    seal = Seal()
    c0, c1 = seal.halves(seal.encrypt(message(3)))
    theirs = {"secret": signs(seal.secret()), "base": 3, "c0": text(pack(c0)), "c1": text(pack(c1))}

    key, seed = SecretKey(), bytes(range(32))
    random = expand_uniform(seed, 0, (N, 1))
    sent = key.encrypt(message(5)[:, None], random)
    s, c0, c1 = key._s[:, :, None].copy(), sent.copy(), random.copy()
    for column in (s, c0, c1):
        intt(column)
    q = PARAMS.primes[0]
    secret = np.where(s[0, :, 0] > 1, s[0, :, 0].astype(np.int64) - q, s[0, :, 0])
    answer = Seal(secret).decrypt(Seal(secret).ciphertext(c0[:, :, 0], c1[:, :, 0]))
    ours = {
        "secret": signs(secret),
        "seed": seed.hex(),
        "c0": text(pack(sent)),
        "first": answer[:8].tolist(),
        "sha256": hashlib.sha256(answer.astype("<u4").tobytes()).hexdigest(),
    }
    notes = {
        "generator": f"tests/vectors/make_seal.py with TenSEAL {version('tenseal')}",
        "secrets": "coefficients of the keys; keys of this file alone",
        "by_seal": "encrypted by SEAL: both halves as coefficients, 27 bits packed; coefficient k is base^(k+1) mod p",
        "by_sordino": "encrypted by Sordino: a seed and c0 in NTT form as on the wire; first and sha256 (little-endian "
        "uint32) are of what SEAL decrypts",
    }
    print(json.dumps({"notes": notes, "by_seal": theirs, "by_sordino": ours}, indent=1))


if __name__ == "__main__":
    main()
