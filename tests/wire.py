"""
Bytes on loopback sockets, for tests of what exactly goes over the wire.

`Peer` is a scripted server: it records each request as received and hands the connection to the
test's script. `read_message` and `talk` read and write HTTP/1.1 by hand, so that nothing between
the test and the code under test tidies up.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Script = Callable[["Request", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Request:
    """One message as received: start line, header lines in order, body with its chunks joined."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes = b""
    connection: int = 0

    def get(self, name: str) -> str | None:
        """Give the first value of a header."""
        return next((v for n, v in self.headers if n.lower() == name.lower()), None)

    @property
    def status(self) -> int:
        """Give the status code of a reply."""
        return int(self.line.split(" ")[1])


async def read_head(reader: asyncio.StreamReader) -> Request:
    """Read a start line and headers. Raises IncompleteReadError at the end of the stream."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    line, *fields = head[:-4].split("\r\n")
    pairs = (text.partition(":") for text in fields)
    return Request(line, [(name, value.strip()) for name, _, value in pairs])


async def read_message(reader: asyncio.StreamReader) -> Request:
    """Read a message with its body, by Content-Length or in chunks."""
    message = await read_head(reader)
    if length := message.get("Content-Length"):
        message.body = await reader.readexactly(int(length))
    elif message.get("Transfer-Encoding") == "chunked":
        while size := int(await reader.readuntil(b"\n"), 16):
            message.body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    return message


def reply(body: bytes = b"ok", *headers: str, status: str = "200 OK") -> bytes:
    """Spell a reply with a Content-Length."""
    fields = "".join(f"{header}\r\n" for header in headers)
    return f"HTTP/1.1 {status}\r\n{fields}Content-Length: {len(body)}\r\n\r\n".encode() + body


@dataclass
class Peer:
    """A scripted HTTP server on a free port; the default script answers every request alike."""

    answer: bytes = field(default_factory=reply)
    script: Script | None = None
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    port: int = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self._tasks: set[asyncio.Task[None]] = set()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        connection = self.connections
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while not writer.is_closing():
                    if self.script is None:
                        request = await read_message(reader)
                    else:
                        request = await read_head(reader)
                    request.connection = connection
                    self.requests.append(request)
                    if self.script is None:
                        writer.write(self.answer)
                    else:
                        await self.script(request, reader, writer)
        except asyncio.CancelledError:
            pass  # the test is over; asyncio would log it otherwise
        finally:
            self._tasks.discard(task)
            writer.close()


async def talk(port: int, *parts: bytes) -> Request:
    """Send bytes to a port, and read one message back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await read_message(reader)
    finally:
        writer.close()
