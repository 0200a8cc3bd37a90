"""
When to leave WebSocket mode alone for a while, and whose fault decides for whom.

A failed handshake costs the turn that meets it up to ten seconds; the turns after it should go to
HTTP at once. So a failure opens a cool-down: 10 s, doubling to 15 min while the failures go on.
When it is over one attempt is let through, the trial. No turn waits for it: turns go over HTTP
until a trial has succeeded, so where WebSockets are blocked that costs one turn, once.

    closed --failed--> open --time--> half-open --succeeded--> closed
                         ^                |
                         +----failed------+     (twice as long)

A fallback is never for good, and never wider than its cause. An endpoint that does not exist is
everybody's trouble; a refused or throttled key is its holder's alone, and one caller must not be
able to switch WebSocket mode off for another. A key that is wrong (401) opens no cool-down at all:
it costs one round trip, and once corrected it is another principal anyway.

An attempt that met no answer may have met an outage, or trouble of its own: a lost packet, a
machine that was busy for a moment, a key that upstream lets wait. So it is its caller's alone until
another caller's is not answered either, and none was in between: then it is the upstream's. An
outage costs one attempt more than if the first were believed, and a deadline that one handshake
missed takes nothing from anybody else.

Jitter comes in as a number in [-1, 1], time as monotonic seconds.
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING

from cachetools import LRUCache

from proxy.errors import OutOfResources, UpgradeRefused, UpstreamError, UpstreamUnreachable

if TYPE_CHECKING:
    from collections.abc import Mapping

_JITTER = 0.1  # of the cool-down's length
_RETRY_AFTER_MAX_S = 3600.0
_PRINCIPALS_MAX = 4096
_BAD_REQUEST = 400
_UNAUTHORISED = 401
_NO_SUCH_ENDPOINT = frozenset({404, 405, 426, 501})


class Scope(enum.Enum):
    """Who must wait after a failed handshake."""

    NOBODY = "nobody"
    PRINCIPAL = "principal"
    UPSTREAM = "upstream"


def scope_of(error: UpstreamError, *, is_general: bool) -> Scope:
    """
    Tell for whom a failed attempt to connect opens a cool-down.

    `is_general` tells whether several callers lately met no answer, and nobody met one.
    """
    if _is_unanswered(error):
        return Scope.UPSTREAM if is_general else Scope.PRINCIPAL
    if not isinstance(error, UpgradeRefused) or error.status == _UNAUTHORISED:
        return Scope.NOBODY
    # 1xx to 3xx: something answers that knows no WebSocket, or wants us elsewhere. The
    # remaining 4xx may be due to the caller's own headers, 429 and 5xx to the caller's load.
    if error.status < _BAD_REQUEST or error.status in _NO_SUCH_ENDPOINT:
        return Scope.UPSTREAM
    return Scope.PRINCIPAL


def _is_unanswered(error: UpstreamError) -> bool:
    # What we lack ourselves says nothing of upstream.
    return isinstance(error, UpstreamUnreachable) and not isinstance(error, OutOfResources)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """
    Return the seconds that a refusal asks us to wait, or None if it names none.

    `headers` have names in lower case. RFC 9110 §10.2.3 also allows a date; that needs a wall
    clock, upstreams don't use it, and it counts as none.
    """
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            value = float(headers.get(name, "")) * unit_s
        except ValueError:
            continue
        if math.isfinite(value) and value >= 0:
            return value
    return None


class Cooldown:
    """
    One cool-down of `first_s` seconds, doubling to `max_s` while its trials fail.

    Whoever gets True from `allows` owes one of `succeeded`, `failed` or `abandoned`.
    """

    __slots__ = ("_failures", "_first_s", "_max_s", "_trying", "_until")

    def __init__(self, first_s: float, max_s: float) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._failures = 0
        self._until = -math.inf
        self._trying = False

    @property
    def is_closed(self) -> bool:
        """Whether nothing has failed since the last success."""
        return not self._failures

    def would_allow(self, now: float) -> bool:
        """Tell what `allows` would say, without taking the trial."""
        if self.is_closed:
            return True
        return now >= self._until and not self._trying

    def allows(self, now: float) -> bool:
        """Tell whether to attempt a connection; half-open, only the first asker may."""
        allowed = self.would_allow(now)
        if allowed and self._failures:
            self._trying = True
        return allowed

    def succeeded(self) -> None:
        """Close: an attempt has worked."""
        self._failures = 0
        self._trying = False

    def abandoned(self) -> None:
        """Give the trial back: its attempt ended without an answer (cancelled)."""
        self._trying = False

    def failed(
        self, now: float, retry_after_s: float | None = None, *, jitter: float = 0.0
    ) -> None:
        """
        Open, for twice as long as the last time; upstream's own `retry_after_s` comes first.

        Attempts that began together fail together: while a cool-down runs, a further failure
        makes it no longer, unless upstream asks for more time.
        """
        running = self._failures > 0 and now < self._until
        self._trying = False
        if retry_after_s is not None:
            wait_s = min(retry_after_s, _RETRY_AFTER_MAX_S)
        elif running:
            return
        else:
            doubled_s = self._first_s * 2.0 ** min(self._failures, 32)
            wait_s = min(self._max_s, doubled_s) * (1 + _JITTER * jitter)
        self._until = max(self._until, now + wait_s)
        if not running:
            self._failures += 1

    def remaining(self, now: float) -> float:
        """Return the seconds until the next attempt may be made; 0 when one may be made now."""
        if not self._failures:
            return 0.0
        return max(0.0, self._until - now)


class Cooldowns:
    """The upstream's own cool-down, and one for each principal that met a failure lately."""

    __slots__ = ("_answered_at", "_first_s", "_max_s", "_principals", "_unanswered", "_upstream")

    def __init__(self, first_s: float, max_s: float) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._upstream = Cooldown(first_s, max_s)
        self._principals: LRUCache[str, Cooldown] = LRUCache(_PRINCIPALS_MAX)
        self._answered_at = -math.inf
        self._unanswered: set[str] = set()  # who met no answer since then; two say enough

    def is_closed(self, principal: str) -> bool:
        """Tell whether a turn of this principal may wait for a connection to be opened."""
        return all(cooldown.is_closed for cooldown in self._of(principal))

    def would_allow(self, principal: str, now: float) -> bool:
        """Tell whether to attempt a connection for this principal, without taking a trial."""
        return all(cooldown.would_allow(now) for cooldown in self._of(principal))

    def allows(self, principal: str, now: float) -> bool:
        """
        Tell whether to attempt a connection for this principal.

        True is a promise to call `succeeded`, `failed` or `abandoned` when it ends.
        """
        if not self.would_allow(principal, now):
            return False
        for cooldown in self._of(principal):
            cooldown.allows(now)
        return True

    def succeeded(self, principal: str, now: float) -> None:
        """Close both: the upstream answers, and takes this principal."""
        self._note_answer(now)
        self._principals.pop(principal, None)

    def abandoned(self, principal: str) -> None:
        """Give back what `allows` took."""
        for cooldown in self._of(principal):
            cooldown.abandoned()

    def failed(
        self,
        principal: str,
        error: UpstreamError,
        now: float,
        *,
        began_at: float,
        jitter: float = 0.0,
    ) -> Scope:
        """
        Open the cool-down whose fault it is, give the other one's trial back, and say which.

        `began_at` is when the attempt began: what was answered since tells more of the upstream.
        """
        self.abandoned(principal)
        if _is_unanswered(error) and began_at >= self._answered_at and len(self._unanswered) < 2:
            self._unanswered.add(principal)
        scope = scope_of(error, is_general=len(self._unanswered) > 1)
        wait_s = None
        if isinstance(error, UpgradeRefused):
            wait_s = retry_after_s(error.headers)
            if scope is not Scope.UPSTREAM:
                self._note_answer(now)  # it did answer, and speaks about this caller only
        if scope is Scope.UPSTREAM:
            self._upstream.failed(now, jitter=jitter)
        elif scope is Scope.PRINCIPAL:
            cooldown = self._principals.setdefault(principal, Cooldown(self._first_s, self._max_s))
            cooldown.failed(now, wait_s, jitter=jitter)
        return scope

    def _note_answer(self, now: float) -> None:
        self._answered_at = now
        self._unanswered.clear()
        self._upstream.succeeded()

    def remaining(self, principal: str, now: float) -> float:
        """Return the seconds until this principal may try again; 0 when it may now."""
        return max(cooldown.remaining(now) for cooldown in self._of(principal))

    def _of(self, principal: str) -> list[Cooldown]:
        own = self._principals.get(principal)
        return [self._upstream] if own is None else [self._upstream, own]
