"""Server events to replies: own bytes in, own bytes out, except where the client would notice."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.core import reply
from proxy.core.reply import (
    KEEPALIVE_COMMENT,
    Kind,
    ProtocolFault,
    ReplyReader,
    State,
    error_event,
)

HIDDEN = "resp_0"
PREVIOUS = b'"previous_response_id":"resp_0"'


def reader(*, stream: bool = True, hide: str | None = HIDDEN, collect: bool = True) -> ReplyReader:
    """Make a reader as for a streamed delta turn."""
    return ReplyReader(stream=stream, hide_previous_response_id=hide, collect_output=collect)


def event(kind: str, **fields: Any) -> bytes:
    """Write a message as the API does: compact, its type first."""
    return json.dumps({"type": kind, **fields}, separators=(",", ":")).encode()


def lifecycle(kind: str, **fields: Any) -> bytes:
    """Write a lifecycle event of a response that continues HIDDEN."""
    response = {"id": "resp_1", "previous_response_id": HIDDEN, "output": [], **fields}
    return event(f"response.{kind}", response=response, sequence_number=7)


def delta(text: str = "Hi", number: int = 1) -> bytes:
    """Write a text delta."""
    return event("response.output_text.delta", delta=text, sequence_number=number)


def done(item: Any, index: Any = None) -> bytes:
    """Write an `output_item.done`."""
    fields = {"item": item} if index is None else {"output_index": index, "item": item}
    return event("response.output_item.done", **fields)


def sse(data: bytes) -> list[tuple[str, bytes]]:
    """Parse SSE bytes by the letter of the specification into (event, data) pairs."""
    events = []
    for block in data.split(b"\n\n")[:-1]:
        fields = dict(line.split(b": ", 1) for line in block.split(b"\n"))
        assert list(fields) == [b"event", b"data"]
        events.append((fields[b"event"].decode(), fields[b"data"]))
    assert data.endswith(b"\n\n") or not data
    return events


CREATED, COMPLETED = lifecycle("created"), lifecycle("completed")
ERROR = event("error", status=429, error={"code": "rate_limit_exceeded", "message": "Wait."})
ANSWER = [CREATED, delta("Hel"), delta("lo", 2), COMPLETED]


# --- Framing ------------------------------------------------------------------------------------


def test_each_message_becomes_one_event_with_its_own_bytes() -> None:
    """SSE out, parsed, is what came in."""
    messages = [delta("a"), delta("b"), event("response.new_thing", x=[1.0]), delta("c")]

    out = reader().feed(messages)

    assert sse(out) == [(json.loads(message)["type"], message) for message in messages]


@pytest.mark.parametrize(
    "message",
    [
        b'{"delta":"x","type":"response.output_text.delta"}',
        b' { "type" : "response.output_text.delta", "delta":"x" }\t',
        b'{"type":"response.output_text.\\u0064elta","delta":"x"}',
        b'{"delta":"\\ud83d","type":"response.output_text.delta"}',
        b'{"type":"response.output_text.delta"}',
    ],
)
def test_the_type_is_found_wherever_it_stands(message: bytes) -> None:
    """Key order, whitespace, escapes and half an emoji make no difference."""
    out = reader().feed([delta(), message, delta()])

    assert sse(out)[1] == ("response.output_text.delta", message)


def test_line_ends_inside_a_message_become_spaces() -> None:
    """Pretty-printed JSON stays one SSE field, and the same JSON."""
    pretty = json.dumps(json.loads(delta()), indent=1).replace("\n", "\r\n").encode()

    out = reader().feed([delta(), pretty, delta()])

    assert [json.loads(data) for _, data in sse(out)] == [json.loads(delta())] * 3
    assert b"\r" not in out


def test_a_message_may_hold_any_bytes() -> None:
    """Bytes that are no UTF-8 pass unchanged."""
    message = b'{"type":"response.output_text.delta","delta":"\xff\xfe\x00"}'

    assert sse(reader().feed([message, message])) == [("response.output_text.delta", message)] * 2


@pytest.mark.parametrize(
    "message",
    [
        event("codex.rate_limits", x=1),
        event("responsesapi.websocket_timing"),
        event("keepalive"),
        event("codex.response.metadata", response_id="resp_9"),
        event("a name\nwith: oddities"),
        event("\ud83d"),
    ],
)
def test_vendor_events_are_dropped_everywhere(message: bytes) -> None:
    """What HTTP never has is neither shown, nor an answer's beginning, nor an end's trouble."""
    read = reader()

    assert read.feed([message, message]) == b""
    assert read.state is State.WAITING
    assert len(sse(read.feed([message, CREATED, message, delta(), message]))) == 2
    assert len(sse(read.feed([COMPLETED, message]))) == 1
    assert not read.dirty


def test_many_unknown_types_are_not_kept_for_ever() -> None:
    """A flood of made-up types is relayed, and told apart still."""
    messages = [event(f"response.made_up_{number}") for number in range(1200)]

    assert [data for _, data in sse(reader().feed(messages))] == messages


def test_nothing_is_written_for_a_client_that_does_not_stream() -> None:
    """The terminal event's response object is the body; no byte before."""
    read = reader(stream=False)

    assert read.feed(ANSWER) == b""
    assert read.terminal is Kind.COMPLETED
    assert json.loads(read.response) == {"id": "resp_1", "previous_response_id": None, "output": []}


def test_no_messages_give_no_bytes() -> None:
    """An empty batch is nothing."""
    assert reader().feed([]) == b""


MESSAGES = st.sampled_from(
    [
        CREATED,
        lifecycle("in_progress"),
        delta(),
        delta("\n", 5),
        b'{\n "type": "response.x"\n}',
        event("codex.rate_limits"),
        done({"type": "message", "id": "a"}, 1),
        done({"type": "reasoning"}, 0),
        COMPLETED,
        lifecycle("failed"),
        lifecycle("in_progress", id="resp_9"),
        ERROR,
        event("error", code="x", sequence_number=4),
        b'{"error":{"message":"m"}}',
        b"garbage",
    ]
)


def outcome(messages: list[bytes], sizes: list[int], *, stream: bool) -> tuple[Any, ...]:
    """Feed `messages` in batches of the given sizes; return all that can be seen of it."""
    read, out, fault, position = reader(stream=stream), b"", False, 0
    while position < len(messages):
        size = sizes.pop(0) if sizes else len(messages)
        try:
            out += read.feed(messages[position : position + size])
        except ProtocolFault as error:
            return out + error.written, "fault"
        position += size
    return (
        *(out, read.state, read.terminal, read.refusal, read.dirty, read.response_id),
        *(read.response, read.output, read.final_output, read.last_sequence_number, fault),
    )


@given(st.lists(MESSAGES, max_size=12), st.lists(st.integers(1, 5)), st.booleans())
@example([CREATED, delta(), b"garbage"], [], True)
@example([delta(), delta("x", 6), ERROR, delta()], [1, 1], True)
def test_grouping_makes_no_difference(
    messages: list[bytes], sizes: list[int], stream: bool
) -> None:
    """However messages arrive together, the bytes, in total, and all that is known are the same."""
    one_by_one = outcome(messages, [1] * len(messages), stream=stream)

    assert outcome(messages, sizes, stream=stream) == one_by_one


# --- Frames -------------------------------------------------------------------------------------


def frame(message: bytes) -> bytes:
    """Write a message as a WebSocket server does, unfragmented."""
    if len(message) < 126:
        return bytes([0x81, len(message)]) + message
    return bytes([0x81, 126, *len(message).to_bytes(2)]) + message


def unframed(data: bytes) -> tuple[bytes, bytes] | None:
    """Split off the message of the first frame, if it is whole."""
    head = 4 if data[1:2] == b"\x7e" else 2
    if len(data) < head:
        return None
    start, size = (4, int.from_bytes(data[2:4])) if head == 4 else (2, data[1])
    return (data[start : start + size], data[start + size :]) if start + size <= len(data) else None


def outcome_of_frames(
    messages: list[bytes], splits: list[int], *, stream: bool
) -> tuple[tuple[Any, ...], int]:
    """Feed frames that come in pieces; return all that can be seen, and how many `feed` got."""
    read, out, fed, data = reader(stream=stream), b"", 0, b""
    rest = b"".join(frame(message) for message in messages)
    while rest:
        size = splits.pop(0) if splits else len(rest)
        data, rest = data + rest[:size], rest[size:]
        while True:
            written, end = read.feed_frames(data)
            out, data = out + b"".join(written), data[end:]
            if (first := unframed(data)) is None:
                break
            message, data = first
            fed += 1
            try:
                out += read.feed([message])
            except ProtocolFault as error:
                return (out + error.written, "fault"), fed
    return (
        *(out, read.state, read.terminal, read.refusal, read.dirty, read.response_id),
        *(read.response, read.output, read.final_output, read.last_sequence_number, False),
    ), fed


FRAMED = st.one_of(
    MESSAGES,
    st.builds(delta, st.text(max_size=200), st.integers(0, 9)),
    st.sampled_from(
        [
            delta("\u00e9" * 10).replace(b"\\u00e9", b"\xc3\xa9"),
            event("response.reasoning_text.delta", delta="hm", sequence_number=8),
            delta("x").replace(b'"x"', b'"x"\r'),
            delta("x").replace(b'"x"', b'\n"x"'),
            delta("x") + b" ",
            b'{"type":"response.output_text.delta"}',
            b'{"type":"response.output_text.delta',
            b'{"type":"',
            event("response.made_up_of_late", x="y" * 300),
            b"{}",
            b"",
        ]
    ),
)


@given(st.lists(FRAMED, max_size=12), st.lists(st.integers(1, 400)), st.booleans())
@example([CREATED, delta(), delta(), b'{"type":"'], [], True)
@example([b""], [], False)
@example([CREATED, delta(), delta("\n").replace(b"\\n", b"\n"), delta()], [], True)
def test_frames_and_messages_are_read_alike(
    messages: list[bytes], splits: list[int], stream: bool
) -> None:
    """Cut from the read buffer, however it is split, or fed one by one, all is the same."""
    one_by_one = outcome(messages, [1] * len(messages), stream=stream)

    assert outcome_of_frames(messages, splits, stream=stream)[0] == one_by_one


def test_frames_of_plain_events_need_no_feeding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a type is known, its events are cut from the buffer, whatever their order."""
    monkeypatch.setattr(reply, "_EVENT_TYPES", {})
    other = event("response.reasoning_text.delta", delta="hm", sequence_number=8)
    messages = [CREATED, delta(), other, *[delta("\u00e9" * 30), delta(), other] * 50, COMPLETED]

    _, fed = outcome_of_frames(messages, [], stream=True)

    assert fed == 4


@pytest.mark.parametrize("bad", [b"\xff", b"\xc3", b"\n"])
def test_what_can_not_be_taken_together_is_left(bad: bytes) -> None:
    """Events that are no UTF-8, or have line ends, are all left; and so are those after them."""
    read = reader()
    read.feed([CREATED, delta()])
    odd = delta("?").replace(b"?", bad)
    data = b"".join(frame(message) for message in (delta(), odd, b"\xa9" + delta(), delta()))

    assert read.feed_frames(data) == ([], 0)
    assert read.feed_frames(frame(delta())) == ([], 0)


@pytest.mark.parametrize(
    "other",
    [
        b"\x01" + frame(delta())[1:],  # the beginning of a fragmented message
        b"\x89\x00",  # a ping
        bytes([0x81, 127, *(70_000).to_bytes(8)]) + delta("x" * 70_000),
        bytes([0x81, 0x80 | 5, 0, 0, 0, 0]) + b"{...}",  # masked
        frame(delta())[:-1],
        b"\x81",
    ],
)
def test_other_frames_are_left(other: bytes) -> None:
    """What is not short, whole, or text is for those who know the protocol."""
    read = reader()
    read.feed([CREATED, delta()])
    data = frame(delta()) * 2

    written, end = read.feed_frames(b"??" + data + other, 2)

    assert (end, len(sse(b"".join(written)))) == (2 + len(data), 2)


def test_no_frames_are_taken_before_or_after_the_answer() -> None:
    """What begins or ends an answer, or comes around it, is looked at one by one."""
    read = reader()
    assert read.feed_frames(frame(delta())) == ([], 0)
    read.feed(ANSWER)

    assert read.feed_frames(frame(delta())) == ([], 0)


# --- States -------------------------------------------------------------------------------------


def test_an_answer_begins_goes_on_and_ends() -> None:
    """WAITING, STREAMING, ENDED; begun from the first event."""
    read = reader()
    assert (read.state, read.begun) == (State.WAITING, False)
    read.feed(ANSWER[:2])
    assert (read.state, read.begun, read.terminal) == (State.STREAMING, True, None)
    read.feed(ANSWER[2:])
    assert (read.state, read.begun, read.terminal) == (State.ENDED, True, Kind.COMPLETED)
    assert (read.response_id, read.dirty) == ("resp_1", False)
    assert repr(read) == "ReplyReader(ENDED, response_id='resp_1')"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("completed", Kind.COMPLETED),
        ("incomplete", Kind.INCOMPLETE),
        ("failed", Kind.FAILED),
        ("cancelled", Kind.FAILED),
    ],
)
def test_every_terminal_event_ends_the_answer(name: str, kind: Kind) -> None:
    """Each is shown to the client, even as the only event."""
    read = reader()

    assert [shown for shown, _ in sse(read.feed([lifecycle(name)]))] == [f"response.{name}"]
    assert read.terminal is kind


@pytest.mark.parametrize("late", [delta(), COMPLETED, ERROR, b"garbage", b'{"x":1}', b""])
@pytest.mark.parametrize("together", [True, False])
def test_what_follows_the_end_spoils_the_connection(late: bytes, together: bool) -> None:
    """It is never shown, and the connection must not serve another turn."""
    read = reader()
    out = read.feed([*ANSWER, late]) if together else read.feed(ANSWER) + read.feed([late])

    assert len(sse(out)) == len(ANSWER)
    assert (read.dirty, read.terminal) == (True, Kind.COMPLETED)


@pytest.mark.parametrize(
    "setup", [[], [lifecycle("in_progress")], [delta()], [done({"type": "message"}, 0)]]
)
def test_setup_events_may_be_missing(setup: list[bytes]) -> None:
    """An answer need not open with `created` (protocol 3.1)."""
    read = reader()

    assert len(sse(read.feed([*setup, COMPLETED]))) == len(setup) + 1
    assert read.response_id == "resp_1"


@pytest.mark.parametrize(
    "messages",
    [
        [CREATED, lifecycle("in_progress", id="resp_2")],
        [CREATED, delta(), lifecycle("completed", id="resp_2")],
        [CREATED, CREATED],
        [b"garbage"],
        [b""],
        [b"[]"],
        [b"{}"],
        [b'{"type":null}'],
        [b'{"type":7}'],
        [b'{"type":"response.x"'],
        [b'{"type":"response.output_text.delta}'],
        [delta(), delta()[:-3]],
        [b'{"type":"response.a b"}'],
        [b'{"type":"response.a\\nb"}'],
        [b'{"type":"response.x","s":"\\ud83d","type":"response.y"}'],
        [event("response.completed")],
        [event("response.completed", response=None)],
        [event("response.failed", response="x")],
        [b'{"type":"response.created","response":{%b,%b}}' % (PREVIOUS, PREVIOUS)],
        [b'{"type":"response.created","response":{%b},"response":{%b}}' % (PREVIOUS, PREVIOUS)],
        [b'{"a":1,"a":2,"type":"error"}'],
        [b'{"type":"response.output_item.done","item":{}x}'],
        [b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b',"type":"response.x"}'],
    ],
)
def test_what_belongs_to_no_answer_is_a_fault(messages: list[bytes]) -> None:
    """The faulty message is not shown; those before it in the batch can still be written."""
    read = reader()

    with pytest.raises(ProtocolFault) as caught:
        read.feed(messages)

    assert len(sse(caught.value.written)) == len(messages) - 1


def test_a_lifecycle_event_without_a_response_passes() -> None:
    """Only a terminal event needs its response object."""
    messages = [event("response.queued"), event("response.in_progress", response=None)]

    assert [data for _, data in sse(reader().feed(messages))] == messages


@given(st.binary(max_size=40))
def test_any_bytes_are_shown_whole_or_refused(message: bytes) -> None:
    """Fuzz: a ProtocolFault, or SSE that parses; nothing else comes out."""
    try:
        out = reader().feed([message])
    except ProtocolFault as fault:
        out = fault.written
    assert len(sse(out)) <= 1


# --- Errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("before", [[], [event("codex.rate_limits")]])
@pytest.mark.parametrize("error", [ERROR, b'{"error":{"message":"Wait.","status":429}}'])
def test_an_error_instead_of_an_answer_is_held_back(
    stream: bool, before: list[bytes], error: bytes
) -> None:
    """Nothing is encoded, so that the status line is still free."""
    read = reader(stream=stream)

    assert read.feed([*before, error]) == b""
    assert (read.begun, read.state, read.terminal) == (False, State.REFUSED, Kind.ERROR)
    assert read.refusal is not None
    assert (read.refusal.status, read.refusal.message) == (429, "Wait.")
    assert not read.dirty
    read.feed([lifecycle("failed")])
    assert read.dirty


def test_an_error_in_the_middle_has_its_details_twice() -> None:
    """One event, flat and nested, unknown fields kept, transport fields gone, then nothing more."""
    error = event(
        "error",
        sequence_number=9,
        stream_id="lane",
        status=500,
        error={"code": "server_error", "message": "Oh.", "headers": {"retry-after": "1"}, "x": 1.0},
    )
    read = reader()

    out = read.feed([CREATED, delta(), error, delta()])

    name, data = sse(out)[-1]
    assert (name, len(sse(out))) == ("error", 3)
    nested = {"code": "server_error", "message": "Oh.", "x": 1.0}
    assert json.loads(data) == {
        "type": "error",
        "code": "server_error",
        "message": "Oh.",
        "param": None,
        "sequence_number": 9,
        "error": {**nested, "type": "server_error", "param": None},
    }
    assert (read.begun, read.state, read.terminal) == (True, State.ENDED, Kind.ERROR)
    assert (read.dirty, read.response) == (True, b"")


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("last", "number"), [(41, 42), (None, 1), ("x", 1), (True, 1)])
def test_an_error_without_a_number_continues_the_count(
    last: Any, number: int, together: bool
) -> None:
    """`sequence_number` stays monotonic to the client."""
    read = reader()
    messages = [event("response.x", sequence_number=last), b'{"error":{"message":"m"}}']

    out = read.feed(messages) if together else read.feed(messages[:1]) + read.feed(messages[1:])

    assert json.loads(sse(out)[-1][1])["sequence_number"] == number


def test_an_error_of_our_own_has_the_same_form() -> None:
    """The client's SDK can't tell it from the upstream's."""
    [(name, data)] = sse(error_event("upstream_connection_lost", 'It "went"\n.', 5))

    details = {"code": "upstream_connection_lost", "message": 'It "went"\n.', "param": None}
    assert name == "error"
    assert json.loads(data) == {
        "type": "error",
        **details,
        "sequence_number": 5,
        "error": {**details, "type": "server_error"},
    }


def test_the_last_sequence_number_is_that_of_the_last_event_shown() -> None:
    """Best effort: None where there is none, or where the event can't be read."""
    read = reader()
    assert read.last_sequence_number is None
    read.feed([delta(number=1), delta(number=12), event("codex.x", sequence_number=99)])
    assert read.last_sequence_number == 12
    read.feed([b'{"type":"response.output_text.delta",broken}'])
    assert read.last_sequence_number is None


def test_the_keepalive_is_a_comment_of_one_line() -> None:
    """A blank line would make some clients see an empty event."""
    assert KEEPALIVE_COMMENT.startswith(b":")
    assert KEEPALIVE_COMMENT.count(b"\n") == 1


# --- What the client must not notice ------------------------------------------------------------


@pytest.mark.parametrize("name", ["created", "queued", "in_progress", "incomplete", "completed"])
def test_the_hidden_id_is_replaced_in_its_place_only(name: str) -> None:
    """The same words in text, in metadata, in tools, or at the event's own level stay."""
    before = (
        b'{"previous_response_id":"resp_0","type":"response.%b", "response" : { "id":"resp_1",'
        b'"instructions":"\\"previous_response_id\\":\\"resp_0\\"","n":1.0,'
        b'"metadata":{"previous_response_id":"resp_0"},'
        b'"previous_response_\\u0069d" : "resp_0" ,"output":[{"text":"resp_0"}]} }' % name.encode()
    )
    place = b'"previous_response_\\u0069d" : '
    after = before.replace(place + b'"resp_0"', place + b"null")

    assert sse(reader().feed([before])) == [(f"response.{name}", after)]
    whole = reader(stream=False)
    whole.feed([before])
    if whole.terminal:
        assert whole.response in after
        assert json.loads(whole.response)["previous_response_id"] is None


OTHER_MEMBERS = st.sampled_from(
    [
        b'"id":"r"',
        b'"n":1.0',
        b'"t":"\\u00e9\\n"',
        b'"s":"\\ud83d"',
        b'"output" : [ ]',
        b'"b":"\\\\"',
        b'"v":"resp_0"',
        b'"m":{%b}' % PREVIOUS,
        b'"l":[{%b}]' % PREVIOUS,
        b'"e":"\\"previous_response_id\\":\\"resp_0\\""',
        b'"q":"\\"previous_response_id"',
        b'"w":"previous_response_id"',
    ]
)
SPELLINGS = st.sampled_from(
    [b'"previous_response_id":', b'"previous_response_id" :\n', b'"previous\\u005fresponse_id":']
)


@given(
    st.lists(OTHER_MEMBERS, unique=True),
    st.lists(OTHER_MEMBERS, unique=True),
    SPELLINGS,
    st.lists(st.sampled_from([b'"sequence_number":3', b'"z":{%b}' % PREVIOUS]), unique=True),
    st.booleans(),
)
def test_the_id_is_hidden_wherever_it_stands(
    before: list[bytes], after: list[bytes], key: bytes, outer: list[bytes], last: bool
) -> None:
    """Whatever stands around the member, exactly its value becomes null."""
    after = [member for member in after if member not in before]

    def message(value: bytes) -> bytes:
        response = b'"response":{%b}' % b",".join([*before, key + value, *after])
        members = [*outer, response] if last else [response, *outer]
        return b'{"type":"response.created",%b}' % b",".join(members)

    out = reader().feed([message(b'"resp_0"')])

    assert sse(out) == [("response.created", message(b"null").replace(b"\n", b" "))]


def test_an_id_that_the_client_sent_itself_stays() -> None:
    """Without an id to hide, every byte stays."""
    out = reader(hide=None).feed(ANSWER)

    assert [data for _, data in sse(out)] == ANSWER


def test_a_response_with_nothing_to_hide_keeps_its_bytes() -> None:
    """A null or missing previous id needs no splice."""
    messages = [
        b'{"type":"response.created","response":{"id":"a","previous_response_id":null}}',
        b'{"type":"response.completed","response":{"id":"a"}}',
    ]

    assert [data for _, data in sse(reader().feed(messages))] == messages


# --- Output -------------------------------------------------------------------------------------

ITEMS = [b'{"type":"reasoning","n":1.0}', b'{"type":"message"}', b'{"type":"function_call"}']


def raw_done(item: bytes, index: int | None) -> bytes:
    """Write an `output_item.done` around an item's own bytes."""
    place = b"" if index is None else b'"output_index":%d,' % index
    return b'{"type":"response.output_item.done",%b"item":%b}' % (place, item)


@pytest.mark.parametrize(
    ("order", "indexes"),
    [
        ([0, 1, 2], [0, 1, 2]),
        ([2, 0, 1], [2, 0, 1]),
        ([0, 1, 2], [None, None, None]),
        ([0, 1, 2], [5, None, 1]),
        ([0, 0, 1, 2], [0, 0, 1, 2]),
    ],
)
def test_items_are_kept_in_output_order(order: list[int], indexes: list[int | None]) -> None:
    """By `output_index`; by arrival where one has none; one item an index."""
    read = reader()

    read.feed([raw_done(ITEMS[at], index) for at, index in zip(order, indexes, strict=True)])

    assert read.output == ITEMS


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("completed", b',"output":[ ]', b',"output":[%b]'),
        ("completed", b',"output":null,"usage":{}', b',"output":[%b],"usage":{}'),
        ("incomplete", b"", b',"output":[%b]'),
        ("completed", b',"output":"?"', b',"output":[%b]'),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("collect", [True, False])
def test_an_output_that_was_left_empty_is_filled(
    name: str, before: bytes, after: bytes, stream: bool, collect: bool
) -> None:
    """The terminal event carries the streamed items' own bytes, streamed or not."""
    message = b'{"type":"response.%b","response":{"id":"a"%b}}'
    read = reader(stream=stream, collect=collect)
    read.feed([raw_done(item, index) for index, item in enumerate(ITEMS)])

    out = read.feed([message % (name.encode(), before)])

    full = after % b",".join(ITEMS)
    if not stream:
        assert read.response == b'{"id":"a"%b}' % full
    else:
        assert sse(out) == [(f"response.{name}", message % (name.encode(), full))]
    assert read.final_output == []
    assert read.output == (ITEMS if collect else [])


def test_a_given_output_is_kept_as_it_is() -> None:
    """What upstream says itself is neither changed nor hidden behind what it streamed."""
    final = b'{"type":"response.completed","response":{"id":"a","output":[{"x":1.0}, {"y":2}]}}'
    read = reader()

    out = read.feed([raw_done(ITEMS[0], 0), final])

    assert sse(out)[-1][1] == final
    assert (read.output, read.final_output) == (ITEMS[:1], [b'{"x":1.0}', b'{"y":2}'])


def test_the_output_of_a_failed_response_is_not_filled() -> None:
    """What failed has the output that upstream gives it."""
    read = reader(hide=None)
    failed = lifecycle("failed")

    assert sse(read.feed([raw_done(ITEMS[0], 0), failed]))[-1][1] == failed


def test_an_id_and_an_output_can_be_changed_at_once() -> None:
    """Two splices in one object do not disturb each other."""
    read = reader(stream=False)
    read.feed([raw_done(ITEMS[0], 0)])

    read.feed([COMPLETED])

    assert json.loads(read.response) == {
        "id": "resp_1",
        "previous_response_id": None,
        "output": [json.loads(ITEMS[0])],
    }


@pytest.mark.parametrize("item", [None, "text", [1]])
def test_an_item_that_is_no_object_is_shown_but_not_kept(item: Any) -> None:
    """Only objects can be items; the client still gets the event."""
    read = reader()

    assert len(sse(read.feed([done(item, 0), event("response.output_item.done")]))) == 2
    assert read.output == []


def test_half_an_emoji_in_an_answer_is_no_trouble() -> None:
    """A lone surrogate in an item or a terminal event passes byte for byte."""
    item = b'{"type":"message","text":"\\ud83d"}'
    given_output = b'{"type":"response.completed","response":{"id":"a","output":[%b]}}' % item
    for last in (COMPLETED, given_output):
        read = reader(stream=False)

        read.feed([raw_done(item, 0), last])

        assert read.output == [item]
        assert item in read.response


@pytest.mark.parametrize("field", [b'"id":7', b'"output":7', b'"output":null', b'"id":null'])
def test_a_field_of_the_wrong_kind_is_no_fault(field: bytes) -> None:
    """The client judges what the upstream says; we need only what we can use."""
    message = b'{"type":"response.completed","response":{%b,%b}}' % (field, PREVIOUS)
    read = reader()

    assert sse(read.feed([message]))[0][1] == message.replace(b'"resp_0"', b"null")
    assert (read.response_id, read.final_output) == (None, [])


def test_a_number_that_python_will_not_read_is_passed_on() -> None:
    """Five thousand digits are JSON; we only need not understand them."""
    message = raw_done(ITEMS[0], 0).replace(b":0,", b":" + b"9" * 5000 + b",")
    read = reader()

    assert sse(read.feed([message])) == [("response.output_item.done", message)]
    assert read.output == ITEMS[:1]


@pytest.mark.parametrize(
    "message", [delta(), done({"type": "message"}), lifecycle("completed"), lifecycle("failed")]
)
def test_on_a_reused_connection_an_answer_begins_with_its_beginning(message: bytes):
    """A late event of the turn before is a fault there; on a new connection it is let through."""
    fresh, reused = (
        ReplyReader(stream=True, hide_previous_response_id=None, collect_output=True, reused=flag)
        for flag in (False, True)
    )
    assert fresh.feed([message])
    with pytest.raises(ProtocolFault):
        reused.feed([message])
    assert not reused.begun


@pytest.mark.parametrize("kind", ["created", "queued", "in_progress"])
def test_on_a_reused_connection_any_beginning_will_do(kind: str):
    """The first lifecycle events begin an answer, vendor events before them or not."""
    reused = ReplyReader(
        stream=True, hide_previous_response_id=None, collect_output=True, reused=True
    )
    reused.feed([event("codex.rate_limits"), lifecycle(kind), delta()])
    assert reused.begun
