"""AutoGen's OpenAIAgent, which is on Responses and chains by itself."""

from __future__ import annotations

import asyncio

from autogen_agentchat.messages import TextMessage
from autogen_core import CancellationToken
from autogen_ext.agents.openai import OpenAIAgent
from common import INSTRUCTIONS, MODEL, PROMPTS, final
from openai import AsyncOpenAI


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


asyncio.run(main())
