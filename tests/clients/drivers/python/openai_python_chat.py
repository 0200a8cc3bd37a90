"""
openai, the Python SDK, with the tool loop that most people write by hand on Chat Completions.

MODE: create, stream (helper), dump (messages as plain dicts) or async.
"""

from __future__ import annotations

import asyncio
from typing import Any

from common import CHAT_TOOLS, INSTRUCTIONS, MODE, MODEL, PROMPTS, call, final
from openai import AsyncOpenAI, OpenAI

client = OpenAI()


def create(**body: Any) -> Any:
    """One turn, not streamed."""
    return client.chat.completions.create(**body)


def stream(**body: Any) -> Any:
    """One turn by the stream helper."""
    options = {"include_usage": True}
    with client.chat.completions.stream(stream_options=options, **body) as chunks:
        return chunks.get_final_completion()


def in_a_loop(**body: Any) -> Any:
    """One turn by the asynchronous client, in an event loop of its own."""

    async def once() -> Any:
        async with AsyncOpenAI() as asynchronous:
            return await asynchronous.chat.completions.create(**body)

    return asyncio.run(once())


ASK = {"create": create, "dump": create, "stream": stream, "async": in_a_loop}[MODE]

messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}]
for prompt in PROMPTS:
    messages.append({"role": "user", "content": prompt})
    while True:
        message = ASK(model=MODEL, messages=messages, tools=CHAT_TOOLS).choices[0].message
        messages.append(message.model_dump() if MODE == "dump" else message)
        if not message.tool_calls:
            break
        for made in message.tool_calls:
            output = call(made.function.name, made.function.arguments)
            messages.append({"role": "tool", "tool_call_id": made.id, "content": output})
    final(message.content)
