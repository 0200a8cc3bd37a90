"""Google's ADK on Chat Completions by litellm."""

from __future__ import annotations

import asyncio

from common import INSTRUCTIONS, MODEL, PROMPTS, add, final, get_weather
from google.adk.agents import LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types


async def main() -> None:
    """All prompts in one conversation."""
    agent = LlmAgent(
        name="weather",
        model=LiteLlm(model=f"openai/{MODEL}"),
        instruction=INSTRUCTIONS,
        tools=[get_weather, add],
    )
    runner = InMemoryRunner(agent=agent, app_name="app")
    session = await runner.session_service.create_session(app_name="app", user_id="someone")
    for prompt in PROMPTS:
        message = types.Content(role="user", parts=[types.Part(text=prompt)])
        text = ""
        async for event in runner.run_async(
            user_id="someone", session_id=session.id, new_message=message
        ):
            parts = event.content.parts if event.content else []
            text = "".join(part.text or "" for part in parts) or text
        final(text)


asyncio.run(main())
