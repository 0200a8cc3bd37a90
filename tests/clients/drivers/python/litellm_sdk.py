"""
The litellm SDK. MODE: responses, stream, dump (history as plain dicts), bridge (Chat Completions
in, Responses out), bridge-stream; on Chat Completions chat, chat-stream, chat-dump, chat-async.

STATELESS. EFFORT of reasoning, on Chat Completions.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import litellm
from common import CHAT_TOOLS, INSTRUCTIONS, MODE, MODEL, PROMPTS, TOOLS, call, final

litellm.telemetry = False
more: dict[str, Any] = {}
effort = {"reasoning_effort": os.environ["EFFORT"]} if "EFFORT" in os.environ else {}
if os.environ.get("STATELESS"):
    more = {"store": False, "include": ["reasoning.encrypted_content"]}


def value(item: Any, name: str) -> Any:
    """A field of an item, whichever form it has."""
    return item.get(name) if isinstance(item, dict) else getattr(item, name, None)


def respond(history: list[Any]) -> Any:
    """One turn by litellm.responses."""
    body = {"instructions": INSTRUCTIONS, "tools": TOOLS, "stream": MODE == "stream", **more}
    found = litellm.responses(model=f"openai/{MODEL}", input=history, **body)
    if MODE == "stream":
        events = [event for event in found if "completed" in str(value(event, "type")).lower()]
        found = events[-1].response
    return found


def converse() -> None:
    """The tool loop on Responses."""
    history: list[Any] = []
    for prompt in PROMPTS:
        history.append({"role": "user", "content": prompt})
        while True:
            output = respond(history).output
            history += [item.model_dump() for item in output] if MODE == "dump" else output
            calls = [item for item in output if value(item, "type") == "function_call"]
            if not calls:
                break
            for item in calls:
                text = call(value(item, "name"), value(item, "arguments"))
                made = {"type": "function_call_output", "call_id": value(item, "call_id")}
                history.append({**made, "output": text})
        messages = [item for item in output if value(item, "type") == "message"]
        final("".join(value(part, "text") for part in value(messages[-1], "content")))


def chat(model: str) -> None:
    """The tool loop on Chat Completions, which litellm may turn into Responses."""
    messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}]
    for prompt in PROMPTS:
        messages.append({"role": "user", "content": prompt})
        while True:
            stream = MODE.endswith("-stream")
            body = {"model": model, "messages": messages, "tools": CHAT_TOOLS, **effort}
            if MODE == "chat-async":
                found = asyncio.run(litellm.acompletion(**body))
            else:
                found = litellm.completion(stream=stream, **body)
            if stream:
                found = litellm.stream_chunk_builder(list(found), messages=messages)
            message = found.choices[0].message
            messages.append(message.model_dump() if MODE == "chat-dump" else message)
            if not message.tool_calls:
                break
            for made in message.tool_calls:
                text = call(made.function.name, made.function.arguments)
                messages.append({"role": "tool", "tool_call_id": made.id, "content": text})
        final(message.content)


if MODE.startswith("bridge"):
    chat(f"openai/responses/{MODEL}")
elif MODE.startswith("chat"):
    chat(f"openai/{MODEL}")
else:
    converse()
