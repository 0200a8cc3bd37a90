"""
The oracle: the same agents, straight to the simulator and through the proxy.

The simulator's answers are a pure function of the full context that it holds. So one lost,
doubled, reordered or foreign item changes an answer and every later one, and equal answers prove
equal histories. What is said, and which turns have to be deltas, is in `oracle`.

The environment variable `ORACLE_CONVERSATIONS` changes the number of conversations (200). Some of
them are held without the express way; all of them with `WITHOUT_EXPRESS=1` (see the harness).
"""

from __future__ import annotations

import functools
import os
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from harness import eventually, stack
from oracle import (
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

from proxy.simulator import AnswerOptions, EchoStyle, SimulatorOptions
from proxy.simulator.agent import Agent
from proxy.simulator.faults import ExtraEvents, Fault, Restyle
from proxy.simulator.validate import Transport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness import Stack
    from oracle import Turn

    from proxy.simulator.agent import Reply

CONVERSATIONS = int(os.environ.get("ORACLE_CONVERSATIONS", "200"))


def check_contexts(s: Stack, plans: Sequence[Plan], proxied: list[list[Turn]]) -> None:
    """Each answer was made from exactly what its request said, for the one who asked."""
    for plan, own in zip(plans, proxied, strict=True):
        s.check_contexts([turn.reply for turn in own], plan.key)
    s.check_isolation()


@pytest.mark.parametrize(("express", "step"), [(True, 1), (False, 8)])
async def test_no_answer_differs_and_every_turn_that_can_be_is_a_delta(express: bool, step: int):
    """Hundreds of random conversations get the answers they get without the proxy, by deltas."""
    plans = [Plan(number) for number in range(0, CONVERSATIONS, step)]
    async with stack(connections=ROOMY, tuning={"express": express}) as s:
        straight = functools.partial(s.agent, straight=True)
        proxied = await hold_both_ways(s, plans, straight, s.agent)

        check_deltas(s, proxied)
        check_contexts(s, plans, proxied)


@pytest.mark.parametrize(("express", "rounds"), [(True, 5), (False, 2)])
async def test_no_trouble_of_any_kind_changes_an_answer(express: bool, rounds: int):
    """With faults in every fifth turn and clients that leave and retry, all answers are right."""
    plans = [Plan(number) for number in range(rounds * len(EchoStyle))]
    rng = random.Random("trouble")
    faults = [planted(fault, rng, transport_of(fault)) for fault in TROUBLE]
    async with stack(tuning={"express": express}, **TROUBLED) as s:
        straight = functools.partial(s.agent, straight=True)
        patient = functools.partial(PatientAgent, s.base_url, rng=rng)
        proxied = await hold_both_ways(s, plans, straight, patient, faults)

        check_contexts(s, plans, proxied)
        check_most_are_deltas(proxied)
        # Nothing is left behind: no lease, no connection that upstream alone knows of.
        await s.idle()
        await eventually(
            lambda: s.sim.journal.connections_open == s.gauge("idle") + s.gauge("spare")
        )


def transport_of(fault: Fault) -> Transport | None:
    """Return where a fault is planted; None for everywhere."""
    return Transport.WS if isinstance(fault, ExtraEvents | Restyle) else fault.transport


@dataclass
class PatientAgent(Patience, Agent):
    """An agent that tries each request until it is answered to the end."""

    def is_answer(self, reply: Reply) -> bool:
        """Tell whether a reply is a complete answer."""
        return reply.response is not None and reply.response["status"] == "completed"


async def test_arguments_that_a_client_changes_cost_deltas_but_never_an_answer():
    """Numbers that a re-serialising client alters are a changed history, and are sent as one."""
    plans = [Plan(number) for number in range(3 * len(EchoStyle))]
    options = SimulatorOptions(answers=AnswerOptions(odd_arguments=True))
    async with stack(sim=options, connections=ROOMY) as s:
        straight = functools.partial(s.agent, straight=True)
        proxied = await hold_both_ways(s, plans, straight, s.agent)

        check_contexts(s, plans, proxied)
