"""
An hour of ordinary traffic with a little of everything: does anything grow?

Two hundred conversations think, ask, end and are replaced; upstream ends every connection after 20
seconds as it does after an hour; one request in a hundred meets a fault; one client in ten walks
away. After a warm-up memory must stay where it is. So whatever fills up must be full by then: what
is remembered of conversations is limited to two minutes here, and traffic is eight times as fast at
first: until the fingerprints of 65,536 items, which are kept whatever becomes of their
conversations, have been replaced several times, and the allocator has its arenas for all of that.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from campaign.clients import LostTurn, make_conversation
from campaign.rounds import BASE, KEYS, Shares, Stage, merged, stage

if TYPE_CHECKING:
    from collections.abc import Sequence

CONVERSATIONS = 200
THINKS_S = 23.0
THINKS_AT_FIRST_S = 2.5
LIVES_S = 20 * 60.0  # a churn of 5 % a minute, and more by the next
PROMPTS_MAX = 15  # so that histories are as long as they get before the warm-up ends
SAMPLE_EVERY_S = 10.0
ROTATION_S = 20.0
SETTINGS: dict[str, Any] = merged(
    BASE,
    {
        "websocket": {"max_age_s": ROTATION_S, "retire_margin_s": 5},
        "connections": {"max_per_principal": 64},
        "chains": {"ttl_s": 120},
    },
)
SHARES = Shares(turns=0.01, upgrades=0.01, network=0.01, outages=0.02, leaves=0.1, moves=0.1)


@dataclass
class Samples:
    """What was measured, by the seconds since the begin."""

    times_s: list[float] = field(default_factory=list)
    rss_kib: list[int] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)
    tasks: list[int] = field(default_factory=list)
    series: list[int] = field(default_factory=list)

    def slope_mib_per_h(self, after_s: float) -> float:
        """Return the growth of memory after a warm-up: the line of least squares."""
        pairs = zip(self.times_s, self.rss_kib, strict=True)
        return slope([(at, kib) for at, kib in pairs if at >= after_s]) * 3600 / 1024


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the line of least squares through these points."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


async def soak(seconds: float, conversations: int = CONVERSATIONS) -> dict[str, Any]:
    """Run it for so long, a quarter of it as warm-up; return what came of it."""
    samples = Samples()
    async with stage(f"soak {seconds}", SETTINGS, max_age_s=ROTATION_S) as s:
        before = await s.warm_up() | {"objects": (await s.proxy.holdings(collect=True))["objects"]}
        began = time.monotonic()
        deadline, hurries_until = began + seconds, began + seconds / 5
        async with s.trouble(SHARES), asyncio.TaskGroup() as group:
            for number in range(conversations):
                group.create_task(_converse(s, number, hurries_until, deadline))
            group.create_task(_watch(s, samples, deadline))
        metrics = await _scrape(s)
        s.ledger.inspect(s.sim.journal)
        after = await _settled(s, before)
        await s.leave_clean(before)
        rotations = s.proxy.events["connection_closed"]
    warm_up_s = seconds / 4
    pairs = zip(samples.times_s, samples.rss_kib, strict=True)
    warm = [kib for at, kib in pairs if at >= warm_up_s]
    return {
        "seconds": seconds,
        "conversations": conversations,
        **s.ledger.as_json(),
        "warm_up_s": warm_up_s,
        "slope_mib_per_h": round(samples.slope_mib_per_h(warm_up_s), 2),
        "rss_mib": [round(min(warm) / 1024, 1), round(max(warm) / 1024, 1)],
        "rss_mib_every_minute": [round(kib / 1024, 1) for kib in samples.rss_kib[::6]],
        "objects_before_and_after": [before["objects"], after["objects"]],
        "tasks_before_and_after": [before["tasks"], after["tasks"]],
        "fds_before_and_after": [before["fds"], after["fds"]],
        "upstream_connections_after": after["connections"],
        "metric_series": [samples.series[0], samples.series[-1]],
        "connections_closed": rotations,
        "cut_by_the_age_limit": metrics.get("connection_limit_reached", 0),
    }


async def _converse(s: Stage, number: int, hurries_until: float, deadline: float) -> None:
    """Hold one conversation after another until the deadline."""
    rng = random.Random(f"soak {number}")
    while time.monotonic() < deadline:
        own, twin = rng.sample(KEYS, 2)
        talk = make_conversation(s.near.base_url, s.ledger, rng, (own, twin), leaves=SHARES.leaves)
        ends = min(time.monotonic() + rng.expovariate(1 / LIVES_S), deadline)
        with contextlib.suppress(LostTurn):
            for _ in range(PROMPTS_MAX):
                thinks_s = THINKS_S if time.monotonic() > hurries_until else THINKS_AT_FIRST_S
                await asyncio.sleep(rng.expovariate(1 / thinks_s))
                if time.monotonic() >= ends:
                    break
                await talk.prompt()
        await talk.close()


async def _watch(s: Stage, samples: Samples, deadline: float) -> None:
    began = time.monotonic()
    while time.monotonic() < deadline:
        await asyncio.sleep(SAMPLE_EVERY_S)
        holdings = await s.proxy.holdings()
        samples.times_s.append(time.monotonic() - began)
        for name in ("rss_kib", "fds", "tasks"):
            getattr(samples, name).append(holdings[name])
        samples.series.append((await _scrape(s))["series"])
        s.ledger.inspect(s.sim.journal)


async def _scrape(s: Stage) -> dict[str, int]:
    """Return the number of series, and the resends by their reasons."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{s.proxy.admin_url}/metrics") as reply,
    ):
        lines = [line for line in (await reply.text()).splitlines() if line[:1] != "#"]
    found = {"series": len(lines)}
    for line in lines:
        name, _, value = line.rpartition(" ")
        if name.startswith("turnwire_resends_total{"):
            found[name.split('"')[1]] = int(float(value))
    return found


async def _settled(s: Stage, before: dict[str, Any]) -> dict[str, Any]:
    """
    Wait until rotation has ended the last connection; return what the proxy holds then.

    It gets some seconds more for tasks that are just ending: each is one only until it has ended.
    """
    deadline = time.monotonic() + ROTATION_S + 15
    while True:
        holdings = await s.proxy.holdings(collect=True)
        is_empty = not any(holdings["connections"].values())
        if (is_empty and holdings["tasks"] <= before["tasks"]) or time.monotonic() > deadline:
            return holdings
        await asyncio.sleep(1)
