"""
What it takes to carry out a turn, apart from waiting.

A `core.turn.Turn` says what to do. Two shells do it: `driver.Driver`, a coroutine that can wait
for anything, and `express.Express`, which lives in callbacks and never waits. What both have, the
lease, the reader, the message to send, the head to record, is here, so that a turn can begin in
the one and go on in the other.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.core import turn as t
from proxy.core.chat_reply import ChatReplyReader
from proxy.core.chat_turn import ChatEnvelope
from proxy.core.history import Answer, new_head
from proxy.core.leases import Want
from proxy.core.plan import Continue, FollowClient, Start
from proxy.core.reasons import Mode, Reason
from proxy.core.reply import Kind, ReplyReader
from proxy.core.turn import Form, State, Turn
from proxy.core.usage import Usage, read_usage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TypeAlias

    from proxy.core.budget import RetryBudget
    from proxy.core.chains import ChainStore
    from proxy.core.chat_models import TranslatedModels
    from proxy.core.history import Head
    from proxy.core.items import Fingerprinter
    from proxy.core.request import TurnRequest
    from proxy.downstream.intake import Intake
    from proxy.upstream.passthrough import Passthrough
    from proxy.upstream.pool import Lease, Pool

    WebSocketPlan: TypeAlias = Continue | Start | FollowClient
    Reader: TypeAlias = ReplyReader | ChatReplyReader


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


class Carrier:
    """
    One turn, and what is held for it.

    `first_event_at` and `sent_at` are loop times, None if it never came to that. Where another
    carrier has begun the turn (`Intake.begun`), its turn, lease and reader are taken over.
    """

    def __init__(self, services: Services, intake: Intake) -> None:
        self._loop = asyncio.get_running_loop()
        self._services = services
        self._body = intake.body
        self._principal = intake.principal
        self._plan = intake.websocket_plan
        self._request = self._plan.request
        self._request_id = intake.record.request_id
        self.bytes_up = 0
        self.sent_at: float | None = None
        self.first_event_at: float | None = None
        self.connection_id: int | None = None
        self._lease: Lease | None = None
        self._reader: Reader | None = None
        if intake.begun is None:
            self.turn = make_turn(self._plan, services, self._loop.time)
        else:
            self._take_over(intake.begun)

    def _take_over(self, other: Carrier) -> None:
        """Take what another carrier of the same turn holds; that one is done with it."""
        self.turn = other.turn
        self.bytes_up = other.bytes_up
        self.sent_at = other.sent_at
        self.first_event_at = other.first_event_at
        self.connection_id = other.connection_id
        self._lease, other._lease = other._lease, None
        self._reader = other._reader

    @property
    def response_id(self) -> str | None:
        """The response that answers the turn, as far as that is known."""
        return self._reader.response_id if self._reader else None

    def usage(self) -> Usage:
        """Read what upstream said of the answer's cost when it ended."""
        return read_usage(self._reader.terminal_message if self._reader else b"")

    @property
    def _continued_head(self) -> Head | None:
        """The head that the turn continues as things stand, chosen by us and not by the client."""
        if isinstance(self._plan, Continue) and self.turn.mode is Mode.DELTA:
            return self._plan.head
        return None

    def _want(self) -> Want | None:
        """Return which connection the turn would like."""
        if isinstance(self._plan, Continue | FollowClient) and not self.turn.resends:
            return Want(self._plan.head.connection_id, self._plan.head.response_id)
        return None

    def _hold(self, lease: Lease) -> t.LeaseGranted:
        self._lease = lease
        self.connection_id = lease.connection_id
        return t.LeaseGranted(lease.holds_chain)

    def _held_lease(self) -> Lease:
        assert self._lease is not None, "no lease is held"
        return self._lease

    def _message(self, command: t.Command) -> bytes:
        match command, self._plan:
            case t.SendDelta(), Continue(request, head, delta):
                return request.delta_message(head.response_id, delta)
            case t.SendAsIs(), _:
                return self._request.chained_message()
        return self._request.full_message()

    def _new_reader(self, lease: Lease) -> Reader:
        """Make the reader of the next attempt's answer."""
        self._reader = _make_reader(self._request, self._continued_head, reused=lease.reused)
        return self._reader

    def _note_sending(self, message: bytes) -> None:
        self.bytes_up += len(message)
        if self.sent_at is None:
            self.sent_at = self._loop.time()

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

    def clean_up(self) -> None:
        """Let go of what is still held, without waiting: nobody goes on with this turn."""
        if self.turn.state is not State.CLOSED:
            # An answer that upstream had completed stands, whether the client waited or not: it
            # is the client's next request that tells what it has seen.
            terminal = self._reader and self._reader.terminal
            completed = self.turn.state is State.RELAYING and terminal is Kind.COMPLETED
            event = t.Completed(clean=False) if completed else t.DownstreamClosed()
            for command in self.turn.handle(event):
                self._settle(command)
        self._release(reusable=False, holds_answer=False)

    def _release(self, *, reusable: bool, holds_answer: bool) -> None:
        if (lease := self._lease) is None:
            return
        self._lease = None
        response_id = self._reader.response_id if self._reader and holds_answer else None
        lease.release(reusable=reusable, response_id=response_id)

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


def mode_headers(mode: Mode, reason: Reason) -> Mapping[str, str]:
    """Return the headers that tell people how a turn went."""
    return {"turnwire-mode": mode.value, "turnwire-reason": reason.value}


def reply_headers(mode: Mode, reason: Reason, request_id: str, content_type: str) -> dict[str, str]:
    """Return the headers of a reply that Turnwire makes of an answer."""
    return {
        "Content-Type": content_type,
        "Cache-Control": "private, no-store",
        "Server": "turnwire",
        "x-request-id": request_id,
        "turnwire-mode": mode.value,
        "turnwire-reason": reason.value,
    }


def _make_reader(request: TurnRequest, head: Head | None, *, reused: bool) -> Reader:
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


def make_turn(plan: WebSocketPlan, services: Services, clock: Callable[[], float]) -> Turn:
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
