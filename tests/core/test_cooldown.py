"""A cool-down is as wide as its cause, and ends."""

from __future__ import annotations

import pytest

from proxy.core.cooldown import Cooldown, Cooldowns, Scope, retry_after_s, scope_of
from proxy.errors import (
    ConnectionLost,
    OutOfResources,
    UpgradeRefused,
    UpstreamError,
    UpstreamUnreachable,
)


def refused(status: int, **headers: str) -> UpgradeRefused:
    """Make the error of a handshake that was answered with `status`."""
    return UpgradeRefused(
        status, {name.replace("_", "-"): value for name, value in headers.items()}, b""
    )


UNREACHABLE = UpstreamUnreachable("no")

SCOPES = [
    *((refused(status), Scope.UPSTREAM) for status in (200, 301, 307, 404, 405, 426, 501)),
    *((refused(status), Scope.PRINCIPAL) for status in (400, 403, 409, 429, 500, 502, 503, 529)),
    (refused(401), Scope.NOBODY),
    (OutOfResources("no descriptor left"), Scope.NOBODY),
    (ConnectionLost(1006), Scope.NOBODY),
]


@pytest.mark.parametrize(("error", "scope"), SCOPES)
def test_a_failure_counts_for_those_whom_it_concerns(error: UpstreamError, scope: Scope) -> None:
    """A missing endpoint is everybody's, a refusal its caller's, a wrong key nobody's."""
    assert scope is scope_of(error, is_general=False)
    assert scope is scope_of(error, is_general=True)


def test_no_answer_is_everybodys_trouble_if_several_met_it() -> None:
    """One caller's may be its own."""
    assert scope_of(UNREACHABLE, is_general=False) is Scope.PRINCIPAL
    assert scope_of(UNREACHABLE, is_general=True) is Scope.UPSTREAM


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": " 2.5 "}, 2.5),
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
        ({"retry-after-ms": "soon", "retry-after": "9"}, 9.0),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, None),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
    ],
)
def test_retry_after_is_read_or_ignored(headers: dict[str, str], expected: float | None) -> None:
    """Seconds and milliseconds are understood; nonsense is as good as nothing."""
    assert expected == retry_after_s(headers)


def test_a_closed_cooldown_allows_everything() -> None:
    """Without a failure nobody waits, and nothing need be reported back."""
    cooldown = Cooldown(60, 900)

    assert cooldown.allows(0.0)
    assert cooldown.allows(0.0)
    assert cooldown.remaining(0.0) == 0


def test_half_open_lets_exactly_one_trial_through() -> None:
    """When the time is over, one asker may try; the others wait for what comes of it."""
    cooldown = Cooldown(60, 900)
    cooldown.failed(0.0)

    assert not cooldown.allows(59.9)
    assert cooldown.remaining(59.0) == 1
    assert cooldown.would_allow(60.0)
    assert cooldown.allows(60.0)
    assert not cooldown.would_allow(60.0)
    assert not cooldown.allows(61.0)
    assert cooldown.remaining(61.0) == 0


def test_a_successful_trial_closes() -> None:
    """After it the cool-down starts from its first length again."""
    cooldown = Cooldown(60, 900)
    cooldown.failed(0.0)
    cooldown.allows(60.0)
    cooldown.succeeded()

    assert cooldown.allows(60.0)
    assert cooldown.allows(60.0)
    cooldown.failed(61.0)
    assert cooldown.remaining(61.0) == 60


def test_failing_trials_double_the_wait_up_to_the_maximum() -> None:
    """60, 120, 240, 480, 900, 900 seconds."""
    cooldown, now, waits = Cooldown(60, 900), 0.0, []
    for _ in range(6):
        assert cooldown.allows(now)
        cooldown.failed(now)
        waits.append(cooldown.remaining(now))
        now += waits[-1]

    assert waits == [60, 120, 240, 480, 900, 900]


def test_an_abandoned_trial_may_be_taken_by_the_next() -> None:
    """A cancelled attempt proves nothing and must not shut the door for good."""
    cooldown = Cooldown(60, 900)
    cooldown.failed(0.0)
    cooldown.allows(60.0)
    cooldown.abandoned()

    assert cooldown.allows(60.0)


def test_attempts_that_fail_together_count_once() -> None:
    """A hundred turns that meet the same outage wait as long as one."""
    cooldown = Cooldown(60, 900)
    for _ in range(100):
        cooldown.failed(0.0)

    assert cooldown.remaining(0.0) == 60


def test_retry_after_is_honoured() -> None:
    """Upstream's own figure is used, up to an hour, and never shortens what is running."""
    cooldown = Cooldown(60, 900)
    cooldown.failed(0.0, 5)
    assert cooldown.remaining(0.0) == 5
    cooldown.failed(1.0, 1200)
    assert cooldown.remaining(1.0) == 1200
    cooldown.failed(2.0, 3)
    assert cooldown.remaining(1.0) == 1200
    cooldown.failed(2.0, 1e9)
    assert cooldown.remaining(2.0) == 3600


def test_jitter_spreads_the_ends() -> None:
    """The same failure ends at different times in different places."""
    early, late = Cooldown(60, 900), Cooldown(60, 900)
    early.failed(0.0, jitter=-1)
    late.failed(0.0, jitter=1)

    assert early.remaining(0.0) == pytest.approx(54)
    assert late.remaining(0.0) == pytest.approx(66)


def test_one_callers_refusal_leaves_others_alone() -> None:
    """A throttled key does not switch WebSocket mode off for anybody else."""
    cooldowns = Cooldowns(60, 900)

    assert (
        cooldowns.failed("a", refused(429, retry_after="30"), 0.0, began_at=0.0) is Scope.PRINCIPAL
    )
    assert not cooldowns.allows("a", 29.0)
    assert cooldowns.allows("b", 0.0)
    assert cooldowns.remaining("a", 0.0) == 30
    assert cooldowns.remaining("b", 0.0) == 0
    assert cooldowns.allows("a", 30.0)


def test_a_missing_endpoint_is_left_alone_by_all() -> None:
    """What no caller can change is tried once for all of them."""
    cooldowns = Cooldowns(60, 900)

    assert cooldowns.failed("a", refused(404), 0.0, began_at=0.0) is Scope.UPSTREAM
    assert not cooldowns.allows("b", 59.0)
    assert cooldowns.allows("b", 60.0)
    assert not cooldowns.allows("a", 60.0)
    cooldowns.succeeded("b", 60.0)
    assert cooldowns.allows("a", 60.0)


def test_a_wrong_key_waits_for_nothing() -> None:
    """A key that was fixed in the meantime works at once."""
    cooldowns = Cooldowns(60, 900)

    assert cooldowns.failed("a", refused(401), 0.0, began_at=0.0) is Scope.NOBODY
    assert cooldowns.allows("a", 0.0)


def test_one_missed_deadline_leaves_others_alone() -> None:
    """Nor do ten of one caller's, together or one after another: it waits, and longer each time."""
    cooldowns = Cooldowns(60, 900)
    for began_at in (0.0, 1.0):
        for _ in range(5):
            scope = cooldowns.failed("a", UNREACHABLE, 10.0, began_at=began_at)
            assert scope is Scope.PRINCIPAL

    assert cooldowns.remaining("a", 10.0) == 60
    assert cooldowns.remaining("b", 10.0) == 0
    assert cooldowns.allows("a", 70.0)
    cooldowns.failed("a", UNREACHABLE, 80.0, began_at=70.0)
    assert cooldowns.remaining("a", 80.0) == 120
    assert cooldowns.allows("b", 80.0)


def test_an_upstream_that_answers_nobody_is_left_alone_by_all() -> None:
    """Two callers without an answer are enough, until one gets one; only one tries at a time."""
    cooldowns = Cooldowns(60, 900)
    cooldowns.failed("a", UNREACHABLE, 0.0, began_at=0.0)

    assert cooldowns.failed("b", UNREACHABLE, 10.0, began_at=0.0) is Scope.UPSTREAM
    assert cooldowns.remaining("c", 10.0) == 60
    assert cooldowns.allows("c", 70.0)
    assert not cooldowns.allows("d", 70.0)
    assert cooldowns.failed("c", UNREACHABLE, 80.0, began_at=70.0) is Scope.UPSTREAM
    assert cooldowns.remaining("d", 80.0) == 120
    assert cooldowns.allows("a", 200.0)
    cooldowns.failed("a", UNREACHABLE, 210.0, began_at=200.0)
    assert cooldowns.remaining("d", 210.0) == 240


def test_an_answer_in_between_speaks_for_the_upstream() -> None:
    """Be it one to a later attempt: then none that began before it proves an outage."""
    cooldowns = Cooldowns(60, 900)
    cooldowns.failed("a", UNREACHABLE, 10.0, began_at=0.0)
    cooldowns.succeeded("b", 11.0)

    for late in ("c", "d"):
        assert cooldowns.failed(late, UNREACHABLE, 15.0, began_at=5.0) is Scope.PRINCIPAL
    assert cooldowns.failed("a", UNREACHABLE, 80.0, began_at=70.0) is Scope.PRINCIPAL
    assert cooldowns.failed("c", refused(403), 81.0, began_at=80.0) is Scope.PRINCIPAL
    assert cooldowns.failed("c", UNREACHABLE, 200.0, began_at=190.0) is Scope.PRINCIPAL
    assert cooldowns.failed("e", UNREACHABLE, 201.0, began_at=190.0) is Scope.UPSTREAM


def test_what_we_lack_ourselves_proves_nothing() -> None:
    """Without a descriptor of our own, nobody is told to wait, now or at the next failure."""
    cooldowns = Cooldowns(60, 900)
    lacking = OutOfResources("no descriptor left")
    for caller in "ab":
        assert cooldowns.failed(caller, lacking, 0.0, began_at=0.0) is Scope.NOBODY

    assert cooldowns.failed("a", UNREACHABLE, 1.0, began_at=1.0) is Scope.PRINCIPAL


def test_a_refusal_proves_that_the_upstream_answers() -> None:
    """The upstream's cool-down ends with any answer that is about the caller only."""
    cooldowns = Cooldowns(60, 900)
    cooldowns.failed("a", refused(404), 0.0, began_at=0.0)
    assert cooldowns.allows("a", 60.0)
    cooldowns.failed("a", refused(403), 60.0, began_at=60.0)

    assert cooldowns.allows("b", 60.0)
    assert not cooldowns.allows("a", 60.0)


def test_an_abandoned_attempt_gives_both_trials_back() -> None:
    """Neither the upstream's nor the caller's cool-down stays shut for it."""
    cooldowns = Cooldowns(60, 900)
    cooldowns.failed("a", refused(403), 0.0, began_at=0.0)
    cooldowns.failed("a", refused(404), 0.0, began_at=0.0)
    assert cooldowns.allows("a", 61.0)
    assert not cooldowns.allows("a", 61.0)
    cooldowns.abandoned("a")

    assert cooldowns.allows("a", 61.0)


def test_memory_of_callers_is_bounded() -> None:
    """Ten thousand throttled keys do not grow the table without end."""
    cooldowns = Cooldowns(60, 900)
    for number in range(10_000):
        cooldowns.failed(str(number), refused(429), 0.0, began_at=0.0)

    assert len(cooldowns._principals) == 4096
