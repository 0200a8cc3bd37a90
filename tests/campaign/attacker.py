"""
Clients that are slow on purpose: they hold what they can, for as long as they may.

    python attacker.py PORT HEADS READERS

HEADS sockets send a request's head one byte a second, and come again when they are shown the door;
READERS read a long answer at 1 kB/s. Both go on until standard input ends; then it prints what
became of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import time
from collections import Counter

_HEAD = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nX-Slow: " + b"a" * 100_000
_ANSWER_BLOCKS = 320  # of 64 KiB each
_BYTES_PER_S = 1000

counts: Counter[str] = Counter()
lives_s: list[float] = []


async def drip(port: int) -> None:
    """Send heads that never end, one after another."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            counts["heads_begun"] += 1
            began = time.monotonic()
            try:
                await _drip_one(reader, writer)
            finally:
                writer.transport.abort()
            lives_s.append(time.monotonic() - began)
        await asyncio.sleep(0.1)


async def _drip_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for byte in _HEAD:
        writer.write(bytes([byte]))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                answer = await reader.read(1000)
                counts["heads_answered_408" if b" 408 " in answer else "heads_dropped"] += 1
                return


async def sip(port: int, number: int) -> None:
    """Ask for a long answer and read it slowly, through a small window."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=raw, limit=1024)
    given = [{"role": "user", "content": f"[blocks={_ANSWER_BLOCKS}] {number}"}]
    body = json.dumps({"model": "m", "store": False, "stream": True, "input": given}).encode()
    writer.write(
        b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sk-slow-%d\r\n"
        b"Content-Length: %d\r\n\r\n" % (number % 10, len(body)) + body
    )
    counts["readers_begun"] += 1
    while await reader.read(_BYTES_PER_S):
        counts["readers_bytes"] += _BYTES_PER_S
        await asyncio.sleep(1)
    counts["readers_cut"] += 1


async def main(port: int, heads: int, readers: int) -> None:
    """Attack until told to end."""
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(drip(port)) for _ in range(heads)]
    tasks += [loop.create_task(sip(port, number)) for number in range(readers)]
    await loop.run_in_executor(None, sys.stdin.read)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    longest = round(max(lives_s, default=0.0), 2)
    print(json.dumps({**counts, "longest_head_s": longest}))  # noqa: T201  that is the result


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:4])))
