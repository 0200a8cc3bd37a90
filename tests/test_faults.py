"""
Faults of the upstream, planted one at a time in a conversation that was going well.

Before the first event the client must see the right answer, or the status, the body and the
`Retry-After` that HTTP would have given: what that is, the simulator says itself, asked straight
over HTTP with the same fault. After the first event it must see exactly one error and no clean
end. Either way the conversation's next turn gets the right answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from harness import stack

from proxy import app
from proxy.downstream import stream
from proxy.simulator import AnswerOptions, SimulatorOptions
from proxy.simulator.agent import Streaming, user
from proxy.simulator.events import CompletedOutput
from proxy.simulator.faults import (
    CODEX_RATE_LIMITS,
    NOT_FOUND_WORDINGS,
    WEBSOCKET_TIMING,
    Break,
    Combined,
    End,
    ErrorReply,
    ExtraEvents,
    FailResponse,
    Fault,
    HugeEvent,
    RefuseUpgrade,
    Restyle,
    Script,
    Step,
    Style,
    connection_limit_reached,
    previous_response_not_found,
)
from proxy.simulator.validate import Transport
from proxy.simulator.wire import Shape
from proxy.upstream import connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from harness import Stack

    from proxy.simulator.agent import Agent, Reply
    from proxy.simulator.wire import Item

TALKATIVE = SimulatorOptions(answers=AnswerOptions(rounds=0))
STREAMING = [Streaming.ALWAYS, Streaming.NEVER]
STEERING = ("retry-after", "retry-after-ms", "x-should-retry")


@pytest.fixture(params=["direct", "public"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go past the libraries where we can, or use what they promise only."""
    if request.param == "public":
        monkeypatch.setattr(app, "RESTS_VISIBLY", False)
        monkeypatch.setattr(stream, "WRITES_DIRECTLY", False)
        monkeypatch.setattr(connection, "CUTS_FRAMES", False)


def patience(fault: Fault) -> dict[str, Any]:
    """Return the configuration for a fault: short deadlines where one of them has to pass."""
    if isinstance(fault, Break) and fault.end is End.STALL:
        return {"websocket": {"first_event_timeout_s": 1, "silence_timeout_s": 1}}
    return {}


class Talk:
    """A conversation with one answer, whose second turn meets the fault."""

    def __init__(self, s: Stack, agent: Agent) -> None:
        self.stack = s
        self.agent = agent
        self.history: list[Item] = [user("Hello.")]
        self.turns = 1

    async def begin(self) -> None:
        """Get the first answer, and ask the second question."""
        reply = await self.agent.send(self.history)
        assert reply.mode in ("full", None)
        self.history.extend([*self.agent.echo(reply.items), user("Next?")])

    async def send(self) -> Reply:
        """Send the question, whatever comes of it."""
        return await self.agent.send(self.history)

    async def go_on(self) -> Reply:
        """Get the right answer to the question that is open; ask another, and get that, too."""
        reply = await self.send()
        self.check(reply)
        self.history.extend([*self.agent.echo(reply.items), user("And then?")])
        follow = await self.send()
        self.check(follow)
        return follow

    def check(self, reply: Reply) -> None:
        """The reply is an answer to the history as it is, in every detail."""
        assert reply.status == 200
        self.stack.check_contexts([reply])
        assert reply.response is not None
        assert reply.response["status"] == "completed"
        assert reply.response["previous_response_id"] is None


@contextlib.asynccontextmanager
async def talking(
    streaming: Streaming = Streaming.ALWAYS,
    *,
    store: bool = False,
    sim: SimulatorOptions = TALKATIVE,
    tolerates: tuple[str, ...] = (),
    **config: Any,
) -> AsyncIterator[tuple[Stack, Talk]]:
    """Begin a conversation through a proxy that opens no connection ahead of need."""
    connections = {"spare_per_principal": 0}
    async with stack(sim=sim, tolerates=tolerates, connections=connections, **config) as s:
        talk = Talk(s, s.agent(streaming=streaming, settings={"store": store}))
        await talk.begin()
        yield s, talk


async def straight_reply(s: Stack, talk: Talk, fault: ErrorReply) -> Reply:
    """Return what HTTP gives for a request that meets this error."""
    s.sim.faults.arm(replace(fault, transport=Transport.HTTP, times=1))
    agent = s.agent(straight=True, streaming=talk.agent.streaming, settings=talk.agent.settings)
    return await agent.post(json.dumps(agent.build_body(talk.history)).encode())


def steering(reply: Reply) -> dict[str, str]:
    """Return the headers that steer a client's retries."""
    return {name: value for name, value in reply.headers.items() if name in STEERING}


# --- Before the first event: faults that a resend heals ------------------------------------------

HEALED: dict[str, tuple[Fault, str]] = {
    **{
        f"not_found_{wording}_{shape}": (
            previous_response_not_found(wording, shape),
            "previous_response_not_found",
        )
        for wording in range(len(NOT_FOUND_WORDINGS))
        for shape in Shape
    },
    "connection_limit": (connection_limit_reached(), "connection_limit_reached"),
    **{
        f"close_{code}": (Break(end=End.CLOSE, code=code), "upstream_closed")
        for code in (1000, 1001, 1011, 1012, 1013)
    },
    "abort": (Break(end=End.ABORT), "upstream_closed"),
    "reset": (Break(end=End.RESET), "upstream_closed"),
    "stall": (Break(end=End.STALL), "upstream_silent"),
    "500": (ErrorReply(status=500, code="server_error"), "upstream_failed"),
    "503": (ErrorReply(status=503, code="server_is_overloaded"), "upstream_failed"),
    "no_output_found": (
        ErrorReply(status=400, message="No tool output found for function call call_1."),
        "delta_rejected",
    ),
    "duplicate_item": (
        ErrorReply(status=400, message="Duplicate item found with id msg_1."),
        "delta_rejected",
    ),
}


@pytest.mark.parametrize("streaming", STREAMING)
@pytest.mark.parametrize("name", HEALED)
async def test_one_resend_heals_what_came_before_the_first_event(name: str, streaming: Streaming):
    """The client sees the right answer and nothing else; the reason tells what happened."""
    fault, reason = HEALED[name]
    async with talking(streaming, **patience(fault)) as (s, talk):
        s.sim.faults.arm(fault)

        reply = await talk.send()

        talk.check(reply)
        assert (reply.mode, reply.reason) == ("full", reason)
        assert s.metric("turnwire_resends_total", reason=reason) == 1
        talk.history.extend([*talk.agent.echo(reply.items), user("And then?")])
        follow = await talk.send()
        talk.check(follow)
        assert (follow.mode, follow.reason) == ("delta", "continued")


FALLS_BACK: dict[str, tuple[tuple[Fault, ...], str]] = {
    "close_1009": ((Break(end=End.CLOSE, code=1009),), "too_large"),
    "not_found_twice": ((previous_response_not_found(),) * 2, "resend_failed"),
    "limit_twice": ((connection_limit_reached(),) * 2, "resend_failed"),
}


@pytest.mark.parametrize("streaming", STREAMING)
@pytest.mark.parametrize("name", FALLS_BACK)
async def test_http_heals_what_a_resend_can_not(name: str, streaming: Streaming):
    """The turn goes over HTTP, and the client sees the right answer."""
    faults, reason = FALLS_BACK[name]
    async with talking(streaming) as (s, talk):
        s.sim.faults.arm(*faults)

        reply = await talk.send()

        talk.check(reply)
        assert (reply.mode, reply.reason) == ("http", reason)
        assert s.metric("turnwire_fallbacks_total", reason=reason) == 1
        await talk.go_on()


# --- Before the first event: errors that are the client's to see ---------------------------------

LIMITED = {"Retry-After": "7", "x-ratelimit-remaining-requests": "0"}
ERRORS: dict[str, ErrorReply] = {
    "400": ErrorReply(status=400, code="invalid_value", param="input", message="Bad value."),
    "401": ErrorReply(status=401, code="invalid_api_key", type="authentication_error"),
    "403": ErrorReply(
        status=403, code="unsupported_country_region_territory", type="permission_error"
    ),
    "404": ErrorReply(status=404, code="model_not_found", type="not_found_error"),
    "413": ErrorReply(status=413, code="request_too_large", type="request_too_large"),
    "429": ErrorReply(
        status=429, code="rate_limit_exceeded", type="rate_limit_error", headers=LIMITED
    ),
    "429_bare": ErrorReply(status=429, code="insufficient_quota", type="insufficient_quota"),
    "500": ErrorReply(status=500, code="server_error", type="server_error", times=2),
    "503": ErrorReply(
        status=503,
        code="service_unavailable",
        type="service_unavailable_error",
        headers={"Retry-After": "3"},
        times=2,
    ),
}


@pytest.mark.parametrize("streaming", STREAMING)
@pytest.mark.parametrize("shape", Shape)
@pytest.mark.parametrize("name", ERRORS)
async def test_an_error_frame_becomes_the_error_that_http_gives(
    name: str, shape: Shape, streaming: Streaming
):
    """The client sees the status, the body and the headers of the same error over HTTP."""
    fault = replace(ERRORS[name], shape=shape, transport=Transport.WS)
    async with talking(streaming) as (s, talk):
        s.sim.faults.arm(fault)

        reply = await talk.send()
        straight = await straight_reply(s, talk, fault)

        assert (reply.status, reply.response) == (straight.status, None)
        assert reply.headers["content-type"].split(";")[0] == "application/json"
        told = {"message", "type", "param", "code"}
        if shape is Shape.FLAT:
            told -= {"type"}
        if shape is Shape.TYPELESS:
            told -= {"param", "code"}
        assert {key: reply.error[key] for key in told} == {key: straight.error[key] for key in told}
        assert reply.error.keys() == straight.error.keys()
        if shape in (Shape.NESTED, Shape.LEGACY):
            assert reply.error == straight.error
            assert steering(reply) == steering(straight)
        assert not s.sim.faults.armed
        await talk.go_on()


@pytest.mark.parametrize("streaming", STREAMING)
@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        (Break(end=End.CLOSE, code=1008), 502, "upstream_connection_lost"),
        (Break(end=End.ABORT, times=2), 502, "upstream_connection_lost"),
        (Break(end=End.RESET, times=2), 502, "upstream_connection_lost"),
        (Break(end=End.STALL, times=2), 504, "upstream_silent"),
    ],
)
async def test_a_connection_that_keeps_ending_is_a_502(
    fault: Break, status: int, code: str, streaming: Streaming
):
    """After one resend, or where the close is a refusal, the client decides what to do next."""
    async with talking(streaming, **patience(fault)) as (s, talk):
        s.sim.faults.arm(fault)

        reply = await talk.send()

        assert (reply.status, reply.error["code"]) == (status, code)
        assert "x-should-retry" not in reply.headers
        assert not s.sim.faults.armed
        await talk.go_on()


@pytest.mark.parametrize("end", [End.CLOSE, End.ABORT, End.RESET, End.STALL])
async def test_a_stored_turn_is_not_run_twice(end: End):
    """With `store` true a lost connection is ambiguous: the client is asked, not upstream again."""
    fault = Break(end=end)
    async with talking(store=True, **patience(fault)) as (s, talk):
        turns = len(s.sim.journal.turns)
        s.sim.faults.arm(fault)

        reply = await talk.send()

        assert reply.status == (504 if end is End.STALL else 502)
        assert len(s.sim.journal.turns) == turns + 1
        follow = await talk.go_on()
        assert (follow.mode, follow.reason) == ("delta", "continued")


@pytest.mark.parametrize("streaming", STREAMING)
async def test_a_failed_response_is_handed_on(streaming: Streaming):
    """`response.failed` is an answer: the client gets it as HTTP gives it, and the head is gone."""
    async with talking(streaming) as (s, talk):
        s.sim.faults.arm(FailResponse())

        reply = await talk.send()

        assert reply.status == 200
        assert reply.response is not None
        assert reply.response["status"] == "failed"
        assert reply.error == {
            "code": "server_error",
            "message": "The model failed to generate a response.",
        }
        await talk.go_on()


# --- The upgrade ----------------------------------------------------------------------------------

JSON_BODY = RefuseUpgrade().body
HTML = "<html><body><h1>Go away</h1></body></html>"
UPGRADES = [
    RefuseUpgrade(status=status, headers=headers, body=body)
    for status in (401, 403, 404, 405, 426, 500, 501, 503)
    for headers in ({}, {"Retry-After": "5"})
    for body in (JSON_BODY, HTML)
]


@pytest.mark.parametrize("fault", UPGRADES, ids=lambda fault: f"{fault.status}")
async def test_a_refused_upgrade_leaves_the_turn_to_http(fault: RefuseUpgrade):
    """HTTP decides what the refusal means for the client, at once and within the same request."""
    connections = {"spare_per_principal": 0}
    async with stack(sim=TALKATIVE, connections=connections) as s:
        talk = Talk(s, s.agent(streaming=Streaming.ALTERNATING))
        s.sim.faults.arm(fault)

        reply = await talk.send()

        talk.check(reply)
        assert (reply.mode, reply.reason) == ("http", "upgrade_refused")
        assert s.metric("turnwire_connects_total", result="refused") == 1
        follow = await talk.go_on()
        # A wrong key opens no cool-down; everything else lets WebSocket mode rest.
        rests = fault.status != 401
        assert (follow.mode, follow.reason) == (
            ("http", "cooling_down") if rests else ("delta", "continued")
        )


@pytest.mark.parametrize("status", [401, 403])
async def test_a_key_that_http_refuses_too_gets_its_answer(status: int):
    """A refusal that HTTP confirms reaches the client with HTTP's own status and body."""
    async with stack(sim=TALKATIVE) as s:
        s.sim.faults.arm(RefuseUpgrade(status=status))
        agent, straight = (s.agent(api_key="bad-key", straight=flag) for flag in (False, True))

        reply, expected = await agent.send([user("Hi.")]), await straight.send([user("Hi.")])

        assert (reply.status, reply.error) == (expected.status, expected.error)
        assert reply.status == 401


@pytest.mark.parametrize("headers", [{}, {"Retry-After": "5"}, {"retry-after-ms": "50"}])
@pytest.mark.parametrize("body", [JSON_BODY, HTML, ""])
async def test_a_rate_limited_upgrade_is_the_clients_429(headers: dict[str, str], body: str):
    """A 429 is never retried by us, on HTTP neither: the client gets it, and the time to wait."""
    async with stack(sim=TALKATIVE) as s:
        talk = Talk(s, s.agent())
        s.sim.faults.arm(RefuseUpgrade(status=429, headers=headers, body=body))

        reply = await talk.send()

        assert reply.status == 429
        assert steering(reply) == {name.lower(): value for name, value in headers.items()}
        assert isinstance(reply.error["message"], str)
        assert "<" not in reply.error["message"]
        assert not s.sim.journal.turns
        await talk.go_on()


# --- After the first event ------------------------------------------------------------------------

BREAKS: dict[str, Fault] = {
    **{
        f"{end}_{after}": Break(end=end, after_events=after)
        for end in (End.CLOSE, End.ABORT, End.RESET)
        for after in (1, 3, 8, -1)
    },
    "close_1000": Break(end=End.CLOSE, code=1000, after_events=4),
    "stall": Break(end=End.STALL, after_events=4),
    **{
        f"error_{shape}": ErrorReply(status=500, code="server_error", after_events=4, shape=shape)
        for shape in Shape
    },
    "foreign_id": Restyle(style=Style.FOREIGN_ID),
}


async def read_broken(s: Stack, talk: Talk) -> tuple[int, bytes, bool]:
    """Send a request; return its status, all bytes of the body, and whether it ended cleanly."""
    body = json.dumps(talk.agent.build_body(talk.history)).encode()
    headers = {"Authorization": "Bearer sk-agent", "Content-Type": "application/json"}
    received = b""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{s.base_url}/responses", data=body, headers=headers) as reply,
    ):
        try:
            async for block in reply.content.iter_any():
                received += block
        except aiohttp.ClientPayloadError:
            return reply.status, received, False
        return reply.status, received, True


def sse_events(body: bytes) -> list[dict[str, Any]]:
    """Return the data of all events; fails on half an event."""
    *blocks, rest = body.split(b"\n\n")
    assert rest == b""
    lines = [line for block in blocks for line in block.split(b"\n") if line.startswith(b"data: ")]
    assert len(lines) == len(blocks)
    return [json.loads(line[len(b"data: ") :]) for line in lines]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", BREAKS)
async def test_a_stream_that_breaks_ends_in_one_error_and_not_cleanly(name: str):
    """The client gets what had come, exactly one error event, and a body without its end."""
    async with talking(**patience(BREAKS[name])) as (s, talk):
        s.sim.faults.arm(BREAKS[name])

        status, body, clean = await read_broken(s, talk)

        assert (status, clean) == (200, False)
        *before, error = sse_events(body)
        assert before[0]["type"] == "response.created"
        assert error["type"] == "error"
        assert error["message"] == error["error"]["message"]
        assert error["code"] == error["error"]["code"]
        kinds = [event["type"] for event in before]
        assert not {"error", "response.completed", "response.failed"} & set(kinds)
        numbers = [event["sequence_number"] for event in (*before, error)]
        assert numbers == sorted(set(numbers))
        await talk.go_on()


@pytest.mark.parametrize("name", BREAKS)
async def test_a_broken_answer_is_an_error_where_none_was_streamed(name: str):
    """Without streaming, an answer that breaks off is a 5xx in the API's shape, once."""
    async with talking(Streaming.NEVER, **patience(BREAKS[name])) as (s, talk):
        turns = len(s.sim.journal.turns)
        s.sim.faults.arm(BREAKS[name])

        reply = await talk.send()

        assert reply.status >= 500
        assert set(reply.error) == {"message", "type", "param", "code"}
        assert len(s.sim.journal.turns) == turns + 1
        await talk.go_on()


@pytest.mark.usefixtures("way")
async def test_a_client_that_ignores_the_error_still_sees_no_end():
    """The last chunk of the body never comes: no reader can take the stream for complete."""
    async with talking() as (s, talk):
        s.sim.faults.arm(Break(after_events=-1))
        body = json.dumps(talk.agent.build_body(talk.history)).encode()
        head = (
            f"POST /v1/responses HTTP/1.1\r\nHost: 127.0.0.1:{s.port}\r\n"
            f"Authorization: Bearer sk-agent\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", s.port)
        writer.write(head.encode() + body)

        received = await reader.read()
        writer.close()

        assert b"Transfer-Encoding: chunked\r\n" in received
        assert b"event: error\n" in received
        assert not received.endswith(b"0\r\n\r\n")


@pytest.mark.usefixtures("way")
async def test_a_doubled_beginning_is_no_answer():
    """An answer that begins twice is resent if nobody has seen its beginning, and else breaks."""
    async with talking() as (s, talk):
        s.sim.faults.arm(Restyle(style=Style.DUPLICATE_CREATED))

        _, body, clean = await read_broken(s, talk)

        kinds = [event["type"] for event in sse_events(body)]
        assert kinds.count("response.created") == 1
        assert kinds[-1] == ("response.completed" if clean else "error")
        await talk.go_on()


# --- Odd ways to write a right answer -------------------------------------------------------------

ODDITIES: dict[str, Fault] = {
    "pretty": Restyle(style=Style.PRETTY),
    "type_last": Restyle(style=Style.TYPE_LAST),
    "escaped": Restyle(style=Style.ESCAPED),
    "no_setup": Restyle(style=Style.NO_SETUP),
    "vendor_before": ExtraEvents(before=[CODEX_RATE_LIMITS, WEBSOCKET_TIMING]),
    "vendor_after": ExtraEvents(after=[WEBSOCKET_TIMING]),
    "vendor_both": ExtraEvents(before=[CODEX_RATE_LIMITS], after=[CODEX_RATE_LIMITS] * 3),
    "huge": HugeEvent(extra_bytes=8 << 20),
    "all": Combined(
        faults=(
            ExtraEvents(before=[CODEX_RATE_LIMITS], after=[WEBSOCKET_TIMING]),
            Restyle(style=Style.TYPE_LAST),
            Restyle(style=Style.PRETTY),
        )
    ),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("streaming", STREAMING)
@pytest.mark.parametrize("name", ODDITIES)
async def test_an_answer_may_be_written_in_any_way(name: str, streaming: Streaming):
    """The client sees the answer, the vendor's own frames stay out, and the chain goes on."""
    async with talking(streaming) as (s, talk):
        s.sim.faults.arm(ODDITIES[name])

        reply = await talk.send()

        talk.check(reply)
        assert reply.mode == "delta"
        assert all(event["type"].startswith("response.") for event in reply.events)
        follow = await talk.go_on()
        assert (follow.mode, follow.reason) == ("delta", "continued")


async def test_events_without_numbers_pass_through():
    """An upstream that does not number its events is relayed as it is."""
    async with talking() as (s, talk):
        s.sim.faults.arm(Restyle(style=Style.NO_SEQUENCE))

        _, body, clean = await read_broken(s, talk)

        assert clean
        events = sse_events(body)
        assert events[-1]["type"] == "response.completed"
        assert not any("sequence_number" in event for event in events)
        follow = await talk.go_on()
        assert (follow.mode, follow.reason) == ("delta", "continued")


@pytest.mark.parametrize("streaming", STREAMING)
@pytest.mark.parametrize("output", CompletedOutput)
async def test_a_terminal_event_without_items_is_completed(
    output: CompletedOutput, streaming: Streaming
):
    """Where the upstream leaves `output` empty or out, the client gets the streamed items in it."""
    options = replace(TALKATIVE, completed_output=output)
    async with talking(streaming, sim=options) as (_, talk):
        reply = await talk.send()

        talk.check(reply)
        assert reply.mode == "delta"
        assert reply.response is not None
        assert [item["type"] for item in reply.response["output"]] == ["reasoning", "message"]


STRAY = {"type": "response.output_text.delta", "delta": "stray", "item_id": "msg_x"}


@pytest.mark.usefixtures("way")
async def test_frames_after_the_end_spoil_the_connection_and_nothing_else():
    """A stray answer event after the end is not shown to anybody, and its connection is closed."""
    async with talking() as (s, talk):
        s.sim.faults.arm(ExtraEvents(after=[STRAY]))

        reply = await talk.send()
        talk.check(reply)
        talk.history.extend([*talk.agent.echo(reply.items), user("And then?")])
        follow = await talk.send()

        talk.check(follow)
        assert "stray" not in str(follow.events)


@dataclass(frozen=True, slots=True, kw_only=True)
class Late(Fault):
    """One more event, a while after the answer's end; the terminal event again if not given."""

    event: Mapping[str, Any] | None = None

    def change(self, script: Script) -> Script:
        """Append the event, so late that the next request is on its way."""
        last = script.steps[-1]
        late = Step(due_s=last.due_s + 0.1, body=self.event or last.body)
        return replace(script, steps=(*script.steps, late))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("streaming", STREAMING)
@pytest.mark.parametrize("late", [None, STRAY, {"type": "response.failed", "response": {}}])
async def test_what_comes_late_is_not_the_answer_to_the_next_turn(
    late: Mapping[str, Any] | None, streaming: Streaming
):
    """An event that arrives when the next request is waiting belongs to nobody, least of all it."""
    async with talking(streaming) as (s, talk):
        s.sim.faults.arm(Late(event=late))

        reply = await talk.send()
        talk.check(reply)
        talk.history.extend([*talk.agent.echo(reply.items), user("And then?")])
        follow = await talk.send()

        talk.check(follow)
        assert (follow.mode, follow.reason) == ("full", "upstream_failed")
        assert "stray" not in str(follow.events)
        await talk.go_on()
