"""
Whether a turn goes the express way or aiohttp's: nobody can tell.

The same requests go to two proxies, of which one has the express way and the other has not, and
both upstreams do the same. The replies must be the same, byte for byte but for ids and the date,
and so must what reaches upstream, what is counted, and whether the connection goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import scripted
from scripted import DELTAS, completed, created, error, event, front, turn_bytes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from scripted import Line, Received, Scripted

    Script = Callable[[Scripted, Received], Awaitable[None]]

CONFIG = {
    "chat_completions": "translate",
    "resends": {"budget_ratio": 1, "budget_per_s": 1000},
    "cooldown": {"first_s": 0.001, "max_s": 0.001},
    "limits": {"max_body_bytes": 100_000, "max_decoded_body_bytes": 100_000},
    "tolerates": ["Error handling request"],  # as aiohttp calls a request that it refuses
}


@dataclass
class Outcome:
    """All that can be told of one request."""

    line: bytes
    headers: list[tuple[str, str]]
    body: bytes
    is_whole: bool
    goes_on: bool = False
    sent: list[Any] = field(default_factory=list)
    counted: list[tuple[Any, ...]] = field(default_factory=list)


async def read_outcome(line: Line) -> Outcome:
    """Read a reply as far as it comes; ids and dates are left out."""
    reader = line.reader
    head = await reader.readuntil(b"\r\n\r\n")
    first, *fields = head[:-4].split(b"\r\n")
    headers = []
    for each in fields:
        name, _, value = each.decode().partition(": ")
        headers.append((name, "" if name in ("Date", "x-request-id") else value))
    got = Outcome(first, sorted(headers), b"", is_whole=False)
    lengths = dict(headers)
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        if "Content-Length" in lengths:
            got.body = await reader.readexactly(int(lengths["Content-Length"]))
            got.is_whole = True
        while not got.is_whole:
            size = int(await reader.readuntil(b"\r\n"), 16)
            got.body += await reader.readexactly(size)
            assert await reader.readexactly(2) == b"\r\n"
            got.is_whole = not size
    got.body = re.sub(rb'"created":\d+', b'"created":0', got.body)
    return got


async def outcome(f: Scripted, request: bytes, script: Script | None) -> Outcome:
    """Send a request, let upstream do as the script says, and see what comes of it."""
    await f.warm_up()
    line = await f.line(request)
    received: list[Any] = []

    async def act() -> None:
        assert script is not None
        turn = await f.turn()
        received.append(turn.message)
        await script(f, turn)
        while True:  # where the turn is sent again
            turn = await f.turns.get()
            received.append(turn.message)
            turn.answer()

    async with asyncio.TaskGroup() as group:
        acting = group.create_task(act()) if script is not None else None
        got = await read_outcome(line)
        if acting is not None:
            acting.cancel()
    await f.settled()
    got.sent = received
    got.counted = [
        tuple(call.kwargs[name] for name in ("status", "mode", "reason", "bytes_in", "bytes_up"))
        for call in f.log.calls
        if call.args[:1] == ("turn",)
    ]
    line.send(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
    got.goes_on = bool(await line.rest() if not got.is_whole else await _next_byte(line))
    line.writer.close()
    return got


async def _next_byte(line: Line) -> bytes:
    with contextlib.suppress(ConnectionError):
        return await line.reader.read(1)
    return b""


# --- What upstream does ---------------------------------------------------------------------------

MESSAGE = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Hi.", "annotations": [], "logprobs": []}],
}
USAGE = {"input_tokens": 5, "output_tokens": 7, "total_tokens": 12}


async def answers(_: Scripted, turn: Received) -> None:
    """Answer in one write."""
    done = event("response.output_item.done", output_index=0, item=MESSAGE, sequence_number=20)
    turn.answer(*DELTAS, done)


async def answers_in_pieces(_: Scripted, turn: Received) -> None:
    """Answer in many writes, the first of which shows nothing yet."""
    for each in (created(), *DELTAS, completed(output=[MESSAGE], usage=USAGE)):
        turn.say(each)
        await asyncio.sleep(0.005)


async def answers_with_the_last_event(_: Scripted, turn: Received) -> None:
    """Tell all of the answer at its end."""
    turn.say(created(), completed(output=[MESSAGE], usage=USAGE))


async def is_incomplete(_: Scripted, turn: Received) -> None:
    """End an answer at a limit."""
    details = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    response = {"id": "resp_1", "output": [], **details}
    turn.say(created(), *DELTAS, event("response.incomplete", response=response))


async def fails(_: Scripted, turn: Received) -> None:
    """End an answer as failed."""
    told = {"code": "server_error", "message": "No."}
    response = {"id": "resp_1", "output": [], "status": "failed", "error": told}
    turn.say(created(), *DELTAS, event("response.failed", response=response))


async def sends_the_vendors_own(_: Scripted, turn: Received) -> None:
    """Mix events of another kind into the answer, before and within it."""
    own = event("codex.rate_limits", rate_limits={"primary": 1})
    turn.say(own, created(), DELTAS[0], own, event("response.novel", text="?"), completed())


async def does_not_know_the_response(_: Scripted, turn: Received) -> None:
    """Refuse a turn that continues nothing as one does that has forgotten what it continues."""
    turn.say(error(400, code="previous_response_not_found", message="No such response."))


async def is_overloaded(_: Scripted, turn: Received) -> None:
    """Refuse for the moment."""
    turn.say(error(503, code="overloaded", type="server_error"))


SCRIPTS: list[Script] = [
    answers,
    answers_in_pieces,
    answers_with_the_last_event,
    is_incomplete,
    fails,
    sends_the_vendors_own,
    does_not_know_the_response,
    is_overloaded,
    scripted.is_refused,
    scripted.is_refused_for_now,
    scripted.ends_at_once,
    scripted.closes_at_once,
    scripted.talks_nonsense,
    scripted.fails_within,
    scripted.ends_within,
    scripted.talks_nonsense_within,
]
SILENCES: list[Script] = [scripted.is_silent, scripted.stops_within]
SHORT = {"websocket": {"first_event_timeout_s": 0.6, "silence_timeout_s": 0.6}}


def request_of(api: str, *, streams: bool) -> bytes:
    """Write the request for a turn."""
    if api == "responses":
        return turn_bytes(stream=streams)
    messages = [{"role": "user", "content": "hi"}]
    asked: dict[str, Any] = {"model": "m", "messages": messages, "stream": streams}
    if streams:
        asked["stream_options"] = {"include_usage": True}
    return turn_bytes(path="/v1/chat/completions", body=json.dumps(asked).encode())


@contextlib.asynccontextmanager
async def two_fronts(**config: Any) -> Any:
    """Run a proxy with the express way and one without."""
    config = CONFIG | config
    async with front(**config) as one, front(**config, tuning={"express": False}) as other:
        assert (one.is_on, other.is_on) == (True, False)
        yield one, other


async def check(
    one: Scripted, other: Scripted, request: bytes, script: Script, *, streams: bool
) -> None:
    """Both give the same, the first by the express way."""
    async with asyncio.timeout(10):
        got, expected = await asyncio.gather(*(outcome(f, request, script) for f in (one, other)))
    assert got == expected, script.__name__
    assert (one.express > 0, other.express) == (True, 0), script.__name__
    assert expected.is_whole or streams


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("api", ["responses", "chat"])
async def test_whatever_upstream_does_comes_out_the_same(api: str, streams: bool) -> None:
    """Answers, refusals, faults before and within: one reply, whichever way."""
    request = request_of(api, streams=streams)
    async with two_fronts() as (one, other):
        for script in SCRIPTS:
            await check(one, other, request, script, streams=streams)


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
async def test_silences_come_out_the_same(streams: bool) -> None:
    """Before the first event a turn is sent again, later its reply is broken off."""
    async with two_fronts(**SHORT) as (one, other):
        for script in SILENCES:
            await check(one, other, turn_bytes(stream=streams), script, streams=streams)


CORRUPT = gzip.compress(b"x" * 50)[:-3]
REFUSED: dict[str, bytes] = {
    "no JSON": turn_bytes(body=b"{"),
    "no body": turn_bytes().partition(b"Content-Length")[0] + b"Content-Length: 0\r\n\r\n",
    "no object": turn_bytes(body=b"[1]"),
    "no input": turn_bytes(body=b'{"model":"m"}'),
    "one key twice": turn_bytes(body=b'{"model":"m","input":"a","input":"b"}'),
    "what HTTP alone does": turn_bytes(background=True),
    "an unknown encoding": turn_bytes("hi", "Content-Encoding: lzma"),
    "too many encodings": turn_bytes("hi", "Content-Encoding: gzip, gzip, gzip, gzip"),
    "a corrupt encoding": turn_bytes("", "Content-Encoding: gzip", body=CORRUPT),
    "a bomb": turn_bytes("", "Content-Encoding: gzip", body=gzip.compress(b"x" * 200_000)),
    "a body that is too long": turn_bytes("x" * 200_000),
    "another host": turn_bytes().replace(b"Host: localhost", b"Host: example.com"),
    "another origin": turn_bytes("hi", "Origin: http://example.com"),
    "a query": turn_bytes(path="/v1/responses?a=b"),
    "no turn at all": turn_bytes(path="/v1/files"),
    "two lengths": turn_bytes("hi", "Content-Length: 1"),
    "two types": turn_bytes("hi", "Content-Type: a/b", "Content-Type: c/d"),
}


async def test_whatever_is_no_turn_comes_out_the_same() -> None:
    """Refusals are in the same words, and what is left to HTTP is left to it."""
    async with two_fronts() as (one, other):
        for name, request in REFUSED.items():
            got, expected = [await outcome(f, request, None) for f in (one, other)]
            assert got == expected, name
            assert one.express == 0, name
            assert int(expected.line.split(b" ")[1]) >= 400, name  # our upstream speaks no HTTP


async def test_a_conversation_comes_out_the_same() -> None:
    """Turn by turn, in full and as deltas, on one connection and on several."""
    history: list[Any] = [{"role": "user", "content": "one"}]

    async def talk(f: Scripted) -> list[Any]:
        items, told = list(history), []
        line = await f.line()
        for number in range(6):
            if number == 3:
                line.writer.close()
                line = await f.line()
            streams = number % 2 == 0
            line.send(turn_bytes(input=items, stream=streams))
            turn = await f.turn()
            identity = f"resp_{number}"
            message = {**MESSAGE, "id": f"msg_{number}"}
            done = event("response.output_item.done", output_index=0, item=message)
            turn.say(created(identity), done, completed(identity, output=[message]))
            got = await read_outcome(line)
            told.append((turn.message, got))
            items += [message, {"role": "user", "content": f"and {number}?"}]
        await f.settled()
        return told

    async with two_fronts() as (one, other):
        ours, theirs = await talk(one), await talk(other)
        assert ours == theirs
        assert (one.express, other.express) == (6, 0)
        assert [message.get("previous_response_id") for message, _ in ours] == [
            None,
            *(f"resp_{number}" for number in range(5)),
        ]
