"""Every shipped parameter set stays above 128 bits by the standard's price, in an estimate that is not its table."""

from __future__ import annotations

import math

import pytest
from rlwe_security import primal

from sordino.shared.rlwe import PAGE_PARAMS, PARAMS, VALUE_PARAMS, RlweParams

TERNARY = math.sqrt(2 / 3)


@pytest.mark.parametrize("params", [PARAMS, PAGE_PARAMS, VALUE_PARAMS], ids=str)
def test_shipped_parameters(params: RlweParams) -> None:
    found = primal(params.n, math.log2(params.q), math.sqrt(params.eta / 2), TERNARY)
    assert found.standard_bits >= 128


@pytest.mark.parametrize(("n", "log_q"), [(1024, 27), (2048, 54), (4096, 109), (8192, 218)])
def test_the_estimate_meets_the_rows_of_the_standard(n: int, log_q: int) -> None:
    """Table 1, ternary secrets, 128 bits: two more bits of modulus are too many, give or take one bit of ours."""
    assert 127 <= primal(n, log_q, 3.2, TERNARY).standard_bits < 134
    assert primal(n, log_q + log_q // 20, 3.2, TERNARY).standard_bits < 128
