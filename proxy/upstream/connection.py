"""
One WebSocket connection to upstream.

The asyncio protocol itself is the permanent reader: whether a turn uses the connection or not,
pings are answered, closes noticed and bytes counted as life, with no task, queue or lock of ours.
`websockets` does the handshake, the framing and the control frames. What differs from its own
shell is where messages go:

    data_received --> frames --> complete messages --> a list, for `receive` to take whole
                                                  |-> `on_idle_message`, between turns
                                                  \\-> a sink, at once, once a turn streams

A streamed answer is thousands of small messages, and a socket read often brings dozens of them.
`receive` hands over all there are, so that they can become one write downstream; it waits for a
future only when there is none. Messages stay bytes, and nothing is parsed here.

What such a read mostly consists of, whole unfragmented text frames below 64 KiB, is cut from it
directly: a tenth of the cost of the library's parser, which never sees them. Everything else, from
the first byte that is not the beginning of such a frame, goes to the library; the cutting begins
again where its parser stands between two frames.

A `Sink` spares a streamed answer the way through a future and a task: it is called from within
`data_received`, may cut frames out of the read buffer itself, and is told where a read ends, so
that it can write once for each.

Back-pressure: beyond a high-water mark the transport stops reading until `receive` has taken what
is there. A sink pauses the reading itself. A message is never dropped.

All exceptions of sockets, TLS and `websockets` are turned into ours here, in `connect_error` and
by `ConnectionLost`.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import socket
import ssl
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import CLIENT, OPEN
from websockets.protocol import Protocol as Framing
from websockets.streams import StreamReader

from proxy.core.frames import LENGTH_IN_2_BYTES, WHOLE_TEXT
from proxy.core.pieces import keep
from proxy.errors import (
    ConnectionLost,
    OutOfResources,
    UpgradeRefused,
    UpstreamError,
    UpstreamUnreachable,
)
from proxy.upstream.dial import Connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from websockets.client import ClientProtocol
    from websockets.protocol import Event

_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_SLOWEST_UPLINK_BYTES_PER_S = 32 * 1024
_SHORT_READ_BYTES: Final = 2048
_WHOLE_TEXT_BYTE = bytes([WHOLE_TEXT])

# At DEBUG, `websockets` logs handshake headers, which are credentials, and frames, which are
# content. A level of its own keeps that so whatever the root logger is set to.
_quiet_logger = logging.getLogger("proxy.upstream.websockets")
_quiet_logger.setLevel(logging.WARNING)


def _stands_between_frames(parser: Any) -> bool:
    # The library's parser says where it stands only by where it is suspended: it waits for the
    # first byte of a frame in `at_eof`, for all others in `read_exact`.
    while parser.gi_yieldfrom is not None:
        parser = parser.gi_yieldfrom
    return parser.gi_code is StreamReader.at_eof.__code__


def _tells_its_place() -> bool:
    """Try whether the library's parser is as we know it; we know more than is promised."""
    try:
        framing = Framing(CLIENT, state=OPEN)
        places = [_stands_between_frames(framing.parser)]
        for part in (b"\x81", b"\x02o", b"k"):
            framing.receive_data(part)
            places.append(_stands_between_frames(framing.parser))
    except Exception:  # noqa: BLE001  whatever a new version may raise here
        return False
    return places == [True, False, False, True]


CUTS_FRAMES: Final = _tells_its_place()
"""Whether frames are cut from the read buffer. If not, the library parses them all."""


class Sink(Protocol):
    """
    Where the messages of a turn go directly. Called from within `data_received`.

    It may pause and resume the connection's reading, and detach itself.
    """

    def take_frames(self, data: bytes, position: int) -> int:
        """Take what it can of the whole text frames at `position`; return where it stopped."""

    def take_messages(self, messages: list[bytes]) -> None:
        """Take messages, at least one."""

    def end_read(self) -> None:
        """Take note that the socket has brought no more for now."""

    def end(self, code: int) -> None:
        """Take note that the connection has ended; it is detached already."""


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """How to open and run a connection. `user_agent` None sends none."""

    connect_timeout_s: float = 10.0
    close_timeout_s: float = 1.0
    max_event_bytes: int = 64 * 1024 * 1024
    high_water_bytes: int = 256 * 1024
    fragment_above_bytes: int = 1024 * 1024
    fragment_bytes: int = 256 * 1024
    user_agent: str | None = None


class UpstreamConnection(ClientConnection):
    """
    A connection that `open_connection` has opened.

    One task at a time may `receive`, and one may `send_message`. `last_inbound_at` is when the
    last byte came in, by `clock`.

    Between turns, set with `become_idle`, complete messages go to a callback, and so does the end
    of the connection.
    """

    def __init__(
        self,
        protocol: ClientProtocol,
        *,
        settings: ConnectionSettings,
        clock: Callable[[], float],
        **options: Any,
    ) -> None:
        super().__init__(protocol, **options)
        self._settings = settings
        self._clock = clock
        self.last_inbound_at = clock()
        self._messages: list[bytes] = []
        self._buffered_bytes = 0
        self._fragments: list[bytes] = []
        self._cut_off = b""
        self._fragments_are_text = True
        self._waiter: asyncio.Future[None] | None = None
        self._reading_paused = False
        self._ended_with: int | None = None
        self._close_timer: asyncio.TimerHandle | None = None
        self._sending = False
        self._upload_settles_at = 0.0
        self._is_between_frames = False
        # Whether whole frames may go to the sink, as the latest read has left things.
        self._is_steady = False
        self._sink: Sink | None = None
        self._on_idle_message: Callable[[bytes], None] | None = None
        self._on_end: Callable[[], None] | None = None

    def __repr__(self) -> str:
        state = "open" if self.is_open else f"ended with {self._ended_with}"
        return f"<UpstreamConnection {state}, {len(self._messages)} messages>"

    # What state it is in.

    @property
    def is_open(self) -> bool:
        """Whether a message may be sent. What has arrived may be received even when not."""
        return (
            self._ended_with is None
            and self.protocol.state is OPEN
            and not self.transport.is_closing()
        )

    @property
    def is_quiet(self) -> bool:
        """Whether there is no message here, not even the beginning of one."""
        return not (self._messages or self._fragments or self._cut_off) and (
            self._is_between_frames
        )

    @property
    def is_reading_paused(self) -> bool:
        """Whether back-pressure keeps us from seeing a pong."""
        return self._reading_paused

    def is_sending(self, now: float) -> bool:
        """
        Tell whether a ping may be queued behind a message of ours.

        After the last byte has left our hands, the kernel and the boxes on the way still hold
        some. On the slowest uplink allowed for, that takes this long to drain.
        """
        return self._sending or now < self._upload_settles_at

    # Sending.

    async def send_message(self, data: bytes) -> None:
        """
        Send one text message; return when the socket has taken (nearly) all of it.

        A long one leaves in fragments, so that pongs can go out in between (RFC 6455 §5.4): a
        peer that waits for a pong behind a long upload closes with 1011 instead.

        Raises:
            ConnectionLost: `sent` is False only if nothing of the message can have left. If it
                is True, `receive` may still have messages that say why.
        """
        if not self.is_open:
            raise ConnectionLost(self._close_code(), sent=False)
        self._sending = True
        try:
            if len(data) <= self._settings.fragment_above_bytes:
                self.protocol.send_text(data)
                await self._flush()
            else:
                await self._send_fragments(memoryview(data))
        finally:
            self._sending = False
            self._upload_settles_at = self._clock() + len(data) / _SLOWEST_UPLINK_BYTES_PER_S

    @property
    def unfragmented_bytes(self) -> int:
        """How long a message may be for `send_short_message`."""
        return self._settings.fragment_above_bytes

    def send_short_message(self, data: bytes) -> None:
        """
        Send one text message of at most `unfragmented_bytes` without waiting for the socket.

        The connection must be open: nobody else has run since it was found to be.

        Raises ConnectionLost as `send_message` does.
        """
        # What `protocol.send_text` and `send_data` do, without what a lone whole frame has no need
        # of: no extension was agreed on, and nothing waits to be written before it.
        try:
            self.transport.write(Frame(Opcode.TEXT, data).serialize(mask=True))
        except OSError as exc:
            raise ConnectionLost(self._close_code()) from exc
        self._upload_settles_at = self._clock() + len(data) / _SLOWEST_UPLINK_BYTES_PER_S

    async def _send_fragments(self, data: memoryview) -> None:
        size = self._settings.fragment_bytes
        for start in range(0, len(data), size):
            if not self.is_open:
                raise ConnectionLost(self._close_code())
            is_last = start + size >= len(data)
            if start == 0:
                self.protocol.send_text(data[:size], fin=is_last)
            else:
                self.protocol.send_continuation(data[start : start + size], fin=is_last)
            await self._flush()
            # A socket that takes everything would not let anybody else run before the end, and
            # a TLS transport shows that it was lost only once the loop has run.
            await asyncio.sleep(0)

    async def _flush(self) -> None:
        try:
            self.send_data()
            await self.drain()
        except OSError as exc:
            raise ConnectionLost(self._close_code()) from exc
        if not self.is_open:
            raise ConnectionLost(self._close_code())

    # Receiving.

    async def receive(self) -> list[bytes]:
        """
        Return all complete messages at hand, at least one, in order, as UTF-8.

        Nothing is lost when the wait is cancelled.

        Raises:
            ConnectionLost: the connection has ended, and all its messages were handed over.
        """
        assert self._sink is None, "the messages go to a sink"
        if not self._messages:
            if self._ended_with is None:
                await self._wait_for_message()
            if not self._messages:
                raise ConnectionLost(self._close_code())
        messages = self._take_all()
        self.resume_reading()
        return messages

    def _take_all(self) -> list[bytes]:
        messages, self._messages = self._messages, []
        self._buffered_bytes = 0
        return messages

    async def _wait_for_message(self) -> None:
        assert self._waiter is None, "only one task at a time may receive"
        self._waiter = self.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def attach(self, sink: Sink) -> None:
        """
        Hand messages to `sink` from here on.

        Messages that are here already are handed over at once, and so is an end that has come.
        """
        assert self._sink is None, "only one sink at a time"
        assert self._waiter is None, "somebody is waiting for messages"
        self._sink = sink
        self._is_steady = self._is_between_frames and self._may_cut()
        self.resume_reading()
        self._hand_over(sink)
        sink.end_read()
        if self._ended_with is not None:
            self._end_sink(self._ended_with)

    def detach(self) -> None:
        """Keep messages for `receive` from here on. May be repeated."""
        self._sink = None

    def _hand_over(self, sink: Sink) -> None:
        if self._messages:
            sink.take_messages(self._take_all())

    def _end_sink(self, code: int) -> None:
        if self._sink is not None:
            sink, self._sink = self._sink, None
            self._hand_over(sink)
            sink.end(code)

    def pause_reading(self) -> None:
        """Read no more from the socket, until `resume_reading`."""
        if not self._reading_paused and not self.transport.is_closing():
            self._reading_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Go on reading, if that was paused."""
        if self._reading_paused:
            self._reading_paused = False
            if self._ended_with is None:
                self.transport.resume_reading()

    # Between turns.

    def become_idle(self, on_message: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        """
        Hand messages to `on_message` from here on, and call `on_end` once if the connection ends.

        Messages that are here already are handed over at once, and so is an end that has come.
        Either callback may abort the connection.
        """
        messages = self._take_all()
        self._on_idle_message = on_message
        self._on_end = on_end
        for message in messages:
            on_message(message)
        if self._ended_with is not None:
            self._report_end()
        else:
            self.resume_reading()

    def become_busy(self) -> None:
        """Keep messages for `receive` from here on. The connection must be quiet."""
        assert self.is_quiet, "a message of another turn is in the buffer"
        self._on_idle_message = None
        self._on_end = None

    def send_keepalive(self) -> None:
        """Send a ping and return at once; its pong will show in `last_inbound_at`."""
        if self.is_open:
            self._send_ping()

    async def probe(self, timeout_s: float) -> bool:
        """Tell whether the peer answers a ping within `timeout_s`."""
        if not self.is_open:
            return False
        try:
            async with asyncio.timeout(timeout_s):
                await self._send_ping()
        except (TimeoutError, ConnectionClosed):
            return False
        return self.is_open

    def _send_ping(self) -> asyncio.Future[float]:
        payload = struct.pack("!Q", time.monotonic_ns())
        pong = self.loop.create_future()
        self.pending_pings[payload] = (pong, self.loop.time())
        self.protocol.send_ping(payload)
        self.send_data()
        return pong

    # Ending.

    def abort(self) -> None:
        """End the connection now, without a close frame; never waits, and may be repeated."""
        self._end()
        self.transport.abort()

    async def close_gently(self) -> None:
        """Say good-bye with a close frame and wait a moment for the peer's; then end."""
        try:
            async with asyncio.timeout(self._settings.close_timeout_s):
                await self.close()
        except TimeoutError:
            pass
        finally:
            self.abort()

    def _close_code(self) -> int:
        if self._ended_with is not None:
            return self._ended_with
        for close in (self.protocol.close_rcvd, self.protocol.close_sent):
            if close is not None:
                return int(close.code)
        return int(CloseCode.ABNORMAL_CLOSURE)

    def _end(self) -> None:
        if self._ended_with is not None:
            return
        self._ended_with = self._close_code()
        self._is_steady = False
        self._fragments.clear()
        self._wake()
        self._end_sink(self._ended_with)
        self._report_end()

    def _report_end(self) -> None:
        if self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            on_end()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # The asyncio protocol.

    def data_received(self, data: bytes) -> None:
        """Take what the socket has read."""
        self.last_inbound_at = self._clock()
        if self._cut_off:
            data, self._cut_off = self._cut_off + data, b""
        position, sink = 0, self._sink
        if sink is not None and self._is_steady:
            position = sink.take_frames(data, 0)
            if position == len(data):
                sink.end_read()
                return
        if self._is_between_frames and self._may_cut():
            data = self._take_whole_frames(data, position)
        if data:
            super().data_received(data)
            self._is_between_frames = not CUTS_FRAMES or _stands_between_frames(
                self.protocol.parser
            )
        self._is_steady = self._is_between_frames and self._may_cut()
        self._end_read()

    def _end_read(self) -> None:
        if (sink := self._sink) is not None:
            self._hand_over(sink)
            sink.end_read()
        if self.protocol.state is not OPEN and self.response is not None:
            self._finish_closing()
        elif self._messages:
            self._wake()
            if self._buffered_bytes > self._settings.high_water_bytes:
                self.pause_reading()

    def _may_cut(self) -> bool:
        return (
            CUTS_FRAMES
            and self.response is not None
            and self.protocol.state is OPEN
            and self._ended_with is None
            and not self._fragments
        )

    def _take_whole_frames(self, data: bytes, position: int) -> bytes:
        """
        Take the short text frames that stand at `position`; return what the library must read.

        The sink, if there is one, has taken what is before.
        """
        sink, before = self._sink, position
        if sink is None or len(data) - position < _SHORT_READ_BYTES:
            # So short a rest holds too few events alike for the sink to be better at cutting.
            position = self._cut(data, position, len(data))
        else:
            # What the sink leaves is taken by itself: a message that is not like the others.
            position = self._cut(data, position, 1)
            while before < position:
                self._hand_over(sink)
                before = sink.take_frames(data, position)
                position = self._cut(data, before, 1)
        if self._ended_with is not None:
            return b""
        rest = data[position:]
        if rest[:1] == _WHOLE_TEXT_BYTE and (len(rest) < 2 or rest[1] <= LENGTH_IN_2_BYTES):
            self._cut_off = rest
            return b""
        return rest

    def _cut(self, data: bytes, position: int, most: int) -> int:
        """Take up to `most` messages, from `position` on; return where the next one begins."""
        end = len(data)
        while most and end - position >= 2 and data[position] == WHOLE_TEXT:
            length, start = data[position + 1], position + 2
            if length >= LENGTH_IN_2_BYTES:
                if length > LENGTH_IN_2_BYTES or end - position < 4:
                    break
                length, start = data[start] << 8 | data[start + 1], start + 2
            if start + length > end:
                break
            position = start + length
            most -= 1
            self._take_message(data[start:position])
            if self._ended_with is not None:
                break
        return position

    def eof_received(self) -> None:
        """Take the end of what the socket will read."""
        super().eof_received()
        self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Take the end of the socket."""
        if self._close_timer is not None:
            self._close_timer.cancel()
        super().connection_lost(exc)
        self._end()

    def process_event(self, event: Event) -> None:
        """Take one frame, or the response to the handshake."""
        if self.response is None:
            super().process_event(event)
            return
        assert isinstance(event, Frame)
        if event.opcode is Opcode.TEXT and event.fin:
            self._take_message(bytes(event.data))
        elif event.opcode in {Opcode.TEXT, Opcode.CONT, Opcode.BINARY}:
            self._take_fragment(event)
        elif event.opcode is Opcode.PONG:
            self.acknowledge_pings(bytes(event.data))

    def _take_fragment(self, frame: Frame) -> None:
        if frame.opcode is Opcode.BINARY:
            self._fail(CloseCode.UNSUPPORTED_DATA, "only text messages are understood")
            return
        keep(self._fragments, bytes(frame.data))
        if frame.fin:
            message = b"".join(self._fragments)
            self._fragments.clear()
            self._take_message(message)

    def _take_message(self, message: bytes) -> None:
        if self._ended_with is not None:
            return  # aborted by what came before it in the same read
        if not message.isascii() and not _is_utf8(message):
            self._fail(CloseCode.INVALID_DATA, "a text message is not UTF-8")  # RFC 6455 §8.1
        elif self._on_idle_message is not None:
            self._on_idle_message(message)
        else:
            self._messages.append(message)
            self._buffered_bytes += len(message)

    def _fail(self, code: CloseCode, reason: str) -> None:
        if self.protocol.state is OPEN:
            self.protocol.fail(code, reason)
            self.send_data()
        self._end()

    def _finish_closing(self) -> None:
        """End, once a close frame was sent or received; drop the peer if it does not hang up."""
        self._end()
        if self._close_timer is None and not self.transport.is_closing():
            self._close_timer = self.loop.call_later(
                self._settings.close_timeout_s, self.transport.abort
            )


def _is_utf8(message: bytes) -> bool:
    try:
        message.decode()
    except UnicodeDecodeError:
        return False
    return True


async def open_connection(
    url: str,
    headers: Iterable[tuple[str, str]],
    settings: ConnectionSettings,
    ssl_context: ssl.SSLContext | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> UpstreamConnection:
    """
    Connect, upgrade, and return the connection. `ssl_context` goes with a `wss:` URL only.

    It may have ended again already, with or without a message: an upstream that accepts the
    upgrade and then declines is not one that can't be reached.

    A proxy is used if the environment names one. Nothing stays open when the wait is cancelled.

    Raises:
        UpgradeRefused: upstream answered the handshake with an HTTP status, redirects included.
        UpstreamUnreachable: no answer, or none that makes sense.
    """
    options: dict[str, Any] = {} if ssl_context is None else {"ssl": ssl_context}
    factory = functools.partial(UpstreamConnection, settings=settings, clock=clock)
    try:
        connection = await Connect(
            url,
            additional_headers=[(name, _as_latin1(value)) for name, value in headers],
            user_agent_header=settings.user_agent,
            compression=None,
            max_size=settings.max_event_bytes,
            write_limit=settings.fragment_bytes,
            ping_interval=None,
            open_timeout=settings.connect_timeout_s,
            close_timeout=settings.close_timeout_s,
            logger=_quiet_logger,
            create_connection=cast("type[ClientConnection]", factory),
            **options,
        )
    except (OSError, WebSocketException, ImportError, UnicodeError) as exc:
        raise connect_error(exc) from exc
    return cast("UpstreamConnection", connection)


def _as_latin1(value: str) -> str:
    # A header's bytes came in as UTF-8 with surrogates for what is not, and `websockets` writes
    # ISO-8859-1: this makes the bytes on the wire those that the client sent.
    return value.encode("utf-8", "surrogateescape").decode("iso-8859-1")


def connect_error(exc: Exception) -> UpstreamError:
    """
    Return our error for a failure to connect.

    Its message names the kind of failure and neither headers nor addresses. The headers of an
    `UpgradeRefused` have names in lower case; repeated ones are joined by a comma.
    """
    if isinstance(exc, InvalidStatus):
        joined: dict[str, str] = {}
        for name, value in exc.response.headers.raw_items():
            key = name.lower()
            joined[key] = f"{joined[key]}, {value}" if key in joined else value
        return UpgradeRefused(exc.response.status_code, joined, bytes(exc.response.body))
    if isinstance(exc, TimeoutError):
        return UpstreamUnreachable("connecting took too long")
    if isinstance(exc, socket.gaierror):
        return UpstreamUnreachable("the host name does not resolve")
    if isinstance(exc, ssl.SSLCertVerificationError):
        return UpstreamUnreachable(f"the certificate is not valid: {exc.verify_message}")
    if isinstance(exc, ssl.SSLError):
        return UpstreamUnreachable(f"TLS failed: {exc.reason}")
    if isinstance(exc, ConnectionRefusedError):
        return UpstreamUnreachable("connection refused")
    if isinstance(exc, OSError) and exc.errno in _OUT_OF_RESOURCES:
        return OutOfResources(f"nothing left to connect with: {errno.errorcode[exc.errno]}")
    if isinstance(exc, ImportError):
        return UpstreamUnreachable("a SOCKS proxy needs the package python-socks")
    return UpstreamUnreachable(f"the WebSocket handshake failed: {type(exc).__name__}")
