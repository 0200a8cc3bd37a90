"""Chat Completions requests: translated without loss, or refused by the name of a field."""

from __future__ import annotations

import json
import typing
from typing import Any

import pytest
from builders import dump
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.chat_request import (
    FIELDS,
    ChatSettings,
    Fate,
    Untranslatable,
    chat_settings,
    cursor_settings,
    message_items,
    reference_table,
    translate,
)
from proxy.core.items import Fingerprinter, Item
from proxy.core.request import Setting, parse_body, read_envelope

FINGERPRINTS = Fingerprinter(b"0123456789abcdef")
NAMES = {row.name for row in FIELDS}


def items(*messages: Any) -> list[Any]:
    """Translate messages and parse what comes out."""
    return [json.loads(raw) for raw in translate([dump(each) for each in messages]).items]


def fields(body: Any) -> list[Setting]:
    """Return a body's fields as settings."""
    return [Setting(key, dump(value)) for key, value in body.items()]


def settings(**body: Any) -> dict[str, Any]:
    """Translate a Chat body's fields and parse what comes out."""
    made = chat_settings(fields({"model": "m", **body}))
    return {setting.key: json.loads(setting.raw) for setting in made.settings}


def cursor(**body: Any) -> dict[str, Any]:
    """Translate the fields of a Responses body that came to the Chat path."""
    made = cursor_settings(fields({"model": "m", **body}))
    return {setting.key: json.loads(setting.raw) for setting in made.settings}


def function(name: str = "look", **more: Any) -> Any:
    """Return a function tool as Chat has it."""
    return {"type": "function", "function": {"name": name, **more}}


def call(number: int, arguments: str = "{}", **more: Any) -> Any:
    """Return a tool call as Chat has it."""
    called = {"name": "look", "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": called, **more}


def custom_call(number: int, said: str = "echo") -> Any:
    """Return a call of a custom tool as Chat has it."""
    return {"id": f"call_{number}", "type": "custom", "custom": {"name": "sh", "input": said}}


def assistant(content: Any = None, *calls: Any, **more: Any) -> Any:
    """Return an assistant's message; `...` leaves the content out."""
    made = {"role": "assistant", **({} if content is ... else {"content": content}), **more}
    return {**made, "tool_calls": list(calls)} if calls else made


def said(content: Any) -> Any:
    """Return the item of an assistant's message."""
    return {"role": "assistant", "content": content}


def called(number: int, arguments: str = "{}") -> Any:
    """Return the item of `call(number)`."""
    head = {"type": "function_call", "call_id": f"call_{number}", "name": "look"}
    return {**head, "arguments": arguments}


# --- Messages -----------------------------------------------------------------------------------

TEXT = {"type": "text", "text": "Hi"}
MARK = {"prompt_cache_breakpoint": {"mode": "explicit"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
SHARP = {"type": "image_url", "image_url": {"url": "https://x/y.png", "detail": "high"}}
FILE = {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf,x"}}
STORED_FILE = {"type": "file", "file": {"file_id": "file-1", "filename": None}}
SEEN = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "auto"}
LEAKED = {"role": "assistant", "refusal": None, "annotations": [], "reasoning_content": "Hm."}

MESSAGES: dict[str, tuple[Any, list[Any]]] = {
    "user": ({"role": "user", "content": "Hi"}, [{"role": "user", "content": "Hi"}]),
    "user says nothing": ({"role": "user", "content": ""}, [{"role": "user", "content": ""}]),
    "system": ({"role": "system", "content": "Be."}, [{"role": "system", "content": "Be."}]),
    "developer": (
        {"content": [TEXT], "role": "developer"},
        [{"role": "developer", "content": [{"type": "input_text", "text": "Hi"}]}],
    ),
    "user with an image": (
        {"role": "user", "content": [TEXT, IMAGE]},
        [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}, SEEN]}],
    ),
    "image with a detail and a mark": (
        {"role": "user", "content": [{**SHARP, **MARK}]},
        [
            {
                "role": "user",
                "content": [
                    {
                        "type": "input_image",
                        "image_url": "https://x/y.png",
                        "detail": "high",
                        **MARK,
                    }
                ],
            }
        ],
    ),
    "files": (
        {"role": "user", "content": [FILE, STORED_FILE]},
        [
            {
                "role": "user",
                "content": [
                    {"type": "input_file", **FILE["file"]},
                    {"type": "input_file", "file_id": "file-1"},
                ],
            }
        ],
    ),
    "nulls": (
        {"role": "user", "content": "Hi", "name": None, "x": None},
        [{"role": "user", "content": "Hi"}],
    ),
    "assistant": (assistant("Hi"), [said("Hi")]),
    "assistant in one part": (assistant([TEXT]), [said("Hi")]),
    "assistant in two parts": (
        assistant([TEXT, {"type": "text", "text": ""}, TEXT]),
        [said([{"type": "output_text", "text": "Hi"}] * 2)],
    ),
    "assistant says nothing": (assistant(""), [said("")]),
    "assistant says nothing in a part": (assistant([{"type": "text", "text": ""}]), [said("")]),
    "SDK's leftovers": (
        assistant(
            "Hi",
            refusal=None,
            annotations=[{"type": "url_citation"}],
            audio=None,
            function_call=None,
            parsed={"a": 1},
            tool_calls=[],
            reasoning_content="Hm.",
            reasoning="Hm.",
        ),
        [said("Hi")],
    ),
    "null tool calls": (assistant("Hi", tool_calls=None), [said("Hi")]),
    "a reply's fields inside the part": (assistant([{**TEXT, **LEAKED}]), [said("Hi")]),
    "a reply's calls inside the part": (
        assistant([{**TEXT, **LEAKED, "tool_calls": [call(1)]}], call(1)),
        [said("Hi"), called(1)],
    ),
    "refusal": (
        assistant(None, refusal="No."),
        [said([{"type": "refusal", "refusal": "No."}])],
    ),
    "refusal as a part": (
        assistant([TEXT, {"type": "refusal", "refusal": "No."}]),
        [said([{"type": "output_text", "text": "Hi"}, {"type": "refusal", "refusal": "No."}])],
    ),
    "calls, null content": (assistant(None, call(1)), [called(1)]),
    "calls, no content": (assistant(..., call(1)), [called(1)]),
    "calls, empty content": (assistant("", call(1)), [called(1)]),
    "calls, an empty part": (assistant([{"type": "text", "text": ""}], call(1)), [called(1)]),
    "calls, no parts": (assistant([], call(1)), [called(1)]),
    "text and two calls": (
        assistant("Hi", call(1, '{"a": 1.0}'), call(2, "")),
        [said("Hi"), called(1, '{"a": 1.0}'), called(2, "")],
    ),
    "a call's leftovers": (
        assistant(
            None,
            {
                **call(1, index=0),
                "function": {"name": "look", "arguments": "{}", "parsed_arguments": {}},
            },
        ),
        [called(1)],
    ),
    "a custom call": (
        assistant(None, custom_call(1)),
        [{"type": "custom_tool_call", "call_id": "call_1", "name": "sh", "input": "echo"}],
    ),
    "tool": (
        {"role": "tool", "tool_call_id": "call_1", "content": "4"},
        [{"type": "function_call_output", "call_id": "call_1", "output": "4"}],
    ),
    "tool in parts": (
        {"role": "tool", "tool_call_id": "call_1", "content": [{**TEXT, **MARK}]},
        [
            {
                "type": "function_call_output",
                "call_id": "call_1",
                "output": [{"type": "input_text", "text": "Hi", **MARK}],
            }
        ],
    ),
    "tool with a name and a note": (
        {
            "role": "tool",
            "tool_call_id": "call_1",
            "content": "",
            "name": "look",
            "__copilotMessageSource": {"a": 1},
        },
        [{"type": "function_call_output", "call_id": "call_1", "output": ""}],
    ),
}


@pytest.mark.parametrize(("message", "expected"), MESSAGES.values(), ids=MESSAGES)
def test_a_message_becomes_its_items(message: Any, expected: list[Any]) -> None:
    """Every form that was measured on clients says the same as an item, in compact JSON."""
    raw = message_items(dump(message))

    assert raw == [dump(item) for item in expected]


REFUSED_MESSAGES: dict[str, tuple[Any, str]] = {
    "role": ({"role": "function", "name": "f", "content": "x"}, "messages.role"),
    "unknown role": ({"role": "critic", "content": "x"}, "messages.role"),
    "no role": ({"content": "x"}, "messages.role"),
    "no object": ("x", "messages"),
    "user's name": ({"role": "user", "content": "x", "name": "user"}, "messages.name"),
    "system's name": ({"role": "system", "content": "x", "name": "s"}, "messages.name"),
    "assistant's name": (assistant("x", name="model"), "messages.name"),
    "no content": ({"role": "user"}, "messages.content"),
    "null content": ({"role": "user", "content": None}, "messages.content"),
    "empty list": ({"role": "user", "content": []}, "messages.content"),
    "an object": ({"role": "user", "content": {}}, "messages.content"),
    "empty assistant": (assistant(None), "messages.content"),
    "number as content": (assistant(5), "messages.content"),
    "unknown part": (
        {"role": "user", "content": [{"type": "video", "video": {}}]},
        "messages.content.other",
    ),
    "part without type": ({"role": "user", "content": [{"text": "x"}]}, "messages.content.other"),
    "part is text": ({"role": "user", "content": ["x"]}, "messages.content"),
    "unknown key in a part": (
        {"role": "user", "content": [{**TEXT, "cache_control": {}}]},
        "messages.content.other",
    ),
    "audio": (
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
        "messages.content.input_audio",
    ),
    "text is no text": (
        {"role": "user", "content": [{"type": "text", "text": 5}]},
        "messages.content.text",
    ),
    "image as text": (
        {"role": "user", "content": [{"type": "image_url", "image_url": "https://x"}]},
        "messages.content.image_url",
    ),
    "unknown key in an image": (
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x", "y": 1}}]},
        "messages.content.image_url",
    ),
    "image of the system's": ({"role": "system", "content": [IMAGE]}, "messages.content.other"),
    "image of a tool": (
        {"role": "tool", "tool_call_id": "c", "content": [IMAGE]},
        "messages.content.other",
    ),
    "empty file": (
        {"role": "user", "content": [{"type": "file", "file": {}}]},
        "messages.content.file",
    ),
    "unknown key in a file": (
        {"role": "user", "content": [{"type": "file", "file": {"file_id": "f", "x": 1}}]},
        "messages.content.file",
    ),
    "assistant's image": (assistant([IMAGE]), "messages.content.other"),
    "assistant's mark": (
        assistant([{**TEXT, **MARK}]),
        "messages.content.prompt_cache_breakpoint",
    ),
    "unknown key in assistant's part": (assistant([{**TEXT, "x": 1}]), "messages.content.other"),
    "calls only inside the part": (
        assistant([{**TEXT, "tool_calls": [call(1)]}]),
        "messages.content.other",
    ),
    "refusal part without one": (assistant([{"type": "refusal"}]), "messages.content.refusal"),
    "refusal is no text": (assistant("x", refusal=5), "messages.refusal"),
    "assistant's audio": (assistant("x", audio={"id": "a"}), "messages.audio"),
    "legacy call": (
        assistant("x", function_call={"name": "f", "arguments": ""}),
        "messages.function_call",
    ),
    "unknown key": ({"role": "user", "content": "x", "weight": 1}, "messages.other"),
    "user with calls": (
        {"role": "user", "content": "x", "tool_calls": []},
        "messages.tool_calls",
    ),
    "calls are no list": (assistant("x", tool_calls={}), "messages.tool_calls"),
    "call without type": (
        assistant(None, {"id": "c", "function": {"name": "f", "arguments": ""}}),
        "messages.tool_calls",
    ),
    "call without id": (
        assistant(None, {"type": "function", "function": {"name": "f", "arguments": ""}}),
        "messages.tool_calls",
    ),
    "arguments are no text": (
        assistant(None, {**call(1), "function": {"name": "f", "arguments": {}}}),
        "messages.tool_calls",
    ),
    "unknown key in a call": (assistant(None, call(1, extra_content={})), "messages.tool_calls"),
    "unknown key in a function": (
        assistant(None, {**call(1), "function": {"name": "f", "arguments": "", "x": 1}}),
        "messages.tool_calls",
    ),
    "tool without id": ({"role": "tool", "content": "x"}, "messages.tool_call_id"),
    "tool without content": ({"role": "tool", "tool_call_id": "c"}, "messages.content"),
}


@pytest.mark.parametrize(("message", "field"), REFUSED_MESSAGES.values(), ids=REFUSED_MESSAGES)
def test_what_an_item_cant_say_is_refused_by_name(message: Any, field: str) -> None:
    """Nothing is lost silently: the field's name is a row of the table."""
    with pytest.raises(Untranslatable) as caught:
        message_items(dump(message))

    assert caught.value.field == field


@pytest.mark.parametrize(
    "raw",
    [
        b'{"role":"user","content":"a","content":"b"}',
        b'{"role":"user","content":[{"type":"text","text":"a","text":"b"}]}',
        b'{"role":"user","content":"a"',
        b'{"role":"user","content":["a"}',
        b"",
    ],
)
def test_json_in_doubt_is_a_value_error(raw: bytes) -> None:
    """What two readers might take differently never becomes an item."""
    with pytest.raises(ValueError):  # noqa: PT011  the kind of doubt has one name
        message_items(raw)


def test_values_keep_the_clients_own_bytes() -> None:
    """Escapes, half an emoji, white space and numbers inside arguments come through as written."""
    text = rb'"\u00e9 \ud83d \/ \n"'
    arguments = rb'"{\"a\": 1.0}"'
    message = b'{ "role" : "user",\n "content" : %b }' % text
    spoken = b'{"role":"assistant","content":[ {"type":"text","text":%b} ],"tool_calls":' % text
    spoken += b'[{"id":"c","type":"function","function":{"arguments":%b,"name":"f"}}]}' % arguments

    assert message_items(message) == [b'{"role":"user","content":%b}' % text]
    assert message_items(spoken) == [
        b'{"role":"assistant","content":%b}' % text,
        b'{"type":"function_call","call_id":"c","name":"f","arguments":%b}' % arguments,
    ]


# --- Custom calls, and prefixes -----------------------------------------------------------------


def tool(number: int) -> Any:
    """Return a tool's message."""
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": "done"}


def test_an_output_is_of_its_calls_kind() -> None:
    """The output of a custom call is a custom output, also where the call is in the prefix."""
    turn = [assistant(None, custom_call(1), call(2))]
    outputs = [tool(1), tool(2)]

    assert [item["type"] for item in items(*turn, *outputs)[2:]] == [
        "custom_tool_call_output",
        "function_call_output",
    ]
    prefix = translate([dump(each) for each in turn])
    assert prefix.custom_calls == {"call_1"}
    tail = translate([dump(each) for each in outputs], prefix.custom_calls)
    assert [json.loads(raw)["type"] for raw in tail.items] == [
        "custom_tool_call_output",
        "function_call_output",
    ]


def test_the_last_call_of_an_id_counts() -> None:
    """Where an id is used again for a function, its next output is a function's."""
    history = [assistant(None, custom_call(1)), tool(1), assistant(None, call(1)), tool(1)]

    assert [item["type"] for item in items(*history)] == [
        "custom_tool_call",
        "custom_tool_call_output",
        "function_call",
        "function_call_output",
    ]


TEXTS = st.text(max_size=8)
CALLS = st.builds(call, st.integers(0, 3), TEXTS) | st.builds(custom_call, st.integers(0, 3), TEXTS)
CONTENTS = st.none() | TEXTS | st.lists(st.builds(lambda text: {**TEXT, "text": text}, TEXTS))
ASSISTANTS = st.builds(
    lambda content, calls, last: assistant(content, *calls, *([last] if not content else [])),
    CONTENTS,
    st.lists(CALLS, max_size=2),
    CALLS,
)
MESSAGE = (
    st.builds(lambda text: {"role": "user", "content": text}, TEXTS)
    | st.builds(lambda text: {"role": "system", "content": text}, TEXTS)
    | st.builds(tool, st.integers(0, 3))
    | ASSISTANTS
)


@given(st.lists(MESSAGE, max_size=8), st.integers(0, 8))
def test_a_prefix_of_the_messages_is_a_prefix_of_the_items(messages: list[Any], cut: int) -> None:
    """Whatever follows, what was translated stays as it was; going on needs the custom calls."""
    raw = [dump(each) for each in messages]
    whole = translate(raw)

    head = translate(raw[:cut])
    tail = translate(raw[cut:], head.custom_calls)

    assert whole.items == head.items + tail.items
    assert whole.custom_calls == tail.custom_calls
    assert all(json.dumps(json.loads(each), separators=(",", ":")) for each in whole.items)


@given(MESSAGE)
def test_key_order_and_nulls_change_no_byte(message: Any) -> None:
    """The same element spelt otherwise gives the same items, so histories still match."""
    shuffled = {"name": None, **dict(reversed(message.items()))}

    assert message_items(dump(shuffled)) == message_items(dump(message))


@given(MESSAGE)
def test_items_are_ones_that_the_core_reads(message: Any) -> None:
    """Each item has a canonical form: it can be fingerprinted and matched."""
    for raw in message_items(dump(message)):
        assert Item(raw).canonical_text


# --- Settings -----------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 1.0}}}
FLAT = {"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}
GRAMMAR = {"syntax": "lark", "definition": "start: WORD"}

SETTINGS: dict[str, tuple[Any, Any]] = {
    "nothing": ({}, {}),
    "nulls": (dict.fromkeys(NAMES - {"model"}), {}),
    "unchanged": (
        {
            "temperature": 0.1,
            "top_p": 1,
            "metadata": {"a": "b"},
            "user": "u",
            "safety_identifier": "s",
            "service_tier": "flex",
            "prompt_cache_key": "k",
            "prompt_cache_options": {"mode": "explicit"},
            "prompt_cache_retention": "24h",
        },
        {
            "temperature": 0.1,
            "top_p": 1,
            "metadata": {"a": "b"},
            "user": "u",
            "safety_identifier": "s",
            "service_tier": "flex",
            "prompt_cache_key": "k",
            "prompt_cache_options": {"mode": "explicit"},
            "prompt_cache_retention": "24h",
        },
    ),
    "neutral": (
        {
            "n": 1,
            "frequency_penalty": 0,
            "presence_penalty": -0.0,
            "logit_bias": {},
            "logprobs": False,
            "modalities": ["text"],
            "store": False,
            "stop": None,
            "messages": [],
        },
        {},
    ),
    "stream": (
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True},
    ),
    "no stream": ({"stream": False}, {"stream": False}),
    "no padding": (
        {"stream": True, "stream_options": {"include_obfuscation": False, "include_usage": None}},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
    ),
    "limit": ({"max_completion_tokens": 16}, {"max_output_tokens": 16}),
    "old limit": ({"max_tokens": 2000}, {"max_output_tokens": 2000}),
    "text": ({"response_format": {"type": "text"}}, {"text": {"format": {"type": "text"}}}),
    "JSON, briefly": (
        {"response_format": {"type": "json_object"}, "verbosity": "low"},
        {"text": {"format": {"type": "json_object"}, "verbosity": "low"}},
    ),
    "schema": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": True, "description": "d"},
            }
        },
        {
            "text": {
                "format": {
                    "type": "json_schema",
                    "name": "x",
                    "description": "d",
                    "schema": SCHEMA,
                    "strict": True,
                }
            }
        },
    ),
    "schema that is not strict": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": None},
            }
        },
        {
            "text": {
                "format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": False}
            }
        },
    ),
    "effort": ({"reasoning_effort": "high"}, {"reasoning": {"effort": "high"}}),
    "function": ({"tools": [function(parameters=SCHEMA)]}, {"tools": [FLAT]}),
    "strict function": (
        {"tools": [function(parameters=SCHEMA, strict=True, description="d")]},
        {"tools": [{**FLAT, "strict": True, "description": "d"}]},
    ),
    "function without parameters": (
        {"tools": [function()]},
        {"tools": [{**FLAT, "parameters": {"type": "object", "properties": {}}}]},
    ),
    "custom tools": (
        {
            "tools": [
                {"type": "custom", "custom": {"name": "sh", "description": "d"}},
                {"type": "custom", "custom": {"name": "sh", "format": {"type": "text"}}},
                {
                    "type": "custom",
                    "custom": {"name": "sh", "format": {"type": "grammar", "grammar": GRAMMAR}},
                },
            ]
        },
        {
            "tools": [
                {"type": "custom", "name": "sh", "description": "d"},
                {"type": "custom", "name": "sh", "format": {"type": "text"}},
                {"type": "custom", "name": "sh", "format": {"type": "grammar", **GRAMMAR}},
            ]
        },
    ),
    "a choice": (
        {
            "tools": [function(parameters=SCHEMA)],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
        {"tools": [FLAT], "tool_choice": "required", "parallel_tool_calls": False},
    ),
    "a named choice": (
        {"tools": [function(parameters=SCHEMA)], "tool_choice": function()},
        {"tools": [FLAT], "tool_choice": {"type": "function", "name": "look"}},
    ),
    "a choice of a custom tool": (
        {
            "tools": [function(parameters=SCHEMA)],
            "tool_choice": {"type": "custom", "custom": {"name": "sh"}},
        },
        {"tools": [FLAT], "tool_choice": {"type": "custom", "name": "sh"}},
    ),
    "allowed tools": (
        {
            "tools": [function(parameters=SCHEMA)],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [function()]},
            },
        },
        {
            "tools": [FLAT],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "look"}],
            },
        },
    ),
}


@pytest.mark.parametrize(("given", "expected"), SETTINGS.values(), ids=SETTINGS)
def test_settings_become_those_of_responses(given: Any, expected: Any) -> None:
    """Each field has its equal; what is not asked to be stored is not."""
    assert settings(**given) == {"model": "m", "store": False, **expected}


WITH_TOOLS = {"tools": [function()]}

REFUSED: dict[str, tuple[Any, str]] = {
    "no model": ({"model": None}, "model"),
    "model is no text": ({"model": 5}, "model"),
    "stream is no boolean": ({"stream": 1}, "stream"),
    "options without a stream": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "unknown option": ({"stream": True, "stream_options": {"x": 1}}, "stream_options"),
    "usage is no boolean": (
        {"stream": True, "stream_options": {"include_usage": 1}},
        "stream_options",
    ),
    "n": ({"n": 2}, "n"),
    "frequency_penalty": ({"frequency_penalty": 0.1}, "frequency_penalty"),
    "presence_penalty": ({"presence_penalty": -2}, "presence_penalty"),
    "logit_bias": ({"logit_bias": {"50256": -100}}, "logit_bias"),
    "logprobs": ({"logprobs": True}, "logprobs"),
    "top_logprobs": ({"top_logprobs": 0}, "top_logprobs"),
    "modalities": ({"modalities": ["text", "audio"]}, "modalities"),
    "audio": ({"audio": {"voice": "x"}}, "audio"),
    "store": ({"store": True}, "store"),
    "stop": ({"stop": ["Observation:"]}, "stop"),
    "seed": ({"seed": 1}, "seed"),
    "prediction": ({"prediction": {"type": "content", "content": ""}}, "prediction"),
    "moderation": ({"moderation": {"model": "m"}}, "moderation"),
    "web_search_options": ({"web_search_options": {}}, "web_search_options"),
    "functions": ({"functions": []}, "functions"),
    "function_call": ({"function_call": "auto"}, "function_call"),
    "input": ({"input": "x"}, "input"),
    "unknown": ({"thinking": {"type": "enabled"}}, "other"),
    "Responses API's": ({"previous_response_id": "resp_1"}, "other"),
    "a name of a message's row": ({"messages.name": 1}, "other"),
    "small limit": ({"max_tokens": 15}, "max_tokens"),
    "negative limit": ({"max_completion_tokens": -1}, "max_completion_tokens"),
    "limit is no integer": ({"max_completion_tokens": 1e3}, "max_completion_tokens"),
    "two limits": ({"max_completion_tokens": 20, "max_tokens": 20}, "max_completion_tokens"),
    "format": ({"response_format": {"type": "grammar"}}, "response_format"),
    "format with more": ({"response_format": {"type": "text", "x": 1}}, "response_format"),
    "format without a schema": ({"response_format": {"type": "json_schema"}}, "response_format"),
    "nameless schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format",
    ),
    "schema with more": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {}, "x": 1},
            }
        },
        "response_format",
    ),
    "no tools": ({"tools": []}, "tools"),
    "tools are no list": ({"tools": {}}, "tools"),
    "unknown tool": ({"tools": [{"type": "web_search"}]}, "tools"),
    "flat tool": ({"tools": [FLAT]}, "tools"),
    "tool with more": ({"tools": [{**function(), "cache_control": {}}]}, "tools"),
    "function with more": ({"tools": [function(x=1)]}, "tools.function"),
    "nameless function": ({"tools": [{"type": "function", "function": {}}]}, "tools.function"),
    "strict without parameters": ({"tools": [function(strict=True)]}, "tools.function"),
    "nameless custom tool": ({"tools": [{"type": "custom", "custom": {}}]}, "tools.custom"),
    "unknown custom format": (
        {"tools": [{"type": "custom", "custom": {"name": "x", "format": {"type": "y"}}}]},
        "tools.custom",
    ),
    "odd grammar": (
        {
            "tools": [
                {
                    "type": "custom",
                    "custom": {
                        "name": "x",
                        "format": {"type": "grammar", "grammar": {"syntax": "lark"}},
                    },
                }
            ]
        },
        "tools.custom",
    ),
    "choice without tools": ({"tool_choice": "auto"}, "tool_choice"),
    "parallel without tools": ({"parallel_tool_calls": True}, "parallel_tool_calls"),
    "flat choice": (
        {**WITH_TOOLS, "tool_choice": {"type": "function", "name": "look"}},
        "tool_choice",
    ),
    "unknown choice": ({**WITH_TOOLS, "tool_choice": {"type": "mcp"}}, "tool_choice"),
    "odd allowed tools": (
        {**WITH_TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
        "tool_choice",
    ),
    "word among allowed tools": (
        {
            **WITH_TOOLS,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": ["look"]},
            },
        },
        "tool_choice",
    ),
}


@pytest.mark.parametrize(("given", "field"), REFUSED.values(), ids=REFUSED)
def test_settings_without_an_equal_are_refused_by_name(given: Any, field: str) -> None:
    """What the Responses API can't do, or Chat itself would refuse, goes over HTTP."""
    with pytest.raises(Untranslatable) as caught:
        settings(**given)

    assert caught.value.field == field


def test_what_the_reply_must_know() -> None:
    """Streaming and the usage chunk are the reply's business."""

    def reply(**body: Any) -> ChatSettings:
        return chat_settings(fields({"model": "m", **body}))

    assert reply().stream is reply().include_usage is False
    assert reply(stream=True).stream is True
    asked = reply(stream=True, stream_options={"include_usage": True})
    assert asked.include_usage is True
    assert reply(stream=True, stream_options={"include_usage": False}).include_usage is False


def test_numbers_keep_their_digits() -> None:
    """A schema's numbers, and any other, are not read and written again."""
    raw = b'{"type":"object","properties":{"n":{"maximum":1.00e2,"minimum":12345678901234567890}}}'
    made = chat_settings(
        [
            Setting("temperature", b"0.70"),
            Setting("model", b'"m"'),
            Setting(
                "tools", b'[{"type":"function","function":{"parameters":%b,"name":"f"}}]' % raw
            ),
        ]
    )

    assert {setting.key: setting.raw for setting in made.settings} == {
        "model": b'"m"',
        "temperature": b"0.70",
        "tools": b'[{"type":"function","name":"f","parameters":%b,"strict":false}]' % raw,
        "store": b"false",
    }


@given(st.permutations(sorted(SETTINGS["unchanged"][0].items())))
def test_the_order_of_fields_changes_no_byte(members: list[tuple[str, Any]]) -> None:
    """Settings come in one order, so that equal requests are equal bytes."""
    body = {"model": "m", **SETTINGS["unchanged"][0]}

    assert chat_settings(fields({**dict(members), "model": "m"})) == chat_settings(fields(body))


def test_the_translation_is_a_request_for_websocket_mode() -> None:
    """Put together, it parses as a turn that may run there, stored nowhere."""
    made = chat_settings(
        fields(
            {
                "model": "m",
                "stream": True,
                "stream_options": {"include_usage": True},
                "tools": [function()],
            }
        )
    )
    translated = translate([dump({"role": "user", "content": "Hi"})]).items

    envelope = read_envelope(made.settings, FINGERPRINTS)
    assert envelope.ineligible is None
    assert not envelope.stored
    assert envelope.replay_safe
    assert envelope.stream
    body = b'{"input":[%b]%b}' % (b",".join(translated), envelope.message_members)
    assert parse_body(body, FINGERPRINTS.root("p"), FINGERPRINTS).item_count == 1


# --- Responses bodies on the Chat path ----------------------------------------------------------


def test_a_responses_body_keeps_what_is_its_own() -> None:
    """Fields and flat tools of the Responses API come through; Chat's leftovers are translated."""
    own = {
        "instructions": "Be brief.",
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "medium", "summary": "auto"},
        "text": {"verbosity": "low"},
        "tools": [{"type": "function", "name": "look", "parameters": None}, FLAT],
        "tool_choice": {"type": "function", "name": "look"},
        "prompt_cache_key": "k",
        "truncation": "auto",
    }
    made = cursor(
        **own,
        messages=None,
        n=1,
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        max_tokens=4096,
    )

    assert made == {
        "model": "m",
        **own,
        "stream": True,
        "stream_options": {"include_obfuscation": False},
        "max_output_tokens": 4096,
        "store": False,
    }


def test_leftovers_of_chat_in_a_responses_body_are_translated() -> None:
    """Where only Chat's spelling is there, it is as good as the other."""
    made = cursor(
        reasoning_effort="low",
        verbosity="high",
        tools=[function(parameters=SCHEMA), {"type": "web_search"}],
        tool_choice=function(),
    )

    assert made == {
        "model": "m",
        "reasoning": {"effort": "low"},
        "text": {"verbosity": "high"},
        "tools": [FLAT, {"type": "web_search"}],
        "tool_choice": {"type": "function", "name": "look"},
        "store": False,
    }


@pytest.mark.parametrize("store", [True, False])
def test_a_responses_body_that_says_whether_to_store_is_obeyed(store: bool) -> None:
    """Only its absence is read as the Chat path reads it."""
    assert cursor(store=store)["store"] is store


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"stop": ["x"]}, "stop"),
        ({"n": 2}, "n"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "low"}, "other"),
        ({"max_output_tokens": 20, "max_tokens": 20}, "other"),
        ({"tools": [{"type": "local_shell"}]}, "tools"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools"),
        ({"include": ["message.output_text.logprobs"]}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"unknown": 1}, "other"),
    ],
)
def test_a_responses_body_with_more_than_chunks_can_carry_is_refused(
    given: Any, field: str
) -> None:
    """Two spellings of one thing, calls that no chunk can hold, and the unknown go over HTTP."""
    with pytest.raises(Untranslatable) as caught:
        cursor(**given)

    assert caught.value.field == field


# --- The table ----------------------------------------------------------------------------------


def sdk_fields() -> set[str]:
    """Return every field of the SDK's request type and of its messages, by the table's names."""
    from openai.types import chat
    from openai.types.chat import completion_create_params as params

    found = set(typing.get_type_hints(params.CompletionCreateParamsBase))
    found |= set(typing.get_type_hints(params.CompletionCreateParamsStreaming))
    found |= {
        f"stream_options.{key}"
        for key in typing.get_type_hints(chat.ChatCompletionStreamOptionsParam)
    }
    for message in typing.get_args(chat.ChatCompletionMessageParam):
        found |= {f"messages.{key}" for key in typing.get_type_hints(message)}
    parts = typing.get_args(chat.ChatCompletionContentPartParam)
    for part in (*parts, chat.ChatCompletionContentPartRefusalParam):
        hints = typing.get_type_hints(part)
        found |= {f"messages.content.{kind}" for kind in typing.get_args(hints.pop("type"))}
        found |= {f"messages.content.{key}" for key in hints}
    for tool_type in typing.get_args(chat.ChatCompletionToolUnionParam):
        kinds = typing.get_args(typing.get_type_hints(tool_type)["type"])
        found |= {f"tools.{kind}" for kind in kinds}
    return found


def test_the_sdks_newest_request_type_has_a_row_for_each_field() -> None:
    """A field that the SDK gains needs a decision; this fails until there is one."""
    assert sdk_fields() - NAMES == set()


def inner_fields(owner: Any) -> dict[str, set[str]]:
    """Return the keys of all objects inside a type of the SDK, by the type's name."""
    hints: dict[str, Any] = {}
    found: dict[str, set[str]] = {}
    if hasattr(owner, "__required_keys__"):
        hints = typing.get_type_hints(owner)
        found[owner.__name__] = set(hints)
    for inner in (*hints.values(), *typing.get_args(owner)):
        found |= inner_fields(inner)
    return found


def test_what_the_translated_objects_hold_is_known() -> None:
    """Tools, formats, choices, images, files and calls have the keys that the code takes apart."""
    from openai.types import chat, shared_params

    known = {
        "ChatCompletionFunctionToolParam": {"type", "function"},
        "FunctionDefinition": {"name", "description", "parameters", "strict"},
        "ChatCompletionCustomToolParam": {"type", "custom"},
        "CustomFormatText": {"type"},
        "CustomFormatGrammar": {"type", "grammar"},
        "CustomFormatGrammarGrammar": {"syntax", "definition"},
        "ChatCompletionAllowedToolChoiceParam": {"type", "allowed_tools"},
        "ChatCompletionAllowedToolsParam": {"mode", "tools"},
        "ChatCompletionNamedToolChoiceParam": {"type", "function"},
        "ChatCompletionNamedToolChoiceCustomParam": {"type", "custom"},
        "ResponseFormatJSONSchema": {"type", "json_schema"},
        "JSONSchema": {"name", "description", "schema", "strict"},
        "ImageURL": {"url", "detail"},
        "FileFile": {"file_id", "filename", "file_data"},
        "ChatCompletionMessageFunctionToolCallParam": {"id", "type", "function"},
        "ChatCompletionMessageCustomToolCallParam": {"id", "type", "custom"},
    }
    found: dict[str, set[str]] = {}
    for owner in (
        chat.ChatCompletionToolUnionParam,
        chat.ChatCompletionToolChoiceOptionParam,
        chat.ChatCompletionContentPartParam,
        chat.ChatCompletionMessageToolCallUnionParam,
        shared_params.ResponseFormatJSONSchema,
    ):
        found |= inner_fields(owner)

    assert {name: found.get(name) for name in known} == known


def test_each_refused_field_is_refused_and_no_other() -> None:
    """The table says what the code does: for every top-level field, with a value that counts."""
    sample: dict[str, Any] = {
        "messages": [],
        "stream": True,
        "stream_options": None,
        "tools": [function()],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "max_tokens": 99,
        "max_completion_tokens": 99,
        "parallel_tool_calls": True,
    }
    for row in FIELDS:
        if "." in row.name or row.name == "model":
            continue
        body = {"tools": [function()], row.name: sample.get(row.name, "x")}
        if row.fate in (Fate.REFUSED, Fate.NEUTRAL):
            with pytest.raises(Untranslatable) as caught:
                settings(**body)
            assert caught.value.field == row.name
        else:
            settings(**body)


def test_the_table_can_be_read_by_people() -> None:
    """Each row is one line of Markdown, and no name is there twice."""
    lines = reference_table().splitlines()

    assert len(lines) == len(FIELDS) + 2
    assert len(NAMES) == len(FIELDS)
    assert all(line.count(" | ") == 2 for line in lines[2:])
    assert "| `stop` | over HTTP |" in reference_table()
