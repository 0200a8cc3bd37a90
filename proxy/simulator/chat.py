"""
Chat Completions, answered by the same pure function.

A request is first put into the terms of the other endpoint: messages become items, each default
that the two APIs do not share is written out, and what is named differently gets its other name.
So a request means one context, whichever endpoint it came to, and its answer is one answer: the
same text, the same calls, the same counts. Only reasoning is not shown here, as it never is.

Nothing of this is shared with the proxy, which translates bytes where this reads values.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from proxy.simulator.answers import Answer, Context, visible_text
from proxy.simulator.meaning import item_type
from proxy.simulator.validate import Ledger
from proxy.simulator.values import pieces
from proxy.simulator.wire import ApiError, Item, Json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from proxy.simulator.events import Usage

DONE = "[DONE]"

_SAME_SETTINGS = ("model", "temperature", "top_p", "parallel_tool_calls")
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_CALL_TEXTS = {"function": "arguments", "custom": "input"}
_NO_PARAMETERS = {"type": "object", "properties": {}}


def context_of(body: Mapping[str, Json]) -> Context:
    """The context that a request describes; ApiError 400 for one that is none."""
    messages = body.get("messages")
    if not isinstance(body.get("model"), str):
        raise ApiError(400, "you must provide a model parameter")
    if not isinstance(messages, list) or not messages:
        message = "Missing required parameter: 'messages'."
        raise ApiError(400, message, code="missing_required_parameter", param="messages")
    if body.get("stream_options") is not None and not body.get("stream"):
        message = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
        raise ApiError(400, message, param="stream_options")
    try:
        settings, items = _settings(body), items_of(messages)
    except (KeyError, TypeError, AttributeError) as error:
        raise ApiError(400, f"Invalid request: {error}.") from error
    Ledger().extended(items).check_settled()
    return Context.of(settings, items)


# --- What a request says -------------------------------------------------------------------------


def items_of(messages: Sequence[Mapping[str, Json]]) -> list[Item]:
    """Chat messages as items."""
    items: list[Item] = []
    custom: set[str] = set()
    for index, message in enumerate(messages):
        if message.get("role") not in _ROLES:
            text = f"Invalid value: '{message.get('role')}'."
            raise ApiError(400, text, code="invalid_value", param=f"messages[{index}].role")
        for item in _items(message, custom):
            if item["type"] == "custom_tool_call":
                custom.add(item["call_id"])
            items.append(item)
    return items


def _items(message: Mapping[str, Json], custom: set[str]) -> Iterator[Item]:
    role, content = message["role"], message.get("content")
    if role == "tool":
        call_id = message.get("tool_call_id")
        kind = "custom_tool_call_output" if call_id in custom else "function_call_output"
        yield {"type": kind, "call_id": call_id, "output": _parts(content)}
        return
    calls = message.get("tool_calls") or []
    parts = _parts(content)
    if message.get("refusal"):
        texts = [{"type": "output_text", "text": parts}] if isinstance(parts, str) else parts or []
        parts = [*texts, {"type": "refusal", "refusal": message["refusal"]}]
    if parts or not calls:
        yield {"type": "message", "role": role, "content": parts or ""}
    for call in calls:
        kind = call["type"]
        called, key = call[kind], _CALL_TEXTS[kind]
        name = {"call_id": call["id"], "name": called["name"]}
        kind = "custom_tool_call" if kind == "custom" else "function_call"
        yield {"type": kind, **name, key: called[key]}


def _parts(content: Json) -> Json:
    return [_part(part) for part in content] if isinstance(content, list) else content


def _part(part: Mapping[str, Json]) -> Json:
    match part.get("type"):
        case "image_url":
            image = part["image_url"]
            detail = image.get("detail") or "auto"
            return {"type": "input_image", "image_url": image["url"], "detail": detail}
        case "file":
            return {"type": "input_file", **part["file"]}
        case _:
            return dict(part)


def _settings(body: Mapping[str, Json]) -> dict[str, Json]:
    """The settings that an answer depends on, by the names of the Responses API."""
    limit = body.get("max_completion_tokens")
    effort, verbosity = body.get("reasoning_effort"), body.get("verbosity")
    form = body.get("response_format")
    text = {"format": form and _format(form), "verbosity": verbosity}
    text = {key: value for key, value in text.items() if value is not None}
    return {
        **{name: body.get(name) for name in _SAME_SETTINGS},
        "tools": [_tool(tool) for tool in body.get("tools") or []] or None,
        "tool_choice": _choice(body.get("tool_choice")),
        "max_output_tokens": body.get("max_tokens") if limit is None else limit,
        "reasoning": None if effort is None else {"effort": effort},
        "text": text or None,
    }


def _format(form: Mapping[str, Json]) -> Json:
    if form["type"] != "json_schema":
        return dict(form)
    given = {key: value for key, value in form["json_schema"].items() if value is not None}
    return {"type": "json_schema", "strict": False, **given}


def _tool(tool: Mapping[str, Json]) -> Json:
    kind = tool.get("type")
    if kind not in _CALL_TEXTS or not isinstance(tool.get(kind), dict):
        raise ApiError(400, f"Invalid value: '{kind}'.", code="invalid_value", param="tools")
    given = {key: value for key, value in tool[kind].items() if value is not None}
    if kind == "function":
        return {"type": kind, "strict": False, "parameters": _NO_PARAMETERS, **given}
    form = given.get("format")
    if form is not None and form["type"] == "grammar":
        given["format"] = {"type": "grammar", **form["grammar"]}
    return {"type": kind, **given}


def _choice(choice: Json) -> Json:
    if not isinstance(choice, dict):
        return choice
    kind = choice["type"]
    if kind == "allowed_tools":
        allowed = choice[kind]
        tools = [_choice(tool) for tool in allowed["tools"]]
        return {"type": kind, "mode": allowed["mode"], "tools": tools}
    return {"type": kind, "name": choice[kind]["name"]}


# --- What is answered ----------------------------------------------------------------------------


def completion(
    body: Mapping[str, Json], found: Answer, usage: Usage, identity: str
) -> dict[str, Json]:
    """The JSON of a reply that is not streamed."""
    text, calls = _message_parts(found)
    message: dict[str, Json] = {"role": "assistant", "content": text, "refusal": None}
    message["annotations"] = []
    if calls:
        message["tool_calls"] = calls
    finish = _finish_reason(found, calls)
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
    head = _head(body, identity, "chat.completion")
    return {**head, "choices": [choice], "usage": _counted(usage)}


def chunks(
    body: Mapping[str, Json], found: Answer, usage: Usage, identity: str
) -> Iterator[dict[str, Json]]:
    """The JSON of each chunk of a streamed reply; `[DONE]` follows them."""
    head = _head(body, identity, "chat.completion.chunk")
    wants_usage = (body.get("stream_options") or {}).get("include_usage")
    no_usage = {"usage": None} if wants_usage else {}
    text, calls = _message_parts(found)

    def chunk(delta: Mapping[str, Json], finish: str | None = None) -> dict[str, Json]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**head, "choices": [choice], **no_usage}

    yield chunk({"role": "assistant", "content": "", "refusal": None})
    for piece in pieces(text or ""):
        yield chunk({"content": piece})
    for index, call in enumerate(calls):
        kind = call["type"]
        key, called = _CALL_TEXTS[kind], call[kind]
        opening = {"index": index, **call, kind: {"name": called["name"], key: ""}}
        yield chunk({"tool_calls": [opening]})
        for piece in pieces(called[key]):
            yield chunk({"tool_calls": [{"index": index, kind: {key: piece}}]})
    yield chunk({}, _finish_reason(found, calls))
    if wants_usage:
        yield {**head, "choices": [], "usage": _counted(usage)}


def _head(body: Mapping[str, Json], identity: str, kind: str) -> dict[str, Json]:
    return {"id": identity, "object": kind, "created": int(time.time()), "model": body["model"]}


def _counted(usage: Usage) -> dict[str, Json]:
    return {
        "prompt_tokens": usage.input,
        "completion_tokens": usage.output,
        "total_tokens": usage.input + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def _finish_reason(found: Answer, calls: Sequence[Item]) -> str:
    if found.incomplete is not None:
        return "content_filter" if found.incomplete == "content_filter" else "length"
    return "tool_calls" if calls else "stop"


def _message_parts(found: Answer) -> tuple[str | None, list[Item]]:
    texts = [visible_text(item) for item in found.items if item_type(item) == "message"]
    calls = [call for item in found.items if (call := _shown_call(item)) is not None]
    text = "".join(texts)
    return (text if text or not calls else None), calls


def _shown_call(item: Item) -> Item | None:
    kind = {"function_call": "function", "custom_tool_call": "custom"}.get(item_type(item))
    if kind is None:
        return None
    called = {"name": item["name"], _CALL_TEXTS[kind]: visible_text(item)}
    return {"id": item["call_id"], "type": kind, kind: called}
