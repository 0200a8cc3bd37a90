"""
An upstream that can't be trusted: it does the WebSocket handshake, and then sends any bytes.

`Rogue.script` are the pieces it answers each turn with, past every framing of a library; whether
it then hangs up is `hangs_up`. Requests over HTTP are answered with 503, so that what a turn
becomes is the WebSocket's doing.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455 section 1.3
_OUTAGE = b'{"error":{"message":"down","type":"server_error","code":"down","param":null}}'
_UNAVAILABLE = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(_OUTAGE)
) + _OUTAGE


class Rogue:
    """A running upstream of bad manners. An async context manager; `url` is its base URL."""

    def __init__(self) -> None:
        self.url = ""
        self.script: Sequence[bytes] = ()
        self.hangs_up = True
        self.turns = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
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
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                head = await reader.readuntil(b"\r\n\r\n")
                await (self._converse if b"pgrade: websocket" in head else self._refuse)(
                    head, reader, writer
                )
        except asyncio.CancelledError:
            pass  # the test is over; asyncio would log it otherwise
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _refuse(
        self, _head: bytes, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(_UNAVAILABLE)
        await writer.drain()

    async def _converse(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        key = next(
            line.partition(b":")[2].strip()
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"sec-websocket-key")
        )
        accept = base64.b64encode(hashlib.sha1(key + _GUID).digest())
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: %b\r\n\r\n" % accept
        )
        while True:
            await _read_message(reader)
            self.turns += 1
            for piece in self.script:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if self.hangs_up:
                return


async def _read_message(reader: asyncio.StreamReader) -> None:
    """Read client frames to the end of one text message; answer nothing."""
    while True:
        first, second = await reader.readexactly(2)
        size = second & 0x7F
        if size >= 126:
            size = int.from_bytes(await reader.readexactly(2 if size == 126 else 8))
        await reader.readexactly(4 + size)
        if first & 0x0F in (0, 1) and first & 0x80:
            return


def framed(payload: bytes, opcode: int = 1, *, fin: bool = True) -> bytes:
    """Spell a server's frame."""
    size = len(payload)
    if size < 126:
        length = bytes([size])
    elif size < 1 << 16:
        length = bytes([126, *size.to_bytes(2)])
    else:
        length = bytes([127, *size.to_bytes(8)])
    return bytes([0x80 * fin | opcode]) + length + payload
