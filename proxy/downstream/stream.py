"""
A streamed answer on its shortest way: from the read of one socket into the write of another.

    upstream's data_received --> ReplyReader --> one chunk --> the client's transport

No task runs for an event. The driver's task sleeps from the first event to the last and is woken
only for what needs a decision: the end of the answer, a fault, a silence, a client whose buffers
are full. All that one read of the upstream socket brings leaves in one write.

Back-pressure: when the client's transport says that its buffer is above the mark, the upstream
connection reads no more until it has drained. What can pile up is that buffer and one read.

aiohttp writes the head, the first events and the end of the reply; what lies between is written
past its writer, to the transport, as chunks in the same form (RFC 9112 section 7.1). That relies
on more than aiohttp promises, so `WRITES_DIRECTLY` is tried out when this module is imported; if
it is false, or the reply is not chunked, the driver takes the way of its public functions instead.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from aiohttp import ClientConnectionResetError, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_writer import StreamWriter
from multidict import CIMultiDict

from proxy.core import turn as t
from proxy.core.reply import KEEPALIVE_COMMENT, Kind, ProtocolFault, State
from proxy.errors import ConnectionLost

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from aiohttp.abc import AbstractStreamWriter

    from proxy.core.chat_reply import ChatReplyReader
    from proxy.core.reply import ReplyReader
    from proxy.upstream.connection import UpstreamConnection


class HeldResponse(web.StreamResponse):
    """A streamed reply whose head is held back, to leave in one write with the first events."""

    _send_headers_immediately = False


def chunk(pieces: list[bytes]) -> bytes:
    """Write data, of one byte at least, as one chunk of a chunked body."""
    return b"".join((b"%x\r\n" % sum(map(len, pieces)), *pieces, b"\r\n"))


class _Recorder:
    """What an aiohttp writer needs of a protocol and a transport; keeps what is written."""

    def __init__(self) -> None:
        self.transport = self
        self._paused = False
        self.written: list[bytes] = []

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.written.append(bytes(data))

    def writelines(self, parts: list[bytes]) -> None:
        self.written.append(b"".join(parts))


def _writes_as_we_know_it() -> bool:
    """Try whether aiohttp's writer writes at once, and chunks as `chunk` does."""

    def run(step: Coroutine[Any, Any, None]) -> None:
        try:
            step.send(None)
        except StopIteration:
            return
        step.close()
        raise RuntimeError("it waits")

    recorder: Any = _Recorder()
    try:
        writer = StreamWriter(recorder, recorder)
        writer.enable_chunking()
        run(writer.write_headers("HTTP/1.1 200 OK", CIMultiDict()))
        run(writer.write(b"first"))
        run(writer.write(b"more"))
        run(writer.write_eof(b"last"))
        tells_pauses = isinstance(BaseProtocol.writing_paused, property)
    except Exception:  # noqa: BLE001  whatever a new version may raise here
        return False
    head, *rest = recorder.written
    return (
        tells_pauses
        and writer.chunked
        and head.endswith(b"\r\n\r\n" + chunk([b"first"]))
        and rest == [chunk([b"more"]), chunk([b"last"]) + b"0\r\n\r\n"]
    )


WRITES_DIRECTLY: Final = _writes_as_we_know_it()
"""Whether events may be written past aiohttp's writer."""


def can_write_directly(writer: AbstractStreamWriter | None) -> bool:
    """Tell whether a prepared reply is one that an `EventStream` can go on with."""
    return WRITES_DIRECTLY and type(writer) is StreamWriter and writer.chunked


class Opening:
    """
    Waits for the read that brings the first event of an answer, or a refusal; call `run` once.

    That read may bring thousands of events more, so it is cut and encoded as all later ones are.
    It is the sink of the connection until then. `on_accepted` is called at every read that brings
    something of the answer, but nothing to show.
    """

    def __init__(
        self,
        connection: UpstreamConnection,
        reader: ReplyReader | ChatReplyReader,
        on_accepted: Callable[[], None] = lambda: None,
    ) -> None:
        self._connection = connection
        self._reader = reader
        self._on_accepted = on_accepted
        self._pieces: list[bytes] = []
        self._fault: ProtocolFault | None = None
        self._ended_with: int | None = None
        self._is_over = asyncio.Event()

    async def run(self) -> bytes:
        """
        Return the SSE bytes of what the read brought. May be cancelled.

        Raises:
            ConnectionLost: the connection has ended without either.
            ProtocolFault: something in that read belongs to no answer.
        """
        try:
            self._connection.attach(self)
            await self._is_over.wait()
        finally:
            self._connection.detach()
        if self._fault is not None:
            raise self._fault
        if self._ended_with is not None:
            raise ConnectionLost(self._ended_with)
        return b"".join(self._pieces)

    def take_frames(self, data: bytes, position: int) -> int:
        """Take what the reader can cut out by itself."""
        if self._fault is not None:
            return position
        written, end = self._reader.feed_frames(data, position)
        self._pieces += written
        return end

    def take_messages(self, messages: list[bytes]) -> None:
        """Take messages of any kind."""
        if self._fault is not None:
            return
        try:
            self._pieces.append(self._reader.feed(messages))
        except ProtocolFault as fault:
            self._fault = fault

    def end_read(self) -> None:
        """See whether there is an answer now."""
        if self._fault is not None or self._reader.state is not State.WAITING:
            self._connection.detach()
            self._is_over.set()
        elif self._reader.accepted:
            self._on_accepted()

    def end(self, code: int) -> None:
        """Take the end of the connection."""
        if self._reader.state is State.WAITING:
            self._ended_with = code
        self._is_over.set()


class EventStream:
    """
    Relays the events of one answer, from the second write of the reply to the last but one.

    Call `run` once. After it `unwritten` are the bytes that are still to be written: those of the
    last read, so that they can leave together with what ends the reply.

    It is the sink of the connection while it runs.
    """

    def __init__(
        self,
        connection: UpstreamConnection,
        reader: ReplyReader | ChatReplyReader,
        request: web.Request,
        writer: AbstractStreamWriter,
        *,
        keepalive_s: float,
        silence_timeout_s: float,
    ) -> None:
        transport = request.transport
        if transport is None:
            raise _client_gone()
        self._connection = connection
        self._reader = reader
        self._transport = transport
        self._protocol = request.protocol
        self._writer = writer
        self._keepalive_s = keepalive_s
        self._silence_timeout_s = silence_timeout_s
        self._loop = asyncio.get_running_loop()
        self._pieces: list[bytes] = []
        self._outcome: t.Event | None = None
        self._news = asyncio.Event()
        self._is_full = False
        self._has_heard = False
        self._heard_at = self._commented_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def unwritten(self) -> bytes:
        """What is still to be written."""
        return b"".join(self._pieces)

    async def run(self) -> t.Event:
        """
        Relay until the answer ends, one way or another; return how, as the turn calls it.

        Raises ClientConnectionResetError if the client has left. May be cancelled anywhere.
        """
        try:
            self._connection.attach(self)
            self._watch()
            while self._outcome is None:
                await self._news.wait()
                self._news.clear()
                if self._is_full:
                    await self._drain()
        finally:
            self._connection.detach()
            if self._timer is not None:
                self._timer.cancel()
        if isinstance(self._outcome, t.DownstreamClosed):
            await asyncio.sleep(0)  # aiohttp, if it knows as well, cancels us here
            raise _client_gone()
        return self._outcome

    def _end_with(self, outcome: t.Event) -> None:
        if self._outcome is None:
            self._outcome = outcome
            self._connection.detach()
            self._news.set()

    # The connection's side: see `Sink`.

    def take_frames(self, data: bytes, position: int) -> int:
        """Take what the reader can cut out by itself."""
        if self._outcome is not None:
            return position
        written, end = self._reader.feed_frames(data, position)
        if end > position:
            self._has_heard = True
        self._pieces += written
        return end

    def take_messages(self, messages: list[bytes]) -> None:
        """Take messages of any kind."""
        if self._outcome is not None:
            return
        self._has_heard = True
        try:
            written = self._reader.feed(messages)
        except ProtocolFault as fault:
            written = fault.written
            self._end_with(t.Broken())
        if written:
            self._pieces.append(written)

    def end_read(self) -> None:
        """Write what the read has brought, unless it has brought the end."""
        if self._has_heard:
            self._has_heard = False
            self._heard_at = self._loop.time()
        if self._reader.terminal is not None:
            self._end_with(ending(self._reader))
        elif self._pieces and self._outcome is None:
            self._write(self._pieces)
            self._pieces = []

    def end(self, code: int) -> None:
        """Take the end of the connection, which is also that of the answer."""
        completed = self._reader.terminal is not None
        self._end_with(ending(self._reader) if completed else t.ConnectionClosed(code))

    # The client's side.

    def _write(self, pieces: list[bytes]) -> None:
        if self._transport.is_closing():
            self._end_with(t.DownstreamClosed())
            return
        self._transport.write(chunk(pieces))
        if self._protocol.writing_paused:
            self._is_full = True
            self._connection.pause_reading()
            self._news.set()

    async def _drain(self) -> None:
        await self._writer.drain()
        self._is_full = False
        self._heard_at = self._loop.time()
        if self._outcome is None:
            self._connection.resume_reading()

    # The clock.

    def _watch(self) -> None:
        """
        Act on a silence that has lasted long enough, and look again when the next one may have.

        A message in between moves no timer: it only lets the next look find less of a silence.
        While the client does not take what there is, upstream is not to blame.
        """
        now = self._loop.time()
        if self._is_full:
            self._heard_at = now
        gives_up_at = self._heard_at + self._silence_timeout_s
        if now >= gives_up_at:
            self._end_with(t.Silent())
        elif now >= self._comment_due_at():
            self._commented_at = now
            self._write([KEEPALIVE_COMMENT])
        if self._outcome is None:
            due_at = min(self._comment_due_at(), gives_up_at)
            self._timer = self._loop.call_at(due_at, self._watch)

    def _comment_due_at(self) -> float:
        return max(self._heard_at, self._commented_at) + self._keepalive_s


def ending(reader: ReplyReader | ChatReplyReader) -> t.Event:
    """Return how an answer ended, as the turn calls it."""
    match reader.terminal:
        case Kind.COMPLETED:
            return t.Completed(clean=not reader.dirty)
        case Kind.ERROR:
            return t.Erred()
    return t.Ended(clean=not reader.dirty)


def _client_gone() -> ClientConnectionResetError:
    return ClientConnectionResetError("the client's connection is closing")
