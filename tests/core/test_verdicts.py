"""What refusals mean: every shape is read, every cause has its verdict, every reply its form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.reasons import Reason
from proxy.core.verdicts import (
    Refusal,
    Verdict,
    connection_failed_reply,
    http_reply,
    judge,
    judge_close,
    parse_error,
    parse_upgrade_refusal,
    protocol_fault_reply,
    says_no_model,
    silent_reply,
    unavailable_reply,
)

FIELDS = ["type", "error", "status", "code", "message", "headers", "param", "detail", "x"]
PASSED = [
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    "x-request-id",
    "x-ratelimit-limit-tokens",
    "openai-version",
]
WITHHELD = ["connection", "transfer-encoding", "content-length", "content-type", "set-cookie"]


def read(message: Any) -> Refusal:
    """Parse an error frame that must be one."""
    text = message if isinstance(message, bytes) else json.dumps(message).encode()
    refusal = parse_error(text)
    assert refusal is not None
    return refusal


# --- Reading ------------------------------------------------------------------------------------

DETAILS = {"type": "invalid_request_error", "code": "bad", "message": "No.", "param": "input"}
SHAPES: list[dict[str, Any]] = [
    {"type": "error", "status": 400, "error": DETAILS},
    {"type": "error", "status": "400", "error": DETAILS, "stream_id": "a"},
    {"type": "error", "status_code": 400, "error": DETAILS, "sequence_number": 3},
    {"type": "error", "error": {**DETAILS, "status": 400}},
    {"type": "error", "error": DETAILS},
    {"error": DETAILS},
    {"type": None, "error": DETAILS},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_nested_shapes_say_the_same(shape: dict[str, Any]) -> None:
    """Wherever the status stands, and with or without a type, the error is the same."""
    refusal = read(shape)

    assert (refusal.status, refusal.code, refusal.type) == (400, "bad", "invalid_request_error")
    assert (refusal.message, refusal.param) == ("No.", "input")


def test_the_flat_shape_is_read() -> None:
    """SSE's documented form has no `error` object; its type is not the error's type."""
    refusal = read({"type": "error", "code": "server_error", "message": "Oh.", "param": None})

    assert (refusal.status, refusal.code, refusal.type) == (500, "server_error", None)
    assert (refusal.message, refusal.param, refusal.raw_error) == ("Oh.", None, None)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"detail": "Unsupported parameter: previous_response_id"}, "Unsupported parameter"),
        ({"type": "error", "error": "boom"}, "boom"),
        ({"type": "error", "detail": "later"}, "later"),
        ({"type": "error"}, "The upstream reported"),
        ({"type": "error", "error": {"message": {"not": "text"}}}, "The upstream reported"),
        ({"type": "error", "error": {"message": True}}, "The upstream reported"),
        ({"type": "error", "error": [1]}, "The upstream reported"),
        (b'{"type":"error", garbage', "The upstream reported"),
        (b'{"type":"error","message":"a","message":"b"}', "The upstream reported"),
        (b'{"type":"error","message":"\xff"}', "The upstream reported"),
    ],
)
def test_a_poor_error_is_still_an_error(message: Any, said: str) -> None:
    """What can't be read has status 502 and a message that can be shown."""
    refusal = read(message)

    assert refusal.status == 502
    assert refusal.message.startswith(said)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"null",
        b"[]",
        b"garbage",
        b'{"type":"response.created"}',
        b'{"type":"response.x","error":{"message":"no"}}',
        b'{"id":"resp_1"}',
        b'{"type":5,"error":{}}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_error_is_not_taken_for_one(message: bytes) -> None:
    """Other events, and things that say nothing of an error, are None."""
    assert parse_error(message) is None


@pytest.mark.parametrize(
    ("code", "kind", "status"),
    [
        ("invalid_api_key", "invalid_request_error", 401),
        (None, "authentication_error", 401),
        (None, "permission_error", 403),
        ("unsupported_country_region_territory", "request_forbidden", 403),
        ("model_not_found", "invalid_request_error", 404),
        (None, "not_found_error", 404),
        ("previous_response_not_found", None, 400),
        ("websocket_connection_limit_reached", None, 400),
        ("invalid_stream_id", None, 400),
        ("request_too_large", None, 413),
        ("rate_limit_exceeded", "tokens", 429),
        ("insufficient_quota", "insufficient_quota", 429),
        ("usage_limit_reached", None, 429),
        ("server_is_overloaded", "service_unavailable_error", 503),
        ("slow_down", None, 503),
        ("server_error", None, 500),
        (None, "server_error", 500),
        (None, "api_error", 500),
        (None, "invalid_request_error", 400),
        ("context_length_exceeded", None, 400),
        ("misalignment_policy_violation", None, 400),
        ("never_heard_of", "neither", 502),
        (None, None, 502),
        (418, None, 418),
        ("413", None, 413),
        (200, None, 502),
    ],
)
def test_a_missing_status_follows_from_code_then_type(
    code: Any, kind: str | None, status: int
) -> None:
    """The code decides before the type does."""
    assert read({"type": "error", "error": {"code": code, "type": kind}}).status == status


@pytest.mark.parametrize("status", [True, 200, 99, 600, "abc", None, {"a": 1}, 400.5])
def test_an_impossible_status_is_ignored(status: Any) -> None:
    """A status that is no error's is replaced by what the code implies."""
    message = {"type": "error", "status": status, "error": {"code": "slow_down"}}

    assert read(message).status == 503


def test_headers_are_taken_from_both_places_and_made_safe() -> None:
    """The error's own headers win; whatever could break a reply's head is left out."""
    refusal = read(
        {
            "type": "error",
            "headers": {"Retry-After": 1, "X-Request-Id": "req_1", "bad name": "x", "a:b": "c"},
            "error": {
                "headers": {
                    "retry-after": "2",
                    "openai-x": "a\r\nset-cookie: b",
                    "x-should-retry": ["no"],
                    "openai-y": "h\u00e9",
                }
            },
        }
    )

    assert dict(refusal.headers) == {"retry-after": "2", "x-request-id": "req_1"}


def test_headers_of_the_wrong_kind_are_ignored() -> None:
    """Headers that are no object are none."""
    assert read({"type": "error", "headers": "x", "error": {"headers": [1]}}).headers == ()


def test_a_refused_upgrade_is_read_like_an_error() -> None:
    """The HTTP status and headers count; the error object is kept."""
    body = b'{"error":{"message":"Slow down.","code":"rate_limit_exceeded","x":1.0}}'

    refusal = parse_upgrade_refusal(429, {"Retry-After": "7", "Server": "x"}, body)

    assert (refusal.status, refusal.code) == (429, "rate_limit_exceeded")
    reply = http_reply(refusal)
    assert ("retry-after", "7") in reply.headers
    assert b'"x":1.0' in reply.body


def test_a_gateways_page_is_not_handed_on() -> None:
    """HTML in answer to an upgrade becomes a plain error of the same status."""
    reply = http_reply(parse_upgrade_refusal(429, {}, b"<html>secret</html>"))

    assert reply.status == 429
    assert b"secret" not in reply.body


def test_a_refusal_shows_no_content_in_its_repr() -> None:
    """An error's message may quote the request, so no log gets it."""
    assert repr(read({"error": {"message": "secret", "code": "bad"}})) == (
        "Refusal(status=502, code='bad', type=None)"
    )


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(FIELDS) | st.text(max_size=3),
                inner,
                max_size=5,
            )
        ),
        max_leaves=12,
    ),
    st.booleans(),
)
def test_any_json_is_read_or_left_alone(value: Any, is_error: bool) -> None:
    """No JSON value makes the parser raise, and every refusal has a reply that is JSON."""
    if is_error and isinstance(value, dict):
        value["type"] = "error"
    refusal = parse_error(json.dumps(value).encode())
    if refusal is None:
        return
    reply = http_reply(refusal)
    error = json.loads(reply.body)["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert "headers" not in error
    assert 400 <= reply.status <= 599


# --- Judging ------------------------------------------------------------------------------------

IN_PLACE, ELSEWHERE, AS_FULL = (
    Verdict.RESEND_IN_PLACE,
    Verdict.RESEND_ELSEWHERE,
    Verdict.RESEND_AS_FULL,
)
FALL_BACK, REFUSE = Verdict.FALL_BACK, Verdict.REFUSE

LOST = "chain lost"
LOST_WORDINGS: list[dict[str, Any]] = [
    {"code": "previous_response_not_found", "type": "invalid_request_error"},
    {"type": "invalid_request_error", "message": "Invalid `previous_response_id`."},
    {"message": "previous_response_id is not available for this user", "status": 403},
    {"message": "Unsupported parameter: previous_response_id", "status": 400},
    {"message": "Previous response with id 'resp_1' not found.", "status": 404},
    {"message": "Response with id=resp_1 not found.", "type": "api_error"},
    {"param": "previous_response_id", "message": "Bad.", "status": 400},
]
LIMITS: list[dict[str, Any]] = [
    {"code": "websocket_connection_limit_reached", "status": 400},
    {"code": "websocket_connection_limit_reached", "status": 429},
    {"code": "websocket_stream_limit_reached"},
    {"code": "invalid_stream_id"},
    {"message": "WebSocket connection limit reached (60 minutes)", "status": 400},
]
INCONSISTENT: list[dict[str, Any]] = [
    {"message": "No tool output found for function call call_1.", "status": 400},
    {"message": "No tool call found for function call output with call_id c.", "status": 400},
    {"message": "Duplicate item found with id rs_1.", "status": 400},
    {"message": "Item 'rs_1' was provided without its required following item.", "status": 400},
    {"message": "Item with id 'rs_1' not found. Items are not persisted", "status": 404},
]
FAILURES: list[dict[str, Any]] = [
    {"code": "server_error"},
    {"type": "server_error", "code": None},
    {"code": "server_is_overloaded", "status": 503},
    {"code": "slow_down"},
    {"status": 529},
    {"message": "What?"},
]
FINAL: list[dict[str, Any]] = [
    {"code": "rate_limit_exceeded", "status": 429},
    {"code": "insufficient_quota"},
    {"code": "usage_limit_reached", "message": "of your previous_response_id"},
    {"code": "invalid_api_key", "message": "previous_response_id"},
    {"status": 403, "message": "no"},
    {"code": "model_not_found"},
    {"code": "context_length_exceeded", "status": 400},
    {"status": 413},
    {"status": 422},
]
# Causes, and the verdict when the refusal answers a delta, a full send, and a resend.
TABLE = [
    (LOST_WORDINGS, (IN_PLACE, REFUSE, FALL_BACK), Reason.PREVIOUS_RESPONSE_NOT_FOUND),
    (LIMITS, (ELSEWHERE, ELSEWHERE, FALL_BACK), Reason.CONNECTION_LIMIT_REACHED),
    (INCONSISTENT, (AS_FULL, REFUSE, REFUSE), Reason.DELTA_REJECTED),
    (FAILURES, (ELSEWHERE, ELSEWHERE, REFUSE), Reason.UPSTREAM_FAILED),
    (FINAL, (REFUSE, REFUSE, REFUSE), None),
]


@pytest.mark.parametrize(
    ("error", "verdicts", "reason"),
    [(error, verdicts, reason) for errors, verdicts, reason in TABLE for error in errors],
)
def test_every_refusal_has_its_verdict(
    error: dict[str, Any], verdicts: tuple[Verdict, Verdict, Verdict], reason: Reason | None
) -> None:
    """One resend where it helps, then HTTP or the upstream's own status; nothing more."""
    refusal = read({"type": "error", "error": error})
    cases = [(True, False), (False, False), (False, True)]

    judged = [judge(refusal, sent_delta=delta, resent=resent) for delta, resent in cases]

    assert tuple(verdict for verdict, _ in judged) == verdicts
    for verdict, why in judged:
        if verdict is FALL_BACK:
            assert why is Reason.RESEND_FAILED
        elif verdict is not REFUSE:
            assert why is reason


@pytest.mark.parametrize("code", [1000, 1001, 1006, 1008, 1009, 1011, 1012, 1013])
@pytest.mark.parametrize("sent", [True, False])
@pytest.mark.parametrize("replay_safe", [True, False])
@pytest.mark.parametrize("resent", [True, False])
def test_a_close_is_resent_only_where_that_does_no_harm(
    code: int, sent: bool, replay_safe: bool, resent: bool
) -> None:
    """Too big goes to HTTP; what never left may go again; the rest once, if it is harmless."""
    verdict = judge_close(code, sent=sent, replay_safe=replay_safe, resent=resent)

    if code == 1009:
        assert verdict is FALL_BACK
    elif not sent:
        assert verdict is (FALL_BACK if resent or code == 1008 else ELSEWHERE)
    elif code == 1008 or resent or not replay_safe:
        assert verdict is REFUSE
    else:
        assert verdict is ELSEWHERE


# --- Replying -----------------------------------------------------------------------------------


def test_a_reply_keeps_the_errors_own_bytes() -> None:
    """Unknown fields and number spellings stay; headers move out; what is missing is added."""
    refusal = read(
        b'{"type":"error","status":400,"error":{"message":"a\\u0062", "misalignment" : {"n":1.0},'
        b'"code":null,"headers":{"x-ratelimit-limit-tokens":"9"}}}'
    )

    reply = http_reply(refusal)

    assert reply.status == 400
    assert reply.body == (
        b'{"error":{"message":"a\\u0062","misalignment":{"n":1.0},"code":null,'
        b'"type":"invalid_request_error","param":null}}'
    )
    assert reply.headers == (
        ("content-type", "application/json"),
        ("x-ratelimit-limit-tokens", "9"),
    )


def test_a_reply_passes_only_headers_that_steer_a_client() -> None:
    """Hop-by-hop headers, cookies and the like stay out."""
    names = PASSED + WITHHELD
    refusal = read({"type": "error", "headers": dict.fromkeys(names, "1")})

    assert [name for name, _ in http_reply(refusal).headers] == [
        "content-type",
        *PASSED,
    ]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (429, "rate_limit_error"),
        (400, "invalid_request_error"),
        (503, "server_error"),
    ],
)
def test_a_missing_type_follows_from_the_status(status: int, kind: str) -> None:
    """The API's errors always have a type."""
    refusal = read({"type": "error", "status": status, "message": "No."})

    assert json.loads(http_reply(refusal).body) == {
        "error": {"message": "No.", "type": kind, "param": None, "code": None}
    }


@pytest.mark.parametrize(
    ("reply", "status", "code"),
    [
        (connection_failed_reply(), 502, "upstream_connection_lost"),
        (protocol_fault_reply(), 502, "upstream_protocol_fault"),
        (silent_reply(), 504, "upstream_silent"),
        (unavailable_reply(502, "c", "m"), 502, "c"),
    ],
)
def test_our_own_refusals_have_the_apis_shape(reply: Any, status: int, code: str) -> None:
    """A client's SDK reads them like the upstream's."""
    error = json.loads(reply.body)["error"]

    assert (reply.status, error["code"], error["param"]) == (status, code, None)
    assert error["message"]
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert dict(reply.headers)["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (Refusal(404, "model_not_found", None, "", None), True),
        (Refusal(404, "DeploymentNotFound", None, "", None), True),
        (Refusal(400, "unsupported_model", None, "", None), True),
        (Refusal(400, "invalid_value", None, "", "model"), True),
        (Refusal(404, None, None, "The model `x-1` does not exist", None), True),
        (Refusal(400, None, None, "Model x/y not found", None), True),
        (Refusal(400, None, None, "The model 'x' cannot be used with Responses.", None), True),
        (Refusal(400, None, None, "This model is only supported in v1/chat.", None), True),
        (Refusal(403, None, None, "Project does not have access to model `x`", None), True),
        (Refusal(400, "context_length_exceeded", None, "The model's limit is 5.", None), False),
        (Refusal(400, None, None, "'temperature' is not supported with this model.", None), False),
        (Refusal(404, None, None, "Item with id 'a' not found.", None), False),
    ],
)
def test_a_model_that_is_not_served_is_recognised(found: Refusal, *, expected: bool) -> None:
    """By code, by parameter, or by the wordings that upstreams use."""
    assert says_no_model(found) is expected
