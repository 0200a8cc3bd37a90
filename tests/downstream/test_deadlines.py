"""Deadlines for heads: slow ones are let go, everything else is left alone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from aiohttp import web
from wire import read_head, read_message

from proxy.downstream.deadlines import build_runner

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

REQUEST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"


class Server:
    """A server with a short deadline, whose handler can be held up."""

    def __init__(self) -> None:
        self.port = 0
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def handle(self, request: web.Request) -> web.Response:
        """Read the body unless told not to; wait for leave; answer."""
        self.entered.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        body = b"" if "unread" in request.query else await request.read()
        return web.Response(body=body, headers={"X-Path": request.raw_path[:100]})


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """A running server."""
    server = Server()
    app = web.Application()
    app.router.add_post("/", server.handle)
    runner = build_runner(app, header_timeout_s=0.15, lingering_time_s=0.3)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.port = runner.addresses[0][1]
    yield server
    await runner.cleanup()


async def test_silence_is_ended(server: Server) -> None:
    """A connection on which nothing was ever sent is closed without a word."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize("part", [b"P", b"POST / HTTP/1.1\r\nHost: x\r\nX-Slow: "])
async def test_a_head_that_does_not_end_is_a_408(server: Server, part: bytes) -> None:
    """Who has begun a head and does not finish it hears 408, and is let go."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(part)
    assert (await read_head(reader)).status == 408
    assert await reader.read() == b""
    writer.close()


async def test_dripping_does_not_help(server: Server) -> None:
    """Further bytes do not move the deadline."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\n")
    answer = asyncio.get_running_loop().create_task(reader.read())
    while not answer.done():
        writer.write(b"X-Drip: 1\r\n")
        await asyncio.wait([answer], timeout=0.02)
    assert b" 408 " in await answer
    writer.close()


async def test_the_second_head_of_a_connection_has_a_deadline_too(server: Server) -> None:
    """A connection kept alive may be idle; once a head has begun, it must end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(REQUEST)
    assert (await read_message(reader)).body == b"abc"
    writer.write(b"POST")
    assert (await read_head(reader)).status == 408
    writer.close()


async def test_bodies_and_handlers_take_their_time(server: Server) -> None:
    """The deadline is over with the head: a slow body and a slow answer are not its business."""
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    server.go_on.clear()
    writer.write(REQUEST[:-3])
    await server.entered.wait()
    passed = loop.create_future()
    loop.call_later(0.4, passed.set_result, None)  # well past the deadline of a head
    await passed
    writer.write(b"abc")
    server.go_on.set()
    assert (await read_message(reader)).body == b"abc"
    writer.close()


async def test_an_idle_connection_is_kept(server: Server) -> None:
    """Between requests nothing runs out, also after a body that the handler left unread."""
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(REQUEST.replace(b"/ ", b"/?unread ")[:-3])
    assert (await read_message(reader)).status == 200
    writer.write(b"abc")
    passed = loop.create_future()
    loop.call_later(0.4, passed.set_result, None)
    await passed
    writer.write(REQUEST)
    assert (await read_message(reader)).body == b"abc"
    writer.close()


async def test_a_handler_is_cancelled_when_its_client_leaves(server: Server) -> None:
    """Nobody works for a client that is gone."""
    server.go_on.clear()
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(REQUEST)
    await server.entered.wait()
    writer.transport.abort()
    await server.cancelled.wait()


async def test_pipelined_requests_are_answered(server: Server) -> None:
    """Two requests in one packet get two answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(REQUEST * 2)
    for _ in range(2):
        assert (await read_message(reader)).body == b"abc"
    writer.close()


async def test_large_headers_pass_up_to_the_limit(server: Server) -> None:
    """Fields of more than aiohttp's 8 KiB are fine; those over the limit are a 400."""
    for size, status in ((30_000, 200), (40_000, 400)):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(REQUEST.replace(b"\r\n\r\n", b"\r\nX-Big: " + b"b" * size + b"\r\n\r\n"))
        assert (await read_head(reader)).status == status
        writer.close()
