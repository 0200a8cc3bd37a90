"""
The relay of a stream's events: in bursts, and at the pace of a model.

A burst is what upstream can write at once, so it tells how many events a proxy can pass on. At a
model's pace it is the latency of the single event that counts: every event carries the moment at
which upstream wrote it, and the client reads the same clock. The first tenth of every paced
stream is not timed; there all streams begin at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.bench.bodies import make_parts
from proxy.bench.children import cpu_s
from proxy.bench.load import Client, Upstream
from proxy.bench.ways import Way, running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy.bench.load import Bench, Turns
    from proxy.bench.samples import Samples
    from proxy.bench.ways import Running

BURST = "burst"
PACED = "paced"
_HISTORY_BYTES = 2000
_SLOWER = {Way.NAIVE: 5}  # how much less of a burst such a way gets, to bound the time


@dataclass(frozen=True, slots=True)
class Burst:
    """So many streams at once, each of `turns` answers with `events` events."""

    streams: int
    events: int
    turns: int

    @property
    def name(self) -> str:
        """The cell of the table."""
        return f"{self.streams} streams" if self.streams > 1 else "1 stream"


@dataclass(frozen=True, slots=True)
class Pace:
    """So many streams at once, each of `rate` events a second for `duration_s`."""

    rate: int
    streams: int
    duration_s: float

    @property
    def name(self) -> str:
        """The cell of the table."""
        return f"{self.rate:,}/s x {self.streams}"

    @property
    def total_rate(self) -> int:
        """Events a second of all streams."""
        return self.rate * self.streams


BURSTS = (Burst(1, 20_000, 6), Burst(10, 4000, 3), Burst(100, 1000, 2))
QUICK_BURSTS = (Burst(1, 500, 1), Burst(3, 100, 1))
GATE_BURSTS = (Burst(1, 20_000, 3), Burst(10, 4000, 2))
PACES = tuple(
    Pace(rate, streams, duration_s)
    for rate, duration_s in ((65, 2.0), (1000, 1.0), (4000, 1.0))
    for streams in (1, 10, 100)
)
QUICK_PACES = (Pace(200, 1, 0.2), Pace(200, 3, 0.2))
GOAL_RATE = 40_000
"""Up to this many events a second in all, the goals are about latency."""


def measure(
    bench: Bench,
    way: Way,
    round_: int,
    samples: Samples,
    bursts: tuple[Burst, ...] = BURSTS,
    paces: tuple[Pace, ...] = PACES,
) -> None:
    """Measure one way in one round. Raises BenchFailed."""
    with Upstream(bench) as upstream, running(way, bench, upstream) as proxy:
        for part, cell, values in measured(bench, way, upstream, proxy, bursts, paces):
            samples.add(part, way, cell, round_, **values)


def measured(
    bench: Bench,
    way: Way,
    upstream: Upstream,
    proxy: Running,
    bursts: tuple[Burst, ...],
    paces: tuple[Pace, ...],
) -> Iterator[tuple[str, str, dict[str, float | None]]]:
    """Measure what is set up already; yield parts, cells and values. Raises BenchFailed."""
    for burst in bursts:
        events = burst.events // _SLOWER.get(way, 1)
        played, spent_s = _play(bench, upstream, proxy, burst.streams, events, turns=burst.turns)
        rate = played.events / played.wall_s
        yield BURST, burst.name, {"rate": rate, "cpu_us": _per_event(spent_s, played)}
    for pace in paces:
        if not can_keep_up(way, pace):
            continue
        events = max(4, round(pace.rate * pace.duration_s))
        played, spent_s = _play(bench, upstream, proxy, pace.streams, events, rate=pace.rate)
        values = {
            "p50_us": played.event_us["p50"],
            "p99_us": played.event_us["p99"],
            "kept_share": played.events / played.wall_s / pace.total_rate,
            "cpu_us": _per_event(spent_s, played),
        }
        yield PACED, pace.name, values


def can_keep_up(way: Way, pace: Pace) -> bool:
    """Whether a way is measured at a pace: the slow ones would only pile events up."""
    return pace.total_rate <= GOAL_RATE // 2 or way not in {Way.NAIVE, Way.PLAIN}


def _play(
    bench: Bench,
    upstream: Upstream,
    proxy: Running,
    streams: int,
    events: int,
    *,
    turns: int = 1,
    rate: int = 0,
) -> tuple[Turns, float | None]:
    """Play turns on all streams; return what the clients saw, and the proxy's CPU time."""
    upstream.plan()
    with Client(bench, proxy.port, make_parts(_HISTORY_BYTES), streams=streams) as client:
        client.begin()
        client.follow_up(2)
        upstream.plan(events, rate)
        before = None if proxy.pid is None else cpu_s(proxy.pid)
        played = client.follow_up(turns, skip=events // 10 if rate else 0, timeout_s=120)
        after = None if proxy.pid is None else cpu_s(proxy.pid)
    return played, None if before is None or after is None else after - before


def _per_event(spent_s: float | None, played: Turns) -> float | None:
    return None if spent_s is None else spent_s * 1e6 / played.events
