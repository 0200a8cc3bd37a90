"""
What is told of one turn when it is over: one log line, the metrics, and whoever watches.

Whoever carries a turn out opens a record when its body is here and closes it exactly once,
whatever became of the turn.
"""

from __future__ import annotations

import itertools
import secrets
from typing import TYPE_CHECKING, Any

from proxy.core.plan import PassThrough
from proxy.core.reasons import Mode, Reason
from proxy.core.usage import Usage
from proxy.observe.facts import TurnFacts
from proxy.observe.log import log_turn

if TYPE_CHECKING:
    from proxy.core.plan import Plan
    from proxy.core.principals import Principal
    from proxy.downstream.carrier import Carrier
    from proxy.observe.facts import Watch, Would
    from proxy.observe.metrics import Metrics
    from proxy.observe.tracing import TurnSpan

# What is logged as the status of a turn whose client left before it had one (nginx's number).
CLIENT_CLOSED = 499

# Turns are told apart by number, and those of one process from those of another by chance.
_PROCESS = secrets.token_hex(10)
_numbers = itertools.count(1)


class TurnRecord:
    """
    The record of one turn.

    `bytes_in` is the size of its decoded body, `read_at` the loop time at which that was here.
    Set `carrier` once the turn is carried out, and `status` once the reply has one,
    `span` if the turn is traced.
    """

    def __init__(
        self,
        metrics: Metrics,
        log: Any,
        watch: Watch,
        principal: Principal,
        bytes_in: int,
        read_at: float,
    ) -> None:
        self.turn_id = f"{_PROCESS}{next(_numbers):012x}"
        self.principal = principal
        self.carrier: Carrier | None = None
        self.status = CLIENT_CLOSED
        self.span: TurnSpan | None = None
        self._model: str | None = None
        self._previous: str | None = None
        self._would: Would | None = None
        self._response: str | None = None
        self._watch = watch
        self._http_reason = Reason.UNPARSABLE
        self._metrics = metrics
        self._log = log
        self._bytes_in = bytes_in
        self._read_at = read_at
        metrics.turn_started()

    @property
    def request_id(self) -> str:
        """The id that the client is given of this turn."""
        return f"req_{self.turn_id}"

    def planned(self, plan: Plan) -> None:
        """Note what was planned."""
        self._previous = plan.previous
        if plan.request is not None:
            self._model = plan.request.envelope.model
        if isinstance(plan, PassThrough) and plan.field is not None:
            self._metrics.untranslatable(plan.field)
            self._log.info("untranslatable", turn=self.turn_id, field=plan.field)
        for gap in plan.gaps:
            for name in gap.fields:
                self._metrics.gap(name)
            self._log.info("normalisation_gap", turn=self.turn_id, fields=list(gap.fields))

    def would_be(self, would: Would, response_id: str | None) -> None:
        """Note what would have become of the turn, were it not for shadow mode."""
        self._would = would
        self._response = response_id

    def passed_through(self, reason: Reason) -> None:
        """Note that the turn was planned as plain HTTP."""
        self._http_reason = reason

    def close(self, now: float) -> None:
        """Tell it, at the loop time `now`."""
        facts = self._facts(now)
        # What was planned as plain HTTP did not fall back to it, unless it was only too large.
        if facts.mode is Mode.HTTP and (
            self.carrier is not None or facts.reason is Reason.TOO_LARGE
        ):
            self._metrics.fallback(facts.reason)
        for resend in facts.resends:
            self._metrics.resend(resend)
        self._metrics.turn_finished(facts)
        log_turn(self._log, facts)
        self._watch(facts)
        if self.span is not None:
            carrier = self.carrier if self.span.wants_usage else None
            self.span.end(facts, carrier.usage() if carrier is not None else Usage())

    def _facts(self, now: float) -> TurnFacts:
        """Gather what there is to tell: of a turn that was carried out, or of one over HTTP."""
        facts = TurnFacts(
            turn_id=self.turn_id,
            principal=self.principal.key,
            label=self.principal.label,
            mode=Mode.HTTP,
            reason=self._http_reason,
            status=self.status,
            bytes_in=self._bytes_in,
            bytes_up=self._bytes_in,
            ended_at=now,
            duration_s=now - self._read_at,
            model=self._model,
            previous=self._previous,
            response=self._response,
            would=self._would,
        )
        if (carrier := self.carrier) is not None:
            turn = carrier.turn
            facts.mode, facts.reason, facts.resends = turn.mode, turn.reason, tuple(turn.resends)
            facts.bytes_up = carrier.bytes_up
            facts.first_event_s = self._since_read(carrier.first_event_at)
            facts.overhead_s = self._since_read(carrier.sent_at)
            facts.connection, facts.response = carrier.connection_id, carrier.response_id
        return facts

    def _since_read(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self._read_at
