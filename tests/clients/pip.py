"""The rows of clients that are Python packages."""

from __future__ import annotations

from typing import Any

from clients.rows import Client, Ecosystem, NotRun, Row, Same


def _client(name: str, title: str, *packages: str, python: tuple[int, int] = (3, 11)) -> Client:
    return Client(name, title, packages, Ecosystem.PIP, python)


def _row(
    name: str, client: Client, variant: str, driver: str, environment: str = "", **more: Any
) -> Row:
    """A row; the environment is written as `NAME=value NAME=value`."""
    pairs = dict(pair.split("=", 1) for pair in environment.split())
    options = {"same": Same.ALL, **more}
    return Row(name, client, variant, f"python/{driver}", pairs, **options)


OPENAI = _client("openai-python", "openai (Python)", "openai==3.57.0")

_OPENAI_ROWS = tuple(
    _row(f"openai-python{suffix}", OPENAI, variant, "openai_python.py", environment)
    for suffix, variant, environment in (
        ("-stream", "hand loop, streamed, store:false", "MODE=stream STATELESS=1"),
        ("-create", "hand loop, not streamed", "MODE=create"),
        ("-items", "items kept from the stream", "MODE=items STATELESS=1"),
        ("-helper", "`responses.stream()` helper", "MODE=helper STATELESS=1"),
        ("-parse", "`responses.parse()` helper", "MODE=parse"),
        ("-dump", "history as `model_dump()`", "MODE=dump STATELESS=1"),
        ("-async", "asynchronous client", "MODE=async"),
    )
)

ROWS: tuple[Row, ...] = _OPENAI_ROWS

NOT_RUN: tuple[NotRun, ...] = ()
