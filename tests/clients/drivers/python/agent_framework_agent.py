"""
Microsoft's Agent Framework. MODE: chained (its default), stream, stateless.

API: chat for Chat Completions, MODE: run, stream.
"""

from __future__ import annotations

import asyncio

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from common import BASE_URL, CHAT, INSTRUCTIONS, KEY, MODE, MODEL, PROMPTS, add, final, get_weather


async def main() -> None:
    """All prompts in one conversation."""
    client = OpenAIChatCompletionClient if CHAT else OpenAIChatClient
    agent = Agent(
        client=client(model=MODEL, api_key=KEY, base_url=BASE_URL),
        instructions=INSTRUCTIONS,
        tools=[get_weather, add],
        default_options={"store": False} if MODE == "stateless" else None,
    )
    session = agent.create_session()
    for prompt in PROMPTS:
        if MODE == "stream":
            updates = [u async for u in agent.run(prompt, session=session, stream=True)]
            final("".join(update.text or "" for update in updates))
        else:
            final((await agent.run(prompt, session=session)).text)


asyncio.run(main())
