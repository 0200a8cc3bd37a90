"""
An agent over a network: the run of 24 tool calls, straight and through Turnwire.

The simulator answers at once, so what is left is the network: a link of some round-trip time and
rate between it and whoever calls it, the agent or Turnwire (see `links` for how it is emulated).
Two figures come of it: the duration of the whole run, and, with the load programs in place of
agent and simulator, when the first event of a turn on a warm connection arrives, in round trips.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from typing import TYPE_CHECKING

from proxy.bench.bodies import make_parts
from proxy.bench.children import START_TIMEOUT_S, BenchFailed, Role, python_command
from proxy.bench.links import Shape
from proxy.bench.load import Client, Upstream
from proxy.bench.ways import Way, start_turnwire
from proxy.simulator import Agent, ReplyError, StreamError
from proxy.simulator.agent import tool_output

if TYPE_CHECKING:
    from proxy.bench.load import Bench
    from proxy.bench.samples import Samples
    from proxy.simulator import Transcript

RUN, WARM = "agent run", "warm turn"
CALLS = 24
TOOL_OUTPUT_BYTES = 4096
WARM_HISTORY_BYTES = 100_000
_WARM_TURNS = 7
_TIMEOUT_S = 120.0

SHAPES = tuple(
    Shape(rtt_ms / 1000, rate_mbit * 1e6) for rtt_ms in (10, 50, 150) for rate_mbit in (10, 100)
)
QUICK_SHAPES = (Shape(0.01, 100e6),)
WAYS = (Way.STRAIGHT, Way.TURNWIRE)


def measure_run(
    bench: Bench, shape: Shape, round_: int, samples: Samples, calls: int = CALLS
) -> None:
    """Let the agent run once each way. Raises BenchFailed if the answers differ."""
    answers = []
    for way in WAYS:
        with contextlib.ExitStack() as stack:
            command = python_command("proxy", "simulate", "--port", "0", "--preset", "instant")
            simulator = bench.start(command, Role.UPSTREAM)
            stack.callback(simulator.end)
            # Its one line ends on its base URL: http://127.0.0.1:PORT/v1
            url = simulator.read_line(START_TIMEOUT_S).rsplit(" ", 1)[-1]
            port = int(url.rsplit(":", 1)[-1].split("/")[0])
            port = _start_link(bench, port, shape, stack)
            if way is Way.TURNWIRE:
                port = start_turnwire(bench, f"http://127.0.0.1:{port}", stack).port
            began = time.perf_counter()
            transcript = asyncio.run(_run_agent(port, calls))
            duration_s = time.perf_counter() - began
        answers.append(transcript.answers)
        deltas = sum(mode == "delta" for mode in transcript.modes)
        samples.add(
            RUN, way, shape.name, round_, duration_s=duration_s,
            delta_share=deltas / len(transcript.replies),
        )  # fmt: skip
    if answers[0] != answers[1]:
        raise BenchFailed("the agent was answered otherwise through Turnwire")


async def _run_agent(port: int, calls: int) -> Transcript:
    agent = Agent(
        f"http://127.0.0.1:{port}/v1",
        tool=functools.partial(tool_output, size_bytes=TOOL_OUTPUT_BYTES),
        settings={"store": False, "parallel_tool_calls": False},
        timeout_s=_TIMEOUT_S,
    )
    try:
        return await agent.run([f"Find out why the build fails. [calls={calls}]"])
    except (ReplyError, StreamError) as error:
        raise BenchFailed(f"a turn of the agent failed: {error}") from error


def measure_warm_turn(bench: Bench, shape: Shape, round_: int, samples: Samples) -> None:
    """Time the first event of turns on warm connections, each way."""
    for way in WAYS:
        with Upstream(bench) as upstream, contextlib.ExitStack() as stack:
            port = _start_link(bench, upstream.port, shape, stack)
            if way is Way.TURNWIRE:
                port = start_turnwire(bench, f"http://127.0.0.1:{port}", stack).port
            with Client(bench, port, make_parts(WARM_HISTORY_BYTES)) as client:
                client.begin()
                client.follow_up(2)
                first_us = client.follow_up(_WARM_TURNS).first_us
        samples.add(
            WARM, way, shape.name, round_, first_ms=first_us["p50"] / 1000,
            round_trips=first_us["p50"] / 1e6 / shape.rtt_s,
        )  # fmt: skip


def _start_link(bench: Bench, target_port: int, shape: Shape, stack: contextlib.ExitStack) -> int:
    arguments = (str(target_port), str(shape.rtt_s * 1e3), str(shape.rate_bit_s / 1e6))
    link = bench.start(python_command("proxy.bench.links", *arguments), Role.UPSTREAM)
    stack.callback(link.end)
    return int(link.read_line(START_TIMEOUT_S))
