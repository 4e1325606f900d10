"""Digests of the parts of each matrix, so that a rank reads and checks its own share alone.

``server/slices.json`` has, for each group, the SHA-256 (hex) of its slices: plane after plane, the rows between two
neighbouring cuts. Matrices are cut wherever a share of one to eight ranks begins or ends: a share is whole slices. The
manifest lists that file like any other, so that its fingerprint covers all of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import torch

from sordino.shared.errors import BundleError
from sordino.shared.manifest import GroupSpec

SLICES_NAME: Final = "slices.json"
_MOST_RANKS: Final = 8


def share(size: int, number: int, count: int) -> slice:
    """One of ``count`` contiguous parts of ``range(size)``, as equal as can be, the larger ones first."""
    small, more = divmod(size, count)
    first = number * small + min(number, more)
    return slice(first, first + small + (number < more))


def slice_digests(weights: torch.Tensor, planes: int) -> list[str]:
    """Of an int8 matrix ``[planes * m, n]``, for :func:`write_slices`."""
    return [_digest(weights[rows]) for rows in _slices(len(weights) // planes, planes)]


def write_slices(folder: Path, digests: Mapping[str, Sequence[str]]) -> None:
    (folder / SLICES_NAME).write_text(json.dumps(digests, indent=0) + "\n", encoding="ascii")


def read_slices(path: Path, groups: Iterable[GroupSpec]) -> dict[str, list[str]]:
    """The digests of these groups.

    Raises:
        BundleError: the file is malformed, or has not as many of a group as it has slices.
    """
    try:
        listed = json.loads(path.read_bytes())
        found = {group.name: list(listed[group.name]) for group in groups}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise BundleError(f"{SLICES_NAME} is malformed ({type(error).__name__}): split the model again") from error
    for group in groups:
        expected = sum(1 for _ in _slices(group.out_features, group.planes))
        if len(found[group.name]) != expected:
            raise BundleError(f"{SLICES_NAME}: group {group.name!r} has {expected} slices: split the model again")
    return found


def check_slices(group: GroupSpec, weights: torch.Tensor, digests: Sequence[str], wanted: slice | None = None) -> int:
    """Reads and hashes the slices that hold rows ``wanted`` of each plane, no others; returns their bytes.

    Args:
        weights: ``[planes * out_features, in_features]``, on the CPU.
        wanted: all rows without.

    Raises:
        BundleError: one is not what was split.
    """
    size = 0
    for rows, digest in zip(_slices(group.out_features, group.planes), digests, strict=True):
        first = rows.start % group.out_features
        if wanted and (first >= wanted.stop or first + rows.stop - rows.start <= wanted.start):
            continue
        size += weights[rows].nbytes
        if _digest(weights[rows]) != digest:
            raise BundleError(
                f"group {group.name!r} was changed after the split: the SHA-256 of rows {rows.start} to "
                f"{rows.stop - 1} is not that of {SLICES_NAME}"
            )
    return size


def _digest(rows: torch.Tensor) -> str:
    return hashlib.sha256(rows.numpy().data).hexdigest()


def _slices(size: int, planes: int) -> Iterator[slice]:
    """The rows of each slice of ``planes`` matrices of ``size`` rows."""
    shares = [share(size, number, count) for count in range(1, _MOST_RANKS + 1) for number in range(count)]
    cuts = sorted({rows.start for rows in shares} | {size})
    for plane in range(planes):
        for first, stop in pairwise(cuts):
            yield slice(plane * size + first, plane * size + stop)
