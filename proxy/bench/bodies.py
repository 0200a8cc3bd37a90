"""
What is sent and answered in the benchmark: the parts of bodies, and the events of an answer.

The load programs only copy bytes. What these say is decided here, once for the programs in C and
for those in Python: placeholders of fixed width stand where ids, stamps and numbers go. All of it
is valid for the Responses API, apart from the member `ts` of every event: the moment at which it
was sent, in nanoseconds of the monotonic clock.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

STAMP_BASE = 10**18
NUMBER_BASE = 2 * 10**9
STAMP_MARK = str(STAMP_BASE)
NUMBER_MARK = str(NUMBER_BASE)
RESPONSE_MARK = "resp_" + "0" * 16
ITEM_MARK = "msg_" + "0" * 16
NONCE_MARK = "nonce_" + "0" * 16

EVENT_BYTES = 280  # a text delta of the API, with its ids and obfuscation
NEW_ITEM_BYTES = 400
INSTRUCTIONS_BYTES = 4000
TOOL_COUNT = 12

_ANSWER_TEXT = "The file has a function that adds two numbers. Shall I change it?"
_WORDS = (
    *("the", "of", "to", "and", "in", "a", "is", "that", "it", "for", "def", "return", "self"),
    *("import", "value", "if", "not", "None", "async", "await", "print", "list", "error", "file"),
    *("path", "test", "data", "0x1f", "result", "key", "token", "index", '"name"', "\n", "    "),
)


@dataclass(frozen=True, slots=True)
class Parts:
    """
    The parts of which the client makes its bodies.

    A body is `prefix`, then for each follow-up turn a comma, `echo`, a comma and `item`, then
    `suffix`. With `is_chat` it is one of Chat Completions.
    """

    prefix: bytes
    suffix: bytes
    echo: bytes
    item: bytes
    is_chat: bool = False

    def body(self, follow_ups: int = 0) -> bytes:
        """Return the body of a turn, with its placeholders in it."""
        return self.prefix + b",%b,%b" % (self.echo, self.item) * follow_ups + self.suffix

    def write(self, folder: Path) -> None:
        """Write each part into a file of its name."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("prefix", "suffix", "echo", "item"):
            (folder / name).write_bytes(getattr(self, name))


def make_parts(history_bytes: int) -> Parts:
    """
    Return the parts of a conversation whose first request has a history of about this size.

    The history looks like an agent's: a user message, then tool calls and their outputs. Settings
    (instructions and tools, about 10 KB) come on top.
    """
    rng = random.Random(history_bytes)  # noqa: S311  the same histories in every run
    item_bytes = max(400, min(5000, history_bytes // 20))
    items = [_user(f"{NONCE_MARK} {_text(rng, item_bytes)}")]
    size = len(_json(items))
    while size < history_bytes - item_bytes:
        pair = _call_and_output(rng, len(items), item_bytes)
        items += pair
        size += len(_json(pair))
    items.append(_user(_text(rng, NEW_ITEM_BYTES)))
    head = {"model": "gpt-5.2", "instructions": _text(rng, INSTRUCTIONS_BYTES)}
    tail = {"tools": _tools(), "tool_choice": "auto", "parallel_tool_calls": False}
    tail |= {"reasoning": {"effort": "low"}, "store": False, "stream": True}
    return Parts(
        prefix=_json(head)[:-1] + b',"input":' + _json(items)[:-1],
        suffix=b"]," + _json(tail)[1:],
        echo=_json(_answer_item()),
        item=_json(_user(_text(rng, NEW_ITEM_BYTES))),
    )


def make_chat_parts(history_bytes: int) -> Parts:
    """Return the parts of the same conversation in Chat Completions, message by message."""
    plain = make_parts(history_bytes)
    body = json.loads(plain.body())
    messages = [{"role": "system", "content": body["instructions"]}]
    messages += [_message(item) for item in body["input"]]
    tools = [
        {"type": "function", "function": {key: tool[key] for key in tool if key != "type"}}
        for tool in body["tools"]
    ]
    tail = {"tools": tools, "tool_choice": "auto", "parallel_tool_calls": False}
    tail |= {"reasoning_effort": "low", "stream": True}
    return Parts(
        prefix=b'{"model":"gpt-5.2","messages":' + _json(messages)[:-1],
        suffix=b"]," + _json(tail)[1:],
        echo=_json({"role": "assistant", "content": _ANSWER_TEXT}),
        item=_json(_message(json.loads(plain.item))),
        is_chat=True,
    )


def _message(item: dict[str, Any]) -> dict[str, Any]:
    """Return the Chat message of an item."""
    match item["type"]:
        case "function_call":
            called = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": called}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        case "function_call_output":
            return {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
    return {"role": item["role"], "content": item["content"][0]["text"]}


def make_templates(event_bytes: int = EVENT_BYTES) -> bytes:
    """
    Return the events of an answer, a line each: created, delta, output item done, completed.

    Each line has at least `event_bytes` bytes, the delta exactly as many if that is possible.
    """
    item = _answer_item()
    response = {"id": RESPONSE_MARK, "object": "response", "model": "gpt-5.2", "store": False}
    usage = {"input_tokens": 9000, "output_tokens": 40, "total_tokens": 9040}
    running = response | {"status": "in_progress", "output": []}
    completed = response | {"status": "completed", "output": [item], "usage": usage}
    delta = {
        "item_id": ITEM_MARK,
        "output_index": 0,
        "content_index": 0,
        "delta": " token",
        "logprobs": [],
    }
    events = (
        _event("response.created", {"response": running}, event_bytes),
        _event("response.output_text.delta", delta, event_bytes),
        _event("response.output_item.done", {"output_index": 0, "item": item}, event_bytes),
        _event("response.completed", {"response": completed}, event_bytes),
    )
    return b"".join(event + b"\n" for event in events)


def _event(kind: str, members: dict[str, Any], size: int) -> bytes:
    head = {"type": kind, "sequence_number": NUMBER_BASE, "ts": STAMP_BASE}
    bare = _json(head | members | {"obfuscation": ""})
    return _json(head | members | {"obfuscation": "x" * max(0, size - len(bare))})


def _answer_item() -> dict[str, Any]:
    return {
        "type": "message",
        "id": ITEM_MARK,
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": _ANSWER_TEXT, "annotations": []}],
    }


def _user(text: str) -> dict[str, Any]:
    return {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": text}],
    }


def _call_and_output(rng: random.Random, number: int, size: int) -> list[dict[str, Any]]:
    call_id = f"call_{number:06d}"
    arguments = _json({"path": f"src/file_{number}.py", "why": _text(rng, 80)}).decode()
    return [
        {
            "type": "function_call",
            "id": f"fc_{rng.getrandbits(64):016x}",
            "call_id": call_id,
            "name": "tool_1",
            "arguments": arguments,
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": call_id, "output": _text(rng, size)},
    ]


def _tools() -> list[dict[str, Any]]:
    parameters = {
        "type": "object",
        "properties": {"path": {"type": "string"}, "why": {"type": "string"}},
        "required": ["path", "why"],
        "additionalProperties": False,
    }
    return [
        {
            "type": "function",
            "name": f"tool_{number}",
            "description": "Does something with a file of the project. " * 5,
            "strict": True,
            "parameters": parameters,
        }
        for number in range(TOOL_COUNT)
    ]


def _text(rng: random.Random, size: int) -> str:
    words = rng.choices(_WORDS, k=size // 3)
    return " ".join(words)[:size]


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
