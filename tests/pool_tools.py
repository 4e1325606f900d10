"""Small manifests, known products and child processes for the tests of the mask pool."""

from __future__ import annotations

import hashlib
import os
import random
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sordino.client.pool import MaskPool
from sordino.shared.errors import PoolExhaustedError
from sordino.shared.manifest import GroupSpec, MemberSpec, ModelManifest
from sordino.shared.ring import P

U32 = NDArray[np.uint32]
SHAPES = ((7, 5), (12, 3), (4, 9))


def manifest(shapes: Iterable[tuple[int, int]] = SHAPES, name: str = "tiny") -> ModelManifest:
    """One group ``g<i>`` for each (in_features, out_features)."""
    groups = tuple(
        GroupSpec(
            name=f"g{i}",
            layer=0,
            in_features=n,
            members=(MemberSpec(name=f"m{i}", out_features=m),),
            weight_bits=8,
            l1_max=127 * n,
            l2_max=127 * n,
        )
        for i, (n, m) in enumerate(shapes)
    )
    return ModelManifest(
        model_name=name, model_type="llama", weight_bits=8, groups=groups, client_files={}, server_files={}
    )


def products(group: GroupSpec, r: U32) -> U32:
    """W r mod p for a matrix that follows from the group's name alone."""
    rng = np.random.default_rng(zlib.crc32(group.name.encode()))
    w = rng.integers(-127, 128, size=(group.out_features, group.in_features))
    out: U32 = ((r.astype(np.int64) @ w.T) % P).astype(np.uint32)  # |sum| < 2^63: 2^32 * 127 * n
    return out


def fill(pool: MaskPool, slots: int = 64) -> None:
    with pool.new_batch(slots) as writer:
        for group in pool.groups:
            writer.write(group.name, products(group, writer.masks(group.name)))
        writer.commit()


def digests(group: str, r: U32) -> list[str]:
    """One line per mask row; two equal lines are one mask used twice."""
    return [f"{group} {hashlib.sha256(row.tobytes()).hexdigest()}" for row in r]


def take_checked(pool: MaskPool, group: str, rows: int) -> list[str]:
    """Takes rows, checks W r against an independent computation, returns their digests."""
    r, wr = pool.take(group, rows)
    spec = next(g for g in pool.groups if g.name == group)
    assert r.shape == (rows, spec.in_features)
    assert wr.shape == (rows, spec.out_features)
    assert r.dtype == wr.dtype == np.uint32
    assert r.flags.c_contiguous
    assert wr.flags.c_contiguous
    assert int(r.max()) < P
    assert np.array_equal(wr, products(spec, r))
    return digests(group, r)


# -- children: functions of a module of their own, so that a fork server can run them ---------------------------------


def child_take(path: Path, state: Path, log: Path, seed: int, options: dict[str, Any]) -> None:
    """Takes rows and appends their digests to ``log`` before it would use them, until told otherwise.

    Options: ``refill`` slots when dry (else it ends), ``crash`` = (step, n): dies at the n-th pass of a crash point,
    ``takes``: ends after so many, ``started``: a file made when the first rows are there.
    """
    import sordino.client.ledger
    import sordino.client.pool
    import sordino.client.poolstore

    random_ = random.Random(seed)
    if crash := options.get("crash"):
        step, left = crash

        def die(name: str) -> None:
            nonlocal left
            if name == step:
                left -= 1
                if left < 0:
                    os._exit(9)

        for module in (sordino.client.pool, sordino.client.poolstore):
            module.crash_point = die  # type: ignore[attr-defined]
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with MaskPool.open_or_create(path, manifest(), state_dir=state) as pool:
        names = [group.name for group in pool.groups]
        for _ in range(options.get("takes", 1 << 30)):
            rows = random_.choice((1, 1, 3, 20, 63, 64, 65, 130))
            try:
                lines = take_checked(pool, random_.choice(names), rows)
            except PoolExhaustedError:
                if not options.get("refill"):
                    return
                fill(pool, options["refill"])
                continue
            os.write(fd, "".join(line + "\n" for line in lines).encode())
            if started := options.pop("started", None):
                Path(started).touch()


def read_log(log: Path) -> list[str]:
    """Whole lines; a process killed inside a write may have left a torn one, which was not used."""
    return [line for line in log.read_text().split("\n") if len(line.split(" ")[-1]) == 64] if log.exists() else []


def assert_no_repeats(lines: list[str]) -> None:
    repeated = len(lines) - len(set(lines))
    assert repeated == 0, f"{repeated} of {len(lines)} mask rows were handed out twice"
