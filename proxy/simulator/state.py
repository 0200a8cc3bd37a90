"""
What the service remembers.

Two memories, as documented (protocol section 2.6): a connection keeps its one latest response,
whatever `store` says; storage keeps the responses of requests with `store` not false, for any
connection and for HTTP. Both answer only to the principal that made the response.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.simulator.wire import ApiError, Item, Json, previous_not_found

if TYPE_CHECKING:
    from proxy.simulator.meaning import Trace
    from proxy.simulator.validate import Ledger


@dataclass(frozen=True, slots=True)
class Held:
    """
    A response with the context that led to it: its own items, and its parent's.

    `trace` and `ledger` cover all of `items()`, so that a continuation costs its new items only.
    """

    response_id: str
    principal: str
    parent: Held | None
    given: tuple[Item, ...]
    produced: tuple[Item, ...]
    trace: Trace
    ledger: Ledger
    response: dict[str, Json]
    size_bytes: int

    def items(self) -> list[Item]:
        """All items of the context in order, the response's own output included."""
        links: list[Held] = []
        link: Held | None = self
        while link is not None:
            links.append(link)
            link = link.parent
        return [item for each in reversed(links) for item in (*each.given, *each.produced)]


@dataclass(slots=True)
class ConnectionMemory:
    """What one WebSocket connection remembers. `latest` is None once evicted."""

    number: int
    principal: str
    opened_at: float
    latest: Held | None = None

    def evict(self, response_id: Json) -> None:
        """Forget the latest response if it is this one: its continuation was refused."""
        if self.latest is not None and self.latest.response_id == response_id:
            self.latest = None


@dataclass(slots=True)
class Storage:
    """Stored responses and items of all principals, oldest dropped beyond a budget in bytes."""

    max_bytes: int = 256 * 1024 * 1024
    size_bytes: int = 0
    _responses: OrderedDict[str, Held] = field(default_factory=OrderedDict)
    _items: dict[tuple[str, str], Item] = field(default_factory=dict)
    _conversations: dict[tuple[str, str], Held] = field(default_factory=dict)
    _owners: dict[str, str] = field(default_factory=dict)

    def keep(self, held: Held) -> None:
        """Store a response, and its items for references to them."""
        self._responses[held.response_id] = held
        self.size_bytes += held.size_bytes
        for item in (*held.given, *held.produced):
            if item.get("id"):
                self._items[held.principal, str(item["id"])] = item
        while self.size_bytes > self.max_bytes and len(self._responses) > 1:
            self.delete(next(iter(self._responses)))

    def delete(self, response_id: str) -> None:
        """Drop a response and what it alone has stored."""
        held = self._responses.pop(response_id)
        self.size_bytes -= held.size_bytes
        for item in held.produced:
            self._items.pop((held.principal, str(item.get("id"))), None)

    def find(self, response_id: str, principal: str) -> Held | None:
        """The stored response if it is this principal's."""
        held = self._responses.get(response_id)
        return held if held is not None and held.principal == principal else None

    def note_owner(self, held: Held) -> None:
        """Remember whose response this is, stored or not."""
        self._owners[held.response_id] = held.principal

    def is_foreign(self, response_id: str, principal: str) -> bool:
        """Whether the id is one of another principal's responses."""
        return self._owners.get(response_id, principal) != principal

    def previous(
        self, response_id: Json, principal: str, connection: ConnectionMemory | None
    ) -> Held:
        """The response to continue; ApiError `previous_response_not_found` otherwise."""
        if connection is not None and connection.latest is not None:
            latest = connection.latest
            if latest.response_id == response_id and latest.principal == principal:
                return latest
        held = self.find(str(response_id), principal)
        if held is None:
            raise previous_not_found(str(response_id))
        return held

    def resolved(self, item: Item, principal: str) -> Item:
        """The stored item that an `item_reference` means; ApiError 400 otherwise."""
        found = self._items.get((principal, str(item["id"])))
        if found is None:
            message = (
                f"Item with id '{item['id']}' not found. Items are not persisted when `store` is "
                "set to false. Try again with `store` set to true, or remove this item from your "
                "input."
            )
            raise ApiError(400, message, param="input")
        return found

    def conversation(self, identity: str, principal: str) -> Held | None:
        """The last response of a conversation; None while it has none."""
        return self._conversations.get((principal, identity))

    def advance_conversation(self, identity: str, held: Held) -> None:
        """Make this response the conversation's last."""
        self._conversations[held.principal, identity] = held
