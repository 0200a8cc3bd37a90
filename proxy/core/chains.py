"""
Which chains exist: the heads of every principal, found by the history they answer.

Two indexes lead to a head. `PrefixIndex` finds, from the bytes of a body alone, the longest
beginning that was seen before, with the key of the history inside it. From there on histories are
keyed item by item in canonical form, so that a client which spells old items anew is followed as
well; `heads_at` gives the heads that answered exactly that history. There may be several: retries,
forks and parallel runs of one agent share theirs until the first answer.

The store is bounded in bytes and in time, and forgets the oldest head first. A forgotten chain
costs one full send. Every key is scoped by its principal.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cachetools import TTLCache

from proxy.core.prefix import PrefixIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from proxy.core.history import Head
    from proxy.core.prefix import Address
    from proxy.core.request import Frame, Prefix

PREFIX_BYTES = 700

# How far back a chain can be looked up from the bytes of a body alone. A retry needs its last two
# heads; what goes back further is found item by item, and is a full send mostly.
LINEAGE_KEPT = 4


@dataclass(eq=False, slots=True)
class _Entry:
    serial: int
    head: Head
    prefix: Prefix | None
    address: Address | None
    parent: _Entry | None
    size_bytes: int
    is_held: bool = True


class _Entries(TTLCache[int, _Entry]):
    """A cache that tells what it evicts, so that the indexes can let go of it too."""

    def __init__(
        self,
        max_bytes: int,
        ttl_s: float,
        timer: Callable[[], float],
        evicted: Callable[[_Entry], None],
    ) -> None:
        super().__init__(max_bytes, ttl_s, timer=timer, getsizeof=lambda entry: entry.size_bytes)
        self._evicted = evicted

    def popitem(self) -> tuple[int, _Entry]:
        key, entry = super().popitem()
        self._evicted(entry)
        return key, entry

    def expire(self, time: float | None = None) -> list[tuple[int, _Entry]]:
        expired = list(super().expire(time) or ())
        for _, entry in expired:
            self._evicted(entry)
        return expired


class ChainStore:
    """
    All heads, bounded by `max_bytes` and `ttl_s`.

    `seed` (64 bits) is secret and random per process; `timer` returns monotonic seconds. Not
    thread-safe: one event loop owns it.
    """

    def __init__(
        self, *, seed: int, max_bytes: int, ttl_s: float, timer: Callable[[], float]
    ) -> None:
        self._prefixes = PrefixIndex(seed)
        self._entries = _Entries(max_bytes, ttl_s, timer, self._let_go)
        self._by_history: dict[bytes, list[_Entry]] = {}
        self._by_response: dict[tuple[str, str], _Entry] = {}
        self._frame_users: Counter[int] = Counter()
        self._frame_bytes = 0
        self._max_bytes = max_bytes
        self._serial = 0
        self.ids_are_unique = True

    def __len__(self) -> int:
        """How many heads are held."""
        return len(self._entries)

    @property
    def size_bytes(self) -> int:
        """How much memory the heads hold, about."""
        return int(self._entries.currsize) + self._frame_bytes

    def prefixes(self, principal: str, body: bytes) -> list[Prefix]:
        """Return the known beginnings of a body, longest first."""
        return self._prefixes.find(principal, body)

    def heads_at(self, history: bytes) -> Iterator[Head]:
        """Yield the heads that answered exactly this history, newest first."""
        self._entries.expire()
        for entry in reversed(self._by_history.get(history, ())):
            yield entry.head

    def head_of(self, principal: str, response_id: str) -> Head | None:
        """Return the head with this response id, if the principal has one."""
        self._entries.expire()
        entry = self._by_response.get((principal, response_id))
        return None if entry is None else entry.head

    def record(
        self, head: Head, body: bytes, prefix: Prefix | None, parent: Head | None = None
    ) -> None:
        """
        Remember a head, and `prefix`, the beginning of `body` by which to find its history again.

        `parent` is the head that it continued. Only the last few heads of a chain are kept, except
        for those that upstream stores and may be asked to go back to.

        Some upstreams give every response of a connection the same id. Such an id names the
        latest one only, so the older head is forgotten, and `ids_are_unique` turns False: from
        then on an id must not be used away from its connection.
        """
        self.outdate(head.principal, head.response_id)
        entry = self._make_entry(head, body, prefix, parent)
        try:
            self._entries[entry.serial] = entry
        except ValueError:  # larger than the whole store
            self._let_go(entry)
            return
        self._by_history.setdefault(head.history, []).append(entry)
        self._by_response[head.principal, head.response_id] = entry
        self._thin_out(entry)
        while self.size_bytes > self._max_bytes:
            self._entries.popitem()

    def outdate(self, principal: str, response_id: str) -> None:
        """Forget the head that had this id until another response of the principal took it."""
        if (older := self._by_response.get((principal, response_id))) is not None:
            self.ids_are_unique = False
            self.forget(older.head)

    def forget(self, head: Head) -> None:
        """Forget a head that can't be continued any more. Forgetting twice is no error."""
        entry = self._by_response.get((head.principal, head.response_id))
        if entry is None or entry.head is not head:
            return
        if entry.serial in self._entries:
            del self._entries[entry.serial]
        self._let_go(entry)

    def _make_entry(
        self, head: Head, body: bytes, prefix: Prefix | None, parent: Head | None
    ) -> _Entry:
        self._serial += 1
        if parent is not None and parent.settings == head.settings:
            head.settings = parent.settings  # one mapping for the whole chain
        address = None
        if prefix is not None:
            address = self._prefixes.put(head.principal, body, prefix)
            self._use_frame(prefix.frame)
        older = self._by_response.get((parent.principal, parent.response_id)) if parent else None
        size = head.size_bytes + PREFIX_BYTES
        return _Entry(self._serial, head, prefix, address, older, size)

    def _use_frame(self, frame: Frame) -> None:
        # What all turns of a chain have in common is counted once, until the last one goes.
        if not self._frame_users[id(frame)]:
            self._frame_bytes += frame.size_bytes
        self._frame_users[id(frame)] += 1

    def _leave_frame(self, frame: Frame) -> None:
        self._frame_users[id(frame)] -= 1
        if not self._frame_users[id(frame)]:
            del self._frame_users[id(frame)]
            self._frame_bytes -= frame.size_bytes

    def _thin_out(self, entry: _Entry) -> None:
        """Let the ancestor go that is `LINEAGE_KEPT` turns older."""
        ancestor: _Entry | None = entry
        for _ in range(LINEAGE_KEPT):
            ancestor = ancestor and ancestor.parent
        if ancestor is None:
            return
        ancestor.parent = None
        self._drop_prefix(ancestor)
        if not ancestor.head.stored:
            self.forget(ancestor.head)

    def _drop_prefix(self, entry: _Entry) -> None:
        if entry.prefix is None:
            return
        if entry.address is not None:
            self._prefixes.drop(entry.address, entry.prefix)
        self._leave_frame(entry.prefix.frame)
        entry.prefix = entry.address = None

    def _let_go(self, entry: _Entry) -> None:
        if not entry.is_held:
            return  # it was forgotten when its time was up, and expires only now
        entry.is_held = False
        self._drop_prefix(entry)
        same = self._by_history.get(entry.head.history, [])
        if entry in same:
            same.remove(entry)
        if not same:
            self._by_history.pop(entry.head.history, None)
        address = (entry.head.principal, entry.head.response_id)
        if self._by_response.get(address) is entry:
            del self._by_response[address]
