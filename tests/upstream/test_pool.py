"""The pool hands out connections that are fit for use, and loses none, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http
import random
import warnings
from typing import TYPE_CHECKING, TypeVar

import pytest
from structlog.testing import capture_logs
from websockets.exceptions import ConnectionClosed
from wsserver import raw_server, reset, until, upstream

from proxy.core.connection_state import LifePolicy
from proxy.core.leases import LeaseLimits, Want
from proxy.core.principals import Principal, identify
from proxy.core.reasons import Reason
from proxy.errors import ConnectionLost, LeaseRefused, UpgradeRefused, UpstreamUnreachable
from proxy.upstream.connection import ConnectionSettings
from proxy.upstream.pool import Pool, PoolSettings, awake_or_not

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from websockets.asyncio.server import ServerConnection
    from websockets.http11 import Request, Response

    from proxy.upstream.pool import Lease

T = TypeVar("T")


def principal(key: str = "a") -> Principal:
    """Make the holder of a key."""
    return identify([("Authorization", f"Bearer {key}")], {"authorization"}, b"0123456789abcdef")


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the time that the test has set."""
        return self.now


@contextlib.asynccontextmanager
async def pooled(
    url: str,
    clock: Clock | None = None,
    *,
    life: LifePolicy | None = None,
    connection: ConnectionSettings | None = None,
    results: list[str] | None = None,
    probe_timeout_s: float = 2.0,
    **limits: float,
) -> AsyncIterator[Pool]:
    """Run a pool without spares, unless asked for; nothing may be left of it afterwards."""
    settings = PoolSettings(
        url,
        limits=LeaseLimits(**({"spare_per_principal": 0} | limits)),
        life=life or LifePolicy(),
        connection=connection or ConnectionSettings(connect_timeout_s=5.0, close_timeout_s=0.2),
        probe_timeout_s=probe_timeout_s,
    )
    pool = Pool(
        settings,
        clock=clock or awake_or_not,
        rng=random.Random(1),
        on_connect=None if results is None else results.append,
    )
    try:
        yield pool
    finally:
        await pool.close(0)


async def ask(lease: Lease, text: str) -> str:
    """Send a message on a lease and return the answer."""
    await lease.connection.send_message(text.encode())
    return b"".join(await lease.connection.receive()).decode()


async def converse(pool: Pool, who: Principal, response_id: str) -> Want:
    """Have one whole turn and return what its next one will want."""
    lease = await pool.acquire(who)
    assert await ask(lease, response_id) == response_id
    lease.release(reusable=True, response_id=response_id)
    return Want(lease.connection_id, response_id)


def refusing(
    *statuses: int, **headers: str
) -> Callable[[ServerConnection, Request], Response | None]:
    """Refuse the first handshakes with these statuses, one each, and accept the others."""
    remaining = list(statuses)

    def refuse(connection: ServerConnection, request: Request) -> Response | None:
        if not remaining:
            return None
        response = connection.respond(http.HTTPStatus(remaining.pop(0)), "")
        for name, value in headers.items():
            response.headers[name.replace("_", "-")] = value
        return response

    return refuse


# Leases.


async def test_a_continued_chain_stays_on_its_connection() -> None:
    """Turn after turn, with the caller's own credentials at the one handshake."""
    async with upstream() as server, pooled(server.url) as pool:
        want = await converse(pool, principal(), "r1")
        for number in range(2, 5):
            assert pool.status(principal().key, want) is None
            lease = await pool.acquire(principal(), want)
            assert lease.holds_chain
            assert await ask(lease, "go on") == "go on"
            assert pool.status(principal().key, want) is Reason.CHAIN_BUSY
            lease.release(reusable=True, response_id=f"r{number}")
            assert pool.status(principal().key, want) is Reason.CHAIN_ADVANCED
            want = Want(lease.connection_id, f"r{number}")

        assert [request.headers["Authorization"] for request in server.requests] == ["Bearer a"]


async def test_a_busy_chain_costs_a_second_connection() -> None:
    """Nobody waits for anybody."""
    async with upstream() as server, pooled(server.url) as pool:
        want = await converse(pool, principal(), "r1")
        first = await pool.acquire(principal(), want)
        second = await pool.acquire(principal(), want)

        assert (first.holds_chain, second.holds_chain) == (True, False)
        assert first.connection is not second.connection
        first.release(reusable=True)
        second.release(reusable=True)


async def test_principals_share_nothing() -> None:
    """Each has connections opened with its own credentials."""
    async with upstream() as server, pooled(server.url) as pool:
        want = await converse(pool, principal("a"), "r1")
        assert pool.status(principal("b").key, want) is Reason.CONNECTION_LOST
        lease = await pool.acquire(principal("b"), want)
        assert not lease.holds_chain
        lease.release(reusable=True)

        sent = [request.headers["Authorization"] for request in server.requests]
        assert sent == ["Bearer a", "Bearer b"]


async def test_a_discarded_connection_is_cut_at_once() -> None:
    """An answer that was not read to its end can reach nobody."""
    async with upstream() as server, pooled(server.url) as pool:
        lease = await pool.acquire(principal())
        await lease.connection.send_message(b"answer me later")
        lease.release(reusable=False)
        assert not lease.connection.is_open
        other = await pool.acquire(principal())
        assert await ask(other, "mine") == "mine"
        other.release(reusable=True)

        assert len(server.requests) == 2


async def test_a_second_release_raises_and_changes_nothing() -> None:
    """The connection may be in use by another turn by then."""
    async with upstream() as server, pooled(server.url) as pool:
        lease = await pool.acquire(principal())
        lease.release(reusable=True)
        second = await pool.acquire(principal())
        assert second.connection is lease.connection
        with pytest.raises(RuntimeError, match="twice"):
            lease.release(reusable=False)

        assert await ask(second, "still here") == "still here"
        second.release(reusable=True)


async def test_a_forgotten_lease_is_complained_of_and_ended() -> None:
    """The place is free again, and the developer warned."""
    async with upstream() as server, pooled(server.url) as pool:
        lease = await pool.acquire(principal())
        assert "Lease of connection 1" in repr(lease)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del lease
            gc.collect()

        assert [warning.category for warning in caught] == [ResourceWarning]
        assert sum(pool.counts().values()) == 0


async def test_a_connection_that_ended_during_its_turn_is_not_kept() -> None:
    """Whatever its holder says of it."""

    async def handler(connection: ServerConnection) -> None:
        await connection.recv()

    async with upstream(handler) as server, pooled(server.url) as pool:
        lease = await pool.acquire(principal())
        await lease.connection.send_message(b"leave")
        with pytest.raises(ConnectionLost):
            await lease.connection.receive()
        lease.release(reusable=True, response_id="r1")

        assert sum(pool.counts().values()) == 0


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_connection_that_ends_idle_is_struck_off(how: str) -> None:
    """The chain is known to be lost before anybody asks for it."""
    async with upstream() as server, pooled(server.url) as pool:
        want = await converse(pool, principal(), "r1")
        if how == "close":
            await server.connections[0].close()
        else:
            reset(server.connections[0])
        await until(lambda: pool.status(principal().key, want) is Reason.CONNECTION_LOST)

        assert sum(pool.counts().values()) == 0


async def test_a_message_left_behind_by_a_turn_costs_the_connection() -> None:
    """A second answer, a late event: the next turn must not see it."""

    async def handler(connection: ServerConnection) -> None:
        async for _ in connection:
            await connection.send('{"type":"response.completed"}')
            await connection.send('{"type":"response.completed"}')

    async with upstream(handler) as server, pooled(server.url) as pool:
        lease = await pool.acquire(principal())
        await lease.connection.send_message(b"go")
        got = await lease.connection.receive()
        if len(got) == 1:
            await until(lambda: not lease.connection.is_quiet)
        else:
            lease.connection._messages.append(got[1])
        lease.release(reusable=True, response_id="r1")

        assert sum(pool.counts().values()) == 0


@pytest.mark.parametrize(
    ("message", "survives"),
    [
        ('{"type":"codex.rate_limits"}', True),
        ('{"type":"keepalive"}', True),
        ('{"type":"error","error":{"code":"websocket_connection_limit_reached"}}', False),
        ('{"type":"response.output_text.delta"}', False),
        ("what?", False),
    ],
)
async def test_messages_between_turns_are_judged(message: str, survives: bool) -> None:
    """Notices are dropped; what could be taken for an answer costs the connection."""
    async with upstream() as server, pooled(server.url) as pool:
        want = await converse(pool, principal(), "r1")
        idle = server.connections[0]
        await idle.send(message)
        with contextlib.suppress(ConnectionClosed):
            await (await idle.ping())
        if survives:
            lease = await pool.acquire(principal(), want)
            assert lease.holds_chain
            assert await ask(lease, "clean") == "clean"
            lease.release(reusable=True)
        else:
            assert pool.status(principal().key, want) is Reason.CONNECTION_LOST


async def test_half_a_message_between_turns_costs_the_connection() -> None:
    """Its other half would land in the turn."""
    async with upstream() as server, pooled(server.url) as pool:
        want = await converse(pool, principal(), "r1")
        connection = next(iter(pool._connections.values()))
        server.connections[0].transport.write(b"\x81\x20half")
        await until(lambda: not connection.is_quiet)
        lease = await pool.acquire(principal(), want)

        assert not lease.holds_chain
        assert await ask(lease, "whole") == "whole"
        lease.release(reusable=True)


# Probes.


async def test_a_connection_not_heard_of_lately_is_probed_before_use() -> None:
    """It answers, and holds its chain still."""
    clock = Clock()
    async with upstream() as server, pooled(server.url, clock) as pool:
        want = await converse(pool, principal(), "r1")
        clock.now += 25
        lease = await pool.acquire(principal(), want)

        assert lease.holds_chain
        assert lease.connection.last_inbound_at == clock.now
        lease.release(reusable=True)


async def test_a_dead_connection_costs_one_probe_and_a_new_connection() -> None:
    """After a suspended hour all are dead: the others are not tried one after another."""
    clock = Clock()
    async with upstream() as server, pooled(server.url, clock, probe_timeout_s=0.1) as pool:
        leases = [await pool.acquire(principal()) for _ in range(5)]
        for number, lease in enumerate(leases):
            lease.release(reusable=True, response_id=f"r{number}")
        other = await converse(pool, principal("b"), "s")
        for connection in server.connections:
            connection.transport.pause_reading()
        clock.now += 60
        lease = await pool.acquire(principal(), Want(leases[0].connection_id, "r0"))

        assert not lease.holds_chain
        assert await ask(lease, "alive") == "alive"
        assert pool.counts() == {"connecting": 0, "busy": 1, "idle": 1, "spare": 0}
        assert pool.status(principal("b").key, other) is None
        lease.release(reusable=True)
        for connection in server.connections:
            reset(connection)


# Refusals.


@pytest.mark.parametrize(
    ("status", "result", "cooling"),
    [(401, "refused", 0), (403, "refused", 10), (429, "refused", 10), (404, "refused", 10)],
)
async def test_a_refused_upgrade_refuses_the_lease(status: int, result: str, cooling: int) -> None:
    """With upstream's own answer as the cause; the cool-down is as wide as that answer is."""
    clock, results = Clock(), []
    async with (
        upstream(refuse=refusing(status)) as server,
        pooled(server.url, clock, results=results) as pool,
    ):
        with pytest.raises(LeaseRefused) as caught:
            await pool.acquire(principal())
        assert caught.value.reason is Reason.UPGRADE_REFUSED
        assert isinstance(caught.value.cause, UpgradeRefused)
        assert caught.value.cause.status == status
        assert pool.cooldown_s(principal()) == pytest.approx(cooling, rel=0.11)
        if cooling:
            with pytest.raises(LeaseRefused) as caught:
                await pool.acquire(principal())
            assert caught.value.reason is Reason.COOLING_DOWN
            assert caught.value.cause is None
        others_wait = pool.cooldown_s(principal("b")) > 0
        assert others_wait == (status == 404)
        clock.now += 12
        if cooling:
            assert await refused_with(pool, principal()) is Reason.COOLING_DOWN
            await until(lambda: pool.counts()["spare"] == 1)
        lease = await pool.acquire(principal())
        lease.release(reusable=True)

        assert results == [result, "ok"]
        assert sum(pool.counts().values()) == 1


@pytest.mark.parametrize("is_over", [True, False], ids=["over", "not over"])
async def test_nobody_waits_to_see_whether_a_cooldown_is_over(is_over: bool) -> None:
    """One connection is tried in the background, however many ask; turns go elsewhere meanwhile."""
    clock, results = Clock(), []
    answering = asyncio.Event()

    async def refuse(connection: ServerConnection, _request: Request) -> Response | None:
        if len(server.requests) == 1:
            return connection.respond(http.HTTPStatus.NOT_FOUND, "")
        await answering.wait()
        return None if is_over else connection.respond(http.HTTPStatus.NOT_FOUND, "")

    async with (
        upstream(refuse=refuse) as server,
        pooled(server.url, clock, results=results) as pool,
    ):
        assert await refused_with(pool, principal()) is Reason.UPGRADE_REFUSED
        for _ in range(3):
            assert await refused_with(pool, principal("b")) is Reason.COOLING_DOWN
        await asyncio.sleep(0)
        assert pool.counts()["connecting"] == 0  # it has just begun
        clock.now += 12
        for caller in ("a", "b", "a", "c"):
            assert await refused_with(pool, principal(caller)) is Reason.COOLING_DOWN
        assert pool.counts()["connecting"] == 1
        await until(lambda: len(server.requests) == 2)
        answering.set()
        await until(lambda: len(results) == 2)
        if is_over:
            (await pool.acquire(principal())).release(reusable=True)
        else:
            assert pool.cooldown_s(principal()) == pytest.approx(20, rel=0.11)
            assert await refused_with(pool, principal()) is Reason.COOLING_DOWN

    assert results == ["refused", "ok" if is_over else "refused"]
    assert len(server.requests) == 2


async def test_where_there_is_no_room_a_cooldown_ends_with_the_next_connection_to_go() -> None:
    """A probe takes a place like any other connection."""
    clock = Clock()

    def refuse(connection: ServerConnection, _request: Request) -> Response | None:
        return (
            connection.respond(http.HTTPStatus.NOT_FOUND, "") if len(server.requests) == 2 else None
        )

    async with (
        upstream(refuse=refuse) as server,
        pooled(server.url, clock, max_per_principal=1) as pool,
    ):
        lease = await pool.acquire(principal())
        assert await refused_with(pool, principal("b")) is Reason.UPGRADE_REFUSED
        clock.now += 12
        assert await refused_with(pool, principal()) is Reason.COOLING_DOWN
        assert pool.counts()["connecting"] == 0
        lease.release(reusable=False)
        assert await refused_with(pool, principal()) is Reason.COOLING_DOWN
        assert pool.counts()["connecting"] == 1
        await until(lambda: pool.counts()["spare"] == 1)


async def test_retry_after_sets_the_cooldown() -> None:
    """Upstream knows best when to come back."""
    clock = Clock()
    async with (
        upstream(refuse=refusing(429, Retry_After="7")) as server,
        pooled(server.url, clock) as pool,
    ):
        with pytest.raises(LeaseRefused):
            await pool.acquire(principal())

        assert pool.cooldown_s(principal()) == 7


async def test_an_unreachable_upstream_refuses_the_lease(closed_port: int) -> None:
    """Its caller's until the cool-down is over, and everybody's once a second caller met it."""
    results: list[str] = []
    async with pooled(f"ws://127.0.0.1:{closed_port}/", results=results) as pool:
        for caller in (principal(), principal("b")):
            with pytest.raises(LeaseRefused) as caught:
                await pool.acquire(caller)
            assert caught.value.reason is Reason.CONNECT_FAILED
            assert isinstance(caught.value.cause, UpstreamUnreachable)
            with pytest.raises(LeaseRefused, match="cooling_down"):
                await pool.acquire(caller)
        with pytest.raises(LeaseRefused, match="cooling_down"):
            await pool.acquire(principal("c"))

    assert results == ["failed", "failed"]


async def test_one_missed_deadline_takes_websocket_mode_from_nobody_else() -> None:
    """While one caller's handshake gets no answer, others' do; then theirs go on as before."""
    clock, results = Clock(), []
    heard, over = asyncio.Event(), asyncio.Event()

    async def refuse(connection: ServerConnection, request: Request) -> None:
        if len(server.requests) == 1:
            heard.set()
            await over.wait()

    impatient = ConnectionSettings(connect_timeout_s=1.0, close_timeout_s=0.2)
    async with (
        upstream(refuse=refuse) as server,
        pooled(server.url, clock, connection=impatient, results=results) as pool,
    ):
        async with asyncio.TaskGroup() as group:
            late = group.create_task(refused_with(pool, principal()))
            await heard.wait()
            clock.now += 1
            await converse(pool, principal("b"), "r1")
        assert late.result() is Reason.CONNECT_FAILED
        await converse(pool, principal("c"), "r2")
        assert await refused_with(pool, principal()) is Reason.COOLING_DOWN
        over.set()

    assert results == ["ok", "timeout", "ok"]


async def refused_with(pool: Pool, caller: Principal) -> str:
    """Return the reason why a caller gets no lease."""
    with pytest.raises(LeaseRefused) as caught:
        await pool.acquire(caller)
    return caught.value.reason


async def test_a_handshake_that_takes_too_long_is_counted_as_such() -> None:
    """The turn goes to HTTP after the deadline."""

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()

    results: list[str] = []
    async with (
        raw_server(mute) as url,
        pooled(url, results=results, connection=ConnectionSettings(connect_timeout_s=0.05)) as pool,
    ):
        with pytest.raises(LeaseRefused, match="connect_failed"):
            await pool.acquire(principal())

    assert results == ["timeout"]


async def test_an_upstream_that_accepts_and_declines_opens_no_cooldown() -> None:
    """What it says goes to the turn that met it, and concerns nobody else."""

    async def handler(connection: ServerConnection) -> None:
        await connection.send('{"type":"error"}')
        await connection.close(1008)

    async with upstream(handler) as server, pooled(server.url) as pool:
        lease = await pool.acquire(principal())
        assert await lease.connection.receive() == [b'{"type":"error"}']
        lease.release(reusable=False)

        assert pool.cooldown_s(principal()) == 0


async def test_what_is_open_serves_while_no_more_may_be_opened() -> None:
    """A throttled handshake makes the turn take over the longest unused chain."""
    clock = Clock()

    def refuse(connection: ServerConnection, request: Request) -> Response | None:
        if len(server.requests) == 1:
            return None
        return connection.respond(http.HTTPStatus.TOO_MANY_REQUESTS, "")

    async with upstream(refuse=refuse) as server, pooled(server.url, clock) as pool:
        await converse(pool, principal(), "r1")
        for _ in range(2):  # by its own failure, then by the cool-down
            lease = await pool.acquire(principal())
            assert lease.connection_id == 1
            assert not lease.holds_chain
            lease.release(reusable=True, response_id="r2")
        with pytest.raises(LeaseRefused, match="cooling_down"):
            await pool.acquire(principal(), fresh=True)

        assert len(server.requests) == 2


async def test_limits_refuse_with_their_reason() -> None:
    """Turns that would be one too many go to HTTP."""
    async with upstream() as server, pooled(server.url, max_per_principal=1) as pool:
        lease = await pool.acquire(principal())
        with pytest.raises(LeaseRefused, match="connection_cap"):
            await pool.acquire(principal())
        lease.release(reusable=True)
    async with upstream() as server, pooled(server.url, handshake_burst=1) as pool:
        lease = await pool.acquire(principal())
        with pytest.raises(LeaseRefused, match="handshake_budget"):
            await pool.acquire(principal())
        lease.release(reusable=True)


async def test_an_idle_connection_makes_room_for_another_principal() -> None:
    """Its peer is told good-bye."""
    async with upstream() as server, pooled(server.url, max_total=1) as pool:
        want = await converse(pool, principal("a"), "r1")
        lease = await pool.acquire(principal("b"))
        assert pool.status(principal("a").key, want) is Reason.CONNECTION_LOST
        await server.connections[0].wait_closed()
        assert server.connections[0].close_code == 1000
        lease.release(reusable=True)


# Cancellation.


async def drive(coro: Coroutine[None, None, T], steps: int) -> T | None:
    """Run a task for so many turns of the loop, then cancel it; return its result, if any."""
    task = asyncio.get_running_loop().create_task(coro)
    for _ in range(steps):
        if task.done():
            break
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    return None if task.cancelled() else task.result()


@pytest.mark.parametrize("case", ["open", "probe", "probe_new", "evict"])
async def test_an_acquire_cancelled_at_any_point_keeps_nothing(case: str) -> None:
    """Neither a connection nor a place, neither in the pool nor at the server."""
    for steps in range(60):
        clock = Clock()
        async with (
            upstream() as server,
            pooled(server.url, clock, max_total=1, max_per_principal=1) as pool,
        ):
            who, want = principal("a"), None
            if case != "open":
                want = await converse(pool, who, "r1")
            if case.startswith("probe"):
                clock.now += 25
            if case == "probe_new":
                want = None
            if case == "evict":
                who = principal("b")
            lease = await drive(pool.acquire(who, want), steps)
            counts = pool.counts()
            assert counts["connecting"] == 0
            assert counts["busy"] == (lease is not None)
            if case == "probe" and lease is None:
                assert pool.status(who.key, want) is None
            if lease is not None:
                lease.release(reusable=True)
            await until(lambda s=server, p=pool: s.open_connections == len(p._connections))
            again = await pool.acquire(who)
            assert await ask(again, "ok") == "ok"
            again.release(reusable=True)
        if lease is not None and steps > 20:
            break
    assert lease is not None


async def test_cancels_never_reach_another_turn() -> None:
    """A pool of one, two callers, a hundred cancels: each answer goes to who asked for it."""

    async def handler(connection: ServerConnection) -> None:
        async for message in connection:
            for _ in range(3):
                await asyncio.sleep(0)
            await connection.send(message)

    rng = random.Random(7)
    answered = 0

    async with (
        upstream(handler) as server,
        pooled(server.url, max_per_principal=1, handshake_burst=10_000) as pool,
    ):

        async def turn(name: str) -> None:
            nonlocal answered
            try:
                lease = await pool.acquire(principal())
            except LeaseRefused:
                return
            reusable = False
            try:
                assert await ask(lease, name) == name
                reusable = True
                answered += 1
            finally:
                lease.release(reusable=reusable)

        for number in range(200):
            tasks = [
                asyncio.get_running_loop().create_task(turn(f"{number}-{caller}"))
                for caller in "ab"
            ]
            for _ in range(rng.randrange(40)):
                await asyncio.sleep(0)
            tasks[0].cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert not [result for result in results if isinstance(result, Exception)], results

        assert pool.counts()["busy"] == pool.counts()["connecting"] == 0
        assert answered > 20


# Spares.


async def test_a_spare_is_opened_after_the_last_was_taken() -> None:
    """The next conversation starts on it without a handshake."""
    async with upstream() as server, pooled(server.url, spare_per_principal=1) as pool:
        first = await pool.acquire(principal())
        await until(lambda: pool.counts()["spare"] == 1)
        second = await pool.acquire(principal(), fresh=True)
        assert second.connection_id == first.connection_id + 1
        await until(lambda: pool.counts()["spare"] == 1)
        assert len(server.requests) == 3
        first.release(reusable=True)
        second.release(reusable=True)


async def test_failing_spares_back_off() -> None:
    """A wrong key does not knock at every turn."""
    clock = Clock()

    def refuse(connection: ServerConnection, request: Request) -> Response | None:
        if len(attempts := server.requests) == 1:
            return None
        assert len(attempts) < 20
        return connection.respond(http.HTTPStatus.UNAUTHORIZED, "")

    async with (
        upstream(refuse=refuse) as server,
        pooled(server.url, clock, spare_per_principal=1) as pool,
    ):
        want = await converse(pool, principal(), "r")
        await until(lambda: len(server.requests) == 2 and not pool._spare_tasks)
        for _ in range(50):
            lease = await pool.acquire(principal(), want)
            lease.release(reusable=True, response_id="r")
            await asyncio.sleep(0)
        assert len(server.requests) == 2
        clock.now += 61
        lease = await pool.acquire(principal(), want)
        lease.release(reusable=True, response_id="r")
        await until(lambda: len(server.requests) == 3 and not pool._spare_tasks)

        assert pool.counts() == {"connecting": 0, "busy": 0, "idle": 1, "spare": 0}


async def test_a_spare_that_ends_at_once_is_struck_off() -> None:
    """It never becomes anybody's lease."""

    async def handler(connection: ServerConnection) -> None:
        if len(server.connections) == 1:
            await connection.wait_closed()

    async with upstream(handler) as server, pooled(server.url, spare_per_principal=1) as pool:
        lease = await pool.acquire(principal())
        await until(lambda: len(server.connections) == 2 and pool.counts()["spare"] == 0)
        await until(lambda: pool.counts()["connecting"] == 0)
        assert pool.counts()["busy"] == 1
        lease.release(reusable=True)


# The tick.


async def test_idle_connections_are_pinged_and_live() -> None:
    """A pong is life enough."""
    clock = Clock()
    async with upstream() as server, pooled(server.url, clock) as pool:
        want = await converse(pool, principal(), "r1")
        connection = next(iter(pool._connections.values()))
        for _ in range(200):
            clock.now += 1
            before = connection.pending_pings.copy()
            pool._sweep()
            if connection.pending_pings.keys() != before.keys():
                await until(lambda: not connection.pending_pings)

        assert pool.status(principal().key, want) is None


async def test_silent_connections_are_cut() -> None:
    """Idle or busy: the holder of a lease learns of it."""
    clock = Clock()
    async with upstream() as server, pooled(server.url, clock) as pool:
        await converse(pool, principal(), "r1")
        lease = await pool.acquire(principal(), fresh=True)
        receiving = asyncio.get_running_loop().create_task(lease.connection.receive())
        for connection in server.connections:
            connection.transport.pause_reading()
        for _ in range(31):
            clock.now += 1
            pool._sweep()
        with pytest.raises(ConnectionLost):
            await receiving
        lease.release(reusable=False)

        assert sum(pool.counts().values()) == 0
        for connection in server.connections:
            reset(connection)


@pytest.mark.parametrize(("seconds", "reason"), [(300, "unused"), (3100, "expiring")])
async def test_idle_connections_end_in_time(seconds: int, reason: str) -> None:
    """Unused, or near upstream's age limit, they are told good-bye."""
    clock = Clock()
    life = LifePolicy(nursery_ttl_s=300, retire_jitter=0.0)
    if reason == "expiring":
        life = LifePolicy(nursery_ttl_s=1e9, retire_jitter=0.0)
    async with upstream() as server, pooled(server.url, clock, life=life) as pool:
        want = await converse(pool, principal(), "r1")
        clock.now += seconds
        if reason == "expiring":
            assert pool.status(principal().key, want) is Reason.CONNECTION_EXPIRING
        with capture_logs() as logs:
            pool._sweep()
        await server.connections[0].wait_closed()

        assert server.connections[0].close_code == 1000
        assert [log["reason"] for log in logs if log["event"] == "connection_closed"] == [reason]


async def test_the_tick_runs_while_there_are_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And rests when there are none."""
    monkeypatch.setattr("proxy.upstream.pool._TICK_S", 0.001)
    life = LifePolicy(nursery_ttl_s=0.02)
    async with upstream() as server, pooled(server.url, life=life) as pool:
        await converse(pool, principal(), "r1")
        assert pool._ticker is not None
        await until(lambda: sum(pool.counts().values()) == 0)
        await until(lambda: pool._ticker is None)


async def test_principals_that_got_no_connection_are_forgotten(
    closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where none can be had at all, whoever comes with ever new keys fills no memory."""
    monkeypatch.setattr("proxy.upstream.pool._TICK_S", 0.001)
    clock = Clock()
    async with pooled(f"ws://127.0.0.1:{closed_port}/", clock) as pool:
        for number in range(5):
            with pytest.raises(LeaseRefused):
                await pool.acquire(principal(str(number)))
        assert len(pool._book._accounts) == 5
        clock.now += 60  # the handshake that was tried is forgotten, too
        await until(lambda: not pool._book._accounts)
        await until(lambda: pool._ticker is None)


# The end.


async def test_a_drain_waits_for_what_is_busy() -> None:
    """Idle connections end at once, busy ones when they are released; no new lease is given."""
    async with upstream() as server, pooled(server.url, spare_per_principal=1) as pool:
        await converse(pool, principal("b"), "r1")
        lease = await pool.acquire(principal())
        closing = asyncio.get_running_loop().create_task(pool.close(30))
        await until(lambda: sum(pool.counts().values()) == 1)
        with pytest.raises(LeaseRefused, match="websocket_off"):
            await pool.acquire(principal())
        assert await ask(lease, "last words") == "last words"
        assert not closing.done()
        lease.release(reusable=True, response_id="r2")
        await closing
        await until(lambda: server.open_connections == 0)

        assert {connection.close_code for connection in server.connections} <= {1000, 1006}
        assert sum(pool.counts().values()) == 0
        assert pool._ticker is None


async def test_a_drain_that_takes_too_long_cuts() -> None:
    """The holder of the lease finds its connection ended."""
    async with upstream() as server, pooled(server.url) as pool:
        lease = await pool.acquire(principal())
        await pool.close(0.01)
        with pytest.raises(ConnectionLost):
            await lease.connection.receive()
        lease.release(reusable=False)

        assert sum(pool.counts().values()) == 0


async def test_a_spare_that_is_being_opened_does_not_hold_up_a_drain() -> None:
    """Even if its task has not run at all yet."""
    async with upstream() as server, pooled(server.url, spare_per_principal=1) as pool:
        lease = await pool.acquire(principal())
        assert pool.counts()["connecting"] == 1
        lease.release(reusable=True)
        await pool.close(30)

        assert sum(pool.counts().values()) == 0


# Privacy.


async def test_nothing_private_is_logged() -> None:
    """Principals appear as their label, errors without addresses or headers."""
    with capture_logs() as logs:
        async with upstream(refuse=refusing(403)) as server, pooled(server.url) as pool:
            with pytest.raises(LeaseRefused):
                await pool.acquire(principal("hunter2"))
            await converse(pool, principal("hunter3"), "resp_secret")
    shown = repr(logs)

    assert "connection_opened" in shown
    assert principal("hunter3").label in shown
    for secret in ("hunter", "secret", principal("hunter3").key, "127.0.0.1"):
        assert secret not in shown


def test_the_clock_goes_on() -> None:
    """It never runs backwards, whether or not the machine sleeps."""
    readings = [awake_or_not() for _ in range(100)]

    assert readings == sorted(readings)


async def test_a_late_answer_never_reaches_another_turn() -> None:
    """Cancelled after the send: the answer arrives on a connection that is nobody's any more."""

    async def handler(connection: ServerConnection) -> None:
        async for message in connection:
            await asyncio.sleep(0)
            await connection.send(message)

    async with (
        upstream(handler) as server,
        pooled(server.url, max_per_principal=2, handshake_burst=10_000) as pool,
    ):

        async def leave_early(name: str) -> None:
            lease = await pool.acquire(principal())
            complete = False
            try:
                await ask(lease, name)
                complete = True
            finally:
                lease.release(reusable=complete, response_id=name if complete else None)

        for number in range(150):
            await drive(leave_early(f"stale-{number}"), number % 30)
            lease = await pool.acquire(principal())
            assert await ask(lease, f"fresh-{number}") == f"fresh-{number}"
            lease.release(reusable=True, response_id=f"fresh-{number}")


async def test_a_storm_of_reconnections_is_held_to_the_handshake_budget() -> None:
    """All connections die at once, all conversations come back at once: most go to HTTP."""
    clock = Clock()
    async with (
        upstream() as server,
        pooled(server.url, clock, handshake_burst=20, handshakes_per_s=3) as pool,
    ):
        leases = [await pool.acquire(principal()) for _ in range(20)]
        wants = [Want(lease.connection_id, "r") for lease in leases]
        for lease in leases:
            lease.release(reusable=True, response_id="r")
        clock.now += 2
        for connection in server.connections:
            reset(connection)
        await until(lambda: sum(pool.counts().values()) == 0)
        outcomes = await asyncio.gather(
            *(pool.acquire(principal(), want) for want in wants), return_exceptions=True
        )
        refused = [outcome for outcome in outcomes if isinstance(outcome, LeaseRefused)]

        assert {str(refusal.reason) for refusal in refused} == {"handshake_budget"}
        assert len(server.requests) == 26
        assert len(refused) == 14
        for outcome in outcomes:
            if not isinstance(outcome, BaseException):
                outcome.release(reusable=True)
