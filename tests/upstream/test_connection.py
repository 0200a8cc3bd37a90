"""One connection: messages in order and whole, the end noticed, nothing ever in the wrong turn."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http
import random
import ssl
import time
from typing import TYPE_CHECKING

import pytest
import trustme
import wsserver
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.utils import accept_key
from wsserver import raw_server, reset, shut, until, upstream, write_raw

from proxy.errors import ConnectionLost, OutOfResources, UpgradeRefused, UpstreamUnreachable
from proxy.upstream import connection as connection_module
from proxy.upstream.connection import ConnectionSettings, UpstreamConnection, open_connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from websockets.asyncio.server import ServerConnection
    from websockets.http11 import Request, Response

SETTINGS = ConnectionSettings(connect_timeout_s=5.0, close_timeout_s=0.2)
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[trustme.CA, Path]:
    """Return an authority, and the file with its certificate."""
    made = trustme.CA()
    file = tmp_path_factory.mktemp("tls") / "authority.pem"
    made.cert_pem.write_to_path(str(file))
    return made, file


@pytest.fixture(params=["ws", "wss"], autouse=True)
def scheme(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    authority: tuple[trustme.CA, Path],
) -> str:
    """Run every test of this file over plain TCP and over TLS."""
    if request.param == "wss":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made, file = authority
        made.issue_cert("127.0.0.1").configure_cert(context)
        monkeypatch.setattr(wsserver, "TLS", context)
        monkeypatch.setenv("SSL_CERT_FILE", str(file))
    return request.param


@contextlib.asynccontextmanager
async def connected(
    url: str, settings: ConnectionSettings = SETTINGS
) -> AsyncIterator[UpstreamConnection]:
    """Open a connection, and cut it afterwards."""
    connection = await open_connection(url, [("Authorization", "Bearer a")], settings)
    try:
        yield connection
    finally:
        connection.abort()
        await connection.wait_closed()


async def receive_all(connection: UpstreamConnection) -> tuple[list[bytes], int]:
    """Receive until the end; return the messages and the close code."""
    messages: list[bytes] = []
    while True:
        try:
            messages += await connection.receive()
        except ConnectionLost as lost:
            return messages, lost.code


# Opening.


async def test_the_handshake_carries_the_callers_headers_and_little_else() -> None:
    """Credentials byte for byte, no compression offered, no user agent of a library."""
    async with upstream() as server:
        odd = "caf\u00e9-\udcff"
        headers = [("Authorization", "Bearer a"), ("X-Odd", odd), ("Cookie", "a"), ("Cookie", "b")]
        connection = await open_connection(server.url, headers, SETTINGS)
        connection.abort()
        request = server.requests[0]

    assert request.path == "/v1/responses"
    assert request.headers["Authorization"] == "Bearer a"
    assert request.headers.get_all("Cookie") == ["a", "b"]
    sent = request.headers["X-Odd"].encode("latin-1")
    assert sent == odd.encode("utf-8", "surrogateescape")
    assert "Sec-WebSocket-Extensions" not in request.headers
    assert "User-Agent" not in request.headers


async def test_a_user_agent_is_sent_if_there_is_one() -> None:
    """The setting names it."""
    async with upstream() as server:
        settings = ConnectionSettings(user_agent="turnwire/1")
        async with connected(server.url, settings):
            assert server.requests[0].headers["User-Agent"] == "turnwire/1"


@pytest.mark.parametrize("status", [401, 403, 404, 426, 429, 503])
async def test_a_refused_upgrade_keeps_status_headers_and_body(status: int) -> None:
    """They are what the decision, and perhaps the client, will see."""

    def refuse(connection: ServerConnection, request: Request) -> Response:
        response = connection.respond(http.HTTPStatus(status), '{"error":{}}')
        response.headers["Retry-After"] = "7"
        response.headers["X-Twice"] = "1"
        response.headers["X-Twice"] = "2"
        return response

    async with upstream(refuse=refuse) as server:
        with pytest.raises(UpgradeRefused) as caught:
            await open_connection(server.url, [], SETTINGS)

    assert caught.value.status == status
    assert caught.value.headers["retry-after"] == "7"
    assert caught.value.headers["x-twice"] == "1, 2"
    assert caught.value.body == b'{"error":{}}'


async def test_a_redirect_is_refused_and_not_followed() -> None:
    """Credentials go where the configuration says and nowhere else."""
    async with upstream() as elsewhere:

        def refuse(connection: ServerConnection, request: Request) -> Response:
            response = connection.respond(http.HTTPStatus.TEMPORARY_REDIRECT, "")
            response.headers["Location"] = elsewhere.url
            return response

        async with upstream(refuse=refuse) as server:
            with pytest.raises(UpgradeRefused) as caught:
                await open_connection(server.url, [("Authorization", "Bearer a")], SETTINGS)

        assert caught.value.status == 307
        assert elsewhere.requests == []


async def test_a_refused_connection_is_unreachable(closed_port: int) -> None:
    """Nobody listens."""
    with pytest.raises(UpstreamUnreachable, match="refused"):
        await open_connection(f"ws://127.0.0.1:{closed_port}/", [], SETTINGS)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS])
async def test_what_we_lack_ourselves_is_told_apart(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a descriptor left nobody can tell whether upstream is there."""

    async def no_more(*_: object, **__: object) -> None:
        raise OSError(number, "no more")

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", no_more)

    with pytest.raises(OutOfResources, match=errno.errorcode[number]):
        await open_connection("ws://127.0.0.1:9/", [], SETTINGS)


async def test_an_unknown_name_is_unreachable() -> None:
    """RFC 2606 reserves the name."""
    with pytest.raises(UpstreamUnreachable):
        await open_connection("ws://nowhere.invalid/", [], SETTINGS)


async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Take bytes until the peer leaves."""
    with contextlib.suppress(ConnectionError):
        await reader.read()
    writer.close()


async def say_nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the handshake with something that is not HTTP."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
    writer.close()


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Close instead of answering the handshake."""
    await reader.readuntil(b"\r\n\r\n")
    writer.close()


async def accept_badly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer 101 with the wrong accept key."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: bm90IHRoaXMgb25l\r\n\r\n"
    )
    await say_nothing(reader, writer)


@pytest.mark.parametrize("handler", [say_nonsense, hang_up, accept_badly])
async def test_a_handshake_that_makes_no_sense_is_unreachable(handler: object) -> None:
    """Whatever answers there knows no WebSocket."""
    async with raw_server(handler) as url:
        with pytest.raises(UpstreamUnreachable, match="handshake failed"):
            await open_connection(url, [], SETTINGS)


async def test_a_handshake_has_a_deadline() -> None:
    """A peer that accepts and says nothing is given up."""
    async with raw_server(say_nothing) as url:
        with pytest.raises(UpstreamUnreachable, match="too long"):
            await open_connection(url, [], ConnectionSettings(connect_timeout_s=0.05))


async def test_tls_is_verified() -> None:
    """A certificate of an unknown authority gets no credentials; a known one does."""
    authority = trustme.CA()
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(server_context)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with upstream(ssl=server_context) as server:
        url = server.url.replace("ws:", "wss:")
        with pytest.raises(UpstreamUnreachable, match="certificate"):
            await open_connection(url, [], SETTINGS, ssl.create_default_context())
        assert server.requests == []
        connection = await open_connection(url, [], SETTINGS, trusting)
        await connection.send_message(b"hello")

        assert await connection.receive() == [b"hello"]
        await connection.close_gently()


# Messages.


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536, MIB, MIB + 1, 3 * MIB + 7])
async def test_messages_of_any_size_arrive_whole(size: int) -> None:
    """Around every length encoding of RFC 6455 and the bound of fragmentation."""
    message = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    async with upstream() as server, connected(server.url) as connection:
        await connection.send_message(message)

        assert await connection.receive() == [message]


async def test_a_long_message_leaves_in_fragments_with_room_for_pongs() -> None:
    """A ping that arrives in mid-upload is answered before the upload ends."""
    sizes: list[int] = []
    answered = asyncio.Event()

    async def handler(connection: ServerConnection) -> None:
        pong = await connection.ping()
        async for fragment in connection.recv_streaming():
            sizes.append(len(fragment))
            if len(sizes) == 1:
                await pong
                answered.set()

    async with upstream(handler) as server, connected(server.url) as connection:
        await connection.send_message(b"x" * (4 * MIB))
        await answered.wait()
        with pytest.raises(ConnectionLost):
            await connection.receive()

    assert sizes == [256 * 1024] * 16


async def test_fragments_are_put_together() -> None:
    """However upstream cuts its messages, even inside of a character."""

    async def handler(connection: ServerConnection) -> None:
        text = "d\u00e9j\u00e0 vu".encode()
        for index in range(len(text)):
            opcode = Opcode.CONT if index else Opcode.TEXT
            frame = Frame(opcode, text[index : index + 1], fin=index == len(text) - 1)
            write_raw(connection, frame.serialize(mask=False))
            write_raw(connection, Frame(Opcode.PING, b"between").serialize(mask=False))
        await connection.wait_closed()

    async with upstream(handler) as server, connected(server.url) as connection:
        assert await connection.receive() == ["d\u00e9j\u00e0 vu".encode()]


async def test_all_messages_at_hand_are_received_at_once() -> None:
    """What one read brings is one batch, in order."""
    frames = b"".join(
        Frame(Opcode.TEXT, str(number).encode()).serialize(mask=False) for number in range(100)
    )

    async def handler(connection: ServerConnection) -> None:
        write_raw(connection, frames)
        await connection.wait_closed()

    async with upstream(handler) as server, connected(server.url) as connection:
        received: list[bytes] = []
        batches = 0
        while len(received) < 100:
            received += await connection.receive()
            batches += 1

    assert received == [str(number).encode() for number in range(100)]
    assert batches < 10


async def test_bytes_may_arrive_one_at_a_time() -> None:
    """A slicing network changes nothing."""
    frames = b"".join(
        Frame(Opcode.TEXT, b"x" * size).serialize(mask=False) for size in (0, 5, 126, 300)
    )

    async def handler(connection: ServerConnection) -> None:
        for index in range(len(frames)):
            write_raw(connection, frames[index : index + 1])
            await asyncio.sleep(0)
        await connection.close()

    async with upstream(handler) as server, connected(server.url) as connection:
        messages, code = await receive_all(connection)

    assert [len(message) for message in messages] == [0, 5, 126, 300]
    assert code == 1000


async def test_a_slow_reader_stops_the_sender_and_loses_nothing() -> None:
    """Beyond the high-water mark no more is read; taken up again, every message is there."""
    sent: list[int] = []

    async def handler(connection: ServerConnection) -> None:
        for number in range(600):
            await connection.send(str(number).zfill(64 * 1024))
            sent.append(number)
        await connection.close()

    async with upstream(handler) as server, connected(server.url) as connection:
        await until(lambda: connection.is_reading_paused)
        for _ in range(500):
            await asyncio.sleep(0)
        assert connection._buffered_bytes < 2 * MIB
        assert len(sent) < 600
        messages, code = await receive_all(connection)

    assert [int(message[-6:]) for message in messages] == list(range(600))
    assert code == 1000


async def test_a_cancelled_receive_loses_nothing() -> None:
    """The message goes to the next one."""
    go = asyncio.Event()

    async def handler(connection: ServerConnection) -> None:
        await go.wait()
        await connection.send("late")
        await connection.wait_closed()

    async with upstream(handler) as server, connected(server.url) as connection:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await connection.receive()
        go.set()

        assert await connection.receive() == [b"late"]


async def test_concurrent_receivers_are_a_mistake() -> None:
    """Two turns on one connection would share an answer."""
    async with upstream() as server, connected(server.url) as connection:
        first = asyncio.get_running_loop().create_task(connection.receive())
        await asyncio.sleep(0)
        with pytest.raises(AssertionError, match="one task"):
            await connection.receive()
        await connection.send_message(b"x")
        assert await first == [b"x"]


# The end.


@pytest.mark.parametrize("code", [1000, 1001, 1008, 1009, 1011, 1012, 1013, 3000])
async def test_a_close_is_reported_after_what_came_before_it(code: int) -> None:
    """Buffered messages first, then the code, again and again; sending says that nothing left."""

    async def handler(connection: ServerConnection) -> None:
        await connection.send("last words")
        await connection.close(code, "bye")

    async with upstream(handler) as server, connected(server.url) as connection:
        assert await receive_all(connection) == ([b"last words"], code)
        assert not connection.is_open
        with pytest.raises(ConnectionLost) as caught:
            await connection.send_message(b"too late")
        assert (caught.value.code, caught.value.sent) == (code, False)
        with pytest.raises(ConnectionLost):
            await connection.receive()


@pytest.mark.parametrize("how", ["reset", "eof", "close"])
async def test_an_end_without_a_close_frame_is_1006(how: str) -> None:
    """By reset, by a bare end of file, or by one that TLS was told of."""

    async def handler(connection: ServerConnection) -> None:
        await connection.recv()
        if how == "reset":
            reset(connection)
        elif how == "eof":
            shut(connection)
            await connection.wait_closed()
        else:
            connection.transport.close()

    async with upstream(handler) as server, connected(server.url) as connection:
        await connection.send_message(b"x")
        assert await receive_all(connection) == ([], 1006)


async def test_a_peer_that_does_not_hang_up_after_its_close_is_dropped() -> None:
    """The socket does not linger until somebody looks."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        key = request.split(b"Sec-WebSocket-Key: ")[1].split(b"\r\n")[0].decode()
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: " + accept_key(key).encode() + b"\r\n\r\n"
        )
        await reader.read(1)
        writer.write(Frame(Opcode.TEXT, b"hi").serialize(mask=False))
        writer.write(Frame(Opcode.CLOSE, b"\x03\xf3").serialize(mask=False))
        await say_nothing(reader, writer)

    async with raw_server(handler) as url:
        connection = await open_connection(url, [], SETTINGS)
        await connection.send_message(b"go")
        assert await receive_all(connection) == ([b"hi"], 1011)
        await connection.wait_closed()


FAULTS = [
    (Frame(Opcode.BINARY, b"x").serialize(mask=False), 1003),
    (Frame(Opcode.TEXT, b"\xff\xfe").serialize(mask=False), 1007),
    (b"\x81\x86\0\0\0\0masked", 1002),
    (Frame(Opcode.CONT, b"of what?").serialize(mask=False), 1002),
    (b"\x09\x00", 1002),
    (b"\x83\x00", 1002),
    (b"\xc1\x00", 1002),
    (b"\x88\x01\x00", 1002),
    (b"\x81\x7f" + (65 * MIB).to_bytes(8, "big"), 1009),
    (
        Frame(Opcode.TEXT, b"one", fin=False).serialize(mask=False)
        + Frame(Opcode.TEXT, b"two").serialize(mask=False),
        1002,
    ),
]


@pytest.mark.parametrize(("fault", "code"), FAULTS)
async def test_a_broken_frame_ends_the_connection(fault: bytes, code: int) -> None:
    """With what came before it delivered, and nothing of what comes after."""

    async def handler(connection: ServerConnection) -> None:
        before = Frame(Opcode.TEXT, b"before").serialize(mask=False)
        after = Frame(Opcode.TEXT, b"after").serialize(mask=False)
        write_raw(connection, before + fault + after)
        with contextlib.suppress(ConnectionClosed):
            await connection.recv()

    async with upstream(handler) as server, connected(server.url) as connection:
        assert await receive_all(connection) == ([b"before"], code)
        assert not connection.is_open


async def test_a_connection_lost_in_mid_message_may_have_sent_it() -> None:
    """A peer that resets during a long upload leaves it undecided."""

    async def handler(connection: ServerConnection) -> None:
        async for _ in connection.recv_streaming():
            reset(connection)
            return

    async with upstream(handler) as server, connected(server.url) as connection:
        with pytest.raises(ConnectionLost) as caught:
            await connection.send_message(b"x" * (16 * MIB))
        assert (caught.value.code, caught.value.sent) == (1006, True)


async def test_an_upload_excuses_missing_pongs_until_it_can_have_arrived() -> None:
    """At 32 KiB a second, the least that is allowed for."""
    now = [100.0]
    async with upstream() as server:
        connection = await open_connection(server.url, [], SETTINGS, clock=lambda: now[0])
        assert not connection.is_sending(100.0)
        await connection.send_message(b"x" * (320 * 1024))
        assert connection.is_sending(109.0)
        assert not connection.is_sending(110.0)
        connection.abort()


async def test_abort_ends_at_once_and_may_be_repeated() -> None:
    """A waiting receiver learns of it, and the peer sees no close frame."""
    seen: list[int | None] = []

    async def handler(connection: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            await connection.recv()
        await connection.wait_closed()
        seen.append(connection.close_code)

    async with upstream(handler) as server:
        async with connected(server.url) as connection:
            receiving = asyncio.get_running_loop().create_task(connection.receive())
            await asyncio.sleep(0)
            connection.abort()
            connection.abort()
            with pytest.raises(ConnectionLost):
                await receiving
            assert not await connection.probe(1.0)
        await server.connections[0].wait_closed()
        await until(lambda: seen)

    assert seen == [1006]


async def test_a_gentle_close_says_good_bye() -> None:
    """With a close frame, to a peer that answers it."""
    async with upstream() as server:
        connection = await open_connection(server.url, [], SETTINGS)
        await connection.close_gently()
        await server.connections[0].wait_closed()

        assert server.connections[0].close_code == 1000
        assert not connection.is_open


async def test_a_gentle_close_does_not_wait_for_ever() -> None:
    """A peer that ignores it, or does not even read, is cut off."""

    async def handler(connection: ServerConnection) -> None:
        connection.transport.pause_reading()
        await connection.wait_closed()

    async with upstream(handler) as server:
        connection = await open_connection(server.url, [], SETTINGS)
        await until(lambda: server.connections)
        await connection.close_gently()
        await connection.wait_closed()
        reset(server.connections[0])


# Liveness.


async def test_pings_are_answered_whether_or_not_anybody_receives() -> None:
    """The permanent reader is the protocol itself."""

    async def handler(connection: ServerConnection) -> None:
        await (await connection.ping())
        await connection.send("answered")
        await connection.wait_closed()

    async with upstream(handler) as server, connected(server.url) as connection:
        await until(lambda: not connection.is_quiet)
        assert await connection.receive() == [b"answered"]


async def test_a_probe_tells_the_living_from_the_dead() -> None:
    """A pong in time is life; a stopped peer, and one that leaves instead, are not."""

    async def stop_reading(connection: ServerConnection) -> None:
        await connection.recv()
        connection.transport.pause_reading()
        await connection.wait_closed()

    async with upstream() as server, connected(server.url) as connection:
        before = connection.last_inbound_at
        assert await connection.probe(5.0)
        assert connection.last_inbound_at > before
    async with upstream(stop_reading) as server, connected(server.url) as connection:
        await connection.send_message(b"stop")
        await until(lambda: not server.connections[0].transport.is_reading())
        assert not await connection.probe(0.05)
        reset(server.connections[0])

    async def leave(connection: ServerConnection) -> None:
        await connection.recv()

    async with upstream(leave) as server, connected(server.url) as connection:
        await connection.send_message(b"leave")
        assert not await connection.probe(5.0)


async def test_a_keepalive_needs_no_attention() -> None:
    """Its pong counts as life, and an unanswered one leaves no trace when the connection ends."""
    async with upstream() as server, connected(server.url) as connection:
        before = connection.last_inbound_at
        connection.send_keepalive()
        await until(lambda: connection.last_inbound_at > before)
        connection.send_keepalive()
        connection.abort()
        connection.send_keepalive()


# Between turns.


async def test_messages_between_turns_go_to_the_callback() -> None:
    """Those at hand already, and those that come; none of them reaches the next turn."""
    idle: list[bytes] = []
    ended: list[bool] = []
    async with upstream() as server, connected(server.url) as connection:
        await connection.send_message(b"early")
        await until(lambda: not connection.is_quiet)
        connection.become_idle(idle.append, lambda: ended.append(True))
        assert idle == [b"early"]
        await connection.send_message(b"late")
        await until(lambda: len(idle) == 2)
        connection.become_busy()
        await connection.send_message(b"mine")

        assert await connection.receive() == [b"mine"]
        assert idle == [b"early", b"late"]
    assert ended == []


async def test_the_end_of_an_idle_connection_is_reported_once() -> None:
    """Whatever ends it."""
    ended: list[bool] = []

    async def handler(connection: ServerConnection) -> None:
        await connection.recv()

    async with upstream(handler) as server, connected(server.url) as connection:
        connection.become_idle(lambda _: None, lambda: ended.append(True))
        await connection.send_message(b"leave")
        await connection.wait_closed()
        connection.abort()

    assert ended == [True]


async def test_a_callback_may_cut_the_connection() -> None:
    """Messages behind the one that it took offence at are not delivered."""
    idle: list[bytes] = []

    async def handler(connection: ServerConnection) -> None:
        await connection.recv()
        frame = Frame(Opcode.TEXT, b"x").serialize(mask=False)
        write_raw(connection, frame * 3)
        await connection.wait_closed()

    async with upstream(handler) as server, connected(server.url) as connection:

        def judge(message: bytes) -> None:
            idle.append(message)
            connection.abort()

        connection.become_idle(judge, lambda: None)
        await connection.send_message(b"go")
        await connection.wait_closed()

    assert idle == [b"x"]


@pytest.mark.parametrize(
    "beginning",
    [
        Frame(Opcode.TEXT, b"first", fin=False).serialize(mask=False),
        Frame(Opcode.TEXT, b"x" * 10).serialize(mask=False)[:1],
        Frame(Opcode.TEXT, b"x" * 10).serialize(mask=False)[:2],
        Frame(Opcode.TEXT, b"x" * 10).serialize(mask=False)[:7],
        Frame(Opcode.TEXT, b"x" * 300).serialize(mask=False)[:3],
    ],
)
async def test_the_beginning_of_a_message_is_no_quiet(beginning: bytes) -> None:
    """Its rest would arrive in the next turn."""

    async def handler(connection: ServerConnection) -> None:
        await connection.recv()
        write_raw(connection, beginning)
        await connection.wait_closed()

    async with upstream(handler) as server, connected(server.url) as connection:
        assert connection.is_quiet
        connection.become_idle(lambda _: None, lambda: None)
        before = connection.last_inbound_at
        await connection.send_message(b"go")
        await until(lambda: connection.last_inbound_at > before)
        assert not connection.is_quiet
        with pytest.raises(AssertionError, match="another turn"):
            connection.become_busy()


async def test_nothing_private_is_logged_or_shown(caplog: pytest.LogCaptureFixture) -> None:
    """Even with the root logger at its most talkative."""
    with caplog.at_level("DEBUG"):
        async with upstream() as server:
            connection = await open_connection(
                server.url, [("Authorization", "Bearer hunter2")], SETTINGS, clock=time.monotonic
            )
            await connection.send_message(b"secret words")
            await connection.receive()
            shown = repr(connection)
            connection.abort()
            await connection.wait_closed()
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("proxy.")]

    assert "hunter2" not in "".join(ours) + shown
    assert "secret" not in "".join(ours) + shown


# Cutting frames from the read buffer.


def frames_of(messages: list[str], rng: random.Random) -> bytes:
    """Write messages as frames: short and long ones, fragments, pings in between."""
    stream = b""
    for message in messages:
        data = message.encode()
        if rng.random() < 0.2:
            stream += Frame(Opcode.PING, b"p").serialize(mask=False)
        if rng.random() < 0.2 and len(data) > 1:
            place = rng.randrange(1, len(data))
            stream += Frame(Opcode.TEXT, data[:place], fin=False).serialize(mask=False)
            if rng.random() < 0.5:
                stream += Frame(Opcode.PONG, b"").serialize(mask=False)
            stream += Frame(Opcode.CONT, data[place:]).serialize(mask=False)
        else:
            stream += Frame(Opcode.TEXT, data).serialize(mask=False)
    return stream


@pytest.mark.parametrize("seed", range(60))
async def test_messages_are_the_same_however_the_stream_is_split(seed: int) -> None:
    """Frames cut from the buffer and frames read by the library make one sequence, whole."""
    rng = random.Random(seed)
    sizes = [0, 1, 2, 125, 126, 127, 200, 5000, 65_535, 65_536, 70_000]
    messages = ["\u00e9" * rng.randrange(3) + "x" * rng.choice(sizes) for _ in range(12)]
    stream = frames_of(messages, rng)
    received: list[bytes] = []
    async with upstream() as server, connected(server.url) as connection:
        at = 0
        while at < len(stream):
            size = rng.choice([1, 2, 3, 7, 130, 4096, 65_536, 1 << 20])
            connection.data_received(stream[at : at + size])
            at += size
            if rng.random() < 0.5 and connection._messages:
                received += await connection.receive()
        while connection._messages:
            received += await connection.receive()

        assert [message.decode() for message in received] == messages
        assert connection.is_quiet


class Listener:
    """A sink that keeps what it is given, and takes whole frames for itself as it likes."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self.messages: list[bytes] = []
        self.reads = 0
        self.code: int | None = None
        self.rng = rng

    def take_frames(self, data: bytes, position: int) -> int:
        """Take a few short frames of text, or none."""
        while self.rng and self.rng.random() < 0.5 and data[position : position + 1] == b"\x81":
            end = position + 2 + (data[position + 1] if position + 1 < len(data) else 255)
            if end > len(data) or data[position + 1] > 125:
                break
            self.messages.append(data[position + 2 : end])
            position = end
        return position

    def take_messages(self, messages: list[bytes]) -> None:
        """Keep messages."""
        assert messages
        self.messages += messages

    def end_read(self) -> None:
        """Count."""
        self.reads += 1

    def end(self, code: int) -> None:
        """Keep the code."""
        assert self.code is None
        self.code = code


@pytest.mark.parametrize("cuts", [True, False])
@pytest.mark.parametrize("seed", range(30))
async def test_a_sink_gets_every_message_once_and_in_order(
    seed: int, cuts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was there before, what it cuts, what is cut for it, and what the library reads."""
    monkeypatch.setattr(connection_module, "CUTS_FRAMES", cuts)
    rng = random.Random(seed)
    sizes = [0, 1, 2, 3, 50, 125, 126, 5000, 65_535, 65_536, 70_000]
    messages = ["\u00e9" * rng.randrange(3) + "x" * rng.choice(sizes) for _ in range(20)]
    stream = frames_of(messages, rng)
    attaches_at = rng.randrange(len(stream))
    listener = Listener(rng)
    async with upstream() as server, connected(server.url) as connection:
        at = reads = 0
        while at < len(stream):
            if at >= attaches_at and connection._sink is None:
                connection.attach(listener)
                reads = listener.reads
            size = rng.choice([1, 2, 3, 7, 130, 4096, 65_536, 1 << 20])
            connection.data_received(stream[at : at + size])
            at += size
            reads += connection._sink is not None
        if connection._sink is None:
            connection.attach(listener)
            reads = listener.reads

        assert [message.decode() for message in listener.messages] == messages
        assert listener.reads == reads
        assert connection.is_quiet
        connection.detach()
        connection.data_received(b"\x81\x02ok")
        assert await connection.receive() == [b"ok"]
        assert len(listener.messages) == 20


@pytest.mark.parametrize("bad", [b"\x88\x02\x03\xe9", b"\x81\x01\xff", b"\x83\x00"])
@pytest.mark.parametrize("attached", [True, False])
async def test_a_sink_is_told_of_the_end_after_what_came_before_it(
    bad: bytes, attached: bool
) -> None:
    """Once, whether it was there in time or not; and `receive` tells the same afterwards."""
    listener = Listener()
    async with upstream() as server, connected(server.url) as connection:
        if attached:
            connection.attach(listener)
        connection.data_received(b"\x81\x02ok" + bad + b"\x81\x02no")
        if not attached:
            connection.attach(listener)
        connection.abort()

        assert listener.messages == [b"ok"]
        assert listener.code in (1001, 1007, 1002)
        with pytest.raises(ConnectionLost) as caught:
            await connection.receive()
        assert caught.value.code == listener.code


async def test_a_sink_may_pause_and_leave_in_the_middle_of_a_read() -> None:
    """Reading goes on when it says so; what it did not take is there for `receive`."""

    class Leaving(Listener):
        """Pauses at once, and leaves."""

        def take_messages(self, messages: list[bytes]) -> None:
            super().take_messages(messages)
            connection.pause_reading()
            connection.detach()

    listener = Leaving()
    async with upstream() as server, connected(server.url) as connection:
        connection.attach(listener)
        connection.data_received(b"\x81\x02ok")
        assert connection.is_reading_paused
        await connection.send_message(b"echo")
        connection.resume_reading()

        assert await connection.receive() == [b"echo"]
        assert listener.messages == [b"ok"]


BAD_FRAMES = [
    b"\x81\x82\x00\x00\x00\x00hi",  # masked, as no server may
    b"\xc1\x02hi",  # compressed, though nothing was agreed
    b"\x83\x00",  # an opcode that does not exist
    b"\x81\xff",  # masked, and long
]


@pytest.mark.parametrize("bad", BAD_FRAMES)
async def test_what_comes_before_a_bad_frame_is_received_first(bad: bytes) -> None:
    """The library judges what is not cut; whole messages before it are not lost."""
    async with upstream() as server, connected(server.url) as connection:
        connection.data_received(b"\x81\x02ok" + bad)
        messages, code = await receive_all(connection)

    assert messages == [b"ok"]
    assert code == 1002


@pytest.mark.parametrize("part", [b"\x81", b"\x81\x05he", b"\x81\x7e\x00", b"\x81\x7f\x00"])
async def test_half_a_frame_is_not_quiet(part: bytes) -> None:
    """A connection whose next message has begun to arrive is no connection for another turn."""
    async with upstream() as server, connected(server.url) as connection:
        assert connection.is_quiet
        connection.data_received(part)

        assert not connection.is_quiet
