"""
TLS to the upstream: what it costs in the relay and in whole turns, each way with it and without.

The upstream listens on two ports, one of them behind TLS (1.3, as it is negotiated), and does its
own share of the encrypting there: on its own core, and so in the latencies, not in the CPU time of
the proxies. The client's leg is plain everywhere. The measurements are those of `relays` and
`turns`, in a few of their cells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.bench import relays, turns
from proxy.bench.load import Upstream
from proxy.bench.ways import running

if TYPE_CHECKING:
    from proxy.bench.load import Bench
    from proxy.bench.samples import Samples
    from proxy.bench.ways import Way

TURN, BURST, PACED = "tls turn", "tls burst", "tls paced"
_PARTS = {relays.BURST: BURST, relays.PACED: PACED}


@dataclass(frozen=True, slots=True)
class Extent:
    """Which cells are measured."""

    bursts: tuple[relays.Burst, ...] = (relays.Burst(1, 20_000, 3), relays.Burst(10, 4000, 2))
    paces: tuple[relays.Pace, ...] = (
        relays.Pace(65, 10, 2.0),
        relays.Pace(1000, 1, 1.0),
        relays.Pace(1000, 10, 1.0),
    )
    sizes: tuple[turns.Size, ...] = (
        turns.Size("10 KB", 10_000, 10, 8),
        turns.Size("1 MB", 1_000_000, 2, 12),
    )


FULL = Extent()
QUICK = Extent(relays.QUICK_BURSTS[:1], relays.QUICK_PACES[:1], turns.QUICK_SIZES[:1])


def measure(bench: Bench, way: Way, round_: int, samples: Samples, extent: Extent = FULL) -> None:
    """Measure one way in one round. The run must have certificates. Raises BenchFailed."""
    with Upstream(bench) as upstream, running(way, bench, upstream) as proxy:
        for part, cell, values in relays.measured(
            bench, way, upstream, proxy, extent.bursts, extent.paces
        ):
            samples.add(_PARTS[part], way, cell, round_, **values)
        for cell, values in turns.measured(bench, upstream, proxy, extent.sizes):
            samples.add(TURN, way, cell, round_, **values)
