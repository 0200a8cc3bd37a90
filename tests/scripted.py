"""
A proxy whose upstream says exactly what a test lets it say, and raw connections to it.

`front` runs both. Each turn that reaches upstream is handed to the test as a `Received`, which
answers it in messages of the test's choice. One connection to upstream is opened ahead, and every
turn that continues nothing can have it, so nothing has to be waited for: turns go the express way
unless the test does something about that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness import NO_HANDSHAKE_LIMIT, eventually, serving
from wire import read_message
from wsserver import upstream

from proxy.downstream.express import Express

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from structlog.testing import CapturingLogger
    from websockets.asyncio.server import ServerConnection
    from wire import Request

    from proxy.app import Turnwire
    from proxy.downstream.client import ClientConnection
    from proxy.downstream.server import Front

# One conversation at a time uses the one connection, whether it is continued or not.
ONE_CONNECTION = {"spare_per_principal": 0, "nursery_size": 1, **NO_HANDSHAKE_LIMIT}


def event(kind: str, **fields: Any) -> bytes:
    """Write a message as the API does."""
    return json.dumps({"type": kind, **fields}, separators=(",", ":")).encode()


def created(identity: str = "resp_1") -> bytes:
    """Write the first message of an answer."""
    response = {"id": identity, "status": "in_progress", "output": []}
    return event("response.created", response=response, sequence_number=0)


def delta(text: str = "word", number: int = 1) -> bytes:
    """Write a text delta."""
    return event("response.output_text.delta", delta=text, sequence_number=number)


def completed(identity: str = "resp_1", **response: Any) -> bytes:
    """Write the last message of an answer."""
    response = {"id": identity, "status": "completed", "output": [], **response}
    return event("response.completed", response=response, sequence_number=99)


def error(status: int = 400, **fields: Any) -> bytes:
    """Write an error message."""
    told = {"code": "invalid_value", "message": "No.", "type": "invalid_request_error", **fields}
    return event("error", status=status, error=told)


DELTAS = [delta(f"word {number}", number) for number in range(1, 9)]


def framed(*messages: bytes) -> bytes:
    """Write messages as a WebSocket server does."""
    frames = b""
    for message in messages:
        size = len(message)
        if size < 126:
            frames += bytes([0x81, size])
        elif size < 1 << 16:
            frames += bytes([0x81, 126, *size.to_bytes(2)])
        else:
            frames += bytes([0x81, 127, *size.to_bytes(8)])
        frames += message
    return frames


@dataclass
class Received:
    """A turn as upstream has received it."""

    server: ServerConnection
    message: dict[str, Any]

    def say(self, *messages: bytes) -> None:
        """Send messages in one write."""
        self.server.transport.write(framed(*messages))

    def answer(self, *messages: bytes) -> None:
        """Send a whole answer in one write."""
        self.say(created(), *messages, completed())

    def hang_up(self) -> None:
        """End the connection without a word."""
        self.server.transport.abort()


def turn_bytes(
    text: str = "hi", *fields: str, path: str = "/v1/responses", body: bytes = b"", **settings: Any
) -> bytes:
    """Write a request for a turn: streamed, not stored, of one message, unless told otherwise."""
    asked = {"model": "m", "input": text, "store": False, "stream": True, **settings}
    body = body or json.dumps(asked).encode()
    lines = (
        f"POST {path} HTTP/1.1",
        *("Host: localhost", "Authorization: Bearer sk", *fields, f"Content-Length: {len(body)}"),
    )
    return "\r\n".join((*lines, "\r\n")).encode() + body


@dataclass
class Line:
    """A client's connection to the proxy; `connection` is the proxy's side, if that is ours."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    connection: ClientConnection | None

    @property
    def is_lent(self) -> bool:
        """Whether aiohttp's protocol was made for this connection."""
        return self.connection is None or self.connection._lent is not None

    @property
    def read_by_aiohttp(self) -> int:
        """How many requests of this connection aiohttp has read."""
        assert self.connection is not None
        lent = self.connection._lent
        return 0 if lent is None else lent._request_count

    def send(self, *data: bytes) -> None:
        """Send bytes."""
        self.writer.write(b"".join(data))

    async def reply(self) -> Request:
        """Read one reply."""
        return await read_message(self.reader)

    async def rest(self) -> bytes:
        """Read until the proxy closes the connection; a reset takes nothing back."""
        got = b""
        with contextlib.suppress(ConnectionError):
            while data := await self.reader.read(1 << 16):
                got += data
        return got


class Scripted:
    """A proxy and its upstream. `express` counts the turns that were begun without waiting."""

    def __init__(self, proxy: Turnwire, log: CapturingLogger) -> None:
        self.proxy = proxy
        self.log = log
        self.express = 0
        self.turns: asyncio.Queue[Received] = asyncio.Queue()
        self._lines: list[Line] = []

    @property
    def port(self) -> int:
        """The port of the proxy."""
        return int(self.proxy.base_url.split(":")[2].split("/")[0])

    @property
    def front(self) -> Front:
        """What serves the clients."""
        runner: Any = self.proxy._front_runner
        (route, *_) = runner.app.router.routes()
        return route.handler.__self__

    @property
    def is_on(self) -> bool:
        """Whether there is an express way at all."""
        runner: Any = self.proxy._front_runner
        return runner._connect is not None

    @property
    def clients(self) -> set[ClientConnection]:
        """The connections of clients."""
        runner: Any = self.proxy._front_runner
        return set() if runner.server is None else runner.server._clients

    async def turn(self) -> Received:
        """Wait for the next turn to reach upstream."""
        async with asyncio.timeout(10):
            return await self.turns.get()

    async def line(self, *data: bytes) -> Line:
        """Connect, and send bytes."""
        before = set(self.clients)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        connection = None
        if self.is_on:
            (connection,) = await eventually(lambda: self.clients - before)
        line = Line(reader, writer, connection)
        self._lines.append(line)
        line.send(*data)
        return line

    async def warm_up(self) -> None:
        """Have a connection to upstream opened."""
        line = await self.line(turn_bytes())
        (await self.turn()).answer()
        await line.reply()
        line.writer.close()
        await self.settled()
        self.log.calls.clear()
        self.express = 0

    def metric(self, name: str, **labels: str) -> float:
        """Return a metric's value; 0 if it has no such series."""
        return self.proxy.metrics.registry.get_sample_value(name, labels) or 0.0

    @property
    def statuses(self) -> list[int]:
        """The statuses of all turns that are over, as they were logged."""
        return [call.kwargs["status"] for call in self.log.calls if call.args[:1] == ("turn",)]

    async def settled(self) -> None:
        """Wait until nothing is under way any more, and nothing is held."""
        await eventually(
            lambda: (
                not (
                    self.metric("turnwire_turns_in_flight")
                    or self.metric("turnwire_connections", state="busy")
                    or self.metric("turnwire_connections", state="connecting")
                    or self.front.budget.held_bytes
                )
            )
        )

    def close(self) -> None:
        """Close the clients' connections."""
        for line in self._lines:
            line.writer.close()


@contextlib.asynccontextmanager
async def front(**config: Any) -> AsyncIterator[Scripted]:
    """Run a proxy in front of a scripted upstream; a connection between them is open."""
    running: Scripted | None = None

    async def handler(server: ServerConnection) -> None:
        async for message in server:
            assert running is not None
            running.turns.put_nowait(Received(server, json.loads(message)))

    settings = {"connections": ONE_CONNECTION} | config
    async with upstream(handler) as server:
        url = server.url.replace("ws:", "http:").removesuffix("/responses")
        async with serving(url, **settings) as (proxy, log):
            running = Scripted(proxy, log)
            with _counting(running):
                try:
                    await running.warm_up()
                    yield running
                finally:
                    running.close()
                await eventually(lambda: not running.clients)


@contextlib.contextmanager
def _counting(running: Scripted) -> AsyncIterator[None]:
    """Count the turns that are begun in `Express`, by what its only caller is told."""
    start = Express.start

    def counted(self: Express) -> bool:
        is_begun = start(self)
        client: Any = self._client
        running.express += is_begun and client._front is running.front
        return is_begun

    Express.start = counted
    try:
        yield
    finally:
        Express.start = start


# --- What upstream may do with a turn -------------------------------------------------------------


async def turn_of_the_loop() -> None:
    """Let what was just written arrive, and be taken."""
    for _ in range(4):
        await asyncio.sleep(0)


async def heal(f: Scripted, turn: Received) -> None:
    """Answer the turn where it is sent again."""
    again = await f.turn()
    assert again.message == turn.message
    again.answer()


async def is_refused(_: Scripted, turn: Received) -> None:
    """Refuse the turn."""
    turn.say(error())


async def is_refused_for_now(_: Scripted, turn: Received) -> None:
    """Refuse the turn because of a limit."""
    turn.say(error(429, code="rate_limit_exceeded", type="rate_limit_error"))


async def ends_at_once(f: Scripted, turn: Received) -> None:
    """End the connection before the first event."""
    turn.hang_up()
    await heal(f, turn)


async def closes_at_once(f: Scripted, turn: Received) -> None:
    """Close the connection politely before the first event."""
    await turn.server.close(1001)
    await heal(f, turn)


async def is_silent(f: Scripted, turn: Received) -> None:
    """Say nothing at all."""
    await heal(f, turn)


async def talks_nonsense(f: Scripted, turn: Received) -> None:
    """Begin with what belongs to no answer."""
    turn.say(b"nonsense")
    await heal(f, turn)


async def fails_within(_: Scripted, turn: Received) -> None:
    """Err in the middle of an answer."""
    turn.say(created(), *DELTAS, error(500, code="server_error", type="server_error"))


async def ends_within(_: Scripted, turn: Received) -> None:
    """End the connection in the middle of an answer."""
    turn.say(created(), *DELTAS)
    turn.server.transport.close()


async def stops_within(_: Scripted, turn: Received) -> None:
    """Fall silent in the middle of an answer."""
    turn.say(created(), *DELTAS)


async def talks_nonsense_within(_: Scripted, turn: Received) -> None:
    """Go on with what belongs to no answer."""
    turn.say(created(), *DELTAS)
    await turn_of_the_loop()
    turn.say(DELTAS[0], b"nonsense")
