"""
A Chat Completions request, as the Responses API would have been asked the same.

`chat_settings` turns every field except `messages` into the settings of a Responses request;
`translate` (of `chat_messages`) turns the messages into items. Both are all or nothing: a field
without an exact equal raises `Untranslatable`, and the request goes over HTTP as it is. The table
of what becomes of each field is `chat_fields`.

Two defaults differ between the APIs, and are written out: a function without `strict` is not
strict in Chat, and what is not asked to be stored is not stored. Where the value has the same
shape in both, its own bytes are used, so numbers and schemas stay what they are. Settings come in
a fixed order; two requests with the same fields give the same bytes.

Where Chat refuses a combination that the Responses API would take (`tool_choice` without tools),
it is left to HTTP to say so.

`cursor_settings` is for a client that sends a Responses body, `input` and all, to the Chat path,
and wants chunks back. What belongs to the Responses API is kept as it is, what is left of Chat is
translated; only `store` is read as this endpoint has it, for a client that is answered without
the ids of responses and items can make no use of stored ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.core.chat_fields import (
    FIELDS,
    NAMES,
    Fate,
    FieldRow,
    Untranslatable,
    reference_table,
)
from proxy.core.chat_messages import (
    NO_CALLS,
    Translation,
    fields_of,
    message_items,
    object_of,
    text_of,
    translate,
)
from proxy.core.request import Setting
from proxy.core.splice import elements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = [
    "FIELDS",
    "NO_CALLS",
    "ChatSettings",
    "Fate",
    "FieldRow",
    "Translation",
    "Untranslatable",
    "chat_settings",
    "cursor_settings",
    "message_items",
    "reference_table",
    "translate",
]

MIN_OUTPUT_TOKENS = 16
"""The least `max_output_tokens` that the Responses API takes (protocol 2.1)."""

# In the order in which settings are written.
_UNCHANGED = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "metadata",
    "user",
    "safety_identifier",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
)

# Fields of a Responses request that a Responses-shaped body may have besides (protocol 2.1).
_RESPONSES_ONLY = (
    "access_programs",
    "background",
    "background_options",
    "client_metadata",
    "context_management",
    "conversation",
    "image",
    "include",
    "instructions",
    "max_tool_calls",
    "previous_response_id",
    "prompt",
    "truncation",
)

# Tools whose calls, if they make any, can be written as chunks or need no answer of the client.
_SHOWN_TOOLS = frozenset({b'"function"', b'"custom"', b'"web_search"', b'"web_search_preview"'})

_INTEGER = re.compile(rb"-?(?:0|[1-9][0-9]{0,17})")
_ZERO = re.compile(rb"-?0(?:\.0+)?(?:[eE][+-]?[0-9]+)?")
_EMPTY_OBJECT = re.compile(rb"\{[ \t\n\r]*\}")
_NO_PARAMETERS = b'{"type":"object","properties":{}}'


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """
    The settings of the Responses request, and what the reply must know of the Chat request.

    `settings` hold neither `input` nor a null. `stream` is what the client asked for, and stands
    among them too.
    """

    settings: tuple[Setting, ...]
    stream: bool
    include_usage: bool


def chat_settings(settings: Sequence[Setting]) -> ChatSettings:
    """
    Translate the fields of a Chat body, in any order; `messages` is passed over.

    Raises Untranslatable, and ValueError for what is no JSON that can be read without doubt.
    """
    given = _given(settings)
    _drop_neutral(given)
    made = _take(given, _UNCHANGED)
    _check_delivery(made)
    include_usage = _take_stream_options(given, made)
    _put(made, "max_output_tokens", _limit(given))
    _put(made, "text", _text(given))
    _put(made, "reasoning", _reasoning(given))
    has_tools = _put(made, "tools", _tools(given.pop("tools", None), _chat_tool))
    _put(made, "tool_choice", _tool_choice(given.pop("tool_choice", None)))
    for key in ("tool_choice", "parallel_tool_calls"):
        if key in made and not has_tools:
            raise Untranslatable(key)
    made["store"] = b"false"
    _refuse_rest(given)
    return _finished(made, include_usage=include_usage)


def cursor_settings(settings: Sequence[Setting]) -> ChatSettings:
    """
    Translate the fields of a Responses body that came to the Chat path, without its `input`.

    Raises as `chat_settings` does.
    """
    given = _given(settings)
    store = given.pop("store", b"false")
    _drop_neutral(given)
    made = _take(given, (*_UNCHANGED, *_RESPONSES_ONLY))
    _check_delivery(made)
    include_usage = _take_stream_options(given, made)
    _put(made, "max_output_tokens", _either(given, "max_output_tokens", _limit))
    _put(made, "text", _either(given, "text", _text))
    _put(made, "reasoning", _either(given, "reasoning", _reasoning))
    _put(made, "tools", _tools(given.pop("tools", None), _mixed_tool))
    _put(made, "tool_choice", _mixed_choice(given.pop("tool_choice", None)))
    if b"logprobs" in made.get("include", b""):
        raise Untranslatable("logprobs")
    made["store"] = store
    _refuse_rest(given)
    return _finished(made, include_usage=include_usage)


def _given(settings: Sequence[Setting]) -> dict[str, bytes]:
    """Return the fields that say something; null is as good as absent."""
    given = {setting.key: setting.raw for setting in settings if setting.raw != b"null"}
    given.pop("messages", None)
    return given


def _take(given: dict[str, bytes], keys: Iterable[str]) -> dict[str, bytes]:
    return {key: given.pop(key) for key in keys if key in given}


def _put(made: dict[str, bytes], key: str, value: bytes | None) -> bool:
    if value is not None:
        made[key] = value
    return value is not None


def _either(
    given: dict[str, bytes], key: str, translated: Callable[[dict[str, bytes]], bytes | None]
) -> bytes | None:
    """Return the Responses field, or what Chat's fields make of it; both contradict each other."""
    own, other = given.pop(key, None), translated(given)
    if own is not None and other is not None:
        raise Untranslatable("other")
    return own if other is None else other


def _refuse_rest(given: dict[str, bytes]) -> None:
    for key in given:
        raise Untranslatable(key if key in NAMES and "." not in key else "other")


def _finished(made: dict[str, bytes], *, include_usage: bool) -> ChatSettings:
    return ChatSettings(
        settings=tuple(Setting(key, raw) for key, raw in made.items()),
        stream=made.get("stream") == b"true",
        include_usage=include_usage,
    )


# --- Fields that say what is true anyway ----------------------------------------------------------


def _drop_neutral(given: dict[str, bytes]) -> None:
    for key, says_nothing in _NEUTRAL.items():
        if key in given and not says_nothing(given.pop(key)):
            raise Untranslatable(key)


def _is_zero(raw: bytes) -> bool:
    return _ZERO.fullmatch(raw) is not None


def _is_empty(raw: bytes) -> bool:
    return _EMPTY_OBJECT.fullmatch(raw) is not None


def _is_text_only(raw: bytes) -> bool:
    return raw.startswith(b"[") and elements(raw) == [b'"text"']


_NEUTRAL: dict[str, Callable[[bytes], bool]] = {
    "n": lambda raw: raw == b"1",
    "frequency_penalty": _is_zero,
    "presence_penalty": _is_zero,
    "logit_bias": _is_empty,
    "logprobs": lambda raw: raw == b"false",
    "modalities": _is_text_only,
    "store": lambda raw: raw == b"false",
}


# --- Delivery and limits ------------------------------------------------------------------------


def _check_delivery(made: dict[str, bytes]) -> None:
    text_of(made.get("model"), "model")
    if made.get("stream", b"false") not in (b"true", b"false"):
        raise Untranslatable("stream")


def _take_stream_options(given: dict[str, bytes], made: dict[str, bytes]) -> bool:
    """Translate `stream_options`; return whether the client wants a chunk with the usage."""
    raw = given.pop("stream_options", None)
    if raw is None:
        return False
    if made.get("stream") != b"true":
        raise Untranslatable("stream_options")  # the API refuses it, in its own words
    options = fields_of(raw, "stream_options")
    include_usage = options.pop("include_usage", b"false")
    obfuscation = options.pop("include_obfuscation", None)
    if options or include_usage not in (b"true", b"false"):
        raise Untranslatable("stream_options")
    if obfuscation is not None:
        made["stream_options"] = b'{"include_obfuscation":%b}' % obfuscation
    return include_usage == b"true"


def _limit(given: dict[str, bytes]) -> bytes | None:
    found = _take(given, ("max_completion_tokens", "max_tokens"))
    for name, raw in found.items():
        if len(found) > 1 or not _INTEGER.fullmatch(raw) or int(raw) < MIN_OUTPUT_TOKENS:
            raise Untranslatable(name)
        return raw
    return None


# --- Text and reasoning -------------------------------------------------------------------------


def _text(given: dict[str, bytes]) -> bytes | None:
    wanted, verbosity = given.pop("response_format", None), given.pop("verbosity", None)
    if wanted is None and verbosity is None:
        return None
    wanted = None if wanted is None else _format(wanted)
    return object_of((b"format", wanted), (b"verbosity", verbosity))


def _format(raw: bytes) -> bytes:
    found = fields_of(raw, "response_format")
    kind = found.pop("type", b"")
    if kind in (b'"text"', b'"json_object"') and not found:
        return b'{"type":%b}' % kind
    schema = fields_of(found.pop("json_schema", b""), "response_format")
    known = _take(schema, ("name", "description", "schema", "strict"))
    if kind != b'"json_schema"' or found or schema or not known.keys() >= {"name", "schema"}:
        raise Untranslatable("response_format")
    return object_of(
        (b"type", kind),
        (b"name", known["name"]),
        (b"description", known.get("description")),
        (b"schema", known["schema"]),
        (b"strict", known.get("strict", b"false")),
    )


def _reasoning(given: dict[str, bytes]) -> bytes | None:
    effort = given.pop("reasoning_effort", None)
    return None if effort is None else b'{"effort":%b}' % effort


# --- Tools --------------------------------------------------------------------------------------


def _tools(raw: bytes | None, translated: Callable[[bytes], bytes]) -> bytes | None:
    if raw is None:
        return None
    found = elements(raw) if raw.startswith(b"[") else []
    if not found:
        raise Untranslatable("tools")  # the API refuses an empty list
    return b"[%b]" % b",".join(translated(tool) for tool in found)


def _mixed_tool(raw: bytes) -> bytes:
    """Translate a tool of either API's shape."""
    tool = fields_of(raw, "tools")
    if tool.keys() & {"function", "custom"}:
        return _chat_tool(raw)
    if tool.get("type") not in _SHOWN_TOOLS:
        raise Untranslatable("tools")
    return raw


def _chat_tool(raw: bytes) -> bytes:
    tool = fields_of(raw, "tools")
    kind = tool.pop("type", b"")
    if kind == b'"function"':
        return _function_tool(fields_of(_only(tool, "function", "tools"), "tools.function"))
    if kind == b'"custom"':
        return _custom_tool(fields_of(_only(tool, "custom", "tools"), "tools.custom"))
    raise Untranslatable("tools")


def _only(found: dict[str, bytes], key: str, name: str) -> bytes:
    """Return the one member that an object must have. Raises Untranslatable(name)."""
    if found.keys() != {key}:
        raise Untranslatable(name)
    return found[key]


def _function_tool(tool: dict[str, bytes]) -> bytes:
    strict = tool.pop("strict", b"false")
    parameters = tool.pop("parameters", None)
    known = _take(tool, ("name", "description"))
    # Without parameters a function takes none; how to say that strictly is not documented.
    if tool or "name" not in known or (parameters is None and strict != b"false"):
        raise Untranslatable("tools.function")
    return object_of(
        (b"type", b'"function"'),
        (b"name", known["name"]),
        (b"description", known.get("description")),
        (b"parameters", parameters or _NO_PARAMETERS),
        (b"strict", strict),
    )


def _custom_tool(tool: dict[str, bytes]) -> bytes:
    known = _take(tool, ("name", "description", "format"))
    if tool or "name" not in known:
        raise Untranslatable("tools.custom")
    wanted = known.get("format")
    return object_of(
        (b"type", b'"custom"'),
        (b"name", known["name"]),
        (b"description", known.get("description")),
        (b"format", None if wanted is None else _custom_format(wanted)),
    )


def _custom_format(raw: bytes) -> bytes:
    found = fields_of(raw, "tools.custom")
    kind = found.pop("type", b"")
    if kind == b'"text"' and not found:
        return b'{"type":"text"}'
    if kind != b'"grammar"':
        raise Untranslatable("tools.custom")
    grammar = fields_of(_only(found, "grammar", "tools.custom"), "tools.custom")
    if grammar.keys() != {"syntax", "definition"}:
        raise Untranslatable("tools.custom")
    return object_of(
        (b"type", kind), (b"syntax", grammar["syntax"]), (b"definition", grammar["definition"])
    )


def _tool_choice(raw: bytes | None) -> bytes | None:
    if raw is None or raw.startswith(b'"'):
        return raw
    choice = fields_of(raw, "tool_choice")
    kind = choice.pop("type", b"")
    if kind in (b'"function"', b'"custom"'):
        inner = kind[1:-1].decode()
        named = fields_of(_only(choice, inner, "tool_choice"), "tool_choice")
        return b'{"type":%b,"name":%b}' % (kind, _only(named, "name", "tool_choice"))
    if kind != b'"allowed_tools"':
        raise Untranslatable("tool_choice")
    return _allowed_tools(fields_of(_only(choice, "allowed_tools", "tool_choice"), "tool_choice"))


def _allowed_tools(allowed: dict[str, bytes]) -> bytes:
    if allowed.keys() != {"mode", "tools"} or not allowed["tools"].startswith(b"["):
        raise Untranslatable("tool_choice")
    tools = [_tool_choice(tool) or b"" for tool in elements(allowed["tools"])]
    if any(tool.startswith(b'"') for tool in tools):
        raise Untranslatable("tool_choice")
    mode = allowed["mode"]
    return b'{"type":"allowed_tools","mode":%b,"tools":[%b]}' % (mode, b",".join(tools))


def _mixed_choice(raw: bytes | None) -> bytes | None:
    """Translate a choice of either API's shape."""
    if raw is None or raw.startswith(b'"'):
        return raw
    is_nested = fields_of(raw, "tool_choice").keys() & {"function", "custom", "allowed_tools"}
    return _tool_choice(raw) if is_nested else raw
