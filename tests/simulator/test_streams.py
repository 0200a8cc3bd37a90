"""The strict reader: whatever the API would not send is an error."""

import json

import pytest

from proxy.simulator.streams import SseParser, StreamError, check_stream

GOOD = (
    b'event: a\ndata: {"type":"a","n":1}\n\n: keep-alive\nevent: b\ndata: {"type":\ndata: "b"}\n\n'
)


def read(data, size):
    """All events, fed in blocks of a size."""
    parser, events = SseParser(), []
    for start in range(0, len(data), size):
        events.extend(parser.feed(data[start : start + size]))
    parser.finish()
    return events


@pytest.mark.parametrize("size", [1, 2, 7, len(GOOD)])
def test_blocks_do_not_matter(size):
    """Wherever the stream is cut, the same events come out."""
    assert read(GOOD, size) == [{"type": "a", "n": 1}, {"type": "b"}]


@pytest.mark.parametrize(
    "data",
    [
        b'data: {"type":"a"}\n\n',
        b'event: b\ndata: {"type":"a"}\n\n',
        b'event: a\ndata: {"type":"a"}\n',
        b'event: a\ndata: {"type":"a"}',
        b"event: a\ndata: [1]\n\n",
        b"event: a\nid: 3\n\n",
        b"data: [DONE]\n\n",
        b'event: a\nevent: a\ndata: {"type":"a"}\n\n',
    ],
)
def test_malformed_streams_are_errors(data):
    """Missing names, other names, cut ends and strange lines are all refused."""
    with pytest.raises(StreamError):
        read(data, 5)


ITEM = {"id": "msg_1", "type": "message"}
RESPONSE = {"id": "resp_1", "status": "completed", "output": [ITEM]}


def stream(*middle, first=0, **last):
    """A stream around some events."""
    place = {"item_id": "msg_1", "content_index": 0}
    events = [
        {"type": "response.created", "response": {**RESPONSE, "status": "in_progress"}},
        {"type": "response.output_text.delta", **place, "delta": "ab"},
        {"type": "response.output_text.done", **place, "text": "ab"},
        *middle,
        {"type": "response.output_item.done", "item": ITEM},
        {"type": "response.completed", "response": {**RESPONSE, **last}},
    ][first:]
    return [{**event, "sequence_number": n} for n, event in enumerate(events)]


def test_a_sound_stream_gives_its_response():
    """Response, items, and no error."""
    assert check_stream(stream()) == (RESPONSE, [ITEM], None)


def test_an_error_event_gives_its_details():
    """Nested or flat, the details come out."""
    assert check_stream([{"type": "error", "error": {"code": "x"}}])[2] == {"code": "x"}
    assert check_stream([{"type": "error", "code": "x"}])[2]["code"] == "x"


@pytest.mark.parametrize(
    "events",
    [
        [],
        stream(first=1),
        stream()[:-1],
        [*stream(), stream()[-1]],
        stream()[:3] + stream()[2:],
        stream(output=[]),
        stream(id="resp_2"),
        stream({"type": "response.output_text.delta", "item_id": "msg_2", "delta": "c"})
        + stream({"type": "response.output_text.done", "item_id": "msg_2", "text": "d"}),
        stream({"type": "response.output_text.done", "item_id": "msg_2", "text": "d"}),
        stream({"type": "response.created", "response": {"id": "resp_9"}}),
    ],
    ids=[
        "empty",
        "no beginning",
        "no end",
        "two ends",
        "doubled event",
        "no output",
        "other id",
        "two streams",
        "text without deltas",
        "stray response",
    ],
)
def test_unsound_streams_are_errors(events):
    """What does not begin, end or add up as it should is refused."""
    with pytest.raises(StreamError):
        check_stream(json.loads(json.dumps(events)))
