"""Row F24 from the hostile side: what a client announces, or sends slowly, shuts nobody out."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest
from harness import eventually, serving

from hostile.ledger import KEY, LAST, Ledger, Line, answer_to, parse_replies

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proxy.app import Turnwire

LIMITS = {
    "max_body_bytes": "1MiB",
    "max_decoded_body_bytes": "1MiB",
    "max_inflight_body_bytes": "2MiB",
}
HEAD = (
    b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %b\r\n"
    b"Content-Length: %d\r\n\r\n"
)
TURN = b'{"model":"m","input":"ping"}'


def port_of(proxy: Turnwire) -> int:
    """Return the port of a proxy's data listener."""
    return int(proxy.base_url.split(":")[2].split("/")[0])


@contextlib.asynccontextmanager
async def limited(ledger: Ledger, express: bool) -> AsyncIterator[Turnwire]:
    """Run a proxy with little room."""
    async with serving(ledger.url, limits=LIMITS, tuning={"express": express}) as (proxy, _):
        yield proxy


async def turn(proxy: Turnwire, body: bytes = TURN) -> tuple[int, str | None]:
    """Send a turn; return the status and the answer."""
    raw = await Line(port_of(proxy)).raw(HEAD % (KEY.encode(), len(body)) + body, LAST)
    reply = parse_replies(raw)[0]
    return reply.status, reply.answer


@pytest.mark.parametrize("express", [True, False])
async def test_what_is_only_announced_costs_nobody_anything(express: bool):
    """Fifty clients announce a megabyte each, and send a byte of it: others are served."""
    async with Ledger() as ledger, limited(ledger, express) as proxy:
        writers = []
        for _ in range(50):
            _, writer = await asyncio.open_connection("127.0.0.1", port_of(proxy))
            writer.write(HEAD % (b"sk-idler", 1 << 20) + b"{")
            writers.append(writer)
        assert [await turn(proxy) for _ in range(3)] == [(200, answer_to(KEY, "ping"))] * 3
        for writer in writers:
            writer.close()


@pytest.mark.parametrize("express", [True, False])
async def test_bodies_on_their_way_are_held_within_the_budget(express: bool):
    """Ten clients send most of a megabyte at once: some are shed with 503, and it passes."""
    body = b'{"model":"m","input":"' + b"x" * 900_000 + b'"}'
    raw = HEAD % (b"sk-busy", len(body)) + body
    async with Ledger() as ledger, limited(ledger, express) as proxy:
        held = [await asyncio.open_connection("127.0.0.1", port_of(proxy)) for _ in range(10)]
        for _, writer in held:
            writer.write(raw[:-10])

        statuses = []
        for reader, writer in held:
            writer.write(raw[-10:])
            head = await reader.readuntil(b"\r\n\r\n")
            statuses.append(int(head.split()[1]))
            writer.close()

        assert set(statuses) == {200, 503}
        assert statuses.count(200) >= 2
        await eventually(
            lambda: not proxy.metrics.registry.get_sample_value("turnwire_turns_in_flight")
        )
        assert await turn(proxy) == (200, answer_to(KEY, "ping"))
