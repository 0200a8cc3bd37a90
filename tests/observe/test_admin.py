"""The admin listener: probes that tell the state, metrics, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp import web

from proxy.observe.admin import Health, State, build_admin_app
from proxy.observe.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Admin:
    """A running admin listener, and a client of it."""

    def __init__(self, base: str, health: Health, session: aiohttp.ClientSession) -> None:
        self.health = health
        self._base = base
        self._session = session

    async def ask(self, path: str, method: str = "GET") -> tuple[int, str, aiohttp.ClientResponse]:
        """Give the status, the body and the rest of a reply."""
        async with self._session.request(method, self._base + path) as response:
            return response.status, await response.text(), response


@pytest.fixture
async def admin() -> AsyncIterator[Admin]:
    """An admin listener of a process that is starting."""
    health = Health()
    runner = web.AppRunner(build_admin_app(Metrics(), health), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    async with aiohttp.ClientSession() as session:
        yield Admin(f"http://127.0.0.1:{port}", health, session)
    await runner.cleanup()


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(
    ("state", "statuses"),
    [
        (State.STARTING, {"/livez": 200, "/readyz": 503, "/healthz": 503, "/startupz": 503}),
        (State.READY, {"/livez": 200, "/readyz": 200, "/healthz": 200, "/startupz": 200}),
        (State.DRAINING, {"/livez": 200, "/readyz": 503, "/healthz": 503, "/startupz": 200}),
    ],
)
async def test_probes_tell_the_state(
    admin: Admin, state: State, statuses: dict[str, int], method: str
) -> None:
    """Alive is whoever answers; ready is whoever takes work; started stays true."""
    admin.health.state = state
    for path, status in statuses.items():
        assert (await admin.ask(path, method))[0] == status


async def test_verbose_probes_name_their_checks(admin: Admin) -> None:
    """A person who asks `?verbose` sees which check said what."""
    _, text, _ = await admin.ask("/readyz?verbose")
    assert text == "[-] ready: starting\nstarting\n"
    admin.health.state = State.READY
    assert (await admin.ask("/readyz?verbose"))[1] == "[+] ready: ready\nok\n"
    assert (await admin.ask("/readyz"))[1] == "ok"


async def test_metrics_are_served(admin: Admin) -> None:
    """A scrape gets the text exposition with its content type."""
    status, text, response = await admin.ask("/metrics")
    assert status == 200
    assert response.headers["Content-Type"].startswith("text/plain; version=")
    assert "turnwire_turns_in_flight 0.0" in text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("GET", "/v1/responses", 404), ("POST", "/metrics", 405)],
)
async def test_everything_else_is_refused_in_json(
    admin: Admin, method: str, path: str, status: int
) -> None:
    """Unknown paths and methods get a JSON error, and reveal nothing."""
    got, _, response = await admin.ask(path, method)
    assert got == status
    assert response.content_type == "application/json"


def test_health_has_one_attribute() -> None:
    """A misspelt attribute must not look like a change of state."""
    with pytest.raises(AttributeError):
        Health().ready = State.READY  # type: ignore[attr-defined]
