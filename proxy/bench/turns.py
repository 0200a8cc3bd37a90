"""
Whole turns: latency, CPU and bytes sent upstream, against the length of the history.

Each conversation begins with its whole history, untimed, and goes on with follow-up turns: the
model's item echoed, one new item, an answer of three events. Those are what is timed. They are few
enough that the history stays near its nominal size, so several conversations make a measurement.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.bench.bodies import make_chat_parts, make_parts
from proxy.bench.children import cpu_s
from proxy.bench.load import Client, Upstream
from proxy.bench.ways import Way, running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy.bench.bodies import Parts
    from proxy.bench.load import Bench, Turns
    from proxy.bench.samples import Samples
    from proxy.bench.ways import Running

PART, CHAT_PART = "turn", "chat"
RESPONSES, CHAT = "responses", "chat completions"
"""What stands for a way in `CHAT_PART`: the same turns through Turnwire, in either API."""

_WARM_TURNS = 2
# After its first turn Turnwire opens a spare connection in the background: slowly, over TLS.
_SETTLE_S = 0.1


@dataclass(frozen=True, slots=True)
class Size:
    """A length of history, and how much is measured of it in a round."""

    name: str
    history_bytes: int
    conversations: int
    turns: int


SIZES = (
    Size("10 KB", 10_000, 10, 8),
    Size("100 KB", 100_000, 4, 25),
    Size("1 MB", 1_000_000, 3, 16),
    Size("10 MB", 10_000_000, 1, 8),
)
QUICK_SIZES = (Size("10 KB", 10_000, 1, 3), Size("100 KB", 100_000, 1, 3))
CHAT_SIZES = (
    Size("10 KB", 10_000, 12, 20),
    Size("100 KB", 100_000, 4, 25),
    Size("1 MB", 1_000_000, 3, 16),
)
GATE_SIZES = (Size("10 KB", 10_000, 8, 8), Size("1 MB", 1_000_000, 2, 12))


def measure(
    bench: Bench, way: Way, round_: int, samples: Samples, sizes: tuple[Size, ...] = SIZES
) -> None:
    """Measure one way in one round. Raises BenchFailed."""
    with Upstream(bench) as upstream, running(way, bench, upstream) as proxy:
        for cell, values in measured(bench, upstream, proxy, sizes):
            samples.add(PART, way, cell, round_, **values)


def measured(
    bench: Bench, upstream: Upstream, proxy: Running, sizes: tuple[Size, ...]
) -> Iterator[tuple[str, dict[str, float | None]]]:
    """Measure what is set up already; yield cells and values. Raises BenchFailed."""
    upstream.plan()
    _play(bench, upstream, proxy, Size("warm-up", sizes[0].history_bytes, 1, 20))
    for size in sizes:
        yield size.name, _play(bench, upstream, proxy, size)


def measure_chat(
    bench: Bench, round_: int, samples: Samples, sizes: tuple[Size, ...] = CHAT_SIZES
) -> None:
    """Measure the same turns in both APIs, by turns, in one process. Raises BenchFailed."""
    with Upstream(bench) as upstream, running(Way.TURNWIRE, bench, upstream) as proxy:
        for size in (Size("warm-up", sizes[0].history_bytes, 1, 20), *sizes):
            for name, make in ((RESPONSES, make_parts), (CHAT, make_chat_parts)):
                told = _play(bench, upstream, proxy, size, make(size.history_bytes))
                if size.name != "warm-up":
                    samples.add(CHAT_PART, name, size.name, round_, **told)


def _play(
    bench: Bench, upstream: Upstream, proxy: Running, size: Size, parts: Parts | None = None
) -> dict[str, float | None]:
    played: list[Turns] = []
    spent_s, seen = 0.0, Counter[str]()
    with Client(bench, proxy.port, parts or make_parts(size.history_bytes)) as client:
        for _ in range(size.conversations):
            client.begin()
            client.follow_up(_WARM_TURNS)
            time.sleep(_SETTLE_S)
            cpu_before = _cpu(proxy)
            seen.subtract(upstream.stats())
            played.append(client.follow_up(size.turns))
            seen.update(upstream.stats())
            spent_s += _cpu(proxy) - cpu_before
    turns = sum(each.turns for each in played)
    return {
        "turn_us": statistics.median(each.turn_us["p50"] for each in played),
        "first_us": statistics.median(each.first_us["p50"] for each in played),
        "cpu_us": None if math.isnan(spent_s) else spent_s * 1e6 / turns,
        "upstream_bytes": seen["bytes"] / turns,
        "delta_share": seen["deltas"] / turns,
        "body_bytes": float(played[-1].body_bytes),
    }


def _cpu(proxy: Running) -> float:
    spent = None if proxy.pid is None else cpu_s(proxy.pid)
    return float("nan") if spent is None else spent
