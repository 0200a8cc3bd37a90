"""
Random conversations that can be held twice, straight to the simulator and through the proxy.

Conversations share openings and credentials, run twelve at a time, and do what people do to agents:
they retry, fork, edit what was said, drop an answer, run two tails of one history at once. `Plan`
says how one goes, in Responses; Chat Completions have a plan and an agent of their own.

Which turns have to be deltas is computed on the client's side alone (`Line`): every turn that adds
to the answer that its own line has just received.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import aiohttp
from harness import NO_HANDSHAKE_LIMIT

from proxy.simulator import EchoStyle
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

    from harness import Stack

    from proxy.simulator.agent import Reply
    from proxy.simulator.wire import Item

AT_A_TIME = 12
KEYS = tuple(f"sk-oracle-{number}" for number in range(5))
OPENINGS = ("Tidy up.", "What is in here?", "Write a test.", "Tidy up.")
PICTURE: Item = {
    "type": "input_image",
    "image_url": "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ",
    "detail": "low",
}
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

    name: ClassVar[str] = "conversation"
    agents: ClassVar[str] = "agent"
    styles: ClassVar[Sequence[Any]] = tuple(EchoStyle)
    settings: ClassVar[Sequence[dict[str, object]]] = SETTINGS

    @property
    def key(self) -> str:
        """Whose conversation it is."""
        return KEYS[self.number % len(KEYS)]

    def options(self) -> dict[str, object]:
        """What the agent of this conversation is like."""
        rng = random.Random(f"{self.agents} {self.number}")
        return {
            "api_key": self.key,
            "style": self.styles[self.number % len(self.styles)],
            "streaming": list(Streaming)[self.number % len(Streaming)],
            "settings": rng.choice(self.settings),
            "instructions": rng.choice(["You are careful.", "You are quick.", None]),
        }

    async def run(self, agent: Agent) -> list[Turn]:
        """Hold the conversation; return its turns in the order of sending."""
        rng = random.Random(f"{self.name} {self.number}")
        turns: list[Turn] = []
        line = Line(agent, turns)
        await line.ask(f"[calls={self.number % 4}] {OPENINGS[self.number % len(OPENINGS)]}")
        for _ in range(3):
            line = await rng.choice(DEVIATIONS)(line, rng)
            await self.go_on(line, rng, [PICTURE] if rng.random() < 0.2 else [])
        return turns

    async def go_on(self, line: Line, rng: random.Random, pictures: list[Item]) -> None:
        """Ask the next question."""
        await line.ask(f"[calls={rng.randrange(5)}] And {rng.random()}?", *pictures)


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


async def hold_both_ways(
    s: Stack, plans: Sequence[Plan], make_straight, make_proxied, faults: Sequence[Fault] = ()
) -> list[list[Turn]]:
    """
    Hold conversations straight, then through the proxy and `faults`: no answer may differ.

    Each of the faults must have come. Return the turns that went through the proxy, of which alone
    the journal tells then.
    """
    straight = await run_all(plans, make_straight)
    s.sim.journal.clear()
    s.sim.faults.arm(*faults)
    proxied = await run_all(plans, make_proxied)
    s.sim.faults.clear()
    assert {type(fault) for fault in s.sim.faults.fired} == {type(fault) for fault in faults}
    differing = [
        plan.number
        for plan, one, other in zip(plans, straight, proxied, strict=True)
        if [turn.reply.answer for turn in one] != [turn.reply.answer for turn in other]
    ]
    assert differing == []
    return proxied


def check_deltas(s: Stack, proxied: list[list[Turn]]) -> None:
    """Every turn that could be a delta was one, and none took another way than WebSocket."""
    turns = [turn for own in proxied for turn in own]
    assert {turn.reply.mode for turn in turns} <= {"delta", "full"}
    missed = [turn.reply.reason for turn in turns if turn.follows and not is_delta(turn)]
    assert missed == []
    assert {seen.transport for seen in s.sim.journal} == {Transport.WS}


def check_most_are_deltas(proxied: list[list[Turn]]) -> None:
    """More than half of the turns were deltas, whatever else befell them."""
    turns = [turn for own in proxied for turn in own]
    assert sum(map(is_delta, turns)) > len(turns) / 2


def is_delta(turn: Turn) -> bool:
    """Tell whether a turn was sent as a delta."""
    return turn.reply.mode == "delta"


# How a stack is set up that is to have trouble: all of it is over soon.
TROUBLED = {
    "tolerates": ["Cannot write to closing transport"],  # the simulator, when we leave
    "connections": ROOMY,
    "cooldown": {"first_s": 0.01, "max_s": 0.05},
    "resends": {"budget_ratio": 1},
    "websocket": {"first_event_timeout_s": 1, "silence_timeout_s": 1},
}

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


@dataclass
class Patience:
    """Mixed into an agent: tries each request until it is answered, and sometimes leaves first."""

    rng: random.Random = field(default_factory=random.Random)

    async def post(self, body: bytes, *path: str) -> Any:
        """Send a body again and again; one time in ten, give up at a random moment first."""
        for _ in range(100):
            attempt = asyncio.get_running_loop().create_task(super().post(body, *path))
            if self.rng.random() < 0.1:
                for _ in range(self.rng.randrange(200)):
                    await asyncio.sleep(0)
                attempt.cancel()
            with contextlib.suppress(aiohttp.ClientError, asyncio.CancelledError):
                reply = await attempt
                if self.is_answer(reply):
                    return reply
        raise AssertionError("a hundred attempts failed")

    def is_answer(self, reply: Any) -> bool:
        """Tell whether a reply is what was waited for."""
        return reply.response is not None
