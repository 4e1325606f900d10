"""Point functions: dealer and both parties together, at every place of small domains and at random in large ones."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sordino.dealer.points import bit_points, prefix_points, unit_points, word_points
from sordino.shared.errors import ProtocolError, RangeError
from sordino.shared.twoparty import aes, points
from sordino.shared.twoparty.points import bit_sums, bit_table, histogram, word_sums

U64 = NDArray[np.uint64]
U8 = NDArray[np.uint8]


def words(*shape: int) -> U64:
    return np.frombuffer(os.urandom(8 * int(np.prod(shape))), np.uint64).reshape(shape)


def roots(n: int) -> tuple[U64, U64]:
    return words(n, 2), words(n, 2)


def below(n: int, bits: int) -> U64:
    return words(n) >> np.uint64(64 - bits)


@pytest.fixture(params=["chosen", "cryptography"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "cryptography":
        monkeypatch.setattr(aes, "chosen", aes.LibraryHash)


# -- one-bit leaves --------------------------------------------------------------------------------------------------


def signed_table(bits: int, phases: int = 8) -> NDArray[np.int64]:
    return words(phases, 1 << bits, 3).view(np.int64)


def looked_up(table: NDArray[np.int64], phases: Any, first: U64, alpha: U64, sign: NDArray[np.int64]) -> U64:
    j = (first - alpha) % np.uint64(table.shape[1])
    return (table[phases, j].T * sign).astype(np.uint64)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("bits", [7, 8, 10])
def test_bits_at_every_place(bits: int) -> None:
    n = 1 << bits
    alpha, first, phases = np.arange(n, dtype=np.uint64), below(n, bits), (below(n, 3)).astype(np.int64)
    r0, r1 = roots(n)
    corrections, sign = bit_points(alpha, bits, r0, r1)
    assert set(np.unique(sign)) == {-1, 1}
    table = signed_table(bits)
    laid = bit_table(table)
    total = sum(bit_sums(corrections, r, party, first, phases, laid) for party, r in enumerate((r0, r1)))
    np.testing.assert_array_equal(total, looked_up(table, phases, first, alpha, sign))


def test_bits_at_every_index() -> None:
    bits, n = 7, 1 << 14
    alpha = np.arange(n, dtype=np.uint64) % np.uint64(128)
    first = np.arange(n, dtype=np.uint64) // np.uint64(128)
    phases = np.zeros(n, np.int64)
    r0, r1 = roots(n)
    corrections, sign = bit_points(alpha, bits, r0, r1)
    table = signed_table(bits, 1)
    total = sum(bit_sums(corrections, r, p, first, phases, bit_table(table)) for p, r in enumerate((r0, r1)))
    np.testing.assert_array_equal(total, looked_up(table, phases, first, alpha, sign))


# -- words -----------------------------------------------------------------------------------------------------------


def word_result(alpha: U64, bits: int, first: U64, factors: U64, payload: U64) -> tuple[U64, U64]:
    r0, r1 = roots(len(alpha))
    corrections = word_points(alpha, bits, r0, r1, payload)
    made = [word_sums(corrections, r, party, bits, first, factors) for party, r in enumerate((r0, r1))]
    at = (alpha - first) % np.uint64(1 << bits)
    inside = at < factors.shape[1]
    column = np.where(inside, at, 0).astype(np.int64)
    expected = np.where(inside, payload * factors[np.arange(len(alpha)), column], np.uint64(0))
    return made[0] + made[1], expected


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("bits", "count"), [(1, 1), (1, 2), (2, 3), (4, 1), (4, 5), (4, 15), (5, 16), (5, 32)])
def test_words_at_every_place_and_window(bits: int, count: int) -> None:
    size = 1 << bits
    pairs = np.arange(size * size, dtype=np.uint64)
    alpha, first = pairs % np.uint64(size), pairs // np.uint64(size)
    total, expected = word_result(alpha, bits, first, words(len(pairs), count), words(len(pairs)))
    np.testing.assert_array_equal(total, expected)
    assert np.any(expected != 0)


@pytest.mark.parametrize(("bits", "count"), [(12, 16), (24, 16), (32, 7), (16, 1)])
def test_words_in_large_domains(bits: int, count: int) -> None:
    n = 200
    first = below(n, bits)
    # Half of the places near the window, also across the end of the domain.
    offset = np.where(np.arange(n) % 2 == 0, words(n) % np.uint64(2 * count), words(n))
    first[:20] = np.uint64((1 << bits) - 1)
    alpha = (first + offset) % np.uint64(1 << bits)
    total, expected = word_result(alpha, bits, first, words(n, count), words(n))
    np.testing.assert_array_equal(total, expected)
    assert 20 <= np.count_nonzero(expected) < n


def test_words_as_a_test_of_zero() -> None:
    """Counts opened under masks mu of Z_256: shares of [count = 0] (docs/two-party.md §6.3)."""
    counts, mu = np.arange(512, dtype=np.uint64) % np.uint64(256), below(512, 8)
    ones = np.ones((512, 1), np.uint64)
    r0, r1 = roots(512)
    corrections = word_points(mu, 8, r0, r1, ones[:, 0])
    opened = (counts + mu) % np.uint64(256)
    total = word_sums(corrections, r0, 0, 8, opened, ones) + word_sums(corrections, r1, 1, 8, opened, ones)
    np.testing.assert_array_equal(total, (counts == 0).astype(np.uint64))


# -- histograms ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("ring", "bits", "shape"),
    [(np.uint8, 4, (1, 1, 255)), (np.uint8, 7, (3, 2, 40)), (np.uint16, 3, (2, 1, 300)), (np.uint16, 9, (2, 3, 20))],
)
def test_histogram(ring: points.Ring, bits: int, shape: tuple[int, int, int]) -> None:
    heads, rows, length = shape
    n = heads * rows * length
    alpha, first = below(n, bits), below(n, bits).reshape(shape)
    counted = (words(rows, length) & np.uint64(3)) != 0
    r0, r1 = roots(n)
    corrections = unit_points(alpha, bits, r0, r1, ring)
    made = [histogram(corrections, r, p, bits, first, counted, ring) for p, r in enumerate((r0, r1))]
    assert all(share.dtype == ring for share in made)
    j = ((first - alpha.reshape(shape)) % np.uint64(1 << bits)).astype(np.int64)
    expected = np.zeros((heads * rows, 1 << bits), np.int64)
    for h in range(heads):
        for r in range(rows):
            np.add.at(expected[h * rows + r], j[h, r, counted[r]], 1)
    np.testing.assert_array_equal(made[0] + made[1], expected)


def test_histogram_of_one_value_fills_the_ring() -> None:
    r0, r1 = roots(255)
    corrections = unit_points(np.full(255, 5, np.uint64), 12, r0, r1, np.uint8)
    first, counted = np.full((1, 1, 255), 4, np.uint64), np.ones((1, 255), np.bool_)
    total = sum(histogram(corrections, r, p, 12, first, counted, np.uint8) for p, r in enumerate((r0, r1)))
    assert total[0, 4095] == 255
    assert np.count_nonzero(total) == 1


# -- what a party sees -----------------------------------------------------------------------------------------------


def chi_square(data: U8) -> float:
    """Of the bytes against uniform, in standard deviations (255 degrees of freedom: mean 255, deviation 22.6)."""
    seen = np.bincount(data.reshape(-1), minlength=256)
    expected = data.size / 256
    return float((((seen - expected) ** 2).sum() / expected - 255) / np.sqrt(510))


def keys_of(kind: str, alpha: int, n: int) -> tuple[U8, U64, U64]:
    r0, r1 = roots(n)
    places = np.full(n, alpha, np.uint64)
    if kind == "bits":
        return bit_points(places, 9, r0, r1)[0], r0, r1
    if kind == "words":
        return word_points(places, 9, r0, r1, np.full(n, 7, np.uint64)), r0, r1
    if kind == "units":
        return unit_points(places, 9, r0, r1, np.uint8), r0, r1
    return prefix_points(places << np.uint64(55), 3, 9, r0, r1), r0, r1


@pytest.mark.parametrize("kind", ["bits", "words", "units", "prefixes"])
def test_corrections_are_uniform_whatever_the_place(kind: str) -> None:
    """Byte by byte where all eight bits are used, at two places; the bits of right children for themselves."""
    n = 4000
    depth = {"bits": 2, "words": 8, "units": 5, "prefixes": 9}[kind]
    packed = slice(16 * depth, 16 * depth + (depth + 7) // 8)
    shares = []
    for alpha in (0, 341):
        corrections = keys_of(kind, alpha, n)[0]
        assert chi_square(np.delete(corrections, packed, axis=1)) < 6
        bits = np.unpackbits(corrections[:, packed], axis=1, count=depth, bitorder="little")
        lowest = corrections[:, 0 : 16 * depth : 16] & 1
        shares.append(np.concatenate([bits, lowest], axis=1).mean(axis=0))
    # 4000 fair coins: deviation 0.0079.
    assert np.abs(np.array(shares) - 0.5).max() < 0.05


@pytest.mark.parametrize("party", [0, 1])
def test_shares_of_one_party_are_uniform_whatever_the_place(party: int) -> None:
    n, ones = 4000, np.ones((4000, 1), np.uint64)
    for alpha in (0, 341):  # looked at where the payload is, and where it is not
        corrections, *both = keys_of("words", alpha, n)
        for first in (0, 341):
            share = word_sums(corrections, both[party], party, 9, np.full(n, first, np.uint64), ones)
            assert chi_square(share.view(np.uint8)) < 6
        corrections, *both = keys_of("units", alpha, n)
        first = np.zeros((n, 1, 1), np.uint64)
        share = histogram(corrections, both[party], party, 9, first, np.ones((1, 1), np.bool_), np.uint8)
        assert chi_square(share[:, [-alpha % 512, 77]]) < 6


def test_uniformity_would_be_missed() -> None:
    biased = np.frombuffer(os.urandom(64000), np.uint8).copy()
    biased[::50] = 0
    assert chi_square(biased) > 6


# -- every correction counts -----------------------------------------------------------------------------------------


def test_a_changed_correction_breaks_the_result() -> None:
    """Each byte of a key in turn, one bit of it: the sum of the shares over the whole domain changes."""
    bits, size = 5, 32
    r0, r1 = roots(1)
    corrections = word_points(np.array([11], np.uint64), bits, r0, r1, np.array([7], np.uint64))
    n = corrections.shape[1] * 8
    depth = bits - 1
    spare = set(range(8 * 16 * depth + depth, 8 * (16 * depth + 1)))  # the padding of the right bits
    used = [i for i in range(n) if i not in spare]
    changed = np.repeat(corrections, len(used), axis=0)
    for row, i in enumerate(used):
        changed[row, i // 8] ^= 1 << i % 8
    many = [np.repeat(r, len(used), axis=0) for r in (r0, r1)]
    outputs = []
    for leaf in range(size):
        first, one = np.full(len(used), leaf, np.uint64), np.ones((len(used), 1), np.uint64)
        outputs.append(sum(word_sums(changed, r, p, bits, first, one) for p, r in enumerate(many)))
    expected = np.zeros(size, np.uint64)
    expected[11] = 7
    wrong = np.any(expected != np.array(outputs).T, axis=1)
    assert wrong.all(), f"bits of the key that do nothing: {[used[i] for i in np.flatnonzero(~wrong)]}"


def test_keys_for_fixed_roots() -> None:
    """Dealer and parties may be of two versions: a change here is a change of the protocol."""
    numbers = np.arange(64, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    r0, r1 = numbers[:32].reshape(16, 2), numbers[32:].reshape(16, 2)
    alpha = np.arange(16, dtype=np.uint64) * np.uint64(31)
    bits, sign = bit_points(alpha, 10, r0, r1)
    words_, units = word_points(alpha, 9, r0, r1, numbers[:16]), unit_points(alpha, 9, r0, r1, np.uint8)
    prefixes = prefix_points(numbers[:16], 7, 44, r0, r1)
    assert [k.shape[1] for k in (bits, words_, units, prefixes)] == [65, 145, 97, 1622]
    made = b"".join(k.tobytes() for k in (bits, sign.astype("<i8"), words_, units, prefixes))
    assert hashlib.sha256(made).hexdigest() == "175cf51bb15a342b6e0b15376fadcbd2229a61b6d7a82bd9827738de5c192bf1"


# -- bad input -------------------------------------------------------------------------------------------------------


def test_sizes_are_checked() -> None:
    r0, r1 = roots(4)
    alpha = np.arange(4, dtype=np.uint64)
    corrections, _ = bit_points(alpha, 8, r0, r1)
    table, zeros = bit_table(signed_table(8)), np.zeros(4, np.int64)
    with pytest.raises(ProtocolError, match="corrections of shape"):
        bit_sums(corrections[:, 1:], r0, 0, alpha, zeros, table)
    with pytest.raises(ProtocolError, match="corrections of shape"):
        bit_sums(corrections.view(np.int8), r0, 0, alpha, zeros, table)
    with pytest.raises(ProtocolError, match="corrections of shape"):
        bit_sums(corrections, r0[:3], 0, alpha[:3], zeros[:3], table)
    with pytest.raises(ProtocolError, match="roots of shape"):
        bit_sums(corrections, r0[:, :1], 0, alpha, zeros, table)
    with pytest.raises(RangeError, match="over 8 bits"):
        bit_sums(corrections, r0, 0, alpha + np.uint64(256), zeros, table)
    with pytest.raises(RangeError, match="phase"):
        bit_sums(corrections, r0, 0, alpha, zeros + 8, table)
    with pytest.raises(ProtocolError, match="phases of shape"):
        bit_sums(corrections, r0, 0, alpha, zeros[:3], table)
    with pytest.raises(ProtocolError, match="indices of shape"):
        bit_sums(corrections, r0, 0, alpha[:3], zeros[:3], table)
    with pytest.raises(ProtocolError, match="indices of shape"):
        bit_sums(corrections, r0, 0, alpha.astype(np.int64), zeros, table)
    with pytest.raises(ProtocolError, match="factors of shape"):
        word_sums(corrections, r0, 0, 8, alpha, np.zeros((3, 2), np.uint64))
    with pytest.raises(RangeError, match="for 4 places"):
        word_points(alpha, 8, r0[:3], r1[:3], alpha)
    with pytest.raises(RangeError, match="for 4 places"):
        word_points(alpha, 8, r0, r1, alpha[:3])
    with pytest.raises(RangeError, match="power of two"):
        bit_table(np.zeros((1, 200, 3), np.int64))
    with pytest.raises(RangeError, match="over 8 bits"):
        bit_points(alpha + np.uint64(256), 8, r0, r1)
    with pytest.raises(RangeError, match="domain of 6 bits"):
        bit_points(alpha, 6, r0, r1)
    with pytest.raises(RangeError, match="window of 9"):
        word_sums(corrections, r0, 0, 3, alpha, np.zeros((4, 9), np.uint64))
    with pytest.raises(RangeError, match="overflow"):
        histogram(corrections, r0, 0, 8, np.zeros((1, 1, 256), np.uint64), np.ones((1, 256), np.bool_), np.uint8)
    with pytest.raises(ProtocolError, match="mask of shape"):
        histogram(corrections, r0, 0, 8, np.zeros((1, 2, 2), np.uint64), np.ones((1, 2), np.bool_), np.uint8)
    with pytest.raises(RangeError, match="levels 0 to 5"):
        prefix_points(alpha, 0, 5, r0, r1)
