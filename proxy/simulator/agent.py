"""
Stateless clients that replay their full history, as real agents do.

An `Agent` sends its whole history with every request and echoes the model's items in one of the
forms that were measured on real clients (`EchoStyle`). `run` plays a conversation to its end;
`build_body`, `send`, `echo` and `answer_calls` are its single steps, for tests that fork, rewind
or edit a history on the way.

The reader of the stream is strict on purpose: what a tolerant client would swallow is a finding
here (`StreamError`).
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import aiohttp

from proxy.simulator.answers import visible_text
from proxy.simulator.meaning import CALL_OUTPUTS, item_type
from proxy.simulator.wire import Item, Json, dumps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

TERMINALS = frozenset({"response.completed", "response.incomplete", "response.failed"})
"""Event types that end a stream."""

DEFAULT_TOOLS: tuple[dict[str, Json], ...] = (
    {
        "type": "function",
        "name": "read_file",
        "description": "Read a file.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "first_line": {"type": "integer", "minimum": 1, "maximum": 9999},
                "encoding": {"type": "string", "enum": ["utf-8", "latin-1"]},
            },
            "required": ["path", "first_line", "encoding"],
            "additionalProperties": False,
        },
    },
    {
        "type": "function",
        "name": "search",
        "description": "Search the project.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "threshold": {"type": "number"},
                "whole_words": {"type": "boolean"},
                "folders": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["query", "whole_words"],
        },
    },
    {"type": "custom", "name": "shell", "description": "Run a command."},
)
"""Two functions and a custom tool."""


class StreamError(Exception):
    """The stream is not what the API would send. The message says what is wrong with it."""


class ReplyError(Exception):
    """A turn did not end with a completed or incomplete response."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"status {reply.status}: {reply.error}")
        self.reply = reply


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


class Streaming(enum.StrEnum):
    """Whether replies are asked for as a stream."""

    ALWAYS = "always"
    NEVER = "never"
    ALTERNATING = "alternating"


@dataclass(frozen=True, slots=True)
class Reply:
    """
    What came back for one request. Times are seconds from sending.

    `response` is the terminal response object (None without one), `items` the output as its
    `output_item.done` events gave it, `error` the details of an error.
    """

    body: bytes
    status: int
    headers: Mapping[str, str]
    response: dict[str, Json] | None
    items: tuple[Item, ...]
    events: tuple[dict[str, Json], ...]
    error: Json
    first_event_s: float
    duration_s: float

    @property
    def request_bytes(self) -> int:
        """Size of the request's body."""
        return len(self.body)

    @property
    def text(self) -> str:
        """All visible text of the answer's messages."""
        return "".join(visible_text(i) for i in self.items if item_type(i) == "message")

    @property
    def calls(self) -> tuple[Item, ...]:
        """The tool calls of the answer."""
        return tuple(item for item in self.items if item_type(item) in CALL_OUTPUTS)

    @property
    def answer(self) -> tuple[Json, ...]:
        """The answer without what may differ from run to run (ids): equal answers are equal."""
        return tuple(without_id(item) for item in self.items)

    @property
    def mode(self) -> str | None:
        """The `turnwire-mode` header, where there is one."""
        return self.headers.get("turnwire-mode")

    @property
    def reason(self) -> str | None:
        """The `turnwire-reason` header, where there is one."""
        return self.headers.get("turnwire-reason")


@dataclass(slots=True)
class Transcript:
    """A conversation: all replies in order, and the history as it stood at the end."""

    replies: list[Reply] = field(default_factory=list)
    history: list[Item] = field(default_factory=list)

    @property
    def answers(self) -> list[tuple[Json, ...]]:
        """The answers in order, comparable between runs."""
        return [reply.answer for reply in self.replies]

    @property
    def modes(self) -> list[str | None]:
        """The mode header of every reply."""
        return [reply.mode for reply in self.replies]

    @property
    def reasons(self) -> list[str | None]:
        """The reason header of every reply."""
        return [reply.reason for reply in self.replies]

    @property
    def duration_s(self) -> float:
        """Time spent waiting for replies."""
        return sum(reply.duration_s for reply in self.replies)

    @property
    def request_bytes(self) -> int:
        """Bytes of all request bodies."""
        return sum(reply.request_bytes for reply in self.replies)


def tool_output(name: str, arguments: str, size_bytes: int = 200) -> str:
    """A deterministic output of a tool: made of its name and arguments, of about this size."""
    tag = hashlib.sha256(f"{name} {arguments}".encode()).hexdigest()
    line = f"{name} -> {tag}\n"
    return (line * (size_bytes // len(line) + 1))[: max(size_bytes, 16)]


@dataclass(slots=True)
class Agent:
    """
    A stateless client. `settings` are merged into every body and may replace anything.

    Open one with `async with`, or let `send` open the session and call `close` at the end.
    `tool` maps a call's name and argument text to its output.
    """

    base_url: str
    api_key: str = "sk-agent"
    style: EchoStyle = EchoStyle.VERBATIM
    streaming: Streaming = Streaming.ALWAYS
    model: str = "gpt-5.2"
    instructions: str | None = "You are a careful engineer."
    tools: Sequence[Mapping[str, Json]] = DEFAULT_TOOLS
    tool: Callable[[str, str], Json] = tool_output
    settings: Mapping[str, Json] = field(default_factory=lambda: {"store": False})
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 60.0
    _session: aiohttp.ClientSession | None = None
    _turns: Iterator[int] = field(default_factory=itertools.count)
    _echoes: Iterator[int] = field(default_factory=itertools.count)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the HTTP session."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def run(self, prompts: Sequence[str], history: Sequence[Item] = ()) -> Transcript:
        """
        Play a conversation: each prompt, and tool calls until the model stops calling.

        Raises ReplyError when a turn fails, StreamError when a stream is malformed. Closes the
        session at the end.
        """
        transcript = Transcript(history=list(history))
        try:
            for prompt in prompts:
                transcript.history.append(user(prompt))
                await self.advance(transcript)
        finally:
            await self.close()
        return transcript

    async def advance(self, transcript: Transcript) -> Reply:
        """Send the history and answer calls until an answer has none; returns that answer."""
        while True:
            reply = await self.send(transcript.history)
            transcript.replies.append(reply)
            if reply.response is None or reply.response["status"] == "failed":
                raise ReplyError(reply)
            transcript.history.extend(self.echo(reply.items))
            transcript.history.extend(self.answer_calls(reply.items))
            if not reply.calls:
                return reply

    # The single steps.

    def build_body(self, history: Sequence[Item]) -> dict[str, Json]:
        """The request's body for a history."""
        number = next(self._turns)
        streamed = self.streaming is Streaming.ALWAYS or (
            self.streaming is Streaming.ALTERNATING and number % 2 == 0
        )
        body: dict[str, Json] = {"model": self.model, "input": list(history)}
        if self.instructions is not None:
            body["instructions"] = self.instructions
        if self.tools:
            body["tools"] = list(self.tools)
        return {**body, "stream": streamed, **self.settings}

    async def send(self, history: Sequence[Item]) -> Reply:
        """Send a history as a turn. Raises StreamError; an HTTP error is a Reply."""
        return await self.post(dumps(self.build_body(history)).encode())

    async def post(self, body: bytes, path: str = "/responses") -> Reply:
        """Send a body as it is."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=self.timeout_s)
            self._session = aiohttp.ClientSession(timeout=timeout)
        headers = {
            "Authorization": f"Bearer {self.api_key}",
            "Content-Type": "application/json",
            **self.headers,
        }
        started = time.perf_counter()
        async with self._session.post(self.base_url + path, data=body, headers=headers) as raw:
            return await _read_reply(raw, body, started)

    def echo(self, items: Sequence[Item]) -> list[Item]:
        """The model's items as this client puts them into its next request."""
        style = self.style
        if style is EchoStyle.MIXED:
            plain = [each for each in EchoStyle if each is not EchoStyle.MIXED]
            style = plain[next(self._echoes) % len(plain)]
        return echoed(items, style)

    def answer_calls(self, items: Sequence[Item]) -> list[Item]:
        """The outputs of the calls among these items, in order."""
        return [
            {
                "type": CALL_OUTPUTS[item_type(item)],
                "call_id": item["call_id"],
                "output": self.tool(item["name"], visible_text(item)),
            }
            for item in items
            if item_type(item) in CALL_OUTPUTS
        ]


def user(text: str) -> Item:
    """A user message."""
    return {"role": "user", "content": text}


def without_id(item: Item) -> Item:
    """The item as it is the same in every run."""
    return {key: value for key, value in item.items() if key != "id"}


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


async def _read_reply(raw: aiohttp.ClientResponse, body: bytes, started: float) -> Reply:
    headers = {name.lower(): value for name, value in raw.headers.items()}
    events: list[dict[str, Json]] = []
    response: dict[str, Json] | None = None
    items: Sequence[Item] = ()
    error: Json = None
    first_s = 0.0
    if raw.content_type == "text/event-stream":
        parser = SseParser()
        async for block in raw.content.iter_any():
            events.extend(parser.feed(block))
            first_s = first_s or (time.perf_counter() - started if events else 0.0)
        parser.finish()
        response, items, error = check_stream(events)
    else:
        text = await raw.text()
        value: Json = (
            json.loads(text) if raw.content_type == "application/json" else {"error": text}
        )
        error = value.get("error")
        if value.get("object") == "response":
            response, items = value, value["output"]
    duration_s = time.perf_counter() - started
    return Reply(
        body,
        raw.status,
        headers,
        response,
        tuple(items),
        tuple(events),
        error,
        first_s or duration_s,
        duration_s,
    )


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
    if [e["type"] in TERMINALS for e in events].index(True) != len(events) - 1:
        raise StreamError("the terminal event is not the last one")
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
