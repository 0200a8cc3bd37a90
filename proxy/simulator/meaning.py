"""
What an item means, and the rolling digest of a sequence of items.

A stateless client echoes the model's items in its own form: ids and nulls come and go, keys
move, a list of one text part becomes a string, arguments are parsed and written again, the
calls of a response stand before its message. A server that remembers has its own form. Both
must give the same digest; anything that the model would read otherwise must not. Hence:

* An item is reduced to its *normal form*: the fields that carry meaning, each in one shape.
* Reasoning is left out: many clients drop it, a server that remembers keeps it.
* A *run* of consecutive items of the model is a multiset: its order is not counted, its
  members are. The order of everything else is.

`Trace` holds the digest so far, so that a remembered context grows by its new items alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import Context, Decimal
from hashlib import blake2b
from typing import TYPE_CHECKING

from proxy.simulator.wire import Item, Json, canonical

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

CALL_OUTPUTS = {
    "function_call": "function_call_output",
    "custom_tool_call": "custom_tool_call_output",
    "computer_call": "computer_call_output",
    "local_shell_call": "local_shell_call_output",
    "shell_call": "shell_call_output",
    "apply_patch_call": "apply_patch_call_output",
}
"""Which item of the client answers which call of the model."""

OUTPUTS = frozenset(CALL_OUTPUTS.values())
"""Item types that answer a call."""

_MODEL_TYPES = frozenset(
    {
        *CALL_OUTPUTS,
        "reasoning",
        "file_search_call",
        "web_search_call",
        "image_generation_call",
        "code_interpreter_call",
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_call",
        "tool_search_call",
        "program",
    }
)
_VOLATILE = frozenset({"id", "status", "created_by", "phase"})
_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
_PART_NOISE = frozenset({"annotations", "logprobs", "parsed"})


def item_type(item: Item) -> str:
    """The item's type; implied where the API lets it be implied."""
    kind = item.get("type")
    if kind is None:
        return "message" if "role" in item else "item_reference"
    return str(kind)


def is_model_item(item: Item) -> bool:
    """Whether the model produces such items."""
    kind = item_type(item)
    return kind in _MODEL_TYPES or (kind == "message" and item.get("role") == "assistant")


def normal_form(item: Item) -> Json | None:
    """The meaning of an item as JSON, or None where it has none to compare (reasoning)."""
    match item_type(item):
        case "reasoning":
            return None
        case "message":
            role = item.get("role")
            return ["message", role, _content(item.get("content"), joined=role == "assistant")]
        case "function_call":
            name, space = item.get("name"), item.get("namespace")
            return ["function_call", item.get("call_id"), name, space, _arguments(item)]
        case "custom_tool_call":
            name, space = item.get("name"), item.get("namespace")
            return ["custom_tool_call", item.get("call_id"), name, space, item.get("input")]
        case kind if kind in OUTPUTS:
            return [kind, item.get("call_id"), _content(item.get("output"), joined=False)]
        case kind:
            kept = {k: v for k, v in item.items() if v is not None and k not in _VOLATILE}
            return [kind, kept]


def _content(content: Json, *, joined: bool) -> Json:
    """A string and one text part are the same; so are several of the model's, `joined`."""
    if isinstance(content, dict):
        return ["object", content]
    if not isinstance(content, list):
        return [["text", content if content is not None else ""]]
    parts = [_part(part) for part in content]
    if not joined:
        return parts
    texts = [part[1] for part in parts if part[0] == "text"]
    others = [part for part in parts if part[0] != "text"]
    return [["text", "".join(map(str, texts))], *others]


def _part(part: Json) -> list[Json]:
    if not isinstance(part, dict):
        return ["other", part]
    kind = part.get("type")
    if kind in _TEXT_PARTS:
        return ["text", part.get("text", "")]
    return [str(kind), {k: v for k, v in part.items() if v is not None and k not in _PART_NOISE}]


class _Number(str):
    """The exact value of a JSON number, marked as integer or fraction: 1 and 1.0 differ."""

    __slots__ = ()


_EXACT = Context(prec=100_000)


def _fraction(digits: str) -> _Number:
    return _Number(f"fraction {Decimal(digits).normalize(_EXACT)}")


def _arguments(item: Item) -> Json:
    """Arguments as exact JSON; blank is `{}`; text where it is no JSON, or doubtful JSON."""
    text = item.get("arguments")
    if text is None or (isinstance(text, str) and not text.strip()):
        text = "{}"
    if not isinstance(text, str):
        return ["other", text]
    try:
        value = json.loads(
            text,
            parse_int=_Number,
            parse_float=_fraction,
            parse_constant=_refuse,
            object_pairs_hook=_unique,
        )
        return ["json", _marked(value)]
    except (ValueError, RecursionError, ArithmeticError):
        return ["text", text]


def _refuse(constant: str) -> Json:
    raise ValueError(constant)


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """An object; ValueError if a key is there twice, since readers differ on which one counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate key")
    return found


def _marked(value: Json) -> Json:
    """The value with strings marked, so that no text can pass for a number."""
    match value:
        case _Number():
            return str(value)
        case str():
            return ["text", value]
        case list():
            return [_marked(element) for element in value]
        case dict():
            return {key: _marked(member) for key, member in value.items()}
        case _:
            return value


def digest(*parts: bytes) -> bytes:
    """A digest of byte strings in order, their borders included."""
    state = blake2b(digest_size=16)
    for part in parts:
        state.update(len(part).to_bytes(8, "big"))
        state.update(part)
    return state.digest()


@dataclass(frozen=True, slots=True)
class Trace:
    """
    The digest of a sequence of items, open at its end.

    `closed` covers everything before the last run of the model's items; `run` holds that run's
    members, sorted. `tokens` counts the whole in the rough coin of four bytes a token;
    `echoed_tokens` counts up to the last item of the model, which is what a prompt cache holds.
    """

    closed: bytes = bytes(16)
    run: tuple[bytes, ...] = ()
    tokens: int = 0
    echoed_tokens: int = 0

    def extended(self, items: Iterable[Item]) -> Trace:
        """The trace after more items."""
        closed, run = self.closed, list(self.run)
        tokens, echoed_tokens = self.tokens, self.echoed_tokens
        for item in items:
            form = normal_form(item)
            if form is None:
                continue
            meaning = canonical(form)
            tokens += len(meaning) // 4 + 1
            if is_model_item(item):
                run.append(digest(meaning))
                echoed_tokens = tokens
            else:
                closed, run = digest(_close(closed, run), meaning), []
        return Trace(closed, tuple(sorted(run)), tokens, echoed_tokens)

    @property
    def value(self) -> bytes:
        """The digest of all items so far."""
        return _close(self.closed, self.run)


def _close(closed: bytes, run: Collection[bytes]) -> bytes:
    return digest(closed, *sorted(run)) if run else closed
