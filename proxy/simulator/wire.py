"""
JSON in and out, and the API's errors in all the shapes that they were seen in.

An error is one value, `ApiError`; how it is written down differs by transport and by upstream
(protocol section 3.3), which is why `Shape` exists.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

Json = Any
"""A parsed JSON value."""

Item = dict[str, Json]
"""An element of `input` or `output`."""

_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_TYPES_BY_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    502: "server_error",
    503: "service_unavailable_error",
}


def dumps(value: Json) -> str:
    """Compact JSON. Text stays readable unless it can't be UTF-8 (lone surrogates)."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))
    return text


def canonical(value: Json) -> bytes:
    """JSON with sorted keys and ASCII only: equal values give equal bytes, and only those."""
    return _CANONICAL.encode(value).encode()


class Shape(enum.StrEnum):
    """How an error frame is laid out on a WebSocket."""

    NESTED = "nested"
    """`{"type","status","error":{...}}`, as documented by OpenAI."""
    FLAT = "flat"
    """`{"type","code","message","param"}`, as documented for SSE."""
    LEGACY = "legacy"
    """Nested, with `status_code` and top-level `headers` (older Codex builds)."""
    TYPELESS = "typeless"
    """`{"error":{...}}` and nothing else, as xAI sends it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What an API error says: enough to write it down on either transport."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    type: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def details(self) -> dict[str, Json]:
        """The object under `error`."""
        kind = self.type or _TYPES_BY_STATUS.get(self.status, "invalid_request_error")
        return {"message": self.message, "type": kind, "param": self.param, "code": self.code}

    def http_body(self) -> dict[str, Json]:
        """The JSON body of an HTTP reply."""
        return {"error": self.details}

    def frame(self, shape: Shape = Shape.NESTED) -> dict[str, Json]:
        """The event of a WebSocket, or of an SSE stream when the shape is FLAT."""
        details = self.details
        headers = dict(self.headers)
        match shape:
            case Shape.NESTED:
                if headers:
                    details["headers"] = headers
                return {"type": "error", "status": self.status, "error": details}
            case Shape.FLAT:
                return {"type": "error", **{k: v for k, v in details.items() if k != "type"}}
            case Shape.LEGACY:
                frame = {"type": "error", "status_code": self.status, "error": details}
                return {**frame, "headers": headers}
            case Shape.TYPELESS:
                return {"error": {"message": self.message, "type": details["type"]}}


class ApiError(Exception):
    """The request is refused; `problem` says how."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        kind: str | None = None,
    ) -> None:
        super().__init__(message)
        self.problem = Problem(status, message, code, param, kind)


def previous_not_found(response_id: str) -> ApiError:
    """The error for an id that is neither on this connection nor stored."""
    return ApiError(
        400,
        f"Previous response with id '{response_id}' not found.",
        code="previous_response_not_found",
        param="previous_response_id",
    )
