"""
WebSocket frames that nobody should send, and some that few do (RFC 6455 section 5).

Two more faults: bytes written past the framing (`RawFrames`), and text frames that hold no event
(`BadText`). Both act on WebSockets only.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

from proxy.simulator.faults import Action, Fault, Outcome, Script, Step

_FIN = 0x80


def frame(first: int, payload: bytes = b"", *, length: bytes | None = None) -> bytes:
    """Return a frame with this first byte; `length` replaces the length as it should be."""
    if length is None:
        size = len(payload)
        length = bytes([size]) if size < 126 else b"\x7e" + struct.pack("!H", size)
    return bytes([first]) + length + payload


_EVENT = b'{"type":"keepalive"}'

FATAL: tuple[bytes, ...] = (
    *(frame(_FIN | opcode, b"odd") for opcode in (0x3, 0x4, 0x7, 0xB, 0xF)),  # reserved opcodes
    *(frame(_FIN | bits | 0x1, _EVENT) for bits in (0x40, 0x20, 0x10)),  # no extension was agreed
    frame(_FIN | 0x1, b"\0\0\0\0" + _EVENT, length=bytes([0x80 | len(_EVENT)])),  # masked
    frame(0x9, b"half a ping"),  # a control frame in fragments
    frame(_FIN | 0x9, b"x" * 126),  # a control frame too long
    frame(_FIN | 0x0, _EVENT),  # a continuation of nothing
    frame(0x1, b"{") + frame(_FIN | 0x1, _EVENT),  # a message within a message
    frame(_FIN | 0x1, b'{"type":"\xff\xfe"}'),  # no UTF-8
    frame(_FIN | 0x1, b'{"type":"\xed\xa0\x80"}'),  # a lone surrogate in UTF-8
    frame(_FIN | 0x1, b"", length=b"\x7f" + struct.pack("!Q", 1 << 63)),  # a negative length
    frame(_FIN | 0x1, b"", length=b"\x7f" + struct.pack("!Q", 1 << 40)),  # a terabyte
    frame(_FIN | 0x2, _EVENT),  # a binary message
    frame(_FIN | 0x8, b"\x03"),  # half a close code
    frame(_FIN | 0x8, struct.pack("!H", 1005)),  # a code that is never sent
    frame(_FIN | 0x8, struct.pack("!H", 999)),
    frame(_FIN | 0x8, struct.pack("!H", 1000) + b"\xff"),  # a reason that is no UTF-8
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"\0" * 64,
)
"""Bytes after which a connection can't be trusted."""

HARMLESS: tuple[bytes, ...] = (
    frame(_FIN | 0x9),
    frame(_FIN | 0x9, b"are you there?"),
    frame(_FIN | 0xA, b"a pong that nobody asked for"),
    frame(0x1, _EVENT[:5]) + frame(_FIN | 0x9, b"now") + frame(_FIN | 0x0, _EVENT[5:]),
    frame(0x1, b"") + frame(0x0, b"") + frame(_FIN | 0x0, _EVENT),
    frame(_FIN | 0x1, _EVENT, length=b"\x7e" + struct.pack("!H", len(_EVENT))),  # not the shortest
)
"""Frames that are odd and say nothing: a vendor's event at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawFrames(Fault):
    """Bytes written as they are after so many events; if `fatal`, nothing comes after them."""

    frames: bytes = b""
    after_events: int = 0
    fatal: bool = False

    def change(self, script: Script) -> Script:
        """The script with the bytes in it."""
        kept, due_s = script.until(self.after_events)
        rest = script.steps[len(kept) :]
        raw = Step(due_s=due_s, raw=self.frames)
        if self.fatal:
            rest = (Step(action=Action.STALL, due_s=due_s),)
        return replace(script, steps=(*kept, raw, *rest))


@dataclass(frozen=True, slots=True, kw_only=True)
class BadText(Fault):
    """A text frame that is no event, in place of all events after so many."""

    text: str = ""
    after_events: int = 0

    def change(self, script: Script) -> Script:
        """The events before, then the text, then nothing."""
        kept, due_s = script.until(self.after_events)
        bad = Step(due_s=due_s, text=self.text, outcome=Outcome.EVICT)
        return replace(script, steps=(*kept, bad, Step(action=Action.STALL, due_s=due_s)))
