"""
The upstream's WebSocket mode: is there any, for this key, and what can it do.

What costs tokens is not asked. The two questions about its abilities are requests without input
that name a response which does not exist: whoever knows chains refuses them by that name.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.app import pool_settings
from proxy.core.verdicts import parse_error
from proxy.doctor.causes import cause_of
from proxy.doctor.findings import Check, Code, Finding, Verdict, fail, fine, skipped, warn
from proxy.doctor.http import NAME, Key, Reply, read
from proxy.doctor.machine import proxy_of_websocket
from proxy.doctor.way import REMEDY_SELF_LOOP
from proxy.errors import ConnectionLost, UpgradeRefused, UpstreamError
from proxy.upstream.connection import UpstreamConnection, open_connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proxy.config import Config

_NO_SUCH_RESPONSE = "resp_turnwire_doctor_no_such_response"
_LANE = "turnwire-doctor"
_ANSWER_TIMEOUT_S = 15.0


async def examine(config: Config, key: Key, model: str, http: Reply) -> AsyncIterator[Finding]:
    """Open a connection and ask; `http` is what the API said without."""
    if not config.websocket.enabled:
        yield warn(
            Check.WEBSOCKET,
            Code.WEBSOCKET_OFF,
            "switched off, so that every turn goes over plain HTTP",
            "set websocket.enabled to true to have deltas",
        )
        return
    secure = config.websocket_url.startswith("wss:")
    try:
        connection = await open_connection(
            config.websocket_url,
            key.headers,
            pool_settings(config).connection,
            ssl.create_default_context() if secure else None,
        )
    except UpgradeRefused as refused:
        yield _judge_refusal(refused, config, key, http)
        return
    except UpstreamError as error:
        yield cause_of(error, proxy_of_websocket(config)).finding(Check.WEBSOCKET)
        return
    yield fine(Check.WEBSOCKET, "the upgrade is accepted")
    try:
        yield _judge_chaining(await _refused(connection, model))
        yield _judge_lanes(await _refused(connection, model, stream_id=_LANE))
    finally:
        connection.abort()


def _judge_refusal(refused: UpgradeRefused, config: Config, key: Key, http: Reply) -> Finding:
    status, code = refused.status, _error_code(refused.body)
    said = f"the upgrade was answered {status}{f' {code}' if code else ''}"
    if code in ("websocket_not_supported", "loop_detected") and b"proxy" in refused.body:
        return fail(
            Check.WEBSOCKET,
            Code.SELF_LOOP,
            "the upstream is a Turnwire, this one or another",
            REMEDY_SELF_LOOP,
        )
    if status in (401, 403) and key.value is None:
        return skipped(Check.WEBSOCKET, f"{said}: only a key would tell")
    if status in (401, 403) and http.status in (401, 403):
        return skipped(Check.WEBSOCKET, f"{said}, as over HTTP: only a good key would tell")
    if status in (401, 403):
        remedy = "the key, or its account, may lack this endpoint; until it has, turns go over HTTP"
        return fail(Check.WEBSOCKET, Code.WRONG_KEY, f"{said}, though HTTP takes the key", remedy)
    if status == 429:
        return warn(Check.WEBSOCKET, Code.RATE_LIMITED, said, "wait, and ask again")
    if status >= 500 and status != 501:
        return fail(
            Check.WEBSOCKET,
            Code.UPSTREAM_FAILING,
            said,
            "the upstream is in trouble, or a gateway before it does not pass upgrades",
        )
    proxy = proxy_of_websocket(config)
    through = f"; the proxy {proxy} may not pass upgrades" if proxy else ""
    return fail(
        Check.WEBSOCKET,
        Code.NO_WEBSOCKET,
        f"no WebSocket at {config.websocket_url} ({said}){through}",
        "everything works over plain HTTP, without deltas; if the endpoint is elsewhere, set"
        " websocket.url, and if there is none, websocket.enabled = false",
    )


def _error_code(body: bytes) -> str | None:
    return read(0, None, body).error_code


@dataclass(frozen=True, slots=True)
class _Refusal:
    """How a request was refused: `code` None if it was not, or in no way that can be read."""

    code: str | None
    message: str = ""
    echoes_lane: bool = False


async def _refused(connection: UpstreamConnection, model: str, **fields: str) -> _Refusal:
    """Ask to continue a response that does not exist, with nothing; return what is said to it."""
    request = {
        "type": "response.create",
        "model": model,
        "store": False,
        "previous_response_id": _NO_SUCH_RESPONSE,
        "input": [],
        **fields,
    }
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            await connection.send_message(json.dumps(request).encode())
            for message in await connection.receive():
                refusal = parse_error(message)
                if refusal is not None:
                    lane = b'"stream_id"' in message and _LANE.encode() in message
                    return _Refusal(refusal.code or "", refusal.message, echoes_lane=lane)
    except (ConnectionLost, TimeoutError):
        return _Refusal(None)
    return _Refusal(None)


def _judge_chaining(refusal: _Refusal) -> Finding:
    if refusal.code == "previous_response_not_found":
        return fine(Check.CHAINING, "it knows previous_response_id, and says so when one is gone")
    if refusal.code is None:
        return warn(
            Check.CHAINING,
            Code.NO_CHAINING,
            "it does not say that a previous response is unknown",
            "watch turnwire-reason: if previous_response_not_found never comes, deltas may fail"
            " in ways that are not told",
        )
    return warn(
        Check.CHAINING,
        Code.UNCLEAR,
        f"the question was refused for another reason ({_shown(refusal.code)})",
        "name a model of this upstream with --model",
    )


def _judge_lanes(refusal: _Refusal) -> Finding:
    if refusal.echoes_lane and refusal.code == "previous_response_not_found":
        return fine(Check.LANES, "it has stream_id; Turnwire uses a connection a conversation")
    return Finding(
        Check.LANES,
        Verdict.OK,
        Code.NO_LANES,
        "it has no stream_id, which Turnwire does not need",
    )


def _shown(code: str) -> str:
    return code if NAME.fullmatch(code) else "no code"
