"""
Bodies, items and answers in the shapes that agents and upstreams send, and a `World`.

The world is an upstream reduced to its memory: per connection the latest response, and those that
it stores. From the messages of a plan alone it rebuilds the context that the model would see, so it
is the oracle of all that the planner decides. It shares no code with the planner.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

MODEL = "gpt-5.6"
TOOLS = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]


def dump(value: object) -> bytes:
    """Return compact JSON bytes, as most SDKs write them."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def body(*items: Json, **settings: Any) -> bytes:
    """Return a request body with these items; `settings` replace defaults, `...` removes."""
    defaults = {"model": MODEL, "instructions": "Be brief.", "tools": TOOLS, "store": False}
    merged = {"input": list(items), **defaults, "stream": True, **settings}
    return dump({key: value for key, value in merged.items() if value is not ...})


def user(text: str) -> Json:
    """Return an easy user message."""
    return {"role": "user", "content": text}


def message(text: str, *, number: int = 1, phase: str | None = None) -> Json:
    """Return an assistant message as upstream sends it."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    made = {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed"}
    return {**made, "content": [part], **({"phase": phase} if phase else {})}


def call(
    number: int, arguments: str = '{"path": "a.txt"}', *, kind: str = "function_call", **more: Any
) -> Json:
    """Return a tool call as upstream sends it."""
    made = {"type": kind, "id": f"fc_{number}", "call_id": f"call_{number}", "name": "look"}
    return {**made, "arguments": arguments, "status": "completed", **more}


def output(number: int, text: str = "done", *, kind: str = "function_call_output") -> Json:
    """Return the client's output of a tool call."""
    return {"type": kind, "call_id": f"call_{number}", "output": text}


def reasoning(number: int, *, sealed: str | None = "", summary: str = "") -> Json:
    """Return a reasoning item; `sealed` is its encrypted content, None to leave it out."""
    texts = [{"type": "summary_text", "text": summary}] if summary else []
    made: Json = {"type": "reasoning", "id": f"rs_{number}", "summary": texts}
    return made if sealed is None else {**made, "encrypted_content": sealed or f"sealed-{number}"}


class Unknown(Exception):
    """Upstream does not know the previous response, where it was asked for it."""


@dataclass
class World:
    """
    An upstream's memory.

    `latest` is what each connection remembers, `contexts` the items of every response that there
    ever was with its own output, `stored` the ids that any connection can load. With `one_id` it
    gives all responses of a connection the same id, as xAI does.
    """

    one_id: bool = False
    latest: dict[int, str] = field(default_factory=dict)
    contexts: dict[tuple[int, str], list[Json]] = field(default_factory=dict)
    stored: dict[str, list[Json]] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def receive(self, connection: int, sent: bytes) -> list[Json]:
        """Return the context that the model sees for a `response.create`. Raises Unknown."""
        read = json.loads(sent, object_pairs_hook=_once)
        assert read.pop("type") == "response.create"
        previous = read.get("previous_response_id")
        if previous is None:
            before: list[Json] = []
        elif self.latest.get(connection) == previous:
            before = self.contexts[connection, previous]
        elif previous in self.stored:
            before = self.stored[previous]
        else:
            raise Unknown(previous)
        given = read["input"]
        return [*before, *([user(given)] if isinstance(given, str) else given)]

    def answer(self, connection: int, context: list[Json], made: list[Json], *, store: bool) -> str:
        """Complete a response with the output `made`; return its id."""
        number = connection if self.one_id else next(self.numbers)
        name = f"resp_{number}"
        self.latest[connection] = name
        self.contexts[connection, name] = [*context, *made]
        if store:
            self.stored[name] = [*context, *made]
        return name

    def lose(self, connection: int) -> None:
        """Close a connection: what it remembered is gone."""
        self.latest.pop(connection, None)


def _once(pairs: list[tuple[str, Any]]) -> Json:
    made = dict(pairs)
    assert len(made) == len(pairs), "a message with a duplicate key"
    return made


DECORATION = {"id", "status", "annotations", "logprobs", "phase"}


def meaning(items: list[Json], *, with_reasoning: bool = False) -> list[str]:
    """Return what items say, spelled in one way; the rules are the design's, written again."""
    return [
        json.dumps(_meaning(item), sort_keys=True)
        for item in items
        if with_reasoning or item.get("type") != "reasoning"
    ]


def _meaning(item: Json) -> Json:
    if item.get("type", "message") == "reasoning" and item.get("encrypted_content"):
        return {"sealed": item["encrypted_content"]}
    produced = item.get("role") == "assistant" or item.get("type", "").endswith("_call")
    said = {key: value for key, value in item.items() if value is not None}
    if produced:
        said = {key: value for key, value in said.items() if key not in DECORATION}
    if "role" in said:
        said["type"] = "message"
        content = said["content"]
        parts = [{"text": content}] if isinstance(content, str) else content
        said["content"] = [part.get("text", part) for part in parts]
    if produced and "arguments" in said:
        said["arguments"] = json.loads(said["arguments"] or "{}")
    return said
