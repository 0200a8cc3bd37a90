"""
Replies in which Turnwire itself says no, in the API's own error shape.

A client's SDK turns `{"error": {"message", "type", "param", "code"}}` into its usual exceptions
and applies its usual retry rules, so a refusal of ours must look like one of the API's. Which
status an error has is decided in `proxy.errors`; here it only becomes bytes.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from aiohttp import web

from proxy.errors import (
    BodyCorrupt,
    BodyTimeout,
    BodyTooLarge,
    ClientError,
    FramingUnsupported,
    LoopDetected,
    Overloaded,
    TurnwireError,
    UpstreamError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


def refusal(
    status: int,
    message: str,
    *,
    type_: str,
    code: str | None,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """
    Make a reply in the API's error shape, which no cache may keep.

    `message` is read by a person: no content in it, and nothing that the client has sent.
    """
    error = {"message": message, "type": type_, "param": param, "code": code}
    return web.Response(
        status=status,
        body=json.dumps({"error": error}).encode(),
        content_type="application/json",
        headers={"Cache-Control": "private, no-store", "Server": "turnwire", **(headers or {})},
    )


def refuse(error: TurnwireError) -> web.Response:
    """
    Make the reply that an error asks for.

    After a body that was not read to its end the connection is closed, for what follows on it
    can't be told from the rest of that body.
    """
    if isinstance(error, ClientError):
        return _refuse_client(error)
    message = str(error)
    if isinstance(error, Overloaded):
        return refusal(
            503,
            message,
            type_="server_error",
            code="overloaded",
            headers={"Retry-After": str(error.retry_after_s)},
        )
    if isinstance(error, UpstreamError):
        return refusal(502, message, type_="server_error", code="upstream_unreachable")
    return refusal(500, message, type_="server_error", code="internal_error")


def _refuse_client(error: ClientError) -> web.Response:
    """Make a 4xx, and the 508: SDKs retry from 500 up, which a loop would only feed."""
    headers = {"x-should-retry": "false"} if isinstance(error, LoopDetected) else None
    response = refusal(
        error.status,
        str(error),
        type_="invalid_request_error",
        code=error.code,
        headers=headers,
    )
    if isinstance(error, BodyCorrupt | BodyTimeout | BodyTooLarge | FramingUnsupported):
        response.force_close()
    return response
