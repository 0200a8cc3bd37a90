"""
Strands Agents on OpenAIResponsesModel. MODE: default, stateless.

API: chat for OpenAIModel, which is on Chat Completions.
"""

from __future__ import annotations

from typing import Any

from common import BASE_URL, CHAT, INSTRUCTIONS, KEY, MODE, MODEL, PROMPTS, add, final, get_weather
from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel

options: dict[str, Any] = {}
if MODE == "stateless":
    options = {"params": {"include": ["reasoning.encrypted_content"], "store": False}}
kind = OpenAIModel if CHAT else OpenAIResponsesModel
agent = Agent(
    model=kind(client_args={"api_key": KEY, "base_url": BASE_URL}, model_id=MODEL, **options),
    tools=[tool(get_weather), tool(add)],
    system_prompt=INSTRUCTIONS,
    callback_handler=None,
)
for prompt in PROMPTS:
    final(agent(prompt))
