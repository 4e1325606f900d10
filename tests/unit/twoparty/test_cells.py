"""1/sqrt and 1/x by cells: that cells partition the domain, the errors over all of it, and what happens beyond."""

from __future__ import annotations

import hashlib
import math
import os

import numpy as np
import pytest
from numpy.typing import NDArray

from sordino.dealer.points import prefix_points
from sordino.shared.errors import ProtocolError, RangeError
from sordino.shared.twoparty import aes, cells
from sordino.shared.twoparty.cells import CellTree, Domain, evaluate

U64 = NDArray[np.uint64]

# Of a mean square and of a sum of exponentials in SmolLM2, then the smallest ends there are, with an odd scale.
DOMAINS = [
    Domain("rsqrt", 25, 61, 28, 58),
    Domain("reciprocal", 31, 44, 33, 59),
    Domain("rsqrt", 5, 12, 3, 50),
    Domain("reciprocal", 5, 7, 0, 60),
]
BOUND = {"rsqrt": 2e-5, "reciprocal": 4e-5}


def words(*shape: int) -> U64:
    return np.frombuffer(os.urandom(8 * int(np.prod(shape))), np.uint64).reshape(shape)


def name(domain: Domain) -> str:
    return f"{domain.function}-{domain.lo}-{domain.hi}"


def shares(x: U64, domain: Domain) -> tuple[list[U64], list[U64]]:
    r, r0, r1 = words(len(x)), words(len(x), 2), words(len(x), 2)
    corrections = prefix_points(r, domain.first_level, domain.last_level, r0, r1)
    both = [evaluate(corrections, root, party, x + r, domain) for party, root in enumerate((r0, r1))]
    return [b[0] for b in both], [b[1] for b in both]


def revealed(x: U64, domain: Domain) -> tuple[NDArray[np.float64], U64]:
    values, inside = shares(x, domain)
    return (values[0] + values[1]).view(np.int64) / 2.0**domain.result_fraction, inside[0] + inside[1]


def exact(x: U64, domain: Domain) -> NDArray[np.float64]:
    real = x / 2.0**domain.fraction
    out: NDArray[np.float64] = 1 / np.sqrt(real) if domain.function == "rsqrt" else 1 / real
    return out


def over(domain: Domain, count: int) -> U64:
    """Log-spaced over the domain, with its ends and their neighbours."""
    x = np.exp2(np.linspace(domain.lo, domain.hi, count)).astype(np.uint64)
    low, high = 1 << domain.lo, 1 << domain.hi
    return np.concatenate([x.clip(low, high), np.array([low, low + 1, high - 1, high], np.uint64)])


@pytest.fixture(params=["chosen", "cryptography"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "cryptography":
        monkeypatch.setattr(aes, "chosen", aes.LibraryHash)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("domain", DOMAINS, ids=name)
def test_error_over_the_whole_domain(domain: Domain) -> None:
    x = over(domain, 1500)
    made, inside = revealed(x, domain)
    assert (inside == 1).all()
    assert np.abs(made / exact(x, domain) - 1).max() < BOUND[domain.function]


@pytest.mark.parametrize("domain", [Domain("rsqrt", 25, 61, 28, 40), Domain("reciprocal", 31, 44, 33, 25)], ids=name)
def test_error_in_units_when_there_are_few_fraction_bits(domain: Domain) -> None:
    """Where f is small, the rounding of its quadratic term counts: 1023^2 / 8 halves of a unit, not 1023^2."""
    x = over(domain, 1500)
    made, expected = revealed(x, domain)[0], exact(x, domain)
    units = np.abs(made - expected) - BOUND[domain.function] * expected
    assert 2.0**12 < units.max() * 2.0**domain.result_fraction < 2.0**17


@pytest.mark.parametrize("domain", DOMAINS, ids=name)
def test_beyond_the_domain(domain: Domain) -> None:
    low, high = 1 << domain.lo, 1 << domain.hi
    outside = [0, 1, low - low // 16 - 1, high + high // 16 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - low, low // 2]
    made, inside = revealed(np.repeat(np.array(outside, np.uint64), 50), domain)
    assert not inside.any()
    assert not made.any()
    # Next to the ends it depends on the mask whether there is a cell; if so, it is right.
    edge = np.linspace(low - low // 16, low - 1, 200).astype(np.uint64)
    edge = np.concatenate([edge, np.linspace(high + 1, high + high // 16, 200).astype(np.uint64)])
    made, inside = revealed(edge, domain)
    assert set(np.unique(inside)) <= {0, 1}
    assert 0 < inside.sum() < len(inside)
    expected = exact(edge, domain) * inside
    assert (np.abs(made - expected) <= BOUND[domain.function] * expected).all()


@pytest.mark.parametrize("domain", DOMAINS, ids=name)
def test_cells_partition_the_domain(domain: Domain) -> None:
    """Lemma 3, from the intervals themselves: they meet end to end, each x of the domain is in one, each is narrow."""
    n = 200
    # Also masks for which nodes lie just so at the ends of the domain.
    edges = [0, 1, 2**63, 2**64 - 1, *(d + (1 << e) for e in (domain.lo, domain.hi) for d in (-1, 0, 1))]
    opened = np.concatenate([np.array(edges, np.uint64), words(n - len(edges))])
    r0, r1 = words(n, 2), words(n, 2)
    corrections = prefix_points(words(n), domain.first_level, domain.last_level, r0, r1)
    tree = CellTree(corrections, r0, 0, domain)
    _, places, _ = tree.cells(opened, slice(0, n))
    tops, levels, wires = (places[:, i].astype(object) for i in range(3))
    assert len(set(wires)) == n
    for wire in range(n):
        mine = wires == wire
        order = np.argsort(tops[mine])
        top, width = tops[mine][order], np.array([1 << (64 - level) for level in levels[mine][order]], object)
        bottom = top - width + 1
        assert (bottom[1:] == top[:-1] + 1).all()
        assert bottom[0] <= 1 << domain.lo <= top[0]
        assert bottom[-1] <= 1 << domain.hi <= top[-1]
        assert (16 * width <= bottom).all()
        # And they are nodes of the tree over r.
        assert all((int(opened[wire]) - t) % w == 0 for t, w in zip(top, width, strict=True))
    assert domain.first_level <= levels.min()
    assert levels.max() <= domain.last_level
    for level in range(1, domain.last_level + 1):
        assert np.bincount(wires[levels == level].astype(np.int64), minlength=n).max() <= cells._CELLS


@pytest.mark.parametrize("domain", [*DOMAINS, Domain("rsqrt", 8, 20, 0, 60)], ids=name)
def test_payload_is_that_of_the_one_cell_with_the_mask(domain: Domain) -> None:
    """(1, rho, rho^2) at the cell whose prefix is the mask's, zeros at all others; rho may end with the mask."""
    x = over(domain, 60)
    n = len(x)
    r, r0, r1 = words(n), words(n, 2), words(n, 2)
    corrections = prefix_points(r, domain.first_level, domain.last_level, r0, r1)
    payloads = []
    for party, root in enumerate((r0, r1)):
        tree = CellTree(corrections, root, party, domain)
        blocks, places, made = tree.cells(x + r, slice(0, n))
        wires, levels = places[:, 2].astype(np.int64), places[:, 1].astype(np.int64)
        correction = tree.leaf[wires, levels - domain.first_level] * (blocks[:, :1] & np.uint64(1))
        payloads.append(made.transpose(1, 0, 2).reshape(-1, 4)[:, :3] + correction)
    payload = payloads[0] - payloads[1]
    for wire in range(n):
        mine = np.flatnonzero(wires == wire)
        (holder,) = mine[payload[mine, 0] != 0]
        assert not payload[mine[mine != holder]].any()
        level, mask = int(levels[holder]), int(r[wire])
        assert (int(x[wire]) + mask - int(places[holder, 0])) % 2**64 >> (64 - level) == mask >> (64 - level)
        rho = (mask << level) % 2**64 >> 54
        assert payload[holder].tolist() == [1, rho, rho * rho]


def test_every_mask_bit_is_used() -> None:
    """The same x under masks that differ in one bit: the right value each time."""
    domain = DOMAINS[0]
    x = np.full(64, 12345678901, np.uint64)
    r = np.full(64, 0x0123456789ABCDEF, np.uint64) ^ (np.uint64(1) << np.arange(64, dtype=np.uint64))
    r0, r1 = words(64, 2), words(64, 2)
    corrections = prefix_points(r, domain.first_level, domain.last_level, r0, r1)
    total = evaluate(corrections, r0, 0, x + r, domain)[0] + evaluate(corrections, r1, 1, x + r, domain)[0]
    made = total.view(np.int64) / 2.0**domain.result_fraction
    assert np.abs(made / exact(x, domain) - 1).max() < BOUND["rsqrt"]


def test_shares_of_one_party_are_uniform_whatever_the_value() -> None:
    """Top bytes of both results, inside of the domain and outside: 255 degrees of freedom, deviation 22.6."""
    domain, n = DOMAINS[1], 4000
    for x in ((1 << domain.lo) + 5, 1 << domain.hi, 3):
        for part in shares(np.full(n, x, np.uint64), domain):
            for share in part:
                seen = np.bincount((share >> np.uint64(56)).astype(np.int64), minlength=256)
                assert (((seen - n / 256) ** 2).sum() / (n / 256) - 255) / math.sqrt(510) < 6


def test_coefficients_are_the_same_integers_everywhere() -> None:
    """Compiled as in plain IEEE arithmetic, and as they always were: both parties must multiply by the same."""
    made: list[int] = []
    for domain in DOMAINS:
        root = domain.function == "rsqrt"
        scale = 2.0 ** math.floor(domain.log2_scale)
        for middle in ((37 + 11 * k) * 2.0 ** (e - 5) + 0.5 for e in range(domain.lo, domain.hi) for k in range(3)):
            width = 2.0 ** (math.frexp(middle)[1] - 6)
            out, plain = np.zeros((2, 3), np.int64)
            cells._coefficients(middle, width, scale, root, out)
            cells._coefficients.py_func(middle, width, scale, root, plain)
            np.testing.assert_array_equal(out, plain)
            made += out.tolist()
    assert (
        hashlib.sha256(repr(made).encode()).hexdigest()
        == "5c6455b820829e52ffa5c28f5645e0f1914963992b7eade2f614711e11e212a3"
    )


@pytest.mark.parametrize("position", [0, 300, 704, 830, 838, 846, 1500])
def test_a_changed_correction_changes_some_result(position: int) -> None:
    """A bit of a seed, of a control bit, of each payload: another result for at least one of many x."""
    domain, n = DOMAINS[0], 400
    x = over(domain, n - 4)
    r, r0, r1 = words(n), words(n, 2), words(n, 2)
    corrections = prefix_points(r, domain.first_level, domain.last_level, r0, r1)
    results = []
    for _ in range(2):
        results.append(
            [sum(evaluate(corrections, root, p, x + r, domain)[i] for p, root in enumerate((r0, r1))) for i in range(2)]
        )
        corrections[:, position] ^= 1
    assert (results[0][1] == 1).all()
    assert any((a != b).any() for a, b in zip(*results, strict=True))


def test_sizes_are_checked() -> None:
    domain = DOMAINS[0]
    r, r0, r1 = words(3), words(3, 2), words(3, 2)
    corrections = prefix_points(r, domain.first_level, domain.last_level, r0, r1)
    assert corrections.shape == (3, domain.width)
    with pytest.raises(ProtocolError, match="corrections of shape"):
        evaluate(corrections[:, :-8], r0, 0, r, domain)
    with pytest.raises(ProtocolError, match="for 3 roots"):
        evaluate(corrections, r0, 0, r[:2], domain)
    with pytest.raises(RangeError, match="in order"):
        Domain("rsqrt", 20, 20, 0, 10)
    with pytest.raises(RangeError, match="in order"):
        Domain("rsqrt", 4, 20, 0, 10)
    with pytest.raises(RangeError, match=r"below 2\^62"):
        Domain("reciprocal", 10, 20, 10, 62)
    with pytest.raises(RangeError, match="rsqrt or reciprocal"):
        Domain("sqrt", 10, 20, 10, 10)  # type: ignore[arg-type]
