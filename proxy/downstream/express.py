"""
Carries out a turn from within callbacks: the way of nearly every turn.

    client's data_received --> plan, lease, send            (`start`, called once)
    upstream's data_received --> ReplyReader --> one write  (`Express` is the connection's sink)

No task runs, and nothing is awaited. That is right as long as nothing has to be waited for: the
connection that the turn needs is open, idle and fresh, the message is short, and upstream answers
as it should. Wherever that is not so, before the reply's first byte, the turn goes on as it
stands in a `Driver`, which can wait: `start` returns False, or `Client.hand_over` is called with
the commands that `core.turn` gave. After the first byte there is nothing left to wait for, and a
reply that can't be completed is broken off here.

Back-pressure: when the client's transport says that its buffer is above the mark, the upstream
connection reads no more until it has drained. Deadlines are watched by one timer for all turns.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Protocol

from aiohttp.helpers import rfc822_formatted_time

from proxy.core import turn as t
from proxy.core.reply import KEEPALIVE_COMMENT, Kind, ProtocolFault, State
from proxy.downstream.carrier import Carrier, reply_headers
from proxy.downstream.stream import chunk, ending
from proxy.errors import ConnectionLost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.core.reasons import Mode, Reason
    from proxy.downstream.carrier import Reader, Services
    from proxy.downstream.intake import Intake
    from proxy.upstream.connection import UpstreamConnection
    from proxy.upstream.pool import Lease

_LAST_CHUNK: Final = b"0\r\n\r\n"


class Client(Protocol):
    """The connection to the client, as a turn sees it."""

    transport: asyncio.Transport
    is_writing_paused: bool

    @property
    def is_last(self) -> bool:
        """Whether the connection ends with the reply under way."""

    def hand_over(self, turn: Express, commands: Sequence[t.Command]) -> None:
        """Let the turn go on in a driver, which carries out `commands` first."""

    def turn_done(self) -> None:
        """Take note that the reply is complete, or cut off."""

    def turn_failed(self) -> None:
        """Take note that something of ours failed: within the handling of an exception."""


class DeadlineWatch:
    """Looks at all turns under way a few times a second, for what they have waited for too long."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._turns: set[Express] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, turn: Express) -> None:
        """Watch a turn until it is discarded."""
        self._turns.add(turn)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._look)

    def discard(self, turn: Express) -> None:
        """Watch a turn no longer."""
        self._turns.discard(turn)

    def _look(self) -> None:
        self._timer = None
        for turn in list(self._turns):
            turn.check_time()
        if self._turns:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._look)


class Express(Carrier):
    """
    One turn under way. Call `start` once.

    It is the sink of its upstream connection from then on, until `Client.turn_done` or
    `Client.hand_over` was called, or `abandon`.
    """

    def __init__(
        self, services: Services, deadlines: DeadlineWatch, client: Client, intake: Intake
    ) -> None:
        super().__init__(services, intake)
        self.intake = intake
        self._deadlines = deadlines
        self._client = client
        self._connection: UpstreamConnection | None = None
        self._pieces: list[bytes] = []
        self._has_begun = False
        self._has_head = False
        self._has_heard = False
        self._is_full = False
        self._is_over = False
        self._is_broken = False
        # The reader, once its events go out as they come in.
        self._flowing: Reader | None = None
        self._heard_at = self._commented_at = 0.0

    @property
    def has_written(self) -> bool:
        """Whether the reply's first byte was written."""
        return self._has_head

    def start(self) -> bool:
        """Send the turn; False means that this would take waiting, and that nothing was done."""
        lease = self._services.pool.take(self._principal, self._want())
        if lease is None:
            return False
        self.turn.start()
        commands = self.turn.handle(self._hold(lease))
        message = b""
        if isinstance(commands[0], t.SendDelta | t.SendFull | t.SendAsIs):
            message = self._message(commands[0])
        if not message or len(message) > lease.connection.unfragmented_bytes:
            self._client.hand_over(self, commands)
        else:
            self._send(message, lease)
        return True

    def abandon(self) -> None:
        """Let go of everything: the client has left, or something of ours failed."""
        self._stop()
        self.clean_up()

    def _send(self, message: bytes, lease: Lease) -> None:
        self._new_reader(lease)
        self._note_sending(message)
        self._heard_at = self.sent_at or 0.0
        self._connection = lease.connection
        self._deadlines.add(self)
        try:
            lease.connection.send_short_message(message)
        except ConnectionLost as lost:
            if not lost.sent:
                self._hand_over(t.ConnectionClosed(lost.code, lost.sent))
                return
            # What upstream said before it closed may have arrived: the reader comes to the end.
        self._request.prepare()
        lease.connection.attach(self)

    def _hand_over(self, event: t.Event) -> None:
        """Let a driver do what is to be done now; the reply's first byte is not written yet."""
        self._stop()
        self._client.hand_over(self, self.turn.handle(event))

    def _stop(self) -> None:
        self._is_over = True
        self._deadlines.discard(self)
        if self._connection is not None:
            self._connection.detach()

    # The connection's side: see `Sink`.

    def take_frames(self, data: bytes, position: int) -> int:
        """Take what the reader can cut out by itself."""
        if self._is_over or self._is_broken or self._reader is None:
            return position
        try:
            written, end = self._reader.feed_frames(data, position)
        except Exception:  # noqa: BLE001  it must not end the connection's own reading
            self._client.turn_failed()
            return position
        if end > position:
            self._has_heard = True
            self._pieces += written
        return end

    def take_messages(self, messages: list[bytes]) -> None:
        """Take messages of any kind."""
        if self._is_over or self._is_broken or self._reader is None:
            return
        self._has_heard = True
        try:
            written = self._reader.feed(messages)
        except ProtocolFault as fault:
            if fault.written:
                self._pieces.append(fault.written)
            self._is_broken = True
        except Exception:  # noqa: BLE001  as above
            self._client.turn_failed()
        else:
            if written:
                self._pieces.append(written)

    def end_read(self) -> None:
        """Write what the read has brought."""
        if self._is_over:
            return
        try:
            if self._has_heard:
                self._has_heard = False
                self._heard_at = self._loop.time()
            if self._flowing is None or self._flowing.terminal is not None or self._is_broken:
                self._advance()
            elif self._pieces:
                self._write_events()
        except Exception:  # noqa: BLE001  as above
            self._client.turn_failed()

    def _advance(self) -> None:
        reader = self._reader
        if self._is_broken:
            self._fail(t.Broken())
            return
        if reader is None or reader.state is State.WAITING:
            return
        if reader.refusal is not None and not reader.begun:
            self._hand_over(t.Refused(reader.refusal))
            return
        if not self._has_begun:
            self._begin()
        if reader.terminal is not None:
            self._end(reader)
        elif self._pieces:
            self._write_events()

    def end(self, code: int) -> None:
        """Take the end of the connection, which is also that of the answer."""
        if self._is_over:
            return
        self.end_read()
        if self._is_over:
            return
        try:
            self._fail(t.ConnectionClosed(code))
        except Exception:  # noqa: BLE001  as above
            self._client.turn_failed()

    def _begin(self) -> None:
        self._has_begun = True
        self.first_event_at = self._heard_at
        self.turn.handle(t.Begun())  # what it says, to relay, is what we do

    # The client's side.

    @property
    def _streams(self) -> bool:
        return self._request.envelope.stream

    def _end(self, reader: Reader) -> None:
        """Write the last bytes, then settle: the client can't be heard in between."""
        outcome = ending(reader)
        if not self._streams and reader.terminal is Kind.ERROR:
            self._hand_over(outcome)
            return
        self._stop()
        try:
            if not self._streams:
                self._write_whole(reader.response)
            elif reader.terminal is Kind.ERROR:
                self._write_chunk()
            else:
                self._write_chunk(_LAST_CHUNK)
        finally:
            for command in self.turn.handle(outcome):
                self._settle(command)
            self.clean_up()
        if self._streams and reader.terminal is Kind.ERROR:
            self._client.transport.close()  # before the last chunk: no client takes it for the end
        self._client.turn_done()

    def _fail(self, event: t.Event) -> None:
        """End a turn that upstream does not complete."""
        if not self._has_begun and self._reader is not None and self._reader.begun:
            self._begin()
        if not self._has_begun or not self._streams:
            self._hand_over(event)
            return
        self._stop()
        try:
            for command in self.turn.handle(event):
                if isinstance(command, t.BreakReply):
                    self._break(command)
                else:
                    self._settle(command)
        finally:
            self.clean_up()
        self._client.turn_done()

    def _break(self, command: t.BreakReply) -> None:
        if self._services.tells_lost_upstream and self._reader is not None:
            self._pieces.append(self._reader.error_event(command.code, command.message))
        self._write_chunk()
        self._client.transport.close()

    def _write_events(self) -> None:
        transport = self._client.transport
        if transport.is_closing():
            return  # the client's side will tell, or has told
        if self._flowing is None:
            self._write_chunk()
            self._flowing = self._reader
        else:
            pieces, self._pieces = self._pieces, []
            transport.write(chunk(pieces))
        if self._client.is_writing_paused and self._connection is not None:
            self._is_full = True
            self._connection.pause_reading()

    def writing_resumed(self) -> None:
        """Go on: the client has taken what there was."""
        if self._is_full and self._connection is not None:
            self._is_full = False
            self._heard_at = self._loop.time()
            self._connection.resume_reading()

    def _write_chunk(self, last: bytes = b"") -> None:
        """Write what is here as one chunk, after the head if that was not written yet."""
        pieces, self._pieces = self._pieces, []
        size = sum(map(len, pieces))
        parts = [b"%x\r\n" % size, *pieces, b"\r\n", last] if size else [last]
        if not self._has_head:
            self._has_head = True
            parts.insert(0, self._head("text/event-stream; charset=utf-8", _CHUNKED))
        self._client.transport.write(b"".join(parts))

    def _write_whole(self, body: bytes) -> None:
        self._has_head = True
        length = b"Content-Length: %d\r\n" % len(body)
        self._client.transport.write(self._head("application/json", length) + body)

    def _head(self, content_type: str, framing: bytes) -> bytes:
        before, after = _head_parts(self.turn.mode, self.turn.reason, content_type)
        self.intake.record.status = 200
        date = rfc822_formatted_time().encode()
        return b"%b%b%b%b%bDate: %b\r\n\r\n" % (
            before,
            self._request_id.encode(),
            after,
            framing,
            b"Connection: close\r\n" if self._client.is_last else b"",
            date,
        )

    # The clock.

    def check_time(self) -> None:
        """Act on a silence that has lasted long enough."""
        if self._is_over:
            return
        try:
            self._check_time()
        except Exception:  # noqa: BLE001  others are looked at after this one
            self._client.turn_failed()

    def _check_time(self) -> None:
        timing, now = self._services.timing, self._loop.time()
        if self._is_full:
            self._heard_at = now  # upstream is not to blame
        silent_s = now - self._heard_at
        if not self._has_begun:
            is_at_work = self._reader is not None and self._reader.accepted
            if silent_s >= (
                timing.silence_timeout_s if is_at_work else timing.first_event_timeout_s
            ):
                self._hand_over(t.Silent())
        elif silent_s >= timing.silence_timeout_s:
            self._fail(t.Silent())
        elif self._streams and now >= self._comment_due_at():
            self._commented_at = now
            self._pieces.append(KEEPALIVE_COMMENT)
            self._write_events()

    def _comment_due_at(self) -> float:
        return max(self._heard_at, self._commented_at) + self._services.timing.keepalive_s


_CHUNKED: Final = b"Transfer-Encoding: chunked\r\n"


@lru_cache(maxsize=64)
def _head_parts(mode: Mode, reason: Reason, content_type: str) -> tuple[bytes, bytes]:
    """Return the head of a reply, before and after the request's id."""
    mark = "\0"
    fields = reply_headers(mode, reason, mark, content_type)
    lines = ["HTTP/1.1 200 OK", *(f"{name}: {value}" for name, value in fields.items()), ""]
    before, _, after = "\r\n".join(lines).partition(mark)
    return before.encode(), after.encode()
