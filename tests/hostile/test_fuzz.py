"""
The HTTP front under a mischievous hand: row P9.

Requests are cut anywhere and changed anywhere, and h11 says what they mean. What counts: two
parsers that both find no fault in a stream never see different requests in it; every answer is that
of its own request, in order; every reply is valid HTTP; and the process lives. `TURNWIRE_FUZZ=1`
makes it long.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, example, given, settings

from hostile.edge import IMPATIENT, Edge
from hostile.ledger import KEY, LAST, answer_to
from hostile.streams import Stream, broken_streams, reference, valid_streams
from proxy.upstream.passthrough import join_url

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hostile.ledger import Reply

fuzzed = settings(
    max_examples=20_000 if os.environ.get("TURNWIRE_FUZZ") else 40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def edge() -> Iterator[Edge]:
    """One proxy for all examples that may meet a deadline."""
    with Edge(limits=IMPATIENT) as running:
        yield running


@pytest.fixture(scope="module")
def patient() -> Iterator[Edge]:
    """One for those that may not."""
    with Edge() as running:
        yield running


def text_of(body: bytes) -> str:
    """Return what the ledger takes for a body's text."""
    written = body.decode("utf-8", "surrogateescape")
    try:
        given = json.loads(written)["input"]
    except (ValueError, KeyError, TypeError):
        return written
    return given if isinstance(given, str) else json.dumps(given)


def check(edge: Edge, stream: Stream) -> list[Reply]:
    """Send a stream, and compare what became of it with what the reference reads in it."""
    asked, is_clean = reference(stream.data + LAST)
    replies, _ = edge.ask(*stream.pieces, LAST, pace_s=stream.pace_s)
    served = list(edge.ledger.seen)
    for number, reply in enumerate(replies):
        assert reply.complete
        if reply.answer is None:
            continue
        seen = served.pop(0)
        assert reply.answer == answer_to(seen.key, seen.text), "another request's answer"
        if number >= len(asked):
            assert not is_clean, f"{seen} is in the stream for us only"
            continue
        meant = asked[number]
        target = join_url(edge.ledger.url, meant.target).raw_path_qs
        assert (seen.method, seen.target, seen.text) == (meant.method, target, text_of(meant.body))
    assert not served or replies[-1].status >= 400, f"{served} are unanswered"
    return replies


@fuzzed
@given(stream=valid_streams())
def test_requests_are_served_however_they_are_cut(patient: Edge, stream: Stream) -> None:
    """Each gets its own answer, in order, and so does what follows them."""
    asked, is_clean = reference(stream.data)

    replies = check(patient, stream)

    assert is_clean
    assert [reply.status for reply in replies] == [200] * (len(asked) + 1)


@fuzzed
@given(stream=broken_streams())
@example(stream=Stream(b"\rPOST /v1/files HTTP/1.1\r\nHost: localhost\r\n\r\n"))
@example(stream=Stream(b"POST /:v1/responses HTTP/1.1\r\nHost: localhost\r\n\r\n"))
def test_a_fault_never_makes_two_requests_of_one(edge: Edge, stream: Stream) -> None:
    """Where the reference finds no fault either, both see the same requests."""
    check(edge, stream)


@fuzzed
@given(stream=broken_streams())
def test_where_a_stream_is_cut_does_not_matter(edge: Edge, stream: Stream) -> None:
    """
    In pieces a stream gets the replies that it gets whole.

    But for one thing: what is good before a fault may be served if the fault comes in a later read.
    And a machine under load may meet a deadline.
    """
    whole = [reply.likeness for reply in check(edge, Stream(stream.data))]
    cut = [reply.likeness for reply in check(edge, stream)]

    same = next(
        (n for n, pair in enumerate(zip(whole, cut, strict=False)) if pair[0] != pair[1]), None
    )
    assert same is None or 400 in (whole[same][0], cut[same][0]), (whole, cut)


def test_the_process_has_lived(edge: Edge) -> None:
    """After all of that, nothing is held, nothing was logged as a failure, and turns are served."""
    body = b'{"model":"m","input":"at last"}'
    head = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %b\r\n"
    request = (head + b"Content-Length: %d\r\n\r\n") % (KEY.encode(), len(body)) + body

    (reply, _), seen = edge.ask(request, LAST)

    assert reply.answer == answer_to(KEY, "at last")
    assert [each.text for each in seen] == ["at last"]
    assert edge.held_bytes == 0
