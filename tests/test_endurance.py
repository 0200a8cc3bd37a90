"""
What wears a proxy down: a frozen process, too few descriptors, a log that can't be written or that
nobody reads, slow networks, an upstream that refuses for good, tasks that run in another order.

Rows of the catalogue that need a process or a network of their own; the long forms of all others
are in `campaign`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import re
import select
import signal
import sys
import tracemalloc
import types
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from campaign.clients import ANSWERS, hold, make_conversation
from campaign.ledger import Ledger
from campaign.process import started
from harness import NO_HANDSHAKE_LIMIT, eventually, serving, stack
from toxics import Bandwidth, FaultProxy, Slicer

import proxy
from proxy.core import items
from proxy.simulator import Agent, AnswerOptions, Simulator, SimulatorOptions
from proxy.simulator.agent import user
from proxy.simulator.faults import ErrorReply, Fault, HugeEvent, SlowStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Generator

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="what a process has is in /proc")

TALKATIVE = SimulatorOptions(answers=AnswerOptions(rounds=0))
NO_SPARES = {"spare_per_principal": 0}


@contextlib.asynccontextmanager
async def agent_of(base_url: str, **options: Any) -> AsyncIterator[Agent]:
    """An agent, closed at the end."""
    async with Agent(base_url, **options) as agent:
        yield agent


async def say(agent: Agent, history: list[dict[str, Any]], text: str) -> tuple[Any, Any]:
    """Say something and take the answer into the history; return mode and reason."""
    history.append(user(text))
    reply = await agent.send(history)
    assert reply.response is not None, f"status {reply.status}: {reply.error}"
    history.extend(agent.echo(reply.items))
    return reply.mode, reply.reason


# --- The process and its machine ------------------------------------------------------------------


@linux_only
async def test_a_process_that_was_frozen_goes_on():
    """After a sleep longer than every ping timeout, what runs goes on, and no connection is cut."""
    websocket = {"ping_interval_s": 0.3, "ping_timeout_s": 0.5, "probe_timeout_s": 0.5}
    async with (
        Simulator(TALKATIVE) as sim,
        started(sim.base_url, websocket=websocket, connections=NO_SPARES) as proxy,
        agent_of(proxy.base_url) as agent,
    ):
        history: list[dict[str, Any]] = []
        await say(agent, history, "Hello.")
        sim.faults.arm(SlowStream(gap_ms=20))
        running = asyncio.get_running_loop().create_task(say(agent, history, "Slowly."))
        await eventually(lambda: len(sim.journal.turns) == 2)
        proxy.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1.5)
        proxy.process.send_signal(signal.SIGCONT)

        assert await running == ("delta", "continued")
        assert await say(agent, history, "And?") == ("delta", "continued")
        assert sim.journal.connections_opened == 1
        assert proxy.events["connection_closed"] == 0


@linux_only
@pytest.mark.parametrize("uvloop", [True, False])
async def test_too_few_descriptors_harm_nobody_who_is_there(uvloop: bool):
    """Who comes too late is turned away or waits; who is there is served; then all are."""
    async with (
        Simulator(TALKATIVE) as sim,
        started(
            sim.base_url,
            before=("prlimit", "--nofile=64"),
            tuning={"uvloop": uvloop},
            connections=NO_SPARES,
        ) as proxy,
        agent_of(proxy.base_url) as agent,
    ):
        history: list[dict[str, Any]] = []
        await say(agent, history, "Hello.")
        crowd = [await asyncio.open_connection("127.0.0.1", proxy.port) for _ in range(150)]
        busy_before_s = proxy.cpu_s()
        for _ in range(20):
            assert await say(agent, history, "Still there?") == ("delta", "continued")
            await asyncio.sleep(0.05)
        assert proxy.cpu_s() - busy_before_s < 0.7  # of a second in which it spins, or does not

        for _, writer in crowd:
            writer.close()
        await served_again(proxy.base_url)
        status, _ = await proxy.stop()
        assert status == 0


async def served_again(base_url: str) -> None:
    """Wait until a new client is served: descriptors come back one by one."""
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(aiohttp.ClientError, AssertionError):
                async with agent_of(base_url) as agent:
                    await say(agent, [], "And me?")
                    return
            await asyncio.sleep(0.05)


@linux_only
async def test_a_log_that_can_not_be_written_stops_nothing(served_port: int):
    """With a full disk under the log, turns are served and the end is a good one."""
    command = ("sh", "-c", 'exec "$@" 2>/dev/full', "sh")
    async with (
        Simulator(TALKATIVE) as sim,
        started(sim.base_url, before=command, port=served_port, waits=False) as proxy,
        agent_of(f"http://127.0.0.1:{served_port}/v1") as agent,
    ):
        history: list[dict[str, Any]] = []
        await answering(served_port)
        await say(agent, history, "Hello.")
        assert await say(agent, history, "Next?") == ("delta", "continued")
        status, _ = await proxy.stop()
        assert status == 0


@linux_only
async def test_a_log_that_nobody_reads_holds_up_nothing(served_port: int, tmp_path: Path):
    """With a full pipe under the log turns are served, and who reads at last has every line."""
    fifo = tmp_path / "log"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    command = ("sh", "-c", f'exec "$@" 2>{fifo}', "sh")
    turns = 250  # lines of 400 bytes, where 64 KiB fill the pipe
    async with (
        Simulator(TALKATIVE) as sim,
        started(sim.base_url, before=command, port=served_port, waits=False) as proxy,
        agent_of(f"http://127.0.0.1:{served_port}/v1") as agent,
    ):
        await answering(served_port)
        for number in range(turns):
            reply = await agent.send([user(f"Turn {number}?")])
            assert reply.status == 200
        lines = await asyncio.to_thread(lines_of, reader, turns)
        assert [json.loads(line)["status"] for line in lines] == [200] * turns
        status, _ = await proxy.stop()
        assert status == 0
    os.close(reader)


def lines_of(reader: int, turns: int) -> list[bytes]:
    """Read a log that told of so many turns; return these lines."""
    got = b""
    while got.count(b'"event": "turn"') < turns or not got.endswith(b"\n"):
        select.select([reader], [], [], 20)
        got += os.read(reader, 1 << 16)
    return [line for line in got.splitlines() if b'"event": "turn"' in line]


async def answering(port: int) -> None:
    """Wait until somebody listens on a port."""
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.05)  # there is no event: it can't tell


# --- Slow networks --------------------------------------------------------------------------------


async def test_a_long_upload_on_a_slow_line_is_not_taken_for_death():
    """Pings that wait behind our own message do not end its connection."""
    websocket = {"ping_interval_s": 0.2, "ping_timeout_s": 0.4, "probe_timeout_s": 0.4}
    async with (
        Simulator(TALKATIVE) as sim,
        FaultProxy(("127.0.0.1", sim.port)) as line,
        serving(line.base_url, websocket=websocket, connections=NO_SPARES) as (proxy, log),
        agent_of(proxy.base_url) as agent,
    ):
        history: list[dict[str, Any]] = []
        await say(agent, history, "Hello.")
        line.add(Bandwidth(stream="upstream", rate=2000))
        assert await say(agent, history, "x" * 4_000_000) == ("delta", "continued")
        closed = [call for call in log.calls if call.args[:1] == ("connection_closed",)]
        assert not closed
        assert sim.journal.connections_opened == 1


@pytest.mark.parametrize("side", ["near", "far"])
async def test_answers_are_the_same_in_pieces_of_two_bytes(side: str):
    """Wherever a network cuts, on either side, the client has the answer that it has straight."""
    slicers = [
        Slicer(stream=stream, average_size=2, size_variation=1)
        for stream in ("upstream", "downstream")
    ]
    async with (
        Simulator(TALKATIVE) as sim,
        FaultProxy(("127.0.0.1", sim.port), random.Random(1)) as far,
        serving(far.base_url, connections=NO_SPARES) as (proxy, _),
        FaultProxy(("127.0.0.1", int(proxy.base_url.split(":")[2][:-3])), random.Random(2)) as near,
        agent_of(near.base_url) as agent,
        agent_of(sim.base_url) as straight,
    ):
        {"near": near, "far": far}[side].add(*slicers)
        for history in ([user("One?")], [user("Two?")]):
            reply, expected = await agent.send(history), await straight.send(history)
            assert reply.answer == expected.answer
            assert [event["type"] for event in reply.events] == [
                event["type"] for event in expected.events
            ]


# --- An upstream that refuses for good ------------------------------------------------------------

FOR_GOOD = {
    "400": (ErrorReply(status=400, code="invalid_value"), 1),
    "429": (ErrorReply(status=429, code="rate_limit_exceeded"), 1),
    "500": (ErrorReply(status=500, code="server_error"), 2),
    "503": (ErrorReply(status=503, code="server_is_overloaded"), 2),
}


@pytest.mark.parametrize("name", FOR_GOOD)
async def test_an_upstream_that_refuses_for_good_is_not_asked_again_and_again(name: str):
    """What is final is asked once for each request of the client's, the rest at most twice."""
    fault, calls = FOR_GOOD[name]

    async with stack(sim=TALKATIVE, connections=NO_SPARES) as s:
        s.sim.faults.arm(_for_ever(fault))
        agent = s.agent()
        for number in range(30):
            reply = await agent.send([user(f"Turn {number}?")])
            assert reply.status == fault.status
        assert len(s.sim.journal.turns) <= 30 * calls


def _for_ever(fault: ErrorReply) -> Fault:
    return replace(fault, times=1_000_000)


# --- Tasks in another order -----------------------------------------------------------------------


@types.coroutine
def dawdling(inner: Coroutine[Any, Any, Any], rng: random.Random) -> Generator[Any, Any, Any]:
    """Run a coroutine that now and then lets everybody else go first."""
    send, value = inner.send, None
    while True:
        try:
            wanted = send(value)
        except StopIteration as stop:
            return stop.value
        send, value = inner.send, None
        try:
            value = yield wanted
            while rng.random() < 0.3:
                yield
        except BaseException as exc:  # noqa: BLE001  it is the coroutine's to handle
            send, value = inner.throw, exc


@pytest.mark.parametrize("seed", range(3))
async def test_the_order_in_which_tasks_run_changes_no_answer(seed: int):
    """Whichever task is late, retries, forks and shared histories have the answers they should."""
    rng = random.Random(f"order {seed}")
    loop = asyncio.get_running_loop()

    def late_task(
        loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        return asyncio.Task(dawdling(coro, rng), loop=loop, **options)

    async with stack(
        sim=SimulatorOptions(answers=ANSWERS),
        connections=NO_HANDSHAKE_LIMIT,
        tolerates=["Cannot write to closing transport"],  # the simulator, when we leave
    ) as s:
        ledger = Ledger()
        loop.set_task_factory(late_task)
        try:
            talks = [
                make_conversation(s.base_url, ledger, rng, ("sk-one", "sk-two"), leaves=0.1)
                for _ in range(6)
            ]
            await asyncio.gather(*(hold(talk, 3, moves=0.7) for talk in talks))
            for talk in talks:
                await talk.close()
        finally:
            loop.set_task_factory(None)
        ledger.inspect(s.sim.journal)
        await s.idle()
        assert not ledger.defects, ledger.examples
        assert ledger.turns > 20


# --- What is remembered ---------------------------------------------------------------------------


async def test_memory_of_chains_is_counted_as_it_is(monkeypatch: pytest.MonkeyPatch):
    """What the store says it holds is what its conversations cost, within 30 %."""
    # A cache of a fixed number of items, which is not the store's.
    monkeypatch.setattr(items, "_REMEMBERED_BYTES", 0)
    connections = NO_SPARES | NO_HANDSHAKE_LIMIT
    async with stack(sim=TALKATIVE, connections=connections) as s:
        agent = s.agent()
        await agent.send([user("Before.")])
        counted_before = counted(s)
        tracemalloc.start()
        try:
            for number in range(100):
                await agent.send([user(f"{number} " + "word " * 2000)])
            gc.collect()
            snapshot = tracemalloc.take_snapshot()
        finally:
            tracemalloc.stop()
        core = snapshot.filter_traces([tracemalloc.Filter(True, "*/proxy/core/*")])
        held = sum(trace.size for trace in core.traces)
        assert counted(s) - counted_before > 100_000
        assert held < (counted(s) - counted_before) * 1.3


def counted(s: Any) -> float:
    """Return the bytes that the proxy says its chains take."""
    return float(s.metric("turnwire_chain_bytes"))


# --- Smaller things -------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_an_event_beyond_the_limit_is_one_error(stream: bool):
    """What is too large for us is not relayed and does not hang: the reply ends in an error."""
    websocket = {"max_event_bytes": 100_000}
    async with stack(sim=TALKATIVE, websocket=websocket, connections=NO_SPARES) as s:
        history = [user("Hello.")]
        agent = s.agent(settings={"store": False, "stream": stream})
        s.sim.faults.arm(HugeEvent(extra_bytes=90_000))
        assert (await agent.send(history)).status == 200
        s.sim.faults.arm(HugeEvent(extra_bytes=110_000))
        if stream:
            with pytest.raises(aiohttp.ClientPayloadError):
                await agent.send(history)
        else:
            reply = await agent.send(history)
            assert (reply.status, reply.error["code"]) == (502, "upstream_connection_lost")
        assert (await agent.send(history)).status == 200


def test_no_deadline_hangs_on_the_wall_clock():
    """Outside of log lines, dates in replies and the doctor, nobody asks what time it is."""
    told = {"observe/log.py", "downstream/carrier.py", "doctor/http.py", "doctor/upstream.py"}
    package = Path(proxy.__file__).parent
    parts = ("app.py", "core", "downstream", "upstream", "observe", "doctor")
    files = [file for part in parts for file in (package / part, *(package / part).rglob("*.py"))]
    asking = {
        str(file.relative_to(package))
        for file in files
        if file.is_file() and re.search(r"\btime\.time\(|datetime\.\w*now\(", file.read_text())
    }
    assert asking <= told


async def test_an_outage_upstream_leaves_us_ready(closed_port: int):
    """That upstream is away is told to each request, and is no reason to be out of service."""
    async with (
        serving(f"http://127.0.0.1:{closed_port}/v1", connections=NO_SPARES) as (running, _),
        aiohttp.ClientSession() as session,
        agent_of(running.base_url) as agent,
    ):
        for _ in range(5):
            assert (await agent.send([user("Hello?")])).status == 502
            async with session.get(f"{running.admin_url}/readyz") as reply:
                assert reply.status == 200


async def test_a_turn_leaves_nothing_for_the_collector():
    """What a turn took is freed with its last byte, and not when a full collection comes by."""
    async with stack(sim=TALKATIVE) as s:
        agent, history = s.agent(settings={"store": False}), [user("Hello.")]
        await say(agent, history, "A few turns until all that lasts is there.")
        await say(agent, history, "Next?")
        gc.collect()
        gc.disable()
        try:
            modes = [(await say(agent, history, "Next?"))[0] for _ in range(10)]
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = {type(each).__name__ for each in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()

    assert modes == ["delta"] * 10
    assert not left & {"Express", "TurnRecord", "TurnRequest", "Intake", "Body", "Item"}
