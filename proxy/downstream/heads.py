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
from typing import Final

END_OF_HEAD: Final = b"\r\n\r\n"

MAX_FIELDS: Final = 100

_START = re.compile(rb"([A-Z]{1,10}) (/[\x21-\x7e]{0,2000}) HTTP/1\.1\r\n")
# A name is a token; a value begins and ends with a visible character, or is empty.
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}):[ \t]*+([\x21-\x7e\x80-\xff\t ]*+)\r\n")
_LENGTH = re.compile(rb"[0-9]{1,15}")

# With one of these a request is more than a head and a body of known length.
_NOT_PLAIN: Final = frozenset(
    {
        "connection",
        "expect",
        "http2-settings",
        "keep-alive",
        "origin",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "via",
    }
)

# aiohttp refuses these if they come twice; of others, repetitions are a list.
_ONCE: Final = frozenset(
    {
        "content-location",
        "content-range",
        "content-type",
        "etag",
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
    if start is None or start.end() > max_field_bytes:
        return None
    position, end = start.end(), len(head) - 2
    fields: list[tuple[str, str]] = []
    lengths: list[bytes] = []
    hosts: list[str] = []
    encodings: list[str] = []
    once: set[str] = set()
    while position < end:
        found = _FIELD.match(head, position, end)
        if found is None or found.end() - position > max_field_bytes or len(fields) >= MAX_FIELDS:
            return None
        position = found.end()
        name = found[1].decode()
        value = found[2].rstrip(b" \t")
        text = value.decode("utf-8", "surrogateescape")
        fields.append((name, text))
        match name.lower():
            case "content-length":
                lengths.append(value)
            case "host":
                hosts.append(text)
            case "content-encoding":
                encodings.append(text)
            case "connection" if text.lower() == "keep-alive":
                pass
            case lower if lower in _NOT_PLAIN or lower in once:
                return None
            case lower if lower in _ONCE:
                once.add(lower)
    if len(hosts) != 1 or len(lengths) > 1:
        return None
    if lengths and _LENGTH.fullmatch(lengths[0]) is None:
        return None
    length_bytes = int(lengths[0]) if lengths else 0
    method, target = start[1].decode(), start[2].decode()
    return PlainHead(method, target, tuple(fields), length_bytes, hosts[0], tuple(encodings))


class HeadMemory:
    """
    Reads the heads of one connection; one that differs only in its length is read at a glance.

    What is remembered is the latest head that was read.
    """

    __slots__ = ("_after", "_before", "_head", "_max_field_bytes")

    def __init__(self, max_field_bytes: int) -> None:
        self._max_field_bytes = max_field_bytes
        self._before = self._after = b""
        self._head: PlainHead | None = None

    def read(self, head: bytes) -> tuple[PlainHead | None, int]:
        """Return a head as `read_plain_head` does, and the length of the body that follows it."""
        known = self._head
        before, after = self._before, self._after
        if known is not None and head.startswith(before) and head.endswith(after):
            digits = head[len(before) : len(head) - len(after)]
            if digits.isdigit() and len(digits) <= 15:
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
        self._head = found


_LENGTH_FIELD = re.compile(rb"\r\n(?i:content-length):[ \t]*+([0-9]{1,15})[ \t]*+\r\n")
