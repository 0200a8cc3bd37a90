"""
The server events of one response, turned into what a Chat Completions client gets.

A `core.reply.ReplyReader` reads every message first, so its guards are ours: foreign events, late
ones, errors, the end. What it lets through is told in Chat's words: chunks of one choice while the
events come in, or one `chat.completion` at the end. Texts and arguments keep upstream's own bytes.

* The first chunk opens the message; texts and refusals are passed on as they come, of several
  messages one after the other; a tool call is opened with its name, then its arguments follow.
  Reasoning has no place in Chat and is not shown.
* What an item holds when it is done counts. Whatever of it no delta brought is made up for then,
  so upstreams that send few events or none give whole answers too. (What the client was given
  otherwise than the item says can't be taken back: its echo will not match, and that is right.)
* One `finish_reason`, one `[DONE]`. A reply that fails has neither, but `data: {"error": ...}`.

The commit point is later than in a Responses reply. Chat answers a failure with an HTTP status, so
nothing is shown before something of the answer is there: a response that is created and then
fails, with no event between that belongs to an item, is a refusal. Hence `accepted` comes before
`begun`: from then on upstream is at work, and silence means what it means in mid-answer.

`echo_message` is the assistant's message as a client that keeps everything sends it back. What
`chat_messages.translate` makes of it is what the next request is to be compared with.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import msgspec

from proxy.core import splice
from proxy.core.reply import Kind, ProtocolFault, ReplyReader, State
from proxy.core.verdicts import Refusal, error_object, parse_error

if TYPE_CHECKING:
    from collections.abc import Sequence

_NULL: Final = b"null"
_EMPTY_TEXT: Final = b'""'
_END: Final = b"\n\n"
_DONE: Final = b"data: [DONE]\n\n"
# What no message begins with: `startswith` of an empty tuple is false.
_NEVER: Final = ()

_BEGINNINGS: Final = frozenset({"response.created", "response.queued", "response.in_progress"})
_TEXT_DELTA: Final = "response.output_text.delta"
_REFUSAL_DELTA: Final = "response.refusal.delta"
_CALL_DELTAS: Final = frozenset(
    {"response.function_call_arguments.delta", "response.custom_tool_call_input.delta"}
)
_DELTAS: Final = _CALL_DELTAS | {_TEXT_DELTA, _REFUSAL_DELTA}

# Per kind of call: its type in Chat, and what the call says in either API.
_CALLS: Final = {
    "function_call": (b"function", "arguments"),
    "custom_tool_call": (b"custom", "input"),
}


class _Named(msgspec.Struct):
    model: str | None = None


class _Event(msgspec.Struct):
    type: str = ""
    delta: msgspec.Raw = msgspec.Raw(_NULL)
    output_index: int | None = None
    item: msgspec.Raw = msgspec.Raw(_NULL)
    response: _Named | None = None


class _Final(msgspec.Struct):
    """What a `chat.completion` tells of the response besides its output."""

    model: msgspec.Raw = msgspec.Raw(_NULL)
    service_tier: msgspec.Raw = msgspec.Raw(_NULL)
    usage: msgspec.Raw = msgspec.Raw(_NULL)
    error: msgspec.Raw = msgspec.Raw(_NULL)
    incomplete_details: msgspec.Raw = msgspec.Raw(_NULL)


class _InputDetails(msgspec.Struct):
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None


class _OutputDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int | None = None
    input_tokens_details: _InputDetails | None = None
    output_tokens_details: _OutputDetails | None = None


class _Incomplete(msgspec.Struct):
    reason: str | None = None


_EVENT = msgspec.json.Decoder(_Event)
_FINAL = msgspec.json.Decoder(_Final)
_USAGE = msgspec.json.Decoder(_Usage | None)
_ANY = msgspec.json.Decoder()
_INCOMPLETE = msgspec.json.Decoder(_Incomplete | None)


@dataclass(frozen=True, slots=True)
class _Piece:
    """
    An output item that Chat can show: JSON strings, as raw bytes.

    `call` is the kind of call, empty for a message; `said` the text, the arguments or the input.
    """

    said: bytes
    refusal: bytes = _EMPTY_TEXT
    call: str = ""
    call_id: bytes = b""
    name: bytes = b""

    def tool_call(self, said: bytes, index: bytes = b"") -> bytes:
        """Write the call as an element of `tool_calls`; `index` is a member to begin with."""
        kind, key = _CALLS[self.call]
        inner = b'{"name":%b,"%b":%b}' % (self.name, key.encode(), said)
        return b'{%b"id":%b,"type":"%b","%b":%b}' % (index, self.call_id, kind, kind, inner)


@dataclass(frozen=True, slots=True)
class _Flow:
    """A text that the client is given piece by piece: what surrounds one, and those it has."""

    before: bytes
    after: bytes
    seen: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class _Shown:
    """What of an output item the client has seen: texts and arguments, and refusals."""

    said: _Flow | None = None
    refused: _Flow | None = None
    is_done: bool = False


class ChatReplyReader:
    """
    Reads the messages of one attempt at a translated turn, as `core.reply.ReplyReader` does.

    `stream`, `include_usage`: what the client asked for. `created`: seconds since 1970. `model`:
    the requested one, told to the client where upstream names none. `reused`: see `ReplyReader`.

    After the end `terminal` says how the answer ended (`Kind.ERROR` for a failed response too, with
    its `refusal`); `response` is the body for a client that does not stream, b"" after an error;
    `echo_message` is the assistant's message as it is to be expected back, b"" after an error.
    `output` and `final_output` are upstream's own items.
    """

    def __init__(
        self, *, stream: bool, include_usage: bool, created: int, model: str, reused: bool = False
    ) -> None:
        self.begun = False
        self.terminal: Kind | None = None
        self.refusal: Refusal | None = None
        self.response = b""
        self.echo_message = b""
        self._reader = ReplyReader(
            stream=False, hide_previous_response_id=None, collect_output=True, reused=reused
        )
        self._stream = stream
        self._include_usage = include_usage
        self._created = created
        self._model = model
        self._pieces: list[bytes] = []
        self._items: dict[int, _Shown] = {}
        self._lacks_indices = False
        self._calls = 0
        self._read: dict[bytes, _Piece | None] = {}
        # How a message begins that goes on as the one before, of which item, and into what.
        self._usual: bytes | tuple[()] = _NEVER
        self._usual_place: int | None = None
        self._usual_flow = _Flow(b"", b"")
        # What all chunks begin with, and what surrounds a delta; known at the commit point.
        self._opening = self._before = self._after = b""

    def __repr__(self) -> str:
        return f"ChatReplyReader({self._reader!r}, begun={self.begun})"

    @property
    def terminal_message(self) -> bytes:
        """Upstream's own event that ended the answer."""
        return self._reader.terminal_message

    @property
    def accepted(self) -> bool:
        """Whether upstream has begun to answer, though there may be nothing to show yet."""
        return self._reader.begun

    @property
    def state(self) -> State:
        """How far the answer is for the client: WAITING while there is nothing to show."""
        if self.begun:
            return State.STREAMING if self.terminal is None else State.ENDED
        return State.WAITING if self.terminal is None else State.REFUSED

    @property
    def echo(self) -> bytes | None:
        """The message that is to be expected back; None after an error."""
        return self.echo_message or None

    @property
    def dirty(self) -> bool:
        """Whether something followed the end, so that the connection must not be used again."""
        return self._reader.dirty

    @property
    def response_id(self) -> str | None:
        """The id of upstream's response, once it is known."""
        return self._reader.response_id

    @property
    def output(self) -> list[bytes]:
        """Upstream's items as they were streamed; see `ReplyReader`."""
        return self._reader.output

    @property
    def final_output(self) -> list[bytes]:
        """Upstream's items in the terminal event; see `ReplyReader`."""
        return self._reader.final_output

    def error_event(self, code: str, message: str) -> bytes:
        """Return the SSE bytes of an error of our own, for a reply that has begun."""
        return _error(Refusal(502, code, "server_error", message, None))

    def feed_frames(self, data: bytes, position: int = 0) -> tuple[list[bytes], int]:  # noqa: ARG002  that of ReplyReader
        """Take nothing: a chunk is made of an event's value, so all are for `feed`."""
        return [], position

    def feed(self, messages: list[bytes]) -> bytes:
        """
        Take messages in; return the SSE bytes to write for them, b"" where there are none.

        Look at `refusal` and `terminal` after each call. Raises ProtocolFault; the reader must
        not be fed again after that.
        """
        self._pieces = []
        if self.begun and not self._stream:
            self._take_unseen(messages)
            return b""
        try:
            for message in messages:
                if not (message.startswith(self._usual) and self._take_usual(message)):
                    self._take(message)
        except ProtocolFault as fault:
            fault.written = b"".join(self._pieces)
            raise
        return b"".join(self._pieces)

    def _take_unseen(self, messages: list[bytes]) -> None:
        """Read on to the end of an answer of which nothing is shown before."""
        had_ended = self._reader.terminal is not None
        self._reader.feed(messages)
        if not had_ended and self._reader.terminal is not None:
            self._end()

    def _take_usual(self, message: bytes) -> bool:
        """Show a delta that goes on as the one before: the guards have no say in those."""
        try:
            event = _EVENT.decode(message)
        except (ValueError, RecursionError):
            return False
        raw, flow = bytes(event.delta), self._usual_flow
        is_text = raw.startswith(b'"') and raw != _EMPTY_TEXT
        if event.output_index != self._usual_place or not is_text:
            return False
        flow.seen.append(raw)
        self._pieces += (flow.before, raw, flow.after)
        return True

    def _take(self, message: bytes) -> None:
        reader = self._reader
        had_ended = reader.terminal is not None
        reader.feed([message])
        if had_ended:
            return
        if reader.terminal is not None:
            self._end()
        elif reader.begun:
            self._show(message)

    def _show(self, message: bytes) -> None:
        event = _read_event(message)
        if not event.type.startswith("response."):
            return  # a vendor's own
        if event.type in _BEGINNINGS:
            self._model = (event.response and event.response.model) or self._model
            return
        self._begin()
        if not self._stream:
            return
        self._usual = _NEVER
        if event.type in _DELTAS:
            self._show_delta(event, message)
        elif event.type == "response.output_item.added":
            self._open(self._place(event, opens=True), _read_call(bytes(event.item)))
        elif event.type == "response.output_item.done":
            self._finish_item(self._place(event, opens=False), bytes(event.item))

    # --- Chunks ---

    def _begin(self) -> None:
        """Pass the commit point: open the message, once."""
        if self.begun:
            return
        self.begun = True
        self._opening = b"data: {" + self._head(b"chat.completion.chunk")
        self._before = self._opening + b'"choices":[{"index":0,"delta":'
        self._after = b',"logprobs":null,"finish_reason":null}]%b}\n\n' % self._null_usage
        if self._stream:
            self._chunk(b'{"role":"assistant","content":"","refusal":null}')

    def _head(self, kind: bytes) -> bytes:
        ident = (self.response_id or f"resp_{self._created}").removeprefix("resp_")
        return b'"id":%b,"object":"%b","created":%d,"model":%b,"system_fingerprint":null,' % (
            _json(f"chatcmpl-{ident}"),
            kind,
            self._created,
            _json(self._model),
        )

    @property
    def _null_usage(self) -> bytes:
        return b',"usage":null' if self._include_usage else b""

    def _chunk(self, delta: bytes) -> None:
        self._pieces += (self._before, delta, self._after)

    def _show_delta(self, event: _Event, message: bytes) -> None:
        raw = bytes(event.delta)
        if not raw.startswith(b'"') or raw == _EMPTY_TEXT:
            return
        shown = self._place(event, opens=False)
        if event.type == _TEXT_DELTA:
            flow = self._text_flow(shown)
        elif event.type == _REFUSAL_DELTA:
            flow = self._refusal_flow(shown)
        elif shown.said is not None:
            flow = shown.said
        else:
            return  # of a call that is not open: made up for when it is done
        self._show_text(flow, raw)
        usual = b'{"type":"%b",' % event.type.encode()
        if message.startswith(usual) and event.output_index is not None:
            self._usual, self._usual_place, self._usual_flow = usual, event.output_index, flow

    def _show_text(self, flow: _Flow, raw: bytes) -> None:
        flow.seen.append(raw)
        self._pieces += (flow.before, raw, flow.after)

    def _text_flow(self, shown: _Shown) -> _Flow:
        if shown.said is None:
            shown.said = _Flow(self._before + b'{"content":', b"}" + self._after)
        return shown.said

    def _refusal_flow(self, shown: _Shown) -> _Flow:
        if shown.refused is None:
            shown.refused = _Flow(self._before + b'{"refusal":', b"}" + self._after)
        return shown.refused

    def _open(self, shown: _Shown, call: _Piece | None) -> None:
        """Tell of a tool call, once."""
        if call is None or shown.said is not None:
            return
        index = b'"index":%d' % self._calls
        self._calls += 1
        kind, key = _CALLS[call.call]
        begins = b'{"tool_calls":[{%b,"%b":{"%b":' % (index, kind, key.encode())
        shown.said = _Flow(self._before + begins, b"}}]}" + self._after)
        self._chunk(b'{"tool_calls":[%b]}' % call.tool_call(_EMPTY_TEXT, index + b","))

    def _finish_item(self, shown: _Shown, raw: bytes) -> None:
        """Show what is left of an item that is done."""
        piece = None if shown.is_done else self._piece(raw)
        shown.is_done = True
        if piece is None:
            return
        if piece.call:
            self._open(shown, piece)
        self._show_left(self._text_flow(shown), piece.said)
        if piece.refusal != _EMPTY_TEXT:
            self._show_left(self._refusal_flow(shown), piece.refusal)

    def _piece(self, raw: bytes) -> _Piece | None:
        """Read an output item, which upstream tells of twice mostly."""
        if raw not in self._read:
            self._read[raw] = _read_piece(raw)
        return self._read[raw]

    def _show_left(self, flow: _Flow, whole: bytes) -> None:
        if left := _left(whole, flow.seen):
            self._show_text(flow, left)

    def _place(self, event: _Event, *, opens: bool) -> _Shown:
        """Find the item of an event; without an index it is the last one that was opened."""
        place = event.output_index
        if place is None:
            self._lacks_indices = True
            place = max(self._items, default=0)
            if place in self._items and (opens or self._items[place].is_done):
                place += 1
        return self._item_at(place)

    def _item_at(self, place: int) -> _Shown:
        shown = self._items.get(place)
        if shown is None:
            shown = self._items[place] = _Shown()
        return shown

    # --- The end ---

    def _end(self) -> None:
        self._usual = _NEVER
        reader = self._reader
        if reader.refusal is not None:
            self._fail(reader.refusal)
            return
        final = _read_final(reader.response)
        if reader.terminal is Kind.FAILED:
            self._fail(_failure(bytes(final.error)))
            return
        self._model = _text(final.model) or self._model
        self._begin()
        items = reader.final_output or reader.output
        if self._stream and not self._lacks_indices:
            for place, raw in enumerate(items):
                self._finish_item(self._item_at(place), raw)
        self._complete(final, [piece for raw in items if (piece := self._piece(raw))])
        self.terminal = reader.terminal

    def _fail(self, refusal: Refusal) -> None:
        self.refusal, self.terminal = refusal, Kind.ERROR
        if self.begun and self._stream:
            self._pieces.append(_error(refusal))

    def _complete(self, final: _Final, pieces: Sequence[_Piece]) -> None:
        content, refusal, calls = _message(pieces)
        members = [b'"role":"assistant"', b'"content":' + content]
        if refusal != _NULL:
            members.append(b'"refusal":' + refusal)
        if calls:
            members.append(b'"tool_calls":[%b]' % b",".join(calls))
        self.echo_message = b"{%b}" % b",".join(members)
        reason = self._finish_reason(final, has_calls=bool(calls))
        tier = _text(final.service_tier)
        tier_member = b"" if tier is None else b',"service_tier":' + _json(tier)
        usage = _usage(bytes(final.usage))
        if self._stream:
            self._finish_stream(reason, usage, tier_member)
            return
        if refusal == _NULL:
            members.insert(2, b'"refusal":null')
        members.insert(3, b'"annotations":[]')
        self.response = b'{%b"choices":[{"index":0,"message":{%b},%b}],"usage":%b%b}' % (
            self._head(b"chat.completion"),
            b",".join(members),
            b'"logprobs":null,"finish_reason":"%b"' % reason,
            usage,
            tier_member,
        )

    def _finish_stream(self, reason: bytes, usage: bytes, tier: bytes) -> None:
        closing = b'{},"logprobs":null,"finish_reason":"%b"}]' % reason
        self._pieces += (self._before, closing, self._null_usage, tier, b"}", _END)
        if self._include_usage:
            self._pieces += (self._opening, b'"choices":[],"usage":', usage, tier, b"}", _END)
        self._pieces.append(_DONE)

    def _finish_reason(self, final: _Final, *, has_calls: bool) -> bytes:
        if self._reader.terminal is Kind.INCOMPLETE:
            try:
                details = _INCOMPLETE.decode(final.incomplete_details)
            except ValueError:
                details = None
            filtered = details is not None and details.reason == "content_filter"
            return b"content_filter" if filtered else b"length"
        return b"tool_calls" if has_calls else b"stop"


def _error(refusal: Refusal) -> bytes:
    """Write an error as SDKs raise it in mid-stream (real-clients-python 1.9)."""
    # A line end (of pretty-printed JSON) would end the SSE field.
    line = error_object(refusal).replace(b"\n", b" ").replace(b"\r", b" ")
    return b'data: {"error":%b}\n\n' % line


def _failure(raw: bytes) -> Refusal:
    """Read the `error` of a failed response as the refusal that Chat would have answered with."""
    refusal = parse_error(b'{"type":"error","error":%b}' % raw) if raw.startswith(b"{") else None
    if refusal is None:
        text = "The upstream failed to answer."
        return Refusal(500, "server_error", "server_error", text, None)
    if refusal.status == 502:  # of no known kind; those about images are the client's fault
        return replace(refusal, status=400 if "image" in (refusal.code or "") else 500)
    return refusal


def _message(pieces: Sequence[_Piece]) -> tuple[bytes, bytes, list[bytes]]:
    """Return content, refusal and calls of the message that these items make."""
    content = _joined([piece.said for piece in pieces if not piece.call])
    refusal = _joined([piece.refusal for piece in pieces])
    calls = [piece.tool_call(piece.said) for piece in pieces if piece.call]
    if refusal == _EMPTY_TEXT:
        refusal = _NULL
    if content == _EMPTY_TEXT and (calls or refusal != _NULL):
        content = _NULL
    return content, refusal, calls


def _usage(raw: bytes) -> bytes:
    """Write Chat's `usage`; zeros where upstream counted nothing, since clients rely on it."""
    try:
        used = _USAGE.decode(raw) or _Usage()
    except ValueError:
        used = _Usage()
    given, made = used.input_tokens_details, used.output_tokens_details
    prompt = {"cached_tokens": (given and given.cached_tokens) or 0, "audio_tokens": 0}
    if given is not None and given.cache_write_tokens is not None:
        prompt["cache_write_tokens"] = given.cache_write_tokens
    completion = {
        "reasoning_tokens": (made and made.reasoning_tokens) or 0,
        "audio_tokens": 0,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    }
    total = used.input_tokens + used.output_tokens
    return msgspec.json.encode(
        {
            "prompt_tokens": used.input_tokens,
            "completion_tokens": used.output_tokens,
            "total_tokens": total if used.total_tokens is None else used.total_tokens,
            "prompt_tokens_details": prompt,
            "completion_tokens_details": completion,
        }
    )


# --- JSON strings -------------------------------------------------------------------------------


def _joined(raws: Sequence[bytes]) -> bytes:
    """Return the JSON string of all these one after the other; each keeps its spelling."""
    return b'"%b"' % b"".join(raw[1:-1] for raw in raws)


def _left(whole: bytes, parts: Sequence[bytes]) -> bytes | None:
    """Return, as JSON, what `parts` lack of the string `whole`; None if nothing, or they differ."""
    shown = _joined(parts)
    if whole == shown:
        return None
    if whole.startswith(shown[:-1]):
        return b'"' + whole[len(shown) - 1 :]
    text, seen = _value(whole), _value(shown)
    if not isinstance(text, str) or not isinstance(seen, str) or not text.startswith(seen):
        return None
    return _json(text[len(seen) :]) if text != seen else None


def _json(text: str) -> bytes:
    return json.dumps(text).encode()


# --- Reading, with doubt turned into ProtocolFault ----------------------------------------------


def _read_event(message: bytes) -> _Event:
    try:
        return _EVENT.decode(message)
    except (ValueError, RecursionError):
        # Half an emoji, which msgspec refuses (see splice), or a member of another type.
        found = _fields(message)
    kind, index = _value(found.get("type")), _value(found.get("output_index"))
    return _Event(
        type=kind if isinstance(kind, str) else "",
        delta=msgspec.Raw(found.get("delta", _NULL)),
        output_index=index if isinstance(index, int) and not isinstance(index, bool) else None,
        item=msgspec.Raw(found.get("item", _NULL)),
        response=_Named(_named_model(found.get("response", _NULL))),
    )


def _named_model(response: bytes) -> str | None:
    model = _value(_fields(response).get("model")) if response.startswith(b"{") else None
    return model if isinstance(model, str) else None


def _read_final(response: bytes) -> _Final:
    try:
        return _FINAL.decode(response)
    except (ValueError, RecursionError):
        found = _fields(response)
    known = {key: msgspec.Raw(found[key]) for key in _Final.__struct_fields__ if key in found}
    return _Final(**known)


def _read_call(raw: bytes) -> _Piece | None:
    """Read a call that is announced; None if it is none, or can't be told of yet."""
    item = _fields(raw)
    call = _value(item.get("type"))
    call_id, name = item.get("call_id", b""), item.get("name", b"")
    if call not in _CALLS or not (call_id.startswith(b'"') and name.startswith(b'"')):
        return None
    return _Piece(_EMPTY_TEXT, call=call, call_id=call_id, name=name)


def _read_piece(raw: bytes) -> _Piece | None:
    """Read an output item; None if Chat has no place for it."""
    item = _fields(raw)
    kind = _value(item.get("type"))
    if kind == "message":
        return _read_message(item.get("content", b"[]"))
    if kind not in _CALLS:
        return None
    call_id, name = item.get("call_id", b""), item.get("name", b"")
    said = item.get(_CALLS[kind][1], b"")
    if not all(value.startswith(b'"') for value in (call_id, name, said)):
        raise ProtocolFault("a tool call lacks its id, its name or what it says")
    return _Piece(said, call=kind, call_id=call_id, name=name)


def _read_message(content: bytes) -> _Piece:
    if content.startswith(b'"'):
        return _Piece(content)
    texts: list[bytes] = []
    refusals: list[bytes] = []
    for raw in _elements(content):
        part = _fields(raw)
        for key, found in (("text", texts), ("refusal", refusals)):
            if part.get(key, b"").startswith(b'"'):
                found.append(part[key])
    return _Piece(_joined(texts), _joined(refusals))


def _fields(raw: bytes) -> dict[str, bytes]:
    try:
        return splice.fields(raw)
    except ValueError as error:
        raise ProtocolFault(f"unreadable message: {error}") from None


def _elements(raw: bytes) -> list[bytes]:
    try:
        return splice.elements(raw)
    except ValueError as error:
        raise ProtocolFault(f"unreadable message: {error}") from None


def _text(raw: msgspec.Raw) -> str | None:
    value = _value(bytes(raw))
    return value if isinstance(value, str) else None


def _value(raw: bytes | None) -> object:
    if raw is None:
        return None
    try:
        return _ANY.decode(raw)
    except (ValueError, RecursionError):
        pass  # perhaps half an emoji
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None
