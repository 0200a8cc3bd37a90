"""
The page of the admin listener, and the one address of its data.

`/live` answers with a snapshot of `Live` as JSON; to whoever asks for `text/event-stream` with a
snapshot and then, once a second, with what has changed. The page and `turnwire top` both read it.

The page is files of ours, and uPlot for the charts: nothing is loaded from elsewhere, and a browser
is told to refuse it (Content-Security-Policy). All of it is read-only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from importlib import resources
from typing import TYPE_CHECKING, Final

from aiohttp import web

from proxy.observe.live import reason_texts

if TYPE_CHECKING:
    from proxy.observe.live import Live

MAX_VIEWERS: Final = 16
UPDATE_S: Final = 1.0

_ASSETS: Final = {
    "": ("index.html", "text/html"),
    "page.css": ("page.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
    "uplot.css": ("uPlot.min.css", "text/css"),
    "uplot.js": ("uPlot.iife.min.js", "text/javascript"),
}
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
        " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def add_page(app: web.Application, live: Live) -> None:
    """Add `/`, its files and `/live` to an application."""
    viewers = 0
    ending = asyncio.Event()

    async def end(_app: web.Application) -> None:
        ending.set()

    async def show_asset(request: web.Request) -> web.StreamResponse:
        name, content_type = _ASSETS[request.path.removeprefix("/")]
        body = resources.files("proxy.observe").joinpath("assets", name).read_bytes()
        return web.Response(body=body, content_type=content_type, charset="utf-8", headers=_HEADERS)

    async def show_live(request: web.Request) -> web.StreamResponse:
        nonlocal viewers
        if "text/event-stream" not in request.headers.get("Accept", ""):
            return web.Response(
                text=_written(live.snapshot()), content_type="application/json", headers=_HEADERS
            )
        if viewers >= MAX_VIEWERS:
            return web.Response(status=503, text="too many viewers\n", headers=_HEADERS)
        viewers += 1
        try:
            return await _stream(request, live, ending)
        finally:
            viewers -= 1

    for path in _ASSETS:
        app.router.add_get(f"/{path}", show_asset)
    app.router.add_get("/live", show_live)
    app.on_shutdown.append(end)


async def _stream(request: web.Request, live: Live, ending: asyncio.Event) -> web.StreamResponse:
    """Send a snapshot, and then what has changed, until the viewer leaves or we do."""
    response = web.StreamResponse(headers=_HEADERS | {"Content-Type": "text/event-stream"})
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):  # the viewer has left
        await _keep_telling(response, live, ending)
    return response


async def _keep_telling(response: web.StreamResponse, live: Live, ending: asyncio.Event) -> None:
    since = 0.0
    while not ending.is_set():
        told = live.snapshot(since=since)
        if not since:
            told["reasons"] = reason_texts()
        name = "update" if since else "snapshot"
        await response.write(f"event: {name}\ndata: {_written(told)}\n\n".encode())
        since = float(str(told["now"]))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ending.wait(), UPDATE_S)


def _written(told: dict[str, object]) -> str:
    return json.dumps(told, separators=(",", ":"))
