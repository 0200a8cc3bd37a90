"""
Who holds which connection.

The socket is the state: upstream remembers the last response of a conversation on the connection
that produced it. So this is no ordinary pool, where any idle connection will do. A turn that
continues a chain needs the one connection that holds it; a turn that does not will *end* whatever
chain its connection holds, so it should get the one whose chain is worth the least.

`LeaseBook.assign` answers, and does no I/O:

    1. the connection that holds the wanted chain, if it is idle and not about to retire
    2. a spare: an idle connection that holds no chain, the youngest first
    3. once `nursery_size` idle chains were never continued: the longest unused of them
    4. a new connection, if the limits allow; where the total is reached, in place of another
       principal's longest unused connection without an established chain
    5. the principal's longest unused idle chain that was never continued; or an established one
       that was idle for longer than `yield_after_s`
    6. none, and why

So a thousand one-shot requests take turns on a few connections, and do not push out conversations
that are being continued. Nobody ever waits: a busy chain means another connection, no connection
means HTTP.

A lease is the BUSY state of a record. It ends exactly once, by `release`; a second time raises.
What is to be closed is returned, already struck off, so that the shell can close it when it likes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.core.budget import TokenBucket
from proxy.core.connection_state import (
    Action,
    ConnectionRecord,
    ConnectionState,
    LifePolicy,
    TransitionError,
    tick,
)
from proxy.core.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


@dataclass(frozen=True, slots=True)
class LeaseLimits:
    """How many connections there may be, and how fast they may be opened."""

    max_per_principal: int = 32
    max_total: int = 1000
    nursery_size: int = 16
    spare_per_principal: int = 1
    handshakes_per_s: float = 3.0
    handshake_burst: int = 32
    yield_after_s: float = 30.0


@dataclass(slots=True)
class Want:
    """The connection a turn would like, and the response that it must still remember."""

    connection_id: int
    response_id: str


@dataclass(slots=True)
class Grant:
    """The turn has this connection; `holds_chain` tells whether it remembers what was wanted."""

    record: ConnectionRecord
    holds_chain: bool


@dataclass(frozen=True, slots=True)
class Open:
    """Open a connection: `record` stands for it, and counts, until `opened` or `open_failed`."""

    record: ConnectionRecord


@dataclass(frozen=True, slots=True)
class Evict:
    """Close `victim`, which is struck off already, then do as for `Open`."""

    victim: ConnectionRecord
    record: ConnectionRecord


@dataclass(frozen=True, slots=True)
class Refuse:
    """There is no connection for this turn."""

    reason: Reason


Assignment = Grant | Open | Evict | Refuse


class _Account:
    """One principal's connections and handshakes."""

    __slots__ = ("active_at", "handshakes", "records")

    def __init__(self, limits: LeaseLimits, now: float) -> None:
        self.records: dict[int, ConnectionRecord] = {}
        self.handshakes = TokenBucket(limits.handshakes_per_s, limits.handshake_burst)
        self.active_at = now

    def nursing(self) -> list[ConnectionRecord]:
        return [record for record in self.records.values() if record.is_nursing]


class LeaseBook:
    """Owns every `ConnectionRecord` of one upstream. Ids start at 1 and are never used again."""

    __slots__ = ("_accounts", "_ids", "_limits", "_policy", "_records")

    def __init__(self, limits: LeaseLimits, policy: LifePolicy) -> None:
        self._limits = limits
        self._policy = policy
        self._ids = itertools.count(1)
        self._records: dict[int, ConnectionRecord] = {}
        self._accounts: dict[str, _Account] = {}

    # Questions.

    def status(self, principal: str, want: Want, now: float) -> Reason | None:
        """Say why `want` can't be had now, or None if it can. Changes nothing."""
        record = self._records.get(want.connection_id)
        if record is None or record.principal != principal:
            return Reason.CONNECTION_LOST
        if record.response_id != want.response_id:
            return Reason.CHAIN_ADVANCED
        if record.state is not ConnectionState.IDLE:
            return Reason.CHAIN_BUSY
        if record.is_retiring(now):
            return Reason.CONNECTION_EXPIRING
        return None

    def counts(self) -> dict[str, int]:
        """Return how many connections are in each state; `idle` ones hold a chain, spares don't."""
        counts = {"connecting": 0, "busy": 0, "idle": 0, "spare": 0}
        for record in self._records.values():
            counts["spare" if record.is_spare else record.state.value] += 1
        return counts

    @property
    def has_accounts(self) -> bool:
        """Whether a sweep has anything to look at: connections, or principals to be forgotten."""
        return bool(self._accounts)

    def records(self) -> list[ConnectionRecord]:
        """Return all records that count, as a list that stays as it is."""
        return list(self._records.values())

    def idle_records(self, principal: str) -> Iterator[ConnectionRecord]:
        """Yield the principal's idle connections."""
        account = self._accounts.get(principal)
        for record in list(account.records.values()) if account else ():
            if record.state is ConnectionState.IDLE:
                yield record

    def wants_spare(self, principal: str, now: float) -> bool:
        """
        Tell whether to open a connection for this principal ahead of need.

        Only for a principal that was active lately, that the next new conversation would have to
        open a connection for, and that has handshakes to spare: turns come first.
        """
        account = self._accounts.get(principal)
        if account is None or now - account.active_at > self._policy.nursery_ttl_s:
            return False
        own = account.records.values()
        spares = sum(
            record.ahead if record.state is ConnectionState.CONNECTING else record.is_spare
            for record in own
        )
        return (
            spares < self._limits.spare_per_principal
            and len(account.nursing()) < self._limits.nursery_size
            and len(own) < self._limits.max_per_principal
            and len(self._records) < self._limits.max_total
            and account.handshakes.available(now) >= 1 + self._limits.handshake_burst // 4
        )

    def may_try(self, principal: str, now: float) -> bool:
        """Tell whether there is room to find out ahead of need whether connections can be had."""
        account = self._accounts.get(principal)
        return (
            account is not None
            and len(account.records) < self._limits.max_per_principal
            and len(self._records) < self._limits.max_total
            and account.handshakes.available(now) >= 1
        )

    # Assignment.

    def assign(
        self,
        principal: str,
        want: Want | None,
        now: float,
        *,
        fresh: bool = False,
        barred: Reason | None = None,
    ) -> Assignment:
        """
        Decide which connection a turn gets; a granted one is BUSY from here on.

        With `fresh`, only a connection that never had a turn will do, or a new one. `barred` is
        why no connection may be opened now, if so: what is open is still given out.
        """
        account = self._account(principal, now)
        account.active_at = now
        candidate = self.candidate(principal, want, now, fresh=fresh)
        if candidate is not None:
            return self.grant(candidate, want, now)
        opening = self._open(principal, account, now, fresh=fresh, barred=barred)
        if isinstance(opening, Refuse) and not fresh:
            record = self._last_resort(account, now)
            if record is not None:
                return self._grant(record, holds_chain=False)
        return opening

    def candidate(
        self, principal: str, want: Want | None, now: float, *, fresh: bool = False
    ) -> ConnectionRecord | None:
        """Return the idle connection that `assign` would grant at once, if there is one."""
        if want is not None and not fresh and self.status(principal, want, now) is None:
            return self._records[want.connection_id]
        account = self._accounts.get(principal)
        if account is None:
            return None
        record = self._spare(account, now, fresh=fresh)
        if record is None and not fresh:
            record = self._nursery_surplus(account, now)
        return record

    def grant(self, record: ConnectionRecord, want: Want | None, now: float) -> Grant:
        """Give a candidate to the turn that wants this: it is BUSY from here on."""
        self._accounts[record.principal].active_at = now
        holds_chain = want is not None and record.response_id == want.response_id
        return self._grant(record, holds_chain=holds_chain)

    def open_spare(self, principal: str, now: float) -> ConnectionRecord:
        """Start a connection ahead of need, when `wants_spare` or `may_try` says so."""
        account = self._account(principal, now)
        account.handshakes.take(now)
        record = self._enrol(principal, account, now)
        record.ahead = True
        return record

    # What became of a connection.

    def opened(self, record: ConnectionRecord, now: float, *, jitter: float, lease: bool) -> None:
        """
        Note that the handshake is done: the record is BUSY with `lease`, or else a spare.

        `jitter` in [-1, 1] spreads the ends of connections that began together.
        """
        record.enter(ConnectionState.BUSY if lease else ConnectionState.IDLE)
        record.opened_at = record.last_used_at = record.last_inbound_at = record.ticked_at = now
        record.retire_at = self._policy.retire_at(now, jitter)
        record.turns = 1 if lease else 0

    def open_failed(self, record: ConnectionRecord) -> None:
        """Strike off a connection that could not be opened, or is not needed any more."""
        if record.state is not ConnectionState.CONNECTING:
            raise TransitionError(f"connection {record.id} is {record.state.value}")
        self._strike_off(record)

    def release(
        self, record: ConnectionRecord, *, reusable: bool, response_id: str | None, now: float
    ) -> None:
        """
        End the lease of a BUSY connection.

        A reusable one becomes idle and holds `response_id` (None: a spare); the caller closes
        one that is not, which is struck off. The id it had before means that no turn was run.
        """
        if record.state is not ConnectionState.BUSY:
            raise TransitionError(f"connection {record.id} is {record.state.value}")
        if not reusable:
            self._strike_off(record)
            return
        record.enter(ConnectionState.IDLE)
        record.last_used_at = now
        if response_id != record.response_id:
            # A lease that held no chain begins one; a lease that held one continues it.
            record.continued = record.response_id is not None and response_id is not None
            record.response_id = response_id

    def closed(self, record: ConnectionRecord) -> None:
        """
        Strike off an idle connection that ended.

        A BUSY one is reported by its holder, in `release`, as not reusable.
        """
        if record.state is not ConnectionState.IDLE:
            raise TransitionError(f"connection {record.id} is {record.state.value}")
        self._strike_off(record)

    def sweep(self, now: float) -> list[tuple[ConnectionRecord, Action]]:
        """
        Return what is to be done about the connections at `now`.

        Idle connections to be closed are struck off already. A BUSY one to be closed stays on
        the book: its holder learns of it, and releases it.
        """
        todo: list[tuple[ConnectionRecord, Action]] = []
        for record in self.records():
            action = tick(record, now, self._policy)
            if action is Action.NONE:
                continue
            if action.closes and record.state is ConnectionState.IDLE:
                self._strike_off(record)
            todo.append((record, action))
        self._forget_accounts(now)
        return todo

    # Private: the choices, in the order of the module docstring.

    def _spare(self, account: _Account, now: float, *, fresh: bool) -> ConnectionRecord | None:
        spares = (
            record
            for record in account.records.values()
            if record.is_spare and not record.is_retiring(now) and not (fresh and record.turns)
        )
        return max(spares, key=lambda record: record.opened_at, default=None)

    def _nursery_surplus(self, account: _Account, now: float) -> ConnectionRecord | None:
        nursing = account.nursing()
        if len(nursing) < self._limits.nursery_size:
            return None
        return _longest_unused(record for record in nursing if not record.is_retiring(now))

    def _open(
        self, principal: str, account: _Account, now: float, *, fresh: bool, barred: Reason | None
    ) -> Open | Evict | Refuse:
        if barred is not None:
            return Refuse(barred)
        victim = None
        if len(account.records) >= self._limits.max_per_principal:
            # For a turn that must not use what there is, its own principal may make room.
            victim = self._evictable(lambda record: fresh and record.principal == principal)
        elif len(self._records) >= self._limits.max_total:
            victim = self._evictable(lambda record: fresh or record.principal != principal)
        else:
            return self._open_within_budget(principal, account, now)
        if victim is None:
            return Refuse(Reason.CONNECTION_CAP)
        opening = self._open_within_budget(principal, account, now)
        if isinstance(opening, Refuse):
            return opening
        self._strike_off(victim)
        return Evict(victim, opening.record)

    def _open_within_budget(self, principal: str, account: _Account, now: float) -> Open | Refuse:
        if not account.handshakes.take(now):
            return Refuse(Reason.HANDSHAKE_BUDGET)
        return Open(self._enrol(principal, account, now))

    def _evictable(self, qualifies: Callable[[ConnectionRecord], bool]) -> ConnectionRecord | None:
        return _longest_unused(
            record
            for record in self._records.values()
            if (record.is_spare or record.is_nursing) and qualifies(record)
        )

    def _last_resort(self, account: _Account, now: float) -> ConnectionRecord | None:
        usable = [record for record in account.records.values() if not record.is_retiring(now)]
        record = _longest_unused(record for record in usable if record.is_nursing)
        if record is not None:
            return record
        return _longest_unused(
            record
            for record in usable
            if record.is_established and now - record.last_used_at > self._limits.yield_after_s
        )

    # Private: bookkeeping.

    def _grant(self, record: ConnectionRecord, *, holds_chain: bool) -> Grant:
        record.enter(ConnectionState.BUSY)
        record.turns += 1
        if not holds_chain:
            record.response_id = None
            record.continued = False
        return Grant(record, holds_chain)

    def _account(self, principal: str, now: float) -> _Account:
        account = self._accounts.get(principal)
        if account is None:
            account = self._accounts[principal] = _Account(self._limits, now)
        return account

    def _enrol(self, principal: str, account: _Account, now: float) -> ConnectionRecord:
        record = ConnectionRecord(id=next(self._ids), principal=principal, opened_at=now)
        self._records[record.id] = account.records[record.id] = record
        return record

    def _strike_off(self, record: ConnectionRecord) -> None:
        record.enter(ConnectionState.CLOSED)
        del self._records[record.id]
        del self._accounts[record.principal].records[record.id]

    def _forget_accounts(self, now: float) -> None:
        stale = [
            principal
            for principal, account in self._accounts.items()
            if not account.records and account.handshakes.is_full(now)
        ]
        for principal in stale:
            del self._accounts[principal]


def _longest_unused(records: Iterable[ConnectionRecord]) -> ConnectionRecord | None:
    return min(records, key=lambda record: record.last_used_at, default=None)
