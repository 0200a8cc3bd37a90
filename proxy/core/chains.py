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

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.core.prefix import PrefixIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from proxy.core.history import Head
    from proxy.core.prefix import Address, Walk
    from proxy.core.request import Frame, Prefix

PREFIX_BYTES = 700

# How far back a chain can be looked up from the bytes of a body alone. A retry needs its last two
# heads; what goes back further is found item by item, and is a full send mostly.
LINEAGE_KEPT = 4


@dataclass(eq=False, slots=True)
class _Entry:
    head: Head
    prefix: Prefix | None
    address: Address | None
    parent: _Entry | None
    size_bytes: int
    expires_at: float
    is_held: bool = True


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
        # The oldest first, and so the first to expire: all live equally long.
        self._entries: OrderedDict[_Entry, None] = OrderedDict()
        self._entry_bytes = 0
        self._by_history: dict[bytes, list[_Entry]] = {}
        self._by_response: dict[tuple[str, str], _Entry] = {}
        self._frame_users: Counter[int] = Counter()
        self._frame_bytes = 0
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._timer = timer
        self.ids_are_unique = True

    def __len__(self) -> int:
        """How many heads are held."""
        self._expire()
        return len(self._entries)

    @property
    def size_bytes(self) -> int:
        """How much memory the heads hold, about."""
        self._expire()
        return self._entry_bytes + self._frame_bytes

    def walk(self, body: bytes, endpoint: str = "") -> Walk:
        """
        Return what `prefixes` and `record` of this body should share, to save work.

        Bodies of one `endpoint` are never found from another, however alike.
        """
        self._expire()
        return self._prefixes.walk(body, endpoint)

    def prefixes(self, principal: str, walk: Walk) -> Iterator[Prefix]:
        """Yield the known beginnings of the body that `walk` is of, longest first."""
        return self._prefixes.search(principal, walk)

    def heads_at(self, history: bytes) -> Iterator[Head]:
        """Yield the heads that answered exactly this history, newest first."""
        for entry in reversed(self._by_history.get(history, ())):
            yield entry.head

    def head_of(self, principal: str, response_id: str) -> Head | None:
        """Return the head with this response id, if the principal has one."""
        self._expire()
        entry = self._by_response.get((principal, response_id))
        return None if entry is None else entry.head

    def record(
        self,
        head: Head,
        body: bytes,
        prefix: Prefix | None,
        parent: Head | None = None,
        walk: Walk | None = None,
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
        self._expire()
        entry = self._make_entry(head, body, prefix, parent, walk)
        self._entries[entry] = None
        self._entry_bytes += entry.size_bytes
        self._by_history.setdefault(head.history, []).append(entry)
        self._by_response[head.principal, head.response_id] = entry
        self._thin_out(entry)
        if entry.size_bytes > self._max_bytes:
            self._let_go(entry)
        while self._entries and self._entry_bytes + self._frame_bytes > self._max_bytes:
            self._let_go(next(iter(self._entries)))

    def _expire(self) -> None:
        now = self._timer()
        while self._entries and (oldest := next(iter(self._entries))).expires_at <= now:
            self._let_go(oldest)

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
        self._let_go(entry)

    def _make_entry(
        self,
        head: Head,
        body: bytes,
        prefix: Prefix | None,
        parent: Head | None,
        walk: Walk | None,
    ) -> _Entry:
        if parent is not None and parent.settings == head.settings:
            head.settings = parent.settings  # one mapping for the whole chain
        address = None
        if prefix is not None:
            address = self._prefixes.put(head.principal, body, prefix, walk)
            self._use_frame(prefix.frame)
        older = self._by_response.get((parent.principal, parent.response_id)) if parent else None
        size = head.size_bytes + PREFIX_BYTES
        return _Entry(head, prefix, address, older, size, self._timer() + self._ttl_s)

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
            return  # it was forgotten already
        entry.is_held = False
        del self._entries[entry]
        self._entry_bytes -= entry.size_bytes
        self._drop_prefix(entry)
        same = self._by_history.get(entry.head.history, [])
        if entry in same:
            same.remove(entry)
        if not same:
            self._by_history.pop(entry.head.history, None)
        address = (entry.head.principal, entry.head.response_id)
        if self._by_response.get(address) is entry:
            del self._by_response[address]
