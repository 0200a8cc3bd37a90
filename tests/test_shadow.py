"""
Shadow mode as a whole: what it tells is what live mode does, and what it relays is untouched.

The main test holds the same conversations twice, those of the oracle with all their retries, forks
and edits, once in live mode and once in shadow mode, each against an upstream of its own. Turn by
turn, the way and the reason that shadow mode names must be those that live mode took. The
environment variable `SHADOW_CONVERSATIONS` changes the number of conversations (14).
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from typing import TYPE_CHECKING, Any

import brotli
import pytest
from harness import play, serving, stack
from oracle import ROOMY, Plan
from structlog.testing import CapturingLogger
from wire import Peer, Request, read_head, read_message, reply

from proxy.app import Turnwire
from proxy.config import Config, load
from proxy.core.plan import Planner
from proxy.errors import ConfigError
from proxy.simulator import Agent, Simulator, SimulatorOptions
from proxy.simulator.agent import user
from proxy.simulator.faults import Break, End, ErrorReply, FailResponse
from proxy.simulator.validate import Transport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from harness import Stack
    from oracle import Turn

    from proxy.simulator.agent import Reply

CONVERSATIONS = int(os.environ.get("SHADOW_CONVERSATIONS", "14"))
FEW_CONNECTIONS = ROOMY | {
    "max_per_principal": 3,
    "nursery_size": 2,
    "yield_after_s": 3600.0,
    "spare_per_principal": 0,
}


def would_be(reply: Reply) -> tuple[str | None, str | None]:
    """Return how shadow mode says that it would have sent a turn, and why."""
    return reply.headers.get("turnwire-shadow-mode"), reply.headers.get("turnwire-shadow-reason")


async def hold(s: Stack, number: int) -> list[Turn]:
    """Hold one of the oracle's conversations."""
    plan = Plan(number)
    agent: Agent = s.agent(**plan.options())
    return await plan.run(agent)


async def run(mode: str, connections: dict[str, Any]) -> tuple[list[Turn], float, float, Any]:
    """Hold all conversations; return turns, deltas counted, bytes counted, and the journal."""
    async with stack(mode=mode, connections=connections) as s:
        turns = [turn for number in range(CONVERSATIONS) for turn in await hold(s, number)]
        await s.idle()
        prefix = "turnwire_shadow" if mode == "shadow" else "turnwire"
        samples = next(
            metric.samples
            for metric in s.proxy.metrics.registry.collect()
            if metric.name == f"{prefix}_turns"
        )
        deltas = sum(sample.value for sample in samples if sample.labels.get("mode") == "delta")
        verdicts = {
            verdict: s.metric("turnwire_shadow_deltas_total", verdict=verdict)
            for verdict in ("right", "wrong", "unchecked")
        }
        sent = s.metric(f"{prefix}_upstream_request_bytes_total")
        used = {seen.transport for seen in s.sim.journal.turns}
        assert used == {Transport.HTTP} if mode == "shadow" else Transport.WS in used
        return turns, deltas, sent, verdicts


@pytest.mark.parametrize(
    ("connections", "deltas_each"), [(ROOMY, 5), (FEW_CONNECTIONS, 1)], ids=["roomy", "few"]
)
async def test_tells_of_each_turn_what_live_mode_does_with_it(connections, deltas_each):
    """Over the same runs every turn, and so every count, is the same; each delta is right."""
    live, live_deltas, live_sent, _ = await run("live", connections)
    shadow, shadow_deltas, shadow_sent, verdicts = await run("shadow", connections)

    assert [turn.reply.answer for turn in shadow] == [turn.reply.answer for turn in live]
    assert [would_be(turn.reply) for turn in shadow] == [
        (turn.reply.mode, turn.reply.reason) for turn in live
    ]
    assert {(turn.reply.mode, turn.reply.reason) for turn in shadow} == {("http", "shadow")}
    assert shadow_deltas == live_deltas == sum(turn.reply.mode == "delta" for turn in live)
    assert live_deltas > deltas_each * CONVERSATIONS
    # Ids differ in length by a few bytes from run to run: nothing else may.
    assert shadow_sent == pytest.approx(live_sent, rel=0.01)
    assert verdicts == {"right": shadow_deltas, "wrong": 0, "unchecked": 0}


async def test_many_conversations_at_once_are_told_apart():
    """With twelve at one time the counts agree as well, whatever order the turns come in."""
    counts = []
    for mode in ("live", "shadow"):
        async with stack(mode=mode, connections=ROOMY) as s:
            told = await asyncio.gather(*(hold(s, number) for number in range(12)))
            turns = [turn for own in told for turn in own]
            follows = [turn for turn in turns if turn.follows]
            how = would_be if mode == "shadow" else lambda reply: (reply.mode, reply.reason)
            assert {how(turn.reply)[0] for turn in follows} == {"delta"}
            counts.append((len(turns), len(follows)))

    assert counts[0] == counts[1]


async def test_failures_end_a_would_be_turn_as_they_end_a_real_one():
    """After an error or a failed answer, the next turn is told as live mode takes it."""
    told: dict[str, list[Any]] = {}
    for mode in ("live", "shadow"):
        async with stack(mode=mode, connections=ROOMY) as s:
            agent, history = s.agent(), []
            await play(agent, history, user("[calls=0] One."))
            how = would_be if mode == "shadow" else lambda reply: (reply.mode, reply.reason)
            told[mode] = []
            for fault in (
                ErrorReply(status=429, code="rate_limit_exceeded"),
                FailResponse(),
            ):
                s.sim.faults.arm(fault)
                failed = await agent.send([*history, user("[calls=0] Fails.")])
                assert failed.response is None or failed.response["status"] == "failed"
                told[mode].append(how(failed))
                after = await play(agent, history, user("[calls=0] More."))
                again = await play(agent, history, user("[calls=0] And more."))
                told[mode] += [how(after), how(again)]

    assert told["shadow"] == told["live"]
    assert ("delta", "continued") in told["shadow"]


async def test_a_reply_that_breaks_off_leaves_nothing_to_continue():
    """A client that lost its reply sends everything again, and so would live mode have."""
    async with stack(mode="shadow", tolerates=["closing transport"]) as s:
        agent, history = s.agent(), []
        await play(agent, history, user("[calls=0] One."))
        s.sim.faults.arm(Break(end=End.RESET, after_events=3))
        with pytest.raises(Exception, match=r".*"):
            await agent.send([*history, user("[calls=0] Two.")])
        after = await play(agent, history, user("[calls=0] Two."))

    assert would_be(after) == ("full", "connection_lost")


async def test_says_what_would_be_http():
    """What WebSocket mode can't carry keeps its own reason, in both accounts."""
    async with stack(mode="shadow") as s:
        answer = await s.agent(settings={"stream_options": {}, "stream": False}).send([user("Hi.")])

    assert (answer.mode, answer.reason) == ("http", "http_only_field")
    assert would_be(answer) == ("http", "http_only_field")


async def test_opens_no_websocket():
    """Upstream sees what it would see without us: one HTTP request a turn, and nothing else."""
    async with stack(mode="shadow", sim=SimulatorOptions(websocket=False)) as s:
        agent, history = s.agent(), []
        for number in range(3):
            await play(agent, history, user(f"[calls=0] {number}."))
        summary = s.proxy.metrics.summary()

    assert [seen.transport for seen in s.sim.journal] == [Transport.HTTP] * 3
    assert summary.startswith("3 turns, of which 2 as deltas, 1 in full and 0 over HTTP")
    assert summary.endswith("had it not been shadow mode")


async def test_logs_a_line_for_each_turn():
    """The line has the decision, the bytes and the verdict, and nothing of the content."""
    async with stack(mode="shadow") as s:
        agent, history = s.agent(), []
        await play(agent, history, user(f"[calls=0] Secret. {'Long. ' * 200}"))
        await play(agent, history, user("[calls=0] More."))
        lines = s.facts("shadow")

    assert [(line["mode"], line["reason"], line.get("verdict")) for line in lines] == [
        ("full", "new_conversation", None),
        ("delta", "continued", "right"),
    ]
    assert lines[1]["bytes_up"] < lines[0]["bytes_up"]
    assert "Secret" not in repr(s.log.calls)


async def test_a_delta_that_would_have_been_wrong_is_told(monkeypatch):
    """If the planner loses an item, the second opinion notices."""
    sound = Planner._continue

    def loses_an_item(planner, request, head, delta):
        return sound(planner, request, head, delta[:-1])

    monkeypatch.setattr(Planner, "_continue", loses_an_item)
    async with stack(mode="shadow") as s:
        agent, history = s.agent(), []
        await play(agent, history, user("[calls=0] One."))
        await play(agent, history, user("[calls=0] Two."))

    assert s.metric("turnwire_shadow_deltas_total", verdict="wrong") == 1
    assert len(s.facts("shadow_delta_wrong")) == 1


@pytest.mark.parametrize("place", ["begin", "take", "judge"])
async def test_a_fault_of_ours_is_not_felt(monkeypatch, place):
    """Whatever goes wrong in the shadow, the reply is what it would have been."""

    def fails(*_: object) -> None:
        raise RuntimeError("a bug")

    where = {
        "begin": "_ShadowTurn._acquire",
        "take": "ReplyTap._take_events",
        "judge": "_ShadowTurn._judge",
    }
    monkeypatch.setattr(f"proxy.downstream.shadow.{where[place]}", fails)
    async with Simulator() as sim:
        proxy = Turnwire(Config(upstream=sim.base_url, port=0, admin_port=0, mode="shadow"))
        log = proxy.log = CapturingLogger()
        async with proxy, Agent(proxy.base_url) as agent:
            answer = await agent.send([user("[calls=0] Hi.")])

    assert answer.response is not None
    assert answer.response["status"] == "completed"
    assert any(call.args[:1] == ("shadow_failed",) for call in log.calls)


def test_shadow_mode_needs_something_to_shadow():
    """With WebSocket mode switched off there is nothing to tell."""
    with pytest.raises(ConfigError, match="switched off"):
        load({"--mode": "shadow", "--websocket-enabled": "false"}, {}, None)


# --- transparency --------------------------------------------------------------------------------

RESPONSE = {"id": "resp_1", "object": "response", "status": "completed", "output": []}
EVENTS = (
    b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_1"}}\n\n'
    b": a comment\n\n"
    b'data: {"type":"response.output_item.done","output_index":0,"item":{"type":"message",'
    b'"role":"assistant","content":[{"type":"output_text","text":"caf\xc3\xa9"}]}}\r\n\r\n'
    + b"data: "
    + json.dumps({"type": "response.completed", "response": RESPONSE}).encode()
    + b"\n\ndata: [DONE]\n\n"
)
BODY = b'{"model":"m","store":false,"stream":true,"input":[{"role":"user","content":"x"}]}'
NEXT = (
    b'{"model":"m","store":false,"stream":true,"input":[{"role":"user","content":"x"},'
    b'{"role":"assistant","content":"caf\xc3\xa9"},{"role":"user","content":"y"}]}'
)


def posted(body: bytes) -> bytes:
    """Spell a turn as a client that takes compressed replies."""
    return (
        b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer k\r\n"
        b"Accept-Encoding: gzip, br\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )


async def exchange(port: int, *bodies: bytes) -> AsyncIterator[Request]:
    """Send bodies over one connection, one after the other, and give the replies."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for body in bodies:
            writer.write(posted(body))
            yield await read_message(reader)
    finally:
        writer.close()


PLAIN = json.dumps({**RESPONSE, "output": [json.loads(
    '{"type":"message","role":"assistant","content":[{"type":"output_text","text":"caf\u00e9"}]}'
)]}).encode()  # fmt: skip
STREAM = "Content-Type: text/event-stream; charset=utf-8"
JSON = "Content-Type: application/json"
CHUNKED_HEAD = f"HTTP/1.1 200 OK\r\n{STREAM}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
REPLIES = {
    "stream": (reply(EVENTS, STREAM), "delta"),
    "gzip": (reply(gzip.compress(EVENTS), STREAM, "Content-Encoding: gzip"), "delta"),
    "brotli": (reply(brotli.compress(EVENTS), STREAM, "Content-Encoding: br"), "delta"),
    "json": (reply(PLAIN, JSON), "delta"),
    "json, gzip": (reply(gzip.compress(PLAIN), JSON, "Content-Encoding: gzip"), "delta"),
    "unknown encoding": (reply(EVENTS, STREAM, "Content-Encoding: odd"), "full"),
    "damaged": (reply(EVENTS, STREAM, "Content-Encoding: gzip"), "full"),
    "no events": (reply(b"data: {]\n\n", STREAM), "full"),
    "no json": (reply(b"<html>", "Content-Type: text/html"), "full"),
    "a status": (reply(b"{}", JSON, status="418 Teapot"), "full"),
}


@pytest.mark.parametrize("name", REPLIES)
async def test_replies_keep_their_bytes(name):
    """Whatever a reply is, the client gets its very bytes; what can be read is continued."""
    answer, expected = REPLIES[name]
    head, _, body = answer.partition(b"\r\n\r\n")
    async with (
        Peer(answer) as peer,
        serving(f"http://127.0.0.1:{peer.port}/v1", mode="shadow") as (proxy, _),
    ):
        port = int(proxy.base_url.split(":")[2].split("/")[0])
        first, second = [got async for got in exchange(port, BODY, NEXT)]

    assert first.body == second.body == body
    assert first.line.encode() == head.split(b"\r\n")[0]
    assert [request.body for request in peer.requests] == [BODY, NEXT]
    assert second.get("turnwire-shadow-mode") == expected


@pytest.mark.parametrize("cut", [1, 5, 64])
async def test_a_reply_keeps_its_rhythm(cut):
    """Each piece reaches the client before upstream sends the next one."""
    pieces = [EVENTS[place : place + cut] for place in range(0, len(EVENTS), cut)]
    arrived = asyncio.Semaphore(0)

    async def send(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await reader.readexactly(int(request.get("Content-Length") or 0))
        writer.write(
            b"HTTP/1.1 200 OK\r\n%b\r\nTransfer-Encoding: chunked\r\n\r\n" % STREAM.encode()
        )
        for piece in pieces:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            await arrived.acquire()
        writer.write(b"0\r\n\r\n")

    async with (
        Peer(script=send) as peer,
        serving(f"http://127.0.0.1:{peer.port}/v1", mode="shadow") as (proxy, _),
    ):
        port = int(proxy.base_url.split(":")[2].split("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(posted(BODY))
        await read_head(reader)
        got = []
        for _ in pieces:
            size = int(await reader.readline(), 16)
            got.append(await reader.readexactly(size))
            await reader.readline()
            arrived.release()
        assert await reader.readuntil(b"0\r\n\r\n")
        writer.close()

    assert got == pieces


async def test_a_client_that_acts_on_the_last_event_finds_it_known():
    """The turn is told by its last event, not by the end of the body, which may come late."""
    ended = asyncio.Event()

    async def send(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await reader.readexactly(int(request.get("Content-Length") or 0))
        writer.write(
            b"HTTP/1.1 200 OK\r\n%b\r\nTransfer-Encoding: chunked\r\n\r\n" % STREAM.encode()
        )
        writer.write(b"%x\r\n%b\r\n" % (len(EVENTS), EVENTS))
        await writer.drain()
        await ended.wait()
        writer.write(b"0\r\n\r\n")

    async with (
        Peer(script=send) as peer,
        serving(f"http://127.0.0.1:{peer.port}/v1", mode="shadow") as (proxy, _),
    ):
        port = int(proxy.base_url.split(":")[2].split("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(posted(BODY))
        await reader.readuntil(b"[DONE]\n\n\r\n")
        second_reader, second = await asyncio.open_connection("127.0.0.1", port)
        second.write(posted(NEXT))
        head = await read_head(second_reader)
        ended.set()
        await reader.readuntil(b"0\r\n\r\n")
        await second_reader.readuntil(b"0\r\n\r\n")
        writer.close()
        second.close()

    assert head.get("turnwire-shadow-mode") == "delta"
