"""
Turns that are carried out within callbacks, over real sockets on either side.

What is told of each test's connection is what it did: the replies it gave, whether aiohttp's
protocol was made for it, what is left behind when it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import json
import socket
import struct
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from harness import eventually, stack
from scripted import (
    DELTAS,
    Line,
    closes_at_once,
    completed,
    created,
    delta,
    ends_at_once,
    ends_within,
    fails_within,
    front,
    is_refused,
    is_refused_for_now,
    is_silent,
    stops_within,
    talks_nonsense,
    talks_nonsense_within,
    turn_bytes,
    turn_of_the_loop,
)
from websockets.frames import Frame, Opcode
from websockets.protocol import CLIENT, OPEN, SERVER
from websockets.protocol import Protocol as Framing
from wire import read_head

from proxy import app
from proxy.core.plan import Planner
from proxy.core.reply import ReplyReader
from proxy.core.request import TurnRequest
from proxy.downstream import deadlines
from proxy.downstream.bodies import zstd
from proxy.downstream.client import ClientConnection
from proxy.downstream.deadlines import LentProtocol
from proxy.downstream.express import Express
from proxy.upstream.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Callable

    from scripted import Received, Scripted

GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sk\r\n\r\n"


def sse(*messages: bytes) -> bytes:
    """Return the SSE bytes that these messages become."""
    reader = ReplyReader(stream=True, hide_previous_response_id=None, collect_output=False)
    return reader.feed(list(messages))


def leave(line: Line, *, reset: bool = False) -> None:
    """Close a client's connection, politely or with a reset."""
    if reset:
        sock = line.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        line.writer.transport.abort()
    else:
        line.writer.close()


# --- Which requests go this way -------------------------------------------------------------------

BODY = json.dumps({"model": "m", "input": "hi", "store": False, "stream": True}).encode()

EXPRESS: dict[str, bytes] = {
    "a plain turn": turn_bytes(),
    "one that is not streamed": turn_bytes(stream=False),
    "without the version": turn_bytes(path="/responses"),
    "with the headers of a client": turn_bytes(
        "hi", "Connection: keep-alive", "Accept-Encoding: gzip, br", "Content-Type: x/y"
    ),
    "gzip": turn_bytes("", "Content-Encoding: gzip", body=gzip.compress(BODY)),
    "zstd": turn_bytes("", "Content-Encoding: ZSTD", body=zstd.compress(BODY)),
    "two encodings": turn_bytes(
        "", "Content-Encoding: gzip, zstd", body=zstd.compress(gzip.compress(BODY))
    ),
}
CHUNKED = turn_bytes().partition(b"Content-Length")[0] + (
    b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
)
NOT_EXPRESS: dict[str, bytes] = {
    "in chunks": CHUNKED,
    "with an expectation": turn_bytes("hi", "Expect: 100-continue"),
    "from a page": turn_bytes("hi", "Origin: http://localhost"),
    "the last one of its connection": turn_bytes("hi", "Connection: close"),
    "in HTTP/1.0": turn_bytes().replace(b"HTTP/1.1", b"HTTP/1.0"),
}


@pytest.mark.parametrize("name", EXPRESS)
async def test_a_plain_turn_is_carried_out_without_aiohttp(name: str) -> None:
    """Nothing has to be waited for, so no protocol of aiohttp's is made, and all else is right."""
    async with front() as f:
        line = await f.line(EXPRESS[name])
        turn = await f.turn()
        assert turn.message["input"] == "hi"
        turn.answer(*DELTAS)
        reply = await line.reply()

        assert (f.express, line.is_lent) == (1, False)
        assert reply.status == 200
        if b'"stream": false' in EXPRESS[name]:
            assert json.loads(reply.body)["status"] == "completed"
        else:
            assert reply.body == sse(created(), *DELTAS, completed())
        await f.settled()
        assert f.statuses == [200]


@pytest.mark.parametrize("name", NOT_EXPRESS)
async def test_other_requests_are_aiohttps(name: str) -> None:
    """They are turns as well, and get their answers."""
    async with front() as f:
        line = await f.line(NOT_EXPRESS[name])
        if b"100-continue" in NOT_EXPRESS[name]:
            assert (await read_head(line.reader)).status == 100
        (await f.turn()).answer()
        head = await read_head(line.reader)

        assert (f.express, line.is_lent) == (0, True)
        assert head.status == 200
        await f.settled()
        assert f.statuses == [200]


async def test_the_connection_that_a_conversation_needs_is_at_hand() -> None:
    """A turn that goes on where its connection has left off is a delta, and waits for nothing."""
    output = {"type": "message", "role": "assistant", "content": [], "id": "msg_1"}
    first = [{"role": "user", "content": "one"}]
    async with front() as f:
        line = await f.line(turn_bytes(input=first))
        (await f.turn()).say(created("resp_7"), completed("resp_7", output=[output]))
        assert (await line.reply()).get("turnwire-mode") == "full"
        line.send(turn_bytes(input=[*first, output, {"role": "user", "content": "two"}]))
        turn = await f.turn()
        turn.say(created("resp_8"), completed("resp_8"))
        reply = await line.reply()

        assert (f.express, line.is_lent) == (2, False)
        assert turn.message["previous_response_id"] == "resp_7"
        assert turn.message["input"] == [{"role": "user", "content": "two"}]
        assert reply.get("turnwire-mode") == "delta"


async def test_chat_goes_this_way_too() -> None:
    """A turn of Chat Completions is read and answered in its own form."""
    async with front(chat_completions="translate") as f:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        raw = json.dumps(body).encode()
        line = await f.line(turn_bytes(path="/v1/chat/completions", body=raw))
        (await f.turn()).answer()
        reply = await line.reply()

        assert (f.express, line.is_lent) == (1, False)
        assert reply.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    "config",
    [
        {"tuning": {"express": False}},
        {"mode": "shadow"},
        {"websocket": {"enabled": False}},
    ],
    ids=str,
)
async def test_it_can_be_off(config: dict[str, Any]) -> None:
    """Then aiohttp reads every connection from its beginning."""
    async with stack(**config) as s:
        agent = s.agent()
        reply = await agent.send([{"role": "user", "content": "[calls=0] Hello."}])
        assert reply.status == 200
        runner: Any = s.proxy._front_runner
        assert runner._connect is None
        assert not runner.server._clients
        assert runner.server.connections


async def test_without_a_view_of_aiohttps_rest_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new version that can't be shared with reads everything itself."""
    monkeypatch.setattr(app, "RESTS_VISIBLY", False)
    async with stack() as s:
        reply = await s.agent().send([{"role": "user", "content": "[calls=0] Hello."}])
        assert reply.status == 200
        runner: Any = s.proxy._front_runner
        assert not runner.server._clients
        assert runner.server.connections


# --- In pieces, in a row, and taking turns with aiohttp -------------------------------------------


async def test_a_request_may_be_split_anywhere() -> None:
    """At whichever byte a request is in two reads, it is the same turn."""
    raw = turn_bytes()
    async with front() as f:
        line = await f.line()
        for place in range(1, len(raw)):
            line.send(raw[:place])
            await turn_of_the_loop()
            line.send(raw[place:])
            turn = await f.turn()
            assert turn.message["input"] == "hi"
            turn.answer()
            assert (await line.reply()).body == sse(created(), completed())

        assert (f.express, line.is_lent) == (len(raw) - 1, False)
        assert f.statuses == [200] * (len(raw) - 1)
        await f.settled()


async def test_a_request_may_come_byte_by_byte() -> None:
    """As many reads as bytes make one turn."""
    async with front() as f:
        line = await f.line()
        for byte in turn_bytes():
            line.send(bytes([byte]))
            await turn_of_the_loop()
        (await f.turn()).answer()
        assert (await line.reply()).status == 200
        assert (f.express, line.is_lent) == (1, False)


async def test_a_body_that_drips_takes_no_more_memory_than_it_has_bytes() -> None:
    """What came in drops is held in pieces of some size, and is the same body."""
    text = "".join(chr(97 + number % 26) for number in range(9000))
    raw = turn_bytes(text)
    async with front() as f:
        line = await f.line(raw[:-9000])
        for start in range(len(raw) - 9000, len(raw), 3):
            line.send(raw[start : start + 3])
            await turn_of_the_loop()
            assert len(line.connection._pieces) <= 3
        turn = await f.turn()
        assert turn.message["input"] == text
        turn.answer()
        assert (await line.reply()).status == 200
        assert (f.express, line.is_lent) == (1, False)


async def test_a_large_body_comes_in_many_reads() -> None:
    """It is put together, and sent as it is."""
    async with front() as f:
        line = await f.line(turn_bytes("x" * 700_000))
        turn = await f.turn()
        assert turn.message["input"] == "x" * 700_000
        turn.answer()
        assert (await line.reply()).status == 200
        assert (f.express, line.is_lent) == (1, False)
        await f.settled()


async def test_requests_in_one_write_are_answered_in_order() -> None:
    """Who sends several at once gets several replies."""
    async with front() as f:
        line = await f.line(*(turn_bytes(f"no. {number}") for number in range(4)))
        for number in range(4):
            turn = await f.turn()
            assert turn.message["input"] == f"no. {number}"
            turn.answer(delta(f"reply {number}"))
            reply = await line.reply()
            assert reply.body == sse(created(), delta(f"reply {number}"), completed())
        await f.settled()
        assert f.statuses == [200] * 4


@pytest.mark.parametrize("first_part", [1, 60, 150, None])
async def test_a_request_that_comes_too_early_waits_its_turn(first_part: int | None) -> None:
    """Sent while the one before is being answered, in part or whole, it is answered next."""
    second = turn_bytes("second")
    async with front() as f:
        line = await f.line(turn_bytes("first"))
        turn = await f.turn()
        turn.say(created(), DELTAS[0])
        await line.reader.readuntil(b'"word 1"')
        line.send(second[:first_part])
        await turn_of_the_loop()
        assert f.turns.empty()
        turn.say(*DELTAS[1:], completed())
        rest = await line.reader.readuntil(b"0\r\n\r\n")
        assert b"word 8" in rest
        if first_part is not None:
            line.send(second[first_part:])
        turn = await f.turn()
        assert turn.message["input"] == "second"
        turn.answer()

        assert (await line.reply()).body == sse(created(), completed())
        assert (f.express, line.is_lent) == (2, False)


async def test_a_request_that_comes_too_early_waits_for_a_driver_too() -> None:
    """The turn before it is handed over, and both are answered in order."""
    async with front() as f:
        line = await f.line(turn_bytes("first"))
        turn = await f.turn()
        line.send(turn_bytes("second"))
        await turn_of_the_loop()
        turn.hang_up()
        for text in ("first", "second"):
            turn = await f.turn()
            assert turn.message["input"] == text
            turn.answer(delta(text))
            assert (await line.reply()).body == sse(created(), delta(text), completed())
        await f.settled()
        assert f.statuses == [200, 200]


async def test_a_connection_changes_hands_and_back() -> None:
    """Between other requests, which aiohttp reads, plain turns still are our own."""
    async with front() as f:
        line = await f.line()
        for number, raw in enumerate([turn_bytes(), GET, turn_bytes(), GET, turn_bytes(), CHUNKED]):
            line.send(raw)
            if raw != GET:
                (await f.turn()).answer()
            reply = await line.reply()
            assert raw == GET or reply.body == sse(created(), completed())
            assert line.read_by_aiohttp == (number + 1) // 2
        assert f.express == 3
        await f.settled()


@pytest.mark.parametrize("raw", [GET, CHUNKED, turn_bytes("hi", "Origin: http://localhost")])
async def test_turns_that_follow_are_not_lost_on_aiohttp(raw: bytes) -> None:
    """A turn in one write with another kind of request is aiohttp's too, and so are later ones."""
    async with front() as f:
        line = await f.line(raw, turn_bytes("after"))
        for number in range(2 - (raw == GET)):
            (await f.turn()).answer()
            if number == 0 and raw == GET:
                break
        await line.reply()
        assert (await line.reply()).status == 200
        line.send(turn_bytes("later"))
        (await f.turn()).answer()
        assert (await line.reply()).status == 200
        assert (f.express, line.read_by_aiohttp) == (0, 3)


@pytest.mark.parametrize(
    "oddity",
    [
        b"\x00",
        b"GET / HTTP/1.1\nHost: x\n\n",
        b"POST /v1/responses HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01",
    ],
)
async def test_what_is_no_http_is_refused_by_aiohttp(oddity: bytes) -> None:
    """After a good turn as well as at once: one 400, in the API's shape, and the end."""
    async with front(tolerates=["Error handling request"]) as f:
        for before in (b"", turn_bytes()):
            line = await f.line(before)
            if before:
                (await f.turn()).answer()
                await line.reply()
            line.send(oddity, b"\r\n\r\n")
            reply = await line.reply()
            assert reply.status == 400
            assert json.loads(reply.body)["error"]["type"] == "invalid_request_error"
            assert await line.rest() == b""


# --- Clients that leave ---------------------------------------------------------------------------


async def nothing(_: Scripted) -> Line:
    """Connect, and say nothing."""
    return await _.line()


async def part_of_a_head(f: Scripted) -> Line:
    """Send the beginning of a head."""
    return await f.line(turn_bytes()[:50])


async def part_of_a_body(f: Scripted) -> Line:
    """Send all but one byte."""
    line = await f.line(turn_bytes()[:-1])
    await eventually(lambda: f.front.budget.held_bytes)
    return line


async def sent(f: Scripted) -> Line:
    """Send a turn that upstream has said nothing to."""
    line = await f.line(turn_bytes())
    await f.turn()
    return line


async def not_streamed(f: Scripted) -> Line:
    """Send a turn that is not streamed, half of whose answer has come."""
    line = await f.line(turn_bytes(stream=False))
    (await f.turn()).say(created(), *DELTAS)
    await turn_of_the_loop()
    return line


async def streamed(f: Scripted) -> Line:
    """Read half of an answer."""
    line = await f.line(turn_bytes())
    (await f.turn()).say(created(), *DELTAS)
    await line.reader.readuntil(b'"word 8"')
    return line


async def early(f: Scripted) -> Line:
    """Read half of an answer, and have sent the next request."""
    line = await streamed(f)
    line.send(turn_bytes("early")[:100])
    await eventually(lambda: line.connection._early)
    return line


async def full(f: Scripted) -> Line:
    """Have read nothing of a long answer, which waits."""
    line = await f.line(turn_bytes())
    line.writer.transport.pause_reading()
    turn = await f.turn()
    turn.say(created())
    for number in range(400):
        turn.say(delta("x" * 50_000, number))
    await eventually(lambda: line.connection.is_writing_paused)
    return line


async def handed_over(f: Scripted) -> Line:
    """Send a turn that a driver goes on with."""
    line = await f.line(turn_bytes())
    (await f.turn()).hang_up()
    await f.turn()
    return line


STAGES = {
    nothing: [],
    part_of_a_head: [],
    part_of_a_body: [],
    sent: [499],
    not_streamed: [499],
    streamed: [499],
    early: [499],
    full: [499],
    handed_over: [499],
}


@pytest.mark.parametrize("reset", [False, True], ids=["closes", "resets"])
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
async def test_nothing_is_left_of_a_client_that_leaves(
    stage: Callable[[Scripted], Any], reset: bool
) -> None:
    """At whatever stage, the lease and the body are let go, and the turn is told of once."""
    async with front() as f:
        line = await stage(f)
        leave(line, reset=reset)

        await eventually(lambda: not f.clients)
        await f.settled()
        assert f.statuses == STAGES[stage]
        expected = 1 if not f.statuses else 0  # a connection in the middle of an answer is cut
        assert f.metric("turnwire_connections", state="idle") == expected
        assert not f.front._deadlines._turns

        again = await f.line(turn_bytes("again"))
        (await f.turn()).answer()
        assert (await again.reply()).status == 200


async def test_a_client_that_closes_and_reads_nothing_holds_nothing() -> None:
    """What it was sent may never be taken; the turn ends when the client does."""
    async with front() as f:
        line = await full(f)
        line.writer.write_eof()
        await f.settled()
        assert f.statuses == [499]
        assert not f.front._deadlines._turns


# --- Turns that have to wait after all ------------------------------------------------------------


async def test_a_turn_without_a_connection_waits_for_one() -> None:
    """It is not begun here, and a driver opens a connection."""
    async with front(connections={"spare_per_principal": 0}) as f:
        line = await f.line(turn_bytes())
        (await f.turn()).answer()
        assert (await line.reply()).status == 200
        assert (f.express, line.is_lent) == (0, True)


async def test_a_connection_that_rested_for_long_is_asked_first() -> None:
    """A ping and its pong have to be waited for."""
    async with front(websocket={"probe_after_idle_s": 0.01}) as f:
        await asyncio.sleep(0.02)  # what is tested is this time
        line = await f.line(turn_bytes())
        (await f.turn()).answer()
        assert (await line.reply()).status == 200
        assert (f.express, line.is_lent) == (0, True)
        assert f.metric("turnwire_connects_total", result="ok") == 1


async def test_a_long_message_is_sent_in_fragments() -> None:
    """That takes waiting between them; the lease is the one that was taken."""
    async with front() as f:
        line = await f.line(turn_bytes("x" * (1 << 20)))
        turn = await f.turn()
        assert turn.message["input"] == "x" * (1 << 20)
        turn.answer()
        assert (await line.reply()).status == 200
        assert (f.express, line.is_lent) == (1, True)
        assert f.metric("turnwire_connects_total", result="ok") == 1
        await f.settled()


def patience(trouble: object) -> dict[str, Any]:
    """Return the configuration for what upstream does: short deadlines where one has to pass."""
    if trouble not in (is_silent, stops_within):
        return {}
    return {"websocket": {"first_event_timeout_s": 0.6, "silence_timeout_s": 0.6}}


BEFORE = {
    is_refused: 400,
    is_refused_for_now: 429,
    ends_at_once: 200,
    closes_at_once: 200,
    is_silent: 200,
    talks_nonsense: 200,
}
WITHIN = {fails_within: 500, ends_within: 502, stops_within: 504, talks_nonsense_within: 502}


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("trouble", BEFORE, ids=lambda trouble: trouble.__name__)
async def test_trouble_before_the_first_byte_is_met_by_a_driver(
    trouble: Callable[[Scripted, Received], Any], streams: bool
) -> None:
    """What was begun here goes on there: the turn is sent again, or its error told, and once."""
    async with front(**patience(trouble)) as f:
        line = await f.line(turn_bytes(stream=streams))
        await trouble(f, await f.turn())
        reply = await line.reply()

        assert (f.express, line.is_lent) == (1, True)
        assert reply.status == BEFORE[trouble]
        if reply.status != 200:
            assert json.loads(reply.body)["error"]["message"] == "No."
        await f.settled()
        assert f.statuses == [BEFORE[trouble]]

        line.send(turn_bytes("next"))
        (await f.turn()).answer()
        assert (await line.reply()).status == 200


@pytest.mark.parametrize("trouble", WITHIN, ids=lambda trouble: trouble.__name__)
async def test_trouble_within_an_answer_that_is_not_streamed_is_an_error(
    trouble: Callable[[Scripted, Received], Any],
) -> None:
    """Nothing was written yet, so the status can say it."""
    async with front(**patience(trouble)) as f:
        line = await f.line(turn_bytes(stream=False))
        await trouble(f, await f.turn())
        reply = await line.reply()

        assert (f.express, line.is_lent) == (1, True)
        assert reply.status in (WITHIN[trouble], 502)
        assert "error" in json.loads(reply.body)
        await f.settled()
        assert f.statuses == [reply.status]


@pytest.mark.parametrize("tells", ["error", "break"])
@pytest.mark.parametrize("trouble", WITHIN, ids=lambda trouble: trouble.__name__)
async def test_trouble_within_a_stream_breaks_it_off(
    trouble: Callable[[Scripted, Received], Any], tells: str
) -> None:
    """All events before it, one error if that is wished, no last chunk; nothing else is needed."""
    async with front(**patience(trouble), reply={"lost_upstream": tells}) as f:
        line = await f.line(turn_bytes())
        await trouble(f, await f.turn())
        head = await read_head(line.reader)
        received = await line.rest()

        assert (f.express, line.is_lent) == (1, False)
        assert head.status == 200
        assert not received.endswith(b"0\r\n\r\n")
        assert b'"word 8"' in received
        is_told = tells == "error" or trouble is fails_within
        assert received.count(b"event: error\n") == is_told
        await f.settled()
        assert f.statuses == [200]
        assert f.metric("turnwire_connections", state="idle") == 0


# --- Slow clients, and silence --------------------------------------------------------------------


async def test_a_slow_reader_stops_upstream_and_loses_nothing() -> None:
    """While the client does not read, neither do we; silence is not counted then."""
    block = [delta("x" * 1000, number) for number in range(1000)]
    counted = 20

    async def talk(turn: Received) -> None:
        for _ in range(counted):
            for each in block:
                await turn.server.send(each, text=True)
        await turn.server.send(completed(), text=True)

    config = {"reply": {"keepalive_s": 0.01}, "websocket": {"silence_timeout_s": 0.1}}
    async with front(**config) as f, asyncio.TaskGroup() as group:
        line = await f.line(turn_bytes())
        line.reader._limit = 1 << 16
        turn = await f.turn()
        turn.say(created())
        await line.reader.readuntil(b"event: response.created")
        talking = group.create_task(talk(turn))
        paused = await eventually(lambda: line.connection._turn._connection)
        await eventually(lambda: paused.is_reading_paused)
        await asyncio.sleep(0.2)  # longer than upstream may be silent
        assert paused.is_reading_paused
        assert not talking.done()
        received = bytearray()
        while not received.endswith(b"\r\n0\r\n\r\n"):
            received += await line.reader.read(1 << 20)

        assert received.count(b"event: response.output_text.delta") == counted * 1000
        assert received.count(b"event: response.completed") == 1
        assert (f.express, line.is_lent) == (1, False)
        await f.settled()
        assert not paused.is_reading_paused
        assert f.statuses == [200]


@pytest.mark.parametrize("streams", [True, False])
async def test_who_asks_on_and_reads_nothing_waits(streams: bool) -> None:
    """The next turn begins when the reply before it has been taken, or what piles up is endless."""
    answer = [delta("x" * 50_000, number) for number in range(200)]
    text = {"type": "output_text", "text": "x" * 10_000_000}
    item = {"type": "message", "role": "assistant", "content": [text]}
    last = completed() if streams else completed(output=[item])
    asked = turn_bytes(stream=streams)
    async with front() as f:
        line = await f.line(asked)
        line.writer.transport.pause_reading()
        turn = await f.turn()
        line.send(asked, asked)
        await eventually(lambda: line.connection._early)
        turn.say(created(), *(answer if streams else ()), last)
        await eventually(lambda: line.connection.is_writing_paused)
        await turn_of_the_loop()
        assert f.turns.empty()
        line.send(GET)
        await turn_of_the_loop()
        line.writer.transport.resume_reading()
        await line.reply()
        for _ in range(2):
            (await f.turn()).answer(delta())
            assert (await line.reply()).status == 200
        assert (await line.reply()).status == 426  # upstream takes nothing else
        await f.settled()
        assert f.statuses == [200] * 3


async def test_the_end_does_not_wait_for_a_request_behind_an_unread_reply() -> None:
    """It was not begun: the connection is closed when the reply has been taken."""
    async with front() as f:
        line = await f.line(turn_bytes(stream=False))
        line.writer.transport.pause_reading()
        turn = await f.turn()
        line.send(turn_bytes("second"))
        await eventually(lambda: line.connection._early)
        turn.say(created(), completed(output=[{"text": "x" * 10_000_000}]))
        await eventually(lambda: line.connection.is_writing_paused)
        line.connection.close_when_at_rest()
        line.writer.transport.resume_reading()
        assert len((await line.reply()).body) > 10_000_000
        assert await line.rest() == b""
        assert f.turns.empty()
        await f.settled()


async def test_one_timer_comments_on_all_silences() -> None:
    """Streams are kept alive, each for itself, until one has been silent for too long."""
    config = {"reply": {"keepalive_s": 0.1}, "websocket": {"silence_timeout_s": 0.6}}
    async with front(**config) as f:
        lines = [await f.line(turn_bytes()) for _ in range(3)]
        for turn in [await f.turn() for _ in lines]:
            turn.answer()
        await f.settled()
        assert f.metric("turnwire_connections", state="idle") == 3
        patient, silent, _whole = [
            await f.line(turn_bytes(text, stream=text != "whole"))
            for text in ("patient", "silent", "whole")
        ]
        turns = {}
        for _ in range(3):
            turn = await f.turn()
            turns[turn.message["input"]] = turn
            turn.say(created())
        silence = asyncio.get_running_loop().create_task(silent.rest())
        while not silence.done():
            await patient.reader.readuntil(b": keep-alive\n")
            turns["patient"].say(DELTAS[0])
        received = await silence
        assert received.count(b": keep-alive\n") >= 2
        assert received.count(b"event: error\n") == 1
        turns["patient"].say(completed())
        last = await patient.reader.readuntil(b"0\r\n\r\n")
        assert b"event: response.completed" in last
        await f.settled()


async def test_an_answer_that_was_accepted_may_take_its_time() -> None:
    """What shows that upstream is at work moves the deadline of the first event to that of all."""
    limits = {"websocket": {"first_event_timeout_s": 0.2, "silence_timeout_s": 20}}
    async with front(**limits, chat_completions="translate") as f:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        raw = json.dumps(body).encode()
        line = await f.line(turn_bytes(path="/v1/chat/completions", body=raw))
        turn = await f.turn()
        turn.say(created())  # nothing that a chunk could show
        await asyncio.sleep(0.4)
        turn.say(completed())
        reply = await line.reply()
        assert reply.body.endswith(b"data: [DONE]\n\n")
        assert (f.express, f.turns.qsize()) == (1, 0)


# --- Deadlines of a connection --------------------------------------------------------------------


async def test_a_head_must_end_in_time() -> None:
    """Silence is ended without a word; a head that drips is a 408, on a used connection too."""
    async with front(limits={"header_timeout_s": 0.5}) as f:
        line = await f.line()
        assert await line.rest() == b""

        for before in (b"", turn_bytes()):
            line = await f.line(before)
            if before:
                (await f.turn()).answer()
                await line.reply()
            answer = asyncio.get_running_loop().create_task(line.rest())
            for byte in turn_bytes("x" * 1000):
                line.send(bytes([byte]))
                await asyncio.wait([answer], timeout=0.01)
                if answer.done():
                    break
            assert b" 408 " in await answer


async def test_a_used_connection_may_rest() -> None:
    """The deadline of a head begins with its first byte."""
    async with front(limits={"header_timeout_s": 0.3}) as f:
        line = await f.line(turn_bytes())
        (await f.turn()).answer()
        await line.reply()
        await asyncio.sleep(0.5)
        line.send(turn_bytes())
        (await f.turn()).answer()
        assert (await line.reply()).status == 200


async def test_a_body_must_go_on_in_time() -> None:
    """A body may drip for as long as it likes, but not pause."""
    raw = turn_bytes()
    async with front(limits={"body_timeout_s": 0.4, "header_timeout_s": 0.4}) as f:
        line = await f.line(raw[:-10])
        for byte in raw[-10:]:
            await asyncio.sleep(0.05)
            line.send(bytes([byte]))
        (await f.turn()).answer()
        assert (await line.reply()).status == 200

        line.send(raw[:-1])
        reply = await line.reply()
        assert reply.status == 408
        assert "limits.body_timeout_s" in json.loads(reply.body)["error"]["message"]
        assert await line.rest() == b""
        await f.settled()
        assert f.express == 1


@pytest.fixture
def idle_timeout_s(monkeypatch: pytest.MonkeyPatch) -> float:
    """Shorten the time for which a connection may rest, which is no setting."""
    idle_timeout_s = 0.3
    settings = functools.partial(app.ClientSettings, idle_timeout_s=idle_timeout_s)
    monkeypatch.setattr(app, "ClientSettings", settings)
    return idle_timeout_s


async def test_a_connection_that_rests_for_long_is_closed(idle_timeout_s: float) -> None:
    """Not while a turn is under way, and not soon after one."""
    loop = asyncio.get_running_loop()
    async with front() as f:
        line = await f.line(turn_bytes())
        (await f.turn()).answer()
        await line.reply()
        line.send(turn_bytes())
        turn = await f.turn()
        await asyncio.sleep(2 * idle_timeout_s)
        turn.answer()
        await line.reply()
        answered_at = loop.time()
        assert await line.rest() == b""
        assert loop.time() - answered_at >= idle_timeout_s - 0.05


async def test_aiohttp_knows_of_turns_that_it_has_not_read() -> None:
    """Its own timer leaves a connection alone that a plain turn has just used, or is using."""
    async with front() as f:
        line = await f.line(GET)
        await line.reply()
        lent = line.connection._lent
        assert lent is not None
        for answers in (True, False):
            line.send(turn_bytes())
            turn = await f.turn()
            if answers:
                turn.answer()
                await line.reply()
            lent._next_keepalive_close_time = 0.0  # a long time after its last request
            lent._process_keepalive()
            assert not line.connection.transport.is_closing()
        turn.answer()
        assert (await line.reply()).status == 200


# --- The end --------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def draining(f: Scripted) -> Any:
    """Begin the end, as a signal does; by the end of the block it must be over."""
    f.proxy._not_ready()
    runner: Any = f.proxy._front_runner
    ending = asyncio.get_running_loop().create_task(runner.cleanup())
    await eventually(lambda: not runner.addresses)
    await turn_of_the_loop()
    yield ending
    async with asyncio.timeout(10):
        await ending


async def test_what_runs_is_finished_and_what_rests_is_closed() -> None:
    """A stream completes; who has none under way, here or with aiohttp, is let go at once."""
    async with front() as f:
        resting, lent = await f.line(turn_bytes()), await f.line()
        (await f.turn()).answer()
        await resting.reply()
        lent.send(GET)
        await lent.reply()
        line = await f.line(turn_bytes())
        turn = await f.turn()
        turn.say(created(), DELTAS[0])
        await line.reader.readuntil(b'"word 1"')
        async with draining(f):
            assert await resting.rest() == b""
            assert await lent.rest() == b""
            turn.say(*DELTAS[1:], completed())
            received = await line.rest()
        assert received.endswith(b"0\r\n\r\n")
        assert b"response.completed" in received
        assert f.statuses == [200] * 2


async def test_a_stream_on_a_connection_that_aiohttp_has_had_is_finished_too() -> None:
    """aiohttp believes to be idle while a plain turn is under way."""
    async with front() as f:
        line = await f.line(GET)
        await line.reply()
        line.send(turn_bytes())
        turn = await f.turn()
        turn.say(created())
        await line.reader.readuntil(b"response.created")
        async with draining(f):
            turn.say(completed())
            received = await line.rest()
        assert (f.express, line.read_by_aiohttp) == (1, 1)
        assert received.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
async def test_a_reply_that_begins_at_the_end_says_so(streams: bool) -> None:
    """The client must not send another request on this connection."""
    async with front() as f:
        line = await f.line(turn_bytes(stream=streams))
        turn = await f.turn()
        async with draining(f):
            turn.answer()
            reply = await line.reply()
            assert await line.rest() == b""
        assert reply.status == 200
        assert reply.get("Connection") == "close"


@pytest.mark.parametrize("before", [b"", GET], ids=["new", "lent before"])
async def test_a_turn_whose_body_is_on_its_way_is_served(before: bytes) -> None:
    """Its head was here before the end, as with aiohttp."""
    raw = turn_bytes("x" * 1000)
    async with front() as f:
        line = await f.line(before)
        if before:
            await line.reply()
        line.send(raw[:-500])
        await eventually(lambda: f.front.budget.held_bytes)
        async with draining(f):
            line.send(raw[-500:])
            (await f.turn()).answer()
            reply = await line.reply()
            assert await line.rest() == b""
        assert reply.status == 200
        assert reply.get("Connection") == "close"


async def test_a_turn_that_is_handed_over_at_the_end_is_served() -> None:
    """And the end does not wait for longer than for that."""
    async with front() as f:
        line = await f.line(turn_bytes())
        turn = await f.turn()
        async with draining(f) as ending:
            turn.hang_up()
            turn = await f.turn()
            assert not ending.done()
            turn.answer()
            reply = await line.reply()
            assert await line.rest() == b""
        assert reply.status == 200
        assert reply.get("Connection") == "close"


async def test_a_long_reply_reaches_a_slow_client_before_the_end() -> None:
    """What was written and not yet read is not cut off."""
    text = "x" * (16 << 20)
    output = {"type": "message", "role": "assistant", "content": [{"type": "output_text"}]}
    output["content"][0]["text"] = text
    async with front() as f:
        line = await f.line(turn_bytes(stream=False))
        line.writer.transport.pause_reading()
        turn = await f.turn()
        turn.say(created(), completed(output=[output]))
        await eventually(lambda: f.statuses == [200])
        assert line.connection.transport.get_write_buffer_size() > 0
        async with draining(f) as ending:
            await asyncio.wait([ending], timeout=0.2)
            assert not ending.done()
            line.writer.transport.resume_reading()
            reply = await line.reply()
        assert json.loads(reply.body)["output"] == [output]


async def test_the_end_has_a_deadline() -> None:
    """A stream that does not end is cut off, and its turn is told of."""
    async with front(shutdown={"drain_timeout_s": 0.2}) as f:
        line = await f.line(turn_bytes())
        (await f.turn()).say(created())
        await line.reader.readuntil(b"response.created")
        async with draining(f):
            received = await line.rest()
        assert not received.endswith(b"0\r\n\r\n")
        await f.settled()
        assert f.statuses == [499]


# --- Budget, and faults of ours -------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["", "gzip"])
async def test_a_body_for_which_there_is_no_room_is_shed(encoding: str) -> None:
    """503, whether it is the body as it comes that is too much or what it decodes to."""
    asked = json.dumps({"model": "m", "input": "x" * 500_000}).encode()
    body = gzip.compress(asked) if encoding else asked
    fields = [f"Content-Encoding: {encoding}"] if encoding else []
    async with front() as f:
        f.front.budget._max_bytes = 400_000
        line = await f.line(turn_bytes("", *fields, body=body))
        reply = await line.reply()
        assert reply.status == 503
        assert "max_inflight_body_bytes" in reply.body.decode()
        assert f.express == 0
        await f.settled()
        small = await f.line(turn_bytes())
        (await f.turn()).answer()
        assert (await small.reply()).status == 200


class Fault(Exception):
    """What would be a bug."""


def fail(*_: Any, **__: Any) -> Any:
    """Do what a bug does."""
    raise Fault


FAULTS: dict[str, tuple[Callable[[Scripted], tuple[Any, str]], bool]] = {
    "planning": (lambda _: (Planner, "plan"), False),
    "leasing": (lambda f: (Pool, "take"), False),
    "reading the body": (lambda f: (ClientConnection, "_body"), False),
    "the record": (lambda f: (f.front, "express"), False),
    "writing the message": (lambda f: (Express, "_message"), False),
    "preparing": (lambda f: (TurnRequest, "prepare"), False),
    "reading": (lambda f: (ReplyReader, "feed"), False),
    "beginning": (lambda f: (Express, "_begin"), False),
    "writing": (lambda f: (Express, "_write_chunk"), False),
    "recording": (lambda f: (f.front._services.store, "record"), True),
    "releasing": (lambda f: (Express, "_record_head"), True),
}


BEFORE_SENDING = {"planning", "leasing", "reading the body", "the record", "writing the message"}


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_of_ours_is_a_500_and_holds_nothing(
    name: str, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reply at most, the end of the connection, nothing held, and one line in the log."""
    where, is_after_reply = FAULTS[name]
    async with front() as f:
        with monkeypatch.context() as patched:
            patched.setattr(*where(f), fail)
            line = await f.line(turn_bytes(stream=streams))
            if name in BEFORE_SENDING:
                received = await line.rest()
            else:
                turn = await f.turn()
                await turn_of_the_loop()
                if not turn.server.transport.is_closing():
                    turn.answer(*DELTAS)
                if name == "writing" and not streams:
                    assert (await line.reply()).status == 200  # nothing is written in chunks
                    return
                received = await line.rest()
            await f.settled()
            failures = [call for call in f.log.calls if call.args[:1] == ("failed",)]
            f.log.calls.clear()

        assert received.count(b"HTTP/1.1 ") == 1
        head, _, body = received.partition(b"\r\n\r\n")
        if is_after_reply:
            assert b" 200 OK" in head
            assert body.endswith(b"0\r\n\r\n" if streams else b"}")
        else:
            assert b" 500 " in head
            assert json.loads(body)["error"]["code"] is None or "Turnwire failed" in body.decode()
        assert len(failures) == 1
        assert not f.front._deadlines._turns
        again = await f.line(turn_bytes("again"))
        (await f.turn()).answer()
        assert (await again.reply()).status == 200


async def test_a_fault_within_a_stream_cuts_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody takes it for complete, and other turns are looked at by the same timer."""
    async with front(reply={"keepalive_s": 0.05}) as f:
        line = await f.line(turn_bytes())
        turn = await f.turn()
        turn.say(created(), DELTAS[0])
        await line.reader.readuntil(b'"word 1"')
        with monkeypatch.context() as patched:
            patched.setattr(Express, "_write_events", fail)
            received = await line.rest()
        assert b"HTTP/1.1" not in received
        assert not received.endswith(b"0\r\n\r\n")
        await f.settled()
        f.log.calls.clear()
        line = await f.line(turn_bytes())
        turn = await f.turn()
        turn.say(created())
        await line.reader.readuntil(b": keep-alive\n")
        turn.say(completed())
        assert (await line.reader.readuntil(b"0\r\n\r\n")).count(b"response.completed")


# --- What we know of aiohttp and websockets -------------------------------------------------------

CHANGED = (
    "a new version of {} is not as `proxy.downstream.deadlines.LentProtocol` and"
    " `ClientConnection` know it: adapt them and `_shows_its_rest`, or hold the version back;"
    " until then RESTS_VISIBLY must be false"
)
AIOHTTP_CHANGED = CHANGED.format("aiohttp")
SEMI_PRIVATE = {
    *("_waiter", "_messages", "_close", "_keepalive_timeout", "_next_keepalive_close_time"),
}


class Recorder(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        """Keep it."""
        self.written += bytes(data)

    def is_closing(self) -> bool:
        """Whether it was closed."""
        return self.is_closed

    def close(self) -> None:
        """Take no more."""
        self.is_closed = True

    def pause_reading(self) -> None:
        """Nothing is read."""

    def resume_reading(self) -> None:
        """Nothing is read."""


class Handler:
    """What handles a request: it waits for leave."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.may_go_on = asyncio.Event()
        server = web.Server(self.handle)
        self.protocol = LentProtocol(
            server, None, 10.0, loop=asyncio.get_running_loop(), access_log=None
        )
        self.transport = Recorder()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Read what is here at once, wait, answer."""
        self.bodies.append(request.content.read_nowait())
        assert request.content.is_eof(), AIOHTTP_CHANGED
        await self.may_go_on.wait()
        return web.Response(text="done")


async def test_aiohttps_protocol_is_as_we_know_it() -> None:
    """Fed a whole message as soon as it is made, it handles it, and then rests for all to see."""
    handler = Handler()
    protocol, transport = handler.protocol, handler.transport
    protocol.connection_made(transport)
    protocol.data_received(turn_bytes())  # its task has not begun yet
    assert not protocol.is_at_rest, AIOHTTP_CHANGED
    await turn_of_the_loop()
    assert handler.bodies == [BODY], AIOHTTP_CHANGED
    assert not protocol.is_at_rest, AIOHTTP_CHANGED
    handler.may_go_on.set()
    await eventually(lambda: transport.written.endswith(b"done"))
    await turn_of_the_loop()
    assert protocol.is_at_rest, AIOHTTP_CHANGED
    assert not protocol._waiter.done(), AIOHTTP_CHANGED
    assert len(protocol._messages) == 0, AIOHTTP_CHANGED

    protocol.data_received(turn_bytes())
    assert not protocol.is_at_rest, AIOHTTP_CHANGED
    assert len(protocol._messages) == 1, AIOHTTP_CHANGED
    await eventually(lambda: transport.written.count(b"done") == 2)
    await turn_of_the_loop()
    assert protocol.is_at_rest, AIOHTTP_CHANGED

    protocol._next_keepalive_close_time = asyncio.get_running_loop().time() + 5
    protocol._process_keepalive()
    assert not transport.is_closed, AIOHTTP_CHANGED
    protocol._next_keepalive_close_time = 0.0
    protocol._process_keepalive()
    assert transport.is_closed, AIOHTTP_CHANGED
    protocol.connection_lost(None)
    await turn_of_the_loop()


async def test_a_protocol_that_takes_no_more_does_not_rest() -> None:
    """After `close`, aiohttp drops what comes; it must not be given more."""
    handler = Handler()
    handler.may_go_on.set()
    handler.protocol.connection_made(handler.transport)
    await turn_of_the_loop()
    assert handler.protocol.is_at_rest, AIOHTTP_CHANGED
    handler.protocol.close()
    assert not handler.protocol.is_at_rest, AIOHTTP_CHANGED
    handler.protocol.force_close()
    handler.protocol.connection_lost(None)
    await turn_of_the_loop()


def test_what_we_lean_on_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the names is needed: without one of them aiohttp keeps its connections to itself."""
    assert deadlines.RESTS_VISIBLY, AIOHTTP_CHANGED
    assert deadlines._shows_its_rest(), AIOHTTP_CHANGED
    for name in SEMI_PRIVATE:
        slots = [each for each in web.RequestHandler.__slots__ if each != name]
        with monkeypatch.context() as patched:
            patched.setattr(web.RequestHandler, "__slots__", tuple(slots))
            assert not deadlines._shows_its_rest(), name
    with monkeypatch.context() as patched:
        patched.delattr(web.RequestHandler, "_process_keepalive")
        assert not deadlines._shows_its_rest()


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65_535, 65_536, 1 << 20])
def test_a_frame_is_written_as_the_librarys_protocol_writes_it(size: int) -> None:
    """One masked text frame, which a server reads as the message: see `send_short_message`."""
    changed = "websockets writes frames otherwise now: adapt UpstreamConnection.send_short_message"
    data = b"x" * size
    sent = Framing(CLIENT, state=OPEN)
    sent.send_text(data)
    (expected,) = sent.data_to_send()
    written = Frame(Opcode.TEXT, data).serialize(mask=True)
    masked_from = len(expected) - size - 4  # the key of the mask is drawn
    assert written[:masked_from] == expected[:masked_from], changed
    assert len(written) == len(expected), changed

    server = Framing(SERVER, state=OPEN, max_size=None)
    server.receive_data(written)
    (frame,) = server.events_received()
    assert (frame.opcode, frame.data, frame.fin) == (Opcode.TEXT, data, True), changed


async def test_short_messages_mix_with_what_the_library_sends() -> None:
    """A frame written past the library leaves it as it was: pings and long messages go on."""
    async with front() as f:
        line = await f.line()
        for text in ("one", "x" * (1 << 20), "two"):
            line.send(turn_bytes(text))
            turn = await f.turn()
            assert turn.message["input"] == text
            await turn.server.ping()
            turn.answer()
            assert (await line.reply()).status == 200
            await (await turn.server.ping())  # and its pong has come
        assert f.metric("turnwire_connects_total", result="ok") == 1
