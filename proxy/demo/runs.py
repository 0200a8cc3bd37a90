"""
The agent's conversation, timed turn by turn.

The same agent for both ways: stateless, streaming, `store: false`, one tool call at a time, its
full history in every request. The final message is as long as to bring the average to about the
19 output tokens a turn of the run that the latency presets are derived from.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

import aiohttp

from proxy.demo.results import Run, TurnResult, Way
from proxy.simulator import Agent, Reply, ReplyError, StreamError
from proxy.simulator.agent import tool_output, user

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from proxy.demo.results import Setting
    from proxy.simulator.journal import Journal
    from proxy.simulator.wire import Item

OUTPUT_BYTES = 4096
"""Size of a tool's output: a page of a file."""

_FINAL_TOKENS_PER_TURN = 10  # the calls have about 9 each
_TIMEOUT_S = 600.0
_API_KEY = "sk-demo"


class TurnFailed(Exception):
    """A turn of the demo had no answer. The message is one sentence."""


async def play(
    way: Way, base_url: str, journal: Journal, setting: Setting, advance: Callable[[str], None]
) -> Run:
    """
    Play the conversation against `base_url`; `journal` is that of the simulator it ends at.

    Calls `advance` with the way's name after each turn. Raises TurnFailed.
    """
    agent = Agent(
        base_url,
        api_key=_API_KEY,
        tool=functools.partial(tool_output, size_bytes=setting.output_bytes),
        settings={"store": False, "parallel_tool_calls": False},
        timeout_s=_TIMEOUT_S,
    )
    turns: list[TurnResult] = []
    async with agent:
        try:
            await _warm_up(agent)
            started = time.perf_counter()
            async for reply in _conversation(agent, _prompt(setting)):
                turns.append(_result(reply, time.perf_counter() - started))
                advance(way)
        except (ReplyError, StreamError, aiohttp.ClientError, TimeoutError) as error:
            raise TurnFailed(f"turn {len(turns) + 1}, {way}: {_told(error)}") from error
        duration_s = time.perf_counter() - started
    return Run(tuple(turns), duration_s, sum(seen.request_bytes for seen in journal.turns))


async def _warm_up(agent: Agent) -> None:
    """Open the HTTP connection that the conversation is going to use."""
    reply = await agent.post(b'{"model":"warm-up","input":"-"}', "/embeddings")
    if reply.status != 200:
        raise ReplyError(reply)


async def _conversation(agent: Agent, prompt: str) -> AsyncIterator[Reply]:
    """Send the growing history until an answer calls no tool."""
    history: list[Item] = [user(prompt)]
    while True:
        reply = await agent.send(history)
        if reply.response is None or reply.response["status"] == "failed":
            raise ReplyError(reply)
        yield reply
        if not reply.calls:
            return
        history.extend(agent.echo(reply.items))
        history.extend(agent.answer_calls(reply.items))


def _prompt(setting: Setting) -> str:
    tokens = _FINAL_TOKENS_PER_TURN * setting.turns
    return f"Find out why the build fails, and mend it. [calls={setting.calls}] [tokens={tokens}]"


def _result(reply: Reply, ended_s: float) -> TurnResult:
    status = reply.response["status"] if reply.response else None
    return TurnResult(
        first_event_s=reply.first_event_s,
        duration_s=reply.duration_s,
        ended_s=ended_s,
        mode=reply.mode,
        answer=(status, reply.answer),
    )


def _told(error: Exception) -> str:
    """The error on one line, even where its text is empty or has several."""
    return " ".join(str(error).split()) or type(error).__name__
