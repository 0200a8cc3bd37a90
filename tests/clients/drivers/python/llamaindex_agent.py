"""
LlamaIndex: FunctionAgent. MODE: memory, forgetful (no memory is passed: the second prompt starts
anew), stateless, plain (not streamed), track (chained by itself).

API: chat for Chat Completions, also MODE: react (ReActAgent).
"""

from __future__ import annotations

import asyncio
from typing import Any

from common import BASE_URL, CHAT, INSTRUCTIONS, KEY, MODE, MODEL, PROMPTS, add, final, get_weather
from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.memory import Memory
from llama_index.core.tools import FunctionTool
from llama_index.core.workflow import Context
from llama_index.llms.openai import OpenAI, OpenAIResponses

options: dict[str, Any] = {"model": MODEL, "api_base": BASE_URL, "api_key": KEY}
if MODE == "stateless":
    options |= {"store": False, "include": ["reasoning.encrypted_content"]}
    options["reasoning_options"] = {"effort": "low", "summary": "auto"}
if MODE == "track":
    options["track_previous_responses"] = True


async def main() -> None:
    """All prompts in one conversation."""
    kind = ReActAgent if MODE == "react" else FunctionAgent
    agent = kind(
        tools=[FunctionTool.from_defaults(fn=get_weather), FunctionTool.from_defaults(fn=add)],
        llm=OpenAI(**options) if CHAT else OpenAIResponses(**options),
        system_prompt=INSTRUCTIONS,
        streaming=MODE != "plain",
    )
    context = Context(agent)
    more = {} if MODE == "forgetful" else {"memory": Memory.from_defaults(session_id="here")}
    for prompt in PROMPTS:
        final(await agent.run(prompt, ctx=context, **more))


asyncio.run(main())
