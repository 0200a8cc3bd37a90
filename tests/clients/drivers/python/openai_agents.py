"""
The OpenAI Agents SDK. MODE: list, stream, stateless, session, nameless (reasoning without ids),
previous (chained by itself), required (a tool is required first), structured, handoff, nested
(handoff with its history as one text), parallel, tool (an agent as a tool). API: chat for Chat
Completions.
"""

from __future__ import annotations

import asyncio
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    RunConfig,
    Runner,
    SQLiteSession,
    function_tool,
    set_default_openai_api,
    set_tracing_disabled,
)
from common import CHAT, INSTRUCTIONS, MODE, MODEL, PROMPTS, add, final, get_weather
from pydantic import BaseModel

set_tracing_disabled(True)
if CHAT:
    set_default_openai_api("chat_completions")
TOOLS = [function_tool(get_weather), function_tool(add)]
STATELESS = ModelSettings(store=False, response_include=["reasoning.encrypted_content"])


class Answered(BaseModel):
    """A structured answer."""

    answer: str
    score: float


def specialist() -> Agent:
    """The agent that has the tools."""
    settings = ModelSettings()
    if MODE in ("stateless", "parallel"):
        settings = STATELESS
    if MODE == "required":
        settings = ModelSettings(tool_choice="required")
    return Agent(
        name="Specialist",
        handoff_description="Knows the weather.",
        instructions=INSTRUCTIONS,
        tools=TOOLS,
        model=MODEL,
        model_settings=settings,
        output_type=Answered if MODE == "structured" else None,
    )


def starter() -> Agent:
    """The agent that reads the prompts."""
    inner = specialist()
    if MODE in ("handoff", "nested"):
        return Agent(name="Triage", instructions="Hand it on.", handoffs=[inner], model=MODEL)
    if MODE == "tool":
        tool = inner.as_tool("ask_specialist", "Ask the weather agent.")
        return Agent(name="Outer", instructions="Delegate.", tools=[tool], model=MODEL)
    return inner


async def once(agent: Agent, given: Any, **options: Any) -> Any:
    """One run of an agent, streamed or not."""
    if MODE != "stream":
        return await Runner.run(agent, given, **options)
    result = Runner.run_streamed(agent, given, **options)
    async for _ in result.stream_events():
        pass
    return result


async def converse() -> list[str]:
    """All prompts in one conversation; what is answered to each."""
    agent, texts, history = starter(), [], []
    options: dict[str, Any] = {"session": SQLiteSession("here")} if MODE == "session" else {}
    if MODE == "nameless":
        options["run_config"] = RunConfig(reasoning_item_id_policy="omit")
    if MODE == "nested":
        options["run_config"] = RunConfig(nest_handoff_history=True)
    if MODE == "previous":
        options["auto_previous_response_id"] = True
    for prompt in PROMPTS:
        message = {"role": "user", "content": prompt}
        given = prompt if MODE in ("session", "previous") else [*history, message]
        result = await once(agent, given, **options)
        history = result.to_input_list()
        if MODE == "previous":
            options = {"previous_response_id": result.last_response_id}
        texts.append(str(result.final_output))
    return texts


async def main() -> None:
    """One conversation, or three at once."""
    runs = await asyncio.gather(*(converse() for _ in range(3 if MODE == "parallel" else 1)))
    for texts in zip(*runs, strict=True):
        final(" | ".join(texts))


asyncio.run(main())
