"""
The whole of Turnwire on loopback: the proxy in front of the simulator, in one process.

`stack` starts both on free ports and takes them down again. It also stands guard: whatever a
library reports as an error while a stack runs (an exception in a handler, a task that failed
unseen) fails the test, since the proxy promises never to show a traceback.

The simulator is the witness. `Stack.check_contexts` compares, by the simulator's own digest of
meaning, the context that it held for a turn with the history that the client had sent.

`WITHOUT_EXPRESS=1` in the environment takes the express way (`tuning.express`) from every proxy
whose test does not decide about it: `WITHOUT_EXPRESS=1 pytest tests/test_oracle.py
tests/test_faults.py` takes two minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from structlog.testing import CapturingLogger

from proxy.app import Turnwire
from proxy.config import Config
from proxy.simulator import Agent, Simulator, SimulatorOptions
from proxy.simulator.answers import Context
from proxy.simulator.journal import principal_of
from proxy.simulator.validate import Transport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from proxy.simulator.agent import Reply
    from proxy.simulator.journal import Seen
    from proxy.simulator.wire import Item

DEADLINE_S = 20.0
NO_HANDSHAKE_LIMIT = {"handshakes_per_s": 1000, "handshake_burst": 10_000}


@dataclass
class Stack:
    """A proxy in front of a simulator. `log` holds what the proxy logged."""

    sim: Simulator
    proxy: Turnwire
    log: CapturingLogger
    agents: list[Agent] = field(default_factory=list)

    @property
    def straight_url(self) -> str:
        """The base URL of the simulator itself."""
        return self.sim.base_url

    @property
    def base_url(self) -> str:
        """The base URL of the proxy."""
        return self.proxy.base_url

    @property
    def port(self) -> int:
        """The port of the proxy."""
        return int(self.base_url.split(":")[2].split("/")[0])

    def agent(self, *, straight: bool = False, **options: Any) -> Agent:
        """Make an agent that talks to the proxy, or straight to the simulator."""
        agent = Agent(self.straight_url if straight else self.base_url, **options)
        self.agents.append(agent)
        return agent

    def seen_for(self, reply: Reply) -> Seen:
        """Return the simulator's record of the turn that this reply answers."""
        assert reply.response is not None, f"status {reply.status}: {reply.error}"
        identity = reply.response["id"]
        return next(seen for seen in self.sim.journal.turns if seen.response_id == identity)

    def check_contexts(self, replies: Iterable[Reply], api_key: str = "sk-agent") -> None:
        """Each reply was made from exactly what its request said, for the one who asked."""
        owner = principal_of({"Authorization": f"Bearer {api_key}"})
        records = {seen.response_id: seen for seen in self.sim.journal.turns}
        for reply in replies:
            assert reply.response is not None, f"status {reply.status}: {reply.error}"
            seen = records[reply.response["id"]]
            assert seen.digest == asked(reply), f"another context upstream ({reply.reason})"
            assert seen.principal == owner

    def check_isolation(self) -> None:
        """No connection was used by two principals, and nobody named another's response."""
        owners: dict[int, str] = {}
        for seen in self.sim.journal:
            assert not seen.foreign
            if seen.transport is Transport.WS and seen.connection:
                assert owners.setdefault(seen.connection, seen.principal) == seen.principal

    def facts(self, event: str) -> list[dict[str, Any]]:
        """Return the facts of every log line with this event name."""
        return [call.kwargs for call in self.log.calls if call.args[:1] == (event,)]

    async def idle(self) -> None:
        """Wait until no turn runs and no connection is being opened."""
        await eventually(lambda: self.gauge("busy") + self.gauge("connecting") == 0)

    def gauge(self, state: str) -> float:
        """Return the number of connections in a state, as /metrics tells it."""
        return self.metric("turnwire_connections", state=state)

    def metric(self, name: str, **labels: str) -> float:
        """Return a metric's value; 0 if it has no such series."""
        return self.proxy.metrics.registry.get_sample_value(name, labels) or 0.0


def asked(reply: Reply) -> str:
    """Return the digest of the context that the request of this reply describes."""
    body = json.loads(reply.body)
    given = body["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return Context.of(body, items).digest.hex()


@contextlib.asynccontextmanager
async def stack(
    *,
    sim: SimulatorOptions | None = None,
    clock: Callable[[], float] = time.monotonic,
    tolerates: Sequence[str] = (),
    **config: Any,
) -> AsyncIterator[Stack]:
    """
    Run a simulator and a proxy in front of it.

    `config` are sections and settings of the proxy's configuration, `clock` is the simulator's.
    Errors that libraries report are forgiven if they contain one of the words in `tolerates`.
    """
    async with (
        Simulator(sim, clock=clock) as simulator,
        serving(simulator.base_url, tolerates=tolerates, **config) as (proxy, log),
    ):
        running = Stack(simulator, proxy, log)
        try:
            yield running
        finally:
            for agent in running.agents:
                await agent.close()


@contextlib.asynccontextmanager
async def serving(
    upstream: str, *, tolerates: Sequence[str] = (), **config: Any
) -> AsyncIterator[tuple[Turnwire, CapturingLogger]]:
    """Run a proxy alone, in front of `upstream`; also give what it logs. See `stack`."""
    tuning = {"express": not os.environ.get("WITHOUT_EXPRESS")}
    settings = {"upstream": upstream, "port": 0, "admin_port": 0, "tuning": tuning} | config
    proxy = Turnwire(Config(**settings))
    log = proxy.log = CapturingLogger()
    trouble: list[str] = []
    with _watching(trouble):
        async with proxy:
            yield proxy, log
    trouble = [line for line in trouble if not any(word in line for word in tolerates)]
    assert not trouble, trouble
    severe = [call for call in log.calls if call.method_name in ("error", "exception", "critical")]
    assert not severe, severe


@contextlib.contextmanager
def _watching(trouble: list[str]) -> AsyncIterator[None]:
    """Collect what aiohttp, asyncio and websockets log as errors."""
    handler = logging.Handler(logging.WARNING)
    formatter = logging.Formatter()

    def emit(record: logging.LogRecord) -> None:
        trouble.append(f"{record.name}: {formatter.format(record)}")

    handler.emit = emit
    names = ("aiohttp.server", "aiohttp.client", "aiohttp.internal", "asyncio", "websockets")
    loggers = [logging.getLogger(name) for name in (*names, "proxy.upstream.websockets")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


async def eventually(condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
    """Wait until a condition holds, and return its value; fail at the deadline."""
    async with asyncio.timeout(deadline_s):
        while not (value := condition()):  # noqa: ASYNC110  conditions without an event
            await asyncio.sleep(0.005)
    return value


async def play(agent: Agent, history: list[Item], prompt: Item) -> Reply:
    """Send one prompt after a history; the history is extended by the prompt and the echo."""
    history.append(prompt)
    reply = await agent.send(history)
    assert reply.response is not None, f"status {reply.status}: {reply.error}"
    history.extend(agent.echo(reply.items))
    history.extend(agent.answer_calls(reply.items))
    return reply
