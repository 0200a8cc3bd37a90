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
import io
import itertools
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import aiohttp

from proxy.simulator.answers import visible_text
from proxy.simulator.echoes import EchoStyle, echoed
from proxy.simulator.meaning import CALL_OUTPUTS, item_type
from proxy.simulator.streams import SseParser, check_stream
from proxy.simulator.wire import Item, Json, dumps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_LARGE_BODY_BYTES = 1 << 19

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


class ReplyError(Exception):
    """A turn did not end with a completed or incomplete response."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"status {reply.status}: {reply.error}")
        self.reply = reply


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
        # aiohttp warns about large bodies as bytes: it would write them in one go.
        data = io.BytesIO(body) if len(body) > _LARGE_BODY_BYTES else body
        async with self._session.post(self.base_url + path, data=data, headers=headers) as raw:
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
