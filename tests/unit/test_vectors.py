"""Known answers, made by a second implementation (tests/vectors/make.py): these bytes never change in a format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sordino.client.prg import uniform_mod_p
from sordino.server.kernel import choose_kernel
from sordino.shared.rlwe import PARAMS, expand_uniform, ntt, pack, unpack

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors" / "v1.json").read_text())


def test_masks() -> None:
    known = VECTORS["masks"]
    got = uniform_mod_p(bytes.fromhex(known["key"]), known["label"].encode(), len(known["values"]))
    assert got.tolist() == known["values"]


@pytest.mark.parametrize("known", VECTORS["uniform"], ids=lambda k: f"block {k['block']} prime {k['prime']}")
def test_public_randomness_with_its_rejections(known: dict[str, Any]) -> None:
    count = known["skip"] + len(known["values"])
    got = expand_uniform(bytes.fromhex(known["seed"]), known["block"], (count, 1))[known["prime"], known["skip"] :, 0]
    assert got.tolist() == known["values"]


def test_codec() -> None:
    known = VECTORS["pack"]
    values = np.array(known["values"], np.uint32).reshape(2, 64)
    assert pack(values).hex() == known["bytes"]
    assert unpack(bytes.fromhex(known["bytes"]), (2, 64)).tolist() == values.tolist()


@pytest.mark.parametrize("known", VECTORS["ntt"], ids=lambda k: f"prime {k['prime']}")
def test_transform(known: dict[str, Any]) -> None:
    a = np.zeros((2, PARAMS.n, 1), np.uint32)
    for index, value in known["coefficients"]:
        a[:, index, 0] = value % np.array(PARAMS.primes)
    ntt(a)
    for index, value in known["at"]:
        assert int(a[known["prime"], index, 0]) == value


def test_product() -> None:
    known = VECTORS["product"]
    weights = torch.tensor(known["weights"], dtype=torch.int8)
    got = choose_kernel(torch.device("cpu")).matmul(weights, np.array(known["rows"], np.uint32))
    assert got.tolist() == known["values"]
