"""
Carries out one turn: the only place where a `core.turn.Turn` meets I/O.

The machine says what to do, the driver does it and reports what came of it, until the turn is
closed. Nothing is decided here. Between the commit point and the end of the answer `stream` moves
the bytes of a streamed reply; where it can't, and for a reply that is not streamed, a loop does:
all messages at hand become one write, and the loop reads no further while the client's side is
full. Either way a slow client slows the upstream connection down and nothing piles up.

A reply's head leaves with the first events, and the last events with what ends the reply: a short
answer, which one read brings whole, is one write.

Whatever happens, a cancellation included, the lease is given back exactly once: `_abandon` runs
the machine's own clean-up without awaiting.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web
from multidict import CIMultiDict

from proxy.core import turn as t
from proxy.core.chat_reply import ChatReplyReader
from proxy.core.chat_turn import ChatEnvelope
from proxy.core.history import Answer, new_head
from proxy.core.leases import Want
from proxy.core.plan import Continue, FollowClient, Start
from proxy.core.reasons import Mode, Reason
from proxy.core.reply import KEEPALIVE_COMMENT, Kind, ProtocolFault, ReplyReader
from proxy.core.turn import Form, State, Turn
from proxy.core.verdicts import (
    HttpReply,
    http_reply,
    parse_upgrade_refusal,
    unavailable_reply,
)
from proxy.downstream import stream
from proxy.downstream.refusals import refuse
from proxy.errors import ConnectionLost, LeaseRefused, UpgradeRefused, UpstreamError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.core.budget import RetryBudget
    from proxy.core.chains import ChainStore
    from proxy.core.chat_models import TranslatedModels
    from proxy.core.history import Head
    from proxy.core.items import Fingerprinter
    from proxy.core.principals import Principal
    from proxy.core.request import TurnRequest
    from proxy.downstream.bodies import Body
    from proxy.upstream.connection import UpstreamConnection
    from proxy.upstream.passthrough import Passthrough
    from proxy.upstream.pool import Lease, Pool


@dataclass(frozen=True, slots=True)
class Timing:
    """Deadlines of a turn, in seconds."""

    first_event_timeout_s: float
    silence_timeout_s: float
    keepalive_s: float


@dataclass(frozen=True, slots=True)
class Services:
    """What all turns share. `tells_lost_upstream`: a broken stream ends in an error event."""

    pool: Pool
    store: ChainStore
    fingerprints: Fingerprinter
    passthrough: Passthrough
    timing: Timing
    max_message_bytes: int
    resend_budget: RetryBudget
    models: TranslatedModels
    tells_lost_upstream: bool = True


class Driver:
    """
    One turn under way. Call `run` once; then the attributes tell how it went.

    `plan` is the form in which the turn is to be sent. `first_event_at` and `sent_at` are loop
    times, None if it never came to that.
    """

    def __init__(
        self,
        services: Services,
        request: web.Request,
        body: Body,
        principal: Principal,
        plan: Continue | Start | FollowClient,
        request_id: str,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.turn = make_turn(plan, services, self._loop.time)
        self.bytes_up = 0
        self.sent_at: float | None = None
        self.first_event_at: float | None = None
        self.connection_id: int | None = None
        self._services = services
        self._http = request
        self._body = body
        self._principal = principal
        self._plan = plan
        self._request_id = request_id
        self._lease: Lease | None = None
        self._reader: ReplyReader | ChatReplyReader | None = None
        self._unwritten = b""
        self._response: web.StreamResponse | None = None

    @property
    def response_id(self) -> str | None:
        """The response that answers the turn, as far as that is known."""
        return self._reader.response_id if self._reader else None

    @property
    def _request(self) -> TurnRequest:
        return self._plan.request

    @property
    def _continued_head(self) -> Head | None:
        """The head that the turn continues as things stand, chosen by us and not by the client."""
        if isinstance(self._plan, Continue) and self.turn.mode is Mode.DELTA:
            return self._plan.head
        return None

    async def run(self) -> web.StreamResponse:
        """Carry the turn out to its end and return the reply, written as far as it goes."""
        commands = self.turn.start()
        try:
            while True:
                event = await self._carry_out(commands)
                if event is None:
                    return await self._finish()
                commands = self.turn.handle(event)
        except BaseException:
            self._abandon()
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

    def _settle(self, command: t.Command) -> None:
        """Carry out a command that needs no waiting."""
        match command:
            case t.RecordHead():
                self._record_head()
            case t.ForgetHead():
                if isinstance(self._plan, Continue | FollowClient):
                    self._services.store.forget(self._plan.head)
            case t.ReleaseLease(reusable, holds_answer):
                self._release(reusable=reusable, holds_answer=holds_answer)

    def _abandon(self) -> None:
        """Clean up without waiting: the client left, or something of ours failed."""
        if self.turn.state is not State.CLOSED:
            # An answer that upstream had completed stands, whether the client waited or not: it
            # is the client's next request that tells what it has seen.
            terminal = self._reader and self._reader.terminal
            completed = self.turn.state is State.RELAYING and terminal is Kind.COMPLETED
            event = t.Completed(clean=False) if completed else t.DownstreamClosed()
            for command in self.turn.handle(event):
                self._settle(command)
        self._release(reusable=False, holds_answer=False)

    async def _acquire(self, *, fresh: bool) -> t.Event:
        want = None
        if isinstance(self._plan, Continue | FollowClient) and not self.turn.resends:
            want = Want(self._plan.head.connection_id, self._plan.head.response_id)
        try:
            lease = await self._services.pool.acquire(self._principal, want, fresh=fresh)
        except LeaseRefused as refused:
            return t.LeaseFailed(Reason[refused.reason.upper()], _reply_to_upgrade(refused.cause))
        self._lease = lease
        self.connection_id = lease.connection_id
        return t.LeaseGranted(lease.holds_chain)

    def _release(self, *, reusable: bool, holds_answer: bool) -> None:
        if (lease := self._lease) is None:
            return
        self._lease = None
        response_id = self._reader.response_id if self._reader and holds_answer else None
        lease.release(reusable=reusable, response_id=response_id)

    def _message(self, command: t.Command) -> bytes:
        match command, self._plan:
            case t.SendDelta(), Continue(request, head, delta):
                return request.delta_message(head.response_id, delta)
            case t.SendAsIs(), _:
                return self._request.chained_message()
        return self._request.full_message()

    async def _send(self, message: bytes) -> t.Event:
        lease = self._held_lease()
        head = self._continued_head
        self._reader = _make_reader(self._request, head, reused=lease.reused)
        self.bytes_up += len(message)
        if self.sent_at is None:
            self.sent_at = self._loop.time()
        try:
            await self._hand_over(message, lease)
            self._request.prepare()
            async with asyncio.timeout(self._services.timing.first_event_timeout_s) as deadline:
                return await self._first_event(self._reader, deadline)
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

    async def _first_event(
        self, reader: ReplyReader | ChatReplyReader, deadline: asyncio.Timeout
    ) -> t.Event:
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

    async def _move(
        self, reader: ReplyReader | ChatReplyReader, response: web.StreamResponse | None
    ) -> t.Event:
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
            {
                "Content-Type": content_type,
                "Cache-Control": "private, no-store",
                "Server": "turnwire",
                "x-request-id": self._request_id,
                **mode_headers(self.turn.mode, self.turn.reason),
            }
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

    def _json_reply(self, reader: ReplyReader | ChatReplyReader) -> web.Response:
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

    def _record_head(self) -> None:
        reader, connection_id = self._reader, self.connection_id
        if reader is None or connection_id is None or reader.response_id is None:
            return
        head = new_head(
            self._request,
            Answer(reader.response_id, reader.output, reader.final_output, reader.echo),
            principal=self._principal.key,
            connection_id=connection_id,
        )
        if head is None:
            # It can't be continued; an older head of the same id must not be taken for it.
            self._services.store.outdate(self._principal.key, reader.response_id)
            return
        chained = isinstance(self._plan, FollowClient)
        if chained:
            # Upstream holds more than this request says: its items are nobody's whole history.
            head.history = self._services.fingerprints.digest(
                b"chained", reader.response_id.encode()
            )
        prefix = None if chained else self._request.prefix()
        request = self._request
        self._services.store.record(head, request.body, prefix, self._continued_head, request.walk)

    def _held_lease(self) -> Lease:
        assert self._lease is not None, "no lease is held"
        return self._lease


def mode_headers(mode: Mode, reason: Reason) -> Mapping[str, str]:
    """Return the headers that tell people how a turn went."""
    return {"turnwire-mode": mode.value, "turnwire-reason": reason.value}


def make_turn(
    plan: Continue | Start | FollowClient, services: Services, clock: Callable[[], float]
) -> Turn:
    """Return the turn that carries a plan out; `clock` is asked when it may resend."""
    request = plan.request
    budget = services.resend_budget
    budget.deposit(clock())
    match plan:
        case Continue(_, head) if head.stored and services.store.ids_are_unique:
            form = Form.DELTA_ANYWHERE
        case Continue():
            form = Form.DELTA
        case FollowClient():
            form = Form.AS_IS
        case _:
            form = Form.FULL
    return Turn(
        form,
        plan.reason,
        full_fits=request.full_message_bytes <= services.max_message_bytes,
        replay_safe=request.envelope.replay_safe,
        may_resend=lambda: budget.withdraw(clock()),
        is_translated=request.dialect.is_translated,
    )


def _make_reader(
    request: TurnRequest, head: Head | None, *, reused: bool
) -> ReplyReader | ChatReplyReader:
    envelope = request.envelope
    if isinstance(envelope, ChatEnvelope):
        return ChatReplyReader(
            stream=envelope.stream,
            include_usage=envelope.include_usage,
            created=int(time.time()),
            model=envelope.model or "",
            reused=reused,
        )
    return ReplyReader(
        stream=envelope.stream,
        hide_previous_response_id=head.response_id if head else None,
        collect_output=True,
        reused=reused,
    )


def _reply_to_upgrade(cause: UpstreamError | None) -> HttpReply | None:
    """Return what the client must be told of a refused upgrade that HTTP would meet as well."""
    if not isinstance(cause, UpgradeRefused) or cause.status != 429:
        return None
    return http_reply(parse_upgrade_refusal(cause.status, cause.headers, cause.body))
