"""
What goes up the wire: a tool loop sends each item of its history once.

The case is the one that the project is measured by: twenty turns with tool outputs of 4 KB. Sent
in full at every turn that is some 800 KB. The ideal is the first request, and then new items only;
the API also wants the settings with every turn, which are counted apart where they are large.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from harness import stack

from proxy.simulator import AnswerOptions, EchoStyle, SimulatorOptions
from proxy.simulator.agent import DEFAULT_TOOLS, Streaming, tool_output
from proxy.simulator.validate import Transport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness import Stack

    from proxy.simulator.agent import Reply

TURNS = 20
OUTPUT_BYTES = 4096
READ = {
    "type": "function",
    "name": "read_file",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}
ONE_CALL_A_TURN = SimulatorOptions(answers=AnswerOptions(parallel_every=0, commentary_every=0))


def tool(name: str, arguments: str) -> str:
    """Answer a call with 4 KB."""
    return tool_output(name, arguments, OUTPUT_BYTES)


async def run_loop(s: Stack, **options: Any) -> Sequence[Reply]:
    """Run the tool loop through the proxy, and check that upstream saw all of it."""
    transcript = await s.agent(tool=tool, **options).run([f"[calls={TURNS - 1}] Tidy up."])
    assert len(transcript.replies) == TURNS
    assert {seen.transport for seen in s.sim.journal} == {Transport.WS}
    s.check_contexts(transcript.replies)
    return transcript.replies


def new_items_bytes(message: bytes | None) -> int:
    """Return the size of the items in a message."""
    items = json.loads(message or b"{}")["input"]
    return sum(len(json.dumps(item, separators=(",", ":"))) for item in items)


@pytest.mark.parametrize("style", [EchoStyle.VERBATIM, EchoStyle.MIXED])
@pytest.mark.parametrize("store", [False, True])
async def test_a_tool_loop_uploads_its_new_items_only(style, store):
    """Twenty turns upload within ten percent of the ideal, in place of the history each time."""
    async with stack(sim=ONE_CALL_A_TURN) as s:
        replies = await run_loop(s, tools=[READ], style=style, settings={"store": store})

        turns = s.sim.journal.turns
        uploaded = sum(seen.request_bytes for seen in turns)
        in_full = sum(reply.request_bytes for reply in replies)
        ideal = replies[0].request_bytes + sum(new_items_bytes(seen.raw) for seen in turns[1:])
        assert in_full > 800_000
        assert ideal < 90_000
        assert uploaded <= 1.1 * ideal
        # What happened is what is counted.
        assert s.metric("turnwire_upstream_request_bytes_total") == uploaded
        assert s.metric("turnwire_downstream_request_bytes_total") == in_full


async def test_large_settings_are_all_that_comes_on_top_of_new_items():
    """With the tools and instructions of a coding agent, a delta is its settings and new items."""
    instructions = "You are a coding agent. " * 400
    async with stack(sim=ONE_CALL_A_TURN) as s:
        replies = await run_loop(
            s, tools=DEFAULT_TOOLS, instructions=instructions, streaming=Streaming.ALTERNATING
        )

        for seen, reply in list(zip(s.sim.journal.turns, replies, strict=True))[1:]:
            body = json.loads(reply.body)
            settings = {key: value for key, value in body.items() if key != "input"}
            settings_bytes = len(json.dumps(settings, separators=(",", ":")))
            assert seen.request_bytes <= settings_bytes + new_items_bytes(seen.raw) + 150
