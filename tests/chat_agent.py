"""
A stateless client of Chat Completions, in the manner of `proxy.simulator.agent.Agent`.

It sends all messages with every request, echoes the assistant's message in one of the forms that
were measured on real clients (`ChatStyle`), and reads streams strictly. It offers what `Agent`
offers, so that the oracle's conversations can be held with either.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from proxy.simulator.agent import Streaming, tool_output

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Json = dict[str, Any]

CALL_TEXTS = {"function": "arguments", "custom": "input"}

TOOLS: tuple[Json, ...] = (
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "first_line": {"type": "integer"}},
                "required": ["path", "first_line"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}, "threshold": {"type": "number"}},
                "required": ["query"],
            },
        },
    },
    {"type": "function", "function": {"name": "ping"}},
    {"type": "custom", "custom": {"name": "shell", "description": "Run a command."}},
)


class ChatStyle(enum.StrEnum):
    """How the assistant's message comes back in the next request (real-clients-python 1.7)."""

    VERBATIM = "verbatim"
    SLIM = "slim"
    EMPTY_CONTENT = "empty_content"
    PARTS = "parts"
    RESERIALISED = "reserialised"
    NULLS = "nulls"
    INDEXED = "indexed"
    REASONED = "reasoned"
    SHUFFLED = "shuffled"
    MIXED = "mixed"
    """Another style for each message, in turn."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """
    What came back for one request.

    `message`, `finish_reason` and `usage` are those of the completion, or what its chunks add up
    to; `deltas` are the chunks' own; `response` is None if the reply did not come to its end.
    """

    body: bytes
    status: int
    headers: Mapping[str, str]
    identity: str
    message: Json | None
    finish_reason: str | None
    usage: Json | None
    deltas: tuple[Json, ...]
    error: Any

    @property
    def response(self) -> Json | None:
        """The id and state of the answer, None without one."""
        if self.message is None:
            return None
        return {"id": self.identity.replace("chatcmpl-", "resp_", 1), "status": "completed"}

    @property
    def items(self) -> tuple[Json, ...]:
        """The assistant's message, as the only item there is."""
        return () if self.message is None else (self.message,)

    @property
    def calls(self) -> Sequence[Json]:
        """The tool calls of the answer."""
        return (self.message or {}).get("tool_calls") or ()

    @property
    def answer(self) -> tuple[Any, ...]:
        """All of the answer: the very chunks, if it came in chunks."""
        return self.message, self.finish_reason, self.usage, self.deltas

    @property
    def mode(self) -> str | None:
        """The `turnwire-mode` header, where there is one."""
        return self.headers.get("turnwire-mode")

    @property
    def reason(self) -> str | None:
        """The `turnwire-reason` header, where there is one."""
        return self.headers.get("turnwire-reason")


@dataclass(slots=True)
class ChatAgent:
    """A stateless client. `settings` are merged into every body and may replace anything."""

    base_url: str
    api_key: str = "sk-agent"
    style: ChatStyle = ChatStyle.VERBATIM
    streaming: Streaming = Streaming.ALWAYS
    instructions: str | None = "You are a careful engineer."
    tools: Sequence[Json] = TOOLS
    settings: Mapping[str, Any] = field(default_factory=dict)
    _session: aiohttp.ClientSession | None = None
    _echoes: Iterator[int] = field(default_factory=itertools.count)

    async def close(self) -> None:
        """Close the HTTP session."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def build_body(self, history: Sequence[Json]) -> Json:
        """The request's body for a history."""
        # By the history and not by the turn's number, for tails run side by side.
        streamed = self.streaming is Streaming.ALWAYS or (
            self.streaming is Streaming.ALTERNATING and len(history) % 2 == 0
        )
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        messages = [*system, *map(_in_chat_terms, history)]
        body: Json = {"model": "gpt-5.2", "messages": messages}
        if self.tools:
            body["tools"] = list(self.tools)
        options = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
        return {**body, **options, **self.settings}

    async def send(self, history: Sequence[Json]) -> ChatReply:
        """Send a history as a turn. An HTTP error is a reply."""
        body = self.build_body(history)
        return await self.post(json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode())

    async def post(self, body: bytes, path: str = "/chat/completions") -> ChatReply:
        """Send a body as it is."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))
        headers = {
            "Authorization": f"Bearer {self.api_key}",
            "Content-Type": "application/json",
        }
        async with self._session.post(self.base_url + path, data=body, headers=headers) as raw:
            names = {name.lower(): value for name, value in raw.headers.items()}
            if raw.content_type == "text/event-stream":
                return _from_chunks(body, raw.status, names, await raw.read())
            return _from_json(body, raw.status, names, await raw.read())

    def echo(self, items: Sequence[Json]) -> list[Json]:
        """The assistant's messages as this client puts them into its next request."""
        return [self._echoed(message) for message in items]

    def answer_calls(self, items: Sequence[Json]) -> list[Json]:
        """The outputs of the calls in these messages, in order."""
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": _output(call)}
            for message in items
            for call in message.get("tool_calls") or ()
        ]

    def _echoed(self, message: Json) -> Json:
        style = self.style
        if style is ChatStyle.MIXED:
            plain = [each for each in ChatStyle if each is not ChatStyle.MIXED]
            style = plain[next(self._echoes) % len(plain)]
        return CHANGES[style](message)


def _output(call: Json) -> str:
    called = call[call["type"]]
    return tool_output(called["name"], called[CALL_TEXTS[call["type"]]])


def _in_chat_terms(message: Json) -> Json:
    """Spell the parts of a user's message as Chat does, where they are spelt for Responses."""
    content = message.get("content")
    if message.get("role") != "user" or not isinstance(content, list):
        return message
    return {**message, "content": [_part(part) for part in content]}


def _part(part: Json) -> Json:
    match part["type"]:
        case "input_text":
            return {"type": "text", "text": part["text"]}
        case "input_image":
            image = {"url": part["image_url"], "detail": part["detail"]}
            return {"type": "image_url", "image_url": image}
    return part


# --- Echoes -------------------------------------------------------------------------------------


def _slim(message: Json) -> Json:
    kept = {key: message[key] for key in ("role", "content", "tool_calls") if message.get(key)}
    return kept if len(kept) > 1 else {**kept, "content": message["content"]}


def _empty_content(message: Json) -> Json:
    return {**_slim(message), "content": message["content"] or ""}


def _parts(message: Json) -> Json:
    text = message["content"]
    return {**_slim(message), "content": [{"type": "text", "text": text}]} if text else message


def _reserialised(message: Json) -> Json:
    return _with_calls(message, _respelt)


def _respelt(call: Json) -> Json:
    if call["type"] != "function":
        return call
    text = json.dumps(json.loads(call["function"]["arguments"] or "{}"), indent=1)
    return {**call, "function": {**call["function"], "arguments": text}}


def _nulls(message: Json) -> Json:
    extra = dict.fromkeys(("audio", "function_call", "parsed", "tool_calls"))
    return {**extra, **message}


def _indexed(message: Json) -> Json:
    numbers = itertools.count()
    return _with_calls(message, lambda call: {"index": next(numbers), **call})


def _reasoned(message: Json) -> Json:
    return {**message, "reasoning_content": "Hm."}


def _with_calls(message: Json, change: Any) -> Json:
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [change(call) for call in message["tool_calls"]]}


def _shuffled(value: Any) -> Any:
    if isinstance(value, dict):
        names = sorted(value, key=lambda name: hashlib.sha256(name.encode()).digest())
        return {name: _shuffled(value[name]) for name in names}
    return [_shuffled(each) for each in value] if isinstance(value, list) else value


CHANGES = {
    ChatStyle.VERBATIM: dict,
    ChatStyle.SLIM: _slim,
    ChatStyle.EMPTY_CONTENT: _empty_content,
    ChatStyle.PARTS: _parts,
    ChatStyle.RESERIALISED: _reserialised,
    ChatStyle.NULLS: _nulls,
    ChatStyle.INDEXED: _indexed,
    ChatStyle.REASONED: _reasoned,
    ChatStyle.SHUFFLED: _shuffled,
}


# --- Replies ------------------------------------------------------------------------------------


def _from_json(body: bytes, status: int, headers: Mapping[str, str], text: bytes) -> ChatReply:
    read = json.loads(text)
    if status != 200:
        return ChatReply(body, status, headers, "", None, None, None, (), read["error"])
    assert read["object"] == "chat.completion"
    [choice] = read["choices"]
    return ChatReply(
        body,
        status,
        headers,
        read["id"],
        choice["message"],
        choice["finish_reason"],
        read["usage"],
        (),
        None,
    )


def _from_chunks(body: bytes, status: int, headers: Mapping[str, str], text: bytes) -> ChatReply:
    """Add chunks up, and check that they are what the API would send."""
    *events, end = text.decode().split("\n\n")
    assert end == ""
    told = [event.removeprefix("data: ") for event in events]
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert told.pop() == "[DONE]"
    chunks = [json.loads(each) for each in told]
    first = chunks[0]
    same = {(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in chunks}
    assert same == {(first["id"], "chat.completion.chunk", first["created"], first["model"])}
    *chunks, last = chunks
    assert last["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    reasons = [choice["finish_reason"] for choice in choices]
    assert set(reasons[:-1]) <= {None}
    deltas = tuple(choice["delta"] for choice in choices)
    return ChatReply(
        body,
        status,
        headers,
        first["id"],
        _added_up(deltas),
        reasons[-1],
        last["usage"],
        deltas,
        None,
    )


def _added_up(deltas: Sequence[Json]) -> Json:
    """Return the message that the deltas of a stream make."""
    assert deltas[0]["role"] == "assistant"
    texts = [delta["content"] for delta in deltas if delta.get("content")]
    calls: list[Json] = []
    for piece in itertools.chain(*(delta.get("tool_calls", ()) for delta in deltas)):
        if piece["index"] == len(calls):
            calls.append({key: value for key, value in piece.items() if key != "index"})
            continue
        [(kind, called)] = [(key, each) for key, each in piece.items() if key != "index"]
        call = calls[piece["index"]]
        call[kind] = {
            **call[kind],
            CALL_TEXTS[kind]: call[kind][CALL_TEXTS[kind]] + called[CALL_TEXTS[kind]],
        }
    content = "".join(texts)
    message: Json = {"role": "assistant", "content": content if content or not calls else None}
    message["refusal"] = "".join(delta.get("refusal") or "" for delta in deltas) or None
    return {**message, "tool_calls": calls} if calls else message
