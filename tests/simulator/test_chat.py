"""The simulator's Chat Completions: what a request means there is what it means to Responses."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.simulator.answers import AnswerOptions, Context, answer
from proxy.simulator.chat import chunks, completion, context_of
from proxy.simulator.engine import usage_of
from proxy.simulator.wire import ApiError

HELLO = {"role": "user", "content": "Hello."}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"name": "look", "parameters": SCHEMA}
GRAMMAR = {"syntax": "lark", "definition": "start: /a/"}


def call(number: int, kind: str, **called: Any) -> Any:
    """A tool call in Chat's terms."""
    return {"id": f"call_{number}", "type": kind, kind: {"name": "look", **called}}


# Fields of a Chat request, and of the Responses request that means the same.
SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"temperature": 0.5, "top_p": 1, "parallel_tool_calls": False},) * 2,
    ({"max_tokens": 20}, {"max_output_tokens": 20}),
    ({"max_completion_tokens": 20}, {"max_output_tokens": 20}),
    ({"reasoning_effort": "low"}, {"reasoning": {"effort": "low"}}),
    ({"verbosity": "low"}, {"text": {"verbosity": "low"}}),
    ({"response_format": {"type": "json_object"}}, {"text": {"format": {"type": "json_object"}}}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}},
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": False}}},
    ),
    (
        {"tools": [{"type": "function", "function": FUNCTION}]},
        {"tools": [{"type": "function", **FUNCTION, "strict": False}]},
    ),
    (
        {"tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}]},
        {"tools": [{"type": "function", **FUNCTION, "strict": True}]},
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "ping"}}]},
        {
            "tools": [
                {
                    "type": "function",
                    "name": "ping",
                    "parameters": {"type": "object", "properties": {}},
                    "strict": False,
                }
            ]
        },
    ),
    (
        {
            "tools": [
                {
                    "type": "custom",
                    "custom": {"name": "s", "format": {"type": "grammar", "grammar": GRAMMAR}},
                }
            ]
        },
        {"tools": [{"type": "custom", "name": "s", "format": {"type": "grammar", **GRAMMAR}}]},
    ),
    (
        {"tool_choice": {"type": "function", "function": {"name": "look"}}},
        {"tool_choice": {"type": "function", "name": "look"}},
    ),
    (
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "look"}}],
                },
            }
        },
        {
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "look"}],
            }
        },
    ),
    ({"user": "u", "metadata": {"a": "b"}, "seed": 1, "stream": True}, {}),
]


@pytest.mark.parametrize(("asked", "same"), SETTINGS)
def test_settings_mean_what_they_mean_to_responses(asked, same):
    """Other names, other nesting and other defaults are one context."""
    one = context_of({"model": "m", "messages": [HELLO], **asked})

    assert one.digest == Context.of({"model": "m", **same}, [HELLO]).digest


MESSAGES: list[tuple[list[Any], list[Any]]] = [
    ([{"role": "system", "content": "Be brief."}, HELLO],) * 2,
    (
        [{"role": "user", "content": [{"type": "text", "text": "Hello."}]}],
        [HELLO],
    ),
    (
        [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "u"}},
                    {"type": "file", "file": {"file_id": "f"}},
                ],
            }
        ],
        [
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": "u", "detail": "auto"},
                    {"type": "input_file", "file_id": "f"},
                ],
            }
        ],
    ),
    (
        [
            HELLO,
            {
                "role": "assistant",
                "content": "Hm.",
                "tool_calls": [call(1, "function", arguments="{}"), call(2, "custom", input="x")],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "1"},
            {"role": "tool", "tool_call_id": "call_2", "content": "2"},
        ],
        [
            HELLO,
            {"role": "assistant", "content": "Hm."},
            {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "call_2", "name": "look", "input": "x"},
            {"type": "function_call_output", "call_id": "call_1", "output": "1"},
            {"type": "custom_tool_call_output", "call_id": "call_2", "output": "2"},
        ],
    ),
    (
        [HELLO, {"role": "assistant", "content": None, "refusal": "No."}, HELLO],
        [
            HELLO,
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            HELLO,
        ],
    ),
    ([HELLO, {"role": "assistant", "content": ""}, HELLO],) * 2,
]


@pytest.mark.parametrize(("messages", "items"), MESSAGES)
def test_messages_mean_what_items_mean(messages, items):
    """Each form of a message is one context with the items that say the same."""
    one = context_of({"model": "m", "messages": messages})

    assert one.digest == Context.of({"model": "m"}, items).digest


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [HELLO]},
        {"model": "m"},
        {"model": "m", "messages": []},
        {"model": "m", "messages": ["Hello."]},
        {"model": "m", "messages": [{"role": "function", "content": "x"}]},
        {"model": "m", "messages": [HELLO], "tools": [{"type": "web_search"}]},
        {"model": "m", "messages": [HELLO], "stream_options": {}},
        {"model": "m", "messages": [{"role": "tool", "tool_call_id": "c", "content": "x"}]},
    ],
)
def test_what_is_no_chat_request_is_refused(body):
    """A request that the API would refuse is answered 400, and by nothing else."""
    with pytest.raises(ApiError) as info:
        context_of(body)

    assert info.value.problem.status == 400


def test_chunks_add_up_to_the_completion():
    """Both ways to reply say the same, call by call."""
    tools = [
        {"type": "function", "function": FUNCTION},
        {"type": "custom", "custom": {"name": "s"}},
    ]
    asked = {"role": "user", "content": "[calls=2] Go."}
    body = {"model": "m", "messages": [asked], "tools": tools}
    context = context_of(body)
    found = answer(context, AnswerOptions(parallel_every=1, commentary_every=1))
    usage = usage_of(context, found.tokens)

    whole = completion(body, found, usage, "chatcmpl-1")["choices"][0]
    told = list(chunks(body, found, usage, "chatcmpl-1"))
    deltas = [chunk["choices"][0]["delta"] for chunk in told]
    calls = [piece for delta in deltas for piece in delta.get("tool_calls", ())]

    assert "".join(delta.get("content") or "" for delta in deltas) == whole["message"]["content"]
    assert [piece["id"] for piece in calls if "id" in piece] == [
        call["id"] for call in whole["message"]["tool_calls"]
    ]
    assert told[-1]["choices"][0]["finish_reason"] == whole["finish_reason"] == "tool_calls"
