"""
Turns wait in line while the event loop has too many, and nothing else about them changes.

The line by itself, then with clients: in `HeldPace` every turn waits until the test lets it go.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from harness import eventually
from scripted import DELTAS, delta, front, turn_bytes, turn_of_the_loop
from wire import read_message

from proxy.core.plan import Planner
from proxy.downstream.pace import Pace

GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sk\r\n\r\n"
LARGE_BYTES = 1 << 20

# What the scripted upstream makes of a GET and of a POST: it takes upgrades only.
WEBSOCKETS_ONLY, NO_HTTP = 426, 502


# --- The line -------------------------------------------------------------------------------------


async def rounds_of(pace: Pace, sizes: list[int]) -> list[list[int]]:
    """Let turns of these sizes come at once; return which were let in at each round."""
    rounds: list[list[int]] = [[]]
    for number, size in enumerate(sizes):
        if pace.enter(size):
            rounds[0].append(number)
        else:
            pace.wait_in_line(size, lambda number=number: rounds[-1].append(number))
    while sum(map(len, rounds)) < len(sizes):
        rounds.append([])
        await asyncio.sleep(0)
    return rounds


async def test_so_many_are_let_in_at_a_round() -> None:
    """The rest follows in the order in which it came; what the loop has to do comes in between."""
    assert await rounds_of(Pace(3), [0] * 8) == [[0, 1, 2], [3, 4, 5], [6, 7]]


async def test_a_large_body_weighs_more() -> None:
    """It takes the room of many, and is let in by itself if it weighs more than a round may."""
    sizes = [0, LARGE_BYTES, 0, LARGE_BYTES, 0, 0]
    assert await rounds_of(Pace(4), sizes) == [[0, 1], [2, 3], [4, 5]]


async def test_few_turns_never_wait() -> None:
    """However many there are in all, a turn that comes alone is let in at once."""
    pace = Pace(3)
    for _ in range(20):
        assert pace.enter(0)
        await asyncio.sleep(0)


async def test_nobody_overtakes() -> None:
    """While there is a line, who comes has to join it."""
    pace, order = Pace(1), []
    assert pace.enter(0)
    pace.wait_in_line(0, lambda: order.append("first"))
    assert not pace.enter(0)
    waiting = asyncio.get_running_loop().create_task(pace.let_in(0))
    waiting.add_done_callback(lambda _: order.append("second"))
    await waiting
    await asyncio.sleep(0)
    assert order == ["first", "second"]


async def test_who_gives_up_waiting_holds_up_nobody() -> None:
    """A task that is cancelled in line is passed over."""
    pace = Pace(0)
    tasks = [asyncio.get_running_loop().create_task(pace.let_in(0)) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    async with asyncio.timeout(10):
        await asyncio.gather(*tasks[1:])
    assert tasks[0].cancelled()


# --- With clients ---------------------------------------------------------------------------------


class HeldPace(Pace):
    """A line that moves when the test says so."""

    def __init__(self) -> None:
        super().__init__(0)

    def _expect_round(self) -> None:
        pass

    @property
    def length(self) -> int:
        """How many wait."""
        return len(self._line)

    def go(self) -> None:
        """Let the next one in."""
        self._begin_round()


@contextlib.asynccontextmanager
async def held_front(**config: Any) -> Any:
    """Run a proxy in which every turn waits."""
    async with front(**config) as f:
        pace = f.front._pace = HeldPace()
        yield f, pace
        assert not pace.length


async def waiting(pace: HeldPace, count: int = 1) -> None:
    """Wait until so many are in line."""
    await eventually(lambda: pace.length == count)


@pytest.mark.parametrize("raw", [turn_bytes(), turn_bytes(stream=False)], ids=["stream", "whole"])
async def test_a_turn_in_line_goes_on_as_ever(raw: bytes) -> None:
    """Upstream hears nothing of it until its time, and its body is accounted for."""
    async with held_front() as (f, pace):
        line = await f.line(raw)
        await waiting(pace)
        assert f.turns.empty()
        assert f.front.budget.held_bytes > 0
        pace.go()
        (await f.turn()).answer(*DELTAS)
        assert (await line.reply()).status == 200
        await f.settled()
        assert (f.express, line.is_lent, f.statuses) == (1, False, [200])


async def test_what_comes_early_waits_behind_it() -> None:
    """A second request that is sent while the first is in line is answered second."""
    async with held_front() as (f, pace):
        line = await f.line(turn_bytes("first"))
        await waiting(pace)
        line.send(turn_bytes("second"))
        await turn_of_the_loop()
        for text in ("first", "second"):
            await waiting(pace)
            pace.go()
            turn = await f.turn()
            assert turn.message["input"] == text
            turn.answer(delta(text))
            assert delta(text) in (await line.reply()).body
        assert (f.express, line.is_lent) == (2, False)


@pytest.mark.parametrize("early", [b"", GET], ids=["alone", "with another behind it"])
async def test_a_turn_that_is_aiohttps_in_the_end(early: bytes) -> None:
    """It is lent when its time has come, and so is what came too early; both are answered."""
    unfit = turn_bytes(background=True)
    async with held_front() as (f, pace):
        line = await f.line(unfit)
        await waiting(pace)
        line.send(early)
        await turn_of_the_loop()
        assert not line.is_lent
        pace.go()
        assert (await line.reply()).status == NO_HTTP
        if early:
            await waiting(pace)
            pace.go()
            assert (await line.reply()).status == WEBSOCKETS_ONLY
        assert line.is_lent
        await f.settled()


@pytest.mark.parametrize(
    "raw",
    [turn_bytes("hi", "Origin: http://localhost"), GET, turn_bytes("hi", path="/v1/responses?a=b")],
    ids=["a turn", "another request", "one with a query"],
)
async def test_requests_that_aiohttp_reads_wait_as_well(raw: bytes) -> None:
    """They are answered when their time has come."""
    async with held_front() as (f, pace):
        line = await f.line(raw)
        await waiting(pace)
        assert f.turns.empty()
        pace.go()
        if b"Origin" in raw:
            (await f.turn()).answer()
        assert (await line.reply()).status in (200, WEBSOCKETS_ONLY, NO_HTTP)
        await f.settled()


@pytest.mark.parametrize("field", ["X: y", "Origin: http://localhost"], ids=["ours", "aiohttp's"])
async def test_who_leaves_in_line_is_passed_over(field: str) -> None:
    """Nothing of the turn goes upstream, nothing of it is held, and the next one has its turn."""
    async with held_front() as (f, pace):
        gone = await f.line(turn_bytes("gone", field))
        await waiting(pace)
        stays = await f.line(turn_bytes("stays"))
        await waiting(pace, 2)
        held_bytes = f.front.budget.held_bytes
        gone.writer.close()
        await eventually(lambda: f.front.budget.held_bytes < held_bytes)
        pace.go()
        pace.go()
        turn = await f.turn()
        assert turn.message["input"] == "stays"
        turn.answer()
        assert (await stays.reply()).status == 200
        await f.settled()
        assert f.turns.empty()


async def test_the_end_waits_for_who_is_in_line() -> None:
    """A turn that is here when the end begins is served, and is the last of its connection."""
    async with held_front() as (f, pace):
        line = await f.line(turn_bytes())
        await waiting(pace)
        f.proxy._not_ready()
        runner: Any = f.proxy._front_runner
        ending = asyncio.get_running_loop().create_task(runner.cleanup())
        await eventually(lambda: not runner.addresses)
        await turn_of_the_loop()
        assert not ending.done()
        pace.go()
        (await f.turn()).answer()
        reply = await line.reply()
        async with asyncio.timeout(10):
            await ending
        assert (reply.status, reply.get("Connection")) == (200, "close")


async def test_a_fault_in_line_is_a_500_and_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client hears of it, and the line moves on."""

    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    async with held_front() as (f, pace):
        line, other = await f.line(turn_bytes()), await f.line(turn_bytes("other"))
        await waiting(pace, 2)
        with monkeypatch.context() as patched:
            patched.setattr(Planner, "plan", fail)
            pace.go()
        assert b" 500 " in await line.rest()
        assert [call.args for call in f.log.calls if call.method_name == "exception"] == [
            ("failed",)
        ]
        f.log.calls.clear()
        pace.go()
        (await f.turn()).answer()
        assert (await other.reply()).status == 200
        await f.settled()


async def test_a_line_that_is_long_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A hundred clients that speak at once are not one piece of work.

    Between two rounds of the loop at most two shares are let in: the one of the round that ends,
    and the one of the next.
    """
    clients, planned, most = 100, 0, 0
    plan = Planner.plan

    def counted(*args: Any) -> Any:
        nonlocal planned
        planned += 1
        return plan(*args)

    def look() -> None:
        nonlocal planned, most
        most, planned = max(most, planned), 0
        if ticking:
            loop.call_soon(look)

    loop, ticking = asyncio.get_running_loop(), True
    monkeypatch.setattr(Planner, "plan", counted)
    async with front() as f:
        f.front._pace = Pace(8)
        lines = [await f.line() for _ in range(clients)]
        loop.call_soon(look)
        for line in lines:
            line.send(turn_bytes(background=True))  # which upstream answers without the test
        replies = await asyncio.gather(*(read_message(line.reader) for line in lines))
        assert {reply.status for reply in replies} == {NO_HTTP}
        ticking = False
        await f.settled()
    assert 0 < most <= 16
