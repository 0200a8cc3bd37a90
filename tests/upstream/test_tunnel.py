"""Tunnels for upgrades: bytes both ways, refusals passed on, ends that reach the other side."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp import web
from wire import Peer, Request, read_head, reply, talk

from proxy.downstream.deadlines import build_runner
from proxy.downstream.refusals import refuse
from proxy.errors import UpstreamError
from proxy.upstream.passthrough import Passthrough
from proxy.upstream.tunnel import is_upgrade, tunnel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HANDSHAKE = (
    b"GET /v1/realtime?model=m HTTP/1.1\r\nHost: front\r\nConnection: Upgrade\r\n"
    b"Upgrade: websocket\r\nAuthorization: Bearer k\r\nSec-WebSocket-Key: a2V5\r\n\r\n"
)
SWITCH = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Accept: x\r\nSec-WebSocket-Protocol: realtime\r\n\r\n"
)


async def serve(stack: contextlib.AsyncExitStack, upstream_port: int) -> int:
    """Run a front that tunnels upgrades, and give its port."""
    passthrough = await stack.enter_async_context(
        Passthrough(f"http://127.0.0.1:{upstream_port}/v1", instance_id="t", connect_timeout_s=5)
    )

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            if is_upgrade(request):
                return await tunnel(request, passthrough)
        except UpstreamError as error:
            return refuse(error)
        return web.Response(text="plain")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = build_runner(app, header_timeout_s=5)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    assert isinstance(port, int)
    return port


@pytest.fixture
async def stack() -> AsyncIterator[contextlib.AsyncExitStack]:
    """What a test opened is closed after it."""
    async with contextlib.AsyncExitStack() as stack:
        yield stack


async def echo(request: web.Request) -> web.WebSocketResponse:
    """Be an upstream that repeats each message, and closes with 4001 on "bye"."""
    socket = web.WebSocketResponse(protocols=["realtime"], max_msg_size=0)
    await socket.prepare(request)
    async for message in socket:
        if message.data == "bye":
            await socket.close(code=4001, message=b"so long")
        elif message.type is aiohttp.WSMsgType.TEXT:
            await socket.send_str(message.data)
        else:
            await socket.send_bytes(message.data)
    return socket


@pytest.fixture
async def echo_front(stack: contextlib.AsyncExitStack) -> int:
    """A front before an upstream that echoes WebSocket messages."""
    app = web.Application()
    app.router.add_get("/v1/realtime", echo)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return await serve(stack, runner.addresses[0][1])


async def test_a_websocket_goes_through(echo_front: int) -> None:
    """Text, binary, large messages, the subprotocol and the close code all arrive."""
    url = f"ws://127.0.0.1:{echo_front}/v1/realtime"
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(url, protocols=["realtime"], compress=15, max_msg_size=0) as socket,
    ):
        assert socket.protocol == "realtime"
        for size in (1, 1000, 100_000, 3_000_000):
            await socket.send_str("a" * size)
            assert await socket.receive_str() == "a" * size
            await socket.send_bytes(b"\x00\xff" * size)
            assert await socket.receive_bytes() == b"\x00\xff" * size
        await socket.send_str("bye")
        message = await socket.receive()
        assert message.type is aiohttp.WSMsgType.CLOSE
        assert (message.data, message.extra) == (4001, "so long")


async def test_many_tunnels_do_not_mix(echo_front: int) -> None:
    """Concurrent tunnels each get their own bytes back."""

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        url = f"ws://127.0.0.1:{echo_front}/v1/realtime"
        async with session.ws_connect(url) as socket:
            for turn in range(10):
                await socket.send_str(f"{number}:{turn}")
                assert await socket.receive_str() == f"{number}:{turn}"

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(one(session, number))


async def test_the_handshake_is_the_clients_own(stack: contextlib.AsyncExitStack) -> None:
    """Upstream sees the client's handshake headers, and the client sees upstream's."""

    async def script(_: Request, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SWITCH)
        await asyncio.get_running_loop().create_future()

    peer = await stack.enter_async_context(Peer(script=script))
    port = await serve(stack, peer.port)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HANDSHAKE)
    got = await read_head(reader)
    writer.close()
    assert got.line == "HTTP/1.1 101 Switching Protocols"
    assert sorted(got.headers) == [
        ("Connection", "Upgrade"),
        ("Sec-WebSocket-Accept", "x"),
        ("Sec-WebSocket-Protocol", "realtime"),
        ("Upgrade", "websocket"),
    ]
    asked = peer.requests[0]
    assert asked.line == "GET /v1/realtime?model=m HTTP/1.1"
    assert asked.get("Sec-WebSocket-Key") == "a2V5"
    assert asked.get("Authorization") == "Bearer k"
    assert (asked.get("Connection"), asked.get("Upgrade")) == ("Upgrade", "websocket")


async def test_bytes_sent_at_once_are_not_lost(stack: contextlib.AsyncExitStack) -> None:
    """What either side sends right behind its handshake arrives, and is not read as HTTP."""
    early: asyncio.Queue[bytes] = asyncio.Queue()

    async def script(
        _: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(SWITCH + b"hello GET / HTTP/1.1\r\n\r\n")
        early.put_nowait(await reader.readexactly(7))
        writer.close()

    peer = await stack.enter_async_context(Peer(script=script))
    port = await serve(stack, peer.port)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HANDSHAKE + b"\x00\xffearly")
    await read_head(reader)
    assert await reader.readexactly(24) == b"hello GET / HTTP/1.1\r\n\r\n"
    assert await early.get() == b"\x00\xffearly"
    assert await reader.read() == b""  # upstream closed, so the client's side is closed
    writer.close()


async def test_a_client_that_leaves_closes_upstream(stack: contextlib.AsyncExitStack) -> None:
    """Upstream's connection does not outlive the client's."""
    gone = asyncio.Event()

    async def script(
        _: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(SWITCH)
        assert await reader.read() == b"last words"
        gone.set()

    peer = await stack.enter_async_context(Peer(script=script))
    port = await serve(stack, peer.port)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HANDSHAKE)
    await read_head(reader)
    writer.write(b"last words")
    writer.close()
    await gone.wait()


@pytest.mark.parametrize("status", ["401 Unauthorized", "404 Not Found", "429 Too Many Requests"])
async def test_a_refused_upgrade_is_passed_on(
    stack: contextlib.AsyncExitStack, status: str
) -> None:
    """The client gets upstream's status, headers and body, and may go on using its connection."""
    answer = reply(b'{"error": {}}', "Retry-After: 7", status=status)
    peer = await stack.enter_async_context(Peer(answer))
    port = await serve(stack, peer.port)
    got = await talk(port, HANDSHAKE)
    assert got.line == f"HTTP/1.1 {status}"
    assert got.get("Retry-After") == "7"
    assert got.body == b'{"error": {}}'


async def test_no_upstream_is_a_502(stack: contextlib.AsyncExitStack, closed_port: int) -> None:
    """A tunnel that can't be opened is refused in the API's shape."""
    port = await serve(stack, closed_port)
    assert (await talk(port, HANDSHAKE)).status == 502


async def test_other_upgrades_are_plain_requests(stack: contextlib.AsyncExitStack) -> None:
    """An offer of HTTP/2 is not a tunnel; a server may ignore it (RFC 9110 section 7.8)."""
    peer = await stack.enter_async_context(Peer())
    port = await serve(stack, peer.port)
    got = await talk(port, HANDSHAKE.replace(b"websocket", b"h2c"))
    assert got.body == b"plain"


async def test_a_side_that_does_not_read_holds_the_other_back(
    stack: contextlib.AsyncExitStack,
) -> None:
    """Back-pressure goes through: an upstream that does not read stops the client's writes."""
    done = asyncio.Event()

    async def script(_: Request, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SWITCH)
        writer.transport.pause_reading()
        await done.wait()
        writer.transport.abort()

    peer = await stack.enter_async_context(Peer(script=script))
    port = await serve(stack, peer.port)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HANDSHAKE)
    await read_head(reader)
    sent = 0
    with contextlib.suppress(TimeoutError):
        while sent < 200_000_000:
            writer.write(b"x" * 1_000_000)
            sent += 1_000_000
            async with asyncio.timeout(0.3):
                await writer.drain()
    assert sent < 100_000_000
    done.set()
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""  # the end of one side is the end of the other
    writer.transport.abort()
