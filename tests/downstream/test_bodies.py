"""Request bodies: what decodes, what is refused, and at what cost."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import sys
import tracemalloc
import zlib
from typing import TYPE_CHECKING

import brotli
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.downstream import bodies
from proxy.downstream.bodies import (
    BodyBudget,
    BodyLimits,
    Share,
    decode,
    parse_encodings,
    read_body,
)
from proxy.downstream.refusals import refuse
from proxy.errors import (
    BodyCorrupt,
    BodyTooLarge,
    ClientError,
    EncodingUnsupported,
    Overloaded,
    TurnwireError,
)

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

TEXT = b'{"input": "' + b"the quick brown fox \xc3\xa9 " * 500 + b'"}'
LIMIT = 1_000_000


def raw_deflate(data: bytes) -> bytes:
    """Deflate without the zlib wrapper, as some clients send it."""
    encoder = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return encoder.compress(data) + encoder.flush()


ENCODERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("x-gzip", gzip.compress),
    "zlib": ("deflate", zlib.compress),
    "raw deflate": ("deflate", raw_deflate),
    "br": ("br", brotli.compress),
    "zstd": ("zstd", zstd.compress),
}
MULTI = [gzip.compress, zstd.compress]


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("data", [b"", b"x", TEXT, b"\0" * 900_000], ids=len)
def test_every_encoding_is_undone(kind: str, data: bytes) -> None:
    """What an encoder made decodes to what it was made of."""
    name, encode = ENCODERS[kind]
    assert decode(encode(data), [name], LIMIT) == data


@pytest.mark.parametrize("kind", ENCODERS)
@settings(deadline=None)
@given(data=st.binary(max_size=2000))
def test_arbitrary_data_survives_every_encoding(kind: str, data: bytes) -> None:
    """Decoding is the inverse of encoding, whatever the bytes are."""
    name, encode = ENCODERS[kind]
    assert decode(encode(data), [name], LIMIT) == data


def test_stacked_encodings_are_undone_last_one_first() -> None:
    """Three layers come off in the reverse order of their names."""
    stacked = zstd.compress(brotli.compress(gzip.compress(TEXT)))
    assert decode(stacked, parse_encodings(["gzip, BR", "zstd"]), LIMIT) == TEXT


@pytest.mark.parametrize("encode", MULTI, ids=["gzip", "zstd"])
def test_several_members_are_one_body(encode: Callable[[bytes], bytes]) -> None:
    """Concatenated gzip members and zstd frames decode to the concatenation."""
    name = "gzip" if encode is gzip.compress else "zstd"
    assert decode(b"".join(encode(part) for part in (TEXT, b"", TEXT)), [name], LIMIT) == TEXT * 2


@pytest.mark.parametrize("encode", MULTI, ids=["gzip", "zstd"])
def test_members_without_number_are_refused(encode: Callable[[bytes], bytes]) -> None:
    """A body of thousands of empty members is not worth its decoders."""
    name = "gzip" if encode is gzip.compress else "zstd"
    with pytest.raises(BodyCorrupt, match="members"):
        decode(encode(b"") * (bodies.MAX_MEMBERS + 1), [name], LIMIT)


@pytest.mark.parametrize("kind", ENCODERS)
def test_a_cut_body_is_corrupt(kind: str) -> None:
    """A body that stops early is refused, wherever it stops."""
    name, encode = ENCODERS[kind]
    whole = encode(TEXT)
    for cut in {1, 2, 5, len(whole) // 2, len(whole) - 1}:
        with pytest.raises(BodyCorrupt):
            decode(whole[:cut], [name], LIMIT)


@pytest.mark.parametrize("kind", ENCODERS)
def test_garbage_is_corrupt(kind: str) -> None:
    """Bytes that are no such encoding at all, or follow one, are refused."""
    name, encode = ENCODERS[kind]
    for raw in (b'{"input": "not compressed"}', encode(TEXT) + b"tail"):
        with pytest.raises(BodyCorrupt):
            decode(raw, [name], LIMIT)


@pytest.mark.parametrize("kind", ENCODERS)
@settings(deadline=None)
@given(data=st.binary(max_size=300))
def test_any_bytes_decode_or_are_refused(kind: str, data: bytes) -> None:
    """No input makes a decoder fail in any other way than with our errors."""
    with contextlib.suppress(ClientError):
        decode(data, [ENCODERS[kind][0]], 10_000)


@pytest.mark.parametrize("kind", ENCODERS)
def test_the_decoded_limit_is_exact(kind: str) -> None:
    """A body of exactly the limit passes; one byte more does not."""
    name, encode = ENCODERS[kind]
    body = encode(b"a" * 300_000)
    assert len(decode(body, [name], 300_000)) == 300_000
    with pytest.raises(BodyTooLarge, match="max_decoded_body_bytes"):
        decode(body, [name], 299_999)


@pytest.mark.parametrize("kind", ENCODERS)
def test_a_bomb_costs_no_more_than_the_limit(kind: str) -> None:
    """A small body that would unfold to hundreds of megabytes stops at the limit."""
    name, encode = ENCODERS[kind]
    bomb = encode(b"\0" * 50_000_000)
    limit = 16_000_000
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLarge):
            decode(bomb, [name], limit)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.2 * limit + len(bomb)


def test_an_inner_layer_counts_too() -> None:
    """A layer that unfolds past the limit is refused even if the next would fold it again."""
    inner = gzip.compress(b"\0" * 2_000_000)
    with pytest.raises(BodyTooLarge):
        decode(zstd.compress(inner + b"\0" * 2_000_000), ["gzip", "zstd"], LIMIT)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ([], ()),
        ([""], ()),
        (["identity"], ()),
        (["GZip"], ("gzip",)),
        ([" gzip ,identity,, br "], ("gzip", "br")),
        (["gzip", "zstd"], ("gzip", "zstd")),
    ],
)
def test_encoding_names_are_read_leniently(values: list[str], names: tuple[str, ...]) -> None:
    """Case, spaces, empty parts and `identity` do not matter; the order does."""
    assert parse_encodings(values) == names


@pytest.mark.parametrize("value", ["lzma", "gzip, aws-chunked", "gzip, br, zstd, gzip"])
def test_unknown_or_too_many_encodings_are_unsupported(value: str) -> None:
    """What can't be decoded is answered 415, not guessed at."""
    with pytest.raises(EncodingUnsupported):
        parse_encodings([value])


def test_a_body_never_shows_in_its_repr() -> None:
    """A Body may end up in a log or a traceback; its content must not."""
    assert "secret" not in repr(bodies.Body(b"secret", b"secret"))


class Listener:
    """A server that reads a body and answers with its sizes, or with the refusal."""

    def __init__(self, limits: BodyLimits) -> None:
        self.limits = limits
        self.budget = BodyBudget(20_000_000)
        self.body: bodies.Body | None = None
        self.held_bytes = 0
        self.port = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Read the body; keep it for the test."""
        with Share(self.budget) as share:
            try:
                self.body = await read_body(request, self.limits, share)
            except TurnwireError as error:
                return refuse(error)
            self.held_bytes = share.held_bytes
            return web.Response(text=str(len(self.body.decoded)))

    async def send(self, *parts: bytes) -> bytes:
        """Send raw bytes, and give everything that comes back until the status line at least."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        for part in parts:
            writer.write(part)
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        return head


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    """A listener with small limits."""
    listener = Listener(BodyLimits(100_000, 10_000_000, 0.2))
    app = web.Application()
    app.router.add_post("/", listener.handle)
    runner = web.AppRunner(app, auto_decompress=False, access_log=None, lingering_time=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    listener.port = runner.addresses[0][1]
    yield listener
    await runner.cleanup()


def post(body: bytes, *headers: str) -> bytes:
    """Spell a POST with a Content-Length."""
    fields = "".join(f"{header}\r\n" for header in headers)
    head = f"POST / HTTP/1.1\r\nHost: x\r\n{fields}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def test_a_plain_body_is_one_object(listener: Listener) -> None:
    """Without an encoding, the raw and the decoded body are the same bytes, not a copy."""
    assert b" 200 " in await listener.send(post(TEXT))
    assert listener.body is not None
    assert listener.body.raw == TEXT
    assert listener.body.decoded is listener.body.raw


@pytest.mark.parametrize("size", [1000, 8_000_000], ids=["inline", "in a thread"])
async def test_an_encoded_body_keeps_its_wire_bytes(listener: Listener, size: int) -> None:
    """The bytes as received stay at hand for the HTTP way."""
    wire = zstd.compress(b"a" * size)
    assert b" 200 " in await listener.send(post(wire, "Content-Encoding: ZSTD"))
    assert listener.body is not None
    assert listener.body.raw == wire
    assert listener.body.decoded == b"a" * size


async def test_a_declared_size_is_refused_before_the_body_comes(listener: Listener) -> None:
    """A Content-Length over the limit is answered 413 with no byte of the body read."""
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100001\r\n\r\n"
    reply = await listener.send(head)
    assert b" 413 " in reply
    assert b"Connection: close" in reply


async def test_a_chunked_body_is_refused_where_it_exceeds(listener: Listener) -> None:
    """Without a declared size the limit holds for what arrives."""
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert b" 413 " in await listener.send(head, (b"10000\r\n" + b"a" * 65536 + b"\r\n") * 2)


async def test_a_body_that_stalls_is_a_408(listener: Listener) -> None:
    """When no byte comes for the time allowed, the client hears so and is let go."""
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc"
    reply = await listener.send(head)
    assert b" 408 " in reply
    assert b"Connection: close" in reply


async def test_broken_chunks_are_a_400(listener: Listener) -> None:
    """A body that breaks its own framing is the client's fault."""
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n"
    assert b" 400 " in await listener.send(head, b"zz\r\n")


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("lzma", b"x", b" 415 "),
        ("gzip", b"not gzip", b" 400 "),
        ("gzip", gzip.compress(b"\0" * 11_000_000), b" 413 "),
    ],
)
async def test_bodies_that_do_not_decode_are_refused(
    listener: Listener, encoding: str, body: bytes, status: bytes
) -> None:
    """Unknown, corrupt and oversized encodings have a status each."""
    assert status in await listener.send(post(body, f"Content-Encoding: {encoding}"))


async def test_an_empty_body_needs_no_decoding(listener: Listener) -> None:
    """A request without a body passes, whatever encoding it names."""
    assert b" 200 " in await listener.send(post(b"", "Content-Encoding: gzip"))


async def test_a_body_is_charged_for_what_it_holds(listener: Listener) -> None:
    """Received and decoded bytes count while they are held, and no longer."""
    wire = zstd.compress(b"a" * 9_000_000)
    assert b" 200 " in await listener.send(post(wire, "Content-Encoding: zstd"))
    assert listener.held_bytes == len(wire) + 9_000_000
    assert b" 200 " in await listener.send(post(TEXT))
    assert listener.held_bytes == len(TEXT)
    assert listener.budget.held_bytes == 0


async def test_bodies_without_a_length_share_the_budget_too(listener: Listener) -> None:
    """What arrives counts, not what was announced: the body that is too much is shed, a 503."""
    listener.budget = BodyBudget(100_000)
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"ea60\r\n" + b"a" * 60_000 + b"\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    writer.write(head + chunk)
    async with asyncio.timeout(20):
        while listener.budget.held_bytes < 60_000:  # noqa: ASYNC110  a body has no event
            await asyncio.sleep(0)

    assert b" 503 " in await listener.send(head, chunk)
    assert b" 503 " in await listener.send(post(b"a" * 60_000))
    writer.write(b"0\r\n\r\n")
    assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
    writer.close()
    assert listener.budget.held_bytes == 0


@pytest.mark.parametrize("size", [3_000_000, 9_000_000], ids=["inline", "in a thread"])
async def test_what_decodes_to_too_much_is_shed(listener: Listener, size: int) -> None:
    """A bomb that the limit allows still has to find room in the budget."""
    listener.budget = BodyBudget(2_000_000)
    wire = gzip.compress(bytes(size))
    assert b" 503 " in await listener.send(post(wire, "Content-Encoding: gzip"))
    assert listener.budget.held_bytes == 0


def test_a_share_that_is_over_stops_its_thread() -> None:
    """Nothing is charged for a request that has ended, and whoever still decodes it gives up."""
    budget = BodyBudget(100)
    with Share(budget) as share:
        share.charge(60)
        with pytest.raises(Overloaded, match="max_inflight_body_bytes"):
            share.charge(41)
        assert budget.held_bytes == 60
    with pytest.raises(Overloaded, match="over"):
        decode(gzip.compress(b"a"), ["gzip"], 10, share)
    assert budget.held_bytes == 0
