"""
An upstream that writes down everything, and clients that say anything.

`Ledger` is the upstream: over HTTP and over WebSocket it keeps what reached it and for whom, and
answers with a function of both, so that an answer that went astray shows in the answer itself.

`Line` sends bytes to a port, in whatever pieces, and reads back until the other side closes.
`parse_replies` reads such a stream as strictly as RFC 9112 lets a client be: what it can't read is
an `AssertionError`. The last request of a stream is usually `LAST`, which asks to close: when the
connection ends, all has been said.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from aiohttp import WSMsgType, web

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

KEY = "sk-asker-000000"
LAST_TARGET = "/v1/last"
LAST = b"GET %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % LAST_TARGET.encode()

_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9][0-9]) ([\t -~]*)\r\n")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*?)[ \t]*\r\n")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")


@dataclass(frozen=True)
class Seen:
    """One request as it reached upstream. `text` is its `input`, or else its body."""

    method: str
    target: str
    text: str
    key: str


def answer_to(key: str, text: str) -> str:
    """Return what the ledger answers to a text that came with a key."""
    return hashlib.sha256(f"{key}\n{text}".encode("utf-8", "surrogatepass")).hexdigest()[:20]


class Ledger:
    """The upstream. An async context manager; `url` is its base URL, `seen` what reached it."""

    def __init__(self, *, websocket: bool = True) -> None:
        self.seen: list[Seen] = []
        self.url = ""
        self._websocket = websocket

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.1, auto_decompress=False
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    def _note(self, request: web.Request, body: str) -> str:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        text = body
        with contextlib.suppress(ValueError, KeyError, TypeError):
            given = json.loads(body)["input"]
            text = given if isinstance(given, str) else json.dumps(given)
        self.seen.append(Seen(request.method, request.raw_path, text, key))
        return answer_to(key, text)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        wants_websocket = request.headers.get("Upgrade", "").lower() == "websocket"
        if self._websocket and wants_websocket and request.raw_path == "/v1/responses":
            return await self._converse(request)
        body = (await request.read()).decode("utf-8", "surrogateescape")
        return web.json_response({"answer": self._note(request, body)})

    async def _converse(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=0)
        await socket.prepare(request)
        posted = request.clone(method="POST")
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                answer = self._note(posted, message.data)
                for event in events(answer):
                    await socket.send_str(json.dumps(event))
        return socket


def events(answer: str) -> Iterable[dict[str, Any]]:
    """Give the events of a response whose text is `answer`."""
    ident = f"resp_{answer}"
    item = {
        "type": "message",
        "id": f"msg_{answer}",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": answer, "annotations": []}],
    }
    response = {"id": ident, "object": "response", "status": "in_progress", "output": []}
    done = response | {"status": "completed", "output": [item]}
    yield {"type": "response.created", "response": response, "sequence_number": 0}
    yield {"type": "response.output_text.delta", "delta": answer, "sequence_number": 1}
    yield {"type": "response.output_item.done", "item": item, "sequence_number": 2}
    yield {"type": "response.completed", "response": done, "sequence_number": 3}


@dataclass(frozen=True)
class Reply:
    """One reply, its body with the chunks joined. `interim` are the 1xx statuses before it."""

    status: int
    fields: tuple[tuple[str, str], ...]
    body: bytes
    interim: tuple[int, ...] = ()
    complete: bool = True

    def get(self, name: str) -> str | None:
        """Return the only value of a field, or None."""
        values = [value for each, value in self.fields if each == name]
        assert len(values) < 2, f"{name} comes {len(values)} times"
        return values[0] if values else None

    @property
    def answer(self) -> str | None:
        """The ledger's answer in this reply, wherever it stands."""
        found = re.search(rb'"answer": ?"([0-9a-f]{20})"', self.body)
        found = found or re.search(rb"resp_([0-9a-f]{20})", self.body)
        return found[1].decode() if found else None

    @property
    def likeness(self) -> tuple[object, ...]:
        """What two replies to the same request have in common: all but ids, times and chunks."""
        volatile = {
            "content-length",
            "date",
            "transfer-encoding",
            "turnwire-reason",  # that of a repetition is another
            "x-request-id",
        }
        fields = tuple(sorted(pair for pair in self.fields if pair[0] not in volatile))
        return self.status, fields, self.body, self.interim, self.complete


def parse_replies(data: bytes, methods: Sequence[str] = ()) -> list[Reply]:
    """
    Read all replies on a connection that has ended.

    `methods` are those of the requests as far as they matter: a reply to HEAD has no body. A body
    that ends before its framing says so gives a reply that is not `complete`.
    """
    replies: list[Reply] = []
    interim: list[int] = []
    while data:
        status, fields, data = _head(data)
        if status < 200:
            interim.append(status)
            assert status != 101, "nobody asked to switch protocols"
            continue
        method = methods[len(replies)] if len(replies) < len(methods) else "GET"
        body, data, complete = _body(status, dict(fields), fields, data, method)
        replies.append(Reply(status, fields, body, tuple(interim), complete))
        interim = []
    assert not interim, "an interim reply was the last"
    return replies


def _head(data: bytes) -> tuple[int, tuple[tuple[str, str], ...], bytes]:
    line = _STATUS.match(data)
    assert line, f"no status line: {data[:80]!r}"
    position, fields = line.end(), []
    while not data.startswith(b"\r\n", position):
        found = _FIELD.match(data, position)
        assert found, f"no field: {data[position : position + 80]!r}"
        fields.append((found[1].decode().lower(), found[2].decode("latin-1")))
        position = found.end()
    return int(line[1]), tuple(fields), data[position + 2 :]


def _body(
    status: int, named: dict[str, str], fields: Sequence[tuple[str, str]], data: bytes, method: str
) -> tuple[bytes, bytes, bool]:
    framing = [name for name, _ in fields if name in ("content-length", "transfer-encoding")]
    assert len(framing) <= 1, f"more than one framing: {fields}"
    if method == "HEAD" or status in (204, 304):
        return b"", data, True
    if "transfer-encoding" in named:
        assert named["transfer-encoding"] == "chunked"
        return _chunks(data)
    if "content-length" in named:
        size = int(named["content-length"])
        return data[:size], data[size:], len(data) >= size
    return data, b"", True


def _chunks(data: bytes) -> tuple[bytes, bytes, bool]:
    body = b""
    while True:
        size = _CHUNK.match(data)
        if size is None:
            assert len(data) < 10, f"no chunk: {data[:40]!r}"
            return body, b"", False
        count, start = int(size[1], 16), size.end()
        if len(data) < start + count + 2:
            return body + data[start : start + count], b"", False
        assert data[start + count : start + count + 2] == b"\r\n", "a chunk without its end"
        body, data = body + data[start : start + count], data[start + count + 2 :]
        if not count:
            return body, data, True


@dataclass(frozen=True)
class Line:
    """
    A connection to a port of this machine, for raw bytes.

    With `pace_s`, what the other side says to a part is waited for, though not for longer, before
    the next part is sent.
    """

    port: int
    pace_s: float = 0.0

    async def exchange(self, *parts: bytes, methods: Sequence[str] = ()) -> list[Reply]:
        """Send the parts, each in a write of its own; return the replies until the other closes."""
        return parse_replies(await self.raw(*parts), methods)

    async def raw(self, *parts: bytes) -> bytes:
        """Send the parts; return all bytes until the other side closes."""
        loop = asyncio.get_running_loop()
        # A socket and no transport: that would close, and forget what it has not read, where a
        # write fails because the other side has said its last word.
        with socket.socket() as sock:
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", self.port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ear = _Ear(loop, sock)
            try:
                with contextlib.suppress(ConnectionError):
                    for part in parts:
                        await loop.sock_sendall(sock, part)
                        await (ear.hear(self.pace_s) if self.pace_s else asyncio.sleep(0))
                async with asyncio.timeout(20):
                    await ear.listening
            finally:
                ear.listening.cancel()
        return bytes(ear.heard)


class _Ear:
    """Reads a socket until its end; a reset is one, what came before it counts."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        self.heard = bytearray()
        self._news = asyncio.Event()
        self.listening = loop.create_task(self._listen(loop, sock))

    async def _listen(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await loop.sock_recv(sock, 1 << 16):
                self.heard += piece
                self._news.set()
        self._news.set()

    async def hear(self, at_most_s: float) -> None:
        """Wait for something new, for so long at most."""
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                await self._news.wait()
