"""Options are checked before anything is sent, each by its name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sordino.client.options import Options
from sordino.shared.errors import RangeError


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-1, -1e-9, math.nan, math.inf, 1e-9, "1", True, False, 10**5000]),
        ("top_p", [0, 1.1, -0.5, math.nan]),
        ("top_k", [-1, 1.5, True]),
        ("min_p", [-0.1, 1.1]),
        ("repetition_penalty", [0, -1, math.inf]),
        ("frequency_penalty", [-2.1, 2.1]),
        ("presence_penalty", [-2.1, 2.1]),
        ("max_tokens", [0, -1, 1.0, "7", -(10**5000)]),
        ("min_tokens", [-1, 257]),
        ("beams", [0, 65]),
        ("n", [0, 65]),
        ("seed", [1.5, 1 << 64, -(1 << 63) - 1]),
        ("logprobs", [-1, 21]),
        ("draft_tokens", [0, 33]),
        ("pad_prompt", [0]),
        ("stop", [("",), ("x" * 1001,), ("x",) * 17, "text", (1,), ("\ud800",)]),
        ("bad_words", [("",), ("\udc80",)]),
        ("end_ids", [(-1,), ("a",), 5, [1]]),
        ("logit_bias", [None, [1]]),
        ("fixed_length", ["no", 1]),
        ("fixed_drafts", ["no", 1]),
        ("speculate", ["fast", ""]),
    ],
)
def test_a_value_that_means_nothing_is_refused_by_name(name: str, values: list[Any]) -> None:
    """Cases 3.4 and 3.8."""
    for value in values:
        with pytest.raises(RangeError, match=name):
            Options(**{name: value})


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6, 1, 2.5])
def test_temperatures_that_mean_something(temperature: float) -> None:
    """Case 3.8."""
    assert Options(temperature=temperature).temperature == temperature


@pytest.mark.parametrize("bias", [{1: 101}, {1: math.nan}, {"a": 1}])
def test_biases_out_of_range(bias: dict[Any, float]) -> None:
    with pytest.raises(RangeError, match="logit_bias"):
        Options(logit_bias=bias)


@pytest.mark.parametrize(
    "together",
    [
        {"beams": 2, "temperature": 1.0},
        {"beams": 2, "seed": 1},
        {"beams": 2, "logprobs": 0},
        {"beams": 2, "speculate": "ngram"},
        {"beams": 2, "n": 3},
        {"beams": 2, "frequency_penalty": 0.5},
        {"n": 2, "speculate": "ngram"},
        {"fixed_drafts": True, "draft_tokens": 4},
        {"fixed_drafts": True, "speculate": "ngram"},
        {"fixed_length": True, "speculate": "ngram"},
        {"fixed_length": True, "beams": 2},
    ],
)
def test_options_that_exclude_each_other(together: dict[str, Any]) -> None:
    with pytest.raises(RangeError):
        Options(**together)


def test_an_unknown_option_is_named() -> None:
    """Case 3.12."""
    with pytest.raises(RangeError, match="'best_of'"):
        Options.of({"max_tokens": 4, "best_of": 2})


def test_lists_come_out_of_json() -> None:
    options = Options.of({"stop": ["a", "b"], "end_ids": [2], "bad_words": ["c"]})
    assert (options.stop, options.end_ids, options.bad_words) == (("a", "b"), (2,), ("c",))
