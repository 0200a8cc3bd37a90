"""
An emulated network link: a TCP relay in user space that delays and paces bytes.

    python -m proxy.bench.links TARGET_PORT RTT_MS RATE_MBIT

prints the port it listens on and serves until it is ended. How it is done: each direction has one
token bucket, shared by all connections as a real line is, and a delay line of half the round
trip. Bytes are read in pieces, each piece waits for its tokens and then travels; a piece is what
the line sends in a millisecond, so that a receiver sees a stream and not lumps. The first bytes
of a connection also wait one round trip, in place of the handshake of TCP, which loopback
completes at once.

What it leaves out: TLS, slow start, and loss. All of them cost a proxy-less client that sends its
whole history more than they cost a small message on a warm connection, so what is measured
here is the least there is to gain.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from dataclasses import dataclass

_PIECE_S = 0.001
_MIN_PIECE_BYTES = 1448  # a segment
_READ_BYTES = 64 * 1024
_QUEUE_BYTES = 256 * 1024  # beyond what is in flight: like the buffer of a router
# Timers of the loop are late by up to a millisecond: the rest of a wait is spent awake.
_AWAKE_S = 0.0015


@dataclass(frozen=True, slots=True)
class Shape:
    """A link: its round-trip time in seconds, and its rate each way in bits a second."""

    rtt_s: float
    rate_bit_s: float

    @property
    def one_way_s(self) -> float:
        """How long a byte travels."""
        return self.rtt_s / 2

    @property
    def piece_bytes(self) -> int:
        """How much is sent at a time."""
        return max(_MIN_PIECE_BYTES, round(self.rate_bit_s / 8 * _PIECE_S))

    @property
    def name(self) -> str:
        """How tables call it."""
        return f"{self.rtt_s * 1000:.0f} ms, {self.rate_bit_s / 1e6:.0f} Mbit/s"


class Bucket:
    """
    A token bucket, as the moment at which it will be full again.

    It fills with `rate_bit_s` and holds one piece; a piece that finds too few tokens waits.
    """

    def __init__(self, shape: Shape) -> None:
        self._bytes_per_s = shape.rate_bit_s / 8
        self._free_at = 0.0

    def take(self, now: float, size: int) -> float:
        """Take tokens for `size` bytes; return the moment at which the last byte has left."""
        self._free_at = max(now, self._free_at) + size / self._bytes_per_s
        return self._free_at


def pieces(data: bytes, size: int) -> list[bytes]:
    """Cut `data` into pieces of `size` bytes; the last one may be shorter."""
    return [data[at : at + size] for at in range(0, len(data), size)]


class _Direction:
    """One way of one connection: reads, waits for tokens, travels, writes."""

    def __init__(
        self, shape: Shape, bucket: Bucket, writer: asyncio.StreamWriter, opened_at: float
    ) -> None:
        self._shape = shape
        self._bucket = bucket
        self._writer = writer
        self._opened_at = opened_at
        self._travelling: deque[tuple[float, bytes]] = deque()
        self._size = 0
        self._moved = asyncio.Event()

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Relay until the reader's end, which travels as the bytes do."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._deliver())
            while data := await reader.read(_READ_BYTES):
                self._enter(data)
                while self._size > self._in_flight_bytes + _QUEUE_BYTES:
                    await self._next_move()
            self._travelling.append((self._now() + self._shape.one_way_s, b""))
            self._moved.set()

    @property
    def _in_flight_bytes(self) -> float:
        return self._shape.rate_bit_s / 8 * self._shape.one_way_s

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _enter(self, data: bytes) -> None:
        now = max(self._now(), self._opened_at)
        for piece in pieces(data, self._shape.piece_bytes):
            arrives_at = self._bucket.take(now, len(piece)) + self._shape.one_way_s
            self._travelling.append((arrives_at, piece))
            self._size += len(piece)
        self._moved.set()

    async def _next_move(self) -> None:
        self._moved.clear()
        await self._moved.wait()

    async def _deliver(self) -> None:
        while True:
            while not self._travelling:
                await self._next_move()
            arrives_at, piece = self._travelling[0]
            await self._wait_until(arrives_at)
            self._travelling.popleft()
            if not piece:
                self._writer.write_eof()
                return
            self._writer.write(piece)
            await self._writer.drain()
            self._size -= len(piece)
            self._moved.set()

    async def _wait_until(self, moment: float) -> None:
        if (left_s := moment - self._now()) > _AWAKE_S:
            await asyncio.sleep(left_s - _AWAKE_S)
        while self._now() < moment:  # noqa: ASYNC110  no event tells the time
            await asyncio.sleep(0)


class Link:
    """The relay: give `accept` to `asyncio.start_server`."""

    def __init__(self, target_port: int, shape: Shape) -> None:
        self._target_port = target_port
        self._shape = shape
        self._up, self._down = Bucket(shape), Bucket(shape)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one connection until either side has ended."""
        opened_at = asyncio.get_running_loop().time() + self._shape.rtt_s
        try:
            target = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.close()
            return
        up = _Direction(self._shape, self._up, target[1], opened_at)
        down = _Direction(self._shape, self._down, writer, opened_at)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(up.run(reader))
                group.create_task(down.run(target[0]))
        except* OSError:
            pass  # one end has gone; the other is closed below
        finally:
            for end in (writer, target[1]):
                end.close()
                with contextlib.suppress(OSError):
                    await end.wait_closed()


async def serve(target_port: int, shape: Shape) -> None:
    """Serve until cancelled; the port is printed once it is open."""
    server = await asyncio.start_server(Link(target_port, shape).accept, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(
            serve(int(sys.argv[1]), Shape(float(sys.argv[2]) / 1e3, float(sys.argv[3]) * 1e6))
        )
