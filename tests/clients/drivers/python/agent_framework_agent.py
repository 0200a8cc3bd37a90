"""Microsoft's Agent Framework on Responses. MODE: chained (its default), stream, stateless."""

from __future__ import annotations

import asyncio

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient
from common import BASE_URL, INSTRUCTIONS, KEY, MODE, MODEL, PROMPTS, add, final, get_weather


async def main() -> None:
    """All prompts in one conversation."""
    agent = Agent(
        client=OpenAIChatClient(model=MODEL, api_key=KEY, base_url=BASE_URL),
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
