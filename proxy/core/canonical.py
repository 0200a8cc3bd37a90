"""
JSON values compared by meaning, with exact numbers.

Python's own equality is too kind for our purpose (`1 == 1.0 == True`), and doubles are too coarse
(two long integers may become one). So a value is read with its numbers kept exact, and written
in one canonical way: keys sorted, no white space, strings as their characters, integers as
integers, other numbers as digits and exponent. Two texts have the same canonical form if and only
if they mean the same JSON value. `1` and `1.0` differ; `1.0`, `1.00` and `10e-1` do not.

Anything that two JSON readers might take differently (a duplicate key, NaN, bytes that are not
UTF-8, nesting beyond Python's stack) is refused with ValueError: doubt is the caller's cue to
leave the request alone.
"""

from __future__ import annotations

import json
from decimal import Decimal, InvalidOperation
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

JSON: TypeAlias = "dict[str, JSON] | list[JSON] | str | int | bool | Number | None"


class Number(str):
    """A JSON number that is not a plain integer, as sign, digits and exponent."""

    __slots__ = ()


def _integer(text: str) -> int | Number:
    # -0 is not 0 for every reader; more than 4,300 digits are a ValueError of Python's own.
    return Number(text) if text == "-0" else int(text)


def _number(text: str) -> Number:
    try:
        sign, digits, exponent = Decimal(text).as_tuple()
    except InvalidOperation:  # an exponent beyond all bounds
        return Number(text)
    assert isinstance(exponent, int), "JSON has no infinity"
    minus = "-" if sign else ""
    written = "".join(map(str, digits))
    significant = written.rstrip("0")
    if not significant:
        return Number(f"{minus}0.")
    return Number(f"{minus}{significant}e{exponent + len(written) - len(significant)}")


def _constant(text: str) -> JSON:
    raise ValueError(f"{text} is not JSON")


def _object(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("duplicate key")
    return made


def _refuse_fraction(text: str) -> NoReturn:
    raise TypeError(f"{text} has to be read with care")


# The short way: what this decodes, and writes again byte for byte as it was, has no key twice and
# no number that two readers could take for different ones.
_READ: Final = msgspec.json.Decoder(float_hook=_refuse_fraction)
_WRITE: Final = msgspec.json.Encoder()
_WRITE_SORTED: Final = msgspec.json.Encoder(order="sorted")
_READABLE: Final = (ValueError, TypeError, RecursionError)

_decoder = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_number, parse_constant=_constant
)
_OPENINGS = frozenset('{["')


def parse(raw: bytes | str) -> JSON:
    """
    Read one JSON value with exact numbers.

    Raises ValueError for anything that is not JSON, or that readers might take differently.
    """
    if isinstance(raw, bytes):
        try:
            value: JSON = _READ.decode(raw)
            if _WRITE.encode(value) == raw:
                return value
        except _READABLE:
            pass  # not the short way
        text = raw.decode("utf-8")
    else:
        text = raw
    # Our Number subclasses str, which json's types can't express.
    try:
        if text[:1] in _OPENINGS:  # no white space before it: the decoder's own work is not needed
            value, end = _decoder.raw_decode(text)
            if end == len(text):
                return value
        return _decoder.decode(text)  # type: ignore[no-any-return]
    except RecursionError:
        raise ValueError("nested too deeply") from None


def write(value: JSON) -> str:
    """
    Return the canonical text of a value made by `parse`.

    Raises ValueError for a value nested as deeply as `parse` can read, yet this can't write.
    """
    if isinstance(value, str) and not isinstance(value, Number):
        return encode_basestring(value)
    try:
        # Never the text of a value with a Number in it, for that the encoder does not know.
        return _WRITE_SORTED.encode(value).decode()
    except _READABLE:
        parts: list[str] = []
    try:
        _write(value, parts.append)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return "".join(parts)


def _write(value: Any, add: Callable[[str], None]) -> None:
    # By exact type, as `parse` makes them, and the commonest first: this is where a turn's time
    # goes. `True` is an int, and a Number a str, only by inheritance.
    kind = type(value)
    if kind is str:
        add(encode_basestring(value))
    elif kind is dict:
        add("{")
        for key in sorted(value):
            field = value[key]
            if type(field) is str:
                add(f"{encode_basestring(key)}:{encode_basestring(field)},")
            else:
                add(encode_basestring(key) + ":")
                _write(field, add)
                add(",")
        add("}")
    elif kind is list:
        add("[")
        for element in value:
            _write(element, add)
            add(",")
        add("]")
    elif value is None:
        add("null")
    elif kind is bool:
        add("true" if value else "false")
    else:  # an int, or a Number
        add(str(value))
