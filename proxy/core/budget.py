"""
Two budgets that keep trouble from multiplying: how often we may connect, how often we may resend.

`TokenBucket` limits handshakes: a burst at once, then so many a second. Upstreams refuse clients
that open connections in a storm (503 at about 200 a minute was measured), and after an outage
every conversation wants a new connection in the same second.

`RetryBudget` limits resends to a share of the turns. A limit per turn (one resend) still doubles
the load on an upstream that fails every turn, just when it can bear that the least; a budget lets
single failures through and stops at the fifth part of the traffic. The scheme is linkerd's: each
turn deposits a fraction of a resend, deposits expire after ten seconds, and a floor per second
keeps a quiet proxy able to resend at all.

Both are told the time (monotonic seconds) and never ask for it.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 10
"""How long a deposit to a `RetryBudget` lasts, in seconds."""


class TokenBucket:
    """
    `burst` tokens at the start; `rate_per_s` new ones each second, never more than `burst`.

    A time that runs backwards adds nothing.
    """

    __slots__ = ("_burst", "_rate_per_s", "_tokens", "_updated_at")

    def __init__(self, rate_per_s: float, burst: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = float(burst)
        self._tokens = float(burst)
        self._updated_at: float | None = None

    def available(self, now: float) -> float:
        """Return how many tokens there are at `now`, as a fraction, too."""
        if self._updated_at is None or now <= self._updated_at:
            return self._tokens
        grown = self._tokens + (now - self._updated_at) * self._rate_per_s
        return min(self._burst, grown)

    def take(self, now: float) -> bool:
        """Take one token if there is one, and tell whether there was."""
        tokens = self.available(now)
        if tokens < 1:
            return False
        self._tokens = tokens - 1
        self._updated_at = now if self._updated_at is None else max(now, self._updated_at)
        return True

    def is_full(self, now: float) -> bool:
        """Tell whether the bucket is as good as a new one, so that it may be forgotten."""
        return self.available(now) >= self._burst


class RetryBudget:
    """
    Allow `ratio` resends per turn, counted over ten seconds, and `per_s` resends a second besides.

    Call `deposit` once for each turn, and `withdraw` before each resend.
    """

    __slots__ = ("_ratio", "_reserve", "_seconds")

    def __init__(self, ratio: float, per_s: float) -> None:
        self._ratio = ratio
        self._reserve = per_s * WINDOW_S
        self._seconds: deque[list[float]] = deque()  # [second, deposits - withdrawals]

    def deposit(self, now: float) -> None:
        """Count one turn."""
        self._current(now)[1] += self._ratio

    def withdraw(self, now: float) -> bool:
        """Tell whether one more resend is within the budget, and count it if so."""
        current = self._current(now)
        # A sum of many fifths is a hair below the whole number it stands for.
        if self.balance(now) < 1 - 1e-9:
            return False
        current[1] -= 1
        return True

    def balance(self, now: float) -> float:
        """Return how many resends are left at `now`."""
        self._expire(now)
        return self._reserve + sum(amount for _, amount in self._seconds)

    def _current(self, now: float) -> list[float]:
        second = float(int(now))
        self._expire(now)
        if not self._seconds or self._seconds[-1][0] < second:
            self._seconds.append([second, 0.0])
        return self._seconds[-1]

    def _expire(self, now: float) -> None:
        while self._seconds and self._seconds[0][0] <= now - WINDOW_S:
            self._seconds.popleft()
