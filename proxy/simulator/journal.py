"""
What the witness saw, for tests: one record a request, in order of arrival.

Records keep the raw body and the reconstructed context until their bytes exceed a budget; then
the oldest lose both and keep the rest.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from proxy.simulator.state import Held
    from proxy.simulator.validate import Transport
    from proxy.simulator.wire import Item, Json


def principal_of(headers: Mapping[str, str]) -> str:
    """A short hash of the credentials in a request's headers; empty without any."""
    credentials = headers.get("Authorization") or headers.get("api-key")
    return hashlib.sha256(credentials.encode()).hexdigest()[:16] if credentials else ""


@dataclass(slots=True)
class Seen:
    """
    One request. `connection` numbers WebSocket connections (1, 2, ...) and is 0 on HTTP.

    `status` is 0 until the outcome is known, then an HTTP status, that of an error frame
    included. `foreign` marks an attempt to continue another principal's response.
    """

    transport: Transport
    connection: int
    principal: str
    path: str
    headers: Mapping[str, str]
    request_bytes: int
    raw: bytes | None
    method: str = "POST"
    previous_response_id: str | None = None
    held: Held | None = None
    given: tuple[Item, ...] = ()
    digest: str = ""
    response_id: str | None = None
    status: int = 0
    foreign: bool = False
    finished: bool = False

    @property
    def is_turn(self) -> bool:
        """Whether this asked for a response to be generated."""
        return self.method == "POST" and self.path.endswith("/responses")

    @property
    def context(self) -> list[Item]:
        """The full list of items that the model saw, without this turn's answer."""
        before = self.held.items() if self.held is not None else []
        return [*before, *self.given]

    def summary(self) -> dict[str, Json]:
        """The record without bodies, headers or items, as JSON."""
        names = ("connection", "principal", "method", "path", "request_bytes", "digest", "status")
        return {
            "transport": self.transport.value,
            **{name: getattr(self, name) for name in names},
            "previous_response_id": self.previous_response_id,
            "response_id": self.response_id,
            "foreign": self.foreign,
            "finished": self.finished,
            "items": len(self.context),
        }


@dataclass(slots=True)
class Journal:
    """All records, and counters that outlive their bodies. Iterates over the records."""

    max_bytes: int = 256 * 1024 * 1024
    records: list[Seen] = field(default_factory=list)
    bytes_by_transport: Counter[str] = field(default_factory=Counter)
    turns_by_transport: Counter[str] = field(default_factory=Counter)
    connections_opened: int = 0
    connections_open: int = 0
    upgrades_refused: int = 0
    _kept_bytes: int = 0
    _first_kept: int = 0

    def __iter__(self) -> Iterator[Seen]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Seen:
        return self.records[index]

    @property
    def turns(self) -> list[Seen]:
        """The records of turns: requests to generate a response, on either transport."""
        return [seen for seen in self.records if seen.is_turn]

    def add(self, seen: Seen) -> Seen:
        """Record a request on arrival."""
        self.records.append(seen)
        self.bytes_by_transport[seen.transport] += seen.request_bytes
        if seen.is_turn:
            self.turns_by_transport[seen.transport] += 1
        self._kept_bytes += seen.request_bytes
        while self._kept_bytes > self.max_bytes and self._first_kept < len(self.records):
            oldest = self.records[self._first_kept]
            oldest.raw, oldest.held, oldest.given = None, None, ()
            self._kept_bytes -= oldest.request_bytes
            self._first_kept += 1
        return seen

    def take(self) -> list[Seen]:
        """Hand over all records and forget them; the counts stay."""
        taken, self.records = self.records, []
        self._kept_bytes = self._first_kept = 0
        return taken

    def clear(self) -> None:
        """Forget all records and counts; open connections stay counted as open."""
        self.records.clear()
        self.bytes_by_transport.clear()
        self.turns_by_transport.clear()
        self.connections_opened = self.upgrades_refused = 0
        self._kept_bytes = self._first_kept = 0

    def counters(self) -> dict[str, Json]:
        """The counts as JSON."""
        return {
            "bytes": dict(self.bytes_by_transport),
            "turns": dict(self.turns_by_transport),
            "connections_opened": self.connections_opened,
            "connections_open": self.connections_open,
            "upgrades_refused": self.upgrades_refused,
        }
