"""
Where the parts of a JSON text stand, so that one can be replaced without touching the rest.

A relay that parses and re-serialises changes key order, number spelling and escapes. This module
never does: it says at which byte a value begins and ends, and puts other bytes in its place.

How a position is proved: msgspec checks the grammar of the whole text in one pass and hands each
value over as a view, whose length is exact. Keys go into a dict by identity, so that none is lost
and their order is the text's. A walk from the left then needs only to step over each key and add
each length; it looks into no value, and so costs the same for a value of 1 MB as for one of 1 B.

Lone surrogates (`\\ud83d` without its partner) are legal JSON by grammar, and agents that cut
emoji in two do send them, yet msgspec refuses them. Such a text is skimmed through a *shadow* of
the same length in which each surrogate escape reads `\\u0041`; offsets are the same in both.

Values are not checked for valid UTF-8; keys are.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple, TypeVar

import msgspec

_T = TypeVar("_T")

# No honest message has nearly as many; the walk costs about 2.5 us a member, the skim 0.5 us.
_MAX_MEMBERS = 20_000


class Member(NamedTuple):
    """One member of an object: its key, unescaped, and `text[start:end]`, its value's own bytes."""

    key: str
    start: int
    end: int


class Edit(NamedTuple):
    """`text[start:end]` becomes `value`; an insertion where the two are equal."""

    start: int
    end: int
    value: bytes


class _Key(str):
    """A key that equals nothing but itself: duplicates stay apart in a dict."""

    __slots__ = ()
    __hash__ = object.__hash__

    __eq__ = object.__eq__
    __ne__ = object.__ne__


def _as_key(_kind: type, key: str) -> _Key:
    return _Key(key)


_PLAIN = msgspec.json.Decoder(dict[str, msgspec.Raw])
_OBJECT = msgspec.json.Decoder(dict[_Key, msgspec.Raw], dec_hook=_as_key)
_ARRAY = msgspec.json.Decoder(list[msgspec.Raw])

# Possessive quantifiers (`*+`): nothing here is ever matched in two ways, so nothing backtracks.
_OPENING = re.compile(rb"[ \t\n\r]*+[{\[][ \t\n\r]*+")
_KEY = re.compile(
    rb'("[^"\\]*+(?:\\.[^"\\]*+)*+")[ \t\n\r]*+:[ \t\n\r]*+',
    re.DOTALL,
)
_COMMA = re.compile(rb"[ \t\n\r]*+,[ \t\n\r]*+")
_CLOSING = re.compile(rb"[ \t\n\r]*+[}\]][ \t\n\r]*+")
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


def members(text: bytes) -> list[Member]:
    """
    Return the members of the JSON object `text`, in the order of the text.

    Raises ValueError where `text` is not a JSON object, where it has more than 20,000 members, or
    where a key (after unescaping) occurs twice, for readers differ in which of the two they take.
    """
    skimmed, shadowed = _skim(_OBJECT, text)
    if len(skimmed) > _MAX_MEMBERS:
        raise ValueError("too many members")
    found: list[Member] = []
    position = _after(_OPENING, text, 0)
    for key, raw in skimmed.items():
        if found:
            position = _after(_COMMA, text, position)
        stands = _KEY.match(text, position)
        if stands is None:
            raise ValueError("no key where one was expected")
        start = stands.end()
        position = start + len(memoryview(raw))
        name = json.loads(stands[1]) if shadowed else str(key)
        found.append(Member(name, start, position))
    _check_end(text, position)
    if len({member.key for member in found}) != len(found):
        raise ValueError("duplicate key")
    return found


def fields(text: bytes) -> dict[str, bytes]:
    """
    Return the own bytes of the value of each member of the JSON object `text`, by its key.

    Raises ValueError as `members` does, at a tenth of its cost where the object is written without
    white space and escapes in its keys: there the members that a dict keeps fill the whole text, so
    none was lost in it.
    """
    try:
        found = _PLAIN.decode(text)
    except (ValueError, RecursionError):
        found = {}
    values = {key: bytes(raw) for key, raw in found.items()}
    length = 1 + sum(len(key) + len(value) + 4 for key, value in values.items())
    if length == len(text) and len(values) <= _MAX_MEMBERS:
        return values
    return {member.key: text[member.start : member.end] for member in members(text)}


def elements(text: bytes) -> list[bytes]:
    """
    Return the bytes of each element of the JSON array `text`.

    Raises ValueError where `text` is not a JSON array.
    """
    skimmed, shadowed = _skim(_ARRAY, text)
    if not shadowed:
        return [bytes(raw) for raw in skimmed]
    found: list[bytes] = []
    position = _after(_OPENING, text, 0)
    for raw in skimmed:
        if found:
            position = _after(_COMMA, text, position)
        end = position + len(memoryview(raw))
        found.append(text[position:end])
        position = end
    _check_end(text, position)
    return found


def find(found: list[Member], key: str) -> Member | None:
    """Return the member called `key`, or None."""
    for member in found:
        if member.key == key:
            return member
    return None


def replace(text: bytes, key: str, value: bytes) -> bytes:
    """
    Return the object `text` with the value of its member `key` replaced by the bytes `value`.

    Every other byte stays. Raises KeyError where there is no such member, ValueError as
    `members` does.
    """
    member = find(members(text), key)
    if member is None:
        raise KeyError(key)
    return edited(text, [Edit(member.start, member.end, value)])


def putting(text: bytes, found: list[Member], key: str, value: bytes) -> Edit:
    """Return the edit of `text`, whose members are `found`, that sets `key` or appends it."""
    member = find(found, key)
    if member is not None:
        return Edit(member.start, member.end, value)
    at = found[-1].end if found else text.index(b"{") + 1
    comma = b"," if found else b""
    return Edit(at, at, b"".join((comma, json.dumps(key).encode(), b":", value)))


def put(text: bytes, key: str, value: bytes) -> bytes:
    """Do as `replace` does, but append the member where it is missing."""
    return edited(text, [putting(text, members(text), key, value)])


def edited(text: bytes, edits: list[Edit]) -> bytes:
    """Return `text` with all `edits` made, which must not overlap; offsets are the old text's."""
    pieces: list[bytes] = []
    position = 0
    for edit in sorted(edits):
        pieces += (text[position : edit.start], edit.value)
        position = edit.end
    pieces.append(text[position:])
    return b"".join(pieces)


def _skim(decoder: msgspec.json.Decoder[_T], text: bytes) -> tuple[_T, bool]:
    """Decode `text`, or its shadow; tell which. Raise nothing but ValueError."""
    try:
        return decoder.decode(text), False
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError:
        shadow, surrogates = _SURROGATE_ESCAPE.subn(rb"\\u0041", text)
        if not surrogates:
            raise
    try:
        return decoder.decode(shadow), True
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _after(pattern: re.Pattern[bytes], text: bytes, position: int) -> int:
    stands: re.Match[Any] | None = pattern.match(text, position)
    if stands is None:
        raise ValueError(f"unexpected text at byte {position}")
    return stands.end()


def _check_end(text: bytes, position: int) -> None:
    if _after(_CLOSING, text, position) != len(text):
        raise ValueError("text after the end")
