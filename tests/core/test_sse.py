"""Server-sent events: every cut of a stream gives the same events."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.sse import SseReader, TooLong

STREAM = (
    b"\xef\xbb\xbf: hello\n\n"
    b'event: a\ndata: {"x":1}\n\n'
    b"id: 7\r\ndata: one\r\ndata:two\r\ndata\r\n\r\n"
    b"data: three\r\rdata:  four\r\n\n"
    b"event: no data\n\n"
    b"data: cut off\n"
)
EVENTS = [b'{"x":1}', b"one\ntwo\n", b"three", b" four"]


def read(blocks: list[bytes]) -> list[bytes]:
    """Return the events of a stream that comes in these blocks."""
    reader = SseReader(1000)
    return [event for block in blocks for event in reader.feed(block)]


def test_reads_a_stream_by_the_rules_of_the_standard():
    """Comments, other fields, three kinds of line end, and an event that never ends."""
    assert read([STREAM]) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12).map(sorted))
def test_any_cut_gives_the_same_events(cuts):
    """Where the network cuts the bytes makes no difference."""
    places = [0, *cuts, len(STREAM)]
    assert read([STREAM[a:b] for a, b in itertools.pairwise(places)]) == EVENTS


def test_an_event_is_told_by_the_byte_that_ends_it():
    """No event waits for the one after it, whatever its line ends are."""
    for stream in (b"data: x\n\n", b"data: x\r\r", b"data: x\r\n\r"):
        reader = SseReader(100)
        assert reader.feed(stream[:-1]) == []
        assert reader.feed(stream[-1:]) == [b"x"]


@pytest.mark.parametrize("block", [b"data: 1234567890", b"data: 12345\ndata: 67890\n"])
def test_an_event_beyond_the_limit_is_refused(block):
    """What is kept of an event is bounded, in one line or in many."""
    with pytest.raises(TooLong):
        SseReader(9).feed(block)
