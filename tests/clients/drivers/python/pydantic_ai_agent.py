"""
pydantic-ai. API: chat for Chat Completions.

MODE: run, stream, stateless, nameless (reasoning as text), previous (chained by itself),
json (history kept as JSON), prompt (a system prompt), native.
"""

from __future__ import annotations

import asyncio
from typing import Any

from common import CHAT, INSTRUCTIONS, MODE, MODEL, PROMPTS, add, final, get_weather
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.messages import ModelMessagesTypeAdapter
from pydantic_ai.models.openai import (
    OpenAIChatModel,
    OpenAIResponsesModel,
    OpenAIResponsesModelSettings,
)


class Answered(BaseModel):
    """A structured answer."""

    answer: str
    score: float


SETTINGS = {
    "stateless": OpenAIResponsesModelSettings(
        openai_store=False, openai_reasoning_summary="auto", openai_reasoning_effort="medium"
    ),
    "nameless": OpenAIResponsesModelSettings(openai_send_reasoning_ids=False),
    "previous": OpenAIResponsesModelSettings(openai_previous_response_id="auto"),
}
told = "system_prompt" if MODE == "prompt" else "instructions"
more: dict[str, Any] = {told: INSTRUCTIONS}
if MODE == "native":
    more["output_type"] = NativeOutput(Answered)
model = OpenAIChatModel(MODEL) if CHAT else OpenAIResponsesModel(MODEL)
agent = Agent(model, model_settings=SETTINGS.get(MODE), tools=[get_weather, add], **more)


async def drain(_: object, events: Any) -> None:
    """Read what is streamed."""
    async for _event in events:
        pass


async def main() -> None:
    """All prompts in one conversation."""
    history: Any = None
    for prompt in PROMPTS:
        handler = drain if MODE == "stream" else None
        result = await agent.run(prompt, message_history=history, event_stream_handler=handler)
        history = result.all_messages()
        if MODE == "json":
            kept = ModelMessagesTypeAdapter.dump_json(history)
            history = ModelMessagesTypeAdapter.validate_json(kept)
        final(result.output)


asyncio.run(main())
