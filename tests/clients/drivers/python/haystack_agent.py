"""
Haystack's Agent on OpenAIResponsesChatGenerator. MODE: run, stream, stateless.

API: chat for OpenAIChatGenerator.
"""

from __future__ import annotations

from typing import Any

from common import BASE_URL, CHAT, INSTRUCTIONS, MODE, MODEL, PROMPTS, add, final, get_weather
from haystack.components.agents import Agent
from haystack.components.generators.chat import (
    OpenAIChatGenerator,
    OpenAIResponsesChatGenerator,
)
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function

options: dict[str, Any] = {}
if MODE == "stateless":
    reasoning = {"effort": "low", "summary": "auto"}
    include = ["reasoning.encrypted_content"]
    options = {"generation_kwargs": {"store": False, "include": include, "reasoning": reasoning}}


def ignore(_: object) -> None:
    """Take what is streamed."""


generator = OpenAIChatGenerator if CHAT else OpenAIResponsesChatGenerator
agent = Agent(
    chat_generator=generator(model=MODEL, api_base_url=BASE_URL, **options),
    tools=[create_tool_from_function(get_weather), create_tool_from_function(add)],
    system_prompt=INSTRUCTIONS,
    streaming_callback=ignore if MODE == "stream" else None,
)
messages: list[Any] = []
for prompt in PROMPTS:
    found = agent.run(messages=[*messages, ChatMessage.from_user(prompt)])["messages"]
    messages = [message for message in found if not message.is_from("system")]
    final(messages[-1].text)
