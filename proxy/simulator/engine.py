"""
One turn, the same for both transports: a body in, timed server events out.

`Engine.begin` checks the request, finds the context that it continues, asks for the answer and
writes the events. Nothing is remembered until the transport calls `Turn.commit`, which it does
just before the terminal event leaves: a turn that breaks off earlier never happened.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from proxy.simulator.answers import Answer, AnswerOptions, Context, answer, with_encrypted
from proxy.simulator.events import CompletedOutput, Event, ResponseWriter, Usage, with_ids
from proxy.simulator.latency import LatencyModel, TurnCost
from proxy.simulator.meaning import Trace, item_type
from proxy.simulator.state import ConnectionMemory, Held, Storage
from proxy.simulator.validate import (
    Ledger,
    Transport,
    check_fields,
    check_reasoning_is_followed,
    input_items,
    parse,
)
from proxy.simulator.wire import ApiError, Item, Json, dumps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from proxy.simulator.journal import Seen

_CACHE_BLOCK_TOKENS = 128
_CACHE_MIN_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """A server event and when it is due, in seconds after the request arrived."""

    due_s: float
    event: Event


@dataclass(frozen=True, slots=True)
class Turn:
    """An answered turn. `commit` makes the service remember it; `response` is its final object."""

    response_id: str
    streamed: bool
    events: list[TimedEvent]
    response: dict[str, Json]
    commit: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a request comes to before it is answered."""

    body: dict[str, Json]
    parent: Held | None
    given: tuple[Item, ...]
    trace: Trace
    ledger: Ledger
    is_warm: bool
    request_bytes: int

    @property
    def items(self) -> list[Item]:
        """The whole context in order."""
        return [*(self.parent.items() if self.parent is not None else []), *self.given]


@dataclass(slots=True)
class Engine:
    """Answers turns. Owns the storage; connections bring their own memory."""

    answers: AnswerOptions = field(default_factory=AnswerOptions)
    latency: LatencyModel = field(default_factory=LatencyModel)
    completed_output: CompletedOutput = CompletedOutput.FULL
    max_connection_age_s: float = 3600.0
    orphan_reasoning_is_refused: bool = False
    clock: Callable[[], float] = time.monotonic
    storage: Storage = field(default_factory=Storage)
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def begin(self, seen: Seen, connection: ConnectionMemory | None = None) -> Turn:
        """
        Answer the request in `seen.raw`, noting in `seen` what was found.

        Raises ApiError. A refused continuation makes the connection forget the response that it
        named (protocol section 2.6).
        """
        body: dict[str, Json] = {}
        try:
            body = parse(seen.raw or b"")
            self._check_age(connection)
            return self._begin(body, seen, connection)
        except ApiError as error:
            seen.status = error.problem.status
            seen.finished = True
            if connection is not None:
                connection.evict(body.get("previous_response_id"))
            raise

    def _check_age(self, connection: ConnectionMemory | None) -> None:
        if connection is None or self.clock() - connection.opened_at < self.max_connection_age_s:
            return
        raise ApiError(
            400,
            "Responses websocket connection limit reached (60 minutes). Create a new websocket "
            "connection to continue.",
            code="websocket_connection_limit_reached",
        )

    def _begin(
        self, body: dict[str, Json], seen: Seen, connection: ConnectionMemory | None
    ) -> Turn:
        if seen.transport is Transport.WS and body.get("type") != "response.create":
            message = (
                f"Invalid value: '{body.get('type')}'. Supported values are: 'response.create'."
            )
            raise ApiError(400, message, code="invalid_value", param="type")
        check_fields(body, seen.transport)
        plan = self._plan(body, seen, connection)
        context = Context.of(body, plan.items, plan.trace)
        seen.held, seen.given, seen.digest = plan.parent, plan.given, context.digest.hex()
        response_id = f"resp_{next(self._numbers):08x}{seen.digest}"
        seen.response_id, seen.status = response_id, 200
        writer = self._writer(plan, context, response_id)
        return Turn(
            response_id,
            bool(body.get("stream")),
            self._timed(writer.events(), plan),
            writer.final(),
            lambda: self._remember(plan, writer, seen, connection),
        )

    def _plan(
        self, body: dict[str, Json], seen: Seen, connection: ConnectionMemory | None
    ) -> _Plan:
        """Find the parent, resolve references, and check the context as a whole."""
        parent = self._parent(body, seen, connection)
        given = tuple(
            self.storage.resolved(item, seen.principal)
            if item_type(item) == "item_reference"
            else item
            for item in input_items(body)
        )
        ledger = (parent.ledger if parent is not None else Ledger()).extended(given)
        ledger.check_settled()
        if self.orphan_reasoning_is_refused:
            check_reasoning_is_followed(given)
        trace = (parent.trace if parent is not None else Trace()).extended(given)
        is_warm = parent is not None and connection is not None and connection.latest is parent
        return _Plan(body, parent, given, trace, ledger, is_warm, seen.request_bytes)

    def _parent(
        self, body: dict[str, Json], seen: Seen, connection: ConnectionMemory | None
    ) -> Held | None:
        conversation = _conversation(body)
        if conversation is not None:
            return self.storage.conversation(conversation, seen.principal)
        previous = body.get("previous_response_id")
        if previous is None:
            return None
        seen.previous_response_id = str(previous)
        seen.foreign = self.storage.is_foreign(str(previous), seen.principal)
        return self.storage.previous(previous, seen.principal, connection)

    def _writer(self, plan: _Plan, context: Context, response_id: str) -> ResponseWriter:
        body = plan.body
        is_warm_up = body.get("generate") is False
        found = Answer((), 0) if is_warm_up else answer(context, self.answers)
        encrypted = body.get("store") is False or "reasoning.encrypted_content" in (
            body.get("include") or []
        )
        items = with_encrypted(found.items, wanted=encrypted)
        return ResponseWriter(
            request=body,
            response_id=response_id,
            created_at=int(time.time()),
            output=with_ids(items, response_id),
            usage=usage_of(context, found.tokens),
            incomplete=found.incomplete,
            completed_output=self.completed_output,
        )

    def _timed(self, events: list[Event], plan: _Plan) -> list[TimedEvent]:
        seen_tokens = plan.parent.trace.tokens if plan.is_warm and plan.parent else 0
        cost = TurnCost(plan.request_bytes, (plan.trace.tokens - seen_tokens) * 4, plan.is_warm)
        due = self.latency.schedule(cost, (event.tokens for event in events))
        return [TimedEvent(*pair) for pair in zip(due, events, strict=True)]

    def _remember(
        self, plan: _Plan, writer: ResponseWriter, seen: Seen, connection: ConnectionMemory | None
    ) -> None:
        """Only a completed response is one to continue from (protocol section 2.6)."""
        seen.finished = True
        final = writer.final()
        produced = tuple(writer.output)
        held = Held(
            writer.response_id,
            seen.principal,
            plan.parent,
            plan.given,
            produced,
            plan.trace.extended(produced),
            plan.ledger.extended(produced),
            final,
            plan.request_bytes,
        )
        self.storage.note_owner(held)
        if plan.body.get("store") is not False:
            self.storage.keep(held)
        conversation = _conversation(plan.body)
        if conversation is not None:
            self.storage.advance_conversation(conversation, held)
        if connection is not None:
            connection.latest = held if final["status"] == "completed" else None


def _conversation(body: dict[str, Json]) -> str | None:
    """The id of the conversation that a request names, as a string or an object."""
    given = body.get("conversation")
    if given is None:
        return None
    return str(given.get("id") if isinstance(given, dict) else given)


def usage_of(context: Context, output_tokens: int) -> Usage:
    """Counted over the whole context. What was echoed is what a prompt cache could know."""
    settings = len(dumps(dict(context.settings))) // 4
    cached = settings + context.trace.echoed_tokens
    cached -= cached % _CACHE_BLOCK_TOKENS
    is_cached = context.trace.echoed_tokens > 0 and cached >= _CACHE_MIN_TOKENS
    return Usage(settings + context.trace.tokens, cached if is_cached else 0, output_tokens)
