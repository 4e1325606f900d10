"""What breaking the RLWE parameters costs, by the primal attack: an estimate of our own beside the standard's table.

The attack reduces the lattice of m samples with the embedding of Bai and Galbraith (ACISP 2014), which scales a secret
that is smaller than the errors, until block size b satisfies the condition of Albrecht, Goepfert, Virdia and Wunderer
(ASIACRYPT 2017): sqrt(b) sigma <= delta(b)^(2b-d-1) Vol^(1/d), d = n + m + 1, delta(b) the root-Hermite factor of
Chen's thesis (2013). Two prices of BKZ-b: that of the Homomorphic Encryption Standard (2018), 2^(0.292 b + 16.4 +
log2(8 d)), with the sieve of Becker, Ducas, Gama and Laarhoven (SODA 2016); and the Core-SVP price 2^(0.292 b) of one
call of that sieve (Alkim, Ducas, Poeppelmann and Schwabe, USENIX Security 2016), which leaves all factors out and so
understates.

The full lattice-estimator, which also knows dual and hybrid attacks, needs Sage.

    python bench/rlwe_security.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sordino.shared.rlwe import PAGE_PARAMS, PARAMS, VALUE_PARAMS


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bits are log2 of the number of operations."""

    block: int
    dimension: int

    @property
    def standard_bits(self) -> float:
        return 0.292 * self.block + 16.4 + math.log2(8 * self.dimension)

    @property
    def core_svp_bits(self) -> float:
        return 0.292 * self.block


def primal(n: int, log_q: float, error: float, secret: float) -> Estimate:
    """The smallest block size that succeeds, over numbers of samples.

    Args:
        n: ring degree. error, secret: standard deviations of their coefficients.

    Raises:
        ValueError: none up to 2000 does.
    """
    error_bits, scale_bits = math.log2(error), math.log2(error / secret)
    for block in range(60, 2001):
        root = (math.pi * block) ** (1 / block) * block / (2 * math.pi * math.e)
        log_delta = math.log2(root) / (2 * (block - 1))
        for samples in range(n // 4, 2 * n, 8):
            d = n + samples + 1
            volume = samples * log_q + n * scale_bits
            if 0.5 * math.log2(block) + error_bits <= (2 * block - d - 1) * log_delta + volume / d:
                return Estimate(block, d)
    raise ValueError(f"no block size up to 2000 breaks n = {n}, log2 q = {log_q:.1f}")


def main() -> None:
    print(f"{'':24} {'N':>5} {'log2 q':>7} {'sigma':>6} {'block':>6} {'standard':>9} {'Core-SVP':>9}")
    for name, params in (
        ("masks, rows", PARAMS),
        ("keys, queries", PAGE_PARAMS),
        ("values, probabilities", VALUE_PARAMS),
    ):
        sigma = math.sqrt(params.eta / 2)
        found = primal(params.n, math.log2(params.q), sigma, math.sqrt(2 / 3))
        bits = f"{found.standard_bits:9.1f} {found.core_svp_bits:9.1f}"
        print(f"{name:24} {params.n:5} {math.log2(params.q):7.2f} {sigma:6.2f} {found.block:6} {bits}")


if __name__ == "__main__":
    main()
