"""
What would have been: leases on connections that nobody opens, and a second opinion on each delta.

`ShadowPool` is the lease book of a pool whose connections open at once, answer every ping and never
fail. All that is decided in a `LeaseBook` is decided in the same way: which chain's connection is
free, who is evicted, what is too old. What only the network knows is not in it; so shadow mode
tells what Turnwire would have done with an upstream whose WebSocket mode works.

`Opinions` judges whether a delta would have been right, by other means than those that decided it.
The decision was made on canonical forms, keyed digests and prefixes of bytes. The opinion reads the
whole body again with the standard library's parser, reduces every item to what a model reads of it,
and asks: does what upstream would have held, and then the delta, say what the request says?
"""

from __future__ import annotations

import enum
import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from cachetools import LRUCache

from proxy.core.leases import Evict, Grant, LeaseBook, LeaseLimits, Open, Refuse, Want

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from proxy.core.connection_state import ConnectionRecord, LifePolicy
    from proxy.core.reasons import Reason

DIGEST_BYTES: Final = 12
MAX_OPINION_BYTES: Final = 64 * 1024 * 1024
_ENTRY_BYTES: Final = 300  # of an entry without its digests, about

# Of an item, and of a part of its content: what a model reads nothing of.
_UNREAD: Final = frozenset(
    {"id", "status", "created_by", "annotations", "logprobs", "phase", "parsed", "parsed_arguments"}
)
_UNREADABLE: Final = (ValueError, TypeError, AttributeError, LookupError, RecursionError)
_TEXT_PARTS: Final = frozenset({"input_text", "output_text", "text"})


@dataclass(frozen=True, slots=True)
class ShadowLease:
    """A connection that a turn would have had. `holds_chain` as for a lease."""

    record: ConnectionRecord
    holds_chain: bool


class ShadowPool:
    """Leases on imagined connections. Times are monotonic seconds, passed in."""

    def __init__(self, limits: LeaseLimits, life: LifePolicy) -> None:
        self._book = LeaseBook(limits, life)

    def status(self, principal: str, want: Want, now: float) -> Reason | None:
        """Say why `want` could not be had now, or None if it could."""
        return self._book.status(principal, want, now)

    def acquire(self, principal: str, want: Want | None, now: float) -> ShadowLease | Reason:
        """Return the lease that a turn would have had, or why none. Release it once."""
        self._pass_time(now)
        assigned = self._book.assign(principal, want, now)
        match assigned:
            case Refuse(reason):
                return reason
            case Grant(record, holds_chain):
                lease = ShadowLease(record, holds_chain)
            case Open(record) | Evict(_, record):
                self._book.opened(record, now, jitter=0.0, lease=True)
                lease = ShadowLease(record, holds_chain=False)
        if self._book.wants_spare(principal, now):
            spare = self._book.open_spare(principal, now)
            self._book.opened(spare, now, jitter=0.0, lease=False)
        return lease

    def release(
        self, lease: ShadowLease, *, reusable: bool, response_id: str | None, now: float
    ) -> None:
        """End a lease; `response_id` is what upstream would have remembered."""
        self._book.release(lease.record, reusable=reusable, response_id=response_id, now=now)

    def _pass_time(self, now: float) -> None:
        for record in self._book.records():
            record.last_inbound_at = now  # whatever was pinged has answered
        self._book.sweep(now)


class Verdict(enum.StrEnum):
    """Whether a delta would have been right. The value is a label."""

    RIGHT = "right"
    WRONG = "wrong"
    UNCHECKED = "unchecked"


Digests: TypeAlias = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class _Held:
    """What upstream would hold after a response: what it was given, and what it answered."""

    given: Digests
    answered: Digests

    @property
    def size_bytes(self) -> int:
        return _ENTRY_BYTES + 2 * DIGEST_BYTES * (len(self.given) + len(self.answered))


class Opinions:
    """What the last responses were made from, bounded in bytes; the oldest are forgotten."""

    def __init__(self, max_bytes: int = MAX_OPINION_BYTES) -> None:
        self._held: LRUCache[tuple[str, str], _Held] = LRUCache(
            max_bytes, getsizeof=lambda held: held.size_bytes
        )

    def note(
        self, principal: str, response_id: str, given: Digests | None, output: Sequence[bytes]
    ) -> None:
        """Remember what a response was made from; `given` is what `read_request` made of it."""
        answered = _read_raw(output)
        if given is None or answered is None:
            return
        held = _Held(given, answered)
        if held.size_bytes <= self._held.maxsize:
            self._held[principal, response_id] = held

    def judge(
        self, principal: str, response_id: str, wanted: Digests | None, delta: Sequence[bytes]
    ) -> Verdict:
        """
        Tell whether `delta` after that response says what a request does, which is `wanted`.

        Reasoning is left out on both sides: clients drop it, and upstream keeps its own. The items
        of the answer may have come back in another order.
        """
        held = self._held.get((principal, response_id))
        added = None if held is None else _read_raw(delta)
        if held is None or added is None or wanted is None:
            return Verdict.UNCHECKED
        begun, done = len(held.given), len(held.given) + len(held.answered)
        same = (
            wanted[:begun] == held.given
            and sorted(wanted[begun:done]) == sorted(held.answered)
            and wanted[done:] == added
        )
        return Verdict.RIGHT if same else Verdict.WRONG


def read_request(body: bytes) -> Digests | None:
    """Read what a model would of a whole body; None if it can't be read."""
    try:
        given = json.loads(body)["input"]
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        return _read_items(items)
    except _UNREADABLE:
        return None


def _read_raw(items: Sequence[bytes]) -> Digests | None:
    try:
        return _read_items(json.loads(item) for item in items)
    except _UNREADABLE:
        return None


def _read_items(items: Iterable[Any]) -> Digests:
    """Digest what a model reads of each item; reasoning is left out. Raises ValueError."""
    return tuple(_digest(_read(item)) for item in items if _kind(item) != "reasoning")


def _digest(value: object) -> bytes:
    text = json.dumps(value, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest()


def _kind(item: dict[str, Any]) -> str:
    return str(item.get("type") or ("message" if "role" in item else "item_reference"))


def _read(item: dict[str, Any]) -> object:
    kind = _kind(item)
    if kind == "item_reference":
        raise ValueError("what a reference stands for is not in the request")
    said = {key: value for key, value in item.items() if value is not None and key not in _UNREAD}
    said["type"] = kind
    if kind == "message":
        said["content"] = _read_content(item.get("content"))
    elif kind == "function_call":
        said["arguments"] = _read_arguments(item["arguments"])
    return said


def _read_content(content: object) -> object:
    if not isinstance(content, list):
        return [content]
    return [_read_part(part) for part in content]


def _read_part(part: dict[str, Any]) -> object:
    if part.get("type") in _TEXT_PARTS:
        return part["text"]
    return {key: value for key, value in part.items() if value is not None and key not in _UNREAD}


def _read_arguments(arguments: str) -> object:
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return [arguments]
