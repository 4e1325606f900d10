"""The generator of ring elements: known answer, exact uniformity by rejection, domain separation, speed."""

from __future__ import annotations

import hashlib
import hmac
import time

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from sordino.client.prg import accept, uniform_mod_p
from sordino.shared.prg import derive, random_key
from sordino.shared.ring import P

U32 = NDArray[np.uint32]
KEY = bytes(range(32))


def _hkdf(key: bytes, info: bytes) -> bytes:
    """RFC 5869, written out for one block of output."""
    prk = hmac.new(b"sordino/v1", key, hashlib.sha256).digest()
    return hmac.new(prk, info + b"\x01", hashlib.sha256).digest()


def test_is_aes_ctr_under_an_hkdf_key() -> None:
    assert derive(KEY, b"purpose") == _hkdf(KEY, b"purpose")
    # Counter mode from its definition, SP 800-38A 6.5: block i is the encryption of the counter i.
    block = Cipher(algorithms.AES256(_hkdf(KEY, b"prg/label")), modes.ECB()).encryptor()
    stream = b"".join(block.update(i.to_bytes(16, "big")) for i in range(300))
    assert np.array_equal(uniform_mod_p(KEY, b"label", 1200), np.frombuffer(stream, "<u4"))


def test_the_stream_is_one_over_the_pieces_of_the_cipher() -> None:
    # More than one call into the cipher: nothing repeats where two pieces meet.
    long = uniform_mod_p(KEY, b"", (1 << 22) + 100)
    assert np.array_equal(long[:1000], uniform_mod_p(KEY, b"", 1000))
    assert not np.array_equal(long[1 << 22 :], long[:100])


def test_known_answer() -> None:
    # Frozen: stored pools depend on it.
    assert hashlib.sha256(uniform_mod_p(KEY, b"group 0", 4096).tobytes()).hexdigest() == (
        "86effa5511d0815d673a35101b927ab4e166567160343328f65d5ad2c6c884bc"
    )


@given(st.lists(st.integers(0, 2**32 - 1) | st.integers(P - 2, 2**32 - 1), min_size=1), st.integers(0, 60))
def test_rejection(words: list[int], count: int) -> None:
    """Any stream, however many words >= p it holds: the first ``count`` below p, in order."""
    endless = np.array(words + [7] * (len(words) + count), np.uint32)
    at = 0

    def read(n: int) -> U32:
        nonlocal at
        at += n
        return endless[at - n : at].copy()

    got = accept(read, count)
    assert got.tolist() == [w for w in endless.tolist() if w < P][:count]


def test_a_stream_of_rejected_words_is_read_on() -> None:
    parts = iter([np.full(4, P, np.uint32), np.array([1, 2**32 - 1, P - 1, P], np.uint32), np.array([5, 6], np.uint32)])
    assert accept(lambda n: next(parts)[:n], 4).tolist() == [1, P - 1, 5, 6]


@given(st.integers(0, 3000), st.integers(0, 3000))
def test_a_longer_output_begins_with_the_shorter(a: int, b: int) -> None:
    short, long = sorted((a, b))
    assert np.array_equal(uniform_mod_p(KEY, b"x", long)[:short], uniform_mod_p(KEY, b"x", short))


def test_labels_and_keys_are_apart() -> None:
    outputs = [uniform_mod_p(key, label, 64) for key in (KEY, bytes(32)) for label in (b"", b"a", b"b", b"group 1")]
    assert len({o.tobytes() for o in outputs}) == len(outputs)
    assert random_key() != random_key()
    assert len(random_key()) == 32


def test_refuses_a_wrong_key_and_count() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        uniform_mod_p(b"short", b"", 1)
    with pytest.raises(ValueError, match="negative"):
        uniform_mod_p(KEY, b"", -1)


def test_uniform_by_chi_square() -> None:
    """High and low bits alike; fixed key, so the test is deterministic. 256 cells, 2^20 draws."""
    values = uniform_mod_p(KEY, b"chi", 1 << 20)
    high = np.bincount((values.astype(np.uint64) * 256 // P).astype(int), minlength=256)
    low = np.bincount(values & 255, minlength=256)
    for counts in (high, low):
        assert 1e-4 < stats.chisquare(counts).pvalue < 1 - 1e-4
    pairs = np.bincount((values[:-1] >> 28) * 16 + (values[1:] >> 28), minlength=256)
    assert 1e-4 < stats.chisquare(pairs).pvalue < 1 - 1e-4


def test_is_fast() -> None:
    """Hundreds of MB/s: a chunk of masks must not be felt. The bound is far below what is measured (5 GB/s)."""
    best = 1e9
    for _ in range(5):
        start = time.perf_counter()
        uniform_mod_p(KEY, b"speed", 1 << 20)
        best = min(best, time.perf_counter() - start)
    assert 4 * (1 << 20) / best > 200e6
