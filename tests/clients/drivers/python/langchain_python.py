"""
LangChain: ChatOpenAI with a langgraph agent. API: chat for Chat Completions.

MODE: react, create (create_agent), previous (chained by itself). STREAM, VERSION (output version),
STATELESS.
"""

from __future__ import annotations

import os
from typing import Any

from common import CHAT, INSTRUCTIONS, MODE, MODEL, PROMPTS, add, final, get_weather
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

STREAM = bool(os.environ.get("STREAM"))
options: dict[str, Any] = {"use_responses_api": not CHAT, "streaming": STREAM}
if version := os.environ.get("VERSION"):
    options["output_version"] = version
if os.environ.get("STATELESS"):
    options |= {
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "medium", "summary": "auto"},
    }
if MODE == "previous":
    options["use_previous_response_id"] = True
model = ChatOpenAI(model=MODEL, **options)
tools = [tool(get_weather), tool(add)]


def create() -> None:
    """LangChain's own agent, its history passed on by hand."""
    from langchain.agents import create_agent

    agent = create_agent(model, tools, system_prompt=INSTRUCTIONS)
    messages: list[Any] = []
    for prompt in PROMPTS:
        messages = agent.invoke({"messages": [*messages, ("user", prompt)]})["messages"]
        final(messages[-1].text)


def react() -> None:
    """langgraph's prebuilt agent, its history in a checkpointer."""
    from langgraph.checkpoint.memory import MemorySaver
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(model, tools, prompt=INSTRUCTIONS, checkpointer=MemorySaver())
    thread = {"configurable": {"thread_id": "here"}}
    for prompt in PROMPTS:
        given = {"messages": [("user", prompt)]}
        if STREAM:
            for _ in agent.stream(given, thread, stream_mode="messages"):
                pass
        else:
            agent.invoke(given, thread)
        final(agent.get_state(thread).values["messages"][-1].text)


create() if MODE == "create" else react()
