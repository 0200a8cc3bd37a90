"""
The messages of a Chat Completions request, as items of the Responses API.

Each element of `messages` means one or more items: a message with content is a message, each of an
assistant's tool calls is an item behind it, and a tool's message is the output of a call. Texts,
arguments and ids keep the client's own bytes; only what stands around them is ours, compact and in
a fixed order. So the same element always gives the same bytes, and a prefix of the messages gives
a prefix of the items.

One thing an element can't tell by itself: whether a tool's output belongs to a function or to a
custom tool. That depends on the calls before it, so `translate` takes along the ids of the custom
ones; whoever goes on after a known prefix hands in those that the prefix had.

Spelling of an assistant's message: one text is a plain string, the easy form that every upstream
takes and that compares equal to the `output_text` part of the model's own item (core.items). What
has no place in an item, and says nothing new, is left out (`chat_fields` lists it); what says
something raises `Untranslatable`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.core.canonical import parse
from proxy.core.chat_fields import Untranslatable
from proxy.core.splice import elements, fields

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NO_CALLS: frozenset[str] = frozenset()

# Left out wherever they stand: clients' own notes, and the model's thoughts as other services and
# their clients echo them; upstream keeps its own.
_NOTES = frozenset({"__copilotMessageSource"})
_ECHOED = frozenset({"annotations", "parsed", "reasoning", "reasoning_content"})

_CUSTOM_CALL = b'{"type":"custom_tool_call",'
_FUNCTION_CALL = b'{"type":"function_call",'
_EMPTY_TEXT = b'""'


@dataclass(frozen=True, slots=True)
class Translation:
    """Items, as JSON; `custom_calls` are the ids of all custom tool calls up to their end."""

    items: list[bytes]
    custom_calls: frozenset[str]


def translate(messages: Sequence[bytes], known: frozenset[str] = NO_CALLS) -> Translation:
    """
    Return what the elements of `messages` mean; `known` are the custom calls before them.

    Raises Untranslatable, and ValueError for what is no JSON that can be read without doubt.
    """
    items: list[bytes] = []
    custom_calls = known
    for raw in messages:
        made = message_items(raw, custom_calls)
        custom_calls = _calls_after(custom_calls, made)
        items += made
    return Translation(items, custom_calls)


def message_items(raw: bytes, custom_calls: frozenset[str] = NO_CALLS) -> list[bytes]:
    """
    Return what one element of `messages` means, after calls of custom tools with these ids.

    Raises as `translate` does.
    """
    message = fields_of(raw, "messages")
    role = message.pop("role", b"")
    match role:
        case b'"assistant"':
            return _assistant(message)
        case b'"tool"':
            return [_tool_output(message, custom_calls)]
        case b'"user"':
            return [_given(role, message, _USER_PARTS)]
        case b'"system"' | b'"developer"':
            return [_given(role, message, _TEXT_PARTS)]
    raise Untranslatable("messages.role")


def fields_of(raw: bytes, name: str) -> dict[str, bytes]:
    """
    Return the members of an object that are not null, each with its own bytes.

    Raises Untranslatable(name) where `raw` is not an object, ValueError as `splice.fields` does.
    """
    if not raw.startswith(b"{"):
        raise Untranslatable(name)
    return {key: value for key, value in fields(raw).items() if value != b"null"}


def text_of(raw: bytes | None, name: str) -> bytes:
    """Return a value that must be a string. Raises Untranslatable(name)."""
    if raw is None or not raw.startswith(b'"'):
        raise Untranslatable(name)
    return raw


def object_of(*found: tuple[bytes, bytes | None]) -> bytes:
    """Write an object of these keys and values; None leaves a key out."""
    return b"{%b}" % b",".join(b'"%b":%b' % (k, raw) for k, raw in found if raw is not None)


# --- What the client says -----------------------------------------------------------------------


def _given(role: bytes, message: dict[str, bytes], parts: _Parts) -> bytes:
    content = _input_content(message.pop("content", b""), parts)
    _refuse_rest(message, _NOTES)
    return b'{"role":%b,"content":%b}' % (role, content)


def _tool_output(message: dict[str, bytes], custom_calls: frozenset[str]) -> bytes:
    call_id = text_of(message.pop("tool_call_id", None), "messages.tool_call_id")
    output = _input_content(message.pop("content", b""), _TEXT_PARTS)
    _drop(message, "name")  # that of the call, which its id names already
    _refuse_rest(message, _NOTES)
    is_custom = bool(custom_calls) and json.loads(call_id) in custom_calls
    kind = b"custom_tool_call_output" if is_custom else b"function_call_output"
    return b'{"type":"%b","call_id":%b,"output":%b}' % (kind, call_id, output)


def _refuse_rest(message: dict[str, bytes], harmless: frozenset[str]) -> None:
    for key, value in message.items():
        if key in harmless:
            parse(value)  # left out, but it must be JSON to everybody
        else:
            named = key in ("name", "audio", "function_call", "refusal", "tool_calls")
            raise Untranslatable(f"messages.{key}" if named else "messages.other")


def _drop(found: dict[str, bytes], *keys: str) -> None:
    """Take out members that say nothing; raises ValueError where they are not JSON to everybody."""
    for key in keys:
        if key in found:
            parse(found.pop(key))


def _input_content(raw: bytes, parts: _Parts) -> bytes:
    """Write content that is not the model's: a string as it is, a list part by part."""
    if raw.startswith(b'"'):
        return raw
    found = elements(raw) if raw.startswith(b"[") else []
    if not found:
        raise Untranslatable("messages.content")
    return b"[%b]" % b",".join(_input_part(part, parts) for part in found)


def _input_part(raw: bytes, parts: _Parts) -> bytes:
    part = fields_of(raw, "messages.content")
    kind = part.pop("type", b"")
    write = parts.get(kind)
    if write is None:
        audio = kind == b'"input_audio"'
        raise Untranslatable("messages.content.input_audio" if audio else "messages.content.other")
    mark = part.pop("prompt_cache_breakpoint", None)
    written = write(part)
    if part:
        raise Untranslatable("messages.content.other")
    if mark is not None:
        written = b'%b,"prompt_cache_breakpoint":%b}' % (written[:-1], mark)
    return written


def _input_text(part: dict[str, bytes]) -> bytes:
    text = text_of(part.pop("text", None), "messages.content.text")
    return b'{"type":"input_text","text":%b}' % text


def _input_image(part: dict[str, bytes]) -> bytes:
    image = fields_of(part.pop("image_url", b""), "messages.content.image_url")
    url = text_of(image.pop("url", None), "messages.content.image_url")
    # Required by the Responses API's type; the default is the same.
    detail = image.pop("detail", b'"auto"')
    if image:
        raise Untranslatable("messages.content.image_url")
    return b'{"type":"input_image","image_url":%b,"detail":%b}' % (url, detail)


def _input_file(part: dict[str, bytes]) -> bytes:
    file = fields_of(part.pop("file", b""), "messages.content.file")
    if not file or file.keys() - {"file_id", "filename", "file_data"}:
        raise Untranslatable("messages.content.file")
    return object_of(
        (b"type", b'"input_file"'),
        (b"file_id", file.get("file_id")),
        (b"filename", file.get("filename")),
        (b"file_data", file.get("file_data")),
    )


if TYPE_CHECKING:
    _Parts = dict[bytes, Callable[[dict[str, bytes]], bytes]]

_TEXT_PARTS: _Parts = {b'"text"': _input_text}
_USER_PARTS: _Parts = {**_TEXT_PARTS, b'"image_url"': _input_image, b'"file"': _input_file}


# --- What the model said ------------------------------------------------------------------------


def _assistant(message: dict[str, bytes]) -> list[bytes]:
    calls = message.pop("tool_calls", b"[]")
    content = message.pop("content", b"[]")
    parts = _output_parts(content, calls)
    refusal = text_of(message.pop("refusal", _EMPTY_TEXT), "messages.refusal")
    if refusal != _EMPTY_TEXT:
        parts.append(b'{"type":"refusal","refusal":%b}' % refusal)
    _refuse_rest(message, _ECHOED | _NOTES)
    call_items = [_call(raw) for raw in _listed(calls, "messages.tool_calls")]
    if parts or not call_items:
        return [_output_message(parts, content), *call_items]
    return call_items


def _output_message(parts: list[bytes], content: bytes) -> bytes:
    if not parts:
        if content == b"[]":
            raise Untranslatable("messages.content")  # the API refuses a message without any
        return b'{"role":"assistant","content":""}'
    if len(parts) == 1 and parts[0].startswith(_OUTPUT_TEXT):
        return b'{"role":"assistant","content":%b}' % parts[0][len(_OUTPUT_TEXT) : -1]
    return b'{"role":"assistant","content":[%b]}' % b",".join(parts)


_OUTPUT_TEXT = b'{"type":"output_text","text":'


def _output_parts(raw: bytes, calls: bytes) -> list[bytes]:
    """Write the model's content as parts; empty texts say nothing."""
    if raw.startswith(b'"'):
        return [] if raw == _EMPTY_TEXT else [b"%b%b}" % (_OUTPUT_TEXT, raw)]
    written = (_output_part(part, calls) for part in _listed(raw, "messages.content"))
    return [part for part in written if part]


def _output_part(raw: bytes, calls: bytes) -> bytes:
    part = fields_of(raw, "messages.content")
    kind = part.pop("type", b"")
    if kind == b'"refusal"':
        refusal = text_of(part.pop("refusal", None), "messages.content.refusal")
        written = b'{"type":"refusal","refusal":%b}' % refusal
    elif kind == b'"text"':
        text = text_of(part.pop("text", None), "messages.content.text")
        written = b"" if text == _EMPTY_TEXT else b"%b%b}" % (_OUTPUT_TEXT, text)
        _drop_leaked(part, calls)
    else:
        raise Untranslatable("messages.content.other")
    if "prompt_cache_breakpoint" in part:
        raise Untranslatable("messages.content.prompt_cache_breakpoint")
    if part:
        raise Untranslatable("messages.content.other")
    return written


def _drop_leaked(part: dict[str, bytes], calls: bytes) -> None:
    """
    Take out of a text part what stands in the message as well.

    One client (agents for JavaScript) writes the fields of the reply's message into the part.
    """
    if part.get("role") == b'"assistant"':
        del part["role"]
    _drop(part, *_ECHOED)
    leaked = part.get("tool_calls", b"")
    if leaked.startswith(b"[") and elements(leaked) == _listed(calls, "messages.tool_calls"):
        del part["tool_calls"]


def _listed(raw: bytes, name: str) -> list[bytes]:
    if not raw.startswith(b"["):
        raise Untranslatable(name)
    return elements(raw)


def _call(raw: bytes) -> bytes:
    call = fields_of(raw, "messages.tool_calls")
    kind = call.pop("type", b"")
    call_id = text_of(call.pop("id", None), "messages.tool_calls")
    _drop(call, "index")  # of the chunk that it was read from
    if kind == b'"function"':
        head, key, body = _FUNCTION_CALL, "arguments", call.pop("function", b"")
    elif kind == b'"custom"':
        head, key, body = _CUSTOM_CALL, "input", call.pop("custom", b"")
    else:
        raise Untranslatable("messages.tool_calls")
    called = fields_of(body, "messages.tool_calls")
    name = text_of(called.pop("name", None), "messages.tool_calls")
    said = text_of(called.pop(key, None), "messages.tool_calls")
    _drop(called, "parsed_arguments")
    if call or called:
        raise Untranslatable("messages.tool_calls")
    return b'%b"call_id":%b,"name":%b,"%b":%b}' % (head, call_id, name, key.encode(), said)


def _calls_after(known: frozenset[str], items: Sequence[bytes]) -> frozenset[str]:
    """Return `known` with the custom calls among the items: the last call of an id counts."""
    for item in items:
        if item.startswith(_CUSTOM_CALL):
            known |= {json.loads(item)["call_id"]}
        elif known and item.startswith(_FUNCTION_CALL):
            known -= {json.loads(item)["call_id"]}
    return known
