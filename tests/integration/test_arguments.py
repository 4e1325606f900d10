"""Arguments of ``connect`` that mean nothing: refused by name, before anything is sent."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sordino.client import connect
from sordino.shared.errors import BundleError, PoolError, PoolSealedError, RangeError, SordinoError, TransportError

NOWHERE = "grpc://127.0.0.1:9"  # an attempt to reach it is a TransportError
WRONG: dict[str, tuple[dict[str, Any], type[SordinoError], str]] = {
    "half a batch": ({"batch": 128.0}, PoolError, "a multiple of 64"),
    "batch a truth": ({"batch": True}, PoolError, "a multiple of 64"),
    "checks negative": ({"check_vectors": -1}, RangeError, "check_vectors"),
    "checks many": ({"check_vectors": 3}, RangeError, "check_vectors"),
    "checks a truth": ({"check_vectors": True}, RangeError, "check_vectors"),
    "cache a file": ({"cache": "/etc/passwd"}, BundleError, "not a folder"),
    "cache below a file": ({"cache": "/etc/passwd/cache"}, BundleError, "Not a directory"),
    "cache too long": ({"cache": "x" * 300}, BundleError, "too long"),
    "cache with NUL": ({"cache": "a\0b"}, BundleError, "null"),
    "pool a file": ({"pool": "/etc/passwd"}, PoolError, "not a folder"),
    "pool too long": ({"pool": Path("x" * 300)}, PoolError, "too long"),
    "pool with NUL": ({"pool": "a\0b"}, PoolError, "null"),
    "state with NUL": ({"state_dir": "a\0b"}, PoolError, "null"),
    "passphrase": ({"passphrase": os.fsdecode(b"gr\xfc")}, PoolSealedError, "UTF-8"),
    "device that is not there": ({"device": "cuda:9"}, RangeError, "device 'cuda:9'"),
    "device unknown": ({"device": "abacus"}, RangeError, "device 'abacus'"),
    "device without numbers": ({"device": "meta"}, RangeError, "device 'meta'"),
    "bandwidth": ({"bandwidth_mbit": 0}, RangeError, "bandwidth_mbit"),
    "bandwidth a text": ({"bandwidth_mbit": "x"}, RangeError, "bandwidth_mbit"),
    "bandwidth a truth": ({"bandwidth_mbit": True}, RangeError, "bandwidth_mbit"),
    "low water below none": ({"low_water": -5}, RangeError, "low_water"),
    "low water a text": ({"low_water": "x"}, RangeError, "low_water"),
    "pages below none": ({"page_tokens": -1}, RangeError, "page_tokens"),
    "pages of halves": ({"page_tokens": 1.5}, RangeError, "page_tokens"),
    "CA with NUL": ({"ca": "a\0b", "target": "grpcs://localhost:9"}, TransportError, "the CA file"),
}


@pytest.mark.parametrize("case", WRONG)
def test_it_is_refused_by_name(case: str) -> None:
    options, kind, text = WRONG[case]
    with pytest.raises(kind, match=text) as caught:
        connect(options.pop("target", NOWHERE), retry_s=0, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "target",
    [
        *("grpcs://[::1", "grpcs://::1]:5", "grpcs://[zz]:1", "grpcs://h:0", "grpcs://h:65536", "grpcs://h:-1"),
        *(
            "grpcs://h:1?x=1",
            "grpcs://h:1#x",
            "grpcs://u:p@h:1",
            "grpcs://h\u00fc:1",
            "grpcs://h\udcfc:1",
            "grpcs://a\0b:1",
        ),
    ],
)
def test_a_target_of_no_form(target: str) -> None:
    with pytest.raises(TransportError, match=r"is not of the form|is not a number from 1"):
        connect(target, retry_s=0)


def test_the_control() -> None:
    """Nothing wrong but the address."""
    with pytest.raises(TransportError, match="nothing listens"):
        connect(NOWHERE, retry_s=0)
