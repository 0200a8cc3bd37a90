"""
agno. MODE: chained (its default for reasoning models), stream, stateless, plain.

API: chat for Chat Completions, MODE: run, stream.
"""

from __future__ import annotations

from typing import Any

from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from agno.models.openai import OpenAIChat, OpenAIResponses
from common import CHAT, INSTRUCTIONS, MODE, MODEL, PROMPTS, add, final, get_weather

options: dict[str, Any] = {"id": "gpt-4.1" if MODE == "plain" else MODEL}
if MODE == "stateless":
    options |= {"store": False, "include": ["reasoning.encrypted_content"]}
    options["reasoning_summary"] = "auto"
agent = Agent(
    model=OpenAIChat(**options) if CHAT else OpenAIResponses(**options),
    tools=[get_weather, add],
    instructions=INSTRUCTIONS,
    db=InMemoryDb(),
    add_history_to_context=True,
    telemetry=False,
    session_id="here",
)
for prompt in PROMPTS:
    if MODE == "stream":
        events = agent.run(prompt, stream=True)
        final("".join(str(getattr(event, "content", "") or "") for event in events))
    else:
        final(agent.run(prompt).content)
