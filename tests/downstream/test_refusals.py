"""Refusals: the API's shape, the right status, and what an SDK will make of it."""

from __future__ import annotations

import json

import pytest
from aiohttp.test_utils import make_mocked_request

from proxy import errors
from proxy.downstream.hosts import check_host
from proxy.downstream.refusals import refusal, refuse


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.BodyCorrupt("m"), 400, "corrupt_body"),
        (errors.BodyTimeout("m"), 408, "body_timeout"),
        (errors.BodyTooLarge("m"), 413, "body_too_large"),
        (errors.EncodingUnsupported("m"), 415, "unsupported_encoding"),
        (errors.HostRefused("m"), 403, "host_not_allowed"),
        (errors.LoopDetected("m"), 508, "loop_detected"),
        (errors.Overloaded("m"), 503, "overloaded"),
        (errors.UpstreamUnreachable("m"), 502, "upstream_unreachable"),
        (errors.TurnwireError("m"), 500, "internal_error"),
    ],
)
def test_each_error_has_its_reply(error: errors.TurnwireError, status: int, code: str) -> None:
    """Status and code come from the error; the body has all four keys of the API's shape."""
    response = refuse(error)
    assert response.status == status
    assert response.content_type == "application/json"
    assert isinstance(response.body, bytes)
    detail = json.loads(response.body)["error"]
    assert detail["message"] == "m"
    assert detail["code"] == code
    assert detail["param"] is None
    assert detail["type"] == (
        "server_error" if status in (500, 502, 503) else "invalid_request_error"
    )


def test_retry_advice_matches_the_error() -> None:
    """Overload asks to come back; a loop must not be retried by SDKs."""
    assert refuse(errors.Overloaded("m")).headers["Retry-After"] == "1"
    assert refuse(errors.LoopDetected("m")).headers["x-should-retry"] == "false"
    assert "x-should-retry" not in refuse(errors.UpstreamUnreachable("m")).headers


def test_an_unread_body_ends_the_connection() -> None:
    """What follows an unread body can't be told from it."""
    assert refuse(errors.BodyTooLarge("m")).keep_alive is False
    assert refuse(errors.HostRefused("m")).keep_alive is None


def test_a_refusal_can_be_made_by_hand() -> None:
    """Every part of the shape can be given."""
    response = refusal(426, "m", type_="t", code=None, param="p", headers={"Upgrade": "h2c"})
    assert isinstance(response.body, bytes)
    assert json.loads(response.body) == {
        "error": {"message": "m", "type": "t", "param": "p", "code": None}
    }
    assert response.headers["Upgrade"] == "h2c"


PASS = [
    ("localhost:8787", None),
    ("LOCALHOST", None),
    ("app.localhost:1", None),
    ("127.0.0.1:8787", None),
    ("127.9.9.9", None),
    ("[::1]:8787", None),
    ("[::1]", None),
    ("turnwire.test:8787", None),
    ("turnwire.test", None),
    ("only.test:99", None),
    ("localhost:8787", "http://localhost:8787"),
    ("localhost:8787", "https://localhost:8787"),
    ("localhost:8787", "http://ui.test"),
]
REFUSED = [
    ("evil.test:8787", None),
    ("localhost.evil.test", None),
    ("127.0.0.1.evil.test", None),
    ("10.0.0.1", None),
    ("[fe80::1]", None),
    ("", None),
    ("only.test:98", None),
    ("localhost:8787", "null"),
    ("localhost:8787", ""),
    ("localhost:8787", "http://evil.test"),
    ("localhost:8787", "http://localhost:9999"),
    ("localhost:8787", "http://localhost"),
    ("localhost:8787", "http://localhost:8787.evil.test"),
    ("evil.test:8787", "http://evil.test:8787"),
    ("evil.test:8787", "http://ui.test"),
]


def check(host: str, origin: str | None) -> None:
    """Ask for a request with these headers."""
    headers = {"Host": host} | ({} if origin is None else {"Origin": origin})
    request = make_mocked_request("POST", "/v1/responses", headers=headers)
    check_host(request, ["turnwire.test", "only.test:99"], ["http://ui.test"])


@pytest.mark.parametrize(("host", "origin"), PASS)
def test_loopback_and_listed_hosts_pass(host: str, origin: str | None) -> None:
    """Programs on this machine, and pages served from the same place, are let in."""
    check(host, origin)


@pytest.mark.parametrize(("host", "origin"), REFUSED)
def test_other_hosts_and_origins_are_refused(host: str, origin: str | None) -> None:
    """A rebound name or a foreign page does not get in."""
    with pytest.raises(errors.HostRefused):
        check(host, origin)
