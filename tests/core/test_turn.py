"""One turn: a playbook for each row of the table of replays, and a walk through all stories."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
from playbook import Playbook

from proxy.core.reasons import Mode, Reason
from proxy.core.turn import (
    AcquireLease,
    Begun,
    BreakReply,
    Broken,
    Completed,
    ConnectionClosed,
    DownstreamClosed,
    Ended,
    Erred,
    ForgetHead,
    Form,
    LeaseFailed,
    LeaseGranted,
    PassThrough,
    RecordHead,
    Refuse,
    Refused,
    Relay,
    ReleaseLease,
    SendAsIs,
    SendDelta,
    SendFull,
    Silent,
    State,
    Turn,
    UnexpectedEvent,
)
from proxy.core.verdicts import (
    Refusal,
    connection_failed_reply,
    http_reply,
    protocol_fault_reply,
    silent_reply,
    unavailable_reply,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy.core.turn import Command, Event


def refusal(status: int, code: str | None = None, said: str = "No.") -> Refusal:
    """Return an error of the upstream."""
    return Refusal(status, code, None, said, None)


NOT_FOUND = refusal(400, "previous_response_not_found")
LIMIT = refusal(400, "websocket_connection_limit_reached")
INCONSISTENT = refusal(400, said="No tool output found for function call call_1.")
RATE_LIMIT = refusal(429, "rate_limit_exceeded")
BAD_KEY = refusal(401, "invalid_api_key")
BAD_REQUEST = refusal(400, "invalid_prompt")
OVERLOADED = refusal(503, "server_is_overloaded")
TOO_MANY = unavailable_reply(429, "rate_limit_exceeded", "Slow down.")


def delta(*, safe: bool = True, fits: bool = True, budget: bool = True) -> Turn:
    """Return a turn that continues a chain."""
    return Turn(
        Form.DELTA,
        Reason.CONTINUED,
        replay_safe=safe,
        full_fits=fits,
        may_resend=lambda: budget,
    )


def full(*, safe: bool = True, budget: bool = True) -> Turn:
    """Return a turn that begins a chain."""
    return Turn(Form.FULL, Reason.NEW_CONVERSATION, replay_safe=safe, may_resend=lambda: budget)


def sent_delta(turn: Turn | None = None) -> Playbook:
    """Play a turn until its delta is sent."""
    return (
        Playbook(turn or delta()) << AcquireLease() >> LeaseGranted(holds_chain=True) << SendDelta()
    )


def sent_full(turn: Turn | None = None) -> Playbook:
    """Play a turn until its full message is sent."""
    return (
        Playbook(turn or full()) << AcquireLease() >> LeaseGranted(holds_chain=False) << SendFull()
    )


def resent_full(turn: Turn | None = None) -> Playbook:
    """Play a turn that lost its connection until the full message is sent on another one."""
    return (
        sent_delta(turn)
        >> ConnectionClosed(1006)
        << ReleaseLease(reusable=False)
        << AcquireLease(fresh=True)
        >> LeaseGranted(holds_chain=False)
        << SendFull()
    )


def summary(turn: Turn) -> tuple[Mode, Reason, list[Reason]]:
    """Return what is told of a turn when it is over."""
    return turn.mode, turn.reason, turn.resends


def test_a_delta_goes_up_and_the_answer_comes_down() -> None:
    """The common case: the chain continues, and its new head is recorded."""
    turn = (
        sent_delta()
        >> Begun()
        << Relay()
        >> Completed()
        << RecordHead()
        << ReleaseLease(reusable=True, holds_answer=True)
    ).ends()

    assert summary(turn) == (Mode.DELTA, Reason.CONTINUED, [])


def test_a_conversation_begins() -> None:
    """The whole history goes up; the answer is the first head of a chain."""
    turn = (
        sent_full()
        >> Begun()
        << Relay()
        >> Completed(clean=False)
        << RecordHead()
        << ReleaseLease(reusable=False, holds_answer=True)
    ).ends()

    assert summary(turn) == (Mode.FULL, Reason.NEW_CONVERSATION, [])


@pytest.mark.parametrize("form", [Form.DELTA_ANYWHERE, Form.DELTA])
def test_a_chain_lost_before_the_lease(form: Form) -> None:
    """A stored head can be loaded anywhere; any other goes with its connection."""
    turn = Turn(form, Reason.CONTINUED)
    commands = Playbook(turn) << AcquireLease() >> LeaseGranted(holds_chain=False)
    if form is Form.DELTA_ANYWHERE:
        _ = commands << SendDelta()
        assert summary(turn) == (Mode.DELTA, Reason.CONTINUED, [])
    else:
        _ = commands << SendFull()
        assert summary(turn) == (Mode.FULL, Reason.CONNECTION_LOST, [])


def test_a_chain_lost_and_too_large_to_send_in_full() -> None:
    """HTTP takes what fits into no message; the connection is as good as it was."""
    turn = (
        Playbook(delta(fits=False))
        << AcquireLease()
        >> LeaseGranted(holds_chain=False)
        << ReleaseLease(reusable=True)
        << PassThrough(Reason.TOO_LARGE)
    ).ends()

    assert summary(turn) == (Mode.HTTP, Reason.TOO_LARGE, [])


def test_a_forgotten_response_costs_one_resend_in_place() -> None:
    """Upstream does not know the id: the history goes out on the same connection, unnoticed."""
    turn = (
        sent_delta()
        >> Refused(NOT_FOUND)
        << ForgetHead()
        << SendFull()
        >> Begun()
        << Relay()
        >> Completed()
        << RecordHead()
        << ReleaseLease(reusable=True, holds_answer=True)
    ).ends()

    reason = Reason.PREVIOUS_RESPONSE_NOT_FOUND
    assert summary(turn) == (Mode.FULL, reason, [reason])


def test_a_response_forgotten_twice_goes_over_http() -> None:
    """An upstream that finds no previous response where none was named is left alone."""
    turn = (
        sent_delta()
        >> Refused(NOT_FOUND)
        << ForgetHead()
        << SendFull()
        >> Refused(NOT_FOUND)
        << ReleaseLease(reusable=False)
        << PassThrough(Reason.RESEND_FAILED)
    ).ends()

    assert turn.mode is Mode.HTTP


def test_a_connection_at_its_limit_is_replaced() -> None:
    """The history goes out on a new connection, also of a turn that was sent in full already."""
    for start in (sent_delta(), sent_full()):
        turn = (
            start
            >> Refused(LIMIT)
            << ReleaseLease(reusable=False)
            << AcquireLease(fresh=True)
            >> LeaseGranted(holds_chain=False)
            << SendFull()
            >> Refused(LIMIT)
            << ReleaseLease(reusable=False)
            << PassThrough(Reason.RESEND_FAILED)
        ).ends()
        assert turn.resends == [Reason.CONNECTION_LIMIT_REACHED]


def test_a_rejected_delta_is_our_mistake_once() -> None:
    """The full history decides: if that is refused as well, it is the client's own error."""
    (
        sent_delta()
        >> Refused(INCONSISTENT)
        << ForgetHead()
        << SendFull()
        >> Refused(INCONSISTENT)
        << ReleaseLease(reusable=True)
        << Refuse(http_reply(INCONSISTENT))
    ).ends()
    (
        sent_full()
        >> Refused(INCONSISTENT)
        << ReleaseLease(reusable=True)
        << Refuse(http_reply(INCONSISTENT))
    ).ends()


def test_no_lease_means_http() -> None:
    """The reason of the refusal is the reason of the turn."""
    turn = (
        Playbook(full())
        << AcquireLease()
        >> LeaseFailed(Reason.UPGRADE_REFUSED)
        << PassThrough(Reason.UPGRADE_REFUSED)
    ).ends()

    assert summary(turn) == (Mode.HTTP, Reason.UPGRADE_REFUSED, [])


def test_a_throttled_upgrade_is_the_clients_to_wait_for() -> None:
    """A 429 is handed on: HTTP would meet it again."""
    play = Playbook(full()) << AcquireLease() >> LeaseFailed(Reason.UPGRADE_REFUSED, TOO_MANY)
    (play << Refuse(TOO_MANY)).ends()


def test_no_lease_for_a_resend_means_http() -> None:
    """The turn was tried once and could not be tried again."""
    turn = (
        sent_delta()
        >> Silent()
        << ReleaseLease(reusable=False)
        << AcquireLease(fresh=True)
        >> LeaseFailed(Reason.CONNECTION_CAP)
        << PassThrough(Reason.RESEND_FAILED)
    ).ends()

    assert turn.resends == [Reason.UPSTREAM_SILENT]


@pytest.mark.parametrize(
    ("answer", "reusable"), [(RATE_LIMIT, True), (BAD_REQUEST, True), (BAD_KEY, False)]
)
def test_a_refusal_is_handed_on(answer: Refusal, *, reusable: bool) -> None:
    """The client gets the status and the error that it would have had over HTTP."""
    for start in (sent_delta(), sent_full(), resent_full()):
        (start >> Refused(answer) << ReleaseLease(reusable) << Refuse(http_reply(answer))).ends()


def test_a_failing_upstream_is_tried_once_more() -> None:
    """On another connection; then its error is the client's."""
    for start in (sent_delta(), sent_full()):
        turn = (
            start
            >> Refused(OVERLOADED)
            << ReleaseLease(reusable=False)
            << AcquireLease(fresh=True)
            >> LeaseGranted(holds_chain=False)
            << SendFull()
            >> Refused(OVERLOADED)
            << ReleaseLease(reusable=False)
            << Refuse(http_reply(OVERLOADED))
        ).ends()
        assert turn.resends == [Reason.UPSTREAM_FAILED]


def test_no_budget_for_a_resend() -> None:
    """An error goes to the client; what only WebSocket mode does not know goes over HTTP."""
    (
        sent_full(full(budget=False))
        >> Refused(OVERLOADED)
        << ReleaseLease(reusable=False)
        << Refuse(http_reply(OVERLOADED))
    ).ends()
    (
        sent_delta(delta(budget=False))
        >> Refused(NOT_FOUND)
        << ForgetHead()
        << ReleaseLease(reusable=False)
        << PassThrough(Reason.RESEND_BUDGET)
    ).ends()
    (
        sent_delta(delta(budget=False))
        >> ConnectionClosed(1006, sent=False)
        << ReleaseLease(reusable=False)
        << PassThrough(Reason.RESEND_BUDGET)
    ).ends()
    (
        sent_delta(delta(budget=False))
        >> ConnectionClosed(1006)
        << ReleaseLease(reusable=False)
        << Refuse(connection_failed_reply())
    ).ends()


def test_no_room_for_a_resend() -> None:
    """A history that fits into no message can only go over HTTP."""
    (
        sent_delta(delta(fits=False))
        >> Refused(NOT_FOUND)
        << ForgetHead()
        << ReleaseLease(reusable=False)
        << PassThrough(Reason.TOO_LARGE)
    ).ends()
    (
        sent_delta(delta(fits=False))
        >> ConnectionClosed(1006, sent=False)
        << ReleaseLease(reusable=False)
        << PassThrough(Reason.TOO_LARGE)
    ).ends()


LOST: list[tuple[Event, Reason]] = [
    (ConnectionClosed(1006), Reason.UPSTREAM_CLOSED),
    (Silent(), Reason.UPSTREAM_SILENT),
    (Broken(), Reason.UPSTREAM_FAILED),
    (ConnectionClosed(1006, sent=False), Reason.SEND_FAILED),
]


@pytest.mark.parametrize(("event", "reason"), LOST, ids=str)
def test_a_lost_connection_is_replaced_where_that_is_safe(event: Event, reason: Reason) -> None:
    """A turn that nobody would notice twice, or that never left, is sent again in full."""
    for start in (sent_delta(), sent_full()):
        turn = (
            start
            >> event
            << ReleaseLease(reusable=False)
            << AcquireLease(fresh=True)
            >> LeaseGranted(holds_chain=True)
            << SendFull()
        ).turn
        assert summary(turn) == (Mode.FULL, reason, [reason])


@pytest.mark.parametrize(
    ("event", "reply"),
    [
        (ConnectionClosed(1006), connection_failed_reply()),
        (ConnectionClosed(1008), connection_failed_reply()),
        (Silent(), silent_reply()),
        (Broken(), protocol_fault_reply()),
    ],
    ids=str,
)
def test_a_lost_connection_is_the_clients_to_judge_where_it_is_not(
    event: Event, reply: object
) -> None:
    """Upstream may have run the turn: whether to run it again is not ours to decide."""
    for start in (sent_delta(delta(safe=False)), resent_full()):
        (start >> event << ReleaseLease(reusable=False) << Refuse(reply)).ends()  # type: ignore[arg-type]


def test_a_message_too_big_goes_over_http() -> None:
    """Close code 1009 is about the size of a message that was read by nobody."""
    turn = (
        sent_delta(delta(safe=False))
        >> ConnectionClosed(1009)
        << ReleaseLease(reusable=False)
        << PassThrough(Reason.TOO_LARGE)
    ).ends()

    assert summary(turn) == (Mode.HTTP, Reason.TOO_LARGE, [])


def test_closed_for_a_policy_before_the_message_left() -> None:
    """Another connection would meet the same: HTTP, and not for want of a budget."""
    turn = (
        sent_delta()
        >> ConnectionClosed(1008, sent=False)
        << ReleaseLease(reusable=False)
        << PassThrough(Reason.SEND_FAILED)
    ).ends()

    assert summary(turn) == (Mode.HTTP, Reason.SEND_FAILED, [])


def test_closed_twice_before_the_message_left() -> None:
    """Two connections that took no message are enough."""
    (
        resent_full()
        >> ConnectionClosed(1006, sent=False)
        << ReleaseLease(reusable=False)
        << PassThrough(Reason.RESEND_FAILED)
    ).ends()


@pytest.mark.parametrize("event", [ConnectionClosed(1011), Silent(), Broken()], ids=str)
def test_nothing_is_sent_again_once_the_answer_began(event: Event) -> None:
    """The client has seen a byte: it gets a reply that nobody can take for complete."""
    play = sent_delta() >> Begun() << Relay() >> event << ReleaseLease(reusable=False)
    commands = play._due

    assert len(commands) == 1
    assert isinstance(commands[0], BreakReply)
    assert commands[0].code == "upstream_connection_lost"


@pytest.mark.parametrize("event", [Ended(), Ended(clean=False), Erred()], ids=str)
def test_an_answer_that_does_not_complete_makes_no_head(event: Event) -> None:
    """The client sees the upstream's own ending; the chain is not continued from it."""
    reusable = event == Ended()

    (sent_delta() >> Begun() << Relay() >> event << ReleaseLease(reusable)).ends()


def test_the_client_leaves() -> None:
    """A connection with an unfinished answer is closed, never given to anybody."""
    (Playbook(full()) << AcquireLease() >> DownstreamClosed()).ends()
    (sent_full() >> DownstreamClosed() << ReleaseLease(reusable=False)).ends()
    (sent_full() >> Begun() << Relay() >> DownstreamClosed() << ReleaseLease(reusable=False)).ends()


def as_is() -> Playbook:
    """Play a turn of a client that chains by itself until it is sent."""
    turn = Turn(Form.AS_IS, Reason.CLIENT_CHAINED, replay_safe=True)
    return Playbook(turn) << AcquireLease() >> LeaseGranted(holds_chain=True) << SendAsIs()


def test_a_client_that_chains_by_itself() -> None:
    """Its request goes as it is and is never rebuilt; HTTP decides what upstream does not know."""
    turn = (
        as_is()
        >> Begun()
        << Relay()
        >> Completed()
        << RecordHead()
        << ReleaseLease(reusable=True, holds_answer=True)
    ).ends()
    assert summary(turn) == (Mode.DELTA, Reason.CLIENT_CHAINED, [])
    (
        as_is()
        >> Refused(NOT_FOUND)
        << ForgetHead()
        << ReleaseLease(reusable=False)
        << PassThrough(Reason.PREVIOUS_RESPONSE_NOT_FOUND)
    ).ends()
    (
        as_is()
        >> ConnectionClosed(1006, sent=False)
        << ReleaseLease(reusable=False)
        << PassThrough(Reason.SEND_FAILED)
    ).ends()
    (
        as_is()
        >> ConnectionClosed(1006)
        << ReleaseLease(reusable=False)
        << Refuse(connection_failed_reply())
    ).ends()


def test_an_event_out_of_place_is_a_bug() -> None:
    """It is told with the state, and a turn shows how far it is."""
    turn = full()
    turn.start()

    with pytest.raises(UnexpectedEvent, match=r"Begun.* while LEASING"):
        turn.handle(Begun())
    assert repr(turn) == "<Turn LEASING FULL full new_conversation>"


# The walk: every event in every state, to the end of every story.

EVENTS: list[Event] = [
    LeaseGranted(holds_chain=True),
    LeaseGranted(holds_chain=False),
    LeaseFailed(Reason.CONNECTION_CAP),
    LeaseFailed(Reason.UPGRADE_REFUSED, TOO_MANY),
    Refused(NOT_FOUND),
    Refused(LIMIT),
    Refused(INCONSISTENT),
    Refused(RATE_LIMIT),
    Refused(OVERLOADED),
    Refused(BAD_KEY),
    ConnectionClosed(1006),
    ConnectionClosed(1006, sent=False),
    ConnectionClosed(1008, sent=False),
    ConnectionClosed(1009),
    Silent(),
    Begun(),
    Completed(),
    Ended(),
    Erred(),
    Broken(),
    DownstreamClosed(),
]
Story = list["Event | Command"]
DEPTH = 8


def stories(turn: Turn, told: Story, depth: int = DEPTH) -> Iterator[tuple[Turn, Story]]:
    """Yield every turn of events that ends, with all events and commands in order."""
    if turn.state is State.CLOSED:
        yield turn, told
        return
    assert depth, f"a turn without an end: {told}"
    for event in EVENTS:
        branch = copy.copy(turn)
        branch.resends = list(turn.resends)
        try:
            commands = branch.handle(event)
        except UnexpectedEvent:
            assert turn.state is not State.SENT or not isinstance(event, Refused)
            continue
        yield from stories(branch, [*told, event, *commands], depth - 1)


def every_story() -> Iterator[tuple[Turn, Story]]:
    """Yield the stories of every kind of turn."""
    for form in Form:
        for number in range(8):
            turn = Turn(
                form,
                Reason.CONTINUED,
                full_fits=bool(number & 1),
                replay_safe=bool(number & 2),
                may_resend=lambda allowed=bool(number & 4): allowed,  # type: ignore[misc]
            )
            yield from stories(turn, list(turn.start()))


SENDS = (SendDelta, SendFull, SendAsIs)
ENDS = (PassThrough, Refuse, BreakReply, RecordHead)


def check_leases(told: Story) -> None:
    """Every lease is given back once, and nothing is sent without one."""
    held = False
    for step in told:
        if isinstance(step, LeaseGranted):
            assert not held
            held = True
        elif isinstance(step, ReleaseLease):
            assert held
            held = False
        elif isinstance(step, (*SENDS, Relay, RecordHead)):
            assert held
    assert not held


def check_sends(told: Story) -> None:
    """At most two sends, the second in full; none after the answer began."""
    sends = [step for step in told if isinstance(step, SENDS)]
    assert len(sends) <= 2
    assert all(isinstance(step, SendFull) for step in sends[1:])
    if any(isinstance(step, Begun) for step in told):
        begun = next(i for i, step in enumerate(told) if isinstance(step, Begun))
        later = told[begun:]
        assert not any(
            isinstance(step, (*SENDS, AcquireLease, PassThrough, Refuse)) for step in later
        )
    for place, step in enumerate(told):
        if step in (Refused(NOT_FOUND), Refused(INCONSISTENT)) and isinstance(
            told[place - 1], SendDelta
        ):
            assert told[place + 1] == ForgetHead()


def check_outcome(turn: Turn, told: Story) -> None:
    """The client gets exactly one outcome, unless it left."""
    outcomes = [step for step in told if isinstance(step, ENDS)]
    endings = [step for step in told if isinstance(step, (Ended, Erred, DownstreamClosed))]
    assert len(outcomes) + len(endings) == 1
    assert isinstance(told[-1], (PassThrough, Refuse, BreakReply, ReleaseLease, DownstreamClosed))
    completed = any(isinstance(step, Completed) for step in told)
    assert completed == any(isinstance(step, RecordHead) for step in told)
    assert (turn.mode is Mode.HTTP) == any(isinstance(step, PassThrough) for step in told)
    passed = [step.reason for step in told if isinstance(step, PassThrough)]
    assert passed in ([], [turn.reason])


def check_resends(turn: Turn, told: Story) -> None:
    """A resend is counted with its reason, and happens where it may."""
    sends = [step for step in told if isinstance(step, SENDS)]
    assert len(turn.resends) <= 1
    assert len(sends) <= 1 + len(turn.resends)
    if turn.resends:
        assert turn.form is Form.FULL
        unsafe = [ConnectionClosed(1006), Silent(), Broken()]
        again = told.index(AcquireLease(fresh=True)) if AcquireLease(fresh=True) in told else 0
        if again and told[again - 2] in unsafe:
            assert turn._replay_safe


def test_no_order_of_events_breaks_a_rule() -> None:
    """Leases, sends, outcomes and resends keep their rules in every story that can happen."""
    count = 0
    for turn, told in every_story():
        count += 1
        try:
            check_leases(told)
            check_sends(told)
            check_outcome(turn, told)
            check_resends(turn, told)
        except AssertionError as error:
            raise AssertionError("\n".join(map(str, told))) from error

    assert count > 2000


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 422])
def test_what_responses_refuses_of_a_translated_turn_is_for_its_own_endpoint(status: int) -> None:
    """The client asked Chat Completions: that endpoint may take it, and its words are the right."""
    turn = (
        Playbook(Turn(Form.FULL, Reason.NEW_CONVERSATION, is_translated=True))
        << AcquireLease()
        >> LeaseGranted(holds_chain=False)
        << SendFull()
        >> Refused(refusal(status))
        << ReleaseLease(reusable=status not in (401, 403))
        << PassThrough(Reason.TRANSLATION_REFUSED)
    ).ends()

    assert turn.mode is Mode.HTTP


def test_a_model_that_responses_does_not_have_is_told_apart() -> None:
    """Such a refusal is worth remembering, and has a reason of its own."""
    (
        Playbook(Turn(Form.DELTA, Reason.CONTINUED, is_translated=True))
        << AcquireLease()
        >> LeaseGranted(holds_chain=True)
        << SendDelta()
        >> Refused(refusal(404, "model_not_found"))
        << ReleaseLease(reusable=True)
        << PassThrough(Reason.MODEL_REFUSED)
    ).ends()


def test_a_rate_limit_holds_for_both_endpoints() -> None:
    """A translated turn that is throttled tells the client so, as any other does."""
    (
        Playbook(Turn(Form.FULL, Reason.NEW_CONVERSATION, is_translated=True))
        << AcquireLease()
        >> LeaseGranted(holds_chain=False)
        << SendFull()
        >> Refused(RATE_LIMIT)
        << ReleaseLease(reusable=True)
        << Refuse(http_reply(RATE_LIMIT))
    ).ends()


def test_where_responses_fails_a_translated_turn_is_asked_of_its_own_endpoint() -> None:
    """One endpoint may be down while the other works: nobody is worse off than without us."""
    (
        Playbook(Turn(Form.DELTA, Reason.CONTINUED, is_translated=True, replay_safe=True))
        << AcquireLease()
        >> LeaseGranted(holds_chain=True)
        << SendDelta()
        >> Refused(OVERLOADED)
        << ReleaseLease(reusable=False)
        << AcquireLease(fresh=True)
        >> LeaseGranted(holds_chain=False)
        << SendFull()
        >> Refused(OVERLOADED)
        << ReleaseLease(reusable=False)
        << PassThrough(Reason.RESEND_FAILED)
    ).ends()


def test_without_a_budget_a_failure_is_asked_elsewhere_at_once() -> None:
    """A broken upstream is not flooded, and the client has its answer all the same."""
    turn = Turn(Form.FULL, Reason.NEW_CONVERSATION, is_translated=True, may_resend=lambda: False)
    (
        Playbook(turn)
        << AcquireLease()
        >> LeaseGranted(holds_chain=False)
        << SendFull()
        >> Refused(OVERLOADED)
        << ReleaseLease(reusable=False)
        << PassThrough(Reason.RESEND_BUDGET)
    ).ends()


@pytest.mark.parametrize("event", [ConnectionClosed(1006), Silent(), Broken()])
def test_what_is_lost_twice_before_it_began_goes_to_its_own_endpoint(event: Event) -> None:
    """To run it once more over HTTP does no harm, since it is stored nowhere."""
    (
        Playbook(Turn(Form.FULL, Reason.REPEATED, is_translated=True, replay_safe=True))
        << AcquireLease()
        >> LeaseGranted(holds_chain=False)
        << SendFull()
        >> event
        << ReleaseLease(reusable=False)
        << AcquireLease(fresh=True)
        >> LeaseGranted(holds_chain=False)
        << SendFull()
        >> event
        << ReleaseLease(reusable=False)
        << PassThrough(Reason.RESEND_FAILED)
    ).ends()


def test_a_close_for_a_policy_goes_to_its_own_endpoint_by_that_name() -> None:
    """Another connection would be closed as well, so none is tried."""
    (
        Playbook(Turn(Form.FULL, Reason.REPEATED, is_translated=True, replay_safe=True))
        << AcquireLease()
        >> LeaseGranted(holds_chain=False)
        << SendFull()
        >> ConnectionClosed(1008)
        << ReleaseLease(reusable=False)
        << PassThrough(Reason.UPSTREAM_CLOSED)
    ).ends()


def test_what_may_not_run_twice_is_not_run_again_elsewhere() -> None:
    """A translated turn with a tool that upstream carries out is told lost, as any other."""
    (
        Playbook(Turn(Form.FULL, Reason.REPEATED, is_translated=True))
        << AcquireLease()
        >> LeaseGranted(holds_chain=False)
        << SendFull()
        >> ConnectionClosed(1006)
        << ReleaseLease(reusable=False)
        << Refuse(connection_failed_reply())
    ).ends()
