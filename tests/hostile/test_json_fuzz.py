"""
The reader of bodies under a mischievous hand: rows P6 and P9.

Whatever bytes a body has, it is read, or left to HTTP with a reason; nothing is raised. What is
read is what a strict reader reads (no duplicate keys, no NaN, UTF-8 only), and what is sent of it
are slices of the client's own bytes, in order. `TURNWIRE_FUZZ=1` makes it long.
"""

from __future__ import annotations

import json
import os
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from proxy.core.items import Fingerprinter
from proxy.core.reasons import Reason
from proxy.core.request import NOT_SENT, TurnRequest, parse_body

FINGERPRINTS = Fingerprinter(b"0123456789abcdef")
ROOT = FINGERPRINTS.root("p")
TOKENS = [
    b'"',
    b"\\",
    b"\\u0000",
    b"\\ud800",
    b"\\u0069nput",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"-0",
    b"9" * 400,
    b"0.1e-400",
    b"18446744073709551617",
    b"null",
    b"true",
    b"\xef\xbb\xbf",
    b"\xff",
    b"\xed\xa0\x80",
    b"\x00",
    b"\x1f",
    b"\n",
    b"\xc2\xa0",
    b'"input":[]',
    b'"model":"b",',
    b'{"role":"user","content":"x"},',
    b"[" * 1200,
]
SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.floats(-9e9, 9e9)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = st.sampled_from(["role", "type", "content", "id", "call_id", "arguments", "x"])
ITEMS = st.dictionaries(NAMES, VALUES, max_size=5)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Draw a body, spelled in any way, with a few bytes changed in most."""
    body: dict[str, Any] = {"model": "m", "store": False, "instructions": draw(st.text(max_size=6))}
    body["input"] = draw(st.lists(ITEMS, max_size=4) | st.text(max_size=6))
    body |= draw(st.dictionaries(st.text(max_size=5), VALUES, max_size=2))
    ascii_only, indent = draw(st.booleans()), draw(st.sampled_from([None, 1]))
    data = json.dumps(body, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    for _ in range(draw(st.sampled_from([0, 1, 1, 2, 3]))):
        at = draw(st.integers(0, len(data)))
        gone = draw(st.sampled_from([0, 0, 1, 4]))
        data = data[:at] + draw(st.sampled_from(TOKENS)) + data[at + gone :]
    return data


def strictly(text: bytes) -> Any:
    """Read JSON as the strictest of readers; raises ValueError or RecursionError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("a key comes twice")
        return dict(pairs)

    def refuse(name: str) -> None:
        raise ValueError(name)

    # Numbers stay text, so that none is rounded.
    return json.loads(
        text.decode("utf-8"),
        object_pairs_hook=unique,
        parse_constant=refuse,
        parse_float=lambda number: ("float", number),
        parse_int=lambda number: ("int", number),
    )


@settings(
    max_examples=100_000 if os.environ.get("TURNWIRE_FUZZ") else 200,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(data=bodies())
@example(data=b'{"model":"m","input":[{"a":' + b"[" * 100_000)
@example(data=b'{"input":"a","\\u0069nput":"b"}')
@example(data=b"\xef\xbb\xbf{}")
@example(data=b'{"input":"a","\\ud83d":1}')
@example(data=b'{"type":"response.create","input":"a"}')
def test_a_body_is_read_as_a_strict_reader_reads_it_or_left_alone(data: bytes) -> None:
    """Read alike and sent in slices, or a reason; never an exception, never a guess."""
    request = parse_body(data, ROOT, FINGERPRINTS)
    if not isinstance(request, TurnRequest):
        assert isinstance(request, Reason)
        return

    meant = strictly(data)
    given_input = meant["input"]
    position = 0
    if isinstance(given_input, list):
        assert len(request.items) == len(given_input)
        for item, value in zip(request.items, given_input, strict=True):
            position = data.index(item.raw, position) + len(item.raw)
            assert strictly(item.raw) == value
    if request.envelope.ineligible is not None:
        return  # HTTP has it, as it is
    try:
        message = request.full_message()
    except UnicodeEncodeError:  # a name that is half an emoji can't be written: HTTP again
        assert any("\ud800" <= letter <= "\udfff" for key in meant for letter in key)
        return
    sent = strictly(message)
    assert sent.pop("type") == "response.create"
    assert sent == {
        key: value
        for key, value in meant.items()
        if key == "input" or (key not in NOT_SENT and value is not None)
    }
