"""The wire tap: what it passes on, and what it makes of its notes."""

import asyncio
import gzip

import pytest

from clients.wiretap import Line, Wiretap, read_line

POST = b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
OK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nturnwire-mode: delta\r\n\r\n"


def read(requests, replies):
    """The exchanges of a connection on which these bytes were seen."""
    return list(read_line(Line(bytearray(requests), bytearray(replies))))


def test_a_request_is_joined_with_its_reply():
    """On one connection replies come in the order of their requests."""
    first, second = read(POST + POST, OK + b"3\r\nabc\r\n0\r\n\r\n" + b"HTTP/1.1 204 No\r\n\r\n")

    assert (first.method, first.path, first.body()) == ("POST", "/v1/responses", b"{}")
    assert (first.status, first.reply.body, first.reply.whole) == (200, b"abc", True)
    assert first.reply_header("turnwire-mode") == "delta"
    assert (second.status, second.reply.body) == (204, b"")


def test_a_reply_that_breaks_off_is_not_whole():
    """What came of it is kept."""
    (exchange,) = read(POST, OK + b"3\r\nabc\r\n9\r\nde")

    assert (exchange.reply.body, exchange.reply.whole) == (b"abcde", False)


def test_a_request_may_have_no_reply():
    """The connection ended before it."""
    (exchange,) = read(POST, b"")

    assert (exchange.status, exchange.reply_header("turnwire-mode")) == (0, "")


def test_interim_replies_are_none():
    """`100 Continue` is not the reply to a request."""
    (exchange,) = read(POST, b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 400 Bad\r\n\r\nno")

    assert (exchange.status, exchange.reply.body) == (400, b"no")


def test_nothing_is_read_after_an_upgrade():
    """WebSocket frames are no HTTP."""
    upgrade = b"GET /v1/responses HTTP/1.1\r\nUpgrade: websocket\r\n\r\n"
    exchanges = read(upgrade + b"\x81\x00\r\n\r\nx", b"HTTP/1.1 101 Yes\r\n\r\n\x81\x00")

    assert [exchange.status for exchange in exchanges] == [101]


def test_a_compressed_body_is_undone():
    """What the client meant is compared, not how it packed it."""
    packed = gzip.compress(b'{"a":1}')
    head = f"POST / HTTP/1.1\r\nContent-Encoding: gzip\r\nContent-Length: {len(packed)}\r\n\r\n"
    (exchange,) = read(head.encode() + packed, b"")

    assert exchange.body() == b'{"a":1}'


@pytest.mark.parametrize("breaks", [False, True])
async def test_the_tap_passes_bytes_and_ends_on(breaks):
    """Bytes pass unchanged both ways; a connection that is reset is reset on the other side too."""

    async def answer(reader, writer):
        asked = await reader.readuntil(b"?")
        writer.write(asked[::-1])
        await writer.drain()
        if breaks:
            writer.transport.abort()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, Wiretap(server.sockets[0].getsockname()[1]) as tap:
        reader, writer = await asyncio.open_connection("127.0.0.1", tap.port)
        writer.write(b"who?")
        try:
            got = await reader.read()
        except ConnectionResetError:
            got = b"?ohw"
        writer.close()

    assert got == b"?ohw"
    assert tap.lines[0].request_bytes == b"who?"
