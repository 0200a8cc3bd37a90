"""
Which of a host's addresses is connected to, over real sockets.

A black hole is a listener whose queue is full: Linux drops what would be one too many, so whoever
connects hears nothing at all, neither yes nor no.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from websockets.asyncio.client import connect
from wsserver import upstream

from proxy.errors import UpstreamUnreachable
from proxy.upstream import dial as dialling
from proxy.upstream.connection import ConnectionSettings, open_connection
from proxy.upstream.dial import dial

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wsserver import Upstream

linux_only = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere loopback has one address, and queues are others"
)


@contextlib.contextmanager
def black_hole(address: str, port: int = 0) -> Iterator[int]:
    """Be an address that answers nobody; gives its port."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((address, port))
        listener.listen(0)
        for _ in range(4):
            visitor = stack.enter_context(socket.socket())
            visitor.setblocking(False)
            visitor.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Let `localhost` have these addresses, in this order."""
    loop = asyncio.get_running_loop()
    resolve = loop.getaddrinfo

    async def getaddrinfo(host: str, port: int, **kind: Any) -> list[Any]:
        if host != "localhost":
            return await resolve(host, port, **kind)
        found = [await resolve(address, port, **kind) for address in addresses]
        return [info for infos in found for info in infos]

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)


def by_name(server: Upstream) -> str:
    """Return the URL of a server on 127.0.0.1, with a name for its address."""
    return server.url.replace("127.0.0.1", "localhost")


def descriptors() -> set[str]:
    """Return what this process has open."""
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208  Path.iterdir holds one open


@linux_only
async def test_a_black_hole_before_the_right_address_is_passed_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Well before the handshake's deadline, which it would take one address after the other."""
    async with upstream() as server:
        port = urlsplit(server.url).port
        with black_hole("127.0.0.2", port):
            resolve_to(monkeypatch, "127.0.0.2", "127.0.0.1")
            settings = ConnectionSettings(connect_timeout_s=60)
            async with asyncio.timeout(30):
                connection = await open_connection(by_name(server), [], settings)
            assert connection.transport.get_extra_info("peername")[0] == "127.0.0.1"
            await connection.close()


@linux_only
async def test_an_address_that_refuses_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is tried at once."""
    async with upstream() as server:
        resolve_to(monkeypatch, "127.0.0.3", "127.0.0.1")
        connection = await open_connection(by_name(server), [], ConnectionSettings())
        assert connection.transport.get_extra_info("peername")[0] == "127.0.0.1"
        await connection.close()


@linux_only
async def test_where_all_refuse_it_is_a_refusal(
    closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several that say the same are told of as one."""
    resolve_to(monkeypatch, "127.0.0.1", "127.0.0.3")
    with pytest.raises(UpstreamUnreachable, match="refused"):
        await open_connection(f"ws://localhost:{closed_port}/", [], ConnectionSettings())


@linux_only
@pytest.mark.parametrize("addresses", [("127.0.0.2",), ("127.0.0.2", "127.0.0.4")], ids=len)
async def test_black_holes_alone_meet_the_deadline_and_leave_nothing_open(
    addresses: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All attempts are given up together."""
    with contextlib.ExitStack() as stack:
        port = 0
        for address in addresses:
            port = stack.enter_context(black_hole(address, port))
        resolve_to(monkeypatch, *addresses)
        before = descriptors()
        with pytest.raises(UpstreamUnreachable, match="too long"):
            await open_connection(
                f"ws://localhost:{port}/", [], ConnectionSettings(connect_timeout_s=0.6)
            )
        await asyncio.sleep(0)
        assert descriptors() <= before


@linux_only
@pytest.mark.parametrize("after_s", [0, 0.01, 0.3])
async def test_a_cancelled_wait_leaves_nothing_open(
    after_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, between and after the attempts."""
    with black_hole("127.0.0.2") as port, black_hole("127.0.0.4", port):
        resolve_to(monkeypatch, "127.0.0.2", "127.0.0.4")
        before = descriptors()
        dialled = asyncio.get_running_loop().create_task(dial("localhost", port))
        await asyncio.sleep(after_s)
        dialled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dialled
        await asyncio.sleep(0)
        assert descriptors() <= before


@linux_only
async def test_a_failed_handshake_leaves_nothing_open() -> None:
    """Whether TLS fails or what comes after it."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"this is neither TLS nor HTTP\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        for scheme, context in (("ws", None), ("wss", ssl.create_default_context())):
            before = descriptors()
            url = f"{scheme}://127.0.0.1:{port}/"
            with pytest.raises(UpstreamUnreachable):
                await open_connection(url, [], ConnectionSettings(), context)
            for _ in range(100):
                if descriptors() <= before:
                    break
                await asyncio.sleep(0.01)
            assert descriptors() <= before


async def test_small_messages_are_not_held_back() -> None:
    """As on every connection that a loop opens itself, Nagle's algorithm is off."""
    async with upstream() as server:
        connection = await open_connection(server.url, [], ConnectionSettings())
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        await connection.close()


async def test_websockets_asks_us_for_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    The library calls the method that we replace; it is not one that it describes.

    If a new version has no such method, names are still connected to, one address after the other.
    """
    assert callable(getattr(connect, "open_tcp_connection", None)), (
        "websockets has another way of opening connections: adapt `dial.Connect`"
    )
    asked = []

    async def noted(host: str, port: int) -> socket.socket:
        asked.append(host)
        return await dial(host, port)

    monkeypatch.setattr(dialling, "dial", noted)
    async with upstream() as server:
        await (await open_connection(server.url, [], ConnectionSettings())).close()
    assert asked == ["127.0.0.1"]


@pytest.mark.parametrize("rounds", range(3))
async def test_a_cancelled_handshake_closes_its_descriptor_once(rounds: int) -> None:
    """
    The event loop and the socket must not both believe to own it.

    The second to close it would close whatever has the number by then: another's connection. uvloop
    before 0.23 did that, which is why it is not allowed.
    """
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sock = await dial(*listener.getsockname())
        opening = loop.create_task(loop.create_connection(asyncio.Protocol, sock=sock))
        for _ in range(rounds):
            await asyncio.sleep(0)
        opening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            (await opening)[0].close()
        for _ in range(4):
            await asyncio.sleep(0)
        others = os.pipe()  # which take the lowest numbers that are free
        sock.close()
        assert [os.write(others[1], b"x"), os.read(others[0], 1)] == [1, b"x"]
        for descriptor in others:
            os.close(descriptor)
