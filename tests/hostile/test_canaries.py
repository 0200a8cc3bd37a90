"""
Row X4: what is confided to a request is in no log, no metric, no page and no error, on any path.

A canary of its own is in every header that may carry a credential, in the query and in the content.
None looks like a key, so that nothing is redacted for its looks: what keeps them out is that nobody
puts them there. Everything is logged at DEBUG, the loop is in its debug mode, and the ways include
those that end in a refusal, in a fault of upstream's and in a fault of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import re
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import structlog

from hostile.ledger import LAST, Ledger, Line, parse_replies
from hostile.upstream import Rogue, framed
from proxy.app import Turnwire
from proxy.config import Config
from proxy.core.plan import Planner
from proxy.downstream.driver import Driver
from proxy.observe.log import configure
from proxy.upstream.passthrough import Passthrough

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

CREDENTIALS = {
    name: f"canary{number}q"
    for number, name in enumerate(
        [
            "Authorization",
            "Api-Key",
            "X-Api-Key",
            "Cookie",
            "OpenAI-Organization",
            "OpenAI-Project",
            "ChatGPT-Account-ID",
            "Proxy-Authorization",
            "X-Goog-Api-Key",
            "X-Amz-Security-Token",
            "CF-Access-Client-Secret",
            "X-Nobody-Knows-This-One",
        ]
    )
}
CONTENT = "canarycontent"
IN_QUERY = "canaryquery"
CANARY = re.compile("canary[a-z0-9]+", re.IGNORECASE)
HEADERS = "".join(f"{name}: {value}\r\n" for name, value in CREDENTIALS.items()).encode()
BODY = json.dumps(
    {
        "model": "m",
        "store": False,
        "stream": True,
        "input": CONTENT,
        "instructions": CONTENT,
        "metadata": {CONTENT: CONTENT},
    }
).encode()
CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": CONTENT}]}).encode()
TURN = "/v1/responses"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """All that is logged, at DEBUG; the logging of the test run is put back afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure("debug", "json", stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@contextlib.asynccontextmanager
async def running(upstream: str, **config: Any) -> AsyncIterator[Turnwire]:
    """Run a proxy with impatient limits, in the loop's debug mode."""
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    limits = {
        "header_timeout_s": 0.2,
        "body_timeout_s": 0.2,
        "max_body_bytes": "64KiB",
        "max_decoded_body_bytes": "64KiB",
    }
    waits = {"first_event_timeout_s": 0.3, "silence_timeout_s": 0.3}
    config = {
        "limits": limits,
        "websocket": waits,
        "connections": {"spare_per_principal": 0},
    } | config
    settings = {
        "upstream": upstream,
        "port": 0,
        "admin_port": 0,
        "log": {"level": "debug"},
    } | config
    async with Turnwire(Config(**settings)) as proxy:
        yield proxy


def request(
    target: str = TURN,
    body: bytes = BODY,
    *fields: str,
    method: str = "POST",
    host: str = "localhost",
) -> bytes:
    """Spell a request with all canaries in its headers."""
    own = "".join(f"{field}\r\n" for field in fields)
    head = f"{method} {target} HTTP/1.1\r\nHost: {host}\r\n{own}Content-Length: {len(body)}\r\n"
    return head.encode() + HEADERS + b"\r\n" + body


async def send(proxy: Turnwire, *parts: bytes, admin: bool = False) -> bytes:
    """Send parts and a last request; return all that came back."""
    url = proxy.admin_url if admin else proxy.base_url
    return await Line(int(url.split(":")[2].split("/")[0])).raw(*parts, LAST)


async def pages(proxy: Turnwire) -> str:
    """Return every page of the admin listener, as it is shown to whoever asks."""
    paths = [*OPEN_PAGES, "/nothing", f"/{IN_QUERY}?{IN_QUERY}"]
    shown = []
    async with aiohttp.ClientSession(headers=CREDENTIALS) as session:
        for path in paths:
            async with session.get(proxy.admin_url + path) as reply:
                shown.append(await reply.text())
    return "\n".join(shown)


OPEN_PAGES = ["/metrics", "/livez?verbose", "/readyz?verbose", "/healthz", "/startupz"]


def assert_silent(*texts: str | bytes) -> None:
    """No canary is in any of the texts."""
    for text in texts:
        written = text.decode("latin-1") if isinstance(text, bytes) else text
        found = sorted({match.group() for match in CANARY.finditer(written)})
        assert not found, f"{found} in {written[:2000]}"


REFUSED = {
    "no JSON": request(body=b'{"input": "' + CONTENT.encode()),
    "corrupt": request(TURN, BODY, "Content-Encoding: gzip"),
    "unknown encoding": request(TURN, BODY, f"Content-Encoding: {CONTENT}"),
    "too large": request(body=BODY + b" " * (64 << 10)),
    "another host": request(host=f"{CONTENT}.example"),
    "another origin": request(TURN, BODY, f"Origin: http://{CONTENT}.example"),
    "upgrade": request(TURN, b"", "Upgrade: websocket", "Connection: upgrade", method="GET"),
    "expectation": request(TURN, BODY, f"Expect: {CONTENT}"),
    "transfer coding": request(TURN, BODY, "Transfer-Encoding: gzip, chunked"),
    "no method": b"\x16\x03" + request(),
    "no version": request().replace(b" HTTP/1.1", f" {IN_QUERY}/1.1".encode()),
    "blank in a name": request().replace(b"Cookie:", b"Coo kie:"),
    "null byte": request().replace(b"Cookie: ", b"Cookie: \x00"),
    "two lengths": request(TURN, BODY, "Content-Length: 1"),
    "line too long": request(f"/v1/{IN_QUERY}" + "x" * 40_000),
    "field too long": request(TURN, BODY, "X: " + CONTENT * 4000),
    "broken chunk": request().replace(b"Content-Length: ", b"Transfer-Encoding: chunked\r\nX: "),
    "body cut short": request()[:-10],
    "head cut short": request()[:200],
    "not found": request("*", BODY),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("admin", [False, True], ids=["data", "admin"])
async def test_refusals_quote_nothing(log: io.StringIO, name: str, admin: bool):
    """Whatever is wrong with a request, its reply and the log say so in words of ours."""
    async with Ledger() as ledger, running(ledger.url) as proxy:
        got = await send(proxy, REFUSED[name], admin=admin)
        shown = await pages(proxy)

    statuses = [reply.status for reply in parse_replies(got)]
    assert statuses
    assert 400 <= statuses[0] < 500 or (admin and statuses[0] == 404) or name == "no JSON"
    if (name, admin) != ("expectation", True):  # aiohttp's own 417 there quotes what is expected
        assert_silent(got)
    assert_silent(log.getvalue(), shown)
    assert "Traceback" not in got.decode("latin-1") + log.getvalue()


async def test_turns_and_requests_that_go_well_leave_no_trace(log: io.StringIO):
    """In full, as deltas, as chats, relayed and with queries: only facts of ours are told."""
    async with Ledger() as ledger, running(ledger.url) as proxy:
        for raw in (
            request(),
            request(),
            request("/v1/chat/completions", CHAT),
            request(f"{TURN}?key={IN_QUERY}"),
            request(f"/v1/{IN_QUERY}/files"),
            request(f"/v1/models?api_key={IN_QUERY}", b"", method="GET"),
        ):
            replies = parse_replies(await send(proxy, raw))
            assert [reply.status for reply in replies] == [200, 200]
        shown = await pages(proxy)

    assert_silent(log.getvalue(), shown)
    turns = [line for line in log.getvalue().splitlines() if '"event": "turn"' in line]
    assert len(turns) >= 2
    told = {value for seen in ledger.seen for value in CANARY.findall(seen.target + seen.text)}
    assert told >= {CONTENT, IN_QUERY}  # it is upstream that they are for


WHISPERS = {
    "an error that quotes": [
        framed(json.dumps({"type": "error", "error": {"message": v, "code": v}}).encode())
        for v in [" ".join(CREDENTIALS.values())]
    ],
    "no JSON": [framed(b'{"type": ' + CONTENT.encode())],
    "an unknown event": [framed(b'{"type":"response.%b"}' % CONTENT.encode())],
    "another's response": [
        framed(b'{"type":"response.created","response":{"id":"resp_1"}}'),
        framed(b'{"type":"response.completed","response":{"id":"%b"}}' % CONTENT.encode()),
    ],
    "a close that quotes": [framed(b"\x03\xf3" + CONTENT.encode(), 8)],
    "no frame": [CONTENT.encode() * 20],
    "nothing": [],
}


@pytest.mark.parametrize("name", WHISPERS)
@pytest.mark.parametrize("hangs_up", [True, False])
async def test_what_upstream_repeats_is_not_told_either(
    log: io.StringIO, name: str, hangs_up: bool
):
    """An upstream may quote the key in errors, events, close reasons and garbage: we do not."""
    async with Rogue() as rogue:
        rogue.script, rogue.hangs_up = WHISPERS[name], hangs_up
        async with running(rogue.url) as proxy:
            await send(proxy, request())
            await send(proxy, request())
            shown = await pages(proxy)

    assert_silent(log.getvalue(), shown)


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-%b\r\n\r\n" % CONTENT.encode()])
async def test_an_upstream_that_is_none_is_told_without_a_word_of_the_request(
    log: io.StringIO, answer: bytes
):
    """No connection, no HTTP, and tunnels that lead nowhere: the error names the kind."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    if not answer:
        server.close()  # and now nobody listens
    tunnel = request(
        f"/v1/realtime?key={IN_QUERY}",
        b"",
        "Upgrade: websocket",
        "Connection: upgrade",
        f"Sec-WebSocket-Protocol: openai-insecure-api-key.{CONTENT}",
        method="GET",
    )
    async with running(f"http://127.0.0.1:{port}/v1") as proxy:
        got = [await send(proxy, raw) for raw in (request(), request("/v1/files"), tunnel)]
        shown = await pages(proxy)
    server.close()

    assert [parse_replies(each)[0].status for each in got] == [502, 502, 502]
    assert_silent(log.getvalue(), shown, *got)


FAULTS = {
    "planning": (Planner, "plan"),
    "a turn": (Driver, "run"),
    "the relay": (Passthrough, "relay"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_of_ours_tells_its_place_and_nothing_else(
    log: io.StringIO, name: str, monkeypatch: pytest.MonkeyPatch
):
    """The client gets a 500 in the API's shape, the log the kind and the place; no message."""
    owner, method = FAULTS[name]

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError(" ".join([*CREDENTIALS.values(), CONTENT]))

    async with Ledger() as ledger, running(ledger.url) as proxy:
        monkeypatch.setattr(owner, method, fail)
        got = await send(proxy, request("/v1/files" if name == "the relay" else TURN))
        shown = await pages(proxy)

    reply = parse_replies(got)[0]
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (500, "internal_error")
    assert_silent(log.getvalue(), shown, got)
    failures = [line for line in log.getvalue().splitlines() if '"failed"' in line]
    assert failures
    for failure in failures:
        assert "ValueError" in failure
        assert "test_canaries.py" in failure


async def test_a_client_that_leaves_takes_its_secrets_along(log: io.StringIO):
    """A turn that is given up leaves one line of facts."""
    async with Rogue() as rogue:
        rogue.script, rogue.hangs_up = [framed(b'{"type":"response.created"}')], False
        async with running(rogue.url) as proxy:
            port = int(proxy.base_url.split(":")[2].split("/")[0])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request())
            await reader.readuntil(b"\n\n")
            writer.close()
            async with asyncio.timeout(20):
                while '"event": "turn"' not in log.getvalue():  # noqa: ASYNC110  no event for it
                    await asyncio.sleep(0.01)
            shown = await pages(proxy)

    assert '"status": 499' in log.getvalue() or '"status": 200' in log.getvalue()
    assert_silent(log.getvalue(), shown)
