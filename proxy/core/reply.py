"""
The server events of one response, turned into what the client gets.

Over WebSocket each event is one message; over HTTP the same bytes are the `data:` of an SSE event,
or, without streaming, the terminal event's `response` object is the whole body. So the work is
mostly framing, and the rule is: *a message's own bytes go to the client*. Only where the client
would notice that its turn had been sent otherwise than it asked is a value changed, by splicing:

* `previous_response_id` in the lifecycle events' response objects, which we put there;
* an `output` that the upstream left empty in the terminal event though it streamed items;
* an `error` event, which is given the details twice: flat, as documented, and under `error`, the
  only form on which the Python SDK raises.

Events of a vendor's own (`codex.*`, `responsesapi.*`, `keepalive`) are dropped, as HTTP has none.

What it costs: a streamed answer is thousands of `....delta` events. One of the same type as the
event before is told by its first bytes and is neither parsed nor copied until all events of one
read are joined into one write. That such an event is well-formed JSON is not checked beyond its
last byte; the bytes are those that a client would have got over HTTP. `feed_frames` does the same
with a read buffer, from which it cuts the messages itself: that an event has no line end and is
UTF-8 is then checked of all together, once they are joined.

States: WAITING until the first event; STREAMING; then ENDED by a terminal event or an error.
An error in place of the first event ends in REFUSED instead: nothing is encoded, so that the turn
can be resent, or answered with a real HTTP status.
"""

from __future__ import annotations

import enum
import json
import re
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from proxy.core import splice
from proxy.core.frames import LENGTH_IN_2_BYTES, WHOLE_TEXT
from proxy.core.verdicts import Refusal, error_object, parse_error
from proxy.errors import UpstreamError

KEEPALIVE_COMMENT: Final = b": keep-alive\n"
"""Written in a long silence. One line and no blank one, which some clients take for an event."""


class ProtocolFault(UpstreamError):
    """
    The upstream sent what belongs to no answer: not JSON, no type, or another response's event.

    The connection must be discarded. `written` are the SSE bytes of the messages before the
    faulty one in the same batch; the caller writes them before it ends the reply.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.written = b""


class Kind(enum.Enum):
    """How an answer ended. Only COMPLETED can be continued."""

    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    ERROR = "error"


class State(enum.Enum):
    """How far an answer is. See the module's docstring."""

    WAITING = enum.auto()
    STREAMING = enum.auto()
    ENDED = enum.auto()
    REFUSED = enum.auto()


class _Role(enum.Enum):
    """What is to be done about an event of a type."""

    PLAIN = enum.auto()
    VENDOR = enum.auto()
    LIFECYCLE = enum.auto()
    ITEM_DONE = enum.auto()
    ERROR = enum.auto()


@dataclass(frozen=True, slots=True)
class _EventType:
    name: str
    role: _Role
    head: bytes
    usual: bytes
    """How a message of this type usually begins; empty where each must be looked into."""


class _Typed(msgspec.Struct):
    type: str | None = None


_SKIM_TYPE = msgspec.json.Decoder(_Typed)
_TYPE_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,100}")
_PREFIX = b'{"type":"'
# What no message begins with: `startswith` of an empty tuple is false.
_NEVER: Final = ()
_END = b"\n\n"
_LINES = 3  # that an event is written in: head, data, and an empty one
_BRACE: Final = b"}"[0]
_SHORT_FRAME: Final = 2048
_SHORTEST: Final = 4  # bytes of a frame that could be a plain event, rounded down

_LIFECYCLE: dict[str, Kind | None] = {
    "response.created": None,
    "response.queued": None,
    "response.in_progress": None,
    "response.completed": Kind.COMPLETED,
    "response.incomplete": Kind.INCOMPLETE,
    "response.failed": Kind.FAILED,
    "response.cancelled": Kind.FAILED,
}

# A late event of the turn before must not pass for the answer to this one.
_BEGINNINGS: Final = frozenset({"response.created", "response.queued", "response.in_progress"})


def _describe(name: str) -> _EventType:
    role = _Role.PLAIN if name.startswith("response.") else _Role.VENDOR
    if name in _LIFECYCLE:
        role = _Role.LIFECYCLE
    elif name == "response.output_item.done":
        role = _Role.ITEM_DONE
    elif name == "error":
        role = _Role.ERROR
    usual = b'{"type":"%b",' % name.encode() if role is _Role.PLAIN else b""
    return _EventType(name, role, b"event: %b\ndata: " % name.encode(), usual)


_ERROR = _describe("error")
_VENDOR = _describe("vendor")
# The types met so far, by name. Bounded, since the names come from outside.
_EVENT_TYPES: dict[bytes, _EventType] = {}
_MAX_EVENT_TYPES: Final = 512


class ReplyReader:
    """
    Reads the messages of one attempt at a turn.

    `stream`: the client asked for SSE. `hide_previous_response_id`: the id that we put into the
    request, so that the client must not see it; None where the client sent one itself, or none
    was sent. `collect_output`: `output` and `final_output` will be asked for. `reused`: the
    connection has carried another turn, so that what does not begin an answer may belong to that
    one: it is a fault, where on a new connection any first event will do.

    Before the end `response_id` is that of the first lifecycle event, if there was any. After it,
    `terminal` says how the answer ended, `terminal_message` is the event that ended it unless that
    was an error; `response` is, for a client that does not stream, the
    body: the response object's bytes, b"" after an error; `refusal` is the error, if it was one;
    `dirty` tells that something followed the end, so that the connection must not be used again.
    """

    def __init__(
        self,
        *,
        stream: bool,
        hide_previous_response_id: str | None,
        collect_output: bool,
        reused: bool = False,
    ) -> None:
        self.state = State.WAITING
        self.terminal: Kind | None = None
        self.refusal: Refusal | None = None
        self.dirty = False
        self.response_id: str | None = None
        self.terminal_message = b""
        self.response = b""
        self.final_output: list[bytes] = []
        self._stream = stream
        self._hides_previous = hide_previous_response_id is not None
        self._collects_output = collect_output
        self._reused = reused
        self._items: list[tuple[int | None, bytes]] = []
        self._created = False
        self._last_message = b""
        # The SSE events of this batch, as triples of head, message, end.
        self._pieces: list[bytes] = []
        self._usual: bytes | tuple[()] = _NEVER
        self._usual_head = b""
        self._takes_frames = True

    def __repr__(self) -> str:
        return f"ReplyReader({self.state.name}, response_id={self.response_id!r})"

    @property
    def begun(self) -> bool:
        """Whether an event was let through: the commit point, where the reply is streamed."""
        return self.state in (State.STREAMING, State.ENDED)

    @property
    def accepted(self) -> bool:
        """Whether upstream has begun to answer; see `ChatReplyReader`, where that shows later."""
        return self.begun

    @property
    def echo(self) -> bytes | None:
        """None: the client is given the items themselves."""
        return None

    def error_event(self, code: str, message: str) -> bytes:
        """Return the SSE bytes of an error of our own, for a reply that has begun."""
        return error_event(code, message, (self.last_sequence_number or 0) + 1)

    @property
    def output(self) -> list[bytes]:
        """The items of all `response.output_item.done` events, by `output_index`, else arrival."""
        if len(self._items) <= 1:
            return [item for _, item in self._items]
        indexed = {index: item for index, item in self._items if index is not None}
        if all(index is not None for index, _ in self._items):
            return [indexed[index] for index in sorted(indexed)]
        return [item for _, item in self._items]

    @property
    def last_sequence_number(self) -> int | None:
        """The `sequence_number` of the last event shown, if it has one. Parses that event."""
        return _sequence_number(self._last_message)

    def feed(self, messages: list[bytes]) -> bytes:
        """
        Take messages in; return the SSE bytes to write for them, b"" where there are none.

        Look at `refusal` and `terminal` after each call. Raises ProtocolFault; the reader must
        not be fed again after that.
        """
        pieces = self._pieces = []
        stream, usual, head = self._stream, self._usual, self._usual_head
        for message in messages:
            if message.startswith(usual) and message.endswith(b"}") and b"\n" not in message:
                if stream:
                    pieces += (head, message, _END)
                continue
            try:
                self._take(message)
            except ProtocolFault as fault:
                fault.written = self._joined()
                raise
            usual, head = self._usual, self._usual_head
        return self._joined()

    def feed_frames(self, data: bytes, position: int = 0) -> tuple[list[bytes], int]:
        """
        Take plain events out of the WebSocket frames in `data`, from `position` on.

        Return what `feed` would have returned for them, in pieces, and the position of the first
        frame that was not taken: it is not whole or not short, its message is no event of a plain
        and known type, or the answer does not stream at present. Its message is for `feed`.
        """
        if (only := self._only_event(data, position)) is not None:
            return only, len(data)
        written: list[bytes] = []
        while self._takes_frames and self.state is State.STREAMING:
            messages, end = _cut_alike(data, position, self._usual)
            if messages:
                body = (_END + self._usual_head).join(messages)
                has_line_ends = data.find(b"\n", position, end) >= 0  # or a length looks like one
                if (has_line_ends and body.count(b"\n") != _LINES * (len(messages) - 1)) or not (
                    body.isascii() or _is_utf8(body)
                ):
                    # Found out too late to say where, and rare: `feed` sees to all that follows.
                    self._takes_frames = False
                    break
                position = end
                if self._stream:
                    written += (self._usual_head, _without_returns(body), _END)
                    self._last_message = messages[-1]
            if position == len(data):
                break
            event = _next_type(data, position)
            if event is None or event.usual in (b"", self._usual):
                break
            self._usual, self._usual_head = event.usual, event.head
        return written, position

    def _only_event(self, data: bytes, position: int) -> list[bytes] | None:
        """
        Do `feed_frames` where all there is is one event like the one before; else return None.

        So it is at nearly every read of an answer that comes at the pace of a model.
        """
        usual = self._usual
        size = len(data) - position
        if not usual or not self._takes_frames or not _SHORTEST <= size <= _SHORT_FRAME:
            return None
        start = position + 2
        length = data[start - 1] if data[position] == WHOLE_TEXT else 0
        if length == LENGTH_IN_2_BYTES:
            length, start = data[start] << 8 | data[start + 1], start + 2
        if start + length != len(data) or not data.startswith(usual, start):
            return None
        message = data[start:]
        if message[-1] != _BRACE or not message.isascii() or b"\n" in message or b"\r" in message:
            return None
        if not self._stream:
            return []
        self._last_message = message
        return [self._usual_head, message, _END]

    def _take(self, message: bytes) -> None:
        if self.terminal is not None:
            self.dirty = self.dirty or not _is_vendors(message)
            return
        event = _event_type(message)
        if event.role is _Role.VENDOR:
            return
        if event.role is _Role.ERROR:
            self._take_error(message)
            return
        if self.state is State.WAITING and self._reused and event.name not in _BEGINNINGS:
            raise ProtocolFault("an answer does not begin with its beginning")
        if event.role is _Role.LIFECYCLE:
            message = self._read_lifecycle(event.name, message)
        elif event.role is _Role.ITEM_DONE:
            self._read_item(message)
        if self.state is State.WAITING:
            self.state = State.STREAMING
        self._show(event, message)

    def _show(self, event: _EventType, message: bytes) -> None:
        if self._stream:
            # A line end (of pretty-printed JSON) would end the SSE field.
            line = message.replace(b"\n", b" ") if b"\n" in message else message
            self._pieces += (event.head, line, _END)
        self._usual, self._usual_head = _NEVER, event.head
        if event.usual and message.startswith(event.usual):
            self._usual = event.usual

    def _joined(self) -> bytes:
        pieces = self._pieces
        if not pieces:
            return b""
        self._last_message = pieces[-2]
        return _without_returns(b"".join(pieces))

    def _take_error(self, message: bytes) -> None:
        refusal = parse_error(message)
        if refusal is None:
            raise ProtocolFault("unreadable error frame")
        waited = self.state is State.WAITING
        self.refusal, self.terminal = refusal, Kind.ERROR
        self.state = State.REFUSED if waited else State.ENDED
        self._usual = _NEVER
        if self._stream and not waited:
            number = _sequence_number(message)
            if number is None:
                last = self._pieces[-2] if self._pieces else self._last_message
                number = (_sequence_number(last) or 0) + 1
            self._show(_ERROR, _both_ways(refusal, number))

    def _read_lifecycle(self, name: str, message: bytes) -> bytes:
        """Take note of the event and return it as the client should see it."""
        kind, seen = _LIFECYCLE[name], _look(message)
        if seen is None:
            if kind is not None:
                raise ProtocolFault("a terminal event has no response")
            return message
        self._check_identity(name, seen.id)
        output = [bytes(item) for item in seen.output or ()] if kind is not None else []
        # The ChatGPT backend leaves the output empty (protocol 3.2); clients rely on it.
        fills = kind in (Kind.COMPLETED, Kind.INCOMPLETE) and bool(self._items) and not output
        previous = bytes(seen.previous_response_id) if self._hides_previous else _NULL
        if fills:
            message = _spliced(message, self.output)
        if previous != _NULL:
            message = _hidden_at_once(message, previous) or _spliced(message)
        if kind is not None:
            self._end(kind, message, output)
        return message

    def _end(self, kind: Kind, message: bytes, output: list[bytes]) -> None:
        if not self._stream:
            self.response = _member(message, "response") or b""
        self.state, self.terminal = State.ENDED, kind
        self.terminal_message = message
        if self._collects_output:
            self.final_output = output
        else:
            self._items = []

    def _check_identity(self, name: str, ident: str | None) -> None:
        """Refuse what belongs to another response (reliability F18)."""
        if ident is not None:
            if self.response_id not in (None, ident):
                raise ProtocolFault("an event belongs to another response")
            self.response_id = ident
        if name == "response.created":
            if self._created:
                raise ProtocolFault("a response was created twice")
            self._created = True

    def _read_item(self, message: bytes) -> None:
        try:
            seen = _SKIM_ITEM.decode(message)
        except (ValueError, RecursionError):
            seen = _look_for_item(message)
        item, index = bytes(seen.item), seen.output_index
        if item.startswith(b"{"):
            whole = isinstance(index, int) and not isinstance(index, bool)
            self._items.append((index if whole else None, item))


def error_event(code: str, message: str, sequence_number: int) -> bytes:
    """Return the SSE bytes of an error of our own, for a reply that has begun."""
    refusal = Refusal(502, code, "server_error", message, None)
    return b"".join((_ERROR.head, _both_ways(refusal, sequence_number), _END))


def _both_ways(refusal: Refusal, sequence_number: int) -> bytes:
    """Write an `error` event with its details flat and nested (real-clients-python 1.9)."""
    flat = {
        "type": "error",
        "code": refusal.code,
        "message": refusal.message,
        "param": refusal.param,
        "sequence_number": sequence_number,
    }
    return b'%b,"error":%b}' % (json.dumps(flat).encode()[:-1], error_object(refusal))


# --- Lifecycle events ---------------------------------------------------------------------------
#
# They carry the instructions and tools, so may be large, and come three times a turn. One skim
# in C finds what is needed to know. Where the hidden id stands is guessed and the guess proved by a
# second skim; an exact walk over the response's members, slower, is there for all other cases.


class _Response(msgspec.Struct):
    id: str | None = None
    previous_response_id: msgspec.Raw = msgspec.Raw(b"null")
    output: list[msgspec.Raw] | None = None


class _Lifecycle(msgspec.Struct):
    response: _Response | None = None


_SKIM_LIFECYCLE = msgspec.json.Decoder(_Lifecycle)
_NULL: Final = b"null"
_PREVIOUS_KEY: Final = b'"previous_response_id"'
_COLON = re.compile(rb"[ \t\n\r]*+:[ \t\n\r]*+")


class _ItemDone(msgspec.Struct):
    item: msgspec.Raw = msgspec.Raw(b"null")
    output_index: Any = None


_SKIM_ITEM = msgspec.json.Decoder(_ItemDone)


def _look_for_item(message: bytes) -> _ItemDone:
    """Do as the skim does, for JSON that msgspec refuses (see splice)."""
    found = _members(message)
    item, index = splice.find(found, "item"), splice.find(found, "output_index")
    return _ItemDone(
        item=msgspec.Raw(b"null" if item is None else message[item.start : item.end]),
        output_index=None if index is None else _parsed(message[index.start : index.end]),
    )


def _look(message: bytes) -> _Response | None:
    """Return what matters of the event's response; None where it has none."""
    try:
        return _SKIM_LIFECYCLE.decode(message).response
    except (ValueError, RecursionError):
        response = _member(message, "response") or b""
    if not response.startswith(b"{"):
        return None
    ident = _parsed(_member(response, "id") or _NULL)
    try:
        output = splice.elements(_member(response, "output") or _NULL)
    except ValueError:
        output = []
    return _Response(
        id=ident if isinstance(ident, str) else None,
        previous_response_id=msgspec.Raw(_member(response, "previous_response_id") or _NULL),
        output=[msgspec.Raw(item) for item in output],
    )


def _hidden_at_once(message: bytes, previous: bytes) -> bytes | None:
    """
    Put null in place of `previous`, the response's `previous_response_id`; None if in doubt.

    Tries the first place where the key's bytes stand, and looks again: only if the member itself
    reads null now was that its place.
    """
    colon = _COLON.match(message, message.find(_PREVIOUS_KEY) + len(_PREVIOUS_KEY))
    if colon is None or not message.startswith(previous, colon.end()):
        return None
    end = colon.end() + len(previous)
    tried = b"".join((message[: colon.end()], _NULL, message[end:]))
    try:
        seen = _SKIM_LIFECYCLE.decode(tried).response
    except (ValueError, RecursionError):
        return None
    return tried if seen is not None and bytes(seen.previous_response_id) == _NULL else None


def _spliced(message: bytes, output: list[bytes] | None = None) -> bytes:
    """Replace the response's `output`, or else its `previous_response_id` by null."""
    stands = splice.find(_members(message), "response")
    assert stands is not None, "the response has been read"
    response = message[stands.start : stands.end]
    key = "previous_response_id" if output is None else "output"
    value = _NULL if output is None else b"[%b]" % b",".join(output)
    edit = splice.putting(response, _members(response), key, value)
    shift = stands.start
    return splice.edited(message, [splice.Edit(edit.start + shift, edit.end + shift, edit.value)])


# --- Frames -------------------------------------------------------------------------------------


def _cut_alike(data: bytes, position: int, beginning: bytes | tuple[()]) -> tuple[list[bytes], int]:
    """
    Cut out the messages that begin like that and end in a brace, as long as one follows another.

    They must be in whole text frames below 64 KiB. Return them, and where the next frame begins.
    """
    messages: list[bytes] = []
    add, end = messages.append, len(data)
    while end - position >= _SHORTEST and data[position] == WHOLE_TEXT:
        length, start = data[position + 1], position + 2
        if length >= LENGTH_IN_2_BYTES:
            if length > LENGTH_IN_2_BYTES:
                break
            length, start = data[start] << 8 | data[start + 1], start + 2
        stop = start + length
        message = data[start:stop]
        if stop > end or not message.startswith(beginning) or message[-1] != _BRACE:
            break
        add(message)
        position = stop
    return messages, position


def _next_type(data: bytes, position: int) -> _EventType | None:
    """Return the type of the message in the frame at `position`, if it can be told at a glance."""
    start = data.find(_PREFIX, position + 2, position + 4 + len(_PREFIX)) + len(_PREFIX)
    if start < len(_PREFIX):
        return None
    return _EVENT_TYPES.get(data[start : max(data.find(b'"', start, start + 101), 0)])


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _without_returns(text: bytes) -> bytes:
    # A carriage return ends a line of SSE, too; in JSON it is as good as a space.
    return text.replace(b"\r", b" ") if b"\r" in text else text


# --- The type of a message ----------------------------------------------------------------------


def _event_type(message: bytes) -> _EventType:
    """Tell a message's type; raises ProtocolFault where it has none and is no typeless error."""
    if message.startswith(_PREFIX) and message.endswith(b"}"):
        name_end = message.find(b'"', len(_PREFIX))
        known = _EVENT_TYPES.get(message[len(_PREFIX) : max(name_end, 0)])
        if known is not None:
            return known
    name = _skim_type(message)
    if name is None:
        if parse_error(message) is None:
            raise ProtocolFault("a message has no type")
        return _ERROR
    if not _TYPE_NAME.fullmatch(name):
        if name.startswith("response."):
            raise ProtocolFault("a message's type is not a name")
        return _VENDOR
    event = _describe(name)
    if len(_EVENT_TYPES) < _MAX_EVENT_TYPES:
        _EVENT_TYPES[name.encode()] = event
    return event


def _skim_type(message: bytes) -> str | None:
    try:
        return _SKIM_TYPE.decode(message).type
    except (ValueError, RecursionError):
        # Not JSON, or JSON that msgspec refuses (see splice), or a type that is no text.
        name = _parsed(_member(message, "type") or b"null")
    if name is not None and not isinstance(name, str):
        raise ProtocolFault("a message's type is not text")
    return name


def _is_vendors(message: bytes) -> bool:
    try:
        return _event_type(message).role is _Role.VENDOR
    except ProtocolFault:
        return False


# --- Reading, with ValueError turned into ProtocolFault -----------------------------------------


def _members(text: bytes) -> list[splice.Member]:
    try:
        return splice.members(text)
    except ValueError as error:
        raise ProtocolFault(f"unreadable message: {error}") from None


def _member(message: bytes, key: str) -> bytes | None:
    try:
        return splice.fields(message).get(key)
    except ValueError as error:
        raise ProtocolFault(f"unreadable message: {error}") from None


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _sequence_number(message: bytes) -> int | None:
    try:
        number = _parsed(_member(message, "sequence_number") or b"null")
    except ProtocolFault:
        return None
    return number if isinstance(number, int) and not isinstance(number, bool) else None
