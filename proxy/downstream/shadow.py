"""
Shadow mode: every turn goes over plain HTTP, as if Turnwire were not there, and is decided besides.

The planner, the turn's machine, the chain store and the book of leases are those of live mode; what
is missing is the sending. The lease is one of a `ShadowPool`, and what the machine is told is read
from the HTTP reply as it passes by: `ReplyTap` listens to the relay, decodes a copy, and hands the
events on. The client's bytes are written first, and nothing here can delay or change them.

After the reply's end the delta, if it would have been one, gets its second opinion.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from proxy.core import turn as t
from proxy.core.history import Answer, new_head
from proxy.core.leases import Want
from proxy.core.plan import Continue, FollowClient, PassThrough, may_repeat
from proxy.core.reasons import Mode, Reason
from proxy.core.reply import Kind, ProtocolFault, ReplyReader
from proxy.core.shadow import Opinions, ShadowLease, ShadowPool, Verdict, read_request
from proxy.core.sse import SseReader, TooLong
from proxy.core.turn import State
from proxy.core.verdicts import parse_error
from proxy.downstream.carrier import Services, make_turn, mode_headers
from proxy.downstream.decoding import Undecodable, make_decoder
from proxy.observe.facts import Would

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiohttp import web

    from proxy.core.history import Head
    from proxy.core.plan import Plan, Start
    from proxy.core.principals import Principal
    from proxy.core.verdicts import Refusal
    from proxy.downstream.bodies import Body
    from proxy.observe.metrics import Metrics

_OK = 200
_TERMINALS = {"completed": "response.completed", "incomplete": "response.incomplete"}


class Shadow:
    """
    What all turns of shadow mode share. `clock` gives monotonic seconds.

    `max_answer_bytes` bounds what is kept of a reply in order to read it.
    """

    def __init__(
        self,
        services: Services,
        pool: ShadowPool,
        metrics: Metrics,
        log: Any,
        *,
        clock: Callable[[], float],
        max_answer_bytes: int,
    ) -> None:
        self.services = services
        self.pool = pool
        self.opinions = Opinions()
        self.clock = clock
        self.max_answer_bytes = max_answer_bytes
        self._metrics = metrics
        self.log = log

    def status(self, principal_key: str, want: Want) -> Reason | None:
        """Say why `want` could not be had now, or None if it could. Takes nothing."""
        return self.pool.status(principal_key, want, self.clock())

    @staticmethod
    def reason(plan: Plan) -> Reason:
        """Return why a turn goes over plain HTTP."""
        return plan.reason if isinstance(plan, PassThrough) else Reason.SHADOW

    async def relay(
        self,
        request: web.Request,
        body: Body,
        principal: Principal,
        plan: Plan,
        turn_id: str,
        note: Callable[[Would, str | None], None],
    ) -> web.StreamResponse:
        """
        Relay a turn as it came, and count what would have become of it. Raises as the relay does.

        `note` is called with that, and with the id of the response that answered the turn.
        """
        shadowed = self._begin(principal, plan)
        decided = (Mode.HTTP, plan.reason) if shadowed is None else shadowed.decision
        headers = {**mode_headers(Mode.HTTP, self.reason(plan)), **_shadow_headers(*decided)}
        try:
            return await self.services.passthrough.relay(
                request,
                body=body.raw,
                replayable=may_repeat(plan),
                extra_headers=headers,
                tap=None if shadowed is None else shadowed.tap,
            )
        finally:
            would = Would(*decided, len(body.raw))
            if shadowed is not None:
                would = self._close(shadowed, would)
            self._tell(turn_id, would)
            note(would, None if shadowed is None else shadowed.response_id)

    # A fault of ours must not be felt: what is relayed does not depend on any of it.

    def _begin(self, principal: Principal, plan: Plan) -> _ShadowTurn | None:
        if isinstance(plan, PassThrough):
            return None
        try:
            return _ShadowTurn(self, principal, plan)
        except Exception:
            self.log.exception("shadow_failed")
            return None

    def _close(self, shadowed: _ShadowTurn, unless: Would) -> Would:
        try:
            return shadowed.close(unless.bytes_up)
        except Exception:
            self.log.exception("shadow_failed")
            return unless

    def _tell(self, turn_id: str, would: Would) -> None:
        mode, reason, verdict = would.mode.value, would.reason.value, would.verdict
        self._metrics.shadow_turn(mode, reason, bytes_up=would.bytes_up, verdict=verdict)
        told = {} if verdict is None else {"verdict": verdict}
        self.log.info(
            "shadow", turn=turn_id, mode=mode, reason=reason, bytes_up=would.bytes_up, **told
        )
        if verdict == Verdict.WRONG:
            self.log.warning("shadow_delta_wrong", turn=turn_id)


def _shadow_headers(mode: Mode, reason: Reason) -> dict[str, str]:
    return {"turnwire-shadow-mode": mode.value, "turnwire-shadow-reason": reason.value}


class _ShadowTurn:
    """
    One turn as it would have gone: `decision` is how it would have been sent, and why.

    `tap` listens to its reply. `close` it once, whatever came of that.
    """

    def __init__(
        self, shadow: Shadow, principal: Principal, plan: Continue | Start | FollowClient
    ) -> None:
        self._shadow = shadow
        self._principal = principal
        self._plan = plan
        self._turn = make_turn(plan, shadow.services, shadow.clock)
        self._lease: ShadowLease | None = None
        self._answer: Answer | None = None
        self._bytes_up = 0
        self._turn.start()
        self._follow(self._turn.handle(self._acquire()))
        self.decision = (self._turn.mode, self._turn.reason)
        self.tap = ReplyTap(self, shadow.max_answer_bytes, shadow.log)

    @property
    def response_id(self) -> str | None:
        """The response that answered the turn, if it can be continued."""
        return self._answer.response_id if self._answer else None

    def _acquire(self) -> t.Event:
        want = None
        if isinstance(self._plan, Continue | FollowClient):
            want = Want(self._plan.head.connection_id, self._plan.head.response_id)
        shadow = self._shadow
        got = shadow.pool.acquire(self._principal.key, want, shadow.clock())
        if isinstance(got, Reason):
            return t.LeaseFailed(got)
        self._lease = got
        return t.LeaseGranted(got.holds_chain)

    # What the reply tells.

    def begun(self) -> None:
        """Take note that the answer has begun."""
        if self._turn.state is State.SENT:
            self._turn.handle(t.Begun())

    def refused(self, refusal: Refusal) -> None:
        """Take note that upstream has refused the turn."""
        if self._turn.state is State.SENT:
            self._follow(self._turn.handle(t.Refused(refusal)))

    def ended(self, kind: Kind, answer: Answer | None) -> None:
        """Take note of how the answer has ended."""
        if self._turn.state is not State.RELAYING:
            return
        self._answer = answer
        match kind:
            case Kind.COMPLETED:
                self._follow(self._turn.handle(t.Completed()))
            case Kind.ERROR:
                self._follow(self._turn.handle(t.Erred()))
            case _:
                self._follow(self._turn.handle(t.Ended()))

    def close(self, raw_bytes: int) -> Would:
        """
        End the turn, also one whose reply broke off; judge it, if it would have been a delta.

        `raw_bytes` is what goes up over plain HTTP.
        """
        if self._turn.state is not State.CLOSED:
            self._follow(self._turn.handle(t.DownstreamClosed()))
        self._release(reusable=False, holds_answer=False)
        mode, reason = self.decision
        return Would(
            mode, reason, raw_bytes if mode is Mode.HTTP else self._bytes_up, self._judge()
        )

    def _judge(self) -> Verdict | None:
        """Judge the delta, if it would have been one, and remember what the next is judged by."""
        opinions, principal, plan = self._shadow.opinions, self._principal.key, self._plan
        wanted = read_request(plan.request.body)
        verdict = None
        if isinstance(plan, Continue) and self.decision[0] is Mode.DELTA:
            delta = [item.raw for item in plan.delta]
            verdict = opinions.judge(principal, plan.head.response_id, wanted, delta)
        if self._answer is not None:
            output = self._answer.streamed or self._answer.final
            opinions.note(principal, self._answer.response_id, wanted, output)
        return verdict

    # The machine's commands, as far as they are about what is remembered.

    def _follow(self, commands: Sequence[t.Command]) -> None:
        for command in commands:
            match command:
                case t.SendDelta() | t.SendFull() | t.SendAsIs() if not self._turn.resends:
                    self._bytes_up = self._message_bytes(command)
                case t.RecordHead():
                    self._record_head()
                case t.ForgetHead() if isinstance(self._plan, Continue | FollowClient):
                    self._shadow.services.store.forget(self._plan.head)
                case t.ReleaseLease(reusable, holds_answer):
                    self._release(reusable=reusable, holds_answer=holds_answer)

    def _message_bytes(self, command: t.Command) -> int:
        request = self._plan.request
        match command, self._plan:
            case t.SendDelta(), Continue(_, head, delta):
                return len(request.delta_message(head.response_id, delta))
            case t.SendAsIs(), _:
                return len(request.chained_message())
        return request.full_message_bytes

    def _release(self, *, reusable: bool, holds_answer: bool) -> None:
        if (lease := self._lease) is None:
            return
        self._lease = None
        response_id = self._answer.response_id if self._answer and holds_answer else None
        self._shadow.pool.release(
            lease, reusable=reusable, response_id=response_id, now=self._shadow.clock()
        )

    def _record_head(self) -> None:
        answer, lease = self._answer, self._lease
        if answer is None or lease is None:
            return
        services, principal = self._shadow.services, self._principal.key
        request = self._plan.request
        head = new_head(request, answer, principal=principal, connection_id=lease.record.id)
        if head is None:
            services.store.outdate(principal, answer.response_id)
            return
        chained = isinstance(self._plan, FollowClient)
        if chained:
            head.history = services.fingerprints.digest(b"chained", answer.response_id.encode())
        prefix = None if chained else request.prefix()
        services.store.record(head, request.body, prefix, self._continued_head(), request.walk)

    def _continued_head(self) -> Head | None:
        is_delta = isinstance(self._plan, Continue) and self._turn.mode is Mode.DELTA
        return self._plan.head if is_delta and isinstance(self._plan, Continue) else None


class _Response(msgspec.Struct):
    status: str | None = None


_RESPONSE = msgspec.json.Decoder(_Response)


class ReplyTap:
    """
    Reads a reply that passes by, streamed or not, and tells the turn of it.

    A reply that can't be read, for its encoding, its length or its content, is given up: the turn
    then has no answer that could be continued.
    """

    def __init__(self, turn: _ShadowTurn, max_bytes: int, log: Any) -> None:
        self._turn = turn
        self._log = log
        self._max_bytes = max_bytes
        self._status = 0
        self._decode: Callable[[bytes], bytes] | None = None
        self._events: SseReader | None = None
        self._body = bytearray()
        self._reader = ReplyReader(
            stream=False, hide_previous_response_id=None, collect_output=True
        )

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Choose how to read by the head of the reply."""
        self._status = status
        is_stream = headers.get("Content-Type", "").lower().startswith("text/event-stream")
        if status == _OK and is_stream:
            self._events = SseReader(self._max_bytes)
        try:
            self._decode = make_decoder(headers.get("Content-Encoding", ""), self._max_bytes)
        except Undecodable:
            self._decode = None

    def take(self, chunk: bytes) -> None:
        """Read on."""
        if self._decode is None:
            return
        try:
            self._take(self._decode(chunk))
        except (Undecodable, TooLong, ProtocolFault):
            self._decode = None
        except Exception:  # noqa: BLE001  a fault of ours must not break what is relayed
            self._decode = None
            self._log.exception("shadow_failed")

    def end(self) -> None:
        """Read a reply that is one JSON object."""
        if self._decode is None or self._events is not None:
            return
        try:
            self._take_whole(bytes(self._body))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ProtocolFault):
            return
        except Exception:  # noqa: BLE001  as above
            self._log.exception("shadow_failed")

    def _take(self, data: bytes) -> None:
        if self._events is not None:
            self._take_events(self._events.feed(data))
            return
        self._body += data
        if len(self._body) > self._max_bytes:
            raise Undecodable("the reply is too long")

    def _take_whole(self, body: bytes) -> None:
        if self._status != _OK:
            if (refusal := parse_error(body)) is not None:
                self._turn.refused(replace(refusal, status=self._status))
            return
        kind = _TERMINALS.get(_RESPONSE.decode(body).status or "", "response.failed")
        self._reader.feed([b'{"type":"%b","response":%b}' % (kind.encode(), body)])
        self._tell()

    def _take_events(self, events: list[bytes]) -> None:
        messages = [event for event in events if event.startswith(b"{")]  # not `[DONE]`
        if messages and self._reader.terminal is None:
            self._reader.feed(messages)
            self._tell()

    def _tell(self) -> None:
        reader = self._reader
        if reader.refusal is not None and not reader.begun:
            self._turn.refused(reader.refusal)
            return
        self._turn.begun()
        if reader.terminal is None:
            return
        answer = None
        if reader.terminal is Kind.COMPLETED and reader.response_id is not None:
            answer = Answer(reader.response_id, reader.output, reader.final_output)
        self._turn.ended(reader.terminal, answer)
