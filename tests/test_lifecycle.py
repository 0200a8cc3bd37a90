"""
The life of connections and chains in a running proxy: limits, ends, and what they cost.

Whatever ends (a connection by age, by idleness or by accident, a chain by eviction, WebSocket mode
by a refusal), the price is one full send or a turn over HTTP, and never a wrong context.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import pytest
from harness import Stack, eventually, serving, stack

from proxy.simulator import AnswerOptions, Simulator, SimulatorOptions
from proxy.simulator.agent import user
from proxy.simulator.faults import Break, End, ErrorReply, Fault, RefuseUpgrade, Script, SlowStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proxy.simulator.agent import Reply
    from proxy.simulator.wire import Item

TALKATIVE = SimulatorOptions(answers=AnswerOptions(rounds=0))
NO_SPARES = {"spare_per_principal": 0}
PLENTY = {"handshakes_per_s": 1000, "handshake_burst": 1000}


class Talk:
    """A conversation; each `say` checks that the answer is to all that was said."""

    def __init__(self, s: Stack, api_key: str = "sk-agent", **settings: Any) -> None:
        self.stack = s
        self.api_key = api_key
        self.agent = s.agent(api_key=api_key, settings={"store": False} | settings)
        self.history: list[Item] = []

    async def say(self, text: str = "Hello.") -> tuple[str | None, str | None]:
        """Say something, take the answer into the history; return mode and reason."""
        self.history.append(user(text))
        reply = await self.agent.send(self.history)
        self.stack.check_contexts([reply], self.api_key)
        self.history.extend(reply.items)
        return reply.mode, reply.reason


CONTINUED = ("delta", "continued")
NEW = ("full", "new_conversation")


# --- Age, idleness, accidents ---------------------------------------------------------------------


async def test_connections_retire_before_upstream_ends_them():
    """An idle connection near its age limit is closed by us; its chain goes on with a full send."""
    websocket = {"max_age_s": 3600, "retire_margin_s": 3599.7, "retire_jitter": 0}
    async with stack(sim=TALKATIVE, websocket=websocket, connections=NO_SPARES) as s:
        talk = Talk(s)
        assert await talk.say() == NEW

        await eventually(lambda: s.facts("connection_closed"))

        assert s.facts("connection_closed")[0]["reason"] == "expiring"
        assert await talk.say("Next?") == ("full", "connection_lost")
        assert s.sim.journal.connections_opened == 2


async def test_a_turn_that_runs_is_not_hurt_by_retirement():
    """A connection that passes its age in the middle of an answer finishes it first."""
    websocket = {"max_age_s": 3600, "retire_margin_s": 3599.9, "retire_jitter": 0}
    async with stack(sim=TALKATIVE, websocket=websocket, connections=NO_SPARES) as s:
        s.sim.faults.arm(SlowStream(gap_ms=15))
        talk = Talk(s)

        assert await talk.say() == NEW

        mode, reason = await talk.say("Next?")
        assert mode == "full"
        assert reason in {"connection_expiring", "connection_lost"}


async def test_upstreams_own_age_limit_costs_one_resend():
    """A connection that upstream calls too old is replaced within the turn."""
    times = [0.0]
    async with stack(sim=TALKATIVE, clock=lambda: times[0], connections=NO_SPARES) as s:
        talk = Talk(s)
        await talk.say()
        times[0] = 3601.0

        assert await talk.say("Next?") == ("full", "connection_limit_reached")
        assert await talk.say("And?") == CONTINUED
        assert s.sim.journal.connections_opened == 2


async def test_conversations_that_never_went_on_go_first():
    """An idle connection in the nursery is closed early; an established one is kept."""
    connections = {"nursery_ttl_s": 0.2, "idle_ttl_s": 600} | NO_SPARES
    async with stack(sim=TALKATIVE, connections=connections) as s:
        kept, dropped = Talk(s), Talk(s)
        await kept.say("Stay.")
        await kept.say("On.")
        await dropped.say("Go.")

        await eventually(lambda: s.sim.journal.connections_open == 1)

        assert s.facts("connection_closed")[0]["reason"] == "unused"
        assert await kept.say("Still there?") == CONTINUED
        assert await dropped.say("And you?") == ("full", "connection_lost")


async def test_established_conversations_end_by_idleness_too():
    """After `idle_ttl_s` without a turn an established connection is closed as well."""
    connections = {"nursery_ttl_s": 0.1, "idle_ttl_s": 0.3} | NO_SPARES
    async with stack(sim=TALKATIVE, connections=connections) as s:
        talk = Talk(s)
        await talk.say()
        await talk.say("On.")

        await eventually(lambda: s.sim.journal.connections_open == 0)

        assert await talk.say("Next?") == ("full", "connection_lost")


@pytest.mark.parametrize("ending", ["close_1001", "close_1012", "abort"])
@pytest.mark.parametrize("store", [False, True])
async def test_an_idle_connection_that_upstream_ends_is_noticed(ending: str, store: bool):
    """The next turn does not run into it: full without storage, by its id with it."""
    async with stack(sim=TALKATIVE, connections=NO_SPARES) as s:
        talk = Talk(s, store=store)
        await talk.say()
        if ending == "abort":
            s.sim.drop_connections()
        else:
            await s.sim.close_connections(int(ending.removeprefix("close_")))
        await eventually(lambda: s.facts("connection_closed"))

        expected = CONTINUED if store else ("full", "connection_lost")
        assert await talk.say("Next?") == expected
        assert s.metric("turnwire_resends_total", reason="upstream_closed") == 0


@dataclass
class Relay:
    """A TCP relay that can stop forwarding without closing anything: a network that went away."""

    port: int
    gates: list[asyncio.Event] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.server is not None
        self.server.close()
        for writer in self.writers:
            writer.transport.abort()

    @property
    def url(self) -> str:
        """The base URL of what is behind the relay."""
        assert self.server is not None
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}/v1"

    def freeze(self) -> None:
        """Forward nothing on the connections of now; those to come are forwarded."""
        for gate in self.gates:
            gate.clear()
        self.gates.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers += [writer, other_writer]
        gate = asyncio.Event()
        gate.set()
        self.gates.append(gate)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(
                self._pump(reader, other_writer, gate), self._pump(other_reader, writer, gate)
            )

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        gate: asyncio.Event,
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await gate.wait()
                writer.write(data)
            writer.close()


@contextlib.asynccontextmanager
async def behind_relay(**config: Any) -> AsyncIterator[tuple[Stack, Relay]]:
    """Run a stack with a relay between the proxy and the simulator."""
    async with (
        Simulator(TALKATIVE) as sim,
        Relay(sim.port) as relay,
        serving(relay.url, connections=NO_SPARES, **config) as (proxy, log),
    ):
        s = Stack(sim, proxy, log)
        try:
            yield s, relay
        finally:
            for agent in s.agents:
                await agent.close()


async def test_a_dead_connection_is_found_before_it_is_used():
    """After a silence a connection must answer a ping first; a dead one costs one full send."""
    websocket = {"probe_after_idle_s": 0, "probe_timeout_s": 1}
    async with behind_relay(websocket=websocket) as (s, relay):
        talk = Talk(s)
        await talk.say()
        assert await talk.say("Fine?") == CONTINUED
        relay.freeze()

        assert await talk.say("Next?") == ("full", "connection_lost")

        assert s.facts("connection_closed")[0]["reason"] == "no_pong"
        assert await talk.say("And?") == CONTINUED


async def test_one_dead_connection_tells_of_the_others():
    """After a changed network only the first turn waits for a probe, not every one."""
    websocket = {"probe_after_idle_s": 0, "probe_timeout_s": 1}
    async with behind_relay(websocket=websocket) as (s, relay):
        talks = [Talk(s) for _ in range(4)]
        for number, talk in enumerate(talks):
            await talk.say(f"Hello {number}.")
            await talk.say("On.")
        relay.freeze()

        await talks[0].say("Next?")

        assert [facts["reason"] for facts in s.facts("connection_closed")] == ["no_pong"] * 4
        for talk in talks[1:]:
            assert await talk.say("Next?") == ("full", "connection_lost")


async def test_our_pings_find_idle_connections_that_died():
    """A connection that answers no ping is closed, without any turn that would find out."""
    websocket = {"ping_interval_s": 0.3, "ping_timeout_s": 0.5, "probe_timeout_s": 0.2}
    async with behind_relay(websocket=websocket) as (s, relay):
        await Talk(s).say()
        relay.freeze()

        await eventually(lambda: s.facts("connection_closed"))

        assert s.facts("connection_closed")[0]["reason"] == "silent"


async def test_a_network_that_dies_in_the_middle_of_an_answer_ends_it():
    """Pings tell silence from death: the client gets an error long before any read timeout."""
    websocket = {"ping_interval_s": 0.3, "ping_timeout_s": 0.5, "probe_timeout_s": 0.2}
    async with behind_relay(websocket=websocket) as (s, relay):
        s.sim.faults.arm(Break(end=End.STALL, after_events=3))
        agent = s.agent(settings={"store": False, "stream": False})
        answer = asyncio.get_running_loop().create_task(agent.send([user("Hello.")]))
        await eventually(lambda: s.sim.journal.turns)
        relay.freeze()

        reply = await answer

        assert (reply.status, reply.error["code"]) == (502, "upstream_connection_lost")


async def test_a_long_silence_with_pongs_is_not_death():
    """While upstream answers pings, an answer may think for longer than any ping timeout."""
    websocket = {"ping_interval_s": 0.1, "ping_timeout_s": 0.5, "probe_timeout_s": 0.5}
    async with stack(sim=TALKATIVE, websocket=websocket, connections=NO_SPARES) as s:
        s.sim.faults.arm(Pause(pause_s=1.2))
        talk = Talk(s)

        assert await talk.say() == NEW
        assert await talk.say("Next?") == CONTINUED


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause(Fault):
    """One long silence after the third event."""

    pause_s: float

    def change(self, script: Script) -> Script:
        """Put all later events off."""
        early, late = script.steps[:3], script.steps[3:]
        put_off = (replace(step, due_s=step.due_s + self.pause_s) for step in late)
        return replace(script, steps=(*early, *put_off))


# --- Limits ---------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def busy_turns(s: Stack, *api_keys: str) -> AsyncIterator[None]:
    """Hold one turn in its middle for each of these keys."""
    s.sim.faults.arm(Break(end=End.STALL, after_events=3, times=len(api_keys)))
    loop = asyncio.get_running_loop()
    before = len(s.sim.journal.turns)
    turns = [
        loop.create_task(s.agent(api_key=key).send([user(f"Busy {number}.")]))
        for number, key in enumerate(api_keys)
    ]
    await eventually(lambda: len(s.sim.journal.turns) == before + len(api_keys))
    try:
        yield
    finally:
        for turn in turns:
            turn.cancel()
        await asyncio.wait(turns)
        await eventually(lambda: s.gauge("busy") == 0)


async def test_a_principal_at_its_limit_goes_over_http():
    """Nobody waits: beyond the limit a turn goes over HTTP, and others are not concerned."""
    connections = {"max_per_principal": 2} | NO_SPARES | PLENTY
    async with stack(sim=TALKATIVE, connections=connections) as s:
        talk = Talk(s)
        async with busy_turns(s, "sk-agent", "sk-agent"):
            assert await talk.say() == ("http", "connection_cap")
            assert await Talk(s, "sk-other").say() == NEW

        mode, _ = await talk.say("Next?")
        assert mode == "full"
        assert await talk.say("And?") == CONTINUED


async def test_the_total_limit_counts_everybody():
    """At the limit of all principals a turn goes over HTTP, until somebody's connection is free."""
    connections = {"max_total": 2} | NO_SPARES | PLENTY
    async with stack(sim=TALKATIVE, connections=connections) as s:
        async with busy_turns(s, "sk-one", "sk-two"):
            assert await Talk(s, "sk-three").say() == ("http", "connection_cap")
        assert await Talk(s, "sk-four").say() == NEW
        assert await Talk(s, "sk-five").say() == NEW
        # Neither of the two was continued: the older one makes room.
        assert await Talk(s, "sk-six").say() == NEW
        assert s.facts("connection_closed")[-1]["reason"] == "evicted"
        assert s.gauge("idle") == 2
        s.check_isolation()


async def test_handshakes_are_limited():
    """With the budget for handshakes used up, a turn goes over HTTP rather than wait."""
    connections = {"handshake_burst": 1, "handshakes_per_s": 0.001} | NO_SPARES
    async with stack(sim=TALKATIVE, connections=connections) as s, busy_turns(s, "sk-agent"):
        assert await Talk(s).say() == ("http", "handshake_budget")
        assert await Talk(s, "sk-other").say() == NEW


async def test_one_shot_requests_share_a_few_connections():
    """A hundred single turns open no more connections than the nursery holds."""
    connections = {"nursery_size": 3} | NO_SPARES | PLENTY
    async with stack(sim=TALKATIVE, connections=connections) as s:
        kept = Talk(s)
        await kept.say("Keep me.")
        await kept.say("On.")
        for number in range(100):
            assert await Talk(s).say(f"Title of {number}?") == NEW

        assert s.sim.journal.connections_opened == 4
        assert await kept.say("Still there?") == CONTINUED


async def test_a_spare_is_there_before_it_is_needed():
    """After a first turn a connection is opened ahead, and the next conversation begins on it."""
    async with stack(sim=TALKATIVE) as s:
        first = Talk(s)
        await first.say("One.")
        await eventually(lambda: s.gauge("spare") == 1)
        (spare,) = [facts for facts in s.facts("connection_opened") if facts["spare"]]

        assert await Talk(s).say("Two.") == NEW

        assert s.facts("turn")[-1]["connection"] == spare["connection"]
        assert await first.say("On.") == CONTINUED
        await eventually(lambda: s.gauge("spare") == 1)
        s.check_isolation()


async def test_a_spare_that_can_not_be_opened_hurts_nobody():
    """An upstream that refuses a second connection costs the running conversation nothing."""
    async with stack(sim=TALKATIVE) as s:
        s.sim.faults.arm(RefuseUpgrade(status=503, skip=1))
        talk = Talk(s)
        await talk.say()
        await eventually(lambda: s.sim.journal.upgrades_refused)

        assert await talk.say("Next?") == CONTINUED
        assert await talk.say("And?") == CONTINUED


# --- Chains ---------------------------------------------------------------------------------------


async def test_a_chain_pushed_out_of_memory_costs_one_full_send():
    """The least recently used chain is forgotten first; its next turn is full, then it goes on."""
    connections = PLENTY | NO_SPARES
    async with stack(sim=TALKATIVE, chains={"max_bytes": 60_000}, connections=connections) as s:
        old = Talk(s)
        await old.say("Old.")
        await old.say("Older.")
        for number in range(40):
            await Talk(s).say(f"New {number}.")
        assert s.metric("turnwire_chain_bytes") <= 60_000

        mode, _ = await old.say("Remember?")

        assert mode == "full"
        assert await old.say("Now?") == CONTINUED


async def test_a_chain_is_forgotten_after_its_time():
    """A chain that was not used for `ttl_s` is gone; its next turn is full."""
    async with stack(sim=TALKATIVE, chains={"ttl_s": 0.1}) as s:
        talk = Talk(s)
        await talk.say()
        assert s.metric("turnwire_chains") in (0, 1)
        await eventually(lambda: s.metric("turnwire_chains") == 0)

        mode, _ = await talk.say("Next?")

        assert mode == "full"


async def test_a_restarted_proxy_starts_with_full_sends():
    """A proxy that knows nothing yet sends histories in full, and goes on by deltas."""
    async with Simulator(TALKATIVE) as sim:
        history: list[Item] = []
        modes: list[str | None] = []
        for _ in range(2):
            async with serving(sim.base_url) as (proxy, log):
                s = Stack(sim, proxy, log)
                agent = s.agent()
                for _ in range(2):
                    history.append(user("Next."))
                    reply: Reply = await agent.send(history)
                    s.check_contexts([reply])
                    history.extend(reply.items)
                    modes.append(reply.mode)
                await agent.close()
        assert modes == ["full", "delta"] * 2


# --- When WebSocket mode rests --------------------------------------------------------------------


async def until_websocket(talk: Talk) -> list[tuple[str | None, str | None]]:
    """Say things until a turn goes over WebSocket again; return how each turn went."""
    ways = [await talk.say()]
    async with asyncio.timeout(20):
        while ways[-1][0] == "http":
            ways.append(await talk.say("More."))
    return ways


async def test_websocket_mode_rests_after_a_refusal_and_comes_back():
    """After a refused upgrade turns go over HTTP without trying, until it was tried beside them."""
    cooldown = {"first_s": 0.5, "max_s": 1}
    async with stack(sim=TALKATIVE, cooldown=cooldown, connections=NO_SPARES) as s:
        s.sim.faults.arm(RefuseUpgrade(status=404))

        first, *resting, last = await until_websocket(Talk(s))

        assert first == ("http", "upgrade_refused")
        assert set(resting) <= {("http", "cooling_down")}
        assert last[0] == "full"
        assert s.sim.journal.upgrades_refused == 1


async def test_no_turn_tries_whether_the_rest_is_over():
    """Half-open, one handshake is attempted in the background; all turns go over HTTP at once."""
    cooldown = {"first_s": 1, "max_s": 60}
    async with stack(sim=TALKATIVE, cooldown=cooldown, connections=NO_SPARES) as s:
        s.sim.faults.arm(RefuseUpgrade(status=404, times=2))
        await Talk(s).say()
        assert s.sim.journal.upgrades_refused == 1
        ways: list[tuple[str | None, str | None]] = []
        async with asyncio.timeout(20):
            while s.sim.journal.upgrades_refused == 1:
                talks = [Talk(s, f"sk-{number}") for number in range(5)]
                ways = list(await asyncio.gather(*(talk.say() for talk in talks)))

        assert ways == [("http", "cooling_down")] * 5
        assert s.sim.journal.upgrades_refused == 2


async def test_one_callers_refusal_is_not_anothers():
    """A principal that is refused rests alone; others keep their connections."""
    async with stack(sim=TALKATIVE, connections=NO_SPARES) as s:
        other = Talk(s, "sk-other")
        await other.say()
        s.sim.faults.arm(RefuseUpgrade(status=403))
        refused = Talk(s)

        assert await refused.say() == ("http", "upgrade_refused")
        assert await refused.say("Next?") == ("http", "cooling_down")
        assert await other.say("Next?") == CONTINUED
        assert await Talk(s, "sk-third").say() == NEW


async def test_an_upstream_without_websockets_is_served_over_http():
    """Where there is no WebSocket endpoint, everything works, after one refused attempt."""
    async with stack(sim=SimulatorOptions(websocket=False)) as s:
        transcript = await s.agent().run(["[calls=3] Tidy up."])
        straight = await s.agent(straight=True).run(["[calls=3] Tidy up."])

        assert transcript.answers == straight.answers
        assert set(transcript.modes) == {"http"}
        assert s.metric("turnwire_connects_total", result="refused") == 1


async def test_websocket_mode_can_be_switched_off():
    """With `websocket.enabled = false` no upgrade is attempted, and answers are the same."""
    async with stack(websocket={"enabled": False}) as s:
        transcript = await s.agent().run(["[calls=3] Tidy up."])

        s.check_contexts(transcript.replies)
        assert set(transcript.reasons) == {"websocket_off"}
        assert not s.sim.journal.connections_opened


async def test_the_resend_budget_keeps_an_outage_from_doubling():
    """With the budget used up a turn is not sent again: the client gets upstream's error."""
    resends = {"budget_ratio": 0, "budget_per_s": 0.1}
    async with stack(sim=TALKATIVE, resends=resends, connections=NO_SPARES | PLENTY) as s:
        talk = Talk(s)
        s.sim.faults.arm(ErrorReply(status=500, code="server_error"))
        assert await talk.say() == ("full", "upstream_failed")
        turns = len(s.sim.journal.turns)
        s.sim.faults.arm(ErrorReply(status=500, code="server_error"))

        reply = await talk.agent.send([*talk.history, user("Next?")])

        assert (reply.status, reply.error["code"]) == (500, "server_error")
        assert len(s.sim.journal.turns) == turns + 1
