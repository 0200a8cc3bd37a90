"""
An upstream under a mischievous hand: rows F14 to F16, F18 and F19 as fuzz, and P11.

Whatever it sends in place of an answer, the client gets valid HTTP and valid server-sent events:
an error with a status, or a stream that ends in exactly one terminal event, or one that is cut off
where no client takes it for complete. `TURNWIRE_FUZZ=1` makes it long.
"""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hostile.edge import RogueEdge
from hostile.ledger import events
from hostile.upstream import framed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hostile.ledger import Reply

ANSWER = [json.dumps(event, separators=(",", ":")).encode() for event in events("0" * 20)]
TERMINALS = {"response.completed", "response.incomplete", "response.failed", "error"}
ODD_EVENTS = [
    b"",
    b"null",
    b"[]",
    b'"text"',
    b"{}",
    b'{"type":null}',
    b'{"type":7}',
    b'{"type":""}',
    b'{"type":"response.output_text.delta","type":"response.completed"}',
    b'{"type":"a\\nb"}',
    b'{"type":"a\\u000adata: x"}',
    b'{"type":"response.new_thing","x":NaN}',
    b'{"type":"response.new_thing","x":1e999}',
    b'{"type":"response.new_thing","x":' + b"9" * 5000 + b"}",
    b'{"type":"response.new_thing","x":"\\ud800"}',
    b'{"type":"response.new_thing","x":' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"type":"response.new_thing","x":"a\nb"}',
    b'{"type":"response.new_thing","x":"a\r\n\r\nevent: response.completed\r\ndata: {}\r\n\r\n"}',
    b'\xef\xbb\xbf{"type":"response.new_thing"}',
    b'{"type":"response.new_thing"',
    b'{"type":"response.output_text.delta","delta":"\xff"}',
    b'{"type":"response.created"}',
    b'{"type":"response.created","response":{"id":"resp_foreign"}}',
    b'{"type":"response.created","response":{"id":null}}',
    b'{"type":"response.completed"}',
    b'{"type":"response.completed","response":[]}',
    b'{"type":"response.completed","response":{"id":"resp_foreign","output":[]}}',
    b'{"type":"response.failed","response":{"id":7,"error":"no object"}}',
    b'{"type":"error"}',
    b'{"type":"error","error":"text"}',
    b'{"type":"error","status":"x","error":{"code":{},"message":[]}}',
    b'{"type":"error","status":99999,"error":{"message":"no"}}',
    b'{"type":"error","status":200,"error":{"message":"no"}}',
    b'{"type":"error","status":400,"headers":{"retry-after":"1\\r\\nX: y"},"error":{}}',
    b'{"type":"error","status":429,"headers":{"retry-after":[1],"x":{}},"error":{"code":"x"}}',
    b'{"type":"codex.rate_limits"}',
    b'{"type":"response.output_item.done","item":null}',
    b'{"type":"response.output_item.done","output_index":-1,"item":{"type":"message"}}',
]
ODD_FRAMES = [
    b"\x81\x80\x00\x00\x00\x00",  # masked
    b"\xc1\x02{}",  # a reserved bit
    b"\x83\x00",  # a reserved opcode
    b"\x81\xff",
    b"\x81\x7f\x80\x00\x00\x00\x00\x00\x00\x00",  # a length with its highest bit set
    b"\x81\x7f\x00\x00\x00\x00\x00\x00\x00\x01x",  # a length in more bytes than it needs
    b"\x81\x7f\x00\x00\x7f\xff\xff\xff\xff\xff",  # a length beyond every limit
    b"\x09\x00",  # a control frame in fragments
    b"\x89\x7e\x00\x80" + b"x" * 128,  # a control frame that is too long
    b"\x80\x00",  # a continuation of nothing
    b"\x88\x01\x03",  # a close code cut in two
    b"\x88\x02\x03\xed",  # a close code that nobody may send
    b"\x88\x04\x03\xe8\xff\xff",  # a close reason that is not UTF-8
    b"\x82\x02{}",  # binary
]
FUZZ = bool(os.environ.get("TURNWIRE_FUZZ"))
fuzzed = settings(
    max_examples=20_000 if FUZZ else 60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@st.composite
def answers(draw: st.DrawFn) -> list[bytes]:
    """Draw an answer as bytes on the wire, with faults in it, and cut it anywhere."""
    messages = [framed(event) for event in ANSWER]
    for _ in range(draw(st.integers(0, 3))):
        odd = st.sampled_from([framed(event) for event in ODD_EVENTS] + ODD_FRAMES)
        repeated = st.sampled_from(messages or [b""])
        messages.insert(draw(st.integers(0, len(messages))), draw(odd | repeated))
    if draw(st.booleans()):
        del messages[draw(st.integers(0, len(messages))) :]
    data = b"".join(messages)
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=3)) + data[at + draw(st.integers(0, 3)) :]
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=5)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@pytest.fixture(scope="module")
def edge() -> Iterator[RogueEdge]:
    """One proxy before one rogue, for all examples."""
    with RogueEdge() as running:
        yield running


def ask(edge: RogueEdge, *, stream: bool) -> Reply:
    """Send a turn, each of its own conversation; return the one reply."""
    body = b'{"model":"m","store":false,"stream":%b,"input":"n %d"}' % (
        b"true" if stream else b"false",
        edge.rogue.turns,
    )
    head = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sk-fuzz\r\n"
    head += b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    (reply,) = edge.ask(head + body)
    return reply


def read_events(body: bytes) -> list[str]:
    """
    Read server-sent events as the specification says, and return their types.

    What is not terminated by an empty line is no event. Raises UnicodeDecodeError for what is not
    UTF-8, and AssertionError for what is no event and no comment.
    """
    found = []
    *blocks, _cut_off = re.split(r"\n\n", body.decode("utf-8", "strict"))
    for block in blocks:
        lines = [line for line in re.split(r"\r\n|\n|\r", block) if not line.startswith(":")]
        assert all(re.match(r"(event|data): ", line) for line in lines), block
        data = "\n".join(line[6:] for line in lines if line.startswith("data: "))
        kind = next(line[7:] for line in lines if line.startswith("event: "))
        assert len(lines) == 2, block
        assert data, block
        found.append(kind)
    return found


@fuzzed
@given(script=answers(), hangs_up=st.booleans(), stream=st.booleans())
@example(script=[b"".join(map(framed, ANSWER))], hangs_up=False, stream=True)
def test_whatever_upstream_sends_the_client_gets_valid_replies(
    edge: RogueEdge, script: list[bytes], hangs_up: bool, stream: bool
) -> None:
    """A status that says no, or one answer with exactly one end, or a stream that breaks off."""
    edge.rogue.script, edge.rogue.hangs_up = script, hangs_up

    reply = ask(edge, stream=stream)

    if reply.status != 200:
        assert 400 <= reply.status < 600
        assert set(json.loads(reply.body)["error"]) >= {"message", "type", "code"}
    elif stream:
        kinds = read_events(reply.body)
        ends = [kind for kind in kinds if kind in TERMINALS]
        assert len(ends) <= 1, kinds
        assert not ends or kinds[-1] == ends[0], kinds
        assert ends or not reply.complete, "it looks complete and has no end"
    else:
        assert reply.complete
        assert isinstance(json.loads(reply.body), dict)


def test_after_all_that_a_good_answer_is_relayed(edge: RogueEdge) -> None:
    """No connection is stuck, and nothing is held."""
    edge.rogue.script, edge.rogue.hangs_up = [b"".join(map(framed, ANSWER))], False

    reply = ask(edge, stream=True)

    assert reply.get("turnwire-mode") == "full"
    assert read_events(reply.body) == [event["type"] for event in events("0" * 20)]
    assert edge.held_bytes == 0
