"""
The edges of a running proxy: what clients may send, what they get, how the process ends.

Everything here goes through real sockets. What concerns the process as such (signals, exit
statuses, what is on standard error) runs `python -m proxy serve` as a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import io
import json
import os
import re
import signal
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import brotli
import pytest
from harness import eventually, serving, stack
from websockets.asyncio.client import connect
from wire import Peer, read_message, reply, talk
from wsserver import upstream as ws_upstream

from proxy.downstream import driver
from proxy.simulator import Simulator
from proxy.simulator.agent import user
from proxy.simulator.faults import Break, End, ErrorReply, SlowStream
from proxy.simulator.validate import Transport
from proxy.upstream.connection import UpstreamConnection

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from aiohttp import web
    from harness import Stack
    from wire import Request

ROOT = Path(__file__).parents[1]
AUTH = {"Authorization": "Bearer sk-agent"}
NO_SPARES = {"spare_per_principal": 0}
BODY = {"model": "gpt-5.2", "input": [user("[calls=0] Hello.")], "store": False}


@dataclass(frozen=True)
class Got:
    """A reply: status, headers with lower-case names, body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error object."""
        return json.loads(self.body)["error"]

    @property
    def text(self) -> str:
        """The text of the answer's message."""
        return str(json.loads(self.body)["output"][-1]["content"][0]["text"])


async def request(method: str, url: str, body: bytes | None = None, **headers: str) -> Got:
    """Send one request; header names have underscores for hyphens."""
    sent = AUTH | {name.replace("_", "-"): value for name, value in headers.items()}
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.request(method, url, data=body and io.BytesIO(body), headers=sent) as got,
    ):
        lowered = {name.lower(): value for name, value in got.headers.items()}
        return Got(got.status, lowered, await got.read())


async def post(s: Stack, body: bytes, *, straight: bool = False, **headers: str) -> Got:
    """Post a turn's body."""
    base_url = s.straight_url if straight else s.base_url
    headers = {"Content_Type": "application/json"} | headers
    return await request("POST", f"{base_url}/responses", body, **headers)


# --- Bodies ---------------------------------------------------------------------------------------


def deflate(data: bytes) -> bytes:
    """Compress as `deflate` is defined: with zlib's wrapping."""
    return zlib.compress(data)


ENCODERS = {
    "gzip": gzip.compress,
    "deflate": deflate,
    "br": brotli.compress,
    "zstd": zstd.compress,
    "identity": bytes,
}


@pytest.mark.parametrize(
    "encodings", ["gzip", "deflate", "br", "zstd", "identity", "gzip, br", "zstd, deflate, gzip"]
)
async def test_an_encoded_body_is_a_turn_like_any_other(encodings: str):
    """Whatever its encoding, a body is understood, continued by a delta, and sent as plain text."""
    async with stack() as s:
        history = [user("[calls=0] Hello.")]
        agent = s.agent()
        for mode in ("full", "delta"):
            body = json.dumps(agent.build_body(history)).encode()
            encoded = body
            for name in encodings.split(", "):
                encoded = ENCODERS[name](encoded)
            agent.headers = {"Content-Encoding": encodings}

            reply = await agent.post(encoded)

            assert (reply.status, reply.mode) == (200, mode)
            assert reply.response is not None
            assert s.seen_for(reply).context[-1] == history[-1]
            history += [*reply.items, user("[calls=0] Next?")]


async def test_a_bomb_is_refused_before_it_is_large():
    """A small body that decodes to more than the limit is a 413 that names the setting."""
    limits = {"max_decoded_body_bytes": "2MiB", "max_body_bytes": "1MiB"}
    async with stack(limits=limits) as s:
        bomb = gzip.compress(gzip.compress(b'{"input":"' + bytes(64 << 20) + b'"}'))

        got = await post(s, bomb, Content_Encoding="gzip, gzip")

        assert (got.status, got.error["code"]) == (413, "body_too_large")
        assert "limits.max_decoded_body_bytes" in got.error["message"]
        plain = await post(s, b'{"input":"' + b"x" * (1 << 20) + b'"}')
        assert (plain.status, plain.error["code"]) == (413, "body_too_large")
        assert "limits.max_body_bytes" in plain.error["message"]
        assert not s.sim.journal.turns


@pytest.mark.parametrize(
    ("encoding", "body", "status", "code"),
    [
        ("gzip", b"not gzip", 400, "corrupt_body"),
        ("gzip", gzip.compress(b"{}", mtime=0)[:-4], 400, "corrupt_body"),
        ("br", b"\xff\xff\xff", 400, "corrupt_body"),
        ("zstd", b"not zstd", 400, "corrupt_body"),
        ("gzip, br", gzip.compress(b"{}", mtime=0), 400, "corrupt_body"),
        ("compress", b"{}", 415, "unsupported_encoding"),
        ("gzip, rot13", b"{}", 415, "unsupported_encoding"),
    ],
)
async def test_a_body_that_does_not_decode_is_refused(
    encoding: str, body: bytes, status: int, code: str
):
    """Corrupt bodies are a 400 and unknown encodings a 415, in the API's error shape."""
    async with stack() as s:
        got = await post(s, body, Content_Encoding=encoding)

        assert (got.status, got.error["code"]) == (status, code)
        assert set(got.error) == {"message", "type", "param", "code"}
        assert not s.sim.journal.turns


UNREADABLE = {
    "empty": b"",
    "no_json": b"hello",
    "half": b'{"model":"gpt-5.2","input":"Hi',
    "array": b'[{"model":"gpt-5.2"}]',
    "null": b"null",
    "nan": b'{"model":"gpt-5.2","input":"Hi","temperature":NaN}',
    "no_input": b'{"model":"gpt-5.2"}',
    "input_number": b'{"model":"gpt-5.2","input":7}',
    "item_number": b'{"model":"gpt-5.2","input":[7]}',
    "unknown_field": b'{"model":"gpt-5.2","input":"Hi","colour":"red"}',
    "unknown_item": b'{"model":"gpt-5.2","input":[{"type":"telepathy"}]}',
    "socket_field": b'{"model":"gpt-5.2","input":"Hi","generate":false}',
    "stream_options": b'{"model":"gpt-5.2","input":"Hi","stream_options":{}}',
    "no_model": b'{"input":"Hi"}',
    "trailing": b'{"model":"gpt-5.2","input":"Hi"} extra',
    "trailing_comma": b'{"model":"gpt-5.2","input":["Hi",]}',
    "not_utf8": b'{"model":"gpt-5.2","input":"\xff"}',
}


@pytest.mark.parametrize("name", UNREADABLE)
async def test_what_the_api_refuses_is_refused_in_its_words(name: str):
    """A body that is no good gets the very status and error that it gets without the proxy."""
    async with stack() as s:
        straight = await post(s, UNREADABLE[name], straight=True)

        got = await post(s, UNREADABLE[name])

        assert straight.status == 400
        assert (got.status, got.error) == (straight.status, straight.error)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"model":"gpt-5.2","input":"One","input":"Two"}', "unparsable"),
        (b'{"model":"gpt-5.2","input":[{"role":"user","role":"user","content":"a"}]}', None),
        (b'{"model":"gpt-5.2","input":[]}', "no_input"),
        (b'\n\t {"model" : "gpt-5.2" , "input" : "Hi" }\r\n', None),
        (b'{"model":"gpt-5.2","in\\u0070ut":"Hi"}', None),
        (b'{"model":"gpt-5.2","input":"\\ud83d\\ude00 \xf0\x9f\x98\x80 \\u0000 \\ud800"}', None),
        (
            b'{"model":"gpt-5.2","input":"Hi","metadata":{"n":"123456789012345678901234567890"}}',
            None,
        ),
        (b'{"model":"gpt-5.2","input":"Hi","conversation":"conv_1"}', "conversation"),
        (b'{"model":"gpt-5.2","input":"Hi","background":true}', "background"),
    ],
)
async def test_odd_bodies_get_the_answer_that_they_get_straight(body: bytes, reason: str | None):
    """Whatever reads oddly is either understood exactly or left to HTTP; the answer is the same."""
    async with stack() as s:
        straight = await post(s, body, straight=True)

        got = await post(s, body.replace(b"conv_1", b"conv_2"))

        assert (got.status, got.text) == (straight.status, straight.text)
        if reason:
            assert (got.headers["turnwire-mode"], got.headers["turnwire-reason"]) == (
                "http",
                reason,
            )


async def test_a_body_beyond_the_message_limit_goes_over_http():
    """Twenty megabytes are more than a WebSocket message may have: HTTP takes them."""
    async with stack() as s:
        body = BODY | {"input": [user("[calls=0] " + "x" * (20 << 20))]}

        got = await post(s, json.dumps(body).encode())

        assert got.status == 200
        assert (got.headers["turnwire-mode"], got.headers["turnwire-reason"]) == (
            "http",
            "too_large",
        )
        (seen,) = s.sim.journal.turns
        assert seen.context == body["input"]


async def test_too_many_bodies_at_once_are_shed():
    """Beyond the budget for bodies in memory a turn is a 503 with Retry-After, and not for long."""
    limits = {
        "max_body_bytes": "1MiB",
        "max_decoded_body_bytes": "1MiB",
        "max_inflight_body_bytes": "1MiB",
    }
    async with stack(limits=limits, connections=NO_SPARES) as s:
        s.sim.faults.arm(Break(end=End.STALL))
        body = json.dumps(BODY | {"input": "x" * 800_000}).encode()
        first = asyncio.get_running_loop().create_task(post(s, body))
        await eventually(lambda: s.sim.journal.turns)

        shed = await post(s, body)
        first.cancel()
        await asyncio.wait([first])
        await s.idle()
        after = await post(s, body)

        assert (shed.status, shed.error["code"]) == (503, "overloaded")
        assert shed.headers["retry-after"] == "1"
        assert after.status == 200


# --- Methods, paths, hosts ------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/responses", "/responses"])
async def test_a_websocket_upgrade_of_responses_is_426(path: str):
    """The one status on which Codex turns to HTTP at once, in the API's error shape."""
    async with stack() as s:
        origin = s.base_url.removesuffix("/v1")
        upgrade = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec_WebSocket_Version": "13",
            "Sec_WebSocket_Key": "dGhlIHNhbXBsZSBub25jZQ==",
        }

        got = await request("GET", origin + path, **upgrade)

        assert (got.status, got.error["code"]) == (426, "websocket_not_supported")
        assert not len(s.sim.journal)


async def test_other_upgrades_are_tunnelled():
    """A WebSocket to another path reaches upstream, with its query, credentials and messages."""
    async with ws_upstream() as peer:
        url = peer.url.replace("ws:", "http:").removesuffix("/responses")
        async with serving(url) as (proxy, _):
            target = proxy.base_url.replace("http:", "ws:") + "/realtime?model=m"
            async with connect(target, additional_headers=AUTH, proxy=None) as client:
                await client.send("over and")
                assert await client.recv() == "over and"
                await client.send(b"\x00out")
                assert await client.recv() == b"\x00out"

        (handshake,) = peer.requests
        assert handshake.path == "/v1/realtime?model=m"
        assert handshake.headers["Authorization"] == AUTH["Authorization"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("HEAD", "/models"),
        ("OPTIONS", "/responses"),
        ("PUT", "/responses"),
        ("GET", "/responses"),
        ("GET", "/responses/resp_unknown"),
        ("DELETE", "/responses/resp_unknown"),
        ("GET", "/no/such/thing?with=query"),
        ("POST", "/responses/resp_1/cancel"),
        ("PATCH", "/models"),
        ("GET", "/models/gpt-5.2"),
    ],
)
async def test_what_is_no_turn_is_as_it_is_straight(method: str, path: str):
    """Other methods and paths get upstream's status and body, and are no turns of ours."""
    async with stack() as s:
        straight = await request(method, s.straight_url + path)

        got = await request(method, s.base_url + path)

        assert (got.status, got.body) == (straight.status, straight.body)
        volatile = {"date", "x-request-id"}
        ours, theirs = (
            {k: v for k, v in g.headers.items() if k not in volatile} for g in (got, straight)
        )
        assert ours == theirs
        assert {seen.transport for seen in s.sim.journal} <= {Transport.HTTP}


async def test_a_turn_with_a_query_is_left_to_http():
    """A query is no part of the endpoint as we know it: the request passes through."""
    async with stack() as s:
        body = json.dumps(BODY).encode()
        got = await request("POST", f"{s.base_url}/responses?api-version=1", body)

        assert got.status == 200
        (seen,) = s.sim.journal.turns
        assert seen.transport is Transport.HTTP


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost"}, 200),
        ({"Host": "LOCALHOST:1"}, 200),
        ({"Host": "[::1]:8787"}, 200),
        ({"Host": "proxy.internal:99"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "localhost", "Origin": "http://evil.example"}, 403),
        ({"Host": "localhost", "Origin": "null"}, 403),
        ({"Host": "localhost", "Origin": "http://localhost:3000"}, 403),
        ({"Host": "localhost", "Origin": "http://localhost"}, 200),
        ({"Host": "localhost", "Origin": "http://app.example"}, 200),
    ],
)
async def test_only_local_hosts_and_listed_origins_are_served(headers: dict[str, str], status: int):
    """A web page that rebinds its name to loopback, or posts across origins, gets a 403."""
    security = {"allowed_hosts": ["proxy.internal"], "allowed_origins": ["http://app.example"]}
    async with stack(security=security) as s:
        for method, path in (("GET", "/models"), ("POST", "/responses")):
            got = await request(method, s.base_url + path, json.dumps(BODY).encode(), **headers)

            assert got.status == status
            if status == 403:
                assert got.error["code"] == "host_not_allowed"
                assert not len(s.sim.journal)
            assert "access-control-allow-origin" not in got.headers


async def test_the_admin_listener_tells_health_and_metrics():
    """Probes and metrics are on a port of their own; the data port knows nothing of them."""
    async with stack() as s:
        await post(s, json.dumps(BODY).encode())
        for path in ("/livez", "/readyz", "/healthz"):
            assert (await request("GET", s.proxy.admin_url + path)).body == b"ok"
        metrics = (await request("GET", f"{s.proxy.admin_url}/metrics")).body.decode()
        line = 'turnwire_turns_total{mode="full",reason="new_conversation"} 1.0'
        assert line in metrics.splitlines()
        through = await request("GET", s.base_url.removesuffix("/v1") + "/metrics")
        assert through.status == 404


# --- Streaming, back-pressure, disconnects --------------------------------------------------------


async def test_a_slow_reader_stops_the_upstream_socket():
    """While a client does not read, the upstream socket is not read: nothing piles up in here."""
    async with stack(connections=NO_SPARES) as s:
        prompt = user("[calls=0] [tokens=240000] Talk.")
        body = json.dumps(BODY | {"input": [prompt], "stream": True}).encode()
        async with aiohttp.ClientSession(read_bufsize=1024) as session:
            reply = await session.post(f"{s.base_url}/responses", data=body, headers=AUTH)
            (connection,) = upstream_connections()

            await eventually(lambda: connection.is_reading_paused)

            held_bytes = connection._buffered_bytes
            assert held_bytes <= 1 << 20
            assert not s.sim.journal.turns[0].finished
            received = await reply.read()
            assert len(received) > 10 * held_bytes
            assert received.count(b"event: response.completed") == 1
            assert s.sim.journal.turns[0].finished
            assert not connection.is_reading_paused


def upstream_connections() -> list[UpstreamConnection]:
    """Return all upstream connections that are open in this process."""
    found = [each for each in gc.get_objects() if type(each) is UpstreamConnection]
    return [connection for connection in found if connection.is_open]


async def test_uploads_and_downloads_stream_through():
    """Each half of a body arrives while the other has not been sent yet, in both directions."""
    half = 1 << 20
    got_half, may_end = asyncio.Event(), asyncio.Event()

    async def script(_: Any, reader: Any, writer: Any) -> None:
        async def chunks(count: int) -> bytes:
            data = b""
            while len(data) < count:
                size = int(await reader.readline(), 16)
                data += await reader.readexactly(size)
                await reader.readline()
            return data

        assert await chunks(half) == b"a" * half
        got_half.set()
        assert await chunks(half) == b"b" * half
        assert await reader.readuntil(b"\r\n\r\n") == b"0\r\n\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (2 * half))
        writer.write(b"c" * half)
        await may_end.wait()
        writer.write(b"d" * half)

    async def upload() -> AsyncIterator[bytes]:
        yield b"a" * half
        await got_half.wait()
        yield b"b" * half

    async with (
        Peer(script=script) as peer,
        serving(f"http://127.0.0.1:{peer.port}/v1") as (proxy, _),
        aiohttp.ClientSession() as session,
        session.post(f"{proxy.base_url}/files", data=upload()) as reply,
    ):
        assert await reply.content.readexactly(half) == b"c" * half
        may_end.set()
        assert await reply.read() == b"d" * half


async def test_silence_is_filled_with_comments():
    """In a long silence a stream carries comment lines, which belong to no event."""
    async with stack(reply={"keepalive_s": 0.01}) as s:
        s.sim.faults.arm(SlowStream(gap_ms=40))
        terse = {"stream": True, "input": "[calls=0] [tokens=2] Slowly."}
        got = await post(s, json.dumps(BODY | terse).encode())

        assert b"\n: keep-alive\n" in got.body
        assert b": keep-alive\n\n" not in got.body
        reply = await s.agent().send([user("[calls=0] Still fine.")])
        assert reply.status == 200


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("after_events", [0, 3])
async def test_a_client_that_leaves_is_noticed_at_once(streamed: bool, after_events: int):
    """The turn is given up and its connection closed, whether an event had come or not."""
    async with stack(connections=NO_SPARES) as s:
        s.sim.faults.arm(Break(end=End.STALL, after_events=after_events))
        body = json.dumps(BODY | {"stream": streamed}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", s.port)
        writer.write(
            b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sk-agent\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        await eventually(lambda: s.sim.journal.turns)
        if streamed and after_events:
            await reader.readuntil(b"event: response.created\n")

        writer.close()

        await eventually(lambda: s.sim.journal.connections_open == 0)
        await eventually(lambda: s.facts("turn"))
        (turn,) = s.facts("turn")
        assert turn["status"] == 499
        assert (await post(s, json.dumps(BODY).encode())).status == 200


async def test_a_client_that_leaves_while_it_is_written_to_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
):
    """Whoever notices first that a client has left, its turn ends, and no error is logged."""
    finish = driver.Driver._finish

    async def finish_too_late(self: driver.Driver) -> web.StreamResponse:
        self._http.transport.abort()
        return await finish(self)

    async with stack(connections=NO_SPARES) as s:
        with monkeypatch.context() as patch:
            patch.setattr(driver.Driver, "_finish", finish_too_late)
            with pytest.raises(aiohttp.ClientError):
                await post(s, json.dumps(BODY | {"stream": True}).encode())
            await eventually(lambda: s.facts("turn"))
        assert s.facts("turn")[0]["status"] == 499
        assert (await post(s, json.dumps(BODY).encode())).status == 200


async def test_a_client_that_leaves_ends_a_passed_through_request():
    """The request upstream is given up when its client has left."""
    gone = asyncio.Event()

    async def script(_: Any, reader: Any, __: Any) -> None:
        await reader.read()
        gone.set()

    async with (
        Peer(script=script) as peer,
        serving(f"http://127.0.0.1:{peer.port}/v1") as (proxy, _),
    ):
        port = int(proxy.base_url.split(":")[2].split("/")[0])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await eventually(lambda: peer.requests)
        writer.close()
        async with asyncio.timeout(20):
            await gone.wait()


async def test_requests_on_one_connection_are_answered_in_order():
    """Pipelined requests, turns and others, get their own replies one after the other."""
    async with stack() as s:
        bodies = [json.dumps(BODY | {"input": f"[calls=0] {n}"}).encode() for n in range(3)]
        expected = [(await post(s, body, straight=True)).text for body in bodies]
        head = (
            "POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sk-agent\r\n"
        )
        sent = [f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body for body in bodies]
        reader, writer = await asyncio.open_connection("127.0.0.1", s.port)

        writer.write(b"".join(sent))
        got = [await read_message(reader) for _ in bodies]
        writer.close()

        assert [Got(each.status, {}, each.body).text for each in got] == expected


# --- Upstreams that are not there, or are us ------------------------------------------------------


async def test_an_unreachable_upstream_is_a_502(closed_port: int):
    """With no upstream at all, turns and other requests get a 502 in the API's error shape."""
    async with serving(f"http://127.0.0.1:{closed_port}/v1") as (proxy, log):
        body = json.dumps(BODY).encode()
        turn = await request("POST", f"{proxy.base_url}/responses", body)
        again = await request("POST", f"{proxy.base_url}/responses", body)
        other = await request("GET", f"{proxy.base_url}/models")

        for got in (turn, again, other):
            assert (got.status, got.error["code"]) == (502, "upstream_unreachable")
        reasons = [call.kwargs["reason"] for call in log.calls if call.args == ("turn",)]
        assert reasons == ["connect_failed", "cooling_down"]
        assert [c.kwargs["status"] for c in log.calls if c.args == ("turn",)] == [502, 502]


@pytest.mark.parametrize(("store", "status", "requests"), [(True, 502, 2), (False, 200, 3)])
async def test_what_was_left_to_http_is_not_run_twice(store: bool, status: int, requests: int):
    """Over a connection that went stale a turn is repeated only where that would go unnoticed."""
    body = json.dumps({**BODY, "conversation": "conv_1", "store": store}).encode()
    head = f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"

    async def script(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await reader.readexactly(int(request.get("Content-Length") or 0))
        if len(peer.requests) == 2:
            writer.close()
        else:
            writer.write(reply())

    async with (
        Peer(script=script) as peer,
        serving(f"http://127.0.0.1:{peer.port}/v1") as (proxy, _),
    ):
        port = int(proxy.base_url.split(":")[2].split("/")[0])
        assert (await talk(port, head.encode(), body)).status == 200
        got = await talk(port, head.encode(), body)
        assert (got.status, len(peer.requests)) == (status, requests)
        assert got.get("turnwire-reason") == (None if status == 502 else "conversation")


async def test_two_proxies_that_are_each_others_upstream_end_in_508(served_port: int):
    """A request that comes round is refused, and the client is told not to try again."""
    async with (
        serving(f"http://127.0.0.1:{served_port}/v1") as (first, _),
        serving(first.base_url, port=served_port),
    ):
        turn = await request("POST", f"{first.base_url}/responses", json.dumps(BODY).encode())
        other = await request("GET", f"{first.base_url}/models")

        for got in (turn, other):
            assert (got.status, got.error["code"]) == (508, "loop_detected")
            assert got.headers["x-should-retry"] == "false"


# --- The process ----------------------------------------------------------------------------------


class Process:
    """`python -m proxy serve` in a process of its own; `lines` are what it logged so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[bytes] = []
        self.base_url = self.admin_url = ""

    @property
    def stderr(self) -> str:
        """All that was written to standard error so far."""
        return b"".join(self.lines).decode()

    async def read_until(self, event: str) -> dict[str, Any]:
        """Read the log up to the first line of an event; return that."""
        assert self.process.stderr is not None
        async with asyncio.timeout(30):
            while line := await self.process.stderr.readline():
                self.lines.append(line)
                with contextlib.suppress(ValueError):
                    if (facts := json.loads(line)).get("event") == event:
                        return dict(facts)
        raise AssertionError(f"no {event!r} in:\n{self.stderr}")

    async def end(self) -> int:
        """Wait for the end of the process, and return its exit status."""
        async with asyncio.timeout(30):
            out, rest = await self.process.communicate()
        assert out == b""
        self.lines.append(rest)
        return await self.process.wait()


async def start(*arguments: str) -> Process:
    """Start `serve` with these arguments, without settings of this machine."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TURNWIRE_")}
    command = (sys.executable, "-m", "proxy", "serve", *arguments)
    pipe = asyncio.subprocess.PIPE
    return Process(
        await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe)
    )


@contextlib.asynccontextmanager
async def process(upstream: str, *arguments: str) -> AsyncIterator[Process]:
    """Run the proxy on free ports until the end of the block, if it has not ended before."""
    free = ("--upstream", upstream, "--port", "0", "--admin-port", "0", "--log-format", "json")
    running = await start(*free, *arguments)
    try:
        facts = await running.read_until("serving")
        running.base_url, running.admin_url = facts["base_url"], facts["admin_url"]
        yield running
    finally:
        if running.process.returncode is None:
            running.process.kill()
            await running.process.communicate()


async def test_sigterm_lets_the_stream_finish():
    """After SIGTERM nothing new is taken, what runs is finished, and the exit status is 0."""
    async with Simulator() as sim, process(sim.base_url) as running:
        sim.faults.arm(SlowStream(gap_ms=20))
        body = json.dumps(BODY | {"stream": True}).encode()
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{running.base_url}/responses", data=body, headers=AUTH) as reply,
        ):
            head = await reply.content.readuntil(b"\n\n")
            running.process.send_signal(signal.SIGTERM)
            await running.read_until("draining")

            ready = await request("GET", f"{running.admin_url}/readyz")
            live = await request("GET", f"{running.admin_url}/livez")
            with pytest.raises(aiohttp.ClientConnectionError):
                await request("GET", f"{running.base_url}/models")
            rest = await reply.read()

        assert (ready.status, live.status) == (503, 200)
        assert b"event: response.created" in head
        assert b"event: response.completed" in rest
        assert await running.end() == 0
        assert "Traceback" not in running.stderr


async def test_sigterm_with_nothing_to_do_ends_at_once():
    """Idle connections on either side do not hold the process up; SIGINT does the same."""
    for number in (signal.SIGTERM, signal.SIGINT):
        async with (
            Simulator() as sim,
            process(sim.base_url) as running,
            aiohttp.ClientSession() as session,
        ):
            async with session.post(
                f"{running.base_url}/responses", json=BODY, headers=AUTH
            ) as reply:
                assert reply.status == 200
            running.process.send_signal(number)

            assert await running.end() == 0
            assert "Traceback" not in running.stderr


async def test_a_second_signal_ends_at_once():
    """Whoever signals twice does not want to wait for the stream."""
    async with Simulator() as sim, process(sim.base_url) as running:
        sim.faults.arm(Break(end=End.STALL, after_events=2))
        body = json.dumps(BODY | {"stream": True}).encode()
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{running.base_url}/responses", data=body, headers=AUTH) as reply,
        ):
            await reply.content.readuntil(b"\n\n")
            running.process.send_signal(signal.SIGTERM)
            await running.read_until("draining")
            running.process.send_signal(signal.SIGTERM)

            assert await running.end() in (0, 130)
            assert "Traceback" not in running.stderr


async def test_a_notice_keeps_the_listener_open_while_it_is_not_ready():
    """Within `shutdown.notice_s` new requests are answered, each ending its connection."""
    async with Simulator() as sim, process(sim.base_url, "--shutdown-notice-s", "60") as running:
        before = await request("GET", f"{running.base_url}/models")
        running.process.send_signal(signal.SIGTERM)
        await running.read_until("draining")

        ready = await request("GET", f"{running.admin_url}/readyz")
        passed = await request("GET", f"{running.base_url}/models")
        body = json.dumps(BODY | {"stream": True}).encode()
        turn = await request("POST", f"{running.base_url}/responses", body)
        running.process.send_signal(signal.SIGTERM)

        assert (before.status, "connection" in before.headers) == (200, False)
        assert ready.status == 503
        assert (passed.status, passed.headers["connection"]) == (200, "close")
        assert (turn.status, turn.headers["connection"]) == (200, "close")
        assert b"event: response.completed" in turn.body
        assert await running.end() in (0, 130)
        assert "Traceback" not in running.stderr


async def test_a_second_signal_within_the_notice_ends_at_once():
    """Whoever signals twice waits neither for the notice nor for the turns that run."""
    async with Simulator() as sim, process(sim.base_url, "--shutdown-notice-s", "600") as running:
        sim.faults.arm(Break(end=End.STALL, after_events=2))
        body = json.dumps(BODY | {"stream": True}).encode()
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{running.base_url}/responses", data=body, headers=AUTH) as reply,
        ):
            await reply.content.readuntil(b"\n\n")
            running.process.send_signal(signal.SIGTERM)
            await running.read_until("draining")
            running.process.send_signal(signal.SIGTERM)

            assert await running.end() in (0, 130)
            assert "Traceback" not in running.stderr


@pytest.mark.parametrize("timeout_s", ["0.2", "0"])
async def test_the_drain_timeout_ends_what_does_not_end(timeout_s: str):
    """A stream that never ends is broken off when the time to drain is over, or there is none."""
    flags = ("--shutdown-drain-timeout-s", timeout_s)
    async with Simulator() as sim, process(sim.base_url, *flags) as p:
        sim.faults.arm(Break(end=End.STALL, after_events=2))
        body = json.dumps(BODY | {"stream": True}).encode()
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{p.base_url}/responses", data=body, headers=AUTH) as reply,
        ):
            await reply.content.readuntil(b"\n\n")
            p.process.send_signal(signal.SIGTERM)

            with pytest.raises(aiohttp.ClientPayloadError):
                await reply.read()
        assert await p.end() == 0
        assert "Traceback" not in p.stderr


@pytest.mark.parametrize("setting", ["--port", "--admin-port"])
async def test_a_port_in_use_is_one_sentence(setting: str, taken_port: int):
    """The process ends with a status that is not 0, and a sentence that names the setting."""
    port = str(taken_port)
    other = "--admin-port" if setting == "--port" else "--port"
    running = await start("--upstream", "http://127.0.0.1:9/v1", setting, port, other, "0")

    assert await running.end() != 0
    lines = running.stderr.strip().splitlines()
    assert len(lines) == 1
    assert port in lines[0]
    assert setting[2:].replace("-", "_") in lines[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--upstream", "ftp://x"), "upstream"),
        (("--upstream", "http://127.0.0.1:8787/v1"), "loop"),
        (("--port", "99999"), "port"),
        (("--websocket-max-age-s", "no"), "websocket.max_age_s"),
        (("--no-such-setting", "1"), "no-such-setting"),
        (("--config", "no-such-file.toml"), "no-such-file.toml"),
    ],
)
async def test_a_bad_configuration_is_one_sentence_and_64(arguments: tuple[str, ...], words: str):
    """Nothing is opened, and the sentence names what is wrong."""
    running = await start(*arguments)

    assert await running.end() == 64
    assert words in running.stderr
    assert len(running.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_a_lenient_http_parser_serves_nobody_else(host: str, monkeypatch: pytest.MonkeyPatch):
    """Without llhttp, which a proxy before us may rely on, only this machine is served."""
    monkeypatch.setenv("AIOHTTP_NO_EXTENSIONS", "1")
    free = ("--port", "0", "--admin-port", "0", "--log-format", "json", "--host", host)
    running = await start("--upstream", "http://127.0.0.1:9/v1", *free)
    if host == "0.0.0.0":
        assert await running.end() == 64
        assert "AIOHTTP_NO_EXTENSIONS" in running.stderr
        return
    await running.read_until("lenient_http_parser")
    await running.read_until("serving")
    running.process.send_signal(signal.SIGTERM)
    assert await running.end() == 0


CANARY_KEY = "sk-canary-3f9a7d"
CANARY = "chirp-71c5e0"


async def test_credentials_and_content_are_nowhere():
    """At debug level, in good times and bad: no key and no word of content in logs or metrics."""
    key = {"Authorization": f"Bearer {CANARY_KEY}", "Cookie": f"session={CANARY_KEY}"}
    body = {
        "model": "gpt-5.2",
        "input": [user(f"[calls=0] {CANARY}")],
        "instructions": CANARY,
        "store": False,
        "stream": True,
        "metadata": {"note": CANARY},
    }
    faults = [
        ErrorReply(status=500, message=CANARY, times=2),
        ErrorReply(status=400, message=CANARY),
        Break(after_events=3),
        Break(end=End.CLOSE, code=1008),
        ErrorReply(status=401, message=CANARY, code="invalid_api_key"),
    ]
    ours: list[bytes] = []
    async with Simulator() as sim, process(sim.base_url, "--log-level", "debug") as running:
        async with aiohttp.ClientSession(headers=key) as session:

            async def send(path: str, data: bytes, **headers: str) -> bytes:
                url = running.base_url + path
                async with session.post(url, data=data, headers=headers) as reply:
                    with contextlib.suppress(aiohttp.ClientPayloadError):
                        return await reply.read()
                    return b""

            raw = json.dumps(body).encode()
            for fault in (None, *faults):
                if fault is not None:
                    sim.faults.arm(fault)
                await send("/responses", raw)
            await send(f"/responses?{CANARY}", raw)
            await send(f"/{CANARY}", raw)
            broken = f'{{"input": "{CANARY}", "model": {CANARY}'.encode()
            await send("/responses", broken)
            ours.append(await send("/responses", raw, **{"Content-Encoding": "gzip"}))
            ours.append(await send("/responses", raw, **{"Content-Encoding": "rot13"}))
            ours.append(await send("/responses", raw, Host=f"{CANARY}.example"))
            ours.append(await send("/responses", raw, Origin=f"http://{CANARY}.example"))
        metrics = (await request("GET", f"{running.admin_url}/metrics")).body
        running.process.send_signal(signal.SIGTERM)
        assert await running.end() == 0

    for text in (running.stderr, metrics.decode(), *map(bytes.decode, ours)):
        assert not re.search(f"{CANARY}|{CANARY_KEY}", text)
    assert "Traceback" not in running.stderr
    turns = [json.loads(line) for line in running.stderr.splitlines() if '"event": "turn"' in line]
    assert len(turns) == 7
    assert {turn["principal"] for turn in turns} == {turns[0]["principal"]}
    assert re.fullmatch("[0-9a-f]{8}", turns[0]["principal"])


async def test_raw_requests_that_are_no_http_are_refused_quietly():
    """Garbage and overlong headers are answered 4xx, and the next connection works."""
    async with stack(tolerates=["Error handling request"]) as s:
        garbage = await talk(s.port, b"\x16\x03\x01\x00garbage\r\n\r\n")
        long = await talk(
            s.port,
            b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 70_000 + b"\r\n\r\n",
        )

        assert garbage.status == 400
        assert 400 <= long.status < 500
        assert not len(s.sim.journal)
        answer = await talk(s.port, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answer.status == 401
