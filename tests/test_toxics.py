"""
The fault proxy: each toxic does what toxiproxy's of that name does, and nothing else.

What is measured is order and bytes; times only in the direction in which a slow machine can't
make a test fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING

import pytest
from harness import eventually
from toxics import (
    TOXICS,
    Bandwidth,
    FaultProxy,
    Latency,
    LimitData,
    ResetPeer,
    Slicer,
    SlowClose,
    Timeout,
    Toxic,
    from_json,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SAID = bytes(range(256)) * 200


@contextlib.asynccontextmanager
async def echo_behind(*toxics: Toxic) -> AsyncIterator[FaultProxy]:
    """Run a server that says back what it hears, behind a proxy with these toxics."""

    echoing: list[asyncio.Transport] = []

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        echoing.append(writer.transport)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    where = server.sockets[0].getsockname()
    async with server, FaultProxy(where, random.Random(1), list(toxics)) as proxy:
        yield proxy
        for transport in echoing:
            transport.abort()
        await asyncio.sleep(0)


async def talk(proxy: FaultProxy, said: bytes = SAID) -> bytes:
    """Say something and end; return all that comes back. Raises ConnectionResetError."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        writer.write(said)
        writer.write_eof()
        return await reader.read()
    finally:
        writer.close()


HARMLESS = [
    Latency(latency=20, jitter=10),
    Latency(stream="upstream", latency=20),
    Bandwidth(rate=2000),
    SlowClose(delay=20),
    Slicer(average_size=2000, size_variation=1500, delay=10),
    LimitData(bytes=len(SAID) + 1),
    ResetPeer(toxicity=0),
]


@pytest.mark.parametrize("toxic", [None, *HARMLESS], ids=lambda toxic: getattr(toxic, "type", "-"))
async def test_what_only_delays_loses_nothing(toxic: Toxic | None):
    """Every byte arrives, in order, and the end after them."""
    async with echo_behind(*([toxic] if toxic else [])) as proxy:
        heard = await asyncio.gather(*(talk(proxy) for _ in range(5)))
        assert heard == [SAID] * 5
        await eventually(lambda: not proxy.links)


async def test_latency_delays_and_does_not_slow_down():
    """Twenty pieces that come one by one are all late by the same time, not one after another."""
    async with echo_behind(Latency(latency=200)) as proxy:
        loop = asyncio.get_running_loop()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        started = loop.time()
        for _ in range(20):
            writer.write(b"x")
            await asyncio.sleep(0.005)
        assert await reader.readexactly(20) == b"x" * 20
        assert 0.2 <= loop.time() - started < 20 * 0.2
        writer.close()


async def test_bandwidth_takes_its_time():
    """What is sent at 100 KB/s can't have arrived earlier than that allows."""
    async with echo_behind(Bandwidth(rate=100)) as proxy:
        loop = asyncio.get_running_loop()
        started = loop.time()
        assert await talk(proxy, b"x" * 30_000) == b"x" * 30_000
        assert loop.time() - started >= 0.3


async def test_a_slicer_makes_small_pieces():
    """A receiver sees pieces of the size that was asked for, if it is quick."""
    async with echo_behind(Slicer(average_size=3, size_variation=2, delay=2000)) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"0123456789" * 3)
        pieces = [await reader.read(100)]
        while sum(map(len, pieces)) < 30:
            pieces.append(await reader.read(100))
        assert b"".join(pieces) == b"0123456789" * 3
        assert len(pieces) >= 3
        writer.close()


@pytest.mark.parametrize("limit", [0, 1, 1000])
async def test_limited_data_is_followed_by_the_end(limit: int):
    """So many bytes arrive, then the connection ends."""
    async with echo_behind(LimitData(bytes=limit)) as proxy:
        try:
            heard = await talk(proxy)
        except ConnectionResetError:  # we were still sending
            heard = None
        assert heard in (None, SAID[:limit])
        assert proxy.bites == {"limit_data": 1}


async def test_a_reset_is_a_reset():
    """The client sees RST, and nothing of the answer."""
    async with echo_behind(ResetPeer(timeout=1)) as proxy:
        with pytest.raises(ConnectionResetError):
            await talk(proxy, b"Hello.")
        assert proxy.bites["reset_peer"] == 1


async def test_a_timeout_lets_nothing_through_and_ends():
    """Nothing arrives before the connection is closed."""
    async with echo_behind(Timeout(timeout=50)) as proxy:
        assert await talk(proxy, b"Hello.") == b""


async def test_a_black_hole_stays_open_until_its_toxic_is_removed():
    """With a timeout of 0 nothing arrives and nothing ends; without the toxic it goes on."""
    hole = Timeout(timeout=0)
    async with echo_behind() as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        proxy.add(hole)
        writer.write(b"two")
        await eventually(lambda: proxy.bites["timeout"])
        proxy.remove(hole)
        writer.write(b"three")
        assert await reader.readexactly(5) == b"three"
        writer.close()


async def test_what_is_down_refuses_and_comes_back():
    """Down, it closes what is open and takes nothing new; up again, it has the same port."""
    async with echo_behind() as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"Hello.")
        await reader.readexactly(6)
        proxy.disable()
        assert await reader.read() == b""
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await talk(proxy)
        await proxy.enable()
        assert await talk(proxy) == SAID


async def test_who_does_not_read_stops_the_sender():
    """What a slow reader leaves lying is bounded; afterwards it has all of it."""
    async with echo_behind(Latency(latency=1)) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port, limit=1024)
        writer.write(b"x" * (64 << 20))
        (link,) = await eventually(lambda: proxy.links)
        upstream = link.pipes["upstream"]
        await eventually(lambda: upstream.source and not upstream.source.is_reading())
        held = [pipe._arrived_bytes for pipe in link.pipes.values()]
        held += [each.get_write_buffer_size() for each in proxy.transports]
        assert sum(held) < 8 << 20
        writer.write_eof()
        heard = 0
        while data := await reader.read(1 << 20):
            heard += len(data)
        assert heard == 64 << 20
        writer.close()


async def test_toxicity_is_a_share_of_the_connections():
    """About half the connections have a toxic of toxicity 0.5, each for its whole life."""
    async with echo_behind(LimitData(bytes=0, toxicity=0.5)) as proxy:
        heard = [await talk(proxy, b"x") for _ in range(60)]
        assert 10 < heard.count(b"x") < 50


def test_toxiproxys_own_json_is_read():
    """What its HTTP API takes makes our toxic; what it does not know is refused."""
    given = {
        "name": "slow",
        "type": "latency",
        "stream": "upstream",
        "toxicity": 0.5,
        "attributes": {"latency": 100, "jitter": 10},
    }
    assert from_json(given) == Latency(stream="upstream", toxicity=0.5, latency=100, jitter=10)
    assert all(from_json({"type": name}) == kind() for name, kind in TOXICS.items())
    for wrong in (
        {"type": "fire"},
        {"type": "latency", "attributes": {"rate": 1}},
        {"type": "latency", "stream": "sideways"},
    ):
        with pytest.raises(ValueError, match="no such"):
            from_json(wrong)
