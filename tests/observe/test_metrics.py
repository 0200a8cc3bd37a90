"""Metrics: names, closed labels, and what a scrape shows."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from proxy.core.reasons import Mode, Reason
from proxy.observe.facts import TurnFacts
from proxy.observe.metrics import (
    DEFINITIONS,
    GAP_FIELDS,
    OVERHEAD_BUCKETS_S,
    TURN_BUCKETS_S,
    Kind,
    Metrics,
    reference_table,
    watch_loop_lag,
)


def scrape(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Give every sample of an exposition by its name and labels."""
    body, _ = metrics.render()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def finish(metrics: Metrics, mode: Mode = Mode.DELTA, reason: Reason = Reason.CONTINUED) -> None:
    """End a turn that had all its times."""
    metrics.turn_finished(
        facts(
            mode,
            reason,
            bytes_in=1000,
            bytes_up=10,
            duration_s=2.0,
            first_event_s=0.5,
            overhead_s=0.0004,
        )
    )


def facts(mode: Mode, reason: Reason, **numbers: Any) -> TurnFacts:
    """Make the facts of a turn, of which nothing but these is counted."""
    return TurnFacts(
        turn_id="t",
        principal="p",
        label="p",
        mode=mode,
        reason=reason,
        status=200,
        ended_at=0.0,
        **numbers,
    )


def test_a_turn_is_counted_once_with_its_bytes_and_times() -> None:
    """One finished turn shows in every metric of turns."""
    metrics = Metrics()
    metrics.turn_started()
    assert scrape(metrics)["turnwire_turns_in_flight", ()] == 1
    finish(metrics)
    samples = scrape(metrics)
    labels = (("mode", "delta"), ("reason", "continued"))
    assert samples["turnwire_turns_in_flight", ()] == 0
    assert samples["turnwire_turns_total", labels] == 1
    assert samples["turnwire_downstream_request_bytes_total", ()] == 1000
    assert samples["turnwire_upstream_request_bytes_total", ()] == 10
    assert samples["turnwire_turn_duration_seconds_sum", (("mode", "delta"),)] == 2.0
    assert samples["turnwire_first_event_seconds_count", (("mode", "delta"),)] == 1
    assert samples["turnwire_overhead_seconds_bucket", (("le", "0.0005"),)] == 1


class Reference:
    """What is counted of every turn, by the library's own objects."""

    def __init__(self) -> None:
        prometheus_client.disable_created_metrics()
        self.registry = CollectorRegistry()
        kinds = {Kind.COUNTER: Counter, Kind.GAUGE: Gauge}
        for each in DEFINITIONS:
            if each.name not in COUNTED:
                continue
            if each.kind is Kind.HISTOGRAM:
                made = Histogram(
                    each.name, each.meaning, each.labels, buckets=each.buckets, registry=None
                )
            else:
                made = kinds[each.kind](each.name, each.meaning, each.labels, registry=None)
            setattr(self, each.name.removeprefix("turnwire_"), made)
            self.registry.register(made)

    def finish(self, mode: str, reason: str, **numbers: float | None) -> None:
        """Count a turn."""
        self.turns_in_flight.dec()
        self.turns_total.labels(mode, reason).inc()
        self.downstream_request_bytes_total.inc(numbers["bytes_in"])
        self.upstream_request_bytes_total.inc(numbers["bytes_up"])
        self.turn_duration_seconds.labels(mode).observe(numbers["duration_s"])
        if numbers["first_event_s"] is not None:
            self.first_event_seconds.labels(mode).observe(numbers["first_event_s"])
        if numbers["overhead_s"] is not None:
            self.overhead_seconds.observe(numbers["overhead_s"])

    def exposition(self) -> dict[str, list[str]]:
        """Give the text, by family."""
        return by_family(prometheus_client.generate_latest(self.registry).decode())


COUNTED = (
    *("turnwire_turns_total", "turnwire_turns_in_flight", "turnwire_overhead_seconds"),
    *("turnwire_downstream_request_bytes_total", "turnwire_upstream_request_bytes_total"),
    *("turnwire_first_event_seconds", "turnwire_turn_duration_seconds"),
)


def by_family(text: str) -> dict[str, list[str]]:
    """Sort the lines of an exposition by the family they tell of."""
    families: dict[str, list[str]] = {}
    for block in text.split("# HELP ")[1:]:
        families[block.split(" ", 1)[0]] = block.splitlines()
    return {name: lines for name, lines in families.items() if name in COUNTED}


@pytest.mark.parametrize("count", [0, 1, 300])
def test_plain_numbers_tell_what_the_librarys_objects_would(count: int) -> None:
    """The same text, line for line: names, labels, buckets, sums, and series that are not there."""
    rng = random.Random(count)
    metrics, reference = Metrics(), Reference()
    bounds = [*TURN_BUCKETS_S, *OVERHEAD_BUCKETS_S]

    def seconds() -> float | None:
        drawn = rng.choice([rng.choice(bounds), rng.expovariate(2), 1e-9, 0.0, 10_000.0, None])
        return None if drawn is None else float(drawn)

    for _ in range(count):
        metrics.turn_started()
        reference.turns_in_flight.inc()
        if rng.random() < 0.1:
            continue  # still under way
        numbers = {
            "bytes_in": rng.randrange(10**6),
            "bytes_up": rng.choice([0, 7, 10**12]),
            "duration_s": seconds() or 0.5,
            "first_event_s": seconds(),
            "overhead_s": seconds(),
        }
        mode, reason = rng.choice([*Mode]), rng.choice([*Reason])
        metrics.turn_finished(facts(mode, reason, **numbers))
        reference.finish(mode, reason, **numbers)

    told = by_family(metrics.render()[0].decode())
    assert told == reference.exposition()
    assert set(told) == set(COUNTED)


def test_a_scrape_changes_nothing() -> None:
    """Two in a row tell the same, and counting goes on from there."""
    metrics = Metrics()
    finish(metrics)
    once = by_family(metrics.render()[0].decode())

    assert by_family(metrics.render()[0].decode()) == once
    finish(metrics)
    labels = {"mode": "delta", "reason": "continued"}
    assert metrics.registry.get_sample_value("turnwire_turns_total", labels) == 2


def test_times_that_never_came_are_not_observed() -> None:
    """A turn without a first event does not count as an instant one."""
    metrics = Metrics()
    metrics.turn_finished(facts(Mode.HTTP, Reason.TOO_LARGE, bytes_in=1, bytes_up=1, duration_s=1))
    samples = scrape(metrics)
    assert ("turnwire_first_event_seconds_count", (("mode", "http"),)) not in samples
    assert samples["turnwire_overhead_seconds_count", ()] == 0


def test_labels_are_closed_sets() -> None:
    """No odd value makes a series of its own. (A turn's own labels are members of enums.)"""
    metrics = Metrics()

    def flood() -> int:
        for number in range(50):
            odd = f"x{number}"
            metrics.resend(odd)
            metrics.fallback(odd)
            metrics.connect(odd)
            metrics.gap(odd)
            metrics.passthrough(number)
        return len(scrape(metrics))

    assert flood() == flood()
    assert scrape(metrics)["turnwire_normalisation_gaps_total", (("field", "other"),)] == 100
    assert len(GAP_FIELDS) <= 40


def test_every_reason_is_a_label() -> None:
    """Each member of Reason counts under its own name, and so does a known field."""
    metrics = Metrics()
    for reason in Reason:
        metrics.resend(reason)
        metrics.fallback(reason)
    metrics.gap("arguments")
    metrics.connect("ok")
    metrics.passthrough(404)
    samples = scrape(metrics)
    for reason in Reason:
        assert samples["turnwire_resends_total", (("reason", reason.value),)] == 1
        assert samples["turnwire_fallbacks_total", (("reason", reason.value),)] == 1
    assert samples["turnwire_normalisation_gaps_total", (("field", "arguments"),)] == 1
    assert samples["turnwire_connects_total", (("result", "ok"),)] == 1
    assert samples["turnwire_passthrough_requests_total", (("status_class", "4xx"),)] == 1


def test_gauges_are_read_when_scraped() -> None:
    """Connections and chains show what they are at the time of the scrape."""
    metrics = Metrics()
    connections = {"idle": 1}
    metrics.bind_gauges(lambda: connections, lambda: (3, 4096))
    assert scrape(metrics)["turnwire_connections", (("state", "idle"),)] == 1
    connections["idle"] = 7
    samples = scrape(metrics)
    assert samples["turnwire_connections", (("state", "idle"),)] == 7
    assert samples["turnwire_chains", ()] == 3
    assert samples["turnwire_chain_bytes", ()] == 4096


def test_the_process_describes_itself() -> None:
    """The build, draining, and the usual collectors of a Python process are there."""
    metrics = Metrics("1.2.3")
    metrics.draining(True)
    samples = scrape(metrics)
    names = {name for name, _ in samples}
    build = [labels for name, labels in samples if name == "turnwire_build_info"]
    assert ("version", "1.2.3") in build[0]
    assert samples["turnwire_draining", ()] == 1
    assert "python_info" in names
    assert "python_gc_collections_total" in names
    assert not [name for name in names if name.endswith("_created")]


def test_every_defined_metric_exists_and_is_documented() -> None:
    """The list of definitions, the exposition and the table can't drift apart."""
    metrics = Metrics()
    types = dict(
        line.split(" ")[2:4]
        for line in metrics.render()[0].decode().splitlines()
        if line.startswith("# TYPE turnwire_")
    )
    assert types == {definition.name: definition.kind for definition in DEFINITIONS}
    table = reference_table()
    for definition in DEFINITIONS:
        assert f"| `{definition.name}` | {definition.kind} |" in table


async def test_the_loop_watch_observes_lag() -> None:
    """While the watch runs, lags are recorded; cancelled, it ends."""
    metrics = Metrics()
    seen = asyncio.Event()
    observe = metrics.loop_lag
    metrics.loop_lag = lambda seconds: (observe(seconds), seen.set())[0]  # type: ignore[method-assign]
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(watch_loop_lag(metrics, interval_s=0.001))
        await seen.wait()
        watch.cancel()
    assert scrape(metrics)["turnwire_loop_lag_seconds_count", ()] >= 1
