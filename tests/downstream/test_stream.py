"""A streamed answer on its way to the client, by the short way and by the public one."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from harness import eventually, serving
from wire import read_head, read_message
from wsserver import upstream

from proxy.core.reply import ReplyReader
from proxy.downstream import deadlines, stream
from proxy.upstream import connection
from proxy.upstream.connection import UpstreamConnection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from structlog.testing import CapturingLogger
    from websockets.asyncio.server import ServerConnection

    from proxy.app import Turnwire


@pytest.fixture(params=["direct", "public", "uncut"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Relay directly, by public functions only, or with frames that the library parses."""
    monkeypatch.setattr(stream, "WRITES_DIRECTLY", request.param != "public")
    monkeypatch.setattr(connection, "CUTS_FRAMES", request.param == "direct")
    return str(request.param)


def event(kind: str, **fields: Any) -> bytes:
    """Write a message as the API does."""
    return json.dumps({"type": kind, **fields}, separators=(",", ":")).encode()


def delta(text: str, number: int = 1) -> bytes:
    """Write a text delta."""
    return event("response.output_text.delta", delta=text, sequence_number=number)


RESPONSE = {"id": "resp_1", "output": []}
CREATED = event("response.created", response=RESPONSE, sequence_number=0)
COMPLETED = event("response.completed", response=RESPONSE, sequence_number=99)
DELTAS = [delta(f"word {number}", number) for number in range(1, 9)]


def framed(*messages: bytes) -> bytes:
    """Write messages as a WebSocket server does."""
    frames = b""
    for message in messages:
        size = len(message)
        length = bytes([size]) if size < 126 else bytes([126, *size.to_bytes(2)])
        frames += b"\x81" + length + message
    return frames


def body_of(*messages: bytes) -> bytes:
    """Return the SSE bytes that these messages become."""
    reader = ReplyReader(stream=True, hide_previous_response_id=None, collect_output=False)
    return reader.feed(list(messages))


@contextlib.asynccontextmanager
async def answering(
    answer: Callable[[ServerConnection], Awaitable[None]], **config: Any
) -> AsyncIterator[tuple[Turnwire, CapturingLogger]]:
    """Run a proxy whose upstream answers every turn by calling `answer`."""

    async def handler(server: ServerConnection) -> None:
        async for _ in server:
            await answer(server)

    settings = {"connections": {"spare_per_principal": 0}} | config
    async with upstream(handler) as server:
        url = server.url.replace("ws:", "http:").removesuffix("/responses")
        async with serving(url, **settings) as (proxy, log):
            yield proxy, log


def request_bytes(version: str = "1.1") -> bytes:
    """Write a request for a streamed turn."""
    body = json.dumps({"model": "m", "input": "hi", "store": False, "stream": True}).encode()
    return (
        f"POST /v1/responses HTTP/{version}\r\nHost: localhost\r\nAuthorization: Bearer sk\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


@contextlib.asynccontextmanager
async def asking(
    proxy: Turnwire, version: str = "1.1"
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Send the request; give the streams of the client."""
    port = int(proxy.base_url.split(":")[2].split("/")[0])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_bytes(version))
    try:
        yield reader, writer
    finally:
        writer.close()


async def send(server: ServerConnection, data: bytes) -> None:
    """Write bytes past the library, at once."""
    server.transport.write(data)


def count(proxy: Turnwire, state: str) -> float:
    """Return the number of upstream connections in a state, as /metrics tells it."""
    return proxy.metrics.registry.get_sample_value("turnwire_connections", {"state": state})


def the_connection() -> UpstreamConnection:
    """Return the one upstream connection that is open in this process."""
    all_of_them = [each for each in gc.get_objects() if type(each) is UpstreamConnection]
    (found,) = [each for each in all_of_them if each.is_open]
    return found


# --- What we know of aiohttp and websockets ------------------------------------------------------


def test_the_libraries_are_as_we_know_them() -> None:
    """If this fails, a new version has changed what the short way relies on: see both modules."""
    assert stream._writes_as_we_know_it()
    assert connection._tells_its_place()
    assert web.StreamResponse._send_headers_immediately is True
    assert web.Response._send_headers_immediately is False


def test_a_writer_that_is_not_as_known_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the public way is taken, whatever the difference is."""

    def refuse(*_: object) -> None:
        raise TypeError

    with monkeypatch.context() as patched:
        patched.delattr(stream.BaseProtocol, "writing_paused")
        assert not stream._writes_as_we_know_it()
    with monkeypatch.context() as patched:
        patched.setattr(stream, "StreamWriter", refuse)
        assert not stream._writes_as_we_know_it()
    with monkeypatch.context() as patched:
        patched.setattr(stream, "chunk", b"".join)
        assert not stream._writes_as_we_know_it()
    with monkeypatch.context() as patched:
        patched.setattr(connection, "_stands_between_frames", lambda _: True)
        assert not connection._tells_its_place()


# --- Writes ---------------------------------------------------------------------------------------


class _Recording:
    """A transport that also keeps what is written."""

    def __init__(self, transport: asyncio.Transport, writes: list[bytes]) -> None:
        self._transport = transport
        self._writes = writes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._writes.append(bytes(data))
        self._transport.write(data)

    def writelines(self, parts: list[bytes]) -> None:
        self.write(b"".join(parts))


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """Collect all that is written to clients, write by write."""
    made: list[bytes] = []
    connection_made = deadlines.LentProtocol.connection_made

    def record(self: Any, transport: asyncio.Transport) -> None:
        connection_made(self, _Recording(transport, made))

    monkeypatch.setattr(deadlines.LentProtocol, "connection_made", record)
    return made


async def test_an_answer_that_comes_whole_is_one_write(writes: list[bytes]) -> None:
    """Head, events and last chunk leave together."""

    async def answer(server: ServerConnection) -> None:
        await send(server, framed(CREATED, *DELTAS, COMPLETED))

    async with answering(answer) as (proxy, _), asking(proxy) as (reader, _):
        reply = await read_message(reader)

    assert reply.body == body_of(CREATED, *DELTAS, COMPLETED)
    assert len(writes) == 1


async def test_each_read_is_one_write(writes: list[bytes]) -> None:
    """The head leaves with the first events, the last chunk with the last ones."""
    batches = [[CREATED, *DELTAS[:2]], DELTAS[2:5], [DELTAS[5]], [*DELTAS[6:], COMPLETED]]

    async def answer(server: ServerConnection) -> None:
        for number, batch in enumerate(batches):
            await eventually(lambda number=number: len(writes) == number)
            await send(server, framed(*batch))

    async with answering(answer) as (proxy, _), asking(proxy) as (reader, _):
        reply = await read_message(reader)

    assert reply.body == body_of(CREATED, *DELTAS, COMPLETED)
    assert len(writes) == 4
    assert writes[0].startswith(b"HTTP/1.1 200 OK\r\n")
    assert writes[1] == stream.chunk([body_of(CREATED, *DELTAS[2:5])[len(body_of(CREATED)) :]])
    assert writes[3].endswith(b"\r\n0\r\n\r\n")


@pytest.mark.parametrize("seed", range(8))
async def test_bytes_are_the_same_however_the_stream_is_split(seed: int) -> None:
    """Frames of every kind, cut anywhere, give the events that the messages make."""
    rng = random.Random(seed)
    odd = [
        delta("\u00e9").replace(b"\\u00e9", b"\xc3\xa9"),
        delta("x" * 70_000),
        json.dumps(json.loads(delta("pretty")), indent=1).encode(),
        event("codex.rate_limits"),
        event("response.reasoning_text.delta", delta="hm"),
        event("response.output_item.done", output_index=0, item={"type": "message", "id": "m"}),
    ]
    messages = [CREATED, *rng.choices([*DELTAS, *odd], k=60), COMPLETED]
    frames = b"".join(
        (b"\x89\x01p" if rng.random() < 0.1 else b"")
        + (
            framed(each)
            if len(each) < 65_536
            else bytes([0x81, 127, *len(each).to_bytes(8)]) + each
        )
        for each in messages
    )

    async def answer(server: ServerConnection) -> None:
        position = 0
        while position < len(frames):
            size = rng.choice([1, 2, 3, 40, 300, 5000, 100_000])
            await send(server, frames[position : position + size])
            position += size
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)

    async with answering(answer) as (proxy, _), asking(proxy) as (reader, _):
        reply = await read_message(reader)
        await eventually(lambda: count(proxy, "idle") == 1)

    assert reply.body == body_of(*messages)


async def test_a_client_of_http_1_0_gets_the_answer_too() -> None:
    """It knows no chunks: the end of the connection is the end of the body."""

    async def answer(server: ServerConnection) -> None:
        await send(server, framed(CREATED))
        for each in (*DELTAS, COMPLETED):
            await asyncio.sleep(0)
            await send(server, framed(each))

    async with answering(answer) as (proxy, _), asking(proxy, "1.0") as (reader, _):
        head = await read_head(reader)
        body = await reader.read()

    assert head.get("Transfer-Encoding") is None
    assert body == body_of(CREATED, *DELTAS, COMPLETED)


# --- The end --------------------------------------------------------------------------------------

ENDS: dict[str, bytes] = {
    "close": b"\x88\x02\x03\xe8",
    "no_utf8": framed(delta("?").replace(b"?", b"\xff")),
    "no_json": framed(b"garbage"),
    "foreign": framed(event("response.in_progress", response={"id": "resp_2"})),
    "masked": b"\x81\x82\x00\x00\x00\x00hi",
    "error": framed(event("error", status=500, error={"code": "server_error", "message": "No."})),
}


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("name", ENDS)
async def test_what_comes_before_a_fault_is_written_and_then_one_error(
    name: str, together: bool
) -> None:
    """Every event before it, one error, and no end of the body; the lease is given back once."""

    async def answer(server: ServerConnection) -> None:
        await send(server, framed(CREATED))
        await asyncio.sleep(0.05 if together else 0)
        await send(server, framed(*DELTAS) + (ENDS[name] if together else b""))
        if not together:
            await asyncio.sleep(0.05)
            await send(server, ENDS[name])

    async with answering(answer) as (proxy, log), asking(proxy) as (reader, _):
        received = await reader.read()
        await eventually(lambda: count(proxy, "busy") == 0)

        assert count(proxy, "idle") == 0
        assert turns(log) == [200]
    body = unchunked(received)
    assert body.startswith(body_of(CREATED, *DELTAS))
    assert body.removeprefix(body_of(CREATED, *DELTAS)).count(b"event: error\n") == 1
    assert not received.endswith(b"\r\n0\r\n\r\n")


def unchunked(received: bytes) -> bytes:
    """Return the body as far as it came."""
    _, _, rest = received.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


def turns(log: CapturingLogger) -> list[int]:
    """Return the status of every turn that is over."""
    return [call.kwargs["status"] for call in log.calls if call.args[:1] == ("turn",)]


@pytest.mark.parametrize("late", [event("keepalive"), delta("late")])
async def test_what_follows_the_end_at_once_decides_about_the_connection(late: bytes) -> None:
    """A vendor's event is harmless; one of an answer spoils the connection, and is not shown."""

    async def answer(server: ServerConnection) -> None:
        await send(server, framed(CREATED))
        await asyncio.sleep(0.02)
        await send(server, framed(DELTAS[0], COMPLETED, late))

    async with answering(answer) as (proxy, _), asking(proxy) as (reader, _):
        reply = await read_message(reader)
        await eventually(lambda: count(proxy, "busy") == 0)

        assert count(proxy, "idle") == (late == event("keepalive"))
    assert reply.body == body_of(CREATED, DELTAS[0], COMPLETED)


async def test_silence_is_commented_and_has_an_end() -> None:
    """Comments while nothing comes, each message puts them off; an error when it takes too long."""

    async def answer(server: ServerConnection) -> None:
        await send(server, framed(CREATED))
        await asyncio.sleep(0.25)
        await send(server, framed(DELTAS[0]))

    config = {"reply": {"keepalive_s": 0.1}, "websocket": {"silence_timeout_s": 0.45}}
    async with answering(answer, **config) as (proxy, log), asking(proxy) as (reader, _):
        received = await reader.read()
        await eventually(lambda: turns(log) == [200])

    before, after = unchunked(received).split(b'"delta":"word 1"')
    assert before.count(b": keep-alive\n") >= 1
    assert after.count(b": keep-alive\n") >= 1
    assert after.count(b"event: error\n") == 1
    assert not received.endswith(b"\r\n0\r\n\r\n")


# --- Clients that are slow, or leave --------------------------------------------------------------


async def test_a_slow_client_stops_upstream_and_loses_nothing() -> None:
    """While it does not read, the upstream socket is not read either; then it gets every event."""
    block = [delta("x" * 1000, number) for number in range(1000)]
    sent: list[int] = []

    async def answer(server: ServerConnection) -> None:
        await server.send(CREATED, text=True)
        for number in range(20):
            for each in block:
                await server.send(each, text=True)
            sent.append(number)
        await server.send(COMPLETED, text=True)

    config = {"reply": {"keepalive_s": 0.01}, "websocket": {"silence_timeout_s": 0.1}}
    async with answering(answer, **config) as (proxy, _), asking(proxy) as (reader, _):
        await reader.readuntil(b"event: response.output_text.delta")
        await eventually(lambda: the_connection().is_reading_paused)
        await asyncio.sleep(0.2)  # longer than upstream may be silent: it is not to blame
        assert the_connection().is_reading_paused
        assert len(sent) < 20
        rest = b""
        while not rest.endswith(b"\r\n0\r\n\r\n"):
            rest += await reader.read(1 << 20)

        assert rest.count(b"event: response.output_text.delta") == 20 * 1000 - 1
        assert rest.count(b"event: response.completed") == 1
        await eventually(lambda: count(proxy, "idle") == 1)
        assert not the_connection().is_reading_paused


@pytest.mark.parametrize("after", [0, 1, 2, 5, 300])
@pytest.mark.parametrize("reads", [True, False])
async def test_a_client_that_leaves_ends_its_turn_at_any_point(after: int, reads: bool) -> None:
    """The turn is over, its connection is cut, and nothing is logged but that."""
    left = asyncio.Event()

    async def answer(server: ServerConnection) -> None:
        await send(server, framed(CREATED))
        number = 0
        while not server.transport.is_closing():
            if number == after:
                left.set()
            number += 1
            await send(server, framed(delta("x" * 300, number)))
            await asyncio.sleep(0)

    async with answering(answer) as (proxy, log), asking(proxy) as (reader, writer):
        await reader.readuntil(b"event: response.created")
        await left.wait()
        if reads:
            await reader.readuntil(b"event: response.output_text.delta")
        writer.transport.abort()

        await eventually(lambda: turns(log) == [499])
        await eventually(lambda: count(proxy, "busy") + count(proxy, "idle") == 0)
