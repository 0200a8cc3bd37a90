"""
A reader of the API's event stream that forgives nothing.

Real clients swallow much; here whatever the API would not send is a finding (`StreamError`).
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.simulator.wire import Item, Json

TERMINALS = frozenset({"response.completed", "response.incomplete", "response.failed"})
"""Event types that end a stream."""


class StreamError(Exception):
    """The stream is not what the API would send. The message says what is wrong with it."""


class SseParser:
    """
    A strict reader of the API's SSE: `event:` then `data:` lines then a blank one.

    Comments may stand anywhere between lines. Anything else raises StreamError.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._name: str | None = None
        self._data: list[str] = []

    def feed(self, block: bytes) -> list[dict[str, Json]]:
        """The events that this block of bytes completes."""
        *lines, self._rest = (self._rest + block).split(b"\n")
        found = (self._line(line.removesuffix(b"\r").decode()) for line in lines)
        return [event for event in found if event is not None]

    def finish(self) -> None:
        """The stream has ended; StreamError if it did so within an event."""
        if self._rest or self._data or self._name is not None:
            raise StreamError("the stream ends within an event")

    def _line(self, line: str) -> dict[str, Json] | None:
        field_name, _, value = line.partition(": ")
        if line == "":
            return self._dispatch() if self._name or self._data else None
        if line.startswith(":"):
            return None
        if field_name == "event" and self._name is None and not self._data:
            self._name = value
        elif field_name == "data" and self._name is not None:
            self._data.append(value)
        else:
            raise StreamError(f"unexpected line: {line[:80]!r}")
        return None

    def _dispatch(self) -> dict[str, Json]:
        event = json.loads("\n".join(self._data))
        name, self._name, self._data = self._name, None, []
        if not isinstance(event, dict) or event.get("type") != name:
            raise StreamError(f"event {name!r} holds something else")
        return event


def check_stream(
    events: Sequence[dict[str, Json]],
) -> tuple[dict[str, Json] | None, list[Item], Json]:
    """
    The terminal response, the items and the error of a stream.

    Raises StreamError unless it begins with `response.created`, is numbered upwards, has deltas
    that add up, ends with exactly one terminal event (or an `error`), and tells the same items
    there as before.
    """
    errors = [event for event in events if event["type"] == "error"]
    if errors:
        return None, [], errors[0].get("error") or errors[0]
    if not events or events[0]["type"] != "response.created":
        raise StreamError("the stream does not begin with response.created")
    ends = [index for index, event in enumerate(events) if event["type"] in TERMINALS]
    if ends != [len(events) - 1]:
        raise StreamError("the stream does not end with its one terminal event")
    numbers = [event["sequence_number"] for event in events]
    if any(later <= earlier for earlier, later in itertools.pairwise(numbers)):
        raise StreamError("sequence_number does not grow")
    response = events[-1]["response"]
    if any(event["response"]["id"] != response["id"] for event in events if "response" in event):
        raise StreamError("events of another response")
    _check_deltas(events)
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    if response["status"] != "failed" and response["output"] != items:
        raise StreamError("the terminal event tells other items than the stream")
    return response, items, response.get("error")


_DELTA_ENDS = {
    "response.output_text": "text",
    "response.function_call_arguments": "arguments",
    "response.custom_tool_call_input": "input",
    "response.reasoning_summary_text": "text",
}


def _check_deltas(events: Sequence[dict[str, Json]]) -> None:
    """The deltas of each part add up to what its `done` event says."""
    parts: dict[tuple[Json, ...], str] = {}
    for event in events:
        kind, _, step = event["type"].rpartition(".")
        if kind not in _DELTA_ENDS:
            continue
        part = (kind, event["item_id"], event.get("content_index"), event.get("summary_index"))
        if step == "delta":
            parts[part] = parts.get(part, "") + event["delta"]
        elif parts.get(part, "") != event[_DELTA_ENDS[kind]]:
            raise StreamError(f"the deltas of {kind} do not add up")
