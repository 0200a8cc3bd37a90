"""
Server-sent events, read from any cut of their bytes; only the data of each is of interest here.

The rules are those of the HTML standard (section 9.2.6): a line ends in CR LF, LF or CR; several
`data` lines of an event are joined by LF; an empty line ends the event; whatever begins with a
colon is a comment. An event that is cut off by the end of the stream never was one.
"""

from __future__ import annotations

import re
from typing import Final

_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class TooLong(ValueError):
    """An event is longer than allowed. The reader must not be fed again."""


class SseReader:
    """Reads one stream. `max_bytes` bounds what is kept of an event that is not whole yet."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._has_begun = False
        self._ends_in_return = False

    def feed(self, block: bytes) -> list[bytes]:
        """Return the data of each event that this block completes. Raises TooLong."""
        if self._ends_in_return and block:
            block = block.removeprefix(b"\n")  # of a CR LF that was cut in two
            self._ends_in_return = False
        self._rest += block
        if b"\n" not in block and b"\r" not in block:
            self._check_length()
            return []
        self._ends_in_return = block.endswith(b"\r")
        *lines, rest = _LINE_END.split(self._rest)
        self._rest = bytearray(rest)
        if not self._has_begun:
            self._has_begun = True
            lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
        found = [data for line in lines if (data := self._take(bytes(line))) is not None]
        self._check_length()
        return found

    def _take(self, line: bytes) -> bytes | None:
        if not line:
            data, self._data, self._data_bytes = self._data, [], 0
            return b"\n".join(data) if data else None
        name, _, value = line.partition(b":")
        if name == b"data":
            value = value.removeprefix(b" ")
            self._data.append(value)
            self._data_bytes += len(value)
        return None

    def _check_length(self) -> None:
        if self._data_bytes + len(self._rest) > self._max_bytes:
            raise TooLong(f"an event exceeds {self._max_bytes} bytes")
