"""The ring Z_p of protocol ``masked`` and the bound that keeps products from wrapping.

p = 2^32 - 5 is the largest prime below 2^32 (https://oeis.org/A013603): an element costs four bytes, and a prime makes
the linear check of answers sound (Freivalds, "Fast probabilistic algorithms", MFCS 1979: a wrong product passes one
random check with probability 1/p).

Arrays: ring elements are ``uint32`` in [0, p); centred integers are ``int32`` in [-(p-1)/2, (p-1)/2].
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

P: Final = 2**32 - 5
P_HALF: Final = (P - 1) // 2
_W_MAX: Final = {8: 127, 12: 2047}


def activation_bound(in_features: int, weight_bits: int, l1_max: int) -> int:
    """Largest |x| for which every |sum_j W_ij x_j| <= (p-1)/2, so that no product can wrap.

    For int8 weights the bound takes the worst case, every |W_ij| = 127: it rests on nothing the provider claims, so a
    false manifest cannot make a product wrap unseen. For 12-bit weights the worst case would leave 9 bits of
    activation, so the stated ``l1_max`` is used; a false one is then an error of the provider that a client cannot
    see (docs/protocol.md).

    Args:
        in_features: n, the length of a row.
        weight_bits: 8 or 12.
        l1_max: max_i sum_j |W_ij| as the manifest states it.

    Returns:
        x_max >= 0; 0 means that the matrix leaves no room.
    """
    worst = in_features * _W_MAX[weight_bits]
    return P_HALF // (worst if weight_bits == 8 else max(l1_max, 1))


def combine_planes(y: NDArray[np.uint32], planes: int) -> NDArray[np.uint32]:
    """Products of each int8 plane of W, ``[R, planes * m]``, to those of W, ``[R, m]``: low + 256 * high mod p."""
    if planes == 1:
        return y
    low, high = np.split(y.astype(np.uint64), planes, axis=1)
    return ((low + 256 * high) % P).astype(np.uint32)
