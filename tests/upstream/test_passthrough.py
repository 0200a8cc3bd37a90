"""The plain HTTP relay: what is kept, what is changed, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from typing import TYPE_CHECKING

import pytest
from aiohttp import web
from wire import Peer, Request, read_head, read_message, reply, talk
from yarl import URL

from proxy.downstream.refusals import refuse
from proxy.errors import TurnwireError
from proxy.upstream.passthrough import Passthrough, environment_proxy, join_url, via

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

INSTANCE = "3f9a"

JOINS = [
    # An upstream with a path is an SDK's base URL.
    ("http://u/v1", "/v1/responses", "http://u/v1/responses"),
    ("http://u/v1/", "/v1/responses", "http://u/v1/responses"),
    ("http://u/v1", "/responses", "http://u/v1/responses"),
    ("http://u/v1", "/v1", "http://u/v1"),
    ("http://u/v1", "/v1/", "http://u/v1/"),
    ("http://u/v1", "/", "http://u/v1/"),
    ("http://u/v1", "/v10/x", "http://u/v1/v10/x"),
    ("http://u/openai/v1", "/v1/responses", "http://u/openai/v1/responses"),
    ("http://u/openai/v1", "/openai/v1/responses", "http://u/openai/v1/responses"),
    ("http://u/backend-api/codex", "/v1/responses", "http://u/backend-api/codex/responses"),
    ("http://u/backend-api/codex", "/responses", "http://u/backend-api/codex/responses"),
    # An upstream without a path is an origin.
    ("http://u", "/v1/responses", "http://u/v1/responses"),
    ("http://u/", "/v1/responses", "http://u/v1/responses"),
    (
        "http://u:81",
        "/openai/deployments/d/x?api-version=2",
        "http://u:81/openai/deployments/d/x?api-version=2",
    ),
    # Spelling is kept.
    (
        "http://u/v1",
        "/v1/files/a%2Fb%2e?q=a%20b+c&q=%C3%A9",
        "http://u/v1/files/a%2Fb%2e?q=a%20b+c&q=%C3%A9",
    ),
    ("http://u/v1", "/v1//x", "http://u/v1//x"),
    ("http://u/v1", "//evil/x", "http://u/v1//evil/x"),
    ("http://u", "//evil/x", "http://u//evil/x"),
    ("http://u/v1", "/v1/../x", "http://u/v1/../x"),
    ("http://u/v1", "/v1/x?", "http://u/v1/x?"),
    ("http://u/v1", "/v1/%zz|'\"<>[]{}^`", "http://u/v1/%zz|'\"<>[]{}^`"),
    ("http://u/v1", "/v1/a#b", "http://u/v1/a%23b"),
    ("http://u/v1", "/v1/\xe9\udcff", "http://u/v1/%C3%A9%FF"),
    ("http://u/v1", "/v1/x?u=http://e/?", "http://u/v1/x?u=http://e/?"),
    # Other forms of the target never change the host.
    ("http://u/v1", "http://evil/v1/x?y", "http://u/v1/x?y"),
    ("http://u/v1", "http://evil", "http://u/v1/"),
    ("http://u/v1", "*", "http://u/v1/"),
]


@pytest.mark.parametrize(("upstream", "target", "url"), JOINS)
def test_paths_are_joined_without_doubling(upstream: str, target: str, url: str) -> None:
    """Each pair of base URL and request target has one upstream URL, spelled as it was."""
    joined = join_url(upstream, target)
    assert joined == URL(url, encoded=True)
    assert joined.raw_host == "u"


class Front:
    """A server as Turnwire runs it, in front of a scripted upstream."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.port = 0
        self.buffered = False
        self.replayable = True
        self.outcome: asyncio.Queue[web.StreamResponse | BaseException] = asyncio.Queue()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Relay, and note how it went."""
        body = await request.read() if self.buffered else None
        try:
            response = await self.passthrough.relay(
                request,
                body=body,
                replayable=self.replayable,
                extra_headers={"turnwire-mode": "http"},
            )
        except TurnwireError as error:
            self.outcome.put_nowait(error)
            return refuse(error)
        except BaseException as error:
            self.outcome.put_nowait(error)
            raise
        self.outcome.put_nowait(response)
        return response

    async def start(self, stack: contextlib.AsyncExitStack, upstream: str | None = None) -> None:
        """Open the port."""
        self.passthrough = await stack.enter_async_context(
            Passthrough(
                upstream or f"http://127.0.0.1:{self.peer.port}/v1",
                instance_id=INSTANCE,
                connect_timeout_s=5,
                body_timeout_s=0.3,
            )
        )
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(
            app,
            auto_decompress=False,
            access_log=None,
            handler_cancellation=True,
            lingering_time=0.1,
            shutdown_timeout=1,
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    """A front and its upstream, which answers 200 until told otherwise."""
    async with contextlib.AsyncExitStack() as stack:
        front = Front(await stack.enter_async_context(Peer()))
        await front.start(stack)
        yield front


def ask(target: str = "/v1/models", *headers: str, method: str = "GET") -> bytes:
    """Spell a request without a body."""
    fields = "".join(f"{header}\r\n" for header in ("Host: front", *headers))
    return f"{method} {target} HTTP/1.1\r\n{fields}\r\n".encode("latin-1")


def post(body: bytes, *headers: str, target: str = "/v1/responses") -> bytes:
    """Spell a POST with a Content-Length."""
    return ask(target, *headers, f"Content-Length: {len(body)}", method="POST") + body


def names(message: Request) -> list[str]:
    """Give the header names in order."""
    return [name for name, _ in message.headers]


async def test_requests_arrive_as_they_were_sent(front: Front) -> None:
    """Order, first spelling and duplicates of headers stay; Host is replaced, Via added."""
    sent = ["authorization: Bearer k", "X-Odd:  a b", "x-two: 1", "Accept: */*", "X-Two: 2"]
    await talk(front.port, ask("/v1/models?limit=2&x=%2F", *sent))
    got = front.peer.requests[0]
    assert got.line == "GET /v1/models?limit=2&x=%2F HTTP/1.1"
    assert got.headers == [
        ("Host", f"127.0.0.1:{front.peer.port}"),
        ("authorization", "Bearer k"),
        ("X-Odd", "a b"),
        ("x-two", "1"),
        ("Accept", "*/*"),
        ("x-two", "2"),
        ("Via", "1.1 turnwire-3f9a"),
    ]


async def test_hop_by_hop_headers_stay_on_their_hop(front: Front) -> None:
    """Those of the RFC, and those that Connection names, go in neither direction."""
    front.peer.answer = reply(
        b"ok", "Connection: x-hop", "X-Hop: 1", "Keep-Alive: timeout=5", "X-End: 2"
    )
    hops = [
        "Connection: keep-alive, X-Mine",
        "X-Mine: 1",
        "TE: trailers",
        "Keep-Alive: 9",
        "Proxy-Authorization: p",
    ]
    got = await talk(front.port, ask("/v1/x", *hops, "X-Of-Mine: 1"))
    assert names(front.peer.requests[0]) == ["Host", "X-Of-Mine", "Via"]
    assert "X-End" in names(got)
    assert not {"x-hop", "keep-alive", "connection"} & {name.lower() for name in names(got)}


async def test_what_tells_of_the_hop_to_us_stays_here(front: Front) -> None:
    """A spoofed or real tale of where a request came from is not for upstream; credentials are."""
    tales = [
        "X-Forwarded-For: 1.2.3.4",
        "x-forwarded-host: evil.example",
        "X-Forwarded-Access-Token: t",
        "Forwarded: for=1.2.3.4",
        "X-Real-IP: 1.2.3.4",
        "CF-Connecting-IP: 1.2.3.4",
        "cf-ray: 1",
        "True-Client-IP: 1.2.3.4",
    ]
    kept = ["CF-Access-Client-Secret: s", "X-Forward: 1", "CDN-Loop: c", "Max-Forwards: 1"]
    await talk(front.port, ask("/v1/x", *tales, *kept))
    wanted = ["Host", "CF-Access-Client-Secret", "X-Forward", "CDN-Loop", "Max-Forwards", "Via"]
    assert names(front.peer.requests[0]) == wanted


async def test_replies_arrive_as_they_were_sent(front: Front) -> None:
    """Status, reason, header order and encoded bytes reach the client; nothing is made up."""
    body = gzip.compress(b"{}")
    front.peer.answer = reply(
        body,
        "content-encoding: gzip",
        "Set-Cookie: a=1",
        "Set-Cookie: b=2",
        "x-request-id: r",
        status="429 Slow Down Please",
    )
    got = await talk(front.port, ask())
    assert got.line == "HTTP/1.1 429 Slow Down Please"
    assert got.body == body
    assert got.headers[:5] == [
        ("content-encoding", "gzip"),
        ("Set-Cookie", "a=1"),
        ("Set-Cookie", "b=2"),
        ("x-request-id", "r"),
        ("Content-Length", str(len(body))),
    ]
    assert got.get("turnwire-mode") == "http"
    assert not {"server", "content-type"} & {name.lower() for name in names(got)}


async def test_cookies_are_not_kept(front: Front) -> None:
    """A cookie that upstream sets for one client is never sent for another."""
    front.peer.answer = reply(b"ok", "Set-Cookie: session=alice")
    await talk(front.port, ask())
    await talk(front.port, ask())
    assert [request.get("Cookie") for request in front.peer.requests] == [None, None]


async def test_headers_that_are_not_ascii_survive(front: Front) -> None:
    """UTF-8 is kept to the byte; Latin-1 becomes UTF-8 rather than being dropped."""
    front.peer.answer = reply(b"ok").replace(b"\r\n\r\n", b"\r\nX-A: \xc3\xa9\r\nX-B: \xe9\r\n\r\n")
    got = await talk(front.port, ask())
    assert (got.get("X-A"), got.get("X-B")) == ("\xc3\xa9", "\xc3\xa9")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_the_clients_business(front: Front, status: int) -> None:
    """A redirect is passed on, never followed: that would take credentials elsewhere."""
    front.peer.answer = reply(b"", "Location: http://evil/", status=f"{status} Moved")
    got = await talk(front.port, ask())
    assert got.status == status
    assert got.get("Location") == "http://evil/"
    assert len(front.peer.requests) == 1


@pytest.mark.parametrize("buffered", [False, True])
async def test_bodies_keep_their_bytes_and_length(front: Front, buffered: bool) -> None:
    """A body with a Content-Length arrives with the same one, encoded as it was."""
    front.buffered = buffered
    body = gzip.compress(b"x" * 100_000)
    await talk(front.port, post(body, "Content-Encoding: gzip"))
    got = front.peer.requests[0]
    assert got.body == body
    assert got.get("Content-Length") == str(len(body))
    assert got.get("Content-Encoding") == "gzip"
    assert got.get("Transfer-Encoding") is None
    assert got.get("Content-Type") is None


async def test_a_chunked_body_stays_chunked(front: Front) -> None:
    """A body of unknown length is streamed on in chunks."""
    head = ask("/v1/files", "Transfer-Encoding: chunked", method="POST")
    await talk(front.port, head, b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n")
    got = front.peer.requests[0]
    assert got.body == b"abcde"
    assert got.get("Content-Length") is None


async def test_a_buffered_chunked_body_gets_its_length(front: Front) -> None:
    """Once the body is at hand its length is known, and there is one framing only."""
    front.buffered = True
    head = ask("/v1/x", "Transfer-Encoding: chunked", method="POST")
    await talk(front.port, head, b"3\r\nabc\r\n0\r\n\r\n")
    got = front.peer.requests[0]
    assert (got.body, got.get("Content-Length")) == (b"abc", "3")
    assert got.get("Transfer-Encoding") is None


@pytest.mark.parametrize("buffered", [False, True])
async def test_an_empty_body_stays_empty(front: Front, buffered: bool) -> None:
    """A POST of nothing says so; a GET does not get a length it never had."""
    front.buffered = buffered
    await talk(front.port, post(b""))
    await talk(front.port, ask())
    assert [r.get("Content-Length") for r in front.peer.requests] == ["0", None]


async def test_expect_continue_is_answered_here(front: Front) -> None:
    """The client is told to go on, and upstream is not asked again."""
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(post(b"abc", "Expect: 100-continue")[: -len(b"abc")])
    assert (await read_head(reader)).status == 100
    writer.write(b"abc")
    assert (await read_message(reader)).status == 200
    writer.close()
    assert front.peer.requests[0].body == b"abc"
    assert front.peer.requests[0].get("Expect") is None


async def test_an_upload_is_streamed(front: Front) -> None:
    """Upstream sees the first bytes of a body before the client has sent the last."""
    first = asyncio.Event()

    async def script(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        assert await reader.readexactly(3) == b"abc"
        first.set()
        assert await reader.readexactly(3) == b"def"
        writer.write(reply())

    front.peer.script = script
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(post(b"abcdef")[:-3])
    await first.wait()
    writer.write(b"def")
    assert (await read_message(reader)).status == 200
    writer.close()


async def test_a_stream_arrives_chunk_by_chunk(front: Front) -> None:
    """The head and each event reach the client before upstream goes on."""
    go_on = asyncio.Queue[None]()

    async def script(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(HEAD_CHUNKED)
        for data in (b"3\r\none\r\n", b"3\r\ntwo\r\n", b"0\r\n\r\n"):
            await go_on.get()
            writer.write(data)

    front.peer.script = script
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(ask())
    head = await read_head(reader)
    assert head.get("Transfer-Encoding") == "chunked"
    for data in (b"3\r\none\r\n", b"3\r\ntwo\r\n", b"0\r\n\r\n"):
        go_on.put_nowait(None)
        assert await reader.readexactly(len(data)) == data
    writer.close()


@pytest.mark.parametrize(
    ("method", "answer", "length"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 42\r\n\r\n", "42"),
        ("HEAD", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", None),
        ("GET", b"HTTP/1.1 204 No Content\r\n\r\n", None),
        ("GET", b"HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n", None),
    ],
)
async def test_replies_without_a_body_have_none(
    front: Front, method: str, answer: bytes, length: str | None
) -> None:
    """HEAD, 204 and 304 end with their head, and the connection serves the next request."""
    front.peer.answer = answer
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    for _ in range(2):
        writer.write(ask(method=method))
        got = await read_head(reader)
        assert got.get("Content-Length") == length
        assert got.get("Transfer-Encoding") is None
    writer.close()


@pytest.mark.parametrize("method", ["DELETE", "OPTIONS", "PATCH", "PUT", "PROPFIND"])
async def test_any_method_passes(front: Front, method: str) -> None:
    """Methods are not ours to judge."""
    await talk(front.port, ask(method=method))
    assert front.peer.requests[0].line.startswith(f"{method} ")


async def test_an_http_1_0_client_gets_no_chunks(front: Front) -> None:
    """A reply of unknown length to HTTP/1.0 ends with the connection."""
    front.peer.answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(ask().replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert (await read_head(reader)).get("Transfer-Encoding") is None
    assert await reader.read() == b"ok"
    writer.close()


HEAD_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
HEAD_LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n"


@pytest.mark.parametrize(("head", "part"), [(HEAD_CHUNKED, b"3\r\nabc\r\n"), (HEAD_LENGTH, b"abc")])
async def test_a_reply_that_breaks_off_breaks_off(front: Front, head: bytes, part: bytes) -> None:
    """The client sees the end of the connection before the end of the body."""
    seen = asyncio.Event()

    async def script(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(head + part)
        await seen.wait()
        writer.transport.abort()

    front.peer.script = script
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(ask())
    await read_head(reader)
    assert await reader.readexactly(len(part)) == part
    seen.set()
    assert await reader.read() == b""
    writer.close()
    assert isinstance(await front.outcome.get(), web.StreamResponse)


async def test_an_http_1_0_reply_that_breaks_off_is_reset(front: Front) -> None:
    """Where only the end of the connection ends the body, a failure must not look like it."""
    seen = asyncio.Event()

    async def script(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(HEAD_CHUNKED + b"3\r\nabc\r\n")
        await seen.wait()
        writer.transport.abort()

    front.peer.script = script
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(ask().replace(b"HTTP/1.1", b"HTTP/1.0"))
    await read_head(reader)
    assert await reader.readexactly(3) == b"abc"
    seen.set()
    with pytest.raises(ConnectionResetError):
        await reader.read()
    writer.close()


async def test_a_client_that_leaves_ends_the_request_upstream(front: Front) -> None:
    """Upstream sees its connection close when nobody waits for the reply any more."""
    asked, gone = asyncio.Event(), asyncio.Event()

    async def script(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(HEAD_CHUNKED)
        asked.set()
        assert await reader.read() == b""
        gone.set()

    front.peer.script = script
    _, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(ask())
    await asked.wait()
    writer.transport.abort()
    await gone.wait()


async def test_a_client_that_leaves_in_mid_upload_never_completes_it(front: Front) -> None:
    """A body that was not sent to its end does not arrive as a whole one."""
    asked = asyncio.Event()
    tail: asyncio.Queue[bytes] = asyncio.Queue()

    async def script(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await reader.readuntil(b"abc\r\n")
        asked.set()
        tail.put_nowait(await reader.read())

    front.peer.script = script
    _, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(ask("/v1/x", "Transfer-Encoding: chunked", method="POST") + b"3\r\nabc\r\n")
    await asked.wait()
    writer.transport.abort()
    assert await tail.get() == b""


async def test_an_upload_that_stalls_is_a_408(front: Front) -> None:
    """A client that stops in mid-body is told so, and upstream gets no whole body."""
    got = await talk(front.port, post(b"abc")[:-1])
    assert got.status == 408


async def test_an_upload_that_breaks_its_framing_is_a_400(front: Front) -> None:
    """Broken chunks are the client's fault, not upstream's."""
    head = ask("/v1/x", "Transfer-Encoding: chunked", method="POST")
    got = await talk(front.port, head + b"3\r\nabc\r\n", b"zz\r\n")
    assert got.status == 400


async def test_an_early_answer_reaches_the_client(front: Front) -> None:
    """Upstream may refuse a body before it has read it all."""

    async def script(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(reply(b"no", "Connection: close", status="413 Too Large"))
        await writer.drain()
        await reader.read()

    front.peer.script = script
    got = await talk(front.port, post(b"abc")[:-1])
    assert (got.status, got.body) == (413, b"no")


async def test_no_upstream_is_a_502(front: Front, closed_port: int) -> None:
    """Nothing listens: the client gets the API's error shape."""
    async with contextlib.AsyncExitStack() as stack:
        alone = Front(front.peer)
        await alone.start(stack, f"http://127.0.0.1:{closed_port}/v1")
        got = await talk(alone.port, ask())
    assert got.status == 502
    assert b'"code": "upstream_unreachable"' in got.body
    assert b"refused" in got.body


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH\r\n\r\n", b""], ids=["not http", "closed"])
async def test_no_reply_is_a_502(front: Front, answer: bytes) -> None:
    """An upstream that does not speak HTTP, or hangs up, is unreachable."""

    async def script(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(answer)
        writer.close()

    front.peer.script = script
    assert (await talk(front.port, post(b"{}"))).status == 502


def closing_second(peer: Peer) -> None:
    """Have the first connection close without a reply when it is used for the second time."""

    async def script(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await reader.readexactly(int(request.get("Content-Length") or 0))
        is_second = [r.connection for r in peer.requests].count(1) == 2
        if request.connection == 1 and is_second:
            writer.close()
        else:
            writer.write(reply())

    peer.script = script


@pytest.mark.parametrize(
    ("buffered", "replayable", "status", "requests"),
    [(True, True, 200, 3), (True, False, 502, 2), (False, True, 502, 2)],
)
async def test_a_stale_connection_costs_a_post_one_repeat(
    front: Front, buffered: bool, replayable: bool, status: int, requests: int
) -> None:
    """Only a buffered, replayable body on a reused connection is sent a second time."""
    front.buffered, front.replayable = buffered, replayable
    closing_second(front.peer)
    assert (await talk(front.port, post(b"{}"))).status == 200
    assert (await talk(front.port, post(b"{}"))).status == status
    assert len(front.peer.requests) == requests


async def test_a_fresh_connection_is_never_repeated(front: Front) -> None:
    """On a new connection, no reply means that the request may have been acted on."""
    front.buffered = True

    async def script(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.close()

    front.peer.script = script
    assert (await talk(front.port, post(b"{}"))).status == 502
    assert len(front.peer.requests) == 1


async def test_a_loop_is_noticed(front: Front) -> None:
    """A request that carries this process's own mark is answered 508 and goes nowhere."""
    got = await talk(front.port, ask("/v1/x", f"Via: 1.0 edge, {via(INSTANCE)}"))
    assert got.status == 508
    assert front.peer.requests == []
    assert (await talk(front.port, ask("/v1/x", "Via: 1.1 turnwire-other"))).status == 200
    assert front.peer.requests[0].headers[-2:] == [
        ("Via", "1.1 turnwire-other"),
        ("Via", via(INSTANCE)),
    ]


async def test_the_host_is_never_the_clients_choice(front: Front) -> None:
    """An absolute target, a Host or a forwarded host changes nothing about where it goes."""
    await talk(front.port, ask("http://127.0.0.1:1/v1/x", "X-Forwarded-Host: evil"))
    assert front.peer.requests[0].line == "GET /v1/x HTTP/1.1"
    assert front.peer.requests[0].get("Host") == f"127.0.0.1:{front.peer.port}"


async def test_netrc_is_not_consulted(
    front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials lying about on this machine are not sent for a client that sent none."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password hidden\n")
    monkeypatch.setenv("NETRC", str(netrc))
    await talk(front.port, ask())
    assert front.peer.requests[0].get("Authorization") is None


async def test_a_proxy_from_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """http_proxy is taken, and no_proxy excepts from it."""
    async with contextlib.AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(Peer(reply(b"by proxy")))
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        front = Front(proxy)
        await front.start(stack, "http://api.example/v1")
        assert (await talk(front.port, ask("/v1/models"))).body == b"by proxy"
        assert proxy.requests[0].line == "GET http://api.example/v1/models HTTP/1.1"
        monkeypatch.setenv("no_proxy", "api.example")
        assert environment_proxy("http://api.example/v1") is None


async def test_a_slow_reader_holds_upstream_back(front: Front) -> None:
    """A client that does not read stops the flow instead of filling our memory."""
    sent = 0
    stalled = asyncio.Event()

    async def script(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        block = b"x" * 1_000_000
        for _ in range(1000):
            writer.write(block)
            sent += len(block)
            try:
                async with asyncio.timeout(0.3):
                    await writer.drain()
            except TimeoutError:
                stalled.set()
                return

    front.peer.script = script
    _, writer = await asyncio.open_connection("127.0.0.1", front.port, limit=1024)
    writer.write(ask())
    await stalled.wait()
    assert sent < 100_000_000
    writer.transport.abort()
