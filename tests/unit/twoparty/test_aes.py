"""The generator of point functions: answers of FIPS 197, and the same bits both ways."""

from __future__ import annotations

import hashlib
import os

import numpy as np
import pytest

from sordino.shared.twoparty import aes


def _made(way: aes.Hash, nodes: aes.U64, first: int, count: int) -> aes.U64:
    out = np.zeros((count, len(nodes) + 3, 2), np.uint64)
    way(nodes, len(nodes), first, count, out)
    assert not out[:, len(nodes) :].any()  # nothing beyond what was asked for
    return out[:, : len(nodes)]


def _nodes(count: int) -> aes.U64:
    return np.frombuffer(os.urandom(16 * count), np.uint64).reshape(-1, 2)


def test_round_keys_are_those_of_the_standard() -> None:
    made = aes.round_keys(bytes.fromhex("2b7e151628aed2a6abf7158809cf4f3c")).astype("<u8").tobytes()
    assert made[16:32].hex() == "a0fafe1788542cb123a339392a6c7605"  # FIPS 197, appendix A.1
    assert made[160:].hex() == "d014f9a8c9ee2589e13f0cc8b6630ca6"


@pytest.mark.parametrize("way", [aes.LibraryHash(), aes.chosen()], ids=lambda way: way.name)
def test_answer_of_the_standard(way: aes.Hash, monkeypatch: pytest.MonkeyPatch) -> None:
    # FIPS 197, appendix C.1; its plaintext has an even first byte, so it is a seed already.
    key, plain = bytes(range(16)), bytes.fromhex("00112233445566778899aabbccddeeff")
    monkeypatch.setattr(aes, "KEYS", (key, *aes.KEYS[1:]))
    way = type(way)()
    monkeypatch.setattr(aes, "_SCHEDULES", np.stack([aes.round_keys(k) for k in aes.KEYS]))
    out = _made(way, np.frombuffer(plain, "<u8").reshape(1, 2).astype(np.uint64), 0, 1).astype("<u8").tobytes()
    assert bytes(a ^ b for a, b in zip(out, plain, strict=True)).hex() == "69c4e0d86a7b0430d8cdb78070b4c55a"


def test_fixed_keys_and_outputs() -> None:
    """Both parties and the dealer must hold the same: a change here is a change of the protocol."""
    assert len(set(aes.KEYS)) == 4
    node = np.array([[2, 3]], np.uint64)
    digest = hashlib.sha256(b"".join(aes.KEYS) + aes.hashed(node, 0, 4).astype("<u8").tobytes()).hexdigest()
    assert digest == "b7613af8aebc4c4dbaa3f5f533243dbf20ebaf08d438df90c0fc7c3c2cf5c688"


@pytest.mark.parametrize("count", [0, 1, 2, 31, 32, 33, 100, 1000])
def test_both_ways_give_the_same_bits(count: int) -> None:
    nodes = _nodes(count)
    for first, keys in ((0, 2), (2, 1), (2, 2), (0, 4)):
        expected = _made(aes.LibraryHash(), nodes, first, keys)
        np.testing.assert_array_equal(_made(aes.chosen(), nodes, first, keys), expected)
        np.testing.assert_array_equal(aes.hashed(nodes, first, keys), expected)


def test_a_loop_is_the_same_compiled_and_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def chain(nodes: aes.U64, out: aes.U64) -> int:
        for _ in range(3):
            aes.hash_into(nodes, len(nodes), 1, 1, out)
            nodes[:] = out[0]
        return 3

    loop, start = aes.in_loops(chain), _nodes(40)
    results = []
    for way in (aes.chosen(), aes.LibraryHash()):
        monkeypatch.setattr(aes, "chosen", lambda way=way: way)
        nodes = start.copy()
        assert loop(nodes, np.empty((1, 40, 2), np.uint64)) == 3
        results.append(nodes)
    np.testing.assert_array_equal(*results)


def test_the_instructions_are_used_where_they_are() -> None:
    assert aes.chosen().compiled == (aes._LANES > 0)


def test_a_kernel_that_is_wrong_is_found() -> None:
    class Wrong(aes.LibraryHash):
        def __call__(self, nodes: aes.U64, size: int, first: int, count: int, out: aes.U64) -> None:
            super().__call__(nodes, size, first, count, out)
            if size > 64:
                out[-1, size - 1, 1] ^= np.uint64(1 << 63)

    assert aes.known_answer_test(aes.LibraryHash())
    assert not aes.known_answer_test(Wrong())


def test_control_bit_does_not_enter() -> None:
    nodes = _nodes(50)
    flipped = nodes ^ np.array([1, 0], np.uint64)
    np.testing.assert_array_equal(aes.hashed(nodes, 0, 4), aes.hashed(flipped, 0, 4))
    other = nodes ^ np.array([2, 0], np.uint64)
    assert not np.any(np.all(aes.hashed(nodes, 0, 4) == aes.hashed(other, 0, 4), axis=2))


@pytest.mark.parametrize(
    ("features", "lanes"),
    [
        ("", 0),
        ("+avx2,+avx512f,-aes,-vaes", 0),
        ("+aes,+avx2,-vaes", 2),
        ("+aes,+avx2,+vaes,-avx512f", 4),
        ("+aes,+avx2,+vaes,+avx512f", 8),
    ],
)
def test_what_a_processor_lacks_is_not_used(features: str, lanes: int) -> None:
    assert aes._lanes(frozenset(features.split(","))) == lanes
