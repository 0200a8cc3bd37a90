"""
An upstream of few words and endless answers, for floods: `[deltas=N]` in a request asks for N.

It sends as fast as it is read, and holds nothing: what is slow further down shows in the memory
of what is in between, and not here. WebSocket mode only.

    python fountain.py        prints its port, and serves until it is ended
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
from typing import TYPE_CHECKING

from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed

if TYPE_CHECKING:
    from websockets.asyncio.server import ServerConnection

_WANTED = re.compile(r"\[deltas=(\d+)\]")
_TEXT = "x" * 1000
_numbers = itertools.count()


async def answer(connection: ServerConnection) -> None:
    """Answer every message on a connection."""
    with contextlib.suppress(ConnectionClosed):
        async for message in connection:
            wanted = _WANTED.findall(str(message))
            await _pour(connection, int(wanted[-1]) if wanted else 5)


async def _pour(connection: ServerConnection, deltas: int) -> None:
    name = f"resp_{next(_numbers):032x}"
    response = {"id": name, "object": "response", "status": "in_progress", "output": []}
    await _send(connection, 0, "response.created", response=response)
    for number in range(1, deltas + 1):
        await _send(connection, number, "response.output_text.delta", item_id="msg_1", delta=_TEXT)
    done = {**response, "status": "completed"}
    await _send(connection, deltas + 1, "response.completed", response=done)


async def _send(connection: ServerConnection, number: int, kind: str, **fields: object) -> None:
    await connection.send(json.dumps({"type": kind, "sequence_number": number, **fields}))


async def main() -> None:
    """Serve on a free port."""
    async with serve(answer, "127.0.0.1", 0, max_size=None, compression=None) as server:
        print(server.sockets[0].getsockname()[1], flush=True)  # noqa: T201  its reader waits
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
