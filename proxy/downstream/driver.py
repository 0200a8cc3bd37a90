"""
Carries out one turn, waiting for whatever it takes.

The machine says what to do, the driver does it and reports what came of it, until the turn is
closed. Nothing is decided here. Between the commit point and the end of the answer `stream` moves
the bytes of a streamed reply; where it can't, and for a reply that is not streamed, a loop does:
all messages at hand become one write, and the loop reads no further while the client's side is
full. Either way a slow client slows the upstream connection down and nothing piles up.

A reply's head leaves with the first events, and the last events with what ends the reply: a short
answer, which one read brings whole, is one write.

Whatever happens, a cancellation included, the lease is given back exactly once: `clean_up` runs
the machine's own clean-up without awaiting.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web
from multidict import CIMultiDict

from proxy.core import turn as t
from proxy.core.reasons import Mode, Reason
from proxy.core.reply import KEEPALIVE_COMMENT, Kind, ProtocolFault
from proxy.core.verdicts import (
    HttpReply,
    http_reply,
    parse_upgrade_refusal,
    unavailable_reply,
)
from proxy.downstream import stream
from proxy.downstream.carrier import Carrier, mode_headers, reply_headers
from proxy.downstream.refusals import refuse
from proxy.errors import ConnectionLost, LeaseRefused, UpgradeRefused, UpstreamError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.downstream.carrier import Reader, Services
    from proxy.downstream.intake import Intake
    from proxy.upstream.connection import UpstreamConnection
    from proxy.upstream.pool import Lease


class Driver(Carrier):
    """
    One turn under way. Call `run` once; then the attributes tell how it went.

    Where another carrier has begun the turn, it goes on from there.
    """

    def __init__(self, services: Services, request: web.Request, intake: Intake) -> None:
        super().__init__(services, intake)
        self._http = request
        self._commands = intake.commands
        self._unwritten = b""
        self._response: web.StreamResponse | None = None

    async def run(self) -> web.StreamResponse:
        """Carry the turn out to its end and return the reply, written as far as it goes."""
        commands = self._commands or self.turn.start()
        try:
            while True:
                event = await self._carry_out(commands)
                if event is None:
                    return await self._finish()
                commands = self.turn.handle(event)
        except BaseException:
            self.clean_up()
            raise

    async def _carry_out(self, commands: Sequence[t.Command]) -> t.Event | None:
        """Carry out commands in order; return what came of the last one, None at the end."""
        event: t.Event | None = None
        for command in commands:
            match command:
                case t.AcquireLease(fresh):
                    event = await self._acquire(fresh=fresh)
                case t.SendDelta() | t.SendFull() | t.SendAsIs():
                    event = await self._send(self._message(command))
                case t.Relay():
                    event = await self._relay()
                case t.PassThrough(reason):
                    self._response = await self._pass_through(reason)
                case t.Refuse(reply):
                    self._response = self._plain_reply(reply)
                case t.BreakReply(code, message):
                    self._response = await self._break_reply(code, message)
                case t.RecordHead():
                    self._record_head_soon()
                case _:
                    self._settle(command)
        return event

    async def _acquire(self, *, fresh: bool) -> t.Event:
        try:
            lease = await self._services.pool.acquire(self._principal, self._want(), fresh=fresh)
        except LeaseRefused as refused:
            return t.LeaseFailed(Reason[refused.reason.upper()], _reply_to_upgrade(refused.cause))
        return self._hold(lease)

    async def _send(self, message: bytes) -> t.Event:
        lease = self._held_lease()
        reader = self._new_reader(lease)
        self._note_sending(message)
        try:
            await self._hand_over(message, lease)
            self._request.prepare()
            async with asyncio.timeout(self._services.timing.first_event_timeout_s) as deadline:
                return await self._first_event(reader, deadline)
        except ConnectionLost as lost:
            return t.ConnectionClosed(lost.code, lost.sent)
        except TimeoutError:
            return t.Silent()
        except ProtocolFault:
            return t.Broken()

    @staticmethod
    async def _hand_over(message: bytes, lease: Lease) -> None:
        try:
            await lease.connection.send_message(message)
        except ConnectionLost as lost:
            if not lost.sent:
                raise
            # What upstream said before it closed may have arrived: the reader comes to the end.

    async def _first_event(self, reader: Reader, deadline: asyncio.Timeout) -> t.Event:
        def is_at_work() -> None:
            deadline.reschedule(self._loop.time() + self._services.timing.silence_timeout_s)

        connection = self._held_lease().connection
        self._unwritten = await stream.Opening(connection, reader, is_at_work).run()
        if reader.refusal is not None and not reader.begun:
            return t.Refused(reader.refusal)
        self.first_event_at = self._loop.time()
        return t.Begun()

    async def _relay(self) -> t.Event:
        """Move events to the client until the answer ends; the last bytes stay unwritten."""
        reader = self._reader
        assert reader is not None
        if not self._request.envelope.stream:
            return await self._move(reader, None)
        response = stream.HeldResponse(headers=self._reply_headers("text/event-stream"))
        response.charset = "utf-8"
        self._response = response
        writer = await response.prepare(self._http)
        if writer is None or reader.terminal is not None or not stream.can_write_directly(writer):
            return await self._move(reader, response)
        first, self._unwritten = self._unwritten, b""
        await response.write(first)
        events = stream.EventStream(
            self._held_lease().connection,
            reader,
            self._http,
            writer,
            keepalive_s=self._services.timing.keepalive_s,
            silence_timeout_s=self._services.timing.silence_timeout_s,
        )
        outcome = await events.run()
        self._unwritten = events.unwritten
        return outcome

    async def _move(self, reader: Reader, response: web.StreamResponse | None) -> t.Event:
        """Relay by means that aiohttp promises, or only read where nothing is streamed."""
        connection = self._held_lease().connection
        try:
            while reader.terminal is None:
                if response is not None and self._unwritten:
                    ready, self._unwritten = self._unwritten, b""
                    await response.write(ready)
                messages = await self._next_messages(connection, response)
                self._unwritten = reader.feed(messages)
        except ConnectionLost as lost:
            return t.ConnectionClosed(lost.code)
        except TimeoutError:
            return t.Silent()
        except ProtocolFault as fault:
            self._unwritten = fault.written
            return t.Broken()
        return stream.ending(reader)

    async def _next_messages(
        self, connection: UpstreamConnection, response: web.StreamResponse | None
    ) -> list[bytes]:
        """Wait for messages, keeping a silent stream alive; raises TimeoutError at last."""
        timing = self._services.timing
        left_s = timing.silence_timeout_s
        while True:
            wait_s = min(timing.keepalive_s, left_s)
            try:
                async with asyncio.timeout(wait_s):
                    return await connection.receive()
            except TimeoutError:
                left_s -= wait_s
                if left_s <= 0:
                    raise
                if response is not None:
                    await response.write(KEEPALIVE_COMMENT)

    def _reply_headers(self, content_type: str) -> CIMultiDict[str]:
        # Case-insensitive, so that a header of upstream's takes the place of its namesake.
        return CIMultiDict(
            reply_headers(self.turn.mode, self.turn.reason, self._request_id, content_type)
        )

    async def _finish(self) -> web.StreamResponse:
        """Write what is left of the reply, now that the lease is settled."""
        reader, response = self._reader, self._response
        if reader is None or reader.terminal is None or self.turn.mode is Mode.HTTP:
            assert response is not None
            return response
        if response is None:
            return self._json_reply(reader)
        if response.prepared and self._unwritten:
            last, self._unwritten = self._unwritten, b""
            if reader.terminal is Kind.ERROR:
                await response.write(last)
                self._cut_off()
            else:
                await response.write_eof(last)
        return response

    def _json_reply(self, reader: Reader) -> web.Response:
        if reader.terminal is Kind.ERROR and reader.refusal is not None:
            return self._plain_reply(http_reply(reader.refusal))
        return web.Response(body=reader.response, headers=self._reply_headers("application/json"))

    def _plain_reply(self, reply: HttpReply) -> web.Response:
        headers = self._reply_headers("application/json")
        headers.update(reply.headers)
        return web.Response(status=reply.status, body=reply.body, headers=headers)

    async def _break_reply(self, code: str, message: str) -> web.StreamResponse:
        """End a reply with an error in a way that nobody can take for complete."""
        response = self._response
        if response is None or not response.prepared:
            return self._plain_reply(unavailable_reply(502, code, message))
        last = self._unwritten
        if self._services.tells_lost_upstream and self._reader is not None:
            last += self._reader.error_event(code, message)
        if last:
            await response.write(last)
        self._cut_off()
        return response

    def _cut_off(self) -> None:
        # Closed before the last chunk: a broken body, which no client takes for the end.
        if (transport := self._http.transport) is not None:
            transport.close()

    async def _pass_through(self, reason: Reason) -> web.StreamResponse:
        self.bytes_up += len(self._body.raw)
        try:
            response = await self._services.passthrough.relay(
                self._http,
                body=self._body.raw,
                replayable=self._request.envelope.replay_safe,
                extra_headers=mode_headers(Mode.HTTP, reason),
            )
        except UpstreamError as error:
            return refuse(error)
        self._note_refusal(reason, response.status)
        return response

    def _note_refusal(self, reason: Reason, status: int) -> None:
        """Remember what the Responses API refused and the client's own endpoint took."""
        envelope, principal = self._request.envelope, self._principal.key
        if status >= web.HTTPBadRequest.status_code:
            return  # it would be refused anyway, for whatever is wrong with it
        if reason is Reason.MODEL_REFUSED and envelope.model is not None:
            self._services.models.refuse_model(principal, envelope.model)
        elif reason is Reason.TRANSLATION_REFUSED:
            self._services.models.refuse_settings(principal, envelope.message_members)

    def _record_head_soon(self) -> None:
        """
        Record the head when the last bytes have been handed to the client's transport.

        The loop runs what is ready in order: the client's next request, even if it is sent on the
        last byte, wakes its handler after this. An older head of the same id goes at once, before
        the lease does: for a moment the connection would seem to hold it.
        """
        if self._reader is not None and self._reader.response_id is not None:
            self._services.store.outdate(self._principal.key, self._reader.response_id)
        self._loop.call_soon(self._record_head)


def _reply_to_upgrade(cause: UpstreamError | None) -> HttpReply | None:
    """Return what the client must be told of a refused upgrade that HTTP would meet as well."""
    if not isinstance(cause, UpgradeRefused) or cause.status != 429:
        return None
    return http_reply(parse_upgrade_refusal(cause.status, cause.headers, cause.body))
