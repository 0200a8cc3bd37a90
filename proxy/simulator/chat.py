"""
Chat Completions, answered by the same pure function.

Messages become items, tools become the Responses API's, and the answer's items become a message:
so the Chat side is a witness of its context too.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from proxy.simulator.answers import Answer, AnswerOptions, Context, answer, visible_text
from proxy.simulator.meaning import item_type
from proxy.simulator.validate import Ledger
from proxy.simulator.values import pieces
from proxy.simulator.wire import ApiError, Item, Json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

DONE = "[DONE]"


def items_of(messages: Sequence[Mapping[str, Json]]) -> list[Item]:
    """Chat messages as items."""
    return [item for message in messages for item in _items(message)]


def _items(message: Mapping[str, Json]) -> Iterator[Item]:
    role, content = message.get("role"), message.get("content")
    if role == "tool":
        call_id = message.get("tool_call_id")
        yield {"type": "function_call_output", "call_id": call_id, "output": content}
        return
    if content:
        yield {"type": "message", "role": role, "content": content}
    for call in message.get("tool_calls") or []:
        yield {"type": "function_call", "call_id": call["id"], **call["function"]}


def answer_chat(body: Mapping[str, Json], options: AnswerOptions) -> Answer:
    """The answer to a Chat Completions request; ApiError 400 for one that is none."""
    if not isinstance(body.get("messages"), list) or not isinstance(body.get("model"), str):
        raise ApiError(400, "'model' and 'messages' are required properties")
    tools = [
        {"type": "function", **tool["function"]}
        for tool in body.get("tools") or []
        if tool.get("type") == "function"
    ]
    items = items_of(body["messages"])
    Ledger().extended(items).check_settled()
    return answer(Context.of({**body, "tools": tools}, items), options)


def completion(body: Mapping[str, Json], found: Answer, identity: str) -> dict[str, Json]:
    """The JSON of a reply that is not streamed."""
    text, calls = _message_parts(found)
    message: dict[str, Json] = {"role": "assistant", "content": text, "refusal": None}
    if calls:
        message["tool_calls"] = calls
    finish = "tool_calls" if calls else "length" if found.incomplete else "stop"
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
    head = _head(body, identity, "chat.completion")
    return {**head, "choices": [choice], "usage": _usage(found)}


def chunks(body: Mapping[str, Json], found: Answer, identity: str) -> Iterator[dict[str, Json]]:
    """The JSON of each chunk of a streamed reply; `[DONE]` follows them."""
    head = _head(body, identity, "chat.completion.chunk")
    text, calls = _message_parts(found)

    def chunk(delta: Mapping[str, Json], finish: str | None = None) -> dict[str, Json]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**head, "choices": [choice]}

    yield chunk({"role": "assistant", "content": "", "refusal": None})
    for piece in pieces(text or ""):
        yield chunk({"content": piece})
    for index, call in enumerate(calls):
        opening = {"name": call["function"]["name"], "arguments": ""}
        yield chunk({"tool_calls": [{**call, "index": index, "function": opening}]})
        for piece in pieces(call["function"]["arguments"]):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    yield chunk({}, "tool_calls" if calls else "length" if found.incomplete else "stop")
    if (body.get("stream_options") or {}).get("include_usage"):
        yield {**head, "choices": [], "usage": _usage(found)}


def _head(body: Mapping[str, Json], identity: str, kind: str) -> dict[str, Json]:
    return {"id": identity, "object": kind, "created": int(time.time()), "model": body["model"]}


def _usage(found: Answer) -> dict[str, Json]:
    return {"prompt_tokens": 1, "completion_tokens": found.tokens, "total_tokens": found.tokens + 1}


def _message_parts(found: Answer) -> tuple[str | None, list[Item]]:
    texts = [visible_text(item) for item in found.items if item_type(item) == "message"]
    calls = [
        {
            "id": item["call_id"],
            "type": "function",
            "function": {"name": item["name"], "arguments": item["arguments"]},
        }
        for item in found.items
        if item_type(item) == "function_call"
    ]
    return ("".join(texts) or None), calls
