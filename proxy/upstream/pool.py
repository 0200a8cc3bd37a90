"""
Hands out connections: the shell around `proxy.core.leases`.

The book decides which connection a turn gets; the pool opens, probes, pings and closes them. Since
no decision waits for anything, no lock is needed: between two awaits the book and the sockets
agree.

    acquire:  assign --Grant--> fit for use? --yes--------------------> Lease
                ^                    | no: discard
                +--------------------+
              assign --Open---> cool-down? handshake --ok-------------> Lease
                ^                    | failed
                +---(may not open)---+
              assign --Refuse-----------------------------------------> LeaseRefused

What is taken on the way is given back on every path, cancellation included: the one `except
BaseException` of each step.

Three things run beside the turns: a tick a second, as long as there is somebody on the book (pings,
deadlines, retirement), spares that are opened ahead of need after the last one was taken, and
polite closes. None of them is waited for.
"""

from __future__ import annotations

import asyncio
import functools
import random
import ssl
import time
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog
from cachetools import LRUCache

from proxy.core.connection_state import (
    Action,
    ConnectionRecord,
    ConnectionState,
    LifePolicy,
    is_harmless_when_idle,
    needs_probe,
)
from proxy.core.cooldown import Cooldowns, Scope
from proxy.core.leases import Evict, Grant, LeaseBook, LeaseLimits, Open, Refuse, Want
from proxy.core.principals import LABEL_HEX
from proxy.core.reasons import Reason
from proxy.errors import LeaseRefused, UpgradeRefused, UpstreamError
from proxy.observe.facts import ConnectionFacts
from proxy.upstream.connection import ConnectionSettings, UpstreamConnection, open_connection
from proxy.upstream.tasks import cancel_and_wait, spawn

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.core.principals import Principal

_TICK_S = 1.0
_SPARE_BACKOFF_S, _SPARE_BACKOFF_MAX_S = 1.0, 60.0
_BACKOFFS_MAX = 4096

# Both ends of a connection age while a laptop sleeps; CLOCK_MONOTONIC on Linux does not.
_CLOCK_ID: int | None = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


awake_or_not: Callable[[], float] = (
    time.monotonic if _CLOCK_ID is None else functools.partial(time.clock_gettime, _CLOCK_ID)
)
"""Returns monotonic seconds that go on while the machine is suspended."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Where to connect, and every limit. The names are those of the configuration."""

    url: str
    limits: LeaseLimits = field(default_factory=LeaseLimits)
    life: LifePolicy = field(default_factory=LifePolicy)
    connection: ConnectionSettings = field(default_factory=ConnectionSettings)
    probe_timeout_s: float = 2.0
    cooldown_first_s: float = 10.0
    cooldown_max_s: float = 900.0


class Lease:
    """
    The right to use `connection` for one turn. `release` it exactly once.

    `holds_chain` tells whether upstream remembers the wanted response on it, `reused` whether it
    was leased before. `connection_id` names it in a later `Want`.
    """

    __slots__ = (
        "__weakref__",
        "_pool",
        "_record",
        "connection",
        "connection_id",
        "holds_chain",
        "reused",
    )

    def __init__(
        self,
        pool: Pool,
        record: ConnectionRecord,
        connection: UpstreamConnection,
        *,
        holds_chain: bool,
    ) -> None:
        self._pool: Pool | None = pool
        self._record = record
        self.connection = connection
        self.connection_id = record.id
        self.holds_chain = holds_chain
        self.reused = record.turns > 1

    def __repr__(self) -> str:
        held = ", holds chain" if self.holds_chain else ""
        released = ", released" if self._pool is None else ""
        return f"<Lease of connection {self.connection_id}{held}{released}>"

    def release(self, *, reusable: bool, response_id: str | None = None) -> None:
        """
        End the lease. Never waits.

        `reusable` only if the turn's answer arrived complete, or if nothing was sent; otherwise
        the connection is cut. `response_id` is what upstream remembers on it now, None if that
        may not be continued.
        """
        pool, self._pool = self._pool, None
        if pool is None:
            raise RuntimeError(f"{self!r} can't be released twice")
        pool._release(self._record, self.connection, reusable=reusable, response_id=response_id)  # noqa: SLF001  the pool's other half

    def __del__(self) -> None:
        if getattr(self, "_pool", None) is not None:
            warnings.warn(f"{self!r} was never released", ResourceWarning, stacklevel=1)
            self.release(reusable=False)


class Pool:
    """
    All connections to one upstream.

    Use it from one event loop. `ssl_context` is for `wss:` URLs; the default trusts the system's
    authorities. `on_connect` is told how each attempt to connect ended: `ok`, `refused`,
    `timeout`, `tls`, `failed` or `cancelled`. Close it with `close`.
    """

    def __init__(
        self,
        settings: PoolSettings,
        *,
        ssl_context: ssl.SSLContext | None = None,
        on_connect: Callable[[str], None] | None = None,
        log: Any = None,
        clock: Callable[[], float] = awake_or_not,
        rng: random.Random | None = None,
    ) -> None:
        self._settings = settings
        if ssl_context is None and settings.url.startswith("wss:"):
            ssl_context = ssl.create_default_context()  # slow: once, not for each connection
        self._ssl_context = ssl_context
        self._on_connect = on_connect or (lambda _result: None)
        self._log = structlog.get_logger("proxy.upstream.pool") if log is None else log
        self._clock = clock
        self._rng = rng or random.Random()  # noqa: S311  spreads load; guards nothing
        self._book = LeaseBook(settings.limits, settings.life)
        self._cooldowns = Cooldowns(settings.cooldown_first_s, settings.cooldown_max_s)
        self._connections: dict[int, UpstreamConnection] = {}
        self._spare_failures: LRUCache[str, tuple[int, float]] = LRUCache(_BACKOFFS_MAX)
        self._spare_tasks: set[asyncio.Task[None]] = set()
        self._closers: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.TimerHandle | None = None
        self._is_closing = False
        self._drained: asyncio.Future[None] | None = None

    # Questions.

    def status(self, principal_key: str, want: Want) -> Reason | None:
        """Say why `want` could not be had now, or None if it could. Takes nothing."""
        return self._book.status(principal_key, want, self._clock())

    def counts(self) -> dict[str, int]:
        """Return the number of connections that are `connecting`, `busy`, `idle` and `spare`."""
        return self._book.counts()

    def describe(self) -> list[ConnectionFacts]:
        """Return what people may be told of each connection."""
        now = self._clock()
        return [
            ConnectionFacts(
                id=record.id,
                state="spare" if record.is_spare else record.state.value,
                label=record.principal[:LABEL_HEX],
                age_s=now - record.opened_at,
                left_s=max(0.0, min(record.retire_at - now, self._settings.life.max_age_s)),
                turns=record.turns,
            )
            for record in self._book.records()
        ]

    def cooldown_s(self, principal: Principal) -> float:
        """Return for how long no new connection will be tried for this principal; 0 if not."""
        return self._cooldowns.remaining(principal.key, self._clock())

    # Leases.

    async def acquire(
        self, principal: Principal, want: Want | None = None, *, fresh: bool = False
    ) -> Lease:
        """
        Lease a connection for one turn.

        It is the wanted one if that can be had: see `Lease.holds_chain`. With `fresh` it is one
        that never had a turn. If the caller is cancelled, nothing is kept.

        Raises:
            LeaseRefused: with a `Reason`, and with upstream's own error as `cause` if it was one.
        """
        if self._is_closing:
            raise LeaseRefused(Reason.WEBSOCKET_OFF)
        barred: Reason | None = None
        cause: UpstreamError | None = None
        lease: Lease | None = None
        while lease is None:
            now = self._clock()
            if barred is None and not self._cooldowns.is_closed(principal.key):
                barred = Reason.COOLING_DOWN
            assigned = self._book.assign(principal.key, want, now, fresh=fresh, barred=barred)
            match assigned:
                case Refuse(reason):
                    if reason is Reason.COOLING_DOWN:
                        self._try_if_due(principal, now)
                    if not self._is_closing:
                        self._keep_ticking()  # or the book would never forget who it refused
                    raise LeaseRefused(reason, cause)
                case Grant(record, holds_chain):
                    lease = await self._take_up(record, principal, holds_chain=holds_chain)
                case Open(record) | Evict(_, record):
                    if isinstance(assigned, Evict):
                        self._close(assigned.victim, "evicted")
                    try:
                        connection = await self._connect(record, principal, lease=True)
                    except UpstreamError as exc:
                        barred, cause = _reason_for(exc), exc
                    else:
                        lease = Lease(self, record, connection, holds_chain=False)
        self._open_spare_if_wanted(principal)
        return lease

    def take(self, principal: Principal, want: Want | None = None) -> Lease | None:
        """
        Lease the connection that `acquire` would lease, or return None if that takes waiting.

        So it does where a connection has to be opened, or asked whether it is alive.
        """
        now = self._clock()
        record = None if self._is_closing else self._book.candidate(principal.key, want, now)
        if record is None:
            return None
        connection = self._connections[record.id]
        record.last_inbound_at = connection.last_inbound_at
        if (
            needs_probe(record, now, self._settings.life)
            or not connection.is_open
            or not connection.is_quiet
        ):
            return None
        granted = self._book.grant(record, want, now)
        connection.become_busy()
        if not granted.holds_chain:
            self._open_spare_if_wanted(principal)
        return Lease(self, record, connection, holds_chain=granted.holds_chain)

    async def _take_up(
        self, record: ConnectionRecord, principal: Principal, *, holds_chain: bool
    ) -> Lease | None:
        """Return a lease of a granted connection, or None if the connection was no good."""
        connection = self._connections[record.id]
        record.last_inbound_at = connection.last_inbound_at
        if needs_probe(record, self._clock(), self._settings.life):
            try:
                is_alive = await connection.probe(self._settings.probe_timeout_s)
            except BaseException:
                # Nothing was sent: the chain is as it was.
                self._release(record, connection, reusable=True, response_id=record.response_id)
                raise
            if not is_alive:
                self._discard_silent(record, principal)
                return None
        if not connection.is_open or not connection.is_quiet:
            self._give_up(record, connection, "unfit")
            return None
        connection.become_busy()
        return Lease(self, record, connection, holds_chain=holds_chain)

    def _discard_silent(self, record: ConnectionRecord, principal: Principal) -> None:
        """
        Discard a connection that did not answer its probe, and its likes.

        When one is dead the others mostly are, too (a suspended machine, a changed network): the
        turn must not find that out one by one, two seconds each.
        """
        self._give_up(record, self._connections[record.id], "no_pong")
        now = self._clock()
        for other in self._book.idle_records(principal.key):
            other.last_inbound_at = self._connections[other.id].last_inbound_at
            if needs_probe(other, now, self._settings.life):
                self._book.closed(other)
                self._close(other, "no_pong")

    def _give_up(self, record: ConnectionRecord, connection: UpstreamConnection, why: str) -> None:
        """Cut a connection that is BUSY for a turn that does not want it."""
        self._book.release(record, reusable=False, response_id=None, now=self._clock())
        self._forget(record, why)
        connection.abort()

    def _release(
        self,
        record: ConnectionRecord,
        connection: UpstreamConnection,
        *,
        reusable: bool,
        response_id: str | None,
    ) -> None:
        if reusable and not self._is_closing:
            # Looks at what has arrived since the turn's last event, and may cut the connection.
            connection.become_idle(
                lambda message: self._judge(record, connection, message),
                lambda: self._ended(record),
            )
            reusable = connection.is_open and connection.is_quiet
        if reusable and not self._is_closing:
            self._book.release(record, reusable=True, response_id=response_id, now=self._clock())
            return
        self._book.release(record, reusable=False, response_id=None, now=self._clock())
        self._forget(record, "drained" if reusable else "discarded")
        if reusable:
            self._say_goodbye(connection)
        else:
            connection.abort()
        self._note_progress_of_drain()

    # Connections.

    async def _connect(
        self, record: ConnectionRecord, principal: Principal, *, lease: bool
    ) -> UpstreamConnection:
        """Open the connection that `record` stands for; strike it off if that fails."""
        began_at = self._clock()
        result = "cancelled"
        try:
            connection = await open_connection(
                self._settings.url,
                principal.headers,
                self._settings.connection,
                self._ssl_context,
                clock=self._clock,
            )
            result = "ok"
        except BaseException as exc:
            self._book.open_failed(record)
            if isinstance(exc, UpstreamError):
                result = _result_of(exc)
                self._note_failure(principal, exc, began_at)
            else:
                self._cooldowns.abandoned(principal.key)
            self._note_progress_of_drain()
            raise
        finally:
            self._on_connect(result)
        self._cooldowns.succeeded(principal.key, self._clock())
        self._adopt(record, connection, principal, lease=lease)
        return connection

    def _adopt(
        self,
        record: ConnectionRecord,
        connection: UpstreamConnection,
        principal: Principal,
        *,
        lease: bool,
    ) -> None:
        self._connections[record.id] = connection
        self._book.opened(record, self._clock(), jitter=self._rng.uniform(-1, 1), lease=lease)
        self._log.info(
            "connection_opened", connection=record.id, principal=principal.label, spare=not lease
        )
        if not lease:
            connection.become_idle(
                lambda message: self._judge(record, connection, message),
                lambda: self._ended(record),
            )
        self._keep_ticking()

    def _note_failure(self, principal: Principal, error: UpstreamError, began_at: float) -> None:
        scope = self._cooldowns.failed(
            principal.key,
            error,
            self._clock(),
            began_at=began_at,
            jitter=self._rng.uniform(-1, 1),
        )
        self._log.warning(
            "connect_failed",
            principal=principal.label,
            error=str(error),
            cooldown_of=None if scope is Scope.NOBODY else scope.value,
            cooldown_s=round(self.cooldown_s(principal), 1),
        )

    def _judge(
        self, record: ConnectionRecord, connection: UpstreamConnection, message: bytes
    ) -> None:
        """Take a message that belongs to no turn."""
        if not is_harmless_when_idle(message):
            self._log.info("message_out_of_turn", connection=record.id)
            connection.abort()

    def _ended(self, record: ConnectionRecord) -> None:
        """Take note that a connection has ended while it was idle."""
        if record.state is ConnectionState.IDLE:
            self._book.closed(record)
            self._forget(record, "closed_by_peer")
            self._note_progress_of_drain()

    def _close(self, record: ConnectionRecord, why: str) -> None:
        """Close the connection of a record that is struck off."""
        connection = self._forget(record, why)
        if why in {"no_pong", Action.CLOSE_SILENT.value}:
            connection.abort()
        else:
            self._say_goodbye(connection)

    def _forget(self, record: ConnectionRecord, why: str) -> UpstreamConnection:
        connection = self._connections.pop(record.id)
        self._log.info(
            "connection_closed",
            connection=record.id,
            reason=why,
            turns=record.turns,
            age_s=round(self._clock() - record.opened_at, 1),
        )
        return connection

    def _say_goodbye(self, connection: UpstreamConnection) -> None:
        task = spawn(connection.close_gently(), name="close-connection")
        self._closers.add(task)
        task.add_done_callback(self._closers.discard)

    # Spares.

    def _try_if_due(self, principal: Principal, now: float) -> None:
        """Find out whether a cool-down has an end, with a connection that no turn waits for."""
        if (
            not self._is_closing
            and self._cooldowns.would_allow(principal.key, now)
            and self._book.may_try(principal.key, now)
        ):
            self._open_ahead(principal, now)

    def _open_spare_if_wanted(self, principal: Principal) -> None:
        now = self._clock()
        _, not_before = self._spare_failures.get(principal.key, (0, now))
        if (
            self._is_closing
            or now < not_before
            or not self._cooldowns.would_allow(principal.key, now)
            or not self._book.wants_spare(principal.key, now)
        ):
            return
        self._open_ahead(principal, now)

    def _open_ahead(self, principal: Principal, now: float) -> None:
        self._cooldowns.allows(principal.key, now)  # at once: the task begins later
        record = self._book.open_spare(principal.key, now)
        task = spawn(self._open_spare(record, principal), name="open-spare")
        self._spare_tasks.add(task)
        task.add_done_callback(lambda task: self._spare_finished(task, record, principal))

    def _spare_finished(
        self, task: asyncio.Task[None], record: ConnectionRecord, principal: Principal
    ) -> None:
        self._spare_tasks.discard(task)
        if record.state is ConnectionState.CONNECTING:
            self._cooldowns.abandoned(principal.key)
            self._book.open_failed(record)  # cancelled before its first step
            self._note_progress_of_drain()

    async def _open_spare(self, record: ConnectionRecord, principal: Principal) -> None:
        try:
            await self._connect(record, principal, lease=False)
        except UpstreamError:
            failures, _ = self._spare_failures.get(principal.key, (0, 0.0))
            longest_s = min(_SPARE_BACKOFF_MAX_S, _SPARE_BACKOFF_S * 2.0 ** min(failures, 16))
            wait_s = self._rng.uniform(0, longest_s)  # full jitter
            self._spare_failures[principal.key] = (failures + 1, self._clock() + wait_s)
        else:
            self._spare_failures.pop(principal.key, None)

    # The tick.

    def _keep_ticking(self) -> None:
        if self._ticker is None and self._book.has_accounts:
            # A gap between ticks that is longer than a ping's deadline counts as a stop of ours.
            tick_s = min(_TICK_S, self._settings.life.ping_timeout_s / 3)
            self._ticker = asyncio.get_running_loop().call_later(tick_s, self._tick)

    def _tick(self) -> None:
        self._ticker = None
        try:
            self._sweep()
        finally:
            self._keep_ticking()

    def _sweep(self) -> None:
        now = self._clock()
        for record in self._book.records():
            connection = self._connections.get(record.id)
            if connection is not None:
                record.last_inbound_at = connection.last_inbound_at
                record.sending = connection.is_sending(now)
                record.paused = connection.is_reading_paused
        for record, action in self._book.sweep(now):
            if action is Action.PING:
                self._connections[record.id].send_keepalive()
            elif record.state is ConnectionState.BUSY:
                self._connections[record.id].abort()  # its holder learns of it, and releases it
            else:
                self._close(record, action.value)
        self._note_progress_of_drain()

    # The end.

    async def close(self, timeout_s: float) -> None:
        """
        Drain: give out nothing more, close what is idle, wait for what is busy, then cut it.

        Returns when every connection has ended.
        """
        self._is_closing = True
        await cancel_and_wait(self._spare_tasks)
        for record in self._book.records():
            if record.state is ConnectionState.IDLE:
                self._book.closed(record)
                self._close(record, "drained")
        if self._book.records():
            self._drained = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._drained], timeout=timeout_s)
        for connection in self._connections.values():
            connection.abort()
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        if self._closers:
            await asyncio.wait(self._closers)

    def _note_progress_of_drain(self) -> None:
        drained = self._drained
        if drained is not None and not drained.done() and not self._book.records():
            drained.set_result(None)


def _reason_for(error: UpstreamError) -> Reason:
    return Reason.UPGRADE_REFUSED if isinstance(error, UpgradeRefused) else Reason.CONNECT_FAILED


def _result_of(error: UpstreamError) -> str:
    if isinstance(error, UpgradeRefused):
        return "refused"
    if isinstance(error.__cause__, TimeoutError):
        return "timeout"
    return "tls" if isinstance(error.__cause__, ssl.SSLError) else "failed"
