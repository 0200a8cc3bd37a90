"""
openai, the Python SDK, with the tool loop that most people write by hand.

MODE: create, stream, items (kept from the stream one by one), helper, parse, dump (history as plain
dicts) or async. STATELESS=1 adds store:false and encrypted reasoning.
"""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

from common import INSTRUCTIONS, MODE, MODEL, PROMPTS, TOOLS, call, final
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

client = OpenAI()
more: dict[str, Any] = {}
if os.environ.get("STATELESS"):
    more = {"store": False, "include": ["reasoning.encrypted_content"]}


class Answered(BaseModel):
    """What the parse helper asks for."""

    answer: str


def create(**body: Any) -> Any:
    """One turn, not streamed."""
    return client.responses.create(**body)


def parse(**body: Any) -> Any:
    """One turn by the helper that parses the final message."""
    return client.responses.parse(text_format=Answered, **body)


def stream(**body: Any) -> Any:
    """One turn, streamed, the response taken from the terminal event."""
    events = client.responses.create(stream=True, **body)
    return next(event.response for event in events if event.type == "response.completed")


def items(**body: Any) -> Any:
    """One turn, streamed, the items kept as they come."""
    output, text = [], ""
    for event in client.responses.create(stream=True, **body):
        if event.type == "response.output_item.done":
            output.append(event.item)
        elif event.type == "response.output_text.done":
            text = event.text
    return SimpleNamespace(output=output, output_text=text)


def helper(**body: Any) -> Any:
    """One turn by the stream helper."""
    with client.responses.stream(**body) as events:
        return events.get_final_response()


def dump(**body: Any) -> Any:
    """One turn, its items turned into dicts with all their nulls."""
    response = client.responses.create(**body)
    output = [item.model_dump() for item in response.output]
    return SimpleNamespace(output=output, output_text=response.output_text)


def in_a_loop(**body: Any) -> Any:
    """One turn by the asynchronous client, in an event loop of its own."""

    async def once() -> Any:
        async with AsyncOpenAI() as asynchronous:
            return await asynchronous.responses.create(**body)

    return asyncio.run(once())


ASK = {
    "create": create,
    "parse": parse,
    "stream": stream,
    "items": items,
    "helper": helper,
    "dump": dump,
    "async": in_a_loop,
}[MODE]


def value(item: Any, name: str) -> Any:
    """A field of an item, whichever form it is kept in."""
    return item[name] if isinstance(item, dict) else getattr(item, name)


history: list[Any] = []
for prompt in PROMPTS:
    history.append({"role": "user", "content": prompt})
    while True:
        response = ASK(model=MODEL, instructions=INSTRUCTIONS, tools=TOOLS, input=history, **more)
        history += response.output
        calls = [item for item in response.output if value(item, "type") == "function_call"]
        if not calls:
            break
        for item in calls:
            output = call(value(item, "name"), value(item, "arguments"))
            made = {"type": "function_call_output", "call_id": value(item, "call_id")}
            history.append({**made, "output": output})
    final(response.output_text)
