"""
What can go wrong, on demand: one small class a fault.

A fault is armed for the next turn that it matches (`transport`, `when`), or the one `skip`
matching turns later, and fires `times` times. At most one armed fault fires in a turn, the
earliest armed first, so a list reads as a sequence of bad turns; `Combined` makes several one.

Faults act at one of three moments: on the WebSocket upgrade, on the request (nothing is
generated), or on the stream. The last kind is a pure change of the `Script` that the server is
about to play: a list of steps, each an event to send or a way to end.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, ClassVar

from proxy.simulator.validate import Transport
from proxy.simulator.wire import Json, Problem, Shape, dumps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from proxy.simulator.journal import Seen


class Action(enum.Enum):
    """What a step does."""

    SEND = enum.auto()
    CLOSE = enum.auto()
    """A close frame with a code on a WebSocket; a clean end of the body on HTTP."""
    ABORT = enum.auto()
    """The TCP connection ends without a close frame."""
    RESET = enum.auto()
    """The TCP connection is reset (RST)."""
    STALL = enum.auto()
    """Nothing more ever comes."""


class Outcome(enum.Enum):
    """What the service does with its memory once a step is played."""

    NOTHING = enum.auto()
    COMMIT = enum.auto()
    EVICT = enum.auto()


@dataclass(frozen=True, slots=True)
class Step:
    """
    One thing that the server does. `text`, if set, is sent in place of `body`; `raw` are bytes
    for a WebSocket's transport, in place of a frame.
    """

    action: Action = Action.SEND
    due_s: float = 0.0
    body: Mapping[str, Json] = field(default_factory=dict)
    text: str | None = None
    raw: bytes | None = None
    code: int = 1000
    outcome: Outcome = Outcome.NOTHING

    @property
    def kind(self) -> str:
        """The `event:` name of an SSE event."""
        return str(self.body.get("type", "message"))

    def encoded(self) -> str:
        """The JSON text to send."""
        return dumps(self.body) if self.text is None else self.text


@dataclass(frozen=True, slots=True)
class Script:
    """All steps of a turn. `slice_bytes` cuts SSE output into writes of that size."""

    steps: tuple[Step, ...]
    slice_bytes: int | None = None

    def until(self, after_events: int) -> tuple[tuple[Step, ...], float]:
        """The first so many steps (from the end if negative), and when the next was due."""
        kept = self.steps[:after_events]
        rest = self.steps[len(kept) :]
        return kept, rest[0].due_s if rest else self.steps[-1].due_s


class Moment(enum.Enum):
    """When a fault acts."""

    UPGRADE = enum.auto()
    REQUEST = enum.auto()
    STREAM = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What all faults have. `when` can be given in process only."""

    times: int = 1
    skip: int = 0
    transport: Transport | None = None
    when: Callable[[Seen], bool] | None = None

    moment_: ClassVar[Moment] = Moment.STREAM

    @property
    def moment(self) -> Moment:
        """When this fault acts."""
        return self.moment_

    def matches(self, seen: Seen) -> bool:
        """Whether this request is one that the fault is armed for."""
        if self.transport is not None and seen.transport is not self.transport:
            return False
        return self.when is None or self.when(seen)

    def change(self, script: Script) -> Script:
        """The script with the fault in it; the same script where it acts at another moment."""
        return script


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseUpgrade(Fault):
    """The WebSocket handshake is answered with an HTTP status."""

    status: int = 426
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = '{"error":{"message":"Upgrade refused.","type":"invalid_request_error"}}'

    moment_: ClassVar[Moment] = Moment.UPGRADE


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply(Fault):
    """
    An error in place of an answer, or after so many events of it.

    On HTTP before any event: the status with a body (`raw_body` if given, such as HTML). On a
    WebSocket: a frame in one of the shapes. After events: an `error` event on either.
    """

    status: int = 500
    message: str = "The server had an error while processing your request."
    code: str | None = None
    param: str | None = None
    type: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    shape: Shape = Shape.NESTED
    after_events: int = 0
    raw_body: str | None = None

    @property
    def moment(self) -> Moment:
        """On the request unless events come first."""
        return Moment.STREAM if self.after_events else Moment.REQUEST

    @property
    def problem(self) -> Problem:
        """The error as a value."""
        return Problem(
            self.status, self.message, self.code, self.param, self.type, dict(self.headers)
        )

    def change(self, script: Script) -> Script:
        """Events, then the error, and no terminal event."""
        kept, due_s = script.until(self.after_events)
        error = Step(due_s=due_s, body=self.problem.frame(self.shape), outcome=Outcome.EVICT)
        return replace(script, steps=(*kept, error))


NOT_FOUND_WORDINGS: tuple[Mapping[str, str | None], ...] = (
    {
        "code": "previous_response_not_found",
        "message": "Previous response with id 'resp_x' not found.",
        "param": "previous_response_id",
    },
    {"message": "Invalid `previous_response_id`."},
    {"message": "previous_response_id is not available for this user"},
    {"message": "Unsupported parameter: previous_response_id", "param": "previous_response_id"},
)
"""The wordings in which upstreams say that they do not know a response."""


def previous_response_not_found(wording: int = 0, shape: Shape = Shape.NESTED) -> ErrorReply:
    """The error of an upstream that forgot, in one of `NOT_FOUND_WORDINGS`."""
    words = NOT_FOUND_WORDINGS[wording]
    return ErrorReply(
        status=400,
        code=words.get("code"),
        message=words["message"] or "",
        param=words.get("param"),
        shape=shape,
        transport=Transport.WS,
    )


def connection_limit_reached() -> ErrorReply:
    """The error of a connection that is an hour old."""
    return ErrorReply(
        status=400,
        code="websocket_connection_limit_reached",
        message="Responses websocket connection limit reached (60 minutes).",
        transport=Transport.WS,
    )


class End(enum.StrEnum):
    """How a connection ends in the middle of a turn."""

    CLOSE = "close"
    ABORT = "abort"
    RESET = "reset"
    STALL = "stall"


@dataclass(frozen=True, slots=True, kw_only=True)
class Break(Fault):
    """
    The stream breaks off after so many events; -1 is after all but the terminal one.

    `code` is the close code where the end is a close frame (1001, 1008, 1009, 1011, 1012, ...).
    """

    end: End = End.ABORT
    after_events: int = 0
    code: int = 1011

    def change(self, script: Script) -> Script:
        """The events before the break, then the end."""
        kept, due_s = script.until(self.after_events)
        end = Step(action=Action[self.end.name], due_s=due_s, code=self.code)
        return replace(script, steps=(*kept, end))


@dataclass(frozen=True, slots=True, kw_only=True)
class FailResponse(Fault):
    """`response.failed` after so many events."""

    after_events: int = 2
    code: str = "server_error"
    message: str = "The model failed to generate a response."

    def change(self, script: Script) -> Script:
        """Events, then the failed response."""
        error = {"code": self.code, "message": self.message}
        changes: dict[str, Json] = {"status": "failed", "error": error, "output": [], "usage": None}
        return _ended_otherwise(script, self.after_events, "response.failed", changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndIncomplete(Fault):
    """`response.incomplete` in place of the terminal event."""

    reason: str = "content_filter"

    def change(self, script: Script) -> Script:
        """All items, then the incomplete response."""
        details = {"reason": self.reason}
        changes: dict[str, Json] = {"status": "incomplete", "incomplete_details": details}
        return _ended_otherwise(script, -1, "response.incomplete", changes)


def _ended_otherwise(
    script: Script, after_events: int, kind: str, changes: Mapping[str, Json]
) -> Script:
    kept, due_s = script.until(after_events)
    terminal = script.steps[-1].body
    response = {**terminal.get("response", {}), **changes}
    body = {**terminal, "type": kind, "response": response, "sequence_number": len(kept)}
    return replace(script, steps=(*kept, Step(due_s=due_s, body=body, outcome=Outcome.EVICT)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraEvents(Fault):
    """Vendor events around the answer: `before` the first event, `after` the terminal one."""

    before: Sequence[Mapping[str, Json]] = ()
    after: Sequence[Mapping[str, Json]] = ()

    def change(self, script: Script) -> Script:
        """The script between the extra events."""
        first, last = script.steps[0].due_s, script.steps[-1].due_s
        before = (Step(due_s=first, body=body) for body in self.before)
        after = (Step(due_s=last, body=body) for body in self.after)
        return replace(script, steps=(*before, *script.steps, *after))


CODEX_RATE_LIMITS: Mapping[str, Json] = {
    "type": "codex.rate_limits",
    "plan_type": "plus",
    "rate_limits": {"allowed": True, "limit_reached": False},
}
WEBSOCKET_TIMING: Mapping[str, Json] = {
    "type": "responsesapi.websocket_timing",
    "timing": {"ms": 3},
}


class Style(enum.StrEnum):
    """Ways to write the same events otherwise, and ways to write them wrong."""

    PRETTY = "pretty"
    """JSON over several lines."""
    TYPE_LAST = "type_last"
    """Keys in reverse order."""
    ESCAPED = "escaped"
    """ASCII only, with \\u escapes."""
    NO_SEQUENCE = "no_sequence"
    """No `sequence_number`."""
    FOREIGN_ID = "foreign_id"
    """From the third event on, the response object has another id (a stray stream)."""
    DUPLICATE_CREATED = "duplicate_created"
    """`response.created` twice."""
    NO_SETUP = "no_setup"
    """No `output_item.added` and no `content_part.added`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restyle(Fault):
    """All events of the turn written in another style."""

    style: Style = Style.PRETTY

    def change(self, script: Script) -> Script:
        """Each event in the style."""
        steps = (new for i, step in enumerate(script.steps) for new in self._restyled(step, i))
        return replace(script, steps=tuple(steps))

    def _restyled(self, step: Step, index: int) -> Iterator[Step]:
        body = step.body
        match self.style:
            case Style.PRETTY:
                yield replace(step, text=json.dumps(body, indent=2, ensure_ascii=False))
            case Style.TYPE_LAST:
                yield replace(step, body=dict(reversed(dict(body).items())))
            case Style.ESCAPED:
                yield replace(step, text=json.dumps(body))
            case Style.NO_SEQUENCE:
                yield replace(step, body={k: v for k, v in body.items() if k != "sequence_number"})
            case Style.FOREIGN_ID:
                yield _with_foreign_id(step) if index >= 2 and "response" in body else step
            case Style.DUPLICATE_CREATED:
                yield step
                if index == 0:
                    yield step
            case Style.NO_SETUP:
                if not step.kind.endswith(".added"):
                    yield step


def _with_foreign_id(step: Step) -> Step:
    response = {**step.body["response"], "id": "resp_00000000foreign"}
    return replace(step, body={**step.body, "response": response})


@dataclass(frozen=True, slots=True, kw_only=True)
class HugeEvent(Fault):
    """The second event is this many bytes larger."""

    extra_bytes: int = 1 << 20

    def change(self, script: Script) -> Script:
        """The script with the padded event."""
        first, second, *rest = script.steps
        padded = replace(second, body={**second.body, "padding": "x" * self.extra_bytes})
        return replace(script, steps=(first, padded, *rest))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStream(Fault):
    """Each event comes so many milliseconds after the one before, on top of its due time."""

    gap_ms: float = 10.0

    def change(self, script: Script) -> Script:
        """The script, later and later."""
        gap_s = self.gap_ms / 1000
        steps = (replace(s, due_s=s.due_s + i * gap_s) for i, s in enumerate(script.steps))
        return replace(script, steps=tuple(steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceWrites(Fault):
    """
    SSE output in writes of so many bytes, across the borders of events and characters.

    A size beyond the whole stream merges all events into one write.
    """

    slice_bytes: int = 3

    def change(self, script: Script) -> Script:
        """The script with its writes sliced."""
        return replace(script, slice_bytes=self.slice_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined(Fault):
    """Several stream faults in one turn, applied in order."""

    faults: Sequence[Fault] = ()

    def change(self, script: Script) -> Script:
        """The script with all of them in it."""
        for fault in self.faults:
            script = fault.change(script)
        return script


KINDS: Mapping[str, type[Fault]] = {
    "refuse_upgrade": RefuseUpgrade,
    "error_reply": ErrorReply,
    "break": Break,
    "fail_response": FailResponse,
    "end_incomplete": EndIncomplete,
    "extra_events": ExtraEvents,
    "restyle": Restyle,
    "huge_event": HugeEvent,
    "slow_stream": SlowStream,
    "slice_writes": SliceWrites,
    "combined": Combined,
}
"""Faults by the `kind` that they have over HTTP."""

_ENUMS = {"transport": Transport, "shape": Shape, "end": End, "style": Style}


def fault_from_json(value: Mapping[str, Json]) -> Fault:
    """
    A fault from `{"kind": "break", "end": "reset", "after_events": 3}`.

    Raises ValueError for an unknown kind, field or member of an enum.
    """
    given = dict(value)
    kind = KINDS.get(str(given.pop("kind", None)))
    if kind is None:
        raise ValueError(f"no such fault: {value.get('kind')}")
    known = {each.name for each in fields(kind)} - {"when"}
    if unknown := set(given) - known:
        raise ValueError(f"no such field: {', '.join(sorted(unknown))}")
    for name in given.keys() & _ENUMS.keys():
        if given[name] is not None:
            given[name] = _ENUMS[name](given[name])
    if "faults" in given:
        given["faults"] = tuple(fault_from_json(each) for each in given["faults"])
    return kind(**given)


@dataclass(slots=True)
class Faults:
    """The faults that are armed, in order."""

    armed: list[Fault] = field(default_factory=list)
    fired: list[Fault] = field(default_factory=list)

    def arm(self, *faults: Fault) -> None:
        """Arm faults, behind those that are armed already."""
        self.armed.extend(faults)

    def clear(self) -> None:
        """Disarm all."""
        self.armed.clear()

    def take(self, seen: Seen, *, upgrade: bool = False) -> Fault | None:
        """The fault that fires now, if any; counts it as fired once."""
        for index, fault in enumerate(self.armed):
            if (fault.moment is Moment.UPGRADE) is not upgrade or not fault.matches(seen):
                continue
            if fault.skip > 0:
                self.armed[index] = replace(fault, skip=fault.skip - 1)
                continue
            if fault.times > 1:
                self.armed[index] = replace(fault, times=fault.times - 1)
            else:
                del self.armed[index]
            self.fired.append(fault)
            return fault
        return None
