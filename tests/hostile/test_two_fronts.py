"""
The two ways into a turn, past aiohttp's protocol and through it, answer alike.

`tuning.express` has plain requests of the hot route read by a protocol of our own. Whatever bytes
a client sends, in whatever pieces, it must not be able to tell: the same statuses, headers and
bodies, and upstream the same requests. The one thing that may differ is what became of good
requests before a fault: aiohttp refuses all of a read that has one, and the two ways do not always
give it the same bytes at once. `TURNWIRE_FUZZ=1` makes it long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given

from hostile.cases import CASES, SMUGGLED_TARGET, Case, sized
from hostile.edge import IMPATIENT, Edge
from hostile.ledger import LAST
from hostile.streams import Stream, broken_streams, valid_streams
from hostile.test_fuzz import check, fuzzed
from proxy.downstream.express import Express

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hostile.ledger import Reply, Seen

Pair = tuple[Edge, Edge]
TURN = sized().replace(b"{target}", b"/v1/responses")


@pytest.fixture(scope="module")
def both() -> Iterator[Pair]:
    """Two proxies: one with the express way, one without."""
    with Edge(tuning={"express": True}) as one, Edge(tuning={"express": False}) as other:
        yield one, other


@pytest.fixture(scope="module")
def hasty() -> Iterator[Pair]:
    """The same, with short deadlines."""
    with (
        Edge(limits=IMPATIENT, tuning={"express": True}) as one,
        Edge(limits=IMPATIENT, tuning={"express": False}) as other,
    ):
        yield one, other


def test_one_goes_express_and_the_other_does_not(
    both: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two are what they are said to be."""
    started = []
    start = Express.start
    monkeypatch.setattr(Express, "start", lambda self: started.append(start(self)) or started[-1])
    for edge, wanted in zip(both, ([False, True], []), strict=True):
        started.clear()
        for _ in range(2):  # the first opens a connection, which has to be waited for
            edge.ask(TURN.replace(b"sk-asker", b"sk-express"), LAST, pace_s=5)
        assert started == wanted


def is_alike(one: Sequence[Reply], other: Sequence[Reply], *, has_late_fault: bool) -> bool:
    """Tell whether two lists of replies are the same but for what may differ."""
    ours, theirs = ([reply.likeness for reply in replies] for replies in (one, other))
    if ours == theirs:
        return True
    less, more = sorted((ours, theirs), key=len)
    kept = less[:-1]
    return has_late_fault and less[-1][0] in (400, 408) and more[: len(kept)] == kept


def ask_both(
    pair: Pair, *parts: bytes, pace_s: float = 0.0
) -> tuple[list[Reply], list[Reply], list[Seen], list[Seen]]:
    """Send the same pieces to both."""
    (one, seen), (other, other_seen) = (edge.ask(*parts, LAST, pace_s=pace_s) for edge in pair)
    return one, other, seen, other_seen


@pytest.mark.parametrize("size", [0, 1, 7], ids=["whole", "byte by byte", "in sevens"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_hostile_streams_are_answered_alike(both: Pair, hasty: Pair, case: Case, size: int) -> None:
    """Whatever one refuses the other refuses with the same words, and what one serves both do."""
    data = case.stream("/v1/responses")
    step = len(data) if size == 0 or len(data) > 2000 else size
    pieces = [data[i : i + step] for i in range(0, len(data), step)]

    one, other, seen, other_seen = ask_both(hasty if case.waits else both, *pieces)

    late = case.or_else is not None
    assert is_alike(one, other, has_late_fault=late), (one, other)
    assert seen == other_seen or late
    assert SMUGGLED_TARGET not in [each.target for each in (*seen, *other_seen)]


@fuzzed
@given(stream=valid_streams())
def test_good_streams_are_answered_alike(both: Pair, stream: Stream) -> None:
    """Pipelined, cut anywhere, in chunks or not, streamed or not: the same replies."""
    one, other, seen, other_seen = ask_both(both, *stream.pieces, pace_s=stream.pace_s)

    assert [reply.likeness for reply in one] == [reply.likeness for reply in other]
    assert seen == other_seen


@fuzzed
@given(stream=broken_streams())
@example(stream=Stream(TURN + b"\r\n" + TURN))
@example(stream=Stream(TURN + TURN[:40] + b"\x00" + TURN))
@example(stream=Stream(TURN.replace(b"Content-Length: 42", b"Content-Length: 0")))
def test_broken_streams_are_answered_alike(hasty: Pair, stream: Stream) -> None:
    """A fault anywhere is a fault for both, and means the same to both before it."""
    one = check(hasty[0], stream)
    other = check(hasty[1], stream)

    assert is_alike(one, other, has_late_fault=True), (one, other)


@pytest.mark.parametrize("gap", [b"", b"\r\n"])
def test_a_crowd_of_pipelined_turns_is_answered_in_order(both: Pair, gap: bytes) -> None:
    """Sixty turns in one write, and in writes that end anywhere: each gets its own answer."""
    body = b'{"model":"m","store":false,"stream":true,"input":"text %03d"}'
    head = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sk-%d\r\n"
    head += b"Content-Length: %d\r\n\r\n"
    turns = [head % (number % 3, len(body % number)) + body % number + gap for number in range(60)]
    data = b"".join(turns)
    for step in (len(data), 333):
        pieces = [data[i : i + step] for i in range(0, len(data), step)]

        one, other, seen, other_seen = ask_both(both, *pieces)

        assert [reply.status for reply in one] == [200] * 61
        assert [reply.answer for reply in one] == [reply.answer for reply in other]
        assert [each.text for each in seen] == [f"text {number:03}" for number in range(60)]
        assert seen == other_seen
