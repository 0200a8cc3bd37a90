"""
A wire tap: a TCP relay on loopback that changes nothing and notes everything.

It works below HTTP, so what is broken, compressed, pipelined or upgraded passes as it is. The notes
are read afterwards: `exchanges` makes requests and their replies of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from proxy.downstream.bodies import decode

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping

_BLOCK_BYTES = 1 << 16
_MAX_BODY_BYTES = 1 << 28


@dataclass(slots=True)
class Line:
    """One tapped connection: what either side said, in full."""

    request_bytes: bytearray = field(default_factory=bytearray)
    reply_bytes: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True, slots=True)
class Message:
    """One HTTP message. `first` is its first line, `whole` whether it came to its end."""

    first: str
    headers: Mapping[str, str]
    body: bytes
    whole: bool


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its reply; `reply` is None where the connection ended before it."""

    request: Message
    reply: Message | None

    @property
    def method(self) -> str:
        """The request's method."""
        return self.request.first.split(" ")[0]

    @property
    def path(self) -> str:
        """The request's path with its query."""
        return self.request.first.split(" ")[1]

    @property
    def status(self) -> int:
        """The reply's status; 0 without a reply."""
        return int(self.reply.first.split(" ")[1]) if self.reply else 0

    def reply_header(self, name: str) -> str:
        """A header of the reply; empty if there is none."""
        return self.reply.headers.get(name, "") if self.reply else ""

    def body(self) -> bytes:
        """The request's body with its content encodings undone."""
        names = self.request.headers.get("content-encoding", "")
        encodings = [name.strip() for name in names.split(",") if name.strip()]
        return decode(self.request.body, encodings, _MAX_BODY_BYTES)


class Wiretap:
    """The relay. An async context manager; `port` is where it listens, once entered."""

    def __init__(self, target_port: int) -> None:
        self.lines: list[Line] = []
        self.port = 0
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def exchanges(self) -> list[Exchange]:
        """All that was noted, connection by connection."""
        return [exchange for line in self.lines for exchange in read_line(line)]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        line = Line()
        self.lines.append(line)
        writers = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
            writers.append(far_writer)
            await _relay(
                _pump(reader, far_writer, line.request_bytes),
                _pump(far_reader, writer, line.reply_bytes),
            )
        except (OSError, asyncio.CancelledError):  # an abrupt end stays abrupt
            for each in writers:
                each.transport.abort()
        finally:
            for each in writers:
                each.close()
            self._open.discard(task)


async def _relay(*pumps: Coroutine[Any, Any, None]) -> None:
    """Run both directions until both have ended, or one has failed. Raises OSError."""
    tasks = [asyncio.create_task(pump) for pump in pumps]  # noqa: TID251  both are awaited here
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, notes: bytearray
) -> None:
    """Copy until the end of one direction, and pass that end on."""
    while block := await reader.read(_BLOCK_BYTES):
        notes += block
        writer.write(block)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()


def read_line(line: Line) -> Iterator[Exchange]:
    """The exchanges of a connection in order; what comes after an upgrade is not HTTP."""
    replies = iter(list(_messages(bytes(line.reply_bytes), are_replies=True)))
    for request in _messages(bytes(line.request_bytes), are_replies=False):
        reply = next(replies, None)
        yield Exchange(request, reply)
        if reply is None or reply.first.split(" ")[1] == "101":
            return


def _messages(data: bytes, *, are_replies: bool) -> Iterator[Message]:
    while b"\r\n\r\n" in data:
        head, _, data = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        status = first.split(" ")[1] if are_replies else ""
        if status in ("100", "102", "103"):
            continue
        if status == "101":
            yield Message(first, headers, b"", whole=True)
            return
        body, data, whole = _body(headers, data, to_the_end=are_replies and status != "204")
        yield Message(first, headers, body, whole)


def _body(
    headers: Mapping[str, str], data: bytes, *, to_the_end: bool
) -> tuple[bytes, bytes, bool]:
    """The body at the start of the data, what follows it, and whether the body is whole."""
    if "chunked" in headers.get("transfer-encoding", ""):
        return _unchunk(data)
    if "content-length" in headers:
        length = int(headers["content-length"])
        return data[:length], data[length:], len(data) >= length
    return (data, b"", True) if to_the_end else (b"", data, True)


def _unchunk(data: bytes) -> tuple[bytes, bytes, bool]:
    parts: list[bytes] = []
    while b"\r\n" in data:
        size_text, _, rest = data.partition(b"\r\n")
        size = int(size_text.split(b";")[0], 16)
        if len(rest) < size + 2:
            return b"".join([*parts, rest[:size]]), b"", False
        parts.append(rest[:size])
        data = rest[size + 2 :]
        if size == 0:
            return b"".join(parts), data, True
    return b"".join(parts), b"", False
