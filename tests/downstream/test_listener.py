"""The end of a listener: nobody who was at the door is turned away."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest
from aiohttp import web
from harness import eventually

from proxy.bench.ports import port_to_serve
from proxy.downstream.deadlines import FrontRunner, build_runner
from proxy.downstream.listener import LastCallSite

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

REQUEST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"


async def echo(request: web.Request) -> web.Response:
    """Answer with the body."""
    return web.Response(body=await request.read())


@pytest.fixture
async def runner() -> AsyncIterator[FrontRunner]:
    """A server that listens."""
    app = web.Application()
    app.router.add_post("/", echo)
    runner = build_runner(app)
    await runner.setup()
    with port_to_serve() as port:
        await LastCallSite(runner, "127.0.0.1", port).start()
        yield runner
        await runner.cleanup()


def at_the_door(runner: FrontRunner, count: int) -> list[socket.socket]:
    """Connect while the event loop is held up: the kernel accepts, and the loop hears nothing."""
    return [socket.create_connection(runner.addresses[0]) for _ in range(count)]


async def told(client: socket.socket) -> bytes:
    """Read all that the server says to a client until it closes."""
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    said = b""
    while data := await loop.sock_recv(client, 4096):
        said += data
    client.close()
    return said


async def test_who_waits_in_the_queue_is_served(runner: FrontRunner) -> None:
    """Connections that only the kernel has accepted get their answer, and then the end."""
    clients = at_the_door(runner, 20)
    for client in clients:
        client.sendall(REQUEST)

    await runner.cleanup()

    replies = [await told(client) for client in clients]
    assert all(reply.startswith(b"HTTP/1.1 200") for reply in replies)
    assert all(reply.endswith(b"\r\n\r\nabc") for reply in replies)


async def test_a_request_that_is_still_on_its_way_is_served(runner: FrontRunner) -> None:
    """Who has connected and not yet spoken is heard out."""
    (client,) = at_the_door(runner, 1)
    async with asyncio.TaskGroup() as group:
        group.create_task(runner.cleanup())
        await eventually(lambda: not runner.addresses)  # it no longer listens
        client.sendall(REQUEST)

    assert (await told(client)).startswith(b"HTTP/1.1 200")


async def test_who_never_speaks_does_not_hold_up_the_end(runner: FrontRunner) -> None:
    """The end waits a moment for them, and not for ever; in a hurry not at all."""
    (client,) = at_the_door(runner, 1)
    runner.hurry()

    await runner.cleanup()

    assert await told(client) == b""


async def test_nobody_new_is_taken_after_the_last_call(runner: FrontRunner) -> None:
    """The port is closed."""
    address = runner.addresses[0]

    await runner.cleanup()

    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


async def test_a_client_that_has_left_the_queue_is_no_trouble(runner: FrontRunner) -> None:
    """One that connected and reset while it waited does not keep the others from their answers."""
    gone, stays = at_the_door(runner, 2)
    gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    gone.close()
    stays.sendall(REQUEST)

    await runner.cleanup()

    assert (await told(stays)).startswith(b"HTTP/1.1 200")
