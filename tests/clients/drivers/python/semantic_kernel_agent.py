"""
Semantic Kernel's OpenAIResponsesAgent. MODE: chained (its default), stateless.

API: chat for its ChatCompletionAgent, MODE: run, stream.
"""

from __future__ import annotations

import asyncio
from typing import Any

import common
from common import CHAT, INSTRUCTIONS, MODE, MODEL, PROMPTS, final
from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent, OpenAIResponsesAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function


class Tools:
    """The plugin."""

    @kernel_function(name="get_weather", description="Get the current weather for a city.")
    def get_weather(self, city: str, unit: str = "c") -> str:
        """Get the current weather for a city."""
        return common.get_weather(city, unit)

    @kernel_function(name="add", description="Add two numbers.")
    def add(self, a: float, b: float) -> str:
        """Add two numbers."""
        return common.add(a, b)


async def chat() -> None:
    """All prompts in one conversation, on Chat Completions."""
    agent = ChatCompletionAgent(
        service=OpenAIChatCompletion(ai_model_id=MODEL, async_client=AsyncOpenAI()),
        name="weather",
        instructions=INSTRUCTIONS,
        plugins=[Tools()],
    )
    thread: Any = None
    for prompt in PROMPTS:
        text = ""
        if MODE == "stream":
            async for piece in agent.invoke_stream(messages=prompt, thread=thread):
                text, thread = text + str(piece.content), piece.thread
        else:
            reply = await agent.get_response(messages=prompt, thread=thread)
            text, thread = str(reply), reply.thread
        final(text)


async def main() -> None:
    """All prompts in one conversation."""
    agent = OpenAIResponsesAgent(
        ai_model_id=MODEL,
        client=AsyncOpenAI(),
        instructions=INSTRUCTIONS,
        name="weather",
        plugins=[Tools()],
        store_enabled=MODE != "stateless",
    )
    thread: Any = None
    for prompt in PROMPTS:
        reply = await agent.get_response(messages=prompt, thread=thread)
        thread = reply.thread
        final(reply)


asyncio.run(chat() if CHAT else main())
