"""
What the page and `turnwire top` show: the last hour, the conversations of late, what went wrong.

On the way of a turn nothing is computed: its facts are put into a queue, and folded in a few times
a second, or when somebody looks. Everything is bounded, whatever the traffic: buckets of time by
their number, latencies by the width of their classes, conversations and their turns by what one can
look at, causes of trouble by closed sets.

Nothing here is content. A conversation is a number, told apart by which response a turn continued
or came nearest to; ids of responses and keys of principals do not leave this module. The name of a
model is the client's to choose, so that only what looks like a name is shown.
"""

from __future__ import annotations

import asyncio
import enum
import math
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from proxy.core.reasons import Mode, Reason
from proxy.observe.facts import model_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from proxy.observe.facts import ConnectionFacts, TurnFacts

BUCKET_S: Final = 10
BUCKETS: Final = 360  # one hour
MAX_CONVERSATIONS: Final = 200
MAX_SHOWN: Final = 40
MAX_RECENT: Final = 16
MAX_HEADS: Final = 4096
MAX_PENDING: Final = 20_000
AT_ONCE: Final = 50  # turns, about a millisecond
_CLASSES: Final = 1 / math.log(1.12)  # to an e-fold: a latency is told to within 6 %
_SMALLEST_S: Final = 1e-6
_ERROR_STATUS: Final = 400
_ROUNDING_S: Final = 0.01  # of `now`, by which the next snapshot is asked for


class Trouble(enum.StrEnum):
    """What kind of thing went wrong."""

    RESEND = "resend"
    FALLBACK = "fallback"
    CONNECT = "connect"
    STATUS = "status"
    WRONG = "wrong"


class Latencies:
    """A distribution of seconds, in classes of which each is 12 % wider than the one before."""

    __slots__ = ("_count", "_counts")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._count = 0

    def add(self, seconds: float) -> None:
        """Add one value."""
        place = int(_CLASSES * math.log(seconds / _SMALLEST_S)) if seconds > _SMALLEST_S else 0
        self._counts[place] = self._counts.get(place, 0) + 1
        self._count += 1

    def take_out(self, other: Latencies) -> None:
        """Take out the values of another one, all of which are in here."""
        for place, count in other._counts.items():
            self._counts[place] -= count
            if not self._counts[place]:
                del self._counts[place]
        self._count -= other._count

    def __len__(self) -> int:
        return self._count

    def quantile_ms(self, fraction: float) -> float | None:
        """Return a quantile in milliseconds, None of nothing."""
        rank, seen = fraction * self._count, 0
        for place in sorted(self._counts):
            seen += self._counts[place]
            if seen >= rank:
                middle = (place + 0.5) / _CLASSES
                return round(_SMALLEST_S * math.exp(middle) * 1000, 3)
        return None


def _latencies() -> dict[Mode, Latencies]:
    return {mode: Latencies() for mode in Mode}


@dataclass(slots=True)
class _Times:
    """Latencies: to the first event by mode, of deltas and of all others; and what we take."""

    first_event: dict[Mode, Latencies] = field(default_factory=_latencies)
    otherwise: Latencies = field(default_factory=Latencies)
    overhead: Latencies = field(default_factory=Latencies)

    def add(self, facts: TurnFacts, mode: Mode) -> None:
        if facts.first_event_s is not None:
            self.first_event[mode].add(facts.first_event_s)
            if mode is not Mode.DELTA:
                self.otherwise.add(facts.first_event_s)
        if facts.overhead_s is not None:
            self.overhead.add(facts.overhead_s)

    def take_out(self, other: _Times) -> None:
        for mode in Mode:
            self.first_event[mode].take_out(other.first_event[mode])
        self.otherwise.take_out(other.otherwise)
        self.overhead.take_out(other.overhead)


@dataclass(slots=True)
class _Bucket:
    """What happened within some seconds."""

    number: int
    turns: dict[Mode, int] = field(default_factory=lambda: dict.fromkeys(Mode, 0))
    bytes_in: int = 0
    bytes_up: int = 0
    times: _Times = field(default_factory=_Times)

    def add(self, facts: TurnFacts, mode: Mode, bytes_up: int) -> None:
        self.turns[mode] += 1
        self.bytes_in += facts.bytes_in
        self.bytes_up += bytes_up
        self.times.add(facts, mode)


@dataclass(slots=True, eq=False)
class _Conversation:
    """One conversation: its sums, and its last turns as they are shown."""

    number: int
    principal: str
    label: str
    model: str | None
    started: float
    last: float
    turns: dict[Mode, int] = field(default_factory=lambda: dict.fromkeys(Mode, 0))
    bytes_in: int = 0
    bytes_up: int = 0
    connection: int | None = None
    recent: deque[tuple[Any, ...]] = field(default_factory=lambda: deque(maxlen=MAX_RECENT))


@dataclass(slots=True)
class _Counted:
    count: int = 0
    last: float = 0.0


class Live:
    """
    What is shown. `clock` is that of the facts, `wall` gives Unix seconds.

    `about` are facts of the process that never change. To be bound by whoever knows: `connections`
    tells of those that are open, `state` where the process is in its life, `in_flight` how many
    turns run.
    """

    def __init__(
        self, about: Mapping[str, object], clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        self._about = dict(about)
        self._clock, self._wall = clock, wall
        self._started = wall()
        self._pending: deque[TurnFacts] = deque(maxlen=MAX_PENDING)
        self._turns = dict.fromkeys(Mode, 0)
        self._bytes_in = self._bytes_up = 0
        self._buckets: dict[int, _Bucket] = {}
        self._hour = _Times()  # the sum of all buckets
        self._conversations: OrderedDict[int, _Conversation] = OrderedDict()
        self._numbers = 0
        self._by_head: OrderedDict[tuple[str, str], _Conversation] = OrderedDict()
        self._troubles: dict[tuple[Trouble, str], _Counted] = {}
        self._verdicts: Counter[str] = Counter()
        self.connections: Callable[[], Iterable[ConnectionFacts]] = tuple
        self.state: Callable[[], str] = lambda: "ready"
        self.in_flight: Callable[[], int] = lambda: 0

    def tell(self, **facts: object) -> None:
        """Add facts of the process that became known late."""
        self._about |= facts

    # What happens.

    def turn_finished(self, facts: TurnFacts) -> None:
        """Take note of a turn that is over; it is looked at later."""
        self._pending.append(facts)

    def connect(self, result: str) -> None:
        """Take note of an attempt to connect; `result` is of the closed set of the metrics."""
        if result not in ("ok", "cancelled"):
            self._note(Trouble.CONNECT, result, self._wall())

    async def keep_folding(self, interval_s: float = 0.25) -> None:
        """Fold a few times a second, and never many turns in one go, until cancelled."""
        while True:
            await asyncio.sleep(0 if self._pending else interval_s)
            self.fold(AT_ONCE)

    @property
    def bytes_up(self) -> int:
        """Bytes of turns sent upstream so far."""
        self.fold()
        return self._bytes_up

    def fold(self, at_most: int = MAX_PENDING) -> None:
        """Look at the turns that ended since the last time."""
        offset = self._wall() - self._clock()
        for _ in range(min(at_most, len(self._pending))):
            self._fold(self._pending.popleft(), offset)

    def _fold(self, facts: TurnFacts, offset: float) -> None:
        ended = facts.ended_at + offset
        would = facts.would
        mode = would.mode if would else facts.mode
        reason = would.reason if would else facts.reason
        bytes_up = would.bytes_up if would else facts.bytes_up
        self._turns[mode] += 1
        self._bytes_in += facts.bytes_in
        self._bytes_up += bytes_up
        self._bucket(ended).add(facts, mode, bytes_up)
        self._hour.add(facts, mode)
        conversation = self._conversation_of(facts, ended)
        conversation.last = ended
        conversation.turns[mode] += 1
        conversation.bytes_in += facts.bytes_in
        conversation.bytes_up += bytes_up
        conversation.connection = facts.connection
        conversation.recent.append(
            (
                round(ended, 1), mode.value, reason.value, facts.status, facts.bytes_in, bytes_up,
                _ms(facts.first_event_s), _ms(facts.duration_s),
            )
        )  # fmt: skip
        self._fold_troubles(facts, ended)

    def _fold_troubles(self, facts: TurnFacts, ended: float) -> None:
        for resend in facts.resends:
            self._note(Trouble.RESEND, resend.value, ended)
        if facts.mode is Mode.HTTP and facts.reason is not Reason.SHADOW:
            self._note(Trouble.FALLBACK, facts.reason.value, ended)
        if facts.status >= _ERROR_STATUS:
            self._note(Trouble.STATUS, str(facts.status) if facts.status < 600 else "other", ended)
        verdict = facts.would.verdict if facts.would else None
        if verdict is not None:
            self._verdicts[verdict] += 1
            if verdict == "wrong":
                self._note(Trouble.WRONG, verdict, ended)

    def _note(self, trouble: Trouble, reason: str, at: float) -> None:
        counted = self._troubles.setdefault((trouble, reason), _Counted())
        counted.count += 1
        counted.last = at

    def _bucket(self, at: float) -> _Bucket:
        number = int(at // BUCKET_S)
        if (bucket := self._buckets.get(number)) is None:
            bucket = self._buckets[number] = _Bucket(number)
            while len(self._buckets) > BUCKETS:
                self._drop(min(self._buckets))
        return self._buckets.get(number, bucket)

    def _drop(self, number: int) -> None:
        self._hour.take_out(self._buckets.pop(number).times)

    def _conversation_of(self, facts: TurnFacts, ended: float) -> _Conversation:
        """Find the conversation that a turn belongs to, or begin one."""
        found = None
        if facts.previous is not None:
            found = self._by_head.get((facts.principal, facts.previous))
        if found is None:
            self._numbers += 1
            began, model = ended - facts.duration_s, model_name(facts.model)
            found = _Conversation(self._numbers, facts.principal, facts.label, model, began, ended)
        self._conversations[found.number] = found
        self._conversations.move_to_end(found.number)
        if len(self._conversations) > MAX_CONVERSATIONS:
            self._conversations.popitem(last=False)
        if facts.response is not None:
            self._by_head[facts.principal, facts.response] = found
            if len(self._by_head) > MAX_HEADS:
                self._by_head.popitem(last=False)
        return found

    # What is shown.

    def snapshot(self, *, since: float = 0.0) -> dict[str, object]:
        """
        Return what there is, ready for JSON; of series and conversations what changed `since`.

        `since` is the `now` of an earlier snapshot. The sums are those of the whole run, quantiles
        those of the last hour.
        """
        self.fold()
        now = self._wall()
        for number in [each for each in self._buckets if each <= now // BUCKET_S - BUCKETS]:
            self._drop(number)
        first = int(since // BUCKET_S)
        return {
            **self._about,
            "now": round(now, 3),
            "started": round(self._started, 3),
            "state": self.state(),
            "bucket_s": BUCKET_S,
            "totals": self._totals(),
            "series": [
                _told(self._buckets[number]) for number in sorted(self._buckets) if number >= first
            ],
            "conversations": self._rows(since),
            "conversations_in_all": self._numbers,
            "connections": [_connection(each) for each in self.connections()],
            "troubles": [
                {
                    "kind": trouble.value,
                    "reason": reason,
                    "text": _text_of(trouble, reason),
                    "count": counted.count,
                    "last": round(counted.last, 1),
                }
                for (trouble, reason), counted in sorted(
                    self._troubles.items(), key=lambda item: -item[1].last
                )
            ],
        }

    def _totals(self) -> dict[str, object]:
        first_event = self._hour.first_event
        return {
            "turns": {mode.value: count for mode, count in self._turns.items()},
            "in_flight": self.in_flight(),
            "bytes_in": self._bytes_in,
            "bytes_up": self._bytes_up,
            "first_event_ms": {mode.value: _quantiles(first_event[mode]) for mode in Mode},
            "overhead_ms": _quantiles(self._hour.overhead),
            "verdicts": dict(self._verdicts),
        }

    def _rows(self, since: float) -> list[dict[str, object]]:
        """Give the conversations of late, the latest first."""
        latest = list(reversed(self._conversations.values()))[:MAX_SHOWN]
        return [
            {
                "id": each.number,
                "label": each.label,
                "model": each.model,
                "started": round(each.started, 1),
                "last": round(each.last, 1),
                "turns": {mode.value: count for mode, count in each.turns.items()},
                "bytes_in": each.bytes_in,
                "bytes_up": each.bytes_up,
                "connection": each.connection,
                "recent": list(each.recent),
            }
            for each in latest
            if each.last >= since - _ROUNDING_S
        ]


@cache
def reason_texts() -> dict[str, str]:
    """Return the sentence of every reason, for people."""
    return {reason.value: reason.text for reason in Reason}


_CONNECT_TEXTS: Final = {
    "refused": "upstream answered the WebSocket handshake with a status",
    "timeout": "no WebSocket connection in time",
    "tls": "the TLS handshake of a WebSocket connection failed",
    "failed": "no WebSocket connection to upstream",
    "limited": "too many new connections",
}


def _text_of(trouble: Trouble, reason: str) -> str:
    if trouble is Trouble.STATUS:
        return "the client left before its reply" if reason == "499" else f"answered {reason}"
    if trouble is Trouble.CONNECT:
        return _CONNECT_TEXTS.get(reason, reason)
    if trouble is Trouble.WRONG:
        return "a delta that shadow mode found wrong: please report it"
    return reason_texts().get(reason, reason)


def _told(bucket: _Bucket) -> list[float | None]:
    """Give a bucket as a row: time, turns by mode, bytes in and up, four latencies."""
    times = bucket.times
    return [
        bucket.number * BUCKET_S,
        *(bucket.turns[mode] for mode in Mode),
        bucket.bytes_in,
        bucket.bytes_up,
        times.first_event[Mode.DELTA].quantile_ms(0.5),
        times.otherwise.quantile_ms(0.5),
        times.overhead.quantile_ms(0.5),
        times.overhead.quantile_ms(0.95),
    ]


def _connection(facts: ConnectionFacts) -> dict[str, object]:
    return {
        "id": facts.id,
        "state": facts.state,
        "label": facts.label,
        "age_s": round(facts.age_s),
        "left_s": round(facts.left_s),
        "turns": facts.turns,
    }


def _quantiles(latencies: Latencies) -> dict[str, float | None]:
    return {
        "p50": latencies.quantile_ms(0.5),
        "p95": latencies.quantile_ms(0.95),
        "count": len(latencies),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)
