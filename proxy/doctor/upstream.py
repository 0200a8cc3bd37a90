"""The other side, one step after the other: where one fails, going on would say nothing new."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from proxy.doctor import http, way, websocket
from proxy.doctor.causes import Cause
from proxy.doctor.findings import Check, Code, Finding, Verdict

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proxy.config import Config


async def examine(config: Config, key: http.Key, model: str | None) -> AsyncIterator[Finding]:
    """Give the findings as they are made. `model` is asked about; None takes one that is listed."""
    async for finding in way.examine(config):
        yield finding
        if finding.verdict is Verdict.FAIL:
            return
    if not key.may_be_sent:
        yield http.judge_odd_key(key)
        return
    reply = await http.ask(config, key)
    if isinstance(reply, Cause):
        yield reply.finding(Check.HTTP)
        return
    answered = http.judge_http(reply, key)
    yield answered
    if answered.code in (Code.SELF_LOOP, Code.PROXY_IN_THE_WAY):
        return
    yield http.judge_key(reply, key)
    yield http.judge_clock(reply, time.time())
    async for finding in websocket.examine(config, key, model or http.model_of(reply), reply):
        yield finding
