"""What an error is called in HTTP."""

from __future__ import annotations

import pytest

from sordino.client.gateway.faults import ApiError, bad_request, fault_of
from sordino.client.options import Options
from sordino.shared import errors
from sordino.shared.errors import RangeError, SordinoError


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        (errors.IntegrityError, 502, "integrity_check_failed"),
        (errors.AuthError, 502, "server_refuses_token"),
        (errors.FingerprintError, 502, "another_model"),
        (errors.UnknownGroupError, 502, "protocol_error"),
        (errors.SessionLostError, 503, "server_unreachable"),
        (errors.HandshakeError, 503, "server_unreachable"),
        (errors.PoolExhaustedError, 503, "no_masks"),
        (errors.LimitError, 503, "server_limit"),
        (errors.KvEvictedError, 503, "cache_evicted"),
        (errors.RangeError, 500, "failed"),  # of an activation: no fault of the request
        (errors.SordinoError, 500, "failed"),
    ],
)
def test_errors_of_an_answer_under_way(kind: type[SordinoError], status: int, code: str) -> None:
    fault = fault_of(kind("one\nline"))
    assert fault.body == {"error": {"message": "one line", "type": "server_error", "param": None, "code": code}}
    assert (fault.status, fault.headers) == (status, {"x-should-retry": "false"})


def test_the_text_of_an_error_that_nobody_expected_goes_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    fault = fault_of(RuntimeError("secret"))
    assert (fault.status, fault.code) == (500, "internal_error")
    assert "RuntimeError" in caplog.text
    assert "secret" not in str(fault) + caplog.text


@pytest.mark.parametrize("name", ["temperature", "stop", "logit_bias", "min_tokens"])
def test_an_option_is_named(name: str) -> None:
    wrong = {"temperature": -1.0, "stop": ("",), "logit_bias": {1: 1e3}, "min_tokens": -1}
    with pytest.raises(RangeError) as caught:
        Options(**{name: wrong[name]})  # type: ignore[arg-type]
    fault = bad_request(caught.value)
    assert (fault.status, fault.param, fault.headers) == (400, name, {})


def test_no_option_is_named_where_none_is_to_blame() -> None:
    assert bad_request(RangeError("the prompt is empty")).param is None
    assert ApiError(429, "x", retry=True).body["error"]["type"] == "rate_limit_error"
