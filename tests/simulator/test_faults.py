"""Faults: when they fire, and what they make of a script."""

import pytest

from proxy.simulator.faults import (
    CODEX_RATE_LIMITS,
    NOT_FOUND_WORDINGS,
    WEBSOCKET_TIMING,
    Action,
    Break,
    Combined,
    End,
    EndIncomplete,
    ErrorReply,
    ExtraEvents,
    FailResponse,
    Faults,
    HugeEvent,
    Moment,
    Outcome,
    RefuseUpgrade,
    Restyle,
    Script,
    SliceWrites,
    SlowStream,
    Step,
    Style,
    fault_from_json,
    previous_response_not_found,
)
from proxy.simulator.journal import Seen
from proxy.simulator.validate import Transport
from proxy.simulator.wire import Problem, Shape


def seen(transport=Transport.WS, previous=None):
    """A request as it came in."""
    record = Seen(transport, 1, "p", "/v1/responses", {}, 0, b"")
    record.previous_response_id = previous
    return record


def script(*kinds):
    """A script of some events; the last one commits."""
    bodies = [{"type": kind, "sequence_number": i} for i, kind in enumerate(kinds)]
    for body in (bodies[0], bodies[-1]):
        body["response"] = {"id": "resp_1", "status": "completed", "output": []}
    *steps, last = (Step(body=body) for body in bodies)
    return Script((*steps, Step(body=last.body, outcome=Outcome.COMMIT)))


ANSWER = script("response.created", "a.added", "a.delta", "a.done", "response.completed")


def kinds(changed):
    """The types of the events that a script sends."""
    return [step.kind for step in changed.steps if step.action is Action.SEND]


def test_faults_fire_in_order_one_a_turn():
    """A list of faults is a sequence of bad turns."""
    faults = Faults()
    faults.arm(Break(times=2), FailResponse())
    fired = [type(faults.take(seen())) for _ in range(4)]
    assert fired == [Break, Break, FailResponse, type(None)]


def test_a_fault_can_wait_and_choose():
    """`skip` counts matching turns; `transport` and `when` say what matches."""
    faults = Faults()
    faults.arm(Break(skip=1, transport=Transport.WS, when=lambda s: bool(s.previous_response_id)))
    assert faults.take(seen(Transport.HTTP, "resp_1")) is None
    assert faults.take(seen()) is None
    assert faults.take(seen(previous="resp_1")) is None
    assert isinstance(faults.take(seen(previous="resp_1")), Break)


def test_upgrades_have_their_own_faults():
    """A refused upgrade does not fire in a turn, nor a turn's fault in an upgrade."""
    faults = Faults()
    faults.arm(Break(), RefuseUpgrade())
    assert isinstance(faults.take(seen(), upgrade=True), RefuseUpgrade)
    assert faults.take(seen(), upgrade=True) is None
    faults.clear()
    assert faults.take(seen()) is None


@pytest.mark.parametrize("end", End)
@pytest.mark.parametrize(("after", "left"), [(0, 0), (2, 2), (-1, 4), (99, 5)])
def test_a_break_keeps_what_came_before_it(end, after, left):
    """So many events, then the end; a negative count is from the end."""
    changed = Break(end=end, after_events=after, code=1012).change(ANSWER)
    assert len(kinds(changed)) == left
    assert changed.steps[-1].action.name == end.name


def test_an_error_after_events_replaces_the_rest():
    """No terminal event follows, and nothing is remembered."""
    fault = ErrorReply(status=503, after_events=2)
    assert (fault.moment, ErrorReply().moment) == (Moment.STREAM, Moment.REQUEST)
    changed = fault.change(ANSWER)
    assert kinds(changed) == ["response.created", "a.added", "error"]
    assert changed.steps[-1].outcome is Outcome.EVICT


@pytest.mark.parametrize(
    ("fault", "last"),
    [(FailResponse(), "response.failed"), (EndIncomplete(), "response.incomplete")],
)
def test_other_endings_are_not_remembered(fault, last):
    """A response that failed or stopped short is none to continue from."""
    end = fault.change(ANSWER).steps[-1]
    assert (end.kind, end.outcome) == (last, Outcome.EVICT)
    assert end.body["response"]["id"] == "resp_1"
    assert "response." + end.body["response"]["status"] == last


def test_extra_events_stand_around_the_answer():
    """Vendor events come before the first and after the terminal event."""
    changed = ExtraEvents(before=[CODEX_RATE_LIMITS], after=[WEBSOCKET_TIMING]).change(ANSWER)
    assert kinds(changed) == ["codex.rate_limits", *kinds(ANSWER), "responsesapi.websocket_timing"]


def test_styles_write_events_otherwise():
    """Each style changes what it says and nothing else."""

    def styled(style):
        return Restyle(style=style).change(ANSWER)

    assert "\n" in styled(Style.PRETTY).steps[0].encoded()
    assert list(styled(Style.TYPE_LAST).steps[1].body)[-1] == "type"
    assert styled(Style.ESCAPED).steps[0].encoded().isascii()
    assert "sequence_number" not in styled(Style.NO_SEQUENCE).steps[0].body
    assert styled(Style.FOREIGN_ID).steps[-1].body["response"]["id"] != "resp_1"
    assert kinds(styled(Style.DUPLICATE_CREATED))[:2] == ["response.created"] * 2
    assert "a.added" not in kinds(styled(Style.NO_SETUP))


def test_sizes_and_speeds_change():
    """An event grows, events come later, writes become small."""
    both = Combined(faults=[HugeEvent(extra_bytes=5000), SlowStream(gap_ms=5), SliceWrites()])
    changed = both.change(ANSWER)
    assert len(changed.steps[1].encoded()) > 5000
    assert changed.steps[4].due_s == pytest.approx(0.02)
    assert changed.slice_bytes == 3


def test_faults_come_from_json():
    """The same faults can be armed over HTTP."""
    given = {"kind": "break", "end": "reset", "after_events": 3, "transport": "ws", "times": 2}
    armed = fault_from_json(given)
    assert armed == Break(end=End.RESET, after_events=3, transport=Transport.WS, times=2)
    both = fault_from_json({"kind": "combined", "faults": [{"kind": "huge_event"}]})
    assert both == Combined(faults=(HugeEvent(),))


@pytest.mark.parametrize(
    "given",
    [{}, {"kind": "earthquake"}, {"kind": "break", "size": 1}, {"kind": "break", "end": "soft"}],
)
def test_unknown_faults_are_refused(given):
    """An unknown kind, field or value is a ValueError."""
    with pytest.raises(ValueError, match=r"no such|not a valid"):
        fault_from_json(given)


@pytest.mark.parametrize("wording", range(len(NOT_FOUND_WORDINGS)))
def test_a_forgotten_response_has_many_wordings(wording):
    """All of them are 400s that mention the previous response."""
    problem = previous_response_not_found(wording).problem
    assert problem.status == 400
    assert "previous" in f"{problem.message} {problem.code}".lower()


def test_error_frames_have_their_shapes():
    """The same error, as each upstream writes it."""
    problem = Problem(429, "slow down", "rate_limit_exceeded", headers={"retry-after": "1"})
    nested, flat, legacy, typeless = (problem.frame(shape) for shape in Shape)
    assert nested["status"] == 429
    assert nested["error"]["headers"] == {"retry-after": "1"}
    assert (flat["type"], flat["code"]) == ("error", "rate_limit_exceeded")
    assert (legacy["status_code"], legacy["headers"]) == (429, {"retry-after": "1"})
    assert set(typeless) == {"error"}
