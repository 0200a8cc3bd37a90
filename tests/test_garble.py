"""
Frames that nobody should send, one at a time, in a conversation that was going well.

Before the first event a bad frame costs a connection and is healed; after it the reply ends in an
error. What is only odd changes nothing. Either way the next turn gets the right answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
import pytest
from campaign.menu import BAD_TEXTS
from test_faults import talking

from proxy.simulator.garble import FATAL, HARMLESS, BadText, RawFrames

if TYPE_CHECKING:
    from proxy.simulator.faults import Fault

PATIENCE = {"websocket": {"first_event_timeout_s": 1, "silence_timeout_s": 1}}
BAD: list[Fault] = [
    *(RawFrames(frames=frames, fatal=True) for frames in FATAL),
    *(BadText(text=text) for text in BAD_TEXTS),
]


async def test_what_is_broken_before_the_first_event_is_healed():
    """The client has the right answer, from another connection."""
    async with talking(**PATIENCE) as (s, talk):
        for fault in BAD:
            s.sim.faults.arm(fault)
            reply = await talk.send()
            talk.check(reply)
            assert reply.mode in ("full", "http"), fault
            assert not s.sim.faults.armed, fault


async def test_what_breaks_an_answer_ends_it():
    """The client sees an error and no clean end, and then the right answer."""
    async with talking(**PATIENCE) as (s, talk):
        for frames in FATAL:
            s.sim.faults.arm(RawFrames(frames=frames, after_events=4, fatal=True))
            with pytest.raises(aiohttp.ClientPayloadError):
                await talk.send()
            talk.check(await talk.send())


async def test_what_is_only_odd_changes_nothing():
    """Pings, pongs, fragments and long lengths are read as they are meant."""
    async with talking(**PATIENCE) as (s, talk):
        for after_events in (0, 4):
            for frames in HARMLESS:
                s.sim.faults.arm(RawFrames(frames=frames, after_events=after_events))
                follow = await talk.go_on()
                assert (follow.mode, follow.reason) == ("delta", "continued"), frames
