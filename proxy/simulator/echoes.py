"""
How clients echo the model's items: the forms that were measured on real agents.

Each style changes nothing that has a meaning (`meaning`), and something that a byte comparison
would trip over.
"""

from __future__ import annotations

import enum
import hashlib
import json
from typing import TYPE_CHECKING

from proxy.simulator.answers import visible_text
from proxy.simulator.meaning import item_type

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.simulator.wire import Item, Json


class EchoStyle(enum.StrEnum):
    """How the model's items come back in the next request."""

    VERBATIM = "verbatim"
    IDS_STRIPPED = "ids_stripped"
    NULLS_ADDED = "nulls_added"
    KEYS_SHUFFLED = "keys_shuffled"
    EASY_MESSAGES = "easy_messages"
    TEXT_PARTS = "text_parts"
    ARGUMENTS_RESERIALISED = "arguments_reserialised"
    REASONING_DROPPED = "reasoning_dropped"
    PHASE_DROPPED = "phase_dropped"
    CALLS_FIRST = "calls_first"
    MIXED = "mixed"
    """Another style for each answer, in turn."""


def echoed(items: Sequence[Item], style: EchoStyle) -> list[Item]:
    """The model's items in a style."""
    if style is EchoStyle.REASONING_DROPPED:
        return [item for item in items if item_type(item) != "reasoning"]
    if style is EchoStyle.CALLS_FIRST:
        return sorted(items, key=lambda item: item_type(item) == "message")
    change = _CHANGES[style]
    return [change(item) for item in items]


def _same(item: Item) -> Item:
    return item


def _ids_stripped(item: Item) -> Item:
    return {key: value for key, value in item.items() if key not in {"id", "status"}}


def _nulls_added(item: Item) -> Item:
    extra: dict[str, Json] = {"created_by": None}
    if item_type(item) == "reasoning":
        extra["content"] = None
    if item_type(item) == "function_call":
        extra["namespace"] = None
    return {**extra, **item}


def _keys_shuffled(item: Item) -> Item:
    def key(name: str) -> bytes:
        return hashlib.sha256(name.encode()).digest()

    def shuffled(value: Json) -> Json:
        if isinstance(value, dict):
            return {name: shuffled(value[name]) for name in sorted(value, key=key)}
        return [shuffled(each) for each in value] if isinstance(value, list) else value

    return {name: shuffled(item[name]) for name in sorted(item, key=key)}


def _easy_messages(item: Item) -> Item:
    if item_type(item) != "message":
        return _ids_stripped(item)
    return {"role": item["role"], "content": visible_text(item)}


def _text_parts(item: Item) -> Item:
    if item_type(item) != "message":
        return _ids_stripped(item)
    part = {"type": "output_text", "text": visible_text(item)}
    return {"role": item["role"], "content": [part], "phase": item.get("phase")}


def _arguments_reserialised(item: Item) -> Item:
    if item_type(item) != "function_call":
        return item
    # Exact but spelt otherwise: other spacing, other escapes, other key order.
    arguments = json.loads(item["arguments"])
    text = json.dumps(dict(reversed(arguments.items())), indent=1)
    return {**item, "arguments": text}


def _phase_dropped(item: Item) -> Item:
    return {key: value for key, value in item.items() if key != "phase"}


_CHANGES: Mapping[EchoStyle, Callable[[Item], Item]] = {
    EchoStyle.VERBATIM: _same,
    EchoStyle.IDS_STRIPPED: _ids_stripped,
    EchoStyle.NULLS_ADDED: _nulls_added,
    EchoStyle.KEYS_SHUFFLED: _keys_shuffled,
    EchoStyle.EASY_MESSAGES: _easy_messages,
    EchoStyle.TEXT_PARTS: _text_parts,
    EchoStyle.ARGUMENTS_RESERIALISED: _arguments_reserialised,
    EchoStyle.PHASE_DROPPED: _phase_dropped,
}
