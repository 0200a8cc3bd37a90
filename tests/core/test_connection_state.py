"""Connections live by ping and pong, and end in time."""

from __future__ import annotations

import pytest

from proxy.core.connection_state import (
    Action,
    ConnectionRecord,
    ConnectionState,
    LifePolicy,
    TransitionError,
    is_harmless_when_idle,
    needs_probe,
    tick,
)

POLICY = LifePolicy()
STATES = list(ConnectionState)


def record(state: ConnectionState = ConnectionState.BUSY, **fields: object) -> ConnectionRecord:
    """Make a connection that was opened, last used and last heard of at time 0."""
    made = ConnectionRecord(id=1, principal="a", opened_at=0.0, state=state, retire_at=3000.0)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def run(conn: ConnectionRecord, until: float, *, answers: bool) -> list[tuple[int, Action]]:
    """Tick once a second; with `answers`, each ping is answered within the second."""
    seen = []
    for second in range(1, int(until) + 1):
        action = tick(conn, float(second), POLICY)
        if action is not Action.NONE:
            seen.append((second, action))
        if action is Action.PING and answers:
            conn.last_inbound_at = second + 0.1
        if action.closes:
            break
    return seen


ALLOWED = {
    ("CONNECTING", "IDLE"),
    ("CONNECTING", "BUSY"),
    ("CONNECTING", "CLOSED"),
    ("IDLE", "BUSY"),
    ("IDLE", "CLOSED"),
    ("BUSY", "IDLE"),
    ("BUSY", "CLOSED"),
}


@pytest.mark.parametrize("before", STATES)
@pytest.mark.parametrize("after", STATES)
def test_only_listed_transitions_happen(before: ConnectionState, after: ConnectionState) -> None:
    """Every other pair of states is refused and changes nothing."""
    conn = record(before)
    if (before.name, after.name) in ALLOWED:
        conn.enter(after)
        assert conn.state is after
    else:
        with pytest.raises(TransitionError, match="connection 1"):
            conn.enter(after)
        assert conn.state is before


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_id": None}, "spare"),
        ({"response_id": "r"}, "nursing"),
        ({"response_id": "r", "continued": True}, "established"),
    ],
)
def test_an_idle_connection_is_of_exactly_one_kind(fields: dict[str, object], kind: str) -> None:
    """Spare, in the nursery, or established; and none of them unless idle."""
    for state in STATES:
        conn = record(state, **fields)
        kinds = [
            name for name in ("spare", "nursing", "established") if getattr(conn, f"is_{name}")
        ]
        assert kinds == ([kind] if state is ConnectionState.IDLE else [])


def test_retirement_comes_before_the_age_limit_and_is_spread() -> None:
    """The margin varies by a tenth either way."""
    policy = LifePolicy(max_age_s=3600, retire_margin_s=600, retire_jitter=0.1)

    assert policy.retire_at(100.0, 0) == 3100
    assert policy.retire_at(100.0, 1) == 3040
    assert policy.retire_at(100.0, -1) == 3160


def test_a_peer_that_answers_is_pinged_for_ever() -> None:
    """A ping every twenty seconds, and no text needed, for the longest thought."""
    assert run(record(), 85, answers=True) == [
        (20, Action.PING),
        (40, Action.PING),
        (60, Action.PING),
        (80, Action.PING),
    ]


def test_a_peer_that_is_silent_is_given_up() -> None:
    """Ten seconds after an unanswered ping."""
    assert run(record(), 100, answers=False) == [(20, Action.PING), (30, Action.CLOSE_SILENT)]


def test_any_inbound_byte_counts_as_life() -> None:
    """An event proves as much as a pong does."""
    conn = record()
    run(conn, 20, answers=False)
    conn.last_inbound_at = 25.0

    assert tick(conn, 30.0, POLICY) is Action.NONE
    assert tick(conn, 40.0, POLICY) is Action.PING


@pytest.mark.parametrize("excuse", ["sending", "paused"])
def test_a_pong_that_cannot_come_is_not_missed(excuse: str) -> None:
    """While it waits behind an upload, or reading is paused, the deadline stands still."""
    conn = record()
    setattr(conn, excuse, True)
    assert run(conn, 120, answers=False) == [(20, Action.PING)]
    setattr(conn, excuse, False)

    actions = [tick(conn, float(second), POLICY) for second in range(121, 131)]
    assert actions == [Action.NONE] * 9 + [Action.CLOSE_SILENT]


def test_our_own_sleep_is_not_the_peers_silence() -> None:
    """After a suspended hour the pong may be waiting in the kernel: it gets its time to be read."""
    conn = record()
    run(conn, 20, answers=False)

    assert tick(conn, 3620.0, POLICY) is Action.NONE
    conn.last_inbound_at = 3620.1
    assert tick(conn, 3629.0, POLICY) is Action.NONE
    assert tick(conn, 3631.0, POLICY) is Action.NONE


@pytest.mark.parametrize("state", [ConnectionState.CONNECTING, ConnectionState.CLOSED])
def test_nothing_is_done_about_what_is_not_there(state: ConnectionState) -> None:
    """Handshakes have a deadline of their own, and the closed are left in peace."""
    assert tick(record(state), 10_000.0, POLICY) is Action.NONE


@pytest.mark.parametrize(
    ("fields", "ttl_s"),
    [
        ({"response_id": "r"}, 300),
        ({"response_id": "r", "continued": True}, 1800),
        ({"response_id": None}, 1800),
    ],
)
def test_an_unused_connection_is_closed_in_time(fields: dict[str, object], ttl_s: int) -> None:
    """A chain without a second turn soon; one with it, and a spare, later."""
    closing = run(record(ConnectionState.IDLE, **fields), 4000, answers=True)[-1]

    assert closing == (ttl_s, Action.CLOSE_UNUSED)


def test_a_retiring_connection_ends_between_turns_only() -> None:
    """A turn that runs past the retirement is left to finish."""
    busy = record(
        ConnectionState.BUSY, ticked_at=2999.0, ping_sent_at=2990.0, last_inbound_at=2990.5
    )
    assert tick(busy, 3000.0, POLICY) is Action.NONE
    busy.enter(ConnectionState.IDLE)
    busy.last_used_at = 3000.0

    assert tick(busy, 3001.0, POLICY) is Action.CLOSE_EXPIRING
    assert busy.is_retiring(3000.0)
    assert not busy.is_retiring(2999.9)


def test_closing_actions_say_so() -> None:
    """Only nothing and a ping leave a connection alive."""
    assert [action.name for action in Action if not action.closes] == ["NONE", "PING"]


@pytest.mark.parametrize(("idle_s", "expected"), [(0, False), (20, False), (20.1, True)])
def test_a_peer_not_heard_of_lately_is_probed(idle_s: float, expected: bool) -> None:
    """Before a turn is entrusted to it."""
    assert expected is needs_probe(record(ConnectionState.IDLE), idle_s, POLICY)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (b'{"type":"codex.rate_limits","x":1}', True),
        (b'{"x":{"type":"error"},"type":"responsesapi.websocket_timing"}', True),
        (b'{"type":"keepalive"}', True),
        (b'{"type":"error","error":{"code":"websocket_connection_limit_reached"}}', False),
        (b'{"type":"response.completed"}', False),
        (b'{"type":"response.output_text.delta","delta":"late"}', False),
        (b'{"type":5}', False),
        (b"{}", False),
        (b"[]", False),
        (b"", False),
        (b"pong", False),
        (b"\xff", False),
        (b'{"type":"\xff"}', False),
        (b"[" * 100_000, False),
    ],
)
def test_messages_between_turns_are_judged(message: bytes, expected: bool) -> None:
    """Vendor notices are harmless; answers, errors and the unreadable are not."""
    assert expected is is_harmless_when_idle(message)
