"""
Output items as the server events of a stream, the same on both transports.

Every event type of the documented life of a response is there, in the documented order, with a
`sequence_number` from 0 and (unless declined) `obfuscation`. Response objects echo the request
as the API's do. Protocol sections 3.2 and 5.1.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.simulator.answers import visible_text
from proxy.simulator.meaning import item_type
from proxy.simulator.values import pieces

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from proxy.simulator.wire import Item, Json

_ID_PREFIX = {
    "reasoning": "rs",
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}
_PADDING = "x7Kq2mVb9RtLw4Zs"


class CompletedOutput(enum.StrEnum):
    """What `output` of the terminal event holds."""

    FULL = "full"
    EMPTY = "empty"
    """As the ChatGPT backend does (protocol section 3.2)."""


@dataclass(frozen=True, slots=True)
class Event:
    """One server event. `tokens` is the output it brings; None before any output."""

    body: dict[str, Json]
    tokens: int | None = 0

    @property
    def type(self) -> str:
        """The event's type."""
        return str(self.body["type"])


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts: input over the whole context, however little of it was sent."""

    input: int
    cached: int
    output: int

    def as_json(self) -> dict[str, Json]:
        """The API's `usage` object."""
        return {
            "input_tokens": self.input,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.input + self.output,
        }


def with_ids(items: Sequence[Item], response_id: str) -> tuple[Item, ...]:
    """The items with ids that are unique to this response."""
    stem = response_id.removeprefix("resp_")
    return tuple(
        {"id": f"{_ID_PREFIX.get(item_type(item), 'item')}_{stem}{index:02x}", **item}
        for index, item in enumerate(items)
    )


@dataclass(frozen=True, slots=True)
class ResponseWriter:
    """Writes the events of one response. `output` must have its ids already."""

    request: Mapping[str, Json]
    response_id: str
    created_at: int
    output: Sequence[Item]
    usage: Usage
    incomplete: str | None = None
    completed_output: CompletedOutput = CompletedOutput.FULL

    def events(self) -> list[Event]:
        """All events in order, numbered."""
        events = list(self._events())
        for number, event in enumerate(events):
            event.body["sequence_number"] = number
        return events

    def final(self) -> dict[str, Json]:
        """The response object at its end."""
        status = "completed" if self.incomplete is None else "incomplete"
        return self.response(status, list(self.output))

    def response(self, status: str, output: Sequence[Item]) -> dict[str, Json]:
        """The response object in a state of its life."""
        done = status in {"completed", "incomplete"}
        reason = {"reason": self.incomplete} if status == "incomplete" else None
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "completed_at": self.created_at if status == "completed" else None,
            "error": None,
            "incomplete_details": reason,
            **_echo(self.request),
            "output": output,
            "usage": self.usage.as_json() if done else None,
        }

    def _events(self) -> Iterator[Event]:
        started = self.response("in_progress", [])
        yield Event({"type": "response.created", "response": started}, None)
        yield Event({"type": "response.in_progress", "response": started}, None)
        for index, item in enumerate(self.output):
            yield from _item_events(item, index, padded=self._is_padded())
        final = self.final()
        if self.completed_output is CompletedOutput.EMPTY:
            final["output"] = []
        yield Event({"type": f"response.{final['status']}", "response": final})

    def _is_padded(self) -> bool:
        options = self.request.get("stream_options") or {}
        return options.get("include_obfuscation") is not False


def _echo(request: Mapping[str, Json]) -> dict[str, Json]:
    """The request's fields as a response object repeats them, defaults filled in."""
    reasoning, text = request.get("reasoning") or {}, request.get("text") or {}

    def given(name: str, default: Json) -> Json:
        value = request.get(name)
        return default if value is None else value

    return {
        "background": bool(request.get("background")),
        "frequency_penalty": 0.0,
        "instructions": request.get("instructions"),
        "max_output_tokens": request.get("max_output_tokens"),
        "max_tool_calls": request.get("max_tool_calls"),
        "metadata": given("metadata", {}),
        "model": request["model"],
        "parallel_tool_calls": given("parallel_tool_calls", True),
        "presence_penalty": 0.0,
        "previous_response_id": request.get("previous_response_id"),
        "prompt_cache_key": request.get("prompt_cache_key"),
        "prompt_cache_retention": request.get("prompt_cache_retention"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": request.get("safety_identifier"),
        "service_tier": given("service_tier", "default"),
        "store": given("store", True),
        "temperature": given("temperature", 1.0),
        "text": {"format": text.get("format") or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": given("tool_choice", "auto"),
        "tools": given("tools", []),
        "top_logprobs": given("top_logprobs", 0),
        "top_p": given("top_p", 1.0),
        "truncation": given("truncation", "disabled"),
        "user": request.get("user"),
    }


def _item_events(item: Item, index: int, *, padded: bool) -> Iterator[Event]:
    """From `output_item.added` to `output_item.done`."""
    place = {"item_id": item["id"], "output_index": index}
    unfinished = {"status": "in_progress"} if "status" in item else {}
    match item_type(item):
        case "reasoning":
            yield _added({**item, "summary": []}, index)
            yield from _summary_events(item, place, padded=padded)
        case "message":
            yield _added({**item, "content": [], **unfinished}, index)
            yield from _text_events(item, place, padded=padded)
        case "function_call":
            yield _added({**item, "arguments": "", **unfinished}, index)
            kind = "response.function_call_arguments"
            yield from _deltas(f"{kind}.delta", place, item["arguments"], padded=padded)
            yield Event({"type": f"{kind}.done", **place, "arguments": item["arguments"]})
        case "custom_tool_call":
            yield _added({**item, "input": "", **unfinished}, index)
            kind = "response.custom_tool_call_input"
            yield from _deltas(f"{kind}.delta", place, item["input"], padded=padded)
            yield Event({"type": f"{kind}.done", **place, "input": item["input"]})
    yield Event({"type": "response.output_item.done", "output_index": index, "item": item})


def _added(item: Item, index: int) -> Event:
    return Event({"type": "response.output_item.added", "output_index": index, "item": item})


def _text_events(item: Item, place: dict[str, Json], *, padded: bool) -> Iterator[Event]:
    spot = {**place, "content_index": 0}
    part, text = item["content"][0], visible_text(item)
    empty = {**part, "text": ""}
    yield Event({"type": "response.content_part.added", **spot, "part": empty})
    kind = "response.output_text"
    yield from _deltas(f"{kind}.delta", {**spot, "logprobs": []}, text, padded=padded)
    yield Event({"type": f"{kind}.done", **spot, "logprobs": [], "text": text})
    yield Event({"type": "response.content_part.done", **spot, "part": part})


def _summary_events(item: Item, place: dict[str, Json], *, padded: bool) -> Iterator[Event]:
    """Reasoning summaries stream beside the output: they cost no output tokens here."""
    for number, part in enumerate(item["summary"]):
        spot = {**place, "summary_index": number}
        kind, text = "response.reasoning_summary", part["text"]
        yield Event({"type": f"{kind}_part.added", **spot, "part": {**part, "text": ""}})
        for event in _deltas(f"{kind}_text.delta", spot, text, padded=padded):
            yield Event(event.body, 0)
        yield Event({"type": f"{kind}_text.done", **spot, "text": text})
        yield Event({"type": f"{kind}_part.done", **spot, "part": part})


def _deltas(kind: str, spot: dict[str, Json], text: str, *, padded: bool) -> Iterator[Event]:
    for number, piece in enumerate(pieces(text)):
        body = {"type": kind, **spot, "delta": piece}
        if padded:
            body["obfuscation"] = _PADDING[: 1 + (len(piece) * 5 + number) % len(_PADDING)]
        yield Event(body, 1)
