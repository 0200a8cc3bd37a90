"""
What a refusal of the upstream means, and what to do about it.

Three questions, each answered by a table:

* What does this error frame say? `parse_error` reads every shape seen in the wild (nested, flat,
  typeless, with or without a status) into one `Refusal`.
* What now? `judge` sorts a refusal into a `_Cause`, and a cause into a `Verdict`, depending on
  what had been sent. `judge_close` does the same for a connection that closed without a word.
  Both hold only before the commit point: once the client has seen a byte, nothing is sent again.
* What does the client get? `http_reply` is the answer that the API gives over HTTP: the same
  status, the same error object, and the headers that steer a client's own retries.

A refusal is proof that nothing was generated; a close after the send is not. That is why errors
may be resent freely (once) and closes only where a second run does no harm.
"""

from __future__ import annotations

import enum
import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from proxy.core import splice
from proxy.core.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping


Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """
    One error of the upstream.

    `status` is what the frame says, else what its code or type implies, else 502. `headers` have
    lower-case names and values that are safe to write. `raw_error` is the error object's own
    bytes where the frame had one.
    """

    status: int
    code: str | None
    type: str | None
    message: str
    param: str | None
    headers: Headers = ()
    raw_error: bytes | None = None

    def __repr__(self) -> str:
        # Without the message: it may quote content.
        return f"Refusal(status={self.status}, code={self.code!r}, type={self.type!r})"


class Verdict(enum.Enum):
    """What to do about a turn that failed before the commit point."""

    RESEND_IN_PLACE = "resend_in_place"
    """Send the full history on the same connection: it is sound, it forgot the response."""

    RESEND_ELSEWHERE = "resend_elsewhere"
    """Send the full history on another connection."""

    RESEND_AS_FULL = "resend_as_full"
    """Send the full history, on any connection: the delta was wrong. A matching bug: count it."""

    FALL_BACK = "fall_back"
    """Send the request over HTTP."""

    REFUSE = "refuse"
    """Give the client the refusal (`http_reply`), or `connection_failed_reply` after a close."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A whole reply for the client; `headers` hold the content type."""

    status: int
    headers: Headers
    body: bytes


# --- What does it say? --------------------------------------------------------------------------

# In this order; the first word found in the code decides, else the first found in the type.
_STATUS_BY_WORD = (
    ("previous_response_not_found", 400),
    ("api_key", 401),
    ("authentication", 401),
    ("unauthorized", 401),
    ("token_expired", 401),
    ("permission", 403),
    ("forbidden", 403),
    ("unsupported_country", 403),
    ("not_found", 404),
    ("too_large", 413),
    ("rate_limit", 429),
    ("quota", 429),
    ("usage_limit", 429),
    ("too_many_requests", 429),
    ("overloaded", 503),
    ("slow_down", 503),
    ("unavailable", 503),
    ("server_error", 500),
    ("internal_error", 500),
    ("api_error", 500),
    ("invalid", 400),
    ("unsupported", 400),
    ("context_length", 400),
    ("websocket_", 400),
    ("policy", 400),
)
_UNKNOWN_STATUS = 502

_TYPE_BY_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}

_BEGINS_LIKE_AN_ERROR = re.compile(rb'\s*+\{\s*+"type"\s*+:\s*+"error"')
_HEADER_NAME = re.compile(r"[a-z0-9_-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e]*")


def parse_error(message: bytes) -> Refusal | None:
    """
    Read `message` if it is an error frame; return None if it is none.

    Shapes (protocol 3.3): `{"type":"error","status":400,"error":{...}}`, with `status_code` and
    outer `headers` (older Codex), the flat `{"type":"error","code","message","param"}` of SSE, the
    typeless `{"error":{...}}` of xAI and `{"detail":"..."}` of ChatGPT. Anything that says it is
    an error yet can't be read is one with status 502.
    """
    try:
        outer = _fields(message)
    except ValueError:
        return _refusal({}, {}, None) if _BEGINS_LIKE_AN_ERROR.match(message) else None
    kind = _value(outer.get("type"))
    if kind != "error" and (kind is not None or not outer.keys() & {"error", "detail"}):
        return None
    raw_error = outer.get("error")
    try:
        inner = _fields(raw_error or b"")
    except ValueError:
        text = _value(raw_error)
        inner = {} if not isinstance(text, str) else {"message": raw_error or b""}
        raw_error = None
    return _refusal(outer, inner, raw_error)


def parse_upgrade_refusal(status: int, headers: Mapping[str, str], body: bytes) -> Refusal:
    """
    Read the HTTP reply to a refused WebSocket upgrade; its own status and headers count.

    The body may be anything: an HTML page of a gateway is not handed on.
    """
    read = parse_error(body) or _refusal({}, {}, None)
    outer = {"headers": json.dumps(dict(headers)).encode()}
    return replace(read, status=status, headers=_headers({}, outer))


def _refusal(outer: dict[str, bytes], inner: dict[str, bytes], raw: bytes | None) -> Refusal:
    def text(key: str) -> str | None:
        found = _text(_value(inner.get(key)))
        return found if found is not None or key == "type" else _text(_value(outer.get(key)))

    code, kind = text("code"), text("type")
    return Refusal(
        status=_stated_status(outer, inner) or _implied_status(code, kind),
        code=code,
        type=kind,
        message=text("message") or text("detail") or "The upstream reported an error.",
        param=text("param"),
        headers=_headers(outer, inner),
        raw_error=raw,
    )


def _fields(text: bytes) -> dict[str, bytes]:
    return splice.fields(text)


def _value(raw: bytes | None) -> Any:
    try:
        return None if raw is None else json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _text(value: Any) -> str | None:
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    return None


def _stated_status(outer: dict[str, bytes], inner: dict[str, bytes]) -> int | None:
    for fields in (outer, inner):
        for key in ("status", "status_code", "code"):
            text = _text(_value(fields.get(key))) or ""
            if re.fullmatch(r"[45][0-9]{2}", text):
                return int(text)
    return None


def _implied_status(code: str | None, kind: str | None) -> int:
    for name in (code, kind):
        for word, status in _STATUS_BY_WORD:
            if word in (name or "").lower():
                return status
    return _UNKNOWN_STATUS


def _headers(outer: dict[str, bytes], inner: dict[str, bytes]) -> Headers:
    """Return all headers that can be written as they are; the error's own win."""
    found: dict[str, str] = {}
    for fields in (outer, inner):
        given = _value(fields.get("headers"))
        for name, value in given.items() if isinstance(given, dict) else ():
            text = _text(value)
            lowered = name.lower()
            if text is None or not _HEADER_NAME.fullmatch(lowered):
                continue
            if _HEADER_VALUE.fullmatch(text):
                found[lowered] = text.strip()
    return tuple(found.items())


# --- What now? ----------------------------------------------------------------------------------


class _Cause(enum.Enum):
    CHAIN_LOST = enum.auto()
    CONNECTION_FULL = enum.auto()
    HISTORY_INCONSISTENT = enum.auto()
    THROTTLED = enum.auto()
    FAILED = enum.auto()
    REFUSED = enum.auto()


@dataclass(frozen=True, slots=True)
class _Row:
    """What to do when the refusal answers a delta, a full send, or a resend."""

    delta: Verdict
    full: Verdict
    resend: Verdict
    reason: Reason


_NEVER_RESENT = _Row(Verdict.REFUSE, Verdict.REFUSE, Verdict.REFUSE, Reason.UPSTREAM_FAILED)

_VERDICTS = {
    _Cause.CHAIN_LOST: _Row(
        delta=Verdict.RESEND_IN_PLACE,
        full=Verdict.REFUSE,  # the client named the response itself
        resend=Verdict.FALL_BACK,
        reason=Reason.PREVIOUS_RESPONSE_NOT_FOUND,
    ),
    _Cause.CONNECTION_FULL: _Row(
        delta=Verdict.RESEND_ELSEWHERE,
        full=Verdict.RESEND_ELSEWHERE,
        resend=Verdict.FALL_BACK,
        reason=Reason.CONNECTION_LIMIT_REACHED,
    ),
    _Cause.HISTORY_INCONSISTENT: _Row(
        delta=Verdict.RESEND_AS_FULL,
        full=Verdict.REFUSE,  # the client's own history is at fault
        resend=Verdict.REFUSE,
        reason=Reason.DELTA_REJECTED,
    ),
    _Cause.FAILED: _Row(
        delta=Verdict.RESEND_ELSEWHERE,
        full=Verdict.RESEND_ELSEWHERE,
        resend=Verdict.REFUSE,
        reason=Reason.UPSTREAM_FAILED,
    ),
    # Whoever resends into a rate limit makes it worse: it is the client's to wait.
    _Cause.THROTTLED: _NEVER_RESENT,
    _Cause.REFUSED: _NEVER_RESENT,
}

# At least four wordings of one fact: with a code; "Invalid `previous_response_id`." without one;
# "... is not available for this user"; "Unsupported parameter: previous_response_id"; and xAI's
# "Response with id=... not found" (clients U13, protocol 6).
_SAYS_CHAIN_LOST = re.compile(
    r"previous[_ ]response|\bresponse with id\b.*\bnot found", re.IGNORECASE | re.DOTALL
)
_CONNECTION_FULL_CODES = frozenset(
    {
        "websocket_connection_limit_reached",
        "websocket_stream_limit_reached",
        "invalid_stream_id",
    }
)
_SAYS_CONNECTION_FULL = re.compile(r"websocket[_ ](connection|stream)[_ ]limit", re.IGNORECASE)
_SAYS_HISTORY_INCONSISTENT = re.compile(
    r"no tool (output|call) found|duplicate item|without its required|\bitem with id\b.*not found",
    re.IGNORECASE | re.DOTALL,
)
_HTTP_UNAUTHORIZED = 401
_HTTP_TOO_MANY_REQUESTS = 429


def judge(refusal: Refusal, *, sent_delta: bool, resent: bool) -> tuple[Verdict, Reason]:
    """
    Decide about an error frame that came before the first event.

    `sent_delta`: the frame answers a send with a `previous_response_id`. `resent`: this turn was
    resent once already. The reason is that of a resend or a fallback; with REFUSE nothing new is
    done, so the turn's own reason stands.
    """
    row = _VERDICTS[_cause(refusal)]
    first = row.delta if sent_delta else row.full
    verdict = row.resend if resent else first
    return verdict, Reason.RESEND_FAILED if verdict is Verdict.FALL_BACK else row.reason


def _cause(refusal: Refusal) -> _Cause:
    said = refusal.message
    if refusal.code in _CONNECTION_FULL_CODES or _SAYS_CONNECTION_FULL.search(said):
        return _Cause.CONNECTION_FULL
    if refusal.status == _HTTP_TOO_MANY_REQUESTS:
        return _Cause.THROTTLED
    if refusal.status == _HTTP_UNAUTHORIZED:
        return _Cause.REFUSED
    if (
        refusal.code == "previous_response_not_found"
        or refusal.param == "previous_response_id"
        or _SAYS_CHAIN_LOST.search(said)
    ):
        return _Cause.CHAIN_LOST
    if _SAYS_HISTORY_INCONSISTENT.search(said):
        return _Cause.HISTORY_INCONSISTENT
    return _Cause.FAILED if refusal.status >= 500 else _Cause.REFUSED


def is_clients_fault(refusal: Refusal) -> bool:
    """
    Whether a refusal is about what was asked: its form, its model, or who may ask for it.

    Then the endpoint that the client spoke to may see it otherwise. A rate limit holds for both.
    """
    return refusal.status < 500 and refusal.status != _HTTP_TOO_MANY_REQUESTS


_NO_MODEL_CODE = re.compile(r"model_not|(unsupported|unknown|invalid)_model|deployment_?not_?found")
_SAYS_NO_MODEL = re.compile(
    r"""\bmodel\b[\s:]*['"`]?[\w./:-]*['"`]?\s+
        (does\ not\ exist|(is\ )?not\ (found|available|supported)|can\ ?not\ be\ used|is\ only\ )
        |\bnot\ have\ access\ to\ model\b""",
    re.IGNORECASE | re.VERBOSE,
)


def says_no_model(refusal: Refusal) -> bool:
    """
    Whether a refusal says that the Responses API does not serve the model at all.

    By its code (`model_not_found`, Azure's `DeploymentNotFound`), by naming the parameter, or in
    words ("The model `...` cannot be used with the Responses API", "This model is only supported
    in v1/chat/completions").
    """
    if refusal.param == "model" or _NO_MODEL_CODE.search((refusal.code or "").lower()):
        return True
    return _SAYS_NO_MODEL.search(refusal.message) is not None


_CLOSE_POLICY = 1008
_CLOSE_TOO_BIG = 1009


def judge_close(code: int, *, sent: bool, replay_safe: bool, resent: bool) -> Verdict:
    """
    Decide about a connection that closed before the first event.

    `sent`: a byte of the message may have left. `replay_safe`: running the turn twice does no harm
    (`store` is false and no hosted tool has side effects).
    """
    if code == _CLOSE_TOO_BIG:
        return Verdict.FALL_BACK
    if not sent:
        again = resent or code == _CLOSE_POLICY
        return Verdict.FALL_BACK if again else Verdict.RESEND_ELSEWHERE
    if code != _CLOSE_POLICY and replay_safe and not resent:
        return Verdict.RESEND_ELSEWHERE
    return Verdict.REFUSE


# --- What does the client get? ------------------------------------------------------------------

_CONTENT_TYPE = ("content-type", "application/json")
_PASSED_HEADERS = frozenset({"retry-after", "retry-after-ms", "x-should-retry", "x-request-id"})
_PASSED_PREFIXES = ("x-ratelimit-", "openai-")


def http_reply(refusal: Refusal) -> HttpReply:
    """Return the refusal as the API would have given it over HTTP."""
    headers = tuple(
        (name, value)
        for name, value in refusal.headers
        if name in _PASSED_HEADERS or name.startswith(_PASSED_PREFIXES)
    )
    body = b'{"error":%b}' % error_object(refusal)
    return HttpReply(refusal.status, (_CONTENT_TYPE, *headers), body)


def error_object(refusal: Refusal) -> bytes:
    """
    Return the error object with all of `message`, `type`, `param` and `code`.

    Fields that the upstream gave keep their bytes, known to us or not; only `headers` go.
    """
    parts = _fields(refusal.raw_error or b"{}")
    parts.pop("headers", None)
    ours = {
        "message": refusal.message,
        "type": refusal.type or _TYPE_BY_STATUS.get(refusal.status) or _type_of(refusal.status),
        "param": refusal.param,
        "code": refusal.code,
    }
    for key, value in ours.items():
        parts.setdefault(key, json.dumps(value).encode())
    members = (json.dumps(key).encode() + b":" + value for key, value in parts.items())
    return b"{%b}" % b",".join(members)


def _type_of(status: int) -> str:
    return "server_error" if status >= 500 else "invalid_request_error"


def unavailable_reply(status: int, code: str, message: str, headers: Headers = ()) -> HttpReply:
    """Return a refusal of our own, in the API's shape."""
    error = {"message": message, "type": _type_of(status), "param": None, "code": code}
    return HttpReply(status, (_CONTENT_TYPE, *headers), json.dumps({"error": error}).encode())


def connection_failed_reply() -> HttpReply:
    """
    Answer 502: the connection ended before the first event, and a resend might do harm.

    Whether to run the turn again is the client's to decide, so no `x-should-retry` is set.
    """
    text = "The upstream closed the connection before it answered."
    return unavailable_reply(502, "upstream_connection_lost", text)


def silent_reply() -> HttpReply:
    """Answer 504: no event came in time."""
    return unavailable_reply(504, "upstream_silent", "The upstream did not answer in time.")


def protocol_fault_reply() -> HttpReply:
    """Answer 502: what the upstream sent can't be an answer to this turn."""
    text = "The upstream sent what belongs to no answer."
    return unavailable_reply(502, "upstream_protocol_fault", text)
