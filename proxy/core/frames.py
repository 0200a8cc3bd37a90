"""
What a WebSocket frame looks like whose content is taken from the read buffer as it stands.

A streamed answer is thousands of short text messages, each in one frame: the first byte says that
it is text, whole, and uses no extension; the second says how long it is (RFC 6455 section 5.2).
Such frames, of up to 64 KiB, are cut out directly, by `upstream.connection` one at a time and by
`core.reply` many at once. Whatever begins otherwise goes to the library that knows the protocol.
"""

from __future__ import annotations

from typing import Final

WHOLE_TEXT: Final = 0x81
"""The first byte of an unfragmented text frame."""

LENGTH_IN_2_BYTES: Final = 126
"""A second byte below this is the length itself. This: two bytes follow. Above: not for us."""
