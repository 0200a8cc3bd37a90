"""
A request body, taken apart without touching it.

Everything that goes upstream is made of slices of the client's own bytes: its settings member by
member, its `input` as it stands, or the raw items after those that upstream holds. Nothing is
parsed to be written again.

Two ways lead to a `TurnRequest`:

* `parse_body` skims the whole body once (about a millisecond a megabyte) and fingerprints every
  item: the way of a conversation's first request.
* `parse_tail` needs only what follows a known prefix. A JSON lexer is a left-to-right automaton:
  if the first L bytes of two bodies are equal, it stands in the same state after both, inside
  `input`, just after the same item. So all that was proved of those bytes when they were first
  seen still holds, and only the rest is looked at.

Where two readers of the same bytes might disagree (duplicate keys, NaN, lone bytes), the answer
is a reason to pass the request through, never a guess.

A body may be written in another dialect than that of the Responses API (`core.chat_turn`): under
another key, with elements that are yet to become items. Whatever is said here of prefixes holds
for those too, as long as equal elements after equal ones mean equal items.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from proxy.core.canonical import parse
from proxy.core.chat_fields import Untranslatable
from proxy.core.chat_messages import NO_CALLS
from proxy.core.items import Item
from proxy.core.reasons import Reason
from proxy.core.splice import elements, members

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.core.canonical import JSON
    from proxy.core.items import Fingerprinter
    from proxy.core.prefix import Walk
    from proxy.core.splice import Member

WHITE_SPACE = b" \t\r\n"

# Fields that steer only the response at hand and are sent again anyway: they may differ between
# the turns of a chain. Every other field must be equal, also one that we do not know.
PER_RESPONSE = frozenset(
    {
        "stream",
        "stream_options",
        "tool_choice",
        "parallel_tool_calls",
        "max_output_tokens",
        "max_tool_calls",
        "temperature",
        "top_p",
        "top_logprobs",
        "include",
        "metadata",
        "client_metadata",
        "user",
        "safety_identifier",
        "background",
        "previous_response_id",
    }
)

# Implied by the transport: the guide says not to send them on a WebSocket.
NOT_SENT = frozenset({"input", "stream", "background", "previous_response_id"})

# On HTTP these are refused as unknown, on WebSocket they mean something: HTTP must decide.
WEBSOCKET_ONLY = frozenset({"type", "generate", "stream_id"})

# An escape of a letter of `compaction_trigger`.
_ESCAPED_LETTER = re.compile(rb"\\u00[5-7]")

# Tools that act on the world while upstream answers: running such a turn twice is not harmless.
LOCAL_TOOL_TYPES = frozenset({"function", "custom", "namespace", "tool_search", "local_shell"})


@dataclass(frozen=True, slots=True)
class Setting:
    """One member of the body other than `input`: its key and its value's own bytes."""

    key: str
    raw: bytes


@dataclass(frozen=True)
class Envelope:
    """
    A body's settings: every field except `input`.

    `fingerprints` holds those that the turns of a chain must have in common; `ineligible` the
    reason why WebSocket mode can't carry this request, if there is one.
    """

    settings: tuple[Setting, ...]
    fingerprints: Mapping[str, bytes]
    stream: bool
    stored: bool
    model: str | None
    previous_response_id: str | None
    replay_safe: bool
    ineligible: Reason | None

    @cached_property
    def message_members(self) -> bytes:
        """
        The settings as members of a `response.create` message, in the client's bytes.

        Nulls are left out: to the API they are as good as absent, and its WebSocket endpoint was
        seen to refuse some of them.
        """
        return b"".join(
            b",%b:%b" % (msgspec.json.encode(setting.key), setting.raw)
            for setting in self.settings
            if setting.key not in NOT_SENT and setting.raw != b"null"
        )

    @property
    def size_bytes(self) -> int:
        """How much memory the envelope holds, about."""
        return 200 + sum(2 * len(setting.raw) + 150 for setting in self.settings)


class Dialect:
    """
    How a body is read, and written again; this one is the Responses API's own, where both are easy.

    `array` is the key of the list of elements. `calls` are ids of tool calls in the elements before
    that the meaning of later elements depends on; what comes back holds those of the new ones too.
    """

    array = "input"
    is_translated = False

    def envelope(self, settings: Sequence[Setting], fingerprints: Fingerprinter) -> Envelope:
        """Read the settings. Raises ValueError if one of them can't be read without doubt."""
        return read_envelope(settings, fingerprints)

    def items(
        self,
        elements_: Sequence[bytes],
        calls: frozenset[str],
        make: Callable[[bytes], Item] = Item,
    ) -> tuple[list[Item], frozenset[str]]:
        """Return what elements mean; `make` makes an item. Raises ValueError as `envelope` does."""
        return [make(raw) for raw in elements_], calls

    def whole(self, raw: bytes) -> tuple[list[Item], frozenset[str]] | None:
        """Return what the value under `array` means, None if it can't be what it should be."""
        if raw.startswith(b"["):
            return self.items(elements(raw), NO_CALLS)
        if raw.startswith(b'"'):
            return [Item(b'{"role":"user","content":%b}' % raw)], NO_CALLS
        return None

    def full_input(self, request: TurnRequest) -> bytes:
        """Return the whole history as the Responses API takes it."""
        return request.body[request.input_start : request.input_end]

    def full_input_bytes(self, request: TurnRequest) -> int:
        """How long that is, at most."""
        return request.input_end - request.input_start


_OWN_DIALECT = Dialect()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """
    What is known of a place where turns are posted: the dialects that bodies there may have.

    The first one whose array a body has is taken. `name` keeps histories of endpoints apart: the
    same bytes may mean something else at each.
    """

    name: str
    dialects: tuple[Dialect, ...]


RESPONSES = Endpoint("", (_OWN_DIALECT,))


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Frame:
    """
    What stands around the items of a body: the settings before (`head`) and the bytes after.

    Most clients send the same bytes at every turn, and in every conversation, so one frame serves
    them all, with the `envelope` that it was read as. Some write something new there each time
    (Codex: ids and times), and then only `suffix_hash` is kept, to notice when that ends. `owner`
    is the key of its principal's empty history.
    """

    owner: bytes
    head: tuple[Setting, ...]
    suffix_hash: int
    suffix: bytes | None = None
    envelope: Envelope | None = None
    dialect: Dialect = _OWN_DIALECT

    @property
    def size_bytes(self) -> int:
        """How much memory the frame holds, about; a `head` without a suffix is another frame's."""
        if self.suffix is None or self.envelope is None:
            return 200
        return 200 + len(self.suffix) + self.envelope.size_bytes


@dataclass(slots=True)
class Prefix:
    """
    The beginning of a body seen before: `length` bytes, up to the end of its last item.

    `history` is the key of the `item_count` items inside the prefix. Not to be changed. (Frozen,
    like all that is made at every turn, it would take several times as long to make.)
    """

    length: int
    input_start: int
    frame: Frame
    item_count: int
    history: bytes
    compacts: bool
    calls: frozenset[str] = NO_CALLS


@dataclass(slots=True, eq=False)
class TurnRequest:
    """
    A parsed body, relative to the history (`base`) that was known before.

    `items` are the items after the first `base_count`, whose history has the key `base_history`.
    `compacts` tells whether the history holds a `compaction_trigger` anywhere. `frame` is that of
    the base. `walk` is what the index of prefixes has computed of the body already. For `dialect`
    and `calls` see `Dialect`.
    """

    body: bytes
    envelope: Envelope
    input_start: int
    input_end: int
    base_count: int
    base_history: bytes
    items: Sequence[Item]
    compacts: bool
    fingerprints: Fingerprinter = field(repr=False)
    head: tuple[Setting, ...] = field(repr=False, default=())
    frame: Frame | None = field(repr=False, default=None)
    walk: Walk | None = field(repr=False, default=None)
    dialect: Dialect = field(repr=False, default=_OWN_DIALECT)
    calls: frozenset[str] = field(repr=False, default=NO_CALLS)
    _histories: list[bytes] | None = field(init=False, repr=False, default=None)
    _prefix: Prefix | None = field(init=False, repr=False, default=None)

    @property
    def histories(self) -> Sequence[bytes]:
        """
        The keys of all histories that end within the request, computed when first asked for.

        `histories[i]` is that of the history which ends before `items[i]`, `histories[-1]` that of
        the whole request. Raises ValueError if an item is nested too deeply to be written.
        """
        if self._histories is None:
            self._histories = fold(self.base_history, self.items, self.fingerprints)
        return self._histories

    @property
    def history(self) -> bytes:
        """The key of the request's whole history."""
        return self.histories[-1]

    @property
    def item_count(self) -> int:
        """How many items the whole history has."""
        return self.base_count + len(self.items)

    @property
    def full_message_bytes(self) -> int:
        """How long the message of `full_message` is, at most."""
        framing = len(b'{"type":"response.create","input":}')
        members_bytes = len(self.envelope.message_members)
        return self.dialect.full_input_bytes(self) + members_bytes + framing

    def full_message(self) -> bytes:
        """Return the `response.create` that carries the whole history."""
        return b'{"type":"response.create","input":%b%b}' % (
            self.dialect.full_input(self),
            self.envelope.message_members,
        )

    def delta_message(self, response_id: str, items: Sequence[Item]) -> bytes:
        """Return the `response.create` that adds `items` to the response `response_id`."""
        return b'{"type":"response.create","previous_response_id":%b,"input":[%b]%b}' % (
            msgspec.json.encode(response_id),
            b",".join(item.raw for item in items),
            self.envelope.message_members,
        )

    def delta_message_bytes(self, response_id: str, items: Sequence[Item]) -> int:
        """How long the message of `delta_message` is, at most."""
        framing = len(b'{"type":"response.create","previous_response_id":"","input":[]}')
        raw = sum(len(item.raw) + 1 for item in items)
        return framing + 6 * len(response_id) + raw + len(self.envelope.message_members)

    def chained_message(self) -> bytes:
        """Return the `response.create` of a client that chains by itself, as it sent it."""
        return b'{"type":"response.create","previous_response_id":%b,"input":%b%b}' % (
            msgspec.json.encode(self.envelope.previous_response_id),
            self.body[self.input_start : self.input_end],
            self.envelope.message_members,
        )

    def prepare(self) -> None:
        """
        Compute ahead of time what remembering this request takes, for it can be dear.

        Once the message is sent upstream has something to do, and so nobody waits for this.
        """
        with contextlib.suppress(ValueError):  # to be met again, where it matters
            prefix = self.prefix()
            if prefix is not None and self.walk is not None:
                self.walk.prepare(prefix.length)

    def prefix(self) -> Prefix | None:
        """
        Return what to remember of this body, or None where it has no list of items.

        Raises ValueError as `histories` does.
        """
        if self._prefix is None:
            self._prefix = self._make_prefix()
        return self._prefix

    def _make_prefix(self) -> Prefix | None:
        length = self.input_end - 1
        if not self.item_count or self.body[length] != ord("]"):
            return None
        if self.body[length - 1] in WHITE_SPACE:
            length = len(self.body[:length].rstrip(WHITE_SPACE))
        return Prefix(
            length=length,
            input_start=self.input_start,
            frame=self._frame(length),
            item_count=self.item_count,
            history=self.history,
            compacts=self.compacts,
            calls=self.calls,
        )

    def _frame(self, length: int) -> Frame:
        base = self.frame
        if base is not None and base.envelope is self.envelope:
            return base
        suffix = self.body[length:]
        mark = hash(suffix)
        owner = self.base_history if base is None else base.owner
        if base is not None and base.suffix_hash != mark:
            return Frame(owner, self.head, mark, dialect=self.dialect)
        frames = self.fingerprints.frames
        # The same bytes before and after the items were read as the same settings.
        key = self.fingerprints.digest(owner, self.body[: self.input_start], suffix)
        if (frame := frames.get(key)) is None:
            frame = Frame(owner, self.head, mark, suffix, self.envelope, self.dialect)
            frames[key] = frame
        elif frame.envelope is not None:
            self.envelope = frame.envelope
        return frame


def parse_body(
    body: bytes, root: bytes, fingerprints: Fingerprinter, endpoint: Endpoint = RESPONSES
) -> TurnRequest | Reason:
    """
    Take a whole body apart. `root` is the key of the principal's empty history.

    Returns the reason for passing the request through where it is not a turn that can be read
    without doubt. Raises Untranslatable, in a dialect that is translated.
    """
    try:
        found = members(body)
    except ValueError:
        return Reason.UNPARSABLE
    dialect, place = _place_of_array(found, endpoint)
    if place is None:
        return Reason.NO_INPUT
    start, end = found[place].start, found[place].end
    settings = [Setting(m.key, body[m.start : m.end]) for m in found if m.key != dialect.array]
    try:
        envelope = dialect.envelope(settings, fingerprints)
        whole = dialect.whole(body[start:end])
        if whole is None:
            return Reason.NO_INPUT
        items, calls = whole
        request = TurnRequest(
            body=body,
            envelope=envelope,
            input_start=start,
            input_end=end,
            base_count=0,
            base_history=root,
            items=items,
            compacts=_holds_trigger(items),
            fingerprints=fingerprints,
            head=tuple(settings[:place]),
            dialect=dialect,
            calls=calls,
        )
        _ = request.histories  # whatever can't be read shows here
    except Untranslatable:
        raise
    except ValueError:
        return Reason.UNPARSABLE
    return request if items or envelope.previous_response_id else Reason.NO_INPUT


def _place_of_array(found: Sequence[Member], endpoint: Endpoint) -> tuple[Dialect, int | None]:
    keys = [member.key for member in found]
    for dialect in endpoint.dialects:
        if dialect.array in keys:
            return dialect, keys.index(dialect.array)
    return endpoint.dialects[0], None


def parse_tail(body: bytes, prefix: Prefix, fingerprints: Fingerprinter) -> TurnRequest | None:
    """
    Take apart what follows a known prefix of `body`.

    The caller has proved that `body` begins with the bytes that `prefix` stands for. None means
    that the rest can't be read this way, and the whole body has to be parsed.
    """
    try:
        return _same_suffix(body, prefix, fingerprints) or _new_suffix(body, prefix, fingerprints)
    except ValueError:
        return None


def _same_suffix(body: bytes, prefix: Prefix, fingerprints: Fingerprinter) -> TurnRequest | None:
    # With the bytes after the array as they were, the settings are as they were: what stands
    # between must be a list by itself, and then the parser's state behind it is the same too.
    suffix, envelope = prefix.frame.suffix, prefix.frame.envelope
    if suffix is None or envelope is None or not body.endswith(suffix):
        return None
    if len(body) < prefix.length + len(suffix):
        return None
    between = body[prefix.length : len(body) - len(suffix)]
    if (appended := _appended(between)) is None:
        return None
    array_end = len(body) - len(suffix.lstrip(WHITE_SPACE)) + 1
    return _continued(body, prefix, envelope, array_end, appended, fingerprints)


def _appended(between: bytes) -> list[bytes] | None:
    stripped = between.strip(WHITE_SPACE)
    if not stripped:
        return []
    if not stripped.startswith(b",") or not stripped[1:].strip(WHITE_SPACE):
        return None  # a trailing comma is no JSON
    try:
        return elements(b"[%b]" % stripped[1:])
    except ValueError:
        return None


def _new_suffix(body: bytes, prefix: Prefix, fingerprints: Fingerprinter) -> TurnRequest | None:
    # The settings after the array differ: read the rest as an object that begins inside `input`.
    rest = body[prefix.length :].lstrip(WHITE_SPACE)
    if rest.startswith(b","):
        rest = rest[1:].lstrip(WHITE_SPACE)
        if rest.startswith(b"]"):
            return None  # a trailing comma is no JSON
    elif not rest.startswith(b"]"):
        return None
    dialect = prefix.frame.dialect
    opening = b'{"%b":[' % dialect.array.encode()
    found = members(opening + rest)
    array = found[0]
    tail = [Setting(m.key, rest[m.start - len(opening) : m.end - len(opening)]) for m in found[1:]]
    if {setting.key for setting in tail} & {setting.key for setting in prefix.frame.head}:
        return None
    appended = elements(b"[" + rest[: array.end - len(opening)])
    array_end = len(body) - len(rest) + array.end - len(opening)
    envelope = dialect.envelope([*prefix.frame.head, *tail], fingerprints)
    return _continued(body, prefix, envelope, array_end, appended, fingerprints)


def _continued(
    body: bytes,
    prefix: Prefix,
    envelope: Envelope,
    array_end: int,
    appended: list[bytes],
    fingerprints: Fingerprinter,
) -> TurnRequest:
    dialect = prefix.frame.dialect
    items, calls = dialect.items(appended, prefix.calls, fingerprints.read)
    for item in items:
        _ = item.type  # parsed once, here: whatever can't be read shows before anything is sent
    return TurnRequest(
        body=body,
        envelope=envelope,
        input_start=prefix.input_start,
        input_end=array_end,
        base_count=prefix.item_count,
        base_history=prefix.history,
        items=items,
        compacts=prefix.compacts or _holds_trigger(items),
        fingerprints=fingerprints,
        head=prefix.frame.head,
        frame=prefix.frame,
        dialect=dialect,
        calls=calls,
    )


def fold(history: bytes, items: Sequence[Item], fingerprints: Fingerprinter) -> list[bytes]:
    """Return the keys of `history` and of each longer history that the items make of it."""
    keys = [history]
    for item in items:
        keys.append(fingerprints.extend(keys[-1], item))
    return keys


def _holds_trigger(items: Sequence[Item]) -> bool:
    # Parsing every item would cost more than all the rest: only what may spell the word is parsed.
    return any(item.type == "compaction_trigger" for item in items if _may_spell_trigger(item.raw))


def _may_spell_trigger(raw: bytes) -> bool:
    return b"compaction_trigger" in raw or (
        b"\\u00" in raw and _ESCAPED_LETTER.search(raw) is not None
    )


def read_envelope(settings: Sequence[Setting], fingerprints: Fingerprinter) -> Envelope:
    """
    Read what the proxy must know of the settings; `settings` are in the body's own order.

    Raises ValueError if one of them can't be read without doubt.
    """
    compared: dict[str, bytes] = {}
    small: dict[str, JSON] = {}
    tools_raw = b"null"
    for setting in settings:
        if setting.raw == b"null":  # absent and null are one to the API
            continue
        if setting.key not in PER_RESPONSE:
            compared[setting.key] = fingerprints.setting(setting.raw)
        if setting.key == "tools":
            tools_raw = setting.raw
        elif len(setting.raw) <= 1024 or setting.key in PER_RESPONSE:
            small[setting.key] = parse(setting.raw)
        else:
            small[setting.key] = True
    store = small.get("store")
    return Envelope(
        settings=tuple(settings),
        fingerprints=compared,
        stream=small.get("stream") is True,
        stored=store is not False,
        model=_text(small.get("model")),
        previous_response_id=_text(small.get("previous_response_id")),
        replay_safe=store is False and _acts_locally(tools_raw),
        ineligible=_ineligible({setting.key for setting in settings}, small),
    )


def _ineligible(keys: set[str], settings: Mapping[str, JSON]) -> Reason | None:
    if keys & WEBSOCKET_ONLY or "background_options" in settings:
        return Reason.HTTP_ONLY_FIELD
    if settings.get("background", False) is not False:
        return Reason.BACKGROUND
    if "conversation" in settings:
        return Reason.CONVERSATION
    if not isinstance(settings.get("stream", False), bool):
        return Reason.HTTP_ONLY_FIELD
    if "stream_options" in settings and settings.get("stream") is not True:
        return Reason.HTTP_ONLY_FIELD  # refused on HTTP, and HTTP must say so
    if not isinstance(settings.get("previous_response_id", ""), str):
        return Reason.HTTP_ONLY_FIELD
    return None


def _acts_locally(tools_raw: bytes) -> bool:
    """Whether every tool is carried out by the client, so that a turn may run twice unnoticed."""
    try:
        kinds = msgspec.json.decode(tools_raw, type=list[_ToolType] | None) or []
    except msgspec.DecodeError:
        return False
    return all(tool.type in LOCAL_TOOL_TYPES for tool in kinds)


class _ToolType(msgspec.Struct):
    type: str = ""


def _text(value: JSON) -> str | None:
    return value if isinstance(value, str) else None
