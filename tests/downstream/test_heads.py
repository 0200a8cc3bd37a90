"""
Plain heads are read as aiohttp reads them, and all others are left to aiohttp.

The differential test is the one that matters: a request that two readers understand differently is
a smuggled request. Whatever is accepted here must mean the same to both parsers that aiohttp has.
`TURNWIRE_FUZZ=1` makes it long.
"""

from __future__ import annotations

import asyncio
import os
import random
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import http_parser, web
from aiohttp.http_exceptions import HttpProcessingError

from proxy.downstream.heads import MAX_FIELDS, HeadMemory, PlainHead, read_plain_head

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_FIELD_BYTES = 1024
CASES = 200_000 if os.environ.get("TURNWIRE_FUZZ") else 4_000

POST = b"POST /v1/responses HTTP/1.1\r\n"
HOST = b"Host: localhost\r\n"


def head(*lines: bytes, start: bytes = POST, host: bytes = HOST) -> bytes:
    """Write a head of these lines, each without its end, behind a usual beginning."""
    return start + host + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


def read(raw: bytes) -> PlainHead | None:
    """Read a head, with a limit that is small enough to meet."""
    return read_plain_head(raw, MAX_FIELD_BYTES)


# --- Heads that are plain -------------------------------------------------------------------------

PLAIN: dict[str, tuple[bytes, tuple[tuple[str, str], ...], int]] = {
    "no field": (head(), (), 0),
    "a length": (head(b"Content-Length: 12"), (("Content-Length", "12"),), 12),
    "a length of nothing": (head(b"content-length:0"), (("content-length", "0"),), 0),
    "zeros before a length": (head(b"Content-Length: 007"), (("Content-Length", "007"),), 7),
    "blanks around a value": (head(b"A:\t b c \t"), (("A", "b c"),), 0),
    "no blank": (head(b"A:b"), (("A", "b"),), 0),
    "an empty value": (head(b"A:", b"B: "), (("A", ""), ("B", "")), 0),
    "a colon in a value": (head(b"A: b:c"), (("A", "b:c"),), 0),
    "a field twice": (head(b"A: 1", b"a: 2"), (("A", "1"), ("a", "2")), 0),
    "UTF-8": (head("A: \u00e9".encode()), (("A", "\u00e9"),), 0),
    "bytes that are no UTF-8": (head(b"A: \xff"), (("A", "\udcff"),), 0),
    "keep-alive": (head(b"Connection: Keep-Alive"), (("Connection", "Keep-Alive"),), 0),
    "every character of a token": (
        head(b"!#$%&'*+-.^_`|~0aZ: x"),
        (("!#$%&'*+-.^_`|~0aZ", "x"),),
        0,
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_heads_are_read(name: str) -> None:
    """Fields keep their order and spelling; the length is that of the body."""
    raw, fields, length_bytes = PLAIN[name]

    found = read(raw)

    assert found is not None
    assert (found.method, found.target, found.host) == ("POST", "/v1/responses", "localhost")
    assert found.fields == (("Host", "localhost"), *fields)
    assert found.length_bytes == length_bytes


def test_encodings_are_given_as_written() -> None:
    """Content-Encoding may come several times, in any spelling."""
    found = read(head(b"Content-Encoding: ZSTD, gzip", b"content-encoding: br"))

    assert found is not None
    assert found.encodings == ("ZSTD, gzip", "br")


@pytest.mark.parametrize(
    "start", [b"GET / HTTP/1.1\r\n", b"DELETE /v1/responses/resp_1?a=b#c HTTP/1.1\r\n"]
)
def test_any_request_may_have_a_plain_head(start: bytes) -> None:
    """What a request is for is not decided here."""
    found = read(head(start=start))

    assert found is not None
    assert f"{found.method} {found.target} HTTP/1.1\r\n".encode() == start


def test_a_head_does_not_show_credentials() -> None:
    """Fields are not in the repr, which may end in a log."""
    assert "secret" not in repr(read(head(b"Authorization: Bearer secret")))


# --- Heads that are not ---------------------------------------------------------------------------

CONTROLS = [byte for byte in (*range(32), 127) if byte not in b"\t\r\n"]

OTHERS: dict[str, bytes] = {
    "nothing": b"",
    "an empty line": b"\r\n",
    "no end": POST + HOST,
    "something after the end": head() + b"x",
    "an empty line before it": b"\r\n" + head(),
    "a folded line": head(b"A: b", b" c"),
    "a line folded by a tab": head(b"A: b", b"\tc"),
    "a bare LF": head(b"A: b\nB: c"),
    "only bare LFs": head(b"A: b").replace(b"\r\n", b"\n"),
    "a bare CR": head(b"A: b\rB: c"),
    "a CR before the end of a line": head(b"A: b\r"),
    "a bare LF after the request line": POST.replace(b"\r\n", b"\n") + HOST + b"\r\n",
    "a blank before the colon": head(b"A : b"),
    "a tab before the colon": head(b"A\t: b"),
    "a blank before a name": head(b" A: b"),
    "no colon": head(b"A"),
    "no name": head(b": b"),
    "a name of two words": head(b"A B: c"),
    "a name that is no token": head(b"A(: b"),
    "a name that is no ASCII": head(b"\xc3\xa9: b"),
    "a long name": head(b"a" * 257 + b": b"),
    "two lengths": head(b"Content-Length: 3", b"Content-Length: 4"),
    "one length twice": head(b"Content-Length: 3", b"content-length: 3"),
    "a list of lengths": head(b"Content-Length: 3, 3"),
    "a comma after a length": head(b"Content-Length: 3,"),
    "a positive length": head(b"Content-Length: +3"),
    "a negative length": head(b"Content-Length: -3"),
    "an empty length": head(b"Content-Length:"),
    "a length in hex": head(b"Content-Length: 0x3"),
    "a length with an underscore": head(b"Content-Length: 1_0"),
    "a length with a point": head(b"Content-Length: 3.0"),
    "a length of other digits": head("Content-Length: \u0663".encode()),
    "a length of two words": head(b"Content-Length: 3 3"),
    "a length beyond all bounds": head(b"Content-Length: " + b"1" * 16),
    "chunks": head(b"Transfer-Encoding: chunked"),
    "chunks and a length": head(b"Content-Length: 3", b"Transfer-Encoding: chunked"),
    "an empty transfer coding": head(b"Transfer-Encoding:"),
    "another transfer coding": head(b"transfer-encoding: gzip"),
    "TE": head(b"TE: trailers"),
    "a trailer": head(b"Trailer: X"),
    "an expectation": head(b"Expect: 100-continue"),
    "an upgrade": head(b"Upgrade: h2c"),
    "settings of HTTP/2": head(b"HTTP2-Settings: AAMAAABkAAQAAP__"),
    "a connection that closes": head(b"Connection: close"),
    "an upgrading connection": head(b"Connection: Upgrade"),
    "a connection with two options": head(b"Connection: keep-alive, close"),
    "an empty Connection": head(b"Connection:"),
    "parameters of the connection": head(b"Keep-Alive: timeout=5"),
    "a connection of a proxy": head(b"Proxy-Connection: keep-alive"),
    "an origin": head(b"Origin: http://localhost"),
    "an empty origin": head(b"origin:"),
    "another proxy": head(b"Via: 1.1 x"),
    "no host": head(host=b""),
    "two hosts": head(b"host: localhost"),
    "a handshake of long ago": head(b"Sec-WebSocket-Key1: x"),
    **{
        f"two of {name}": head(f"{name}: x".encode(), f"{name.lower()}: x".encode())
        for name in (
            *("Content-Location", "Content-Range", "Content-Type", "ETag", "Max-Forwards"),
            *("Server", "User-Agent"),
        )
    },
    "HTTP/1.0": head(start=POST.replace(b"1.1", b"1.0")),
    "HTTP/1.2": head(start=POST.replace(b"1.1", b"1.2")),
    "HTTP/2": head(start=POST.replace(b"1.1", b"2.0")),
    "HTTP in small letters": head(start=POST.replace(b"HTTP", b"http")),
    "no version": head(start=b"POST /v1/responses\r\n"),
    "an absolute target": head(start=b"POST http://localhost/v1/responses HTTP/1.1\r\n"),
    "CONNECT": head(start=b"CONNECT / HTTP/1.1\r\n"),
    "an authority": head(start=b"CONNECT localhost:80 HTTP/1.1\r\n"),
    "an asterisk": head(start=b"OPTIONS * HTTP/1.1\r\n"),
    "no target": head(start=b"POST  HTTP/1.1\r\n"),
    "two blanks before the target": head(start=b"POST  /v1/responses HTTP/1.1\r\n"),
    "two blanks after the target": head(start=b"POST /v1/responses  HTTP/1.1\r\n"),
    "a tab after the method": head(start=b"POST\t/v1/responses HTTP/1.1\r\n"),
    "a blank after the version": head(start=b"POST /v1/responses HTTP/1.1 \r\n"),
    "a blank in the target": head(start=b"POST /v1/ responses HTTP/1.1\r\n"),
    "a target that is no ASCII": head(start=b"POST /\xc3\xa9 HTTP/1.1\r\n"),
    "a method in small letters": head(start=b"post /v1/responses HTTP/1.1\r\n"),
    "a method that is a token": head(start=b"M-SEARCH / HTTP/1.1\r\n"),
    "a method that nobody knows": head(start=b"A / HTTP/1.1\r\n"),
    "a method of HTTP/2": head(start=b"PRI / HTTP/1.1\r\n"),
    "a long target": head(start=b"POST /" + b"a" * MAX_FIELD_BYTES + b" HTTP/1.1\r\n"),
    "a long field": head(b"A: " + b"b" * MAX_FIELD_BYTES),
    "many fields": head(*(b"A%d: b" % number for number in range(MAX_FIELDS))),
    **{f"byte {byte} in a value": head(b"A: b%cc" % byte) for byte in CONTROLS},
    **{f"byte {byte} in a name": head(b"A%cB: c" % byte) for byte in (*CONTROLS, 9, 10, 13)},
    **{
        f"byte {byte} in the target": head(start=b"GET /%c HTTP/1.1\r\n" % byte)
        for byte in CONTROLS
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_everything_else_is_left_to_aiohttp(name: str) -> None:
    """A head that two readers might understand differently is none that we read."""
    assert read(OTHERS[name]) is None


def test_the_limits_are_exact() -> None:
    """As many fields, and lines as long, as is said."""
    fields = [b"A%d: b" % number for number in range(MAX_FIELDS - 1)]
    longest = b"A: ".ljust(MAX_FIELD_BYTES - 2, b"b")

    assert read(head(*fields)) is not None
    assert read(head(longest)) is not None
    assert read(head(longest + b"b")) is None
    assert read(head(b"Content-Length: " + b"9" * 15)) is not None


# --- What aiohttp reads ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def handler() -> Iterator[web.RequestHandler]:
    """aiohttp's protocol, of which a parser needs to be part."""

    async def refuse(_: web.BaseRequest) -> web.StreamResponse:
        raise NotImplementedError

    async def make() -> web.RequestHandler:
        return web.RequestHandler(web.Server(refuse), loop=asyncio.get_running_loop())

    with asyncio.Runner() as runner:
        yield runner.run(make())


@pytest.fixture(
    scope="module",
    params=[http_parser.HttpRequestParser, http_parser.HttpRequestParserPy],
    ids=["compiled", "python"],
)
def make_parser(request: pytest.FixtureRequest, handler: web.RequestHandler) -> Any:
    """Make parsers of either kind: the compiled one, and the one where there is no other."""
    return lambda: request.param(
        handler,
        handler._loop,
        2**16,
        max_line_size=32 * 1024,
        max_field_size=32 * 1024,
        payload_exception=web.RequestPayloadError,
        auto_decompress=False,
    )


NEXT = b"GET /next HTTP/1.1\r\nHost: next\r\n\r\n"

METHODS = [
    b"GET",
    b"POST",
    b"POST",
    b"PUT",
    b"DELETE",
    b"HEAD",
    b"OPTIONS",
    b"CONNECT",
    b"PRI",
    b"X",
]
TARGETS = [b"/", b"/v1/responses", b"//x", b"/?a=b", b"/%", b"/#", b'/"<>\\^`{|}', b"*"]
VERSIONS = [b"1.1"] * 6 + [b"1.0"]
NAMES = [
    *(b"Content-Length", b"content-length", b"Host", b"host", b"Content-Type", b"Accept", b"Age"),
    *(b"Authorization", b"User-Agent", b"Cookie", b"Date", b"ETag", b"Server", b"Range", b"From"),
    *(b"Transfer-Encoding", b"Connection", b"Upgrade", b"Content-Encoding", b"Expect", b"If-Match"),
    *(b"Sec-WebSocket-Key1", b"Content-Location", b"Content-Range", b"Max-Forwards", b"Referer"),
    *(b"X-Api-Key", b"OpenAI-Beta", b"!#$%&'*+.^_`|~-", b"a", b"A", b"x" * 256, b"Accept-Encoding"),
]
VALUES = [b"3", b"0", b"12", b"localhost", b"keep-alive", b"close", b"chunked", b"gzip", b"", b"a"]
BLANKS = [b" ", b" ", b" ", b"", b"\t", b" \t "]
ENDS = [b"\r\n"] * 30 + [b"\n", b"\r", b"\r\r\n", b"\r\n ", b""]


def random_value(rng: random.Random) -> bytes:
    """Return a value of a field, mostly a legal one."""
    if rng.random() < 0.7:
        return rng.choice(VALUES)
    if rng.random() < 0.5:
        return rng.randbytes(rng.randrange(4))
    return bytes(rng.choice(b'\t !,;:"az09\x7e\x80\xc3\xa9\xff') for _ in range(rng.randrange(8)))


def random_line(rng: random.Random) -> bytes:
    """Return a field, mostly a legal one."""
    before = b" " if rng.random() < 0.02 else b""
    blanks = rng.choice(BLANKS), rng.choice(BLANKS)
    value = random_value(rng)
    return rng.choice(NAMES) + before + b":" + blanks[0] + value + blanks[1] + rng.choice(ENDS)


def random_head(rng: random.Random) -> bytes:
    """Return a head; about half of them are plain."""
    start = POST
    if rng.random() < 0.3:
        parts = rng.choice(METHODS), rng.choice(TARGETS), rng.choice(VERSIONS)
        start = b"%b %b HTTP/%b\r\n" % parts
    fields = [rng.choice([HOST, HOST, HOST, b"host: [::1]:80\r\n"])]
    fields += [random_line(rng) for _ in range(rng.randrange(5))]
    rng.shuffle(fields)
    raw = start + b"".join(fields) + b"\r\n"
    if rng.random() < 0.1:
        at = rng.randrange(len(raw))
        raw = raw[:at] + rng.randbytes(1) + raw[at + rng.randrange(2) :]
    return raw


CURIOUS = [
    head(b"Content-Length: 007"),
    head(b"A: \xff", b"B: \x80\xc3\xa9", b"Content-Length: 1"),
    head(start=b"POST /v1/responses#a HTTP/1.1\r\n"),
    head(b"Content-Length: 999999999999999"),
]


def test_aiohttp_reads_the_same(make_parser: Any) -> None:
    """Method, target, fields and the end of the message are those that aiohttp finds."""
    rng = random.Random("heads")
    drawn = CURIOUS + [random_head(rng) for _ in range(CASES)]
    plain = [(raw, found) for raw in drawn if (found := read(raw)) is not None]

    for raw, found in plain:
        check_against(make_parser(), raw, found)

    assert 0.2 < len(plain) / len(drawn) < 0.8  # so that something is shown of either kind


def check_against(parser: Any, raw: bytes, found: PlainHead) -> None:
    """Let aiohttp read a head, and what follows; it must have been read as it reads it."""
    length_bytes = min(found.length_bytes, 2**16)
    # A body may look like a request: where one ends, the other begins.
    body = (NEXT * (length_bytes // len(NEXT) + 1))[:length_bytes]
    try:
        messages, upgraded, tail = parser.feed_data(raw + body)
    except HttpProcessingError as error:
        pytest.fail(f"aiohttp refuses {raw!r}: {error.message}")

    assert (len(messages), upgraded, tail) == (1, False, b""), raw
    message, payload = messages[0]
    assert (message.method, message.path) == (found.method, found.target)
    assert [(n.decode(), v.decode("utf-8", "surrogateescape")) for n, v in message.raw_headers] == [
        *found.fields
    ]
    # The compiled parser spells the names that it knows as it likes.
    assert [(name.lower(), value) for name, value in message.headers.items()] == [
        (name.lower(), value) for name, value in found.fields
    ]
    assert message.version == (1, 1)
    assert (message.should_close, message.upgrade, message.chunked) == (False, False, False), raw
    assert message.headers["Host"] == found.host
    assert tuple(message.headers.getall("Content-Encoding", ())) == found.encodings
    if length_bytes < found.length_bytes:
        assert not payload.is_eof(), raw
        return
    assert payload.is_eof(), raw
    following, _, _ = parser.feed_data(NEXT)
    assert [each.path for each, _ in following] == ["/next"], raw


# --- A connection's memory ------------------------------------------------------------------------

AGENTS = head(b"Authorization: Bearer sk", b"Content-Length: 1234", b"Accept: */*")


def random_change(rng: random.Random) -> bytes:
    """Return the head of an agent again, or one that is nearly that one, or another."""
    at = rng.randrange(len(AGENTS) + 1)
    match rng.randrange(6):
        case 0:
            return AGENTS
        case 1:
            return AGENTS.replace(b"1234", b"%d" % rng.randrange(-1, 10 ** rng.randrange(1, 18)))
        case 2:
            return AGENTS.replace(b"1234", random_value(rng))
        case 3:
            return AGENTS[:at] + random_value(rng) + AGENTS[at + rng.randrange(4) :]
        case 4:
            return AGENTS[:at] + b"Content-Length: 5\r\n" + AGENTS[at:]
        case _:
            return random_head(rng)


def apart_from_its_length(found: PlainHead | None) -> Any:
    """Return what a head says but for the length."""
    if found is None:
        return None
    fields = [pair for pair in found.fields if pair[0].lower() != "content-length"]
    return found.method, found.target, fields, found.host, found.encodings


def check_memory(heads: Iterable[bytes], limit_bytes: int) -> int:
    """Read heads with a memory and without one; return how many were remembered."""
    memory = HeadMemory(limit_bytes)
    latest, remembered = None, 0
    for raw in heads:
        anew = read_plain_head(raw, limit_bytes)
        found, length_bytes = memory.read(raw)
        assert apart_from_its_length(found) == apart_from_its_length(anew), raw
        assert length_bytes == (0 if anew is None else anew.length_bytes), raw
        remembered += found is not None and found is latest
        latest = found or latest
    return remembered


def test_a_memory_changes_nothing() -> None:
    """Whatever came before, a head is read as by somebody who has seen none before."""
    rng = random.Random("memory")
    for limit_bytes in (len(POST), 31, 1024):
        heads = [random_change(rng) for _ in range(CASES // 2)]
        assert check_memory(heads, limit_bytes) > CASES // 20


@pytest.mark.parametrize(
    ("length", "is_remembered"),
    [
        *((b"1", True), (b"123456", True), (b"9" * 15, True), (b"9" * 16, False), (b"", False)),
        *((b"0", True), (b"+1", False), (b"1 ", False), (b"1, 1", False), (b"1\r\nA: b", False)),
    ],
)
def test_what_stands_in_the_place_of_a_length_must_be_one(
    length: bytes, is_remembered: bool
) -> None:
    """Of a head that is remembered, nothing else may differ."""
    again = AGENTS.replace(b"1234", length)

    assert check_memory([AGENTS, again], MAX_FIELD_BYTES) == is_remembered


def test_a_head_that_differs_in_its_length_is_the_same_object() -> None:
    """So whoever has looked at it once need not look again."""
    memory = HeadMemory(MAX_FIELD_BYTES)
    first, _ = memory.read(AGENTS)

    again, length_bytes = memory.read(AGENTS.replace(b"1234", b"99"))
    assert again is first
    assert length_bytes == 99

    other, _ = memory.read(AGENTS.replace(b"Bearer sk", b"Bearer ks"))
    assert other is not first
