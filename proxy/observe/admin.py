"""
The admin listener: metrics and health, on a port of their own.

Health follows the habits of Kubernetes: alive is whoever answers, ready is whoever takes new
work. Neither looks at the upstream or does any I/O: an outage there is told turn by turn, and a
probe that waits for something would only make restarts out of slowness.
"""

from __future__ import annotations

import enum
import json
from typing import TYPE_CHECKING, Final

from aiohttp import web

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler

    from proxy.observe.metrics import Metrics


class State(enum.StrEnum):
    """Where the process is in its life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Health:
    """The state of the process: written by whoever runs it, read by the probes."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = State.STARTING

    @property
    def is_ready(self) -> bool:
        """Whether new work is taken."""
        return self.state is State.READY

    @property
    def has_started(self) -> bool:
        """Whether the start is over; stays true while draining."""
        return self.state is not State.STARTING


_PLAIN: Final = "text/plain"
_HEADERS: Final = {"Cache-Control": "no-store"}


def build_admin_app(metrics: Metrics, health: Health) -> web.Application:
    """
    Make the application with /metrics, /livez, /readyz, /healthz (the same) and /startupz.

    The probes answer 200 or 503 with one word, or with a line for each check if asked with
    `?verbose`. Everything else is a 404 in JSON.
    """

    async def show_metrics(_request: web.Request) -> web.Response:
        body, content_type = metrics.render()
        return web.Response(body=body, headers=_HEADERS | {"Content-Type": content_type})

    async def live(request: web.Request) -> web.Response:
        return _answer(request, "live", ok=True, state=health.state)

    async def ready(request: web.Request) -> web.Response:
        return _answer(request, "ready", ok=health.is_ready, state=health.state)

    async def started(request: web.Request) -> web.Response:
        return _answer(request, "started", ok=health.has_started, state=health.state)

    app = web.Application(middlewares=[_not_found])
    app.router.add_get("/metrics", show_metrics)
    app.router.add_get("/livez", live)
    app.router.add_get("/readyz", ready)
    app.router.add_get("/healthz", ready)
    app.router.add_get("/startupz", started)
    return app


def _answer(request: web.Request, check: str, *, ok: bool, state: State) -> web.Response:
    text = "ok" if ok else str(state)
    if "verbose" in request.query:
        text = f"[{'+' if ok else '-'}] {check}: {state}\n{text}\n"
    return web.Response(status=200 if ok else 503, text=text, content_type=_PLAIN, headers=_HEADERS)


@web.middleware
async def _not_found(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer unknown paths and methods in JSON."""
    try:
        return await handler(request)
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return web.Response(
            status=error.status,
            body=json.dumps({"error": {"message": error.reason, "code": error.status}}).encode(),
            content_type="application/json",
            headers=_HEADERS | allow,
        )
