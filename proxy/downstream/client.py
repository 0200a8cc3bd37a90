"""
The connection to a client: read here as far as requests are plain turns, else by `aiohttp`.

Nearly all that a client sends is one kind of request, `POST /v1/responses` with a head of the
plainest form, and nearly all of these can be answered without waiting. Such a request is read,
carried out (`express`) and answered within the callbacks of this protocol. For every other one
there is `aiohttp`'s own protocol, made when it is first needed, which gets the very bytes:

    at rest --plain turn--> body --whole--> in line --> express --reply written--> at rest
       |                      |                            |
       | another request      | not whole                  | waiting needed
       v                      v                            v
     lent: aiohttp reads whole messages, and when it waits for the next, we are at rest again
       |
       v a byte out of place, an upgrade, a request that came too early
     given over: aiohttp has the connection for good

In line a turn waits only while the event loop has more turns than it should take in (`pace`).
While a message is whole and nothing follows it, either reader may have the next one: that is how a
request changes hands. Where we can't be sure of that, the connection is given over.

Deadlines: a head must be here within `header_timeout_s`, the next byte of a body within
`body_timeout_s`. A connection that rests for `idle_timeout_s` is closed.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from aiohttp.helpers import rfc822_formatted_time

from proxy.core.pieces import keep
from proxy.downstream.bodies import NO_BYTE, Body, Share, decode_at_once
from proxy.downstream.heads import END_OF_HEAD, HeadMemory
from proxy.downstream.record import CLIENT_CLOSED
from proxy.downstream.refusals import refuse
from proxy.errors import BodyTimeout, Overloaded, TurnwireError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiohttp import web

    from proxy.core.turn import Command
    from proxy.downstream.deadlines import LentProtocol
    from proxy.downstream.express import Express
    from proxy.downstream.heads import PlainHead
    from proxy.downstream.intake import Caller, Intake
    from proxy.downstream.server import Front

MAX_HEAD_BYTES: Final = 64 * 1024

TOO_SLOW: Final = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"

_BEGINNINGS: Final = tuple(
    b"POST %b%b " % (base, path)
    for base in (b"", b"/v1")
    for path in (b"/responses", b"/chat/completions")
)


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Deadlines in seconds, and limits, of a client's connection."""

    header_timeout_s: float
    body_timeout_s: float
    max_field_bytes: int
    max_body_bytes: int
    max_decoded_body_bytes: int
    idle_timeout_s: float = 3630.0  # longer than a proxy before us is likely to keep it


class ClientConnection(asyncio.Protocol):
    """
    The protocol of one client's connection.

    `lend` makes aiohttp's protocol. `on_end` is called once, when the connection is lost.
    """

    def __init__(
        self,
        front: Front,
        settings: ClientSettings,
        lend: Callable[[ClientConnection], LentProtocol],
        on_end: Callable[[ClientConnection], None],
    ) -> None:
        self.transport: asyncio.Transport = cast("asyncio.Transport", None)
        self.is_writing_paused = False
        self._front = front
        self._settings = settings
        self._make_lent = lend
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._lent: LentProtocol | None = None
        self._has_spoken = False
        self._is_given_over = False
        self._is_closing = False
        self._heads = HeadMemory(settings.max_field_bytes)
        self._latest: tuple[PlainHead | None, Caller | None] = (None, None)
        self._begun = b""  # a head that is not whole
        self._head = b""  # that of the turn under way, or of one whose body is not whole
        self._pieces: list[bytes] = []  # a body that is not whole
        self._missing_bytes = 0
        self._expected: tuple[PlainHead, Caller] | None = None
        self._share: Share | None = None
        self._in_line: tuple[PlainHead, Caller, bytes, float] | None = None
        self._intake: Intake | None = None
        self._turn: Express | None = None
        self._early = b""
        self._deadline: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._active_at = 0.0
        self._finished: asyncio.Future[None] | None = None

    @property
    def is_new(self) -> bool:
        """Whether the head of the first request is still awaited."""
        if self._is_given_over and self._lent is not None:
            return self._lent.is_new
        return not (self._has_spoken or self.transport.is_closing())

    @property
    def is_busy(self) -> bool:
        """Whether a turn is here, under way or waiting or as yet in part, and not with aiohttp."""
        return self._has_turn or self._missing_bytes > 0

    @property
    def _has_turn(self) -> bool:
        return self._turn is not None or self._in_line is not None

    @property
    def active_at(self) -> float:
        """When a turn was last under way here, or a part of one came in; a loop time."""
        return self._loop.time() if self.is_busy else self._active_at

    # The asyncio protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a head."""
        self.transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of everything."""
        self._stop_deadline()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._let_go()
        if self._lent is not None:
            self._lent.connection_lost(exc)
        self._note_end()
        self._on_end(self)

    def _let_go(self) -> None:
        """Let go of a turn, or a part of one: the client does not want it any more."""
        if self._turn is not None and self._intake is not None:
            self._intake.record.status = CLIENT_CLOSED
        self._in_line = None
        self._drop_turn()
        self._drop_share()

    def data_received(self, data: bytes) -> None:
        """Take what the socket has read."""
        if self._is_given_over:
            assert self._lent is not None
            self._lent.data_received(data)
            return
        try:
            self._take(data)
        except Exception:  # noqa: BLE001  a fault of ours is answered, as aiohttp would
            self.turn_failed()

    def _take(self, data: bytes) -> None:
        if self._has_turn or self.is_writing_paused:
            # Too early: it may be read when the reply is complete and has been taken. Of a client
            # that leaves we hear only while we read, so there has to be much before we don't.
            self._early += data
            if len(self._early) >= MAX_HEAD_BYTES:
                self.transport.pause_reading()
        elif self._missing_bytes:
            self._take_more(data)
        elif not self._is_closing:
            self._take_message(self._begun + data if self._begun else data)

    def eof_received(self) -> bool | None:
        """
        Take the end of what the client sends: the connection ends with it.

        That is when what was written has been taken, which may be never: nothing is held till then.
        """
        if self.is_busy:
            self._let_go()
        if self._lent is not None:
            self._lent.eof_received()
        return None

    def pause_writing(self) -> None:
        """Take note that the client does not take what there is."""
        self.is_writing_paused = True
        if self._lent is not None:
            self._lent.pause_writing()

    def resume_writing(self) -> None:
        """Take note that it does again."""
        self.is_writing_paused = False
        if self._lent is not None:
            self._lent.resume_writing()
        if self._turn is not None:
            self._turn.writing_resumed()
        elif self._early and self._in_line is None and not self.transport.is_closing():
            self._take_early()

    # What comes in.

    def _take_message(self, data: bytes) -> None:
        """Take the beginning of a message, of which nothing was looked at yet."""
        self._begun = b""
        if self._lent is not None:
            if not self._lent.is_at_rest:
                self._give_over(data)
                return
            self._drop_turn()  # aiohttp has answered it without us
        end = data.find(END_OF_HEAD) + len(END_OF_HEAD)
        if end < len(END_OF_HEAD):
            self._take_part_of_head(data)
            return
        self._has_spoken = True
        if self._deadline is not None:
            self._stop_deadline()
        head, length_bytes = self._heads.read(data[:end])
        missing_bytes = length_bytes - (len(data) - end)
        if head is None or missing_bytes < 0:
            self._give_over(data)
            return
        caller = self._caller(head) if length_bytes else None
        if caller is None or length_bytes > self._settings.max_body_bytes:
            self._lend_or_give_over(data, is_whole=missing_bytes == 0)
        elif missing_bytes == 0:
            self._head = data[:end]
            self._take_turn(head, caller, data[end:])
        elif (share := self._share_for(length_bytes, len(data) - end)) is not None:
            self._expected, self._share = (head, caller), share
            self._head, self._pieces = data[:end], [data[end:]]
            self._missing_bytes = missing_bytes
            self._active_at = self._loop.time()
            self._start_deadline(self._settings.body_timeout_s, self._see_whether_body_is_late)
        else:
            self._give_over(data)

    def _take_part_of_head(self, data: bytes) -> None:
        if len(data) >= MAX_HEAD_BYTES or not _may_be_a_turn(data):
            self._give_over(data)
            return
        self._begun = data
        if self._deadline is None:
            self._expect_head()

    def _caller(self, head: PlainHead) -> Caller | None:
        known, caller = self._latest
        if known is not head:
            caller = self._front.express_caller(head)
            self._latest = head, caller
        return caller

    def _share_for(self, body_bytes: int, here_bytes: int) -> Share | None:
        """
        Return a share of the budget for a body, if there is room for all of it.

        Only what is here is charged: whoever announced much and sent nothing would shut out others.
        """
        share = Share(self._front.budget)
        try:
            share.budget.check(body_bytes)
            share.charge(here_bytes)
        except Overloaded:
            return None
        return share

    def _take_more(self, data: bytes) -> None:
        """Take more of a body."""
        keep(self._pieces, data)
        self._missing_bytes -= len(data)
        has_room = self._share is not None and _has_charged(self._share, len(data))
        if has_room and self._missing_bytes > 0:
            self._active_at = self._loop.time()
            return
        self._stop_deadline()
        raw, expected, is_whole = b"".join(self._pieces), self._expected, not self._missing_bytes
        self._pieces, self._missing_bytes, self._expected = [], 0, None
        if expected is None or not (is_whole and has_room):
            self._drop_share()
            self._give_over(self._head + raw)  # which refuses it, if there is no room
        else:
            self._take_turn(*expected, raw)

    def _take_turn(self, head: PlainHead, caller: Caller, raw: bytes) -> None:
        """Take a turn that is here whole, and nothing after it."""
        if self._share is None:
            self._share = self._share_for(len(raw), len(raw))
        pace, now = self._front.pace, self._loop.time()
        if self._share is None:
            self._lend(self._head + raw)  # which refuses it
        elif pace.enter(len(raw)):
            self._begin_turn(head, caller, raw, now)
        else:
            self._in_line = head, caller, raw, now
            pace.wait_in_line(len(raw), self._begin_turn_in_line)

    def _begin_turn_in_line(self) -> None:
        """Begin the turn that has waited, unless its client has left."""
        turn, self._in_line = self._in_line, None
        if turn is None:
            return
        try:
            self._begin_turn(*turn)
        except Exception:  # noqa: BLE001  as in `data_received`
            self.turn_failed()

    def _begin_turn(self, head: PlainHead, caller: Caller, raw: bytes, read_at: float) -> None:
        share, body = self._share, self._body(head, raw)
        if share is None or body is None or not _holds_decoded(share, body):
            self._drop_share()
            self._lend_turn(raw)
            return
        self._share = None  # it goes with the body
        self._intake = self._front.take_in(caller, body, share, read_at)
        turn = self._turn = self._front.express(self, self._intake)
        if turn is None:
            self._lend_turn(raw)
        elif not turn.start():
            self.hand_over(turn, ())

    def _body(self, head: PlainHead, raw: bytes) -> Body | None:
        """Decode a body; None if that takes long, or if the body is to be refused."""
        if not head.encodings:
            return Body(raw, raw)
        limit = self._settings.max_decoded_body_bytes
        decoded = decode_at_once(raw, head.encodings, limit)
        return None if decoded is None else Body(raw, decoded)

    # What becomes of a turn: see `express.Client`.

    @property
    def is_last(self) -> bool:
        """Whether the connection ends with the reply under way."""
        return self._is_closing or self._front.is_draining()

    def hand_over(self, turn: Express, commands: Sequence[Command]) -> None:
        """Let the turn go on in a driver, which carries out `commands` first."""
        self._turn = None
        if self._intake is None:
            return
        self._intake.begun, self._intake.commands = turn, commands
        self._lend_turn(self._intake.body.raw)

    def _lend_turn(self, raw: bytes) -> None:
        """Let aiohttp see to the turn that was ours, and to what came too early."""
        self._lend(self._head + raw)
        if self._early:
            early, self._early = self._early, b""
            self._give_over(early)
            self.transport.resume_reading()
        self._note_end()  # as far as it is ours

    def turn_done(self) -> None:
        """Take note that the reply is complete, or cut off."""
        self._turn = None
        self._close_intake()
        self._active_at = self._loop.time()
        if self.transport.is_closing():
            return
        if self.is_last:
            self.transport.close()
        elif self._early and not self.is_writing_paused:
            self._take_early()
        elif self._idle_timer is None:
            self._see_whether_idle()

    def _take_early(self) -> None:
        """Take what came too early, now that its time has come."""
        early, self._early = self._early, b""
        self.transport.resume_reading()
        self.data_received(early)

    def turn_failed(self) -> None:
        """Take note that something of ours failed: within the handling of an exception."""
        self._front.log_failure()
        has_written = self._turn is not None and self._turn.has_written
        if self._intake is not None and not has_written:
            self._intake.record.status = 500
        if not has_written and not self.transport.is_closing():
            self.transport.write(_refusal_bytes(TurnwireError(FAILED)))
        self._drop_turn()
        self._drop_share()
        self.transport.close()

    def take_intake(self) -> Intake | None:
        """Take the turn that aiohttp was lent the connection for; its taker closes it."""
        intake, self._intake = self._intake, None
        return intake

    def _close_intake(self) -> None:
        intake, self._intake = self._intake, None
        if intake is not None:
            self._front.close(intake)

    def _drop_turn(self) -> None:
        """Let go of a turn that nobody will carry out any more."""
        if self._turn is not None:
            self._turn.abandon()
            self._turn = None
        elif self._intake is not None and self._intake.begun is not None:
            self._intake.begun.clean_up()
        self._close_intake()

    def _drop_share(self) -> None:
        share, self._share = self._share, None
        if share is not None:
            share.close()

    # aiohttp's side.

    def _lend_or_give_over(self, data: bytes, *, is_whole: bool) -> None:
        if is_whole:
            self._lend(data)
        else:
            self._give_over(data)

    def _lend(self, message: bytes) -> None:
        """Let aiohttp see to one whole message."""
        if self._lent is None:
            self._lent = self._make_lent(self)
            self._lent.connection_made(self.transport)
            if self.is_writing_paused:
                self._lent.pause_writing()
        self._lent.data_received(message)

    def _give_over(self, data: bytes) -> None:
        """Let aiohttp have the connection for good."""
        self._stop_deadline()
        self._is_given_over = True
        self._lend(data)

    # Deadlines.

    def _start_deadline(self, after_s: float, then: Callable[[], None]) -> None:
        self._deadline = self._loop.call_later(after_s, then)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expect_head(self) -> None:
        self._start_deadline(self._settings.header_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._deadline = None
        if self._begun:
            self.transport.write(TOO_SLOW)
        self.transport.close()

    def _see_whether_body_is_late(self) -> None:
        """Look again when the next byte may have been waited for too long."""
        timeout_s = self._settings.body_timeout_s
        left_s = self._active_at + timeout_s - self._loop.time()
        if left_s > 0:
            self._start_deadline(left_s, self._see_whether_body_is_late)
            return
        self._deadline = None
        error = BodyTimeout(NO_BYTE.format(timeout_s))
        self.transport.write(_refusal_bytes(error))
        self.transport.close()

    def _see_whether_idle(self) -> None:
        """Close the connection if it has rested for long; look again when it may have."""
        now, timeout_s = self._loop.time(), self._settings.idle_timeout_s
        self._idle_timer = None
        if self._is_given_over or self.transport.is_closing():
            return
        rests = not self._has_turn and (self._lent is None or self._lent.is_at_rest)
        if not rests:
            self._active_at = now
        if now >= self._active_at + timeout_s:
            self.transport.close()
            return
        self._idle_timer = self._loop.call_at(self._active_at + timeout_s, self._see_whether_idle)

    # The end.

    def close_when_at_rest(self) -> None:
        """Take no more requests; close when the reply under way, if there is one, is complete."""
        self._is_closing = True
        if not self.is_busy and (self._lent is None or self._lent.is_at_rest):
            self.transport.close()

    async def finish(self, timeout_s: float | None) -> None:
        """
        Wait until no turn is under way here and its reply has been taken; then, cut off the rest.

        Nothing is cut off before `timeout_s`.
        """
        if not (self.is_busy or self.transport.get_write_buffer_size()):
            return
        self._finished = self._loop.create_future()
        await asyncio.wait([self._finished], timeout=timeout_s)
        if not self._finished.done():
            self.transport.abort()

    def _note_end(self) -> None:
        if self._finished is not None and not self._finished.done():
            self._finished.set_result(None)


def handed_over(request: web.Request) -> Intake | None:
    """Return the turn that a request was lent to aiohttp with, if there is one."""
    client: ClientConnection | None = getattr(request.protocol, "client", None)
    intake = None if client is None else client.take_intake()
    if intake is not None:
        # aiohttp has read the body as well, and reads no more until somebody takes it.
        request.content.read_nowait()
    return intake


def _holds_decoded(share: Share, body: Body) -> bool:
    """Charge for what decoding has added; False if there is no room for it."""
    return body.decoded is body.raw or _has_charged(share, len(body.decoded))


def _has_charged(share: Share, more_bytes: int) -> bool:
    """Charge, and tell whether there was room."""
    try:
        share.charge(more_bytes)
    except Overloaded:
        return False
    return True


def _may_be_a_turn(data: bytes) -> bool:
    return any(data.startswith(known[: len(data)]) for known in _BEGINNINGS)


def _refusal_bytes(error: TurnwireError) -> bytes:
    reply = refuse(error)
    body = reply.body if isinstance(reply.body, bytes) else b""
    fields = "".join(f"{name}: {value}\r\n" for name, value in reply.headers.items())
    return (
        f"HTTP/1.1 {reply.status} {reply.reason}\r\n{fields}Content-Length: {len(body)}\r\n"
        f"Date: {rfc822_formatted_time()}\r\nConnection: close\r\n\r\n"
    ).encode() + body


FAILED: Final = "Turnwire failed; its log says where"
