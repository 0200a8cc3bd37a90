"""
Many at once, without faults: a thousand conversations, two hundred streams at the end, cancels.

    crowd    so many conversations begin at the same moment, with the default limits, on one core
    drain    SIGTERM while so many streams run
    cancels  a pool of one connection, two clients, a hundred cancels at a time: pgbouncer's
             `test_cancel`, by which it found one client's cancel hit another's query

`/livez` is asked by a process of its own, since ours is busy being everybody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from campaign.clients import ANSWERS, Customer, Outcome, make_conversation
from campaign.ledger import DEFECTS, Ledger
from campaign.process import started
from proxy.simulator import Simulator, SimulatorOptions
from proxy.simulator.agent import user
from proxy.simulator.faults import SlowStream
from proxy.simulator.wire import dumps

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from campaign.process import Proxy

PROMPTS, CALLS = 5, 3  # four turns a prompt
HEAD_DEADLINE_S = 60.0
CANCELS_WITHIN_S = 0.4


def rank(values: Sequence[float], share: float) -> float:
    """Return the value that this share of the values does not exceed."""
    return sorted(values)[max(int(len(values) * share + 0.5) - 1, 0)] if values else 0.0


@contextlib.asynccontextmanager
async def asked_all_the_time(url: str, every_s: float = 0.1) -> AsyncIterator[list[float]]:
    """Ask a URL again and again from another process; gives seconds for each, at the end."""
    took: list[float] = []
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("poller.py")),
        url,
        str(every_s),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield took
    finally:
        answer, _ = await process.communicate(b"")
        took += json.loads(answer)


async def crowd(conversations: int, keys: int) -> dict[str, Any]:
    """Let so many conversations of twenty turns begin at once; return what came of it."""
    ledger = Ledger()
    async with (
        Simulator(SimulatorOptions(answers=ANSWERS)) as sim,
        started(sim.base_url, before=("taskset", "-c", str(_a_core()))) as proxy,
    ):
        began = time.monotonic()
        async with (
            asked_all_the_time(f"{proxy.admin_url}/livez") as took,
            asyncio.TaskGroup() as group,
        ):
            for number in range(conversations):
                group.create_task(_twenty_turns(proxy, ledger, number, keys))
        seconds = time.monotonic() - began
        ledger.inspect(sim.journal)
        cpu_s, peak_kib = proxy.cpu_s(), proxy.peak_kib()
        opened = sim.journal.connections_opened
        status, _ = await proxy.stop()
    failed = sum(ledger.outcomes.values()) - ledger.outcomes[Outcome.ANSWERED]
    return {
        "conversations": conversations,
        **ledger.as_json(),
        "errors": failed + sum(ledger.defects[name] for name in DEFECTS) + len(proxy.alarms),
        "seconds": round(seconds, 1),
        "turns_per_s": round(ledger.turns / seconds),
        "proxy_cpu_ms_per_turn": round(cpu_s / ledger.turns * 1000, 2),
        "proxy_peak_mib": round(peak_kib / 1024),
        "connections_opened": opened,
        "livez_asked": len(took),
        "livez_p99_ms": round(rank(took, 0.99) * 1000, 1),
        "livez_max_ms": round(max(took) * 1000, 1),
        "exit_status": status,
    }


def _a_core() -> int:
    """Return the number of a core that we may use."""
    return min(os.sched_getaffinity(0))


async def _twenty_turns(proxy: Proxy, ledger: Ledger, number: int, keys: int) -> None:
    rng = random.Random(f"crowd {number}")
    key = f"sk-crowd-{number % keys}"
    talk = make_conversation(proxy.base_url, ledger, rng, (key, key))
    try:
        for _ in range(PROMPTS):
            await talk.prompt(CALLS)
    finally:
        await talk.close()


# --- The end --------------------------------------------------------------------------------------


async def drain(streams: int, times: int = 1, gap_ms: float = 100) -> dict[str, Any]:
    """
    Send SIGTERM while so many streams run; return what came of it, the worst of each.

    With a gap of 100 ms between events a stream takes three seconds.
    """
    runs = [await _drain_once(streams, gap_ms) for _ in range(times)]
    worst = {name: max(run[name] for run in runs) for name in runs[0]}
    return {"streams": streams, "times": times, **worst}


async def _drain_once(streams: int, gap_ms: float) -> dict[str, Any]:
    ledger = Ledger()
    settings = {"connections": {"max_per_principal": 32}}
    async with (
        Simulator(SimulatorOptions(answers=ANSWERS)) as sim,
        started(sim.base_url, **settings) as proxy,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        sim.faults.arm(SlowStream(gap_ms=gap_ms, times=streams))
        begun = asyncio.Semaphore(0)
        loop = asyncio.get_running_loop()
        tasks = [
            loop.create_task(_stream(session, proxy, ledger, number, begun))
            for number in range(streams)
        ]
        async with asyncio.timeout(HEAD_DEADLINE_S):
            for _ in range(streams):
                await begun.acquire()
        running = sum(not task.done() for task in tasks)
        stopping = loop.create_task(proxy.stop())
        unready_after_s = await _until_not_ready(session, proxy)
        await asyncio.gather(*tasks)
        streamed_at = time.monotonic()
        status, _ = await stopping
        ended_after_s = time.monotonic() - streamed_at
    return {
        "not_running": streams - running,
        "cut": streams - ledger.outcomes[Outcome.ANSWERED],
        "not_ready_after_ms": round(unready_after_s * 1000, 1),
        "exit_status": status,
        "exit_after_last_stream_s": round(ended_after_s, 2),
        "alarms": len(proxy.alarms),
    }


async def _stream(
    session: aiohttp.ClientSession,
    proxy: Proxy,
    ledger: Ledger,
    number: int,
    begun: asyncio.Semaphore,
) -> None:
    customer = Customer(proxy.base_url, api_key=f"sk-drain-{number % 20}", ledger=ledger)
    customer.on_begin = begun.release
    customer._session = session
    body = dumps(customer.build_body([user(f"[calls=0] {number}")])).encode()
    await customer.attempt(body)


async def _until_not_ready(session: aiohttp.ClientSession, proxy: Proxy) -> float:
    began = time.monotonic()
    while True:
        async with session.get(f"{proxy.admin_url}/readyz") as reply:
            took = time.monotonic() - began
            if reply.status == 503 or took > HEAD_DEADLINE_S:
                return took


# --- Cancels --------------------------------------------------------------------------------------

_POOL_OF_ONE = {
    "connections": {
        "max_per_principal": 1,
        "nursery_size": 1,
        "spare_per_principal": 0,
        "handshakes_per_s": 1000,
        "handshake_burst": 10_000,
        "yield_after_s": 0.001,
    },
    "cooldown": {"first_s": 0.01, "max_s": 0.02},
}


async def cancels(times: int, at_once: int = 100) -> dict[str, Any]:
    """One client cancels so many requests at once, so many times; another one's go on."""
    ledger, other = Ledger(), Ledger()
    rng = random.Random("cancels")
    async with (
        Simulator(SimulatorOptions(answers=ANSWERS)) as sim,
        started(sim.base_url, **_POOL_OF_ONE) as proxy,
    ):
        leaver = make_conversation(proxy.base_url, ledger, rng, ("sk-cancels", "sk-cancels"))
        stayer = make_conversation(proxy.base_url, other, rng, ("sk-cancels", "sk-cancels"))
        done = asyncio.Event()
        staying = asyncio.get_running_loop().create_task(_stay(stayer, done))
        for _ in range(times):
            numbers = itertools.islice(itertools.count(), at_once)
            await asyncio.gather(*(_cancel(leaver.customer, rng, number) for number in numbers))
        done.set()
        await staying
        after = await _when_idle(proxy)
        opened = sim.journal.connections_opened
        await leaver.close()
        await stayer.close()
        status, _ = await proxy.stop()
    left = ledger.outcomes[Outcome.LEFT]
    touched = sum(other.outcomes.values()) - other.outcomes[Outcome.ANSWERED]
    return {
        "cancelled": left,
        "answered_before": ledger.outcomes[Outcome.ANSWERED],
        "others_turns": other.turns,
        "others_touched": touched + sum(other.defects.values()) + sum(ledger.defects.values()),
        "others_modes": dict(other.modes),
        "connections_opened": opened,
        "busy_after": after,
        "alarms": len(proxy.alarms),
        "exit_status": status,
    }


async def _cancel(customer: Customer, rng: random.Random, number: int) -> None:
    # Not all in one moment: the other client must have its turns in between.
    await asyncio.sleep(rng.uniform(0, CANCELS_WITHIN_S))
    history = [user(f"[calls=0] [tokens=200] {number}")]  # longer than anybody listens
    body = dumps(customer.build_body(history) | {"stream": True}).encode()
    await customer.attempt(body, rng.choice((-1, -1, 0, 1, 2, rng.randrange(3, 20))))


async def _stay(talk: Any, done: asyncio.Event) -> None:
    while not done.is_set():
        await talk.prompt()
        await asyncio.sleep(talk.rng.uniform(0, 0.02))
        if len(talk.history) > 20:
            talk.history.clear()


async def _when_idle(proxy: Proxy) -> int:
    deadline = time.monotonic() + 10
    while True:
        held = Counter((await proxy.holdings())["connections"])
        if not held["busy"] + held["connecting"] or time.monotonic() > deadline:
            return held["busy"] + held["connecting"]
        await asyncio.sleep(0.05)
