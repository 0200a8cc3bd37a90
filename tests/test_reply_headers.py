"""The headers of replies that Turnwire writes itself: each once, whatever upstream said."""

from __future__ import annotations

import collections

import aiohttp
import pytest
from harness import stack

from proxy.simulator.faults import ErrorReply

BODY = {"model": "m", "input": "hi", "store": False}
ONCE = {
    "content-type",
    "cache-control",
    "x-request-id",
    "turnwire-mode",
    "turnwire-reason",
    "server",
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", [200, 400, 429, 500])
async def test_no_header_comes_twice(stream: bool, status: int) -> None:
    """Upstream's own headers take the place of ours, in whatever case they are written."""
    async with stack() as s, aiohttp.ClientSession() as session:
        if status != 200:
            headers = {"retry-after": "3", "X-Request-Id": "req_up", "content-type": "text/html"}
            fault = ErrorReply(status=status, message="no", headers=headers, times=2)
            s.sim.faults.arm(fault)
        auth = {"Authorization": "Bearer sk-a"}
        url = f"{s.base_url}/responses"
        async with session.post(url, json=BODY | {"stream": stream}, headers=auth) as reply:
            names = collections.Counter(name.decode().lower() for name, _ in reply.raw_headers)
            await reply.read()

    assert reply.status == status
    assert names.keys() >= ONCE
    assert set(names.values()) == {1}
    if status != 200:
        assert reply.headers["Retry-After"] == "3"
        assert reply.headers["x-request-id"] == "req_up"
        assert reply.content_type == "application/json"
