"""
The oracle for Chat Completions: the same conversations, straight over HTTP and translated.

Straight, the simulator answers Chat Completions itself; through the proxy it sees Responses turns
over WebSocket. Its answer is a function of what a request means, so equal answers, chunk by chunk,
prove that nothing was lost in translation, and its own digest of each context says so once more.

`ORACLE_CHAT_CONVERSATIONS` changes the number of conversations (30; 200 take about a minute).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp
import pytest
from chat_agent import ChatAgent, ChatStyle
from harness import stack
from test_oracle import (
    DEVIATIONS,
    KEYS,
    OPENINGS,
    PICTURE,
    ROOMY,
    TROUBLE,
    Line,
    Plan,
    is_delta,
    planted,
    run_all,
)

from proxy.simulator import AnswerOptions, SimulatorOptions
from proxy.simulator.agent import Streaming
from proxy.simulator.chat import context_of
from proxy.simulator.journal import principal_of
from proxy.simulator.validate import Transport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chat_agent import ChatReply
    from harness import Stack
    from test_oracle import Turn

    from proxy.simulator.wire import Item

CONVERSATIONS = int(os.environ.get("ORACLE_CHAT_CONVERSATIONS", "30"))
SCHEMA = {"type": "object", "properties": {"verdict": {"type": "string"}}}
SETTINGS: tuple[dict[str, object], ...] = (
    {},
    {"max_completion_tokens": 4000, "n": 1, "store": False},
    {"max_tokens": 4000, "temperature": 0.5, "user": "someone"},
    {"reasoning_effort": "low", "verbosity": "low", "prompt_cache_key": "k"},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "v", "schema": SCHEMA}}},
    {"response_format": {"type": "text"}, "parallel_tool_calls": False},
    {"tool_choice": "auto", "metadata": {"a": "b"}, "service_tier": "auto", "logprobs": False},
)


@dataclass(frozen=True)
class ChatPlan(Plan):
    """How one conversation goes: as those of the other oracle, with messages of the system."""

    def options(self) -> dict[str, object]:
        """What the agent of this conversation is like."""
        rng = random.Random(f"chat agent {self.number}")
        return {
            "api_key": self.key,
            "style": list(ChatStyle)[self.number % len(ChatStyle)],
            "streaming": list(Streaming)[self.number % len(Streaming)],
            "settings": rng.choice(SETTINGS),
            "instructions": rng.choice(["You are careful.", "You are quick.", None]),
        }

    async def run(self, agent: ChatAgent) -> list[Turn]:
        """Hold the conversation; return its turns in the order of sending."""
        rng = random.Random(f"chat {self.number}")
        turns: list[Turn] = []
        line = Line(agent, turns)
        await line.ask(f"[calls={self.number % 4}] {OPENINGS[self.number % len(OPENINGS)]}")
        for _ in range(3):
            line = await rng.choice(DEVIATIONS)(line, rng)
            picture = {"type": "input_image", "image_url": PICTURE, "detail": "low"}
            parts = [picture] if rng.random() < 0.2 else []
            line.history.extend(interjection(rng))
            await line.ask(f"[calls={rng.randrange(5)}] And {rng.random()}? \u2603", *parts)
            if rng.random() < 0.3:
                await line.send(
                    {"role": "user", "content": "[calls=0] Sum up."}, *interjection(rng)
                )
        return turns


def interjection(rng: random.Random) -> list[Item]:
    """Return a message of the system or the developer, or none."""
    if rng.random() < 0.6:
        return []
    role = rng.choice(["system", "developer"])
    text = f"Mind {rng.random()}."
    return [{"role": role, "content": rng.choice([text, [{"type": "text", "text": text}]])}]


def check_contexts(s: Stack, plans: Sequence[ChatPlan], proxied: list[list[Turn]]) -> None:
    """Each answer was made from exactly what its request said, for the one who asked."""
    records = {seen.response_id: seen for seen in s.sim.journal.turns}
    for plan, own in zip(plans, proxied, strict=True):
        owner = principal_of({"Authorization": f"Bearer {plan.key}"})
        for turn in own:
            seen = records[turn.reply.response["id"]]
            assert seen.digest == context_of(json.loads(turn.reply.body)).digest.hex()
            assert seen.principal == owner
    s.check_isolation()


@pytest.mark.parametrize(("express", "step"), [(True, 1), (False, 3)])
async def test_no_answer_differs_and_every_turn_that_can_be_is_a_delta(express: bool, step: int):
    """Random conversations get word for word what they get over HTTP, by deltas."""
    plans = [ChatPlan(number) for number in range(0, CONVERSATIONS, step)]
    tuning = {"express": express}
    async with stack(connections=ROOMY, tuning=tuning, chat_completions="translate") as s:
        straight = await run_all(plans, functools.partial(ChatAgent, s.straight_url))
        s.sim.journal.clear()
        proxied = await run_all(plans, functools.partial(ChatAgent, s.base_url))

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
        check_contexts(s, plans, proxied)
        assert {seen.transport for seen in s.sim.journal} == {Transport.WS}


async def test_arguments_that_a_client_changes_cost_deltas_but_never_an_answer():
    """Numbers that a re-serialising client alters are a changed history, and are sent as one."""
    plans = [ChatPlan(number) for number in range(len(ChatStyle))]
    options = SimulatorOptions(answers=AnswerOptions(odd_arguments=True))
    async with stack(sim=options, connections=ROOMY, chat_completions="translate") as s:
        straight = await run_all(plans, functools.partial(ChatAgent, s.straight_url))
        s.sim.journal.clear()
        proxied = await run_all(plans, functools.partial(ChatAgent, s.base_url))

        for one, other in zip(straight, proxied, strict=True):
            assert [turn.reply.answer for turn in one] == [turn.reply.answer for turn in other]
        check_contexts(s, plans, proxied)


@pytest.mark.parametrize("express", [True, False])
async def test_no_trouble_of_any_kind_changes_an_answer(express: bool):
    """With faults in every fifth turn and clients that leave and retry, all answers are right."""
    plans = [ChatPlan(number) for number in range(2 * len(ChatStyle))]
    rng = random.Random("chat trouble")
    faults = [planted(fault, rng, Transport.WS) for fault in TROUBLE]
    async with stack(
        tolerates=["Cannot write to closing transport"],  # the simulator, when we leave
        connections=ROOMY,
        tuning={"express": express},
        cooldown={"first_s": 0.01, "max_s": 0.05},
        resends={"budget_ratio": 1},
        websocket={"first_event_timeout_s": 1, "silence_timeout_s": 1},
        chat={"retry_refused_s": 0},
    ) as s:
        straight = await run_all(plans, functools.partial(ChatAgent, s.straight_url))
        s.sim.faults.arm(*faults)
        proxied = await run_all(plans, functools.partial(PatientAgent, s.base_url, rng=rng))
        s.sim.faults.clear()

        assert {type(fault) for fault in s.sim.faults.fired} == {type(fault) for fault in TROUBLE}
        for one, other in zip(straight, proxied, strict=True):
            assert [turn.reply.answer for turn in one] == [turn.reply.answer for turn in other]
        s.check_isolation()
        turns = [turn for own in proxied for turn in own]
        assert sum(map(is_delta, turns)) > len(turns) / 2
        await s.idle()


@dataclass
class PatientAgent(ChatAgent):
    """An agent that tries each request until it is answered, and sometimes leaves in between."""

    rng: random.Random = field(default_factory=random.Random)

    async def post(self, body: bytes, path: str = "/chat/completions") -> ChatReply:
        """Send a body again and again; one time in ten, give up at a random moment first."""
        for _ in range(100):
            attempt = asyncio.get_running_loop().create_task(ChatAgent.post(self, body, path))
            if self.rng.random() < 0.1:
                for _ in range(self.rng.randrange(200)):
                    await asyncio.sleep(0)
                attempt.cancel()
            with contextlib.suppress(aiohttp.ClientError, asyncio.CancelledError):
                reply = await attempt
                if reply.response is not None:
                    return reply
        raise AssertionError("a hundred attempts failed")


def test_the_keys_are_those_of_several_people():
    """Conversations of different principals are held at one time."""
    assert len({ChatPlan(number).key for number in range(CONVERSATIONS)}) == len(KEYS)
