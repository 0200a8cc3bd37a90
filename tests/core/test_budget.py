"""Budgets let single failures through and stop storms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.budget import RetryBudget, TokenBucket


def test_a_bucket_starts_full_and_refills_at_its_rate() -> None:
    """A burst passes at once; after it, so many a second."""
    bucket = TokenBucket(rate_per_s=2, burst=3)

    assert [bucket.take(100.0) for _ in range(4)] == [True, True, True, False]
    assert not bucket.take(100.4)
    assert bucket.take(100.5)
    assert not bucket.take(100.6)


def test_a_bucket_never_holds_more_than_its_burst() -> None:
    """An idle hour earns no more than one burst."""
    bucket = TokenBucket(rate_per_s=2, burst=3)
    bucket.take(0.0)

    assert bucket.available(3600.0) == 3
    assert bucket.is_full(3600.0)


def test_a_bucket_gives_nothing_for_a_time_that_runs_backwards() -> None:
    """A clock that jumps back neither adds tokens nor lets them be earned twice."""
    bucket = TokenBucket(rate_per_s=1, burst=1)
    bucket.take(10.0)

    assert not bucket.take(5.0)
    assert not bucket.take(10.5)
    assert bucket.take(11.0)


@given(
    st.lists(st.floats(min_value=0, max_value=5), max_size=60),
    st.floats(min_value=0, max_value=10),
    st.integers(min_value=0, max_value=10),
)
def test_a_bucket_never_grants_more_than_burst_plus_rate(
    pauses: list[float], rate: float, burst: int
) -> None:
    """However the asking is timed, no more pass than the burst and what the time has earned."""
    bucket = TokenBucket(rate, burst)
    now, granted = 0.0, 0
    for pause in pauses:
        now += pause
        granted += bucket.take(now)

    assert granted <= burst + rate * now + 1e-6


@pytest.mark.parametrize(("turns", "expected"), [(0, 0), (4, 0), (5, 1), (50, 10), (53, 10)])
def test_resends_are_a_share_of_the_turns(turns: int, expected: int) -> None:
    """With a ratio of a fifth, five turns pay for one resend."""
    budget = RetryBudget(ratio=0.2, per_s=0)
    for _ in range(turns):
        budget.deposit(0.5)

    assert expected == sum(budget.withdraw(0.5) for _ in range(100))


def test_a_quiet_proxy_may_resend_at_all() -> None:
    """The floor per second holds without any turn to pay for it."""
    budget = RetryBudget(ratio=0.2, per_s=1)

    assert sum(budget.withdraw(0.0) for _ in range(100)) == 10
    assert not budget.withdraw(9.0)
    assert sum(budget.withdraw(10.5) for _ in range(100)) == 10


def test_deposits_expire() -> None:
    """A busy minute does not pay for a storm in the next one."""
    budget = RetryBudget(ratio=1, per_s=0)
    for _ in range(100):
        budget.deposit(3.0)

    assert budget.withdraw(12.0)
    assert not budget.withdraw(13.5)


@given(st.lists(st.tuples(st.floats(min_value=0, max_value=3), st.booleans()), max_size=200))
def test_resends_never_exceed_the_budget(steps: list[tuple[float, bool]]) -> None:
    """Over a whole run, resends stay within the share of the turns and the floor."""
    budget = RetryBudget(ratio=0.25, per_s=1)
    now, turns, resends = 0.0, 0, 0
    for pause, is_turn in steps:
        now += pause
        if is_turn:
            turns += 1
            budget.deposit(now)
        else:
            resends += budget.withdraw(now)

    windows = int(now // 9) + 1  # seconds are whole: a window may end up to one early
    assert resends <= 0.25 * turns + 10 * windows + 1e-6
