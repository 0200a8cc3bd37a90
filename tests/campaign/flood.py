"""
Floods: thousands of heads that never end, a hundred readers at 1 kB/s. Do the others notice?

Healthy turns are timed without a flood and with it, in turns and a few times over, since the
machine has moods of its own: what counts is the median of the phases. Upstream (`fountain`), the
flood (`attacker`) and the proxy are processes of their own; we are the healthy client.

Two thousand attackers on the two cores that everybody else has, too, are felt wherever they go. So
there are phases in which their heads go to another server: what the proxy makes of them is the
difference to these. All three are told.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from campaign.crowd import rank
from campaign.process import started

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from campaign.process import Proxy

HERE = Path(__file__).parent
SETTLE_S = 3.0
HEADS_TIME_S = 10.0  # until the first heads are shown the door
CALM_DEADLINE_S = 60.0


@contextlib.asynccontextmanager
async def upstream() -> AsyncIterator[str]:
    """Run the fountain; gives its base URL."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(HERE / "fountain.py"), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        port = int(await process.stdout.readline())
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def attack(port: int, heads: int, readers: int) -> AsyncIterator[dict[str, Any]]:
    """Attack for a while; gives what became of it, at the end."""
    process = await asyncio.create_subprocess_exec(
        # Attackers have machines of their own: this one gets what the others leave of ours.
        *("chrt", "--idle", "0", sys.executable, str(HERE / "attacker.py")),
        *map(str, (port, heads, readers)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    result: dict[str, Any] = {}
    try:
        yield result
    finally:
        answer, _ = await process.communicate(b"")
        result |= json.loads(answer)


async def flood(heads: int, readers: int, turns: int, phases: int = 4) -> dict[str, Any]:
    """Time healthy turns without and with a flood; return what came of it."""
    settings = {"connections": {"max_per_principal": 32, "handshake_burst": 64}}
    quiet: list[list[float]] = []
    beside: list[list[float]] = []  # heads go to another server; for readers there is none
    flooded: list[list[float]] = []
    became: list[dict[str, Any]] = []
    async with (
        upstream() as url,
        upstream() as other_url,
        started(url, **settings) as proxy,
        aiohttp.ClientSession() as session,
    ):
        await _healthy(session, proxy, turns)
        rss_before = proxy.rss_kib()
        for _ in range(phases):
            quiet.append(await _healthy(session, proxy, turns))
            if heads:
                async with attack(int(other_url.split(":")[2].split("/")[0]), heads, 0):
                    await _calm(proxy)
                    beside.append(await _healthy(session, proxy, turns))
                await asyncio.sleep(SETTLE_S)
            async with attack(proxy.port, heads, readers) as result:
                await _calm(proxy)
                fds = (await proxy.holdings())["fds"]
                flooded.append(await _healthy(session, proxy, turns))
                await asyncio.sleep(HEADS_TIME_S if heads else 0)
            became.append({**result, "fds": fds})
            await asyncio.sleep(SETTLE_S)
        peak_kib = proxy.peak_kib()
        status, _ = await proxy.stop()
    all_phases = {"quiet": quiet, "beside": beside, "flooded": flooded}
    p99_s = {name: _of_phases(each, 0.99) for name, each in all_phases.items() if each}
    return {
        "heads": heads,
        "readers": readers,
        "turns": turns * phases,
        "p99_ms": {name: round(value * 1000, 2) for name, value in p99_s.items()},
        "p99_change": round(p99_s["flooded"] / p99_s.get("beside", p99_s["quiet"]) - 1, 3),
        "p99_change_to_quiet": round(p99_s["flooded"] / p99_s["quiet"] - 1, 3),
        "p99_ms_of_phases": {
            name: [round(rank(phase, 0.99) * 1000, 2) for phase in each]
            for name, each in all_phases.items()
        },
        "p50_ms": {
            name: round(_of_phases(each, 0.5) * 1000, 2)
            for name, each in all_phases.items()
            if each
        },
        "rss_mib_before_and_peak": [round(rss_before / 1024), round(peak_kib / 1024)],
        "kib_for_each": round((peak_kib - rss_before) / max(heads + readers, 1), 1),
        "became": became,
        "alarms": len(proxy.alarms),
        "exit_status": status,
    }


def _of_phases(phases: list[list[float]], share: float) -> float:
    return statistics.median(rank(phase, share) for phase in phases)


async def _calm(proxy: Proxy) -> None:
    """Wait until the flood has filled what it can fill: the proxy is mostly found asleep."""
    deadline = time.monotonic() + CALM_DEADLINE_S
    await asyncio.sleep(SETTLE_S)
    asleep = 0
    while asleep < 20 and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        asleep = asleep + 1 if proxy.is_asleep() else 0


async def _healthy(session: aiohttp.ClientSession, proxy: Proxy, turns: int) -> list[float]:
    """Take so many turns one after another; return how many seconds each took."""
    took: list[float] = []
    body = {"model": "m", "store": False, "stream": True}
    headers = {"Authorization": "Bearer sk-healthy"}
    for number in range(turns):
        given = [{"role": "user", "content": f"Turn {number}."}]
        began = time.monotonic()
        async with session.post(
            f"{proxy.base_url}/responses", json={**body, "input": given}, headers=headers
        ) as reply:
            text = await reply.read()
        took.append(time.monotonic() - began)
        assert b"event: response.completed" in text, (reply.status, text[:300])
    return took
