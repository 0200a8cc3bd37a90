"""
The head of a request, where it is of the plainest kind.

HTTP has many corners, and `aiohttp` knows them. This reads only what nearly every client sends
at every turn: a request line, header fields of visible characters, one Content-Length. Whatever
else there is (a chunked body, an upgrade, an expectation, a folded line, a byte out of place)
makes the answer None, and the request is `aiohttp`'s. So nothing is decided here about a request
that two readers might understand differently (RFC 9112 section 11).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

END_OF_HEAD: Final = b"\r\n\r\n"

MAX_FIELDS: Final = 100

# Of other methods `aiohttp` knows some and not others, and CONNECT is more than a request.
_START = re.compile(
    rb"(GET|POST|PUT|PATCH|DELETE|HEAD|OPTIONS) (/[\x21-\x7e]{0,2000}) HTTP/1\.1\r\n"
)
# A name is a token; a value begins and ends with a visible character, or is empty.
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}):[ \t]*+([\x21-\x7e\x80-\xff\t ]*+)\r\n")
_MAX_DIGITS: Final = 15
_LENGTH = re.compile(r"[0-9]{1,15}")

# With one of these a request is more than a head and a body of known length, or is none to
# `aiohttp`.
_NOT_PLAIN: Final = frozenset(
    {
        "expect",
        "http2-settings",
        "keep-alive",
        "origin",
        "proxy-connection",
        "sec-websocket-key1",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "via",
    }
)

# `aiohttp` refuses a request that has one of these twice.
_ONLY_ONCE: Final = frozenset(
    {
        "content-length",
        "content-location",
        "content-range",
        "content-type",
        "etag",
        "host",
        "max-forwards",
        "server",
        "user-agent",
    }
)


@dataclass(frozen=True, slots=True)
class PlainHead:
    """
    A request's method, target and header fields, and the length of its body in bytes.

    Fields keep their order and the spelling of their names. They are decoded as `aiohttp` does:
    as UTF-8, with surrogates for what is not.
    """

    method: str
    target: str
    fields: tuple[tuple[str, str], ...] = field(repr=False)
    length_bytes: int
    host: str
    encodings: tuple[str, ...]


def read_plain_head(head: bytes, max_field_bytes: int) -> PlainHead | None:
    """
    Read a head, up to and with the empty line that ends it; None leaves it to `aiohttp`.

    No line may be longer than `max_field_bytes`. Content-Encodings are given as they are written.
    """
    start = _START.match(head)
    if start is None or start.end() > max_field_bytes or not head.endswith(END_OF_HEAD):
        return None
    fields = _read_fields(head, start.end(), max_field_bytes)
    if fields is None:
        return None
    values: dict[str, list[str]] = {}
    for name, value in fields:
        values.setdefault(name.lower(), []).append(value)
    (length,) = values.get("content-length", ["0"])[:1]
    if not _is_plain(values) or _LENGTH.fullmatch(length) is None:
        return None
    return PlainHead(
        method=start[1].decode(),
        target=start[2].decode(),
        fields=tuple(fields),
        length_bytes=int(length),
        host=values["host"][0],
        encodings=tuple(values.get("content-encoding", ())),
    )


def _read_fields(head: bytes, position: int, max_field_bytes: int) -> list[tuple[str, str]] | None:
    end = len(head) - 2
    fields: list[tuple[str, str]] = []
    while position < end:
        found = _FIELD.match(head, position, end)
        if found is None or found.end() - position > max_field_bytes or len(fields) >= MAX_FIELDS:
            return None
        position = found.end()
        value = found[2].rstrip(b" \t")
        fields.append((found[1].decode(), value.decode("utf-8", "surrogateescape")))
    return fields


def _is_plain(values: Mapping[str, Sequence[str]]) -> bool:
    """Tell whether a request with these fields, by name in lower case, has nothing special."""
    return (
        not values.keys() & _NOT_PLAIN
        and all(len(values[name]) == 1 for name in values.keys() & _ONLY_ONCE)
        and all(value.lower() == "keep-alive" for value in values.get("connection", ()))
        and "host" in values
    )


class HeadMemory:
    """
    Reads the heads of one connection; one that differs only in its length is read at a glance.

    What is remembered is the latest head that was read.
    """

    __slots__ = ("_after", "_before", "_head", "_max_digits", "_max_field_bytes")

    def __init__(self, max_field_bytes: int) -> None:
        self._max_field_bytes = max_field_bytes
        self._before = self._after = b""
        self._max_digits = 0
        self._head: PlainHead | None = None

    def read(self, head: bytes) -> tuple[PlainHead | None, int]:
        """Return a head as `read_plain_head` does, and the length of the body that follows it."""
        known = self._head
        before, after = self._before, self._after
        if known is not None and head.startswith(before) and head.endswith(after):
            digits = head[len(before) : len(head) - len(after)]
            if digits.isdigit() and len(digits) <= self._max_digits:
                return known, int(digits)
        found = read_plain_head(head, self._max_field_bytes)
        if found is not None and found.length_bytes:
            self._remember(head, found)
        return found, found.length_bytes if found is not None else 0

    def _remember(self, head: bytes, found: PlainHead) -> None:
        stands = _LENGTH_FIELD.search(head)
        if stands is None:
            return
        self._before, self._after = head[: stands.start(1)], head[stands.end(1) :]
        others_bytes = len(stands[0]) - len(b"\r\n") - len(stands[1])
        self._max_digits = min(_MAX_DIGITS, self._max_field_bytes - others_bytes)
        self._head = found


_LENGTH_FIELD = re.compile(rb"\r\n(?i:content-length):[ \t]*+([0-9]{1,15})[ \t]*+\r\n")
