"""
Upgrades that are not ours to understand: a tunnel for bytes.

A client that asks to upgrade on a path of which Turnwire knows nothing (the Realtime API's
WebSocket) is connected to upstream as if it had called there. The handshake goes through the
plain HTTP relay, with its proxies, deadlines and errors. If upstream answers anything but 101,
that answer is relayed like any other. After a 101 both connections carry nothing but bytes,
which are passed on unread, in both directions and with back-pressure, until either side ends.
WebSocket frames, their compression, pings and close codes are thus the two ends' own affair.

Both of aiohttp's protocol classes let a parser take over after an upgrade, which is how its own
WebSocket support is built; `_Inlet` is the smallest such parser.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final, cast

import aiohttp
from aiohttp import web
from aiohttp.http_writer import StreamWriter

from proxy.upstream.passthrough import end_to_end, let_go, relay_reply

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from proxy.upstream.passthrough import Passthrough

_READ_LIMIT_BYTES: Final = 64 * 1024


def is_upgrade(request: web.Request) -> bool:
    """Tell whether a request asks for a protocol that `tunnel` can carry."""
    options = request.headers.get("Connection", "").lower().split(",")
    wants = request.headers.get("Upgrade", "").lower()
    return wants == "websocket" and "upgrade" in (option.strip() for option in options)


async def tunnel(request: web.Request, passthrough: Passthrough) -> web.StreamResponse:
    """
    Carry an upgrade through, until either side ends the connection.

    Raises what `Passthrough.exchange` raises, as long as nothing was written to the client.
    """
    handshake = {"Connection": "Upgrade", "Upgrade": request.headers["Upgrade"]}
    upstream = await passthrough.exchange(request, handshake=handshake)
    try:
        if upstream.status != 101 or upstream.connection is None:
            return await relay_reply(request, upstream)
        return await _carry(request, upstream, upstream.connection)
    finally:
        let_go(upstream)


async def _carry(
    request: web.Request, upstream: aiohttp.ClientResponse, connection: Any
) -> web.StreamResponse:
    """Answer 101, and pump bytes. `connection` is aiohttp's, of a class that it keeps private."""
    response = _SwitchingProtocols(upstream)
    with contextlib.suppress(ConnectionError):
        await response.prepare(request)
        loop = asyncio.get_running_loop()
        from_client = aiohttp.StreamReader(request.protocol, _READ_LIMIT_BYTES, loop=loop)
        from_upstream = aiohttp.StreamReader(connection.protocol, _READ_LIMIT_BYTES, loop=loop)
        to_upstream = StreamWriter(connection.protocol, loop)
        request.protocol.set_parser(cast("Any", _Inlet(from_client)))
        connection.protocol.set_parser(_Inlet(from_upstream), from_upstream)
        await _until_either_ends(
            _pump(from_client, to_upstream.write), _pump(from_upstream, response.write)
        )
    return response


class _SwitchingProtocols(web.StreamResponse):
    """Upstream's 101, headers and all; the connection ends with it."""

    def __init__(self, upstream: aiohttp.ClientResponse) -> None:
        headers = end_to_end(upstream.raw_headers)
        headers["Connection"] = "Upgrade"
        headers["Upgrade"] = upstream.headers.get("Upgrade", "websocket")
        super().__init__(status=101, reason=upstream.reason, headers=headers)
        self.force_close()

    async def _prepare_headers(self) -> None:
        """Leave out what aiohttp would add."""
        absent = [name for name in ("Date", "Server") if name not in self.headers]
        await super()._prepare_headers()
        for name in absent:
            self.headers.popall(name, None)


class _Inlet:
    """What takes the place of a parser: hands all bytes to a reader, which holds them back."""

    def __init__(self, reader: aiohttp.StreamReader) -> None:
        self._reader = reader

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Take bytes off the wire. Never at an end, and never leaving any."""
        if data:
            self._reader.feed_data(data)
        return False, b""

    def feed_eof(self) -> None:
        """Take note that the other side has closed."""
        self._reader.feed_eof()


async def _pump(reader: aiohttp.StreamReader, write: Callable[[bytes], Awaitable[None]]) -> None:
    """Pass on bytes until there are no more, or nobody takes them."""
    with contextlib.suppress(aiohttp.ClientError, OSError):
        while chunk := await reader.readany():
            await write(chunk)


async def _until_either_ends(*pumps: Any) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(pump) for pump in pumps]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
