"""
What Turnwire counts, under which names, and with which labels.

`DEFINITIONS` is the single list of metrics: the objects are made from it, and so is the table in
the README (`reference_table`). Labels are closed sets: a mode, a reason, a known field, a status
class; whatever is not in its set is counted as "other", so that no traffic can make the number
of series grow. No label holds a path, a model, a principal or anything else a client chooses.

Each `Metrics` has a registry of its own, so tests may make as many as they like.
"""

from __future__ import annotations

import asyncio
import platform
from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from proxy.core.reasons import Mode, Reason
from proxy.core.shadow import Verdict
from proxy.observe.log import lines_dropped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from proxy.observe.facts import TurnFacts

OTHER: Final = "other"

CONNECT_RESULTS: Final = frozenset(
    {"ok", "refused", "failed", "timeout", "tls", "limited", "cancelled"}
)

# Fields of items and of requests in which a client's echo is known to differ from what upstream
# sent. A gap in a field that is not listed is counted as "other".
GAP_FIELDS: Final = frozenset(
    {
        "action",
        "annotations",
        "arguments",
        "call_id",
        "caller",
        "code",
        "container_id",
        "content",
        "created_by",
        "encrypted_content",
        "fingerprint",
        "id",
        "image_url",
        "input",
        "logprobs",
        "name",
        "namespace",
        "operation",
        "order",
        "output",
        "outputs",
        "parsed",
        "parsed_arguments",
        "pending_safety_checks",
        "phase",
        "prompt_cache_breakpoint",
        "queries",
        "reasoning",
        "refusal",
        "result",
        "results",
        "role",
        "server_label",
        "status",
        "summary",
        "text",
        "tools",
        "type",
    }
)

TURN_BUCKETS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600),
)
OVERHEAD_BUCKETS_S: Final = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1),
)
LAG_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 5, 10)


class Kind(StrEnum):
    """The types of metric there are."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric: its full name, type, meaning, labels, and for a histogram its buckets."""

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


DEFINITIONS: Final = (
    Definition(
        "turnwire_turns_total",
        Kind.COUNTER,
        "Turns answered, by how they were sent upstream and why.",
        ("mode", "reason"),
    ),
    Definition("turnwire_turns_in_flight", Kind.GAUGE, "Turns that have begun and not yet ended."),
    Definition(
        "turnwire_resends_total",
        Kind.COUNTER,
        "Turns sent again in full before the client had seen a byte.",
        ("reason",),
    ),
    Definition(
        "turnwire_fallbacks_total",
        Kind.COUNTER,
        "Turns fit for WebSocket mode that went over plain HTTP.",
        ("reason",),
    ),
    Definition(
        "turnwire_passthrough_requests_total",
        Kind.COUNTER,
        "Requests relayed over plain HTTP, by class of the status that upstream gave.",
        ("status_class",),
    ),
    Definition(
        "turnwire_downstream_request_bytes_total",
        Kind.COUNTER,
        "Bytes of turn requests received from clients, decoded.",
    ),
    Definition(
        "turnwire_upstream_request_bytes_total",
        Kind.COUNTER,
        "Bytes of turn requests sent upstream, resends included.",
    ),
    Definition(
        "turnwire_overhead_seconds",
        Kind.HISTOGRAM,
        "From a request's last byte to its first byte upstream: what Turnwire itself takes.",
        buckets=OVERHEAD_BUCKETS_S,
    ),
    Definition(
        "turnwire_first_event_seconds",
        Kind.HISTOGRAM,
        "From a request's last byte to the first event written to the client, by mode.",
        ("mode",),
        TURN_BUCKETS_S,
    ),
    Definition(
        "turnwire_turn_duration_seconds",
        Kind.HISTOGRAM,
        "From a request's last byte to the end of its reply, by mode.",
        ("mode",),
        TURN_BUCKETS_S,
    ),
    Definition(
        "turnwire_shadow_turns_total",
        Kind.COUNTER,
        "Turns of shadow mode, by how they would have been sent and why.",
        ("mode", "reason"),
    ),
    Definition(
        "turnwire_shadow_deltas_total",
        Kind.COUNTER,
        "Turns of shadow mode that would have been deltas, by whether that would have been right.",
        ("verdict",),
    ),
    Definition(
        "turnwire_shadow_upstream_request_bytes_total",
        Kind.COUNTER,
        "Bytes of turn requests that would have been sent upstream, had it not been shadow mode.",
    ),
    Definition(
        "turnwire_connections",
        Kind.GAUGE,
        "WebSocket connections to upstream, by state.",
        ("state",),
    ),
    Definition(
        "turnwire_connects_total",
        Kind.COUNTER,
        "Attempts to open a WebSocket connection, by result.",
        ("result",),
    ),
    Definition("turnwire_chains", Kind.GAUGE, "Chains remembered."),
    Definition("turnwire_chain_bytes", Kind.GAUGE, "Memory that the chains are charged with."),
    Definition(
        "turnwire_chat_untranslatable_total",
        Kind.COUNTER,
        "Chat Completions requests that went over HTTP, by the field that has no equal.",
        ("field",),
    ),
    Definition(
        "turnwire_normalisation_gaps_total",
        Kind.COUNTER,
        "Items that are the same by their ids and yet unequal, by the field that differs.",
        ("field",),
    ),
    Definition(
        "turnwire_loop_lag_seconds",
        Kind.HISTOGRAM,
        "How late the event loop wakes a sleeping task.",
        buckets=LAG_BUCKETS_S,
    ),
    Definition(
        "turnwire_log_lines_dropped_total",
        Kind.COUNTER,
        "Log lines dropped, since nobody read the log for long.",
    ),
    Definition("turnwire_draining", Kind.GAUGE, "1 while the process finishes and takes no more."),
    Definition("turnwire_build_info", Kind.GAUGE, "Always 1.", ("version", "python")),
)

_BY_NAME: Final = {definition.name: definition for definition in DEFINITIONS}


class _Distribution:
    """How often a value fell into each bucket, as plain numbers."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Tell it, cumulated as Prometheus wants it."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family.add_metric(labels, buckets, self._sum)


class _TurnCounts(Collector):
    """
    What is counted of every turn: in plain numbers, which cost a tenth of the library's objects.

    The library is told of them when somebody scrapes. Series appear as it makes them appear: one
    with labels when it was first counted, one without from the start.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self.bytes_in = 0
        self.bytes_up = 0
        self.turns: dict[tuple[str, str], int] = {}
        self.duration: dict[str, _Distribution] = {}
        self.first_event: dict[str, _Distribution] = {}
        self.overhead = _Distribution(OVERHEAD_BUCKETS_S)

    def describe(self) -> Iterable[Metric]:
        """Name the families."""
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        """Tell the numbers."""
        turns = _counter("turnwire_turns_total")
        for labels, count in self.turns.items():
            turns.add_metric(labels, count)
        yield turns
        name = "turnwire_turns_in_flight"
        yield GaugeMetricFamily(name, _BY_NAME[name].meaning, value=self.in_flight)
        yield _counter("turnwire_downstream_request_bytes_total", self.bytes_in)
        yield _counter("turnwire_upstream_request_bytes_total", self.bytes_up)
        overhead = _histogram("turnwire_overhead_seconds")
        self.overhead.add_to(overhead, ())
        yield overhead
        for name, by_mode in (
            ("turnwire_first_event_seconds", self.first_event),
            ("turnwire_turn_duration_seconds", self.duration),
        ):
            family = _histogram(name)
            for mode, distribution in by_mode.items():
                distribution.add_to(family, (mode,))
            yield family


def _counter(name: str, value: float | None = None) -> CounterMetricFamily:
    spec = _BY_NAME[name]
    return CounterMetricFamily(name, spec.meaning, value, spec.labels or None)


def _histogram(name: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, _BY_NAME[name].meaning, labels=_BY_NAME[name].labels)


class _Scraped(Collector):
    """What is read when somebody scrapes, from whoever knows it."""

    def __init__(self) -> None:
        self.connections: Callable[[], Mapping[str, int]] = dict
        self.chains: Callable[[], tuple[int, int]] = lambda: (0, 0)

    def describe(self) -> Iterable[Metric]:
        """Name the families without reading them."""
        gauges = ("turnwire_connections", "turnwire_chains", "turnwire_chain_bytes")
        return [
            _counter("turnwire_log_lines_dropped_total"),
            *(GaugeMetricFamily(name, _BY_NAME[name].meaning) for name in gauges),
        ]

    def collect(self) -> Iterable[Metric]:
        """Read them."""
        yield _counter("turnwire_log_lines_dropped_total", lines_dropped())
        chains, chain_bytes = self.chains()
        name = "turnwire_connections"
        by_state = GaugeMetricFamily(name, _BY_NAME[name].meaning, labels=_BY_NAME[name].labels)
        for state, count in self.connections().items():
            by_state.add_metric([state], count)
        yield by_state
        for name, value in (("turnwire_chains", chains), ("turnwire_chain_bytes", chain_bytes)):
            yield GaugeMetricFamily(name, _BY_NAME[name].meaning, value=value)


class Metrics:
    """All metrics of one process. Every method is cheap, and none raises for odd values."""

    def __init__(self, version: str = "unknown") -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._scraped = _Scraped()
        self.registry.register(self._scraped)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

        self._counts = _TurnCounts()
        self.registry.register(self._counts)
        self._resends = self._counter("turnwire_resends_total")
        self._fallbacks = self._counter("turnwire_fallbacks_total")
        self._passthrough = self._counter("turnwire_passthrough_requests_total")
        self._shadow_turns = self._counter("turnwire_shadow_turns_total")
        self._shadow_deltas = self._counter("turnwire_shadow_deltas_total")
        self._shadow_bytes = self._counter("turnwire_shadow_upstream_request_bytes_total")
        self._connects = self._counter("turnwire_connects_total")
        self._gaps = self._counter("turnwire_normalisation_gaps_total")
        self._untranslatable = self._counter("turnwire_chat_untranslatable_total")
        self._loop_lag = self._histogram("turnwire_loop_lag_seconds")
        self._draining = self._gauge("turnwire_draining")
        self._gauge("turnwire_build_info").labels(version, platform.python_version()).set(1)

    def _counter(self, name: str) -> Counter:
        spec = _BY_NAME[name]
        return Counter(name, spec.meaning, spec.labels, registry=self.registry)

    def _gauge(self, name: str) -> Gauge:
        spec = _BY_NAME[name]
        return Gauge(name, spec.meaning, spec.labels, registry=self.registry)

    def _histogram(self, name: str) -> Histogram:
        spec = _BY_NAME[name]
        return Histogram(
            name, spec.meaning, spec.labels, buckets=spec.buckets, registry=self.registry
        )

    @property
    def in_flight(self) -> int:
        """How many turns have begun and not ended."""
        return self._counts.in_flight

    def turn_started(self) -> None:
        """Count a turn as begun. Exactly one `turn_finished` must follow."""
        self._counts.in_flight += 1

    def turn_finished(self, facts: TurnFacts) -> None:
        """Count a turn as ended; the times that never came about are None."""
        counts, mode = self._counts, facts.mode
        kind = (mode, facts.reason)
        counts.in_flight -= 1
        counts.turns[kind] = counts.turns.get(kind, 0) + 1
        counts.bytes_in += facts.bytes_in
        counts.bytes_up += facts.bytes_up
        _of_mode(counts.duration, mode).observe(facts.duration_s)
        if facts.first_event_s is not None:
            _of_mode(counts.first_event, mode).observe(facts.first_event_s)
        if facts.overhead_s is not None:
            counts.overhead.observe(facts.overhead_s)

    def summary(self) -> str:
        """Tell in one line what the turns so far saved, or in shadow mode would have saved."""
        counts, turns = self._counts, _by_mode(self._shadow_turns)
        sent, would = counts.bytes_up / 1e6, ""
        if any(turns.values()):
            name = "turnwire_shadow_upstream_request_bytes_total"
            sent = (self.registry.get_sample_value(name) or 0) / 1e6
            would = ", had it not been shadow mode"
        for (mode, _), count in () if would else counts.turns.items():
            turns[Mode(mode)] += count
        received = counts.bytes_in / 1e6
        return (
            f"{sum(turns.values())} turns, of which {turns[Mode.DELTA]} as deltas, "
            f"{turns[Mode.FULL]} in full and {turns[Mode.HTTP]} over HTTP; "
            f"{sent:.2f} MB went up of {received:.2f} MB received{would}"
        )

    def resend(self, reason: str) -> None:
        """Count one turn sent again in full."""
        self._resends.labels(_member(Reason, reason)).inc()

    def fallback(self, reason: str) -> None:
        """Count one turn that left WebSocket mode for plain HTTP."""
        self._fallbacks.labels(_member(Reason, reason)).inc()

    def shadow_turn(
        self, mode: str, reason: str, *, bytes_up: int, verdict: str | None = None
    ) -> None:
        """Count how a turn of shadow mode would have gone; `verdict` is that of a delta."""
        self._shadow_turns.labels(_member(Mode, mode), _member(Reason, reason)).inc()
        self._shadow_bytes.inc(max(bytes_up, 0))
        if verdict is not None:
            self._shadow_deltas.labels(_member(Verdict, verdict)).inc()

    def connect(self, result: str) -> None:
        """Count one attempt to connect; `result` is one of CONNECT_RESULTS."""
        self._connects.labels(result if result in CONNECT_RESULTS else OTHER).inc()

    def untranslatable(self, field: str) -> None:
        """Count a Chat request that has this field, a name of the field table."""
        self._untranslatable.labels(field).inc()

    def gap(self, field: str) -> None:
        """Count one difference between an item and its echo, under the differing field."""
        self._gaps.labels(field if field in GAP_FIELDS else OTHER).inc()

    def passthrough(self, status: int) -> None:
        """Count one relayed request by the status it was answered with."""
        known = 100 <= status < 600
        self._passthrough.labels(f"{status // 100}xx" if known else OTHER).inc()

    def bind_gauges(
        self,
        connections: Callable[[], Mapping[str, int]],
        chains: Callable[[], tuple[int, int]],
    ) -> None:
        """Say where to read, at each scrape, connections by state and (chains, their bytes)."""
        self._scraped.connections = connections
        self._scraped.chains = chains

    def loop_lag(self, seconds: float) -> None:
        """Record how late the event loop was."""
        self._loop_lag.observe(seconds)

    def draining(self, is_draining: bool) -> None:
        """Say whether the process is on its way out."""
        self._draining.set(int(is_draining))

    def render(self) -> tuple[bytes, str]:
        """Give the Prometheus text exposition, and its content type."""
        return (
            prometheus_client.generate_latest(self.registry),
            prometheus_client.CONTENT_TYPE_LATEST,
        )


def _by_mode(turns: Counter) -> dict[Mode, int]:
    """Add up a counter of turns by its label `mode`."""
    sums = dict.fromkeys(Mode, 0)
    for sample in (each for metric in turns.collect() for each in metric.samples):
        if sample.name.endswith("_total"):
            sums[Mode(sample.labels["mode"])] += int(sample.value)
    return sums


def _of_mode(by_mode: dict[str, _Distribution], mode: str) -> _Distribution:
    distribution = by_mode.get(mode)
    if distribution is None:
        distribution = by_mode[mode] = _Distribution(TURN_BUCKETS_S)
    return distribution


def _member(kind: type[StrEnum], value: str) -> str:
    """Give the label for a value of a closed set: itself, or "other"."""
    try:
        return kind(value).value
    except ValueError:
        return OTHER


def reference_table() -> str:
    """Give all metrics as a Markdown table, for the README."""
    lines = ["| Metric | Type | Labels | Meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{d.name}` | {d.kind} | {', '.join(f'`{label}`' for label in d.labels)} | {d.meaning} |"
        for d in DEFINITIONS
    ]
    return "\n".join(lines) + "\n"


async def watch_loop_lag(metrics: Metrics, interval_s: float = 0.5) -> None:
    """Record the event loop's lag twice a second or so, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + interval_s
        await asyncio.sleep(interval_s)
        metrics.loop_lag(max(0.0, loop.time() - due))
