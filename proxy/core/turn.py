"""
One turn, from its plan to its last byte, as a state machine.

Events go in, commands come out. Nothing here awaits, logs, reads a clock or opens a socket: the
driver carries the commands out in order and reports what came of the last one.

    LEASING --LeaseGranted--> SENT --Begun--> RELAYING --Completed, Ended--> CLOSED
       |                       |                 |
       LeaseFailed             refused, closed,  closed, broken
       v                       silent            v
       PassThrough, Refuse     resend once       BreakReply

SENT -> RELAYING is the commit point: upstream has begun, and the client is about to see a byte.
Before it a turn may be sent again, once, and always in full; after it never. What a refusal or a
closed connection means is looked up in `core.verdicts`; what may be done about it in this state is
decided here. The thousands of events between `Begun` and the end never pass through this machine.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from proxy.core.reasons import Mode, Reason
from proxy.core.verdicts import (
    HttpReply,
    Refusal,
    Verdict,
    connection_failed_reply,
    http_reply,
    is_clients_fault,
    judge,
    judge_close,
    protocol_fault_reply,
    says_no_model,
    silent_reply,
)

if TYPE_CHECKING:
    from collections.abc import Callable

CLOSE_ABNORMAL = 1006  # RFC 6455 section 7.4.1
CLOSE_TOO_BIG = 1009

HEAD_IS_WRONG = frozenset({Reason.PREVIOUS_RESPONSE_NOT_FOUND, Reason.DELTA_REJECTED})

# Events: what happened. None is changed once it is made; those of every turn are not frozen, for
# that would make them several times as slow to make.


@dataclass(slots=True)
class LeaseGranted:
    """A connection is ours for this turn; `holds_chain` if it still has the head's response."""

    holds_chain: bool


@dataclass(frozen=True, slots=True)
class LeaseFailed:
    """No connection can be had. `reply` is what the client must be told, if HTTP can't help."""

    reason: Reason
    reply: HttpReply | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """Upstream answered with an error before its first event."""

    refusal: Refusal


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """The connection ended; `sent` is False only if no byte of the message had left."""

    code: int
    sent: bool = True


@dataclass(frozen=True, slots=True)
class Silent:
    """Upstream let the deadline for its first event, or for its next one, pass."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The first server event of the answer arrived: the commit point."""


@dataclass(slots=True)
class Completed:
    """The answer ended with `response.completed`; `clean` if nothing unexpected came after it."""

    clean: bool = True


@dataclass(frozen=True, slots=True)
class Ended:
    """The answer ended with `response.failed` or `response.incomplete`."""

    clean: bool = True


@dataclass(frozen=True, slots=True)
class Erred:
    """An `error` event ended the answer after it had begun; the client has seen it."""


@dataclass(frozen=True, slots=True)
class Broken:
    """Upstream broke the protocol: nothing on this connection can be trusted any more."""


@dataclass(frozen=True, slots=True)
class DownstreamClosed:
    """The client left, or we are told to stop."""


Event: TypeAlias = (
    LeaseGranted
    | LeaseFailed
    | Refused
    | ConnectionClosed
    | Silent
    | Begun
    | Completed
    | Ended
    | Erred
    | Broken
    | DownstreamClosed
)

# Commands: what to do. The last one of a list is the one whose outcome comes back as an event.


@dataclass(frozen=True, slots=True)
class AcquireLease:
    """Get a connection; `fresh` excludes every one that has been used before."""

    fresh: bool = False


@dataclass(frozen=True, slots=True)
class SendDelta:
    """Send the new items after the head's response id."""


@dataclass(frozen=True, slots=True)
class SendFull:
    """Send the whole history."""


@dataclass(frozen=True, slots=True)
class SendAsIs:
    """Send the request of a client that names the previous response itself."""


@dataclass(frozen=True, slots=True)
class Relay:
    """Begin the reply and relay events until the answer ends, one way or another."""


@dataclass(frozen=True, slots=True)
class RecordHead:
    """Remember the response that has just completed as the head of its chain."""


@dataclass(frozen=True, slots=True)
class ForgetHead:
    """
    Forget the head that this turn was to continue: upstream does not know it, or not as we do.

    A head whose connection is lost or serves another chain needs no forgetting: who holds which
    connection is known elsewhere, and a stored head may still be loaded on another one.
    """


@dataclass(slots=True)
class ReleaseLease:
    """Give the connection back; `holds_answer` if it now holds the response just recorded."""

    reusable: bool
    holds_answer: bool = False


@dataclass(frozen=True, slots=True)
class PassThrough:
    """Leave the request to plain HTTP."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer the client with this status and body; nothing has been written yet."""

    reply: HttpReply


@dataclass(frozen=True, slots=True)
class BreakReply:
    """End a reply that has begun with one error, so that nobody takes it for complete."""

    code: str
    message: str


Command: TypeAlias = (
    AcquireLease
    | SendDelta
    | SendFull
    | SendAsIs
    | Relay
    | RecordHead
    | ForgetHead
    | ReleaseLease
    | PassThrough
    | Refuse
    | BreakReply
)


class State(enum.Enum):
    """Where a turn is in its life."""

    LEASING = enum.auto()
    SENT = enum.auto()
    RELAYING = enum.auto()
    CLOSED = enum.auto()


class Form(enum.Enum):
    """In what form a turn can go upstream, as planned."""

    FULL = enum.auto()
    DELTA = enum.auto()  # on the connection that holds the head, and there only
    DELTA_ANYWHERE = enum.auto()  # upstream stores the head, and can load it on any connection
    AS_IS = enum.auto()  # the client chains by itself


class UnexpectedEvent(Exception):
    """An event arrived in a state that has no row for it."""


class Turn:
    """
    The state machine of one turn.

    `reason` is why the planned form was chosen. `full_fits` tells whether the whole history fits
    into one message; `replay_safe` whether running the turn twice would go unnoticed by the world;
    `may_resend()` asks the resend budget. `is_translated`: the client spoke to another endpoint, so
    what the Responses API refuses, or fails at, is for that endpoint to answer. `mode` and `reason`
    always say how the turn went so far.
    """

    def __init__(
        self,
        form: Form,
        reason: Reason,
        *,
        full_fits: bool = True,
        replay_safe: bool = False,
        may_resend: Callable[[], bool] = lambda: True,
        is_translated: bool = False,
    ) -> None:
        self.state = State.LEASING
        self.form = form
        self.reason = reason
        self.mode = Mode.FULL if form is Form.FULL else Mode.DELTA
        self.resends: list[Reason] = []
        self._full_fits = full_fits
        self._replay_safe = replay_safe
        self._may_resend = may_resend
        self._is_translated = is_translated

    def __repr__(self) -> str:
        return f"<Turn {self.state.name} {self.form.name} {self.mode} {self.reason.value}>"

    def start(self) -> list[Command]:
        """Return the first commands."""
        return [AcquireLease()]

    def handle(self, event: Event) -> list[Command]:
        """Advance by one event; return the commands to carry out, in order."""
        match self.state:
            case State.RELAYING:
                commands = self._while_relaying(event)
            case State.SENT:
                commands = self._while_sent(event)
            case State.LEASING:
                commands = self._while_leasing(event)
            case _:
                commands = None
        if commands is None:
            raise UnexpectedEvent(f"{event} while {self.state.name}")
        return commands

    # One row of the table each: what an event means in a state; None where it can't be.

    def _while_leasing(self, event: Event) -> list[Command] | None:
        match event:
            case LeaseGranted(holds_chain):
                return self._granted(holds_chain=holds_chain)
            case LeaseFailed(_, HttpReply() as reply):
                return self._close(Refuse(reply))
            case LeaseFailed(reason):
                return self._fall_back(Reason.RESEND_FAILED if self.resends else reason)
            case DownstreamClosed():
                return self._close()
        return None

    def _while_sent(self, event: Event) -> list[Command] | None:
        match event:
            case Begun():
                self.state = State.RELAYING
                return [Relay()]
            case Refused(refusal):
                return self._refused(refusal)
            case ConnectionClosed(code, sent):
                return self._lost(code, Reason.UPSTREAM_CLOSED, sent=sent)
            case Silent():
                return self._lost(CLOSE_ABNORMAL, Reason.UPSTREAM_SILENT, reply=silent_reply())
            case Broken():
                reply = protocol_fault_reply()
                return self._lost(CLOSE_ABNORMAL, Reason.UPSTREAM_FAILED, reply=reply)
            case DownstreamClosed():
                return self._close(ReleaseLease(reusable=False))
        return None

    def _while_relaying(self, event: Event) -> list[Command] | None:
        match event:
            case Completed(clean):
                return self._close(RecordHead(), ReleaseLease(clean, holds_answer=True))
            case Ended(clean):
                return self._close(ReleaseLease(clean))
            case Erred() | DownstreamClosed():
                return self._close(ReleaseLease(reusable=False))
            case ConnectionClosed(code):
                return self._break(f"The upstream connection closed (code {code}).")
            case Silent():
                return self._break("The upstream sent no event for too long.")
            case Broken():
                return self._break("The upstream sent something that belongs to no answer.")
        return None

    def _granted(self, *, holds_chain: bool) -> list[Command]:
        self.state = State.SENT
        if self.form is Form.AS_IS:
            return [SendAsIs()]
        if self.form is Form.DELTA_ANYWHERE or (self.form is Form.DELTA and holds_chain):
            return [SendDelta()]
        if self.form is Form.DELTA:
            self._now_full(Reason.CONNECTION_LOST)
        if not self._full_fits:
            return self._fall_back(Reason.TOO_LARGE, ReleaseLease(reusable=True))
        return [SendFull()]

    def _now_full(self, reason: Reason) -> None:
        self.form, self.mode, self.reason = Form.FULL, Mode.FULL, reason

    def _refused(self, refusal: Refusal) -> list[Command]:
        """Upstream said no before its first event, which is proof that it began nothing."""
        verdict, why = judge(
            refusal, sent_delta=self.form is not Form.FULL, resent=bool(self.resends)
        )
        reason = why or self.reason
        match verdict:
            case Verdict.RESEND_IN_PLACE | Verdict.RESEND_AS_FULL if self._can_resend():
                self._resend(reason)
                return [ForgetHead(), SendFull()]
            case Verdict.RESEND_ELSEWHERE if self._can_resend():
                return self._resend_elsewhere(reason)
            case Verdict.REFUSE if self._is_translated and is_clients_fault(refusal):
                why = Reason.MODEL_REFUSED if says_no_model(refusal) else Reason.TRANSLATION_REFUSED
                return self._fall_back(why, ReleaseLease(_keeps_connection(refusal)))
            case Verdict.REFUSE | Verdict.RESEND_ELSEWHERE if self._may_ask_elsewhere(refusal):
                pass
            case Verdict.REFUSE:
                return self._refuse(http_reply(refusal), reusable=_keeps_connection(refusal))
            case Verdict.RESEND_ELSEWHERE if reason is Reason.UPSTREAM_FAILED:
                return self._refuse(http_reply(refusal), reusable=False)
        forget = [ForgetHead()] if reason in HEAD_IS_WRONG else []
        return self._fall_back(self._why_not_resent(reason), *forget, ReleaseLease(reusable=False))

    def _lost(
        self, code: int, reason: Reason, *, sent: bool = True, reply: HttpReply | None = None
    ) -> list[Command]:
        """The connection is of no use before the first event; upstream may have begun or not."""
        verdict = judge_close(
            code, sent=sent, replay_safe=self._replay_safe, resent=bool(self.resends)
        )
        if verdict is Verdict.RESEND_ELSEWHERE and self._can_resend():
            return self._resend_elsewhere(reason if sent else Reason.SEND_FAILED)
        is_over = verdict is Verdict.REFUSE or (sent and verdict is Verdict.RESEND_ELSEWHERE)
        if is_over and not (self._is_translated and self._replay_safe):
            return self._refuse(reply or connection_failed_reply(), reusable=False)
        if code == CLOSE_TOO_BIG:
            why = Reason.TOO_LARGE
        elif verdict is not Verdict.RESEND_ELSEWHERE and not self.resends:
            # Closed for a policy, which another connection would meet too.
            why = reason if sent else Reason.SEND_FAILED
        else:
            why = self._why_not_resent(Reason.SEND_FAILED)
        return self._fall_back(why, ReleaseLease(reusable=False))

    def _may_ask_elsewhere(self, refusal: Refusal) -> bool:
        """Whether the endpoint that the client spoke to may be in order though ours fails."""
        return self._is_translated and refusal.status >= 500

    def _can_resend(self) -> bool:
        return (
            not self.resends
            and self._full_fits
            and self.form is not Form.AS_IS
            and self._may_resend()
        )

    def _why_not_resent(self, reason: Reason) -> Reason:
        if self.form is Form.AS_IS:
            return reason
        if not self._full_fits:
            return Reason.TOO_LARGE
        return Reason.RESEND_FAILED if self.resends else Reason.RESEND_BUDGET

    def _resend(self, reason: Reason) -> None:
        self.resends.append(reason)
        self._now_full(reason)

    def _resend_elsewhere(self, reason: Reason) -> list[Command]:
        self._resend(reason)
        self.state = State.LEASING
        return [ReleaseLease(reusable=False), AcquireLease(fresh=True)]

    def _fall_back(self, reason: Reason, *commands: Command) -> list[Command]:
        self.mode, self.reason = Mode.HTTP, reason
        return self._close(*commands, PassThrough(reason))

    def _refuse(self, reply: HttpReply, *, reusable: bool) -> list[Command]:
        return self._close(ReleaseLease(reusable), Refuse(reply))

    def _break(self, message: str) -> list[Command]:
        return self._close(
            ReleaseLease(reusable=False), BreakReply("upstream_connection_lost", message)
        )

    def _close(self, *commands: Command) -> list[Command]:
        self.state = State.CLOSED
        return list(commands)


def _keeps_connection(refusal: Refusal) -> bool:
    # A refusal ends its request and leaves the connection in order, except where it is about the
    # connection itself: its credentials, or a server that is failing.
    return refusal.status not in (401, 403) and refusal.status < 500
