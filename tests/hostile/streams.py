"""
Streams of requests, and what a mischievous hand makes of them: strategies for Hypothesis.

`Stream` is what one connection carries, cut into the pieces that are sent. `reference` is what h11,
a parser that shares no code with ours, reads in it: the measure of who is served what.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from itertools import accumulate, pairwise

import h11
from hypothesis import strategies as st

PACE_S = 0.02
TARGETS = ("/v1/responses", "/responses", "/v1/files", "/v1/responses?x=1", "/v1/models")
# What parsers have been known to trip over, to be put anywhere.
TOKENS = (
    b"\r",
    b"\n",
    b"\r\n",
    b"\r\n\r\n",
    b"\x00",
    b"\x0b",
    b" ",
    b"\t",
    b":",
    b",",
    b";",
    b"0",
    b"0\r\n\r\n",
    b"-1",
    b"ffffffffffffffff",
    b"\xff",
    b"Content-Length: 5\r\n",
    b"Content-Length: 0\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"Connection: close\r\n",
    b"Connection: keep-alive, content-length\r\n",
    b"Expect: 100-continue\r\n",
    b"Upgrade: websocket\r\nConnection: upgrade\r\n",
    b"Host: evil.example\r\n",
    b"User-Agent: one\r\nUser-Agent: two\r\n",
    b"Content-Type: text/plain\r\n",
    b"Content-Encoding: gzip\r\n",
    b"Authorization: Bearer sk-other\r\n",
    b"Origin: http://evil.example\r\n",
    b"Cookie: a=b\r\n",
    b"HTTP/1.0",
    b"HTTP/2.0",
    b" \r\n folded",
    b"GET /v1/smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n",
)


@dataclass(frozen=True)
class Stream:
    """Bytes for one connection, where to cut them, and whether to wait for what is said to each."""

    data: bytes
    cuts: tuple[int, ...] = ()
    pace_s: float = 0.0

    @property
    def pieces(self) -> list[bytes]:
        """The bytes, cut."""
        inner = sorted({cut for cut in self.cuts if 0 < cut < len(self.data)})
        return [self.data[a:b] for a, b in pairwise([0, *inner, len(self.data)])]


@dataclass(frozen=True)
class Asked:
    """One request as the reference reads it."""

    method: str
    target: str
    body: bytes


@st.composite
def requests(draw: st.DrawFn, number: int) -> bytes:
    """Draw a valid request whose text and key are its own."""
    body = b'{"model":"m","store":false,"input":"text-%d","stream":%b}' % (
        number,
        draw(st.sampled_from([b"false", b"true"])),
    )
    target = draw(st.sampled_from(TARGETS))
    lines = [
        f"POST {target} HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer sk-fuzz-{number}",
    ]
    lines += draw(
        st.lists(st.sampled_from(["Accept: */*", "X-A: b", "accept-encoding: gzip"]), max_size=2)
    )
    if draw(st.booleans()):
        sizes = draw(st.lists(st.integers(1, 30), max_size=3))
        chunks, rest = [], body
        for size in sizes:
            chunks.append(rest[:size])
            rest = rest[size:]
        body = b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in [*chunks, rest] if c) + b"0\r\n\r\n"
        lines.append("Transfer-Encoding: chunked")
    else:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


@st.composite
def valid_streams(draw: st.DrawFn) -> Stream:
    """Draw one to three valid requests in a row, cut anywhere."""
    several = [draw(requests(number)) for number in range(draw(st.integers(1, 3)))]
    data = b"".join(several)
    if draw(st.booleans()):  # one after the other, as clients do
        return Stream(data, tuple(accumulate(map(len, several))), PACE_S)
    cuts = draw(st.lists(st.integers(1, len(data)), max_size=6))
    return Stream(data, tuple(cuts))


@st.composite
def broken_streams(draw: st.DrawFn) -> Stream:
    """Draw valid requests, of which a few bytes were changed."""
    stream = draw(valid_streams())
    data = stream.data
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        at = draw(st.integers(0, len(data)))
        token = draw(st.sampled_from(TOKENS) | st.binary(max_size=4))
        gone = draw(st.sampled_from([0, 0, 1, 2, len(token), 20]))
        data = data[:at] + token + data[at + gone :]
    return Stream(data, stream.cuts, stream.pace_s)


def reference(data: bytes) -> tuple[list[Asked], bool]:
    """
    Read a stream with h11.

    Return the requests that are whole, and whether it read on to the end without complaint.
    """
    found: list[Asked] = []
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(data)
    with contextlib.suppress(h11.RemoteProtocolError):
        while True:
            event = connection.next_event()
            if not isinstance(event, h11.Request):
                return found, event is h11.NEED_DATA
            body = b""
            while isinstance(part := connection.next_event(), h11.Data):
                body += bytes(part.data)
            if part is h11.NEED_DATA:
                return found, True
            found.append(
                Asked(event.method.decode("latin-1"), event.target.decode("latin-1"), body)
            )
            _answer(connection)
            if connection.our_state is h11.MUST_CLOSE:
                return found, True
            connection.start_next_cycle()
    return found, False


def _answer(connection: h11.Connection) -> None:
    """Bring h11 to where the next request may come."""
    connection.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
    connection.send(h11.EndOfMessage())
