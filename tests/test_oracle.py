"""
The oracle: the same agents, straight to the simulator and through the proxy.

The simulator's answers are a pure function of the full context that it holds. So one lost,
doubled, reordered or foreign item changes an answer and every later one, and equal answers prove
equal histories. Conversations share openings and credentials, run twelve at a time, and do what
people do to agents: they retry, fork, edit what was said, drop an answer, run two tails of one
history at once.

Which turns have to be deltas is computed on the client's side alone (`Line`): every turn that adds
to the answer that its own line has just received.

The environment variable `ORACLE_CONVERSATIONS` changes the number of conversations (200). Some of
them are held without the express way; all of them with `WITHOUT_EXPRESS=1` (see the harness).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import aiohttp
import pytest
from harness import NO_HANDSHAKE_LIMIT, eventually, stack

from proxy.simulator import AnswerOptions, EchoStyle, SimulatorOptions
from proxy.simulator.agent import Agent, Streaming, user
from proxy.simulator.faults import (
    CODEX_RATE_LIMITS,
    WEBSOCKET_TIMING,
    Break,
    End,
    ErrorReply,
    ExtraEvents,
    FailResponse,
    Fault,
    RefuseUpgrade,
    Restyle,
    SlowStream,
    Style,
    connection_limit_reached,
    previous_response_not_found,
)
from proxy.simulator.validate import Transport

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from proxy.simulator.agent import Reply
    from proxy.simulator.wire import Item

CONVERSATIONS = int(os.environ.get("ORACLE_CONVERSATIONS", "200"))
AT_A_TIME = 12
KEYS = tuple(f"sk-oracle-{number}" for number in range(5))
OPENINGS = ("Tidy up.", "What is in here?", "Write a test.", "Tidy up.")
PICTURE = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ"
SETTINGS: tuple[dict[str, object], ...] = (
    {"store": False},
    {"store": False},
    {"store": False, "include": ["reasoning.encrypted_content"]},
    {"store": True},
    {},
)
# Each conversation keeps its own connection here, so that only its history decides.
ROOMY = NO_HANDSHAKE_LIMIT | {"max_per_principal": 5000, "max_total": 50_000}


@dataclass(frozen=True)
class Turn:
    """One turn as the client knows it. `follows`: it adds to the answer that came before it."""

    reply: Reply
    follows: bool


@dataclass
class Line:
    """One line of a conversation: the history, and whether its last answer may be continued."""

    agent: Agent
    turns: list[Turn]
    history: list[Item] = field(default_factory=list)
    continuable: bool = False

    async def send(self, *items: Item) -> Reply:
        """Add items, send it all, and take the answer into the history."""
        self.history.extend(items)
        reply = await self.agent.send(self.history)
        assert reply.response is not None, f"status {reply.status}: {reply.error}"
        self.turns.append(Turn(reply, self.continuable))
        self.continuable = True
        self.history.extend(self.agent.echo(reply.items))
        return reply

    async def ask(self, text: str, *parts: Item) -> None:
        """Ask something, and answer the tool calls until there are none."""
        content = [{"type": "input_text", "text": text}, *parts] if parts else text
        reply = await self.send(user(content))
        while reply.calls:
            reply = await self.send(*self.agent.answer_calls(reply.items))

    def fork(self, length: int | None = None) -> Line:
        """Start a second line from this history, or from its beginning of that length."""
        return Line(self.agent, self.turns, list(self.history[:length]))


@dataclass(frozen=True)
class Plan:
    """How one conversation goes; the same number gives the same conversation."""

    number: int

    @property
    def key(self) -> str:
        """Whose conversation it is."""
        return KEYS[self.number % len(KEYS)]

    def options(self) -> dict[str, object]:
        """What the agent of this conversation is like."""
        rng = random.Random(f"agent {self.number}")
        return {
            "api_key": self.key,
            "style": list(EchoStyle)[self.number % len(EchoStyle)],
            "streaming": list(Streaming)[self.number % len(Streaming)],
            "settings": rng.choice(SETTINGS),
            "instructions": rng.choice(["You are careful.", "You are quick.", None]),
        }

    async def run(self, agent: Agent) -> list[Turn]:
        """Hold the conversation; return its turns in the order of sending."""
        rng = random.Random(f"conversation {self.number}")
        turns: list[Turn] = []
        line = Line(agent, turns)
        await line.ask(f"[calls={self.number % 4}] {OPENINGS[self.number % len(OPENINGS)]}")
        for _ in range(3):
            line = await rng.choice(DEVIATIONS)(line, rng)
            picture = {"type": "input_image", "image_url": PICTURE, "detail": "low"}
            parts = [picture] if rng.random() < 0.2 else []
            await line.ask(f"[calls={rng.randrange(5)}] And {rng.random()}?", *parts)
        return turns


# What may happen between two prompts: each takes the line and returns the one that goes on.


async def nothing(line: Line, _: random.Random) -> Line:
    """Go on."""
    return line


async def retry(line: Line, _: random.Random) -> Line:
    """Send the last request once more, as after a lost reply, and go on from what came back."""
    again = await line.agent.post(line.turns[-1].reply.body)
    assert again.answer == line.turns[-1].reply.answer
    line.turns.append(Turn(again, follows=False))
    return line


async def fork(line: Line, rng: random.Random) -> Line:
    """Ask something at an earlier place, and return to where the line was."""
    starts = [place for place, item in enumerate(line.history) if item.get("role") == "user"]
    other = line.fork(rng.choice(starts))
    await other.ask(f"[calls=1] Or {rng.random()}?")
    return line


async def rewind(line: Line, rng: random.Random) -> Line:
    """Go back to an earlier place, and stay there."""
    starts = [place for place, item in enumerate(line.history) if item.get("role") == "user"]
    return line.fork(rng.choice(starts))


async def edit_question(line: Line, rng: random.Random) -> Line:
    """Change an old message of the user's."""
    edited = line.fork()
    place = rng.choice([i for i, item in enumerate(line.history) if item.get("role") == "user"])
    edited.history[place] = user(f"[calls=1] Rather {rng.random()}.")
    return edited


async def edit_answer(line: Line, rng: random.Random) -> Line:
    """Change the text of the last answer."""
    edited = line.fork()
    edited.history[-1] = {"role": "assistant", "content": f"Edited {rng.random()}."}
    return edited


async def drop_answer(line: Line, _: random.Random) -> Line:
    """Leave out the last answer."""
    return line.fork(-1)


async def two_tails(line: Line, rng: random.Random) -> Line:
    """Go on in two ways at the same time."""
    turns: tuple[list[Turn], list[Turn]] = ([], [])
    tails = [Line(line.agent, tail_turns, list(line.history)) for tail_turns in turns]
    texts = [f"[calls=2] Tail {number} {rng.random()}." for number in range(2)]
    await asyncio.gather(*(tail.ask(text) for tail, text in zip(tails, texts, strict=True)))
    line.turns.extend(turns[0] + turns[1])
    tails[0].turns = line.turns
    return tails[0]


DEVIATIONS = (
    *(nothing,) * 8,
    retry,
    fork,
    rewind,
    edit_question,
    edit_answer,
    drop_answer,
    two_tails,
)


async def run_all(plans: Sequence[Plan], make_agent) -> list[list[Turn]]:
    """Run all conversations, `AT_A_TIME` of them at a time."""
    gate = asyncio.Semaphore(AT_A_TIME)

    async def run(plan: Plan) -> list[Turn]:
        async with gate:
            agent = make_agent(**plan.options())
            try:
                return await plan.run(agent)
            finally:
                await agent.close()

    return list(await asyncio.gather(*(run(plan) for plan in plans)))


@pytest.mark.parametrize(("express", "step"), [(True, 1), (False, 8)])
async def test_no_answer_differs_and_every_turn_that_can_be_is_a_delta(express: bool, step: int):
    """Hundreds of random conversations get the answers they get without the proxy, by deltas."""
    plans = [Plan(number) for number in range(0, CONVERSATIONS, step)]
    async with stack(connections=ROOMY, tuning={"express": express}) as s:
        straight = await run_all(plans, functools.partial(s.agent, straight=True))
        s.sim.journal.clear()
        proxied = await run_all(plans, s.agent)

        differing = [
            plan.number
            for plan, one, other in zip(plans, straight, proxied, strict=True)
            if [turn.reply.answer for turn in one] != [turn.reply.answer for turn in other]
        ]
        assert differing == []
        turns = [turn for own in proxied for turn in own]
        assert {turn.reply.mode for turn in turns} <= {"delta", "full"}
        missed = [turn.reply.reason for turn in turns if turn.follows and not is_delta(turn)]
        assert missed == []
        for plan, own in zip(plans, proxied, strict=True):
            s.check_contexts([turn.reply for turn in own], plan.key)
        s.check_isolation()
        assert {seen.transport for seen in s.sim.journal} == {Transport.WS}


@pytest.mark.parametrize(("express", "rounds"), [(True, 5), (False, 2)])
async def test_no_trouble_of_any_kind_changes_an_answer(express: bool, rounds: int):
    """With faults in every fifth turn and clients that leave and retry, all answers are right."""
    plans = [Plan(number) for number in range(rounds * len(EchoStyle))]
    rng = random.Random("trouble")
    faults = [planted(fault, rng, transport_of(fault)) for fault in TROUBLE]
    async with stack(
        tolerates=["Cannot write to closing transport"],  # the simulator, when we leave
        connections=ROOMY,
        tuning={"express": express},
        cooldown={"first_s": 0.01, "max_s": 0.05},
        resends={"budget_ratio": 1},
        websocket={"first_event_timeout_s": 1, "silence_timeout_s": 1},
    ) as s:
        straight = await run_all(plans, functools.partial(s.agent, straight=True))
        s.sim.journal.clear()
        s.sim.faults.arm(*faults)
        proxied = await run_all(plans, functools.partial(PatientAgent, s.base_url, rng=rng))
        s.sim.faults.clear()

        for plan, one, other in zip(plans, straight, proxied, strict=True):
            assert [turn.reply.answer for turn in one] == [turn.reply.answer for turn in other]
            s.check_contexts([turn.reply for turn in other], plan.key)
        s.check_isolation()
        assert {type(fault) for fault in s.sim.faults.fired} == {type(fault) for fault in TROUBLE}
        deltas = sum(is_delta(turn) for own in proxied for turn in own)
        assert deltas > sum(map(len, proxied)) / 2
        # Nothing is left behind: no lease, no connection that upstream alone knows of.
        await s.idle()
        await eventually(
            lambda: s.sim.journal.connections_open == s.gauge("idle") + s.gauge("spare")
        )


# Faults of each kind, before and after the first event. What spoils an answer without breaking it
# is planted on WebSockets only: over HTTP it is handed on as it is.
TROUBLE: tuple[Fault, ...] = (
    ErrorReply(status=500, code="server_error", transport=Transport.WS),
    ErrorReply(status=429, code="rate_limit_exceeded"),
    ErrorReply(status=503, code="server_is_overloaded", after_events=3),
    previous_response_not_found(),
    connection_limit_reached(),
    Break(end=End.CLOSE, code=1012, transport=Transport.WS),
    Break(end=End.CLOSE, code=1009, transport=Transport.WS),
    Break(end=End.RESET, after_events=2),
    Break(end=End.ABORT, after_events=-1),
    Break(end=End.STALL, after_events=2, transport=Transport.WS),
    FailResponse(),
    ExtraEvents(before=[CODEX_RATE_LIMITS], after=[WEBSOCKET_TIMING]),
    ExtraEvents(after=[{"type": "response.output_text.delta", "delta": "stray"}]),
    Restyle(style=Style.FOREIGN_ID),
    Restyle(style=Style.PRETTY),
    SlowStream(gap_ms=1),
    RefuseUpgrade(status=503),
    RefuseUpgrade(status=429),
)


def planted(fault: Fault, rng: random.Random, transport: Transport | None) -> Fault:
    """
    Let a fault happen to some turns, so that one in five has one of `TROUBLE`.

    Which turns those are is drawn, but not whether there is one: it comes in the first ninety, and
    then once more in as many, on average. Upgrades are few, and one in five has each of its faults.
    """
    every = 5 if isinstance(fault, RefuseUpgrade) else 5 * len(TROUBLE)

    def draws() -> Iterator[bool]:
        yield from itertools.repeat(False, rng.randrange(every))
        while True:
            yield True
            yield from itertools.repeat(False, rng.randrange(2 * every - 1))

    drawn = draws()
    return replace(fault, times=1_000_000, transport=transport, when=lambda _: next(drawn))


def transport_of(fault: Fault) -> Transport | None:
    """Return where a fault is planted; None for everywhere."""
    return Transport.WS if isinstance(fault, ExtraEvents | Restyle) else fault.transport


@dataclass
class PatientAgent(Agent):
    """An agent that tries each request until it is answered, and sometimes leaves in between."""

    rng: random.Random = field(default_factory=random.Random)

    async def post(self, body: bytes, path: str = "/responses") -> Reply:
        """Send a body again and again; one time in ten, give up at a random moment first."""
        for _ in range(100):
            attempt = asyncio.get_running_loop().create_task(Agent.post(self, body, path))
            if self.rng.random() < 0.1:
                for _ in range(self.rng.randrange(200)):
                    await asyncio.sleep(0)
                attempt.cancel()
            with contextlib.suppress(aiohttp.ClientError, asyncio.CancelledError):
                reply = await attempt
                if reply.response is not None and reply.response["status"] == "completed":
                    return reply
        raise AssertionError("a hundred attempts failed")


async def test_arguments_that_a_client_changes_cost_deltas_but_never_an_answer():
    """Numbers that a re-serialising client alters are a changed history, and are sent as one."""
    plans = [Plan(number) for number in range(3 * len(EchoStyle))]
    options = SimulatorOptions(answers=AnswerOptions(odd_arguments=True))
    async with stack(sim=options, connections=ROOMY) as s:
        straight = await run_all(plans, functools.partial(s.agent, straight=True))
        s.sim.journal.clear()
        proxied = await run_all(plans, s.agent)

        for plan, one, other in zip(plans, straight, proxied, strict=True):
            assert [turn.reply.answer for turn in one] == [turn.reply.answer for turn in other]
            s.check_contexts([turn.reply for turn in other], plan.key)
        s.check_isolation()


def is_delta(turn: Turn) -> bool:
    """Tell whether a turn was sent as a delta."""
    return turn.reply.mode == "delta"
