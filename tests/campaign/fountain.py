"""
An upstream of few words and endless answers, for floods: `[blocks=N]` in a request asks for N.

A block is 64 events of a kilobyte, framed beforehand, so that this costs next to nothing and is not
what a flood slows down. It sends as fast as it is read, and holds nothing: what is slow further
down shows in the memory of what is in between. WebSocket mode only.

    python fountain.py        prints its port, and serves until it is ended
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import struct
from typing import TYPE_CHECKING

from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed

if TYPE_CHECKING:
    from websockets.asyncio.server import ServerConnection

_WANTED = re.compile(r"\[blocks=(\d+)\]")
_numbers = itertools.count()

# Without a number, as some upstreams send them, so that it has to be written but once.
_DELTA = json.dumps(
    {"type": "response.output_text.delta", "item_id": "msg_1", "delta": "x" * 1000}
).encode()
_BLOCK = (b"\x81\x7e" + struct.pack("!H", len(_DELTA)) + _DELTA) * 64


async def answer(connection: ServerConnection) -> None:
    """Answer every message on a connection."""
    with contextlib.suppress(ConnectionClosed, ConnectionError):
        async for message in connection:
            wanted = _WANTED.findall(str(message))
            await _pour(connection, int(wanted[-1]) if wanted else 0)


async def _pour(connection: ServerConnection, blocks: int) -> None:
    name = f"resp_{next(_numbers):032x}"
    response = {"id": name, "object": "response", "status": "in_progress", "output": []}
    await _send(connection, 0, "response.created", response=response)
    for _ in range(blocks):
        connection.transport.write(_BLOCK)
        await connection.drain()
        await asyncio.sleep(0)  # others, too, want to be answered
    done = {**response, "status": "completed"}
    await _send(connection, 1, "response.completed", response=done)


async def _send(connection: ServerConnection, number: int, kind: str, **fields: object) -> None:
    await connection.send(json.dumps({"type": kind, "sequence_number": number, **fields}))


async def main() -> None:
    """Serve on a free port."""
    async with serve(answer, "127.0.0.1", 0, max_size=None, compression=None) as server:
        print(server.sockets[0].getsockname()[1], flush=True)  # noqa: T201  its reader waits
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
