"""A WebSocket server on loopback whose every move is the test's: what upstream may do to us."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from typing import TYPE_CHECKING

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable

    from websockets.asyncio.server import Server
    from websockets.http11 import Request, Response


TLS: ssl.SSLContext | None = None
"""What all servers of a test speak, unless they are told otherwise; None is plain TCP."""


def _url(port: int) -> str:
    return f"{'ws' if TLS is None else 'wss'}://127.0.0.1:{port}/v1/responses"


class Upstream:
    """A running server: its `url`, the handshakes it saw, the connections it has."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[Request] = []
        self.connections: list[ServerConnection] = []
        self.server: Server | None = None

    @property
    def open_connections(self) -> int:
        """How many connections the server holds open."""
        assert self.server is not None
        return len(self.server.connections)


async def echo(connection: ServerConnection) -> None:
    """Answer each message with itself."""
    async for message in connection:
        await connection.send(message)


@contextlib.asynccontextmanager
async def upstream(
    handler: Callable[[ServerConnection], Awaitable[None]] = echo,
    *,
    refuse: Callable[[ServerConnection, Request], Response | None] | None = None,
    **options: object,
) -> AsyncIterator[Upstream]:
    """Serve `handler` on a free port; `refuse` may answer a handshake instead."""
    running = Upstream()

    def process_request(connection: ServerConnection, request: Request) -> Response | None:
        running.requests.append(request)
        return refuse(connection, request) if refuse else None

    async def handle(connection: ServerConnection) -> None:
        running.connections.append(connection)
        with contextlib.suppress(ConnectionClosed):
            await handler(connection)

    settings = {"compression": None, "ping_interval": None, "max_size": None, "close_timeout": 0.2}
    settings["ssl"] = TLS
    async with serve(
        handle,
        "127.0.0.1",
        0,
        process_request=process_request,
        **(settings | options),
    ) as server:
        running.server = server
        port = server.sockets[0].getsockname()[1]
        running.url = _url(port)
        yield running


@contextlib.asynccontextmanager
async def raw_server(
    handler: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """Serve bytes on a free port and yield the URL of it."""
    tasks: set[asyncio.Task[object]] = set()

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await handler(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    server = await asyncio.start_server(serve_one, "127.0.0.1", 0, ssl=TLS)
    port = server.sockets[0].getsockname()[1]
    try:
        yield _url(port)
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(predicate: Callable[[], object]) -> None:
    """Let the loop run until `predicate` holds; the test's own timeout bounds it."""
    while not predicate():  # noqa: ASYNC110  there is no event for what a test looks at
        await asyncio.sleep(0)


def reset(connection: ServerConnection) -> None:
    """Cut a connection with a TCP reset, if it is not gone already."""
    sock = connection.transport.get_extra_info("socket")
    if sock is None:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.transport.abort()


def shut(connection: ServerConnection) -> None:
    """Write no more to the socket, and tell neither WebSocket nor TLS."""
    number = connection.transport.get_extra_info("socket").fileno()
    with socket.socket(fileno=os.dup(number)) as twin:
        twin.shutdown(socket.SHUT_WR)


def write_raw(connection: ServerConnection, data: bytes) -> None:
    """Write bytes to the socket past the server's own framing."""
    connection.transport.write(data)
