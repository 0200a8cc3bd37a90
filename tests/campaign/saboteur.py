"""
What can go wrong with the network, at random moments, on both sides of the proxy.

The saboteur does something to a random connection every few turns: ends it, resets it, or gives it
a toxic; now and then it takes the whole network down for a moment. `near` is between clients and
the proxy, `far` between the proxy and upstream.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toxics import (
    Bandwidth,
    Latency,
    LimitData,
    ResetPeer,
    Slicer,
    SlowClose,
    Timeout,
)

if TYPE_CHECKING:
    import random

    from toxics import FaultProxy, Link

    from campaign.ledger import Ledger

MEAN_PAUSE_S = 0.02
STREAMS = ("upstream", "downstream")
# The parts of the catalogue that each kind belongs to.
ROWS = {
    "reset": "F1",
    "close": "F2",
    "limit_data": "F2",
    "reset_peer": "F1",
    "timeout": "F3",
    "black hole": "F3",
    "latency": "F13",
    "bandwidth": "F13",
    "slow_close": "F13",
    "slicer": "F14",
    "down": "F10",
}

Make = "Callable[[random.Random], Toxic]"
TOXICS: dict[str, tuple[int, Make]] = {
    "limit_data": (
        6,
        lambda rng: LimitData(stream=rng.choice(STREAMS), bytes=rng.randrange(30_000)),
    ),
    "reset_peer": (
        3,
        lambda rng: ResetPeer(stream=rng.choice(STREAMS), timeout=rng.choice((0, 1, 20))),
    ),
    "timeout": (
        1,
        lambda rng: Timeout(stream=rng.choice(STREAMS), timeout=rng.choice((50, 500))),
    ),
    "latency": (3, lambda rng: Latency(stream=rng.choice(STREAMS), latency=30, jitter=25)),
    "bandwidth": (2, lambda rng: Bandwidth(stream=rng.choice(STREAMS), rate=rng.choice((32, 200)))),
    "slow_close": (1, lambda rng: SlowClose(stream=rng.choice(STREAMS), delay=50)),
    "slicer": (
        3,
        lambda rng: Slicer(
            stream=rng.choice(STREAMS),
            average_size=rng.choice((20, 100, 1000)),
            size_variation=rng.choice((1, 19)),
            delay=0,
        ),
    ),
}
CUTS = {"reset": 4, "close": 4, "black hole": 1}


@dataclass
class Saboteur:
    """Spoils `near` and `far`, `share` times for each turn; counts it in the ledger."""

    near: FaultProxy
    far: FaultProxy
    rng: random.Random
    ledger: Ledger
    share: float
    outages: float = 0.0

    async def run(self) -> None:
        """Go on until cancelled."""
        done, before = 0, self.ledger.turns
        while True:
            await asyncio.sleep(self.rng.uniform(0, 2 * MEAN_PAUSE_S))
            if done >= (self.ledger.turns - before) * self.share:
                continue
            done += 1
            if self.rng.random() < self.outages:
                await self._outage()
            else:
                self._spoil()

    def heal(self) -> None:
        """End every connection that has a toxic of ours: a black hole has no end of its own."""
        for link in [*self.near.links, *self.far.links]:
            if link.own_toxics:
                link.reset()

    async def _outage(self) -> None:
        side = self.rng.choice(("near", "far"))
        proxy: FaultProxy = getattr(self, side)
        proxy.disable()
        self.ledger.injected[f"{side}: down"] += 1
        try:
            await asyncio.sleep(self.rng.uniform(0, 0.3))
        finally:
            await proxy.enable()

    def _spoil(self) -> None:
        side = self.rng.choice(("near", "far", "far"))
        links = [*getattr(self, side).links]
        if not links:
            return
        link: Link = self.rng.choice(links)
        weights = {name: weight for name, (weight, _) in TOXICS.items()} | CUTS
        (name,) = self.rng.choices(list(weights), list(weights.values()))
        if name == "black hole" and not (side == "far" and link.began_with.startswith(b"GET ")):
            # Without a limit of its own a client, or HTTP, may wait in it for ever; we need not.
            name = "timeout"
        self.ledger.injected[f"{side}: {name}"] += 1
        if name == "reset":
            link.reset()
        elif name == "close":
            link.close()
        elif name == "black hole":
            link.infect(Timeout(), Timeout(stream="upstream"))
        else:
            link.infect(TOXICS[name][1](self.rng))
