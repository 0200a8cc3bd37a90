"""
The proxies that Turnwire is measured against, and one that only receives.

    python -m proxy.bench.controls WAY ORIGIN

prints the port it listens on and serves until it is ended. The ways:

    plain     a reverse proxy HTTP to HTTP on aiohttp: body read whole, reply passed on in the
              pieces in which it arrives. What one writes when no more than a relay is needed.
    naive     a delta proxy as one writes it first: the whole body through `json.loads`, compared
              with the last history by `==`, one `recv`, one `json.loads` and one write an event.
    receive   reads the body and answers a fixed reply: what receiving costs by itself.

nginx is the fourth control, where it is installed; `nginx_configuration` is what it runs with.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web
from websockets.asyncio.client import connect

from proxy.bench.bodies import make_templates

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from websockets.asyncio.client import ClientConnection

_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
_MAX_BODY_BYTES = 64 * 1024 * 1024
_TERMINALS = frozenset({"response.completed", "response.failed", "response.incomplete", "error"})


class Plain:
    """The plain reverse proxy."""

    def __init__(self, origin: str) -> None:
        self._url = origin
        self._session = ClientSession(
            connector=TCPConnector(limit=0), auto_decompress=False, timeout=ClientTimeout()
        )

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Relay one request."""
        body = await request.read()
        headers = {"Authorization": request.headers.get("Authorization", "")}
        async with self._session.post(self._url + request.path, data=body, headers=headers) as got:
            response = web.StreamResponse(status=got.status, headers=_HEADERS)
            await response.prepare(request)
            async for part in got.content.iter_any():
                await response.write(part)
            await response.write_eof()
            return response


@dataclass(slots=True)
class _Conversation:
    socket: ClientConnection
    items: list[Any] = field(default_factory=list)
    response_id: str | None = None


class Naive:
    """The naive delta proxy."""

    def __init__(self, origin: str) -> None:
        self._url = f"ws{origin.removeprefix('http')}/v1/responses"
        self._conversations: dict[tuple[str, str], _Conversation] = {}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Play one turn over the conversation's WebSocket."""
        body = json.loads(await request.read())
        key = (request.headers.get("Authorization", ""), json.dumps(body["input"][0]))
        conversation = self._conversations.get(key)
        if conversation is None:
            socket = await connect(self._url, max_size=None, proxy=None)
            conversation = self._conversations[key] = _Conversation(socket)
        known, items = conversation.items, body["input"]
        message: dict[str, Any] = {"type": "response.create"}
        if conversation.response_id and items[: len(known)] == known:
            message["previous_response_id"] = conversation.response_id
            items = items[len(known) :]
        message |= body | {"input": items}
        await conversation.socket.send(json.dumps(message))
        response = web.StreamResponse(headers=_HEADERS)
        await response.prepare(request)
        conversation.items = body["input"] + await self._relay(conversation, response)
        await response.write_eof()
        return response

    async def _relay(
        self, conversation: _Conversation, response: web.StreamResponse
    ) -> Sequence[Any]:
        while True:
            event = json.loads(await conversation.socket.recv())
            text = f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
            await response.write(text.encode())
            if event["type"] in _TERMINALS:
                conversation.response_id = event["response"]["id"]
                output: Sequence[Any] = event["response"]["output"]
                return output


class Receive:
    """Reads bodies, and answers all with the same reply."""

    def __init__(self) -> None:
        templates = make_templates().splitlines()
        events = []
        for number, index in enumerate((0, 2, 3)):
            text = templates[index].replace(b"2000000000", b"%d" % (2_000_000_000 + number), 1)
            name = json.loads(text)["type"].encode()
            events.append(b"event: %b\ndata: %b\n\n" % (name, text))
        self._reply = b"".join(events)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        await request.read()
        response = web.StreamResponse(headers=_HEADERS)
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write_eof(self._reply)
        return response


def nginx_configuration(folder: Path, port: int, origin: str, authority: Path | None = None) -> str:
    """Return a configuration for one nginx process that relays streams as they come."""
    scheme, _, address = origin.partition("://")
    trust = f"proxy_ssl_verify on; proxy_ssl_trusted_certificate {authority};" if authority else ""
    scratch = "".join(
        f"{name}_temp_path {folder}/{name}; "
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return f"""\
master_process off; daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.log warn;
events {{ worker_connections 4096; }}
http {{
  {scratch}
  access_log off; tcp_nodelay on; keepalive_requests 1000000;
  client_max_body_size 64m; client_body_buffer_size 16m;
  upstream bench {{
    server {address}; keepalive 200; keepalive_requests 1000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=1024;
    location / {{
      proxy_pass {scheme}://bench; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_request_buffering off;
      proxy_ssl_name localhost; {trust}
    }}
  }}
}}
"""


async def serve(handle: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> None:
    """Serve until cancelled; the port is printed once it is open."""
    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app.router.add_post("/v1/responses", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    sys.stdout.write(f"{runner.addresses[0][1]}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


async def _main(way: str, origin: str) -> None:
    match way:
        case "plain":
            await serve(Plain(origin).handle)
        case "naive":
            await serve(Naive(origin).handle)
        case _:
            await serve(Receive().handle)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return uvloop's event loop if it is installed, else asyncio's."""
    with contextlib.suppress(ImportError):
        import uvloop  # noqa: PLC0415  it does not exist for every platform

        return uvloop.new_event_loop
    return asyncio.new_event_loop


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=loop_factory()) as r:
        r.run(_main(sys.argv[1], sys.argv[2]))
