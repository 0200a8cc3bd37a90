"""
The oracle for Chat Completions: the same conversations, straight over HTTP and translated.

Straight, the simulator answers Chat Completions itself; through the proxy it sees Responses turns
over WebSocket. Its answer is a function of what a request means, so equal answers, chunk by chunk,
prove that nothing was lost in translation, and its own digest of each context says so once more.

`ORACLE_CHAT_CONVERSATIONS` changes the number of conversations (30; 200 take about a minute).
"""

from __future__ import annotations

import functools
import json
import os
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import pytest
from chat_agent import ChatAgent, ChatStyle
from harness import stack
from oracle import (
    KEYS,
    ROOMY,
    TROUBLE,
    TROUBLED,
    Patience,
    Plan,
    check_deltas,
    check_most_are_deltas,
    hold_both_ways,
    planted,
)

from proxy.simulator import AnswerOptions, SimulatorOptions
from proxy.simulator.chat import context_of
from proxy.simulator.journal import principal_of
from proxy.simulator.validate import Transport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness import Stack
    from oracle import Line, Turn

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

    name: ClassVar[str] = "chat"
    agents: ClassVar[str] = "chat agent"
    styles: ClassVar[Sequence[ChatStyle]] = tuple(ChatStyle)
    settings: ClassVar[Sequence[dict[str, object]]] = SETTINGS

    async def go_on(self, line: Line, rng: random.Random, pictures: list[Item]) -> None:
        """Ask the next question, and sometimes for a summary."""
        line.history.extend(interjection(rng))
        await line.ask(f"[calls={rng.randrange(5)}] And {rng.random()}? \u2603", *pictures)
        if rng.random() < 0.3:
            await line.send({"role": "user", "content": "[calls=0] Sum up."}, *interjection(rng))


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
        straight, through = (functools.partial(ChatAgent, u) for u in (s.straight_url, s.base_url))
        proxied = await hold_both_ways(s, plans, straight, through)

        check_deltas(s, proxied)
        check_contexts(s, plans, proxied)


async def test_arguments_that_a_client_changes_cost_deltas_but_never_an_answer():
    """Numbers that a re-serialising client alters are a changed history, and are sent as one."""
    plans = [ChatPlan(number) for number in range(len(ChatStyle))]
    options = SimulatorOptions(answers=AnswerOptions(odd_arguments=True))
    async with stack(sim=options, connections=ROOMY, chat_completions="translate") as s:
        straight, through = (functools.partial(ChatAgent, u) for u in (s.straight_url, s.base_url))
        proxied = await hold_both_ways(s, plans, straight, through)

        check_contexts(s, plans, proxied)


@pytest.mark.parametrize("express", [True, False])
async def test_no_trouble_of_any_kind_changes_an_answer(express: bool):
    """With faults in every fifth turn and clients that leave and retry, all answers are right."""
    plans = [ChatPlan(number) for number in range(2 * len(ChatStyle))]
    rng = random.Random("chat trouble")
    faults = [planted(fault, rng, Transport.WS) for fault in TROUBLE]
    async with stack(tuning={"express": express}, chat={"retry_refused_s": 0}, **TROUBLED) as s:
        straight = functools.partial(ChatAgent, s.straight_url)
        patient = functools.partial(PatientAgent, s.base_url, rng=rng)
        proxied = await hold_both_ways(s, plans, straight, patient, faults)

        s.check_isolation()
        check_most_are_deltas(proxied)
        await s.idle()


@dataclass
class PatientAgent(Patience, ChatAgent):
    """An agent that tries each request until it is answered."""


def test_the_keys_are_those_of_several_people():
    """Conversations of different principals are held at one time."""
    assert len({ChatPlan(number).key for number in range(CONVERSATIONS)}) == len(KEYS)
