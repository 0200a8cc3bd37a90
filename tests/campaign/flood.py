"""
Floods: thousands of heads that never end, a hundred readers at 1 kB/s. Do the others notice?

Healthy turns are timed in turns before, during and after a flood, a few times over, since the
machine has moods of its own: what counts is the median of the phases. Upstream (`fountain`), the
flood (`attacker`) and the proxy are processes of their own; we are the healthy client.
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
        *("nice", "-n", "5", sys.executable, str(HERE / "attacker.py")),
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


async def flood(heads: int, readers: int, turns: int, phases: int = 3) -> dict[str, Any]:
    """Time healthy turns without and with a flood; return what came of it."""
    settings = {"connections": {"max_per_principal": 32, "handshake_burst": 64}}
    quiet: list[list[float]] = []
    flooded: list[list[float]] = []
    became: list[dict[str, Any]] = []
    async with (
        upstream() as url,
        started(url, **settings) as proxy,
        aiohttp.ClientSession() as session,
    ):
        await _healthy(session, proxy, turns)
        rss_before = proxy.rss_kib()
        for _ in range(phases):
            quiet.append(await _healthy(session, proxy, turns))
            async with attack(proxy.port, heads, readers) as result:
                await _calm(proxy)
                fds = (await proxy.holdings())["fds"]
                flooded.append(await _healthy(session, proxy, turns))
                await asyncio.sleep(HEADS_TIME_S if heads else 0)
            became.append({**result, "fds": fds})
            await asyncio.sleep(SETTLE_S)
        peak_kib = proxy.peak_kib()
        status, _ = await proxy.stop()
    before, during = (
        statistics.median(rank(phase, 0.99) for phase in each) for each in (quiet, flooded)
    )
    return {
        "heads": heads,
        "readers": readers,
        "turns": turns * phases,
        "p99_ms_before_and_during": [round(before * 1000, 2), round(during * 1000, 2)],
        "p99_change": round(during / before - 1, 3),
        "p99_ms_of_phases": [
            [round(rank(phase, 0.99) * 1000, 2) for phase in each] for each in (quiet, flooded)
        ],
        "p50_ms_before_and_during": [
            round(statistics.median(rank(phase, 0.5) for phase in each) * 1000, 2)
            for each in (quiet, flooded)
        ],
        "rss_mib_before_and_peak": [round(rss_before / 1024), round(peak_kib / 1024)],
        "kib_for_each": round((peak_kib - rss_before) / max(heads + readers, 1), 1),
        "became": became,
        "alarms": len(proxy.alarms),
        "exit_status": status,
    }


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
