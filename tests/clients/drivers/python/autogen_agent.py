"""
AutoGen's OpenAIAgent, which is on Responses and chains by itself.

API: chat for its AssistantAgent on Chat Completions, MODE: run, stream, reflect.
"""

from __future__ import annotations

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import TextMessage
from autogen_core import CancellationToken
from autogen_ext.agents.openai import OpenAIAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from common import (
    BASE_URL,
    CHAT,
    INSTRUCTIONS,
    KEY,
    MODE,
    MODEL,
    PROMPTS,
    add,
    final,
    get_weather,
)
from openai import AsyncOpenAI

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "family": "unknown",
    "structured_output": True,
}


async def chat() -> None:
    """All prompts in one conversation, on Chat Completions."""
    agent = AssistantAgent(
        "weather",
        model_client=OpenAIChatCompletionClient(
            model=MODEL, model_info=INFO, base_url=BASE_URL, api_key=KEY
        ),
        tools=[get_weather, add],
        system_message=INSTRUCTIONS,
        max_tool_iterations=2 if MODE == "reflect" else 5,
        model_client_stream=MODE == "stream",
        reflect_on_tool_use=MODE == "reflect",
    )
    for prompt in PROMPTS:
        final((await agent.run(task=prompt)).messages[-1].content)


async def main() -> None:
    """All prompts in one conversation."""
    agent = OpenAIAgent(
        name="weather",
        description="Knows the weather.",
        client=AsyncOpenAI(),
        model=MODEL,
        instructions=INSTRUCTIONS,
    )
    for prompt in PROMPTS:
        message = TextMessage(content=prompt, source="user")
        reply = await agent.on_messages([message], CancellationToken())
        final(reply.chat_message.content)


asyncio.run(chat() if CHAT else main())
