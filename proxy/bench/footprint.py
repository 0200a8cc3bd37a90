"""
What the proxy needs when little happens: its start, its memory, and what it keeps of a turn.

    start     from the start of the process until /readyz says yes; its resident memory then
    memory    what conversations add: idle (their connections open, all turns over), and active
              (all of them streaming)
    state     what the chain store keeps of each stored turn, by tracemalloc, in this process:
              the core itself is fed with bodies, without any connection
    lookup    finding a conversation among 10,000 by the bytes of a body, in this process, and the
              CPU that merely receiving that body costs an aiohttp server
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
import tracemalloc
from dataclasses import replace
from typing import TYPE_CHECKING

from proxy.bench.bodies import NONCE_MARK, make_parts
from proxy.bench.children import BenchFailed, cpu_s, resident_bytes
from proxy.bench.load import Client, Upstream
from proxy.bench.ways import Way, running, start_control
from proxy.core.chains import ChainStore
from proxy.core.history import Answer, MatchingPolicy, new_head
from proxy.core.items import Fingerprinter
from proxy.core.plan import Continue, Planner, Start
from proxy.core.prefix import PrefixIndex
from proxy.core.request import TurnRequest, parse_body

if TYPE_CHECKING:
    from proxy.bench.bodies import Parts
    from proxy.bench.load import Bench
    from proxy.bench.samples import Samples

START, MEMORY, STATE, LOOKUP = "start", "memory", "state", "lookup"
CONVERSATIONS_INDEXED = 10_000
_PRINCIPAL = "principal"
_SETTLE_S = 0.3
_LOOKUPS = 200
_BODIES_RECEIVED = 20
_TURNS_STORED = 4
_MANY_BYTES = 1 << 40


def measure_start(bench: Bench, round_: int, samples: Samples) -> None:
    """Start Turnwire and the plain proxy, and see how long it takes and what they weigh."""
    for way in (Way.TURNWIRE, Way.PLAIN):
        with Upstream(bench) as upstream, running(way, bench, upstream) as proxy:
            assert proxy.pid is not None
            time.sleep(_SETTLE_S)
            samples.add(
                START, way, "idle", round_, ready_s=proxy.ready_after_s,
                resident_bytes=resident_bytes(proxy.pid),
            )  # fmt: skip


def measure_memory(bench: Bench, round_: int, samples: Samples, conversations: int = 300) -> None:
    """Hold many conversations open through Turnwire and the plain proxy."""
    parts = make_parts(10_000)
    for way in (Way.TURNWIRE, Way.PLAIN):
        with Upstream(bench) as upstream, running(way, bench, upstream) as proxy:
            assert proxy.pid is not None
            with Client(bench, proxy.port, parts) as one:
                one.begin()
                one.follow_up(10)
            before = resident_bytes(proxy.pid)
            with Client(bench, proxy.port, parts, streams=conversations) as many:
                many.begin()
                many.follow_up(2)
                time.sleep(_SETTLE_S)
                idle = resident_bytes(proxy.pid)
                upstream.plan(events=30, rate=20)
                many.start_follow_up(1)
                time.sleep(1.0)
                active = resident_bytes(proxy.pid)
                many.result(60)
        if before is not None and idle is not None and active is not None:
            samples.add(
                MEMORY, way, f"{conversations} conversations", round_,
                idle_bytes=(idle - before) / conversations,
                active_bytes=(active - before) / conversations,
            )  # fmt: skip


# --- in this process -----------------------------------------------------------------------------


class _Core:
    """Turns carried out by the core alone: every plan is followed, every answer recorded."""

    def __init__(self) -> None:
        self.fingerprints = Fingerprinter(bytes(32))
        self.store = ChainStore(seed=1, max_bytes=_MANY_BYTES, ttl_s=1e9, timer=time.monotonic)
        self._planner = Planner(
            store=self.store,
            fingerprints=self.fingerprints,
            policy=MatchingPolicy(),
            held=lambda _head: None,
            max_message_bytes=_MANY_BYTES,
        )
        self._turns = 0

    def play(self, body: bytes, item: bytes, *, follows: bool) -> None:
        """Carry out a turn that is answered with `item`; `follows`: it must continue a chain."""
        self._turns += 1
        plan = self._planner.plan(_PRINCIPAL, body)
        if not isinstance(plan, Continue if follows else Start):
            raise BenchFailed(f"a turn was planned as {type(plan).__name__}: {plan.reason}")
        answer = Answer(f"resp_{self._turns:016x}", [item], [item])
        head = new_head(plan.request, answer, principal=_PRINCIPAL, connection_id=1)
        assert head is not None
        parent = plan.head if isinstance(plan, Continue) else None
        self.store.record(head, body, plan.request.prefix(), parent)


def measure_state(
    round_: int, samples: Samples, sizes: tuple[tuple[str, int], ...], conversations: int = 100
) -> None:
    """Measure what the store keeps of each turn after the first of a conversation."""
    for name, history_bytes in sizes:
        parts = make_parts(history_bytes)
        core = _Core()
        tracemalloc.start()
        try:
            kept = [_kept_bytes(core, parts, number) for number in range(conversations)]
        finally:
            tracemalloc.stop()
        per_turn = statistics.median(kept) / (_TURNS_STORED - 1)
        samples.add(STATE, Way.TURNWIRE, name, round_, bytes_per_turn=per_turn)


def _kept_bytes(core: _Core, parts: Parts, number: int) -> int:
    """Play one conversation; return what all its turns after the first have left behind."""
    nonce = b"nonce_%016x" % number
    after_first = 0
    for turn in range(_TURNS_STORED):
        body = parts.body(turn).replace(NONCE_MARK.encode(), nonce, 1)
        core.play(body, parts.echo, follows=turn > 0)
        del body
        after_first = after_first or _traced()
    return _traced() - after_first


def _traced() -> int:
    gc.collect(0)
    return tracemalloc.get_traced_memory()[0]


def measure_lookup(bench: Bench, round_: int, samples: Samples, history_bytes: int) -> None:
    """Find one conversation among many, and receive its body."""
    name = f"{history_bytes // 1000} KB"
    samples.add(
        LOOKUP, Way.TURNWIRE, name, round_,
        find_us=_find_us(history_bytes),
        receive_cpu_us=_receive_cpu_us(bench, history_bytes),
    )  # fmt: skip


def _find_us(history_bytes: int) -> float:
    """The time of a look-up among conversations that share their first 20 KB."""
    parts = make_parts(history_bytes)
    body = parts.body()
    fingerprints = Fingerprinter(bytes(32))
    request = parse_body(body, fingerprints.root(_PRINCIPAL), fingerprints)
    assert isinstance(request, TurnRequest)
    prefix = request.prefix()
    assert prefix is not None
    index = PrefixIndex(seed=1)
    index.put(_PRINCIPAL, body, prefix)
    shared = body[:20_000]
    for number in range(CONVERSATIONS_INDEXED - 1):
        other = shared + b"%016x" % number * 600
        index.put(_PRINCIPAL, other, replace(prefix, length=len(other)))
    follow_up = parts.body(1)
    spent: list[float] = []
    for _ in range(_LOOKUPS):
        began = time.perf_counter()
        found = index.find(_PRINCIPAL, follow_up)
        spent.append(time.perf_counter() - began)
        if found != [prefix]:
            raise BenchFailed("the index did not find the one conversation")
    return statistics.median(spent) * 1e6


def _receive_cpu_us(bench: Bench, history_bytes: int) -> float | None:
    with contextlib.ExitStack() as stack:
        server = start_control("receive", bench, "", stack)
        client = stack.enter_context(Client(bench, server.port, make_parts(history_bytes)))
        client.begin()
        client.follow_up(3)
        assert server.pid is not None
        before = cpu_s(server.pid)
        turns = client.follow_up(_BODIES_RECEIVED).turns
        after = cpu_s(server.pid)
    return None if before is None or after is None else (after - before) * 1e6 / turns
