"""
Items: what one means, whatever the form in which a client sends it back.

Agents keep the conversation themselves and send all of it at every step. Their own items
reappear byte for byte; the model's items come back in the client's own spelling: ids and status
gone, nulls added, keys in another order, content as a plain string, arguments re-serialised.
Measured on 36 agents; the table of what may differ is in the design, and this file is that table.

An item's canonical form is a mapping of field to canonical text, with what may differ harmlessly
removed. Its fingerprint is a keyed digest of that. Two kinds are told apart:

* the client's own items (system, developer and user messages, tool outputs, …) mean exactly what
  they say: only key order, nulls and the spelling of a plain text message may differ;
* items the model produces (assistant messages, tool calls, reasoning, …) also lose delivery
  metadata: `id`, `status`, `annotations`, `logprobs` and their like. An id that is all that names
  the item's content (stored reasoning, an image) is no such thing: see `Form.name`.

A kind that we do not know is compared strictly on every field that is not delivery metadata.
Nothing here changes an item: canonical forms are for comparison, and what goes upstream is the
client's own bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from sys import intern
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import xxhash

from proxy.core.canonical import JSON, Number, parse, write
from proxy.core.recent import Recent

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from proxy.core.request import Frame

DIGEST_BYTES = 16

# Of the items that models have just produced, so many are kept, if they are no longer than that.
_REMEMBERED = 256
_REMEMBERED_BYTES = 4096

# Longer texts are kept as digests. No canonical text of a value begins as a digest is written.
KEPT_TEXT = 64

# What the service, an SDK or an agent attaches to an item the model produced, and takes away
# again, without a change of meaning.
DELIVERY_METADATA = frozenset(
    {
        "id",
        "status",
        "created_by",
        "annotations",
        "logprobs",
        "parsed",
        "parsed_arguments",
        "create_time",
        "content_item_kinds",
        "internal_chat_message_metadata_passthrough",
    }
)

# Of an item the model produced these are no fields of its form: they are looked at by themselves.
NOT_COMPARED = DELIVERY_METADATA | {"type", "phase"}

# The one field of a kind that is not compared as it stands.
BY_RULE = {"message": "content", "function_call": "arguments"}

# Items that only ever come from the client, though their names do not end in `_output`.
CLIENT_TYPES = frozenset(
    {
        "item_reference",
        "additional_tools",
        "configuration_update",
        "compaction_trigger",
        "mcp_approval_response",
    }
)


@dataclass(slots=True)
class Form:
    """
    The canonical form of one item: its fields, each as canonical text. Not to be changed.

    In place of a long text stands its digest, which compares as the text does. What a form costs in
    memory then depends on the number of its fields, and not on their length. (It is not frozen,
    because that makes a form several times as slow to make, on the way of every turn.)

    `call_id`, `item_id` and `sealed` (a reasoning item's encrypted content) are what two forms of
    one item have in common even when they are unequal; `phase` (canonical text) is apart because a
    client may drop it, though not change it.
    """

    type: str
    fields: Mapping[str, str]
    phase: str | None
    call_id: str | None
    item_id: str | None
    sealed: str | None

    @property
    def name(self) -> str | None:
        """
        The item's id where upstream would look its content up by it; clients don't rewrite those.

        A message says all that it means, a call is known by its `call_id`, and encrypted content
        stands for itself: their ids are decoration. Of any other item, like reasoning that upstream
        stores or an image that it made, the id may be all there is.
        """
        if self.type == "message" or self.call_id is not None or self.sealed is not None:
            return None
        return self.item_id


class Item:
    """
    One item of a request, as its own bytes, parsed when first asked for.

    `raw` must be one JSON value. Reading any property raises ValueError if it is not an object, or
    not JSON that every reader takes alike.
    """

    # Slots that are filled when first asked for: `functools.cached_property` takes a lock.
    __slots__ = ("_form", "_type", "_value", "raw")

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self._value: dict[str, JSON] | None = None
        self._type: str | None = None
        self._form: Form | None = None

    def __repr__(self) -> str:
        return f"<Item of {len(self.raw)} bytes>"

    @property
    def value(self) -> dict[str, JSON]:
        """The parsed object, with exact numbers."""
        if self._value is None:
            value = parse(self.raw)
            if not isinstance(value, dict):
                raise ValueError("an item must be an object")
            self._value = value
        return self._value

    @property
    def type(self) -> str:
        """The item's type; `message` is implied by a role."""
        if self._type is None:
            self._type = item_type(self.value)
        return self._type

    @property
    def is_produced(self) -> bool:
        """Whether items of this kind come from the model."""
        kind = self.type
        if kind == "message":
            return self.value.get("role") == "assistant"
        return kind not in CLIENT_TYPES and not kind.endswith("_output")

    @property
    def call_id(self) -> str | None:
        """The id that pairs a tool call with its output, if the item has one."""
        return _text(self.value.get("call_id"))

    @property
    def compact_form(self) -> Form:
        """The canonical form of this item as something that the model produced."""
        if self._form is None:
            self._form = produced_form(self.value)
        return self._form

    @property
    def canonical_text(self) -> str:
        """The whole canonical form as one text, by the rules of the item's kind."""
        if not self.is_produced:
            return own_text(self.value)
        form = self.compact_form
        fields: dict[str, JSON] = {**form.fields}
        if form.phase is not None:
            fields["phase"] = form.phase
        if form.name is not None:
            fields["id"] = form.name
        return write(fields)


def item_type(value: Mapping[str, JSON]) -> str:
    """
    Return an item's type; an easy message has a role and no type, a reference needs only an id.

    Raises ValueError if it is no text: what upstream makes of that is not ours to guess.
    """
    kind = value.get("type")
    if kind is None:
        return "message" if "role" in value else "item_reference" if "id" in value else ""
    if not isinstance(kind, str) or isinstance(kind, Number):
        raise ValueError("an item's type must be text")  # noqa: TRY004  as in `Item.value`
    return intern(kind)


def produced_form(value: Mapping[str, JSON]) -> Form:
    """Return the canonical form of an item that the model produced, upstream's or an echo."""
    kind = item_type(value)
    by_rule = BY_RULE.get(kind)
    fields: dict[str, str] = {
        intern(key): _short(write(field))
        for key, field in value.items()
        if field is not None and key not in NOT_COMPARED and key != by_rule
    }
    sealed = None
    if kind == "message":
        content = _parts(value.get("content"), "output_text", DELIVERY_METADATA)
        fields["content"] = _short(write(content))
    elif kind == "function_call":
        fields["arguments"] = _short(_arguments(value.get("arguments")))
    elif kind == "reasoning":
        sealed = _text(value.get("encrypted_content")) or None
        fields = _reasoning_fields(fields, sealed)
    fields["type"] = kind
    phase = value.get("phase")
    return Form(
        type=kind,
        fields=fields,
        phase=None if phase is None else write(phase),
        call_id=_text(value.get("call_id")),
        item_id=_text(value.get("id")),
        sealed=None if sealed is None else _short(sealed),
    )


def _short(text: str) -> str:
    if len(text) <= KEPT_TEXT:
        return text
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES)
    return f"digest {digest.hexdigest()}"


def _reasoning_fields(fields: dict[str, str], sealed: str | None) -> dict[str, str]:
    # Equal encrypted content is the same reasoning, however its summary was kept; without it the
    # texts decide, and an empty list says as little as an absent one.
    if sealed is not None:
        return {"encrypted_content": _short(write(sealed))}
    return {key: text for key, text in fields.items() if text not in ("[]", '""')}


def own_text(value: Mapping[str, JSON]) -> str:
    """Return the canonical text of an item that is the client's own."""
    kind = item_type(value)
    meant: dict[str, JSON] = {key: field for key, field in value.items() if field is not None}
    meant["type"] = kind
    if kind == "message":
        meant["content"] = _parts(value.get("content"), "input_text", frozenset())
    return write(meant)


def _parts(content: JSON, text_type: str, ignored: frozenset[str]) -> JSON:
    """Return what message content means; a string equals one text part."""
    if isinstance(content, str):
        return [{"type": text_type, "text": content}]
    if not isinstance(content, list):
        return content
    return [_part(part, ignored) for part in content]


def _part(part: JSON, ignored: frozenset[str]) -> JSON:
    if not isinstance(part, dict):
        return part
    return {key: field for key, field in part.items() if field is not None and key not in ignored}


def _arguments(arguments: JSON) -> str:
    """
    Canonical text of a function call's arguments.

    Clients parse and re-serialise them, so they are equal as parsed JSON with exact numbers. Blank
    equals `{}`. What is not JSON is equal as text only.
    """
    if not isinstance(arguments, str):
        return "value " + write(arguments)
    try:
        return "json " + write(parse(arguments if arguments.strip() else "{}"))
    except ValueError:
        return "text " + write(arguments)


def _text(value: JSON) -> str | None:
    return value if isinstance(value, str) and not isinstance(value, Number) else None


class Fingerprinter:
    """
    Keyed digests of items, settings and histories.

    `secret` is random per process, so that nobody outside can look for two contents with one
    fingerprint. The cache, keyed by a digest of the raw bytes, serves clients that spell their
    history anew at every turn; `cache_size` is its number of entries of about 200 bytes.

    `frames` are the frames in use, by fingerprint, so that each is held once.
    """

    def __init__(self, secret: bytes, cache_size: int = 65_536) -> None:
        if len(secret) < DIGEST_BYTES:
            raise ValueError("the secret must have at least 16 bytes")
        self._key = secret[:64]
        self._seed = int.from_bytes(hashlib.blake2b(secret, digest_size=8).digest(), "big")
        self._fingerprints: Recent[bytes, bytes] = Recent(cache_size)
        self._produced: dict[bytes, Item] = {}
        self.frames: WeakValueDictionary[bytes, Frame] = WeakValueDictionary()

    def remember(self, items: Iterable[Item]) -> None:
        """Keep items that the model has just produced: many a client sends them back untouched."""
        for item in items:
            if len(item.raw) <= _REMEMBERED_BYTES:
                if len(self._produced) >= _REMEMBERED:
                    self._produced.clear()
                self._produced[self._raw_digest(item.raw)] = item

    def read(self, raw: bytes) -> Item:
        """Return the item of these bytes: the very one, if it is remembered."""
        return self._produced.get(self._raw_digest(raw)) or Item(raw)

    def digest(self, *parts: bytes) -> bytes:
        """Return the keyed digest (16 bytes) of the parts in order."""
        hasher = hashlib.blake2b(digest_size=DIGEST_BYTES, key=self._key)
        for part in parts:
            hasher.update(len(part).to_bytes(8, "big"))
            hasher.update(part)
        return hasher.digest()

    def item(self, item: Item) -> bytes:
        """Return the fingerprint of an item. Raises ValueError if it can't be read safely."""
        cached = self._fingerprints.get(address := b"i" + self._raw_digest(item.raw))
        if cached is None:
            cached = self.digest(item.canonical_text.encode("utf-8", "surrogatepass"))
            self._fingerprints.put(address, cached)
        return cached

    def setting(self, raw: bytes) -> bytes:
        """Return the fingerprint of a setting's value. Raises ValueError as `item` does."""
        cached = self._fingerprints.get(address := b"s" + self._raw_digest(raw))
        if cached is None:
            cached = self.digest(write(parse(raw)).encode("utf-8", "surrogatepass"))
            self._fingerprints.put(address, cached)
        return cached

    def root(self, principal: str) -> bytes:
        """Return the key of a principal's empty history: no two principals share any history."""
        return self.digest(b"history", principal.encode())

    def extend(self, history: bytes, item: Item) -> bytes:
        """Return the key of a history (as from `root`) with one more item."""
        return self.digest(history, self.item(item))

    def _raw_digest(self, raw: bytes) -> bytes:
        return xxhash.xxh3_128_digest(raw, self._seed)
