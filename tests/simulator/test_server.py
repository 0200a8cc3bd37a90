"""The witness on a port: HTTP and WebSocket, what each remembers, and how each breaks."""

import io
import json

import aiohttp
import pytest
from witness import KEY, connected

from proxy.simulator import Simulator, SimulatorOptions
from proxy.simulator.agent import DEFAULT_TOOLS, Agent, Streaming, user
from proxy.simulator.faults import (
    Break,
    End,
    ErrorReply,
    ExtraEvents,
    FailResponse,
    RefuseUpgrade,
    SliceWrites,
    connection_limit_reached,
    previous_response_not_found,
)
from proxy.simulator.streams import StreamError
from proxy.simulator.wire import Shape

TOOLS = list(DEFAULT_TOOLS)


@pytest.fixture
async def simulator():
    """An instant simulator."""
    async with Simulator() as running:
        yield running


@pytest.fixture
async def session(simulator):
    """An HTTP session with a key."""
    headers = {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(headers=headers) as opened:
        yield opened


async def post(session, simulator, body, path="/responses", **kwargs):
    """Status, headers and JSON of a POST."""
    async with session.post(simulator.base_url + path, json=body, **kwargs) as reply:
        return reply.status, reply.headers, await reply.json()


# What a connection remembers.


async def test_a_chain_of_deltas_gives_the_answers_of_full_sends(simulator):
    """The witness holds one context, whichever way it came."""
    agent = Agent(simulator.base_url)
    settings = {"instructions": agent.instructions, "tools": TOOLS}
    straight = await agent.run(["[calls=9] go"])
    answers = []
    async with connected(simulator) as raw:
        response = await raw.response([user("[calls=9] go")], **settings)
        while True:
            answers.append([{**item, "id": None} for item in response["output"]])
            outputs = agent.answer_calls(response["output"])
            if not outputs:
                break
            previous = response["id"]
            response = await raw.response(outputs, previous_response_id=previous, **settings)
    assert answers == [[{**item, "id": None} for item in each] for each in straight.answers]
    turns = simulator.journal.turns
    straight_digests = [seen.digest for seen in turns if seen.transport == "http"]
    assert straight_digests == [seen.digest for seen in turns if seen.transport == "ws"]
    assert len(turns[-1].context) == len(straight.history) - len(straight.answers[-1])


async def test_a_connection_keeps_its_latest_response_only(simulator):
    """An older response of the same connection is gone."""
    async with connected(simulator) as raw:
        first = await raw.response("one")
        second = await raw.response("two", previous_response_id=first["id"])
        error = await raw.error("again", previous_response_id=first["id"])
        assert (error["status"], error["code"]) == (400, "previous_response_not_found")
        # The refusal named another response, so the latest one is still there.
        await raw.response("three", previous_response_id=second["id"])


async def test_a_new_conversation_replaces_the_latest(simulator):
    """There are no lanes: a second conversation pushes the first one out."""
    async with connected(simulator) as raw:
        first = await raw.response("one")
        await raw.response("of another conversation")
        error = await raw.error("again", previous_response_id=first["id"])
        assert error["code"] == "previous_response_not_found"


async def test_a_refused_continuation_evicts(simulator):
    """After a 400 the response that it named can't be continued."""
    async with connected(simulator) as raw:
        first = await raw.response("go", tools=TOOLS)
        error = await raw.error("never mind", previous_response_id=first["id"], tools=TOOLS)
        assert error["message"].startswith("No tool output found")
        outputs = Agent("").answer_calls(first["output"])
        error = await raw.error(outputs, previous_response_id=first["id"], tools=TOOLS)
        assert error["code"] == "previous_response_not_found"


async def test_memory_ends_with_the_connection_unless_stored(simulator):
    """With `store` false the id is dead on a new connection, with `store` true it is not."""
    async with connected(simulator) as raw:
        forgotten = await raw.response("one")
        kept = await raw.response("two", store=True)
    async with connected(simulator) as raw:
        error = await raw.error("x", previous_response_id=forgotten["id"])
        assert error["code"] == "previous_response_not_found"
        await raw.response("x", previous_response_id=kept["id"])


async def test_incomplete_and_failed_responses_are_not_continued(simulator):
    """Only a completed response is remembered."""
    async with connected(simulator) as raw:
        *_, last = await raw.turn("[tokens=99] go", max_output_tokens=16)
        assert last["type"] == "response.incomplete"
        previous = last["response"]["id"]
        assert (await raw.error("x", previous_response_id=previous))["status"] == 400
        simulator.faults.arm(FailResponse())
        *_, last = await raw.turn("go")
        assert last["type"] == "response.failed"
        previous = last["response"]["id"]
        assert (await raw.error("x", previous_response_id=previous))["status"] == 400


async def test_a_connection_has_an_age_limit():
    """Past it, every create is refused, though the connection is alive."""
    now = 0.0
    async with Simulator(clock=lambda: now) as simulator, connected(simulator) as raw:
        now = 3599.0
        first = await raw.response("one")
        now = 3600.0
        error = await raw.error("two", previous_response_id=first["id"])
        assert error["code"] == "websocket_connection_limit_reached"


async def test_a_warm_up_prepares_without_an_answer(simulator):
    """`generate` false completes with no output, and can be continued."""
    async with connected(simulator) as raw:
        warm = await raw.response([user("go")], generate=False)
        assert warm["output"] == []
        chained = await raw.response([], previous_response_id=warm["id"])
        full = await raw.response([user("go")])
        assert chained["output"][-1]["content"] == full["output"][-1]["content"]


async def test_creates_queue_on_a_connection(simulator):
    """Three at once are answered one after the other, in order."""
    async with connected(simulator) as raw:
        for text in ("one", "two", "three"):
            await raw.create(text)
        answers = [(await raw.rest())[-1]["response"]["output"][-1] for _ in range(3)]
        repeated = [(await raw.response(text))["output"][-1] for text in ("one", "two", "three")]
    assert [a["content"] for a in answers] == [r["content"] for r in repeated]


# Isolation.


async def test_principals_do_not_share_responses(simulator, session):
    """Another key can't continue or read a stored response; the journal marks the attempt."""
    body = {"model": "gpt-5.2", "input": "mine"}
    _, _, mine = await post(session, simulator, body)
    async with connected(simulator, "sk-other") as raw:
        error = await raw.error("x", previous_response_id=mine["id"])
        assert error["code"] == "previous_response_not_found"
        assert simulator.journal[-1].foreign
    other = {"Authorization": "Bearer sk-other"}
    async with session.get(f"{simulator.base_url}/responses/{mine['id']}", headers=other) as reply:
        assert reply.status == 404


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer bad-key"}])
async def test_credentials_are_needed(simulator, headers):
    """Without them, or with bad ones, both transports answer 401 before anything else."""
    url = f"{simulator.base_url}/responses"
    async with aiohttp.ClientSession(headers=headers) as session:
        status, _, body = await post(session, simulator, {"model": "m", "input": "x"})
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await session.ws_connect(url)
        assert caught.value.status == 401


# HTTP.


async def test_http_replies_carry_the_api_headers(simulator, session):
    """A request id of its own, processing time and rate limits, on success and error."""
    body = {"model": "gpt-5.2", "input": "hi"}
    seen = [await post(session, simulator, b) for b in (body, body, {"model": "m"})]
    assert [status for status, _, _ in seen] == [200, 200, 400]
    assert len({headers["x-request-id"] for _, headers, _ in seen}) == 3
    assert all("openai-processing-ms" in headers for _, headers, _ in seen)


async def test_stored_responses_can_be_read_continued_and_deleted(simulator, session):
    """GET and DELETE by id, and previous_response_id over HTTP."""
    body = {"model": "gpt-5.2", "input": "hi"}
    _, _, first = await post(session, simulator, body)
    url = f"{simulator.base_url}/responses/{first['id']}"
    async with session.get(url) as reply:
        assert await reply.json() == first
    status, _, _ = await post(session, simulator, {**body, "previous_response_id": first["id"]})
    assert status == 200
    async with session.delete(url) as reply:
        assert (await reply.json())["deleted"] is True
    status, _, found = await post(session, simulator, {**body, "previous_response_id": first["id"]})
    assert (status, found["error"]["code"]) == (400, "previous_response_not_found")


async def test_references_resolve_to_stored_items(simulator, session):
    """An `item_reference` means what it refers to; one to nothing is refused."""
    settings = {"model": "gpt-5.2", "tools": []}
    _, _, first = await post(session, simulator, {**settings, "input": [user("hi")]})
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    again = user("and?")
    referred = {**settings, "input": [user("hi"), *references, again]}
    spelt = {**settings, "input": [user("hi"), *first["output"], again]}
    _, _, one = await post(session, simulator, referred)
    _, _, two = await post(session, simulator, spelt)
    assert one["output"][-1]["content"] == two["output"][-1]["content"]
    unknown = {**settings, "input": [{"type": "item_reference", "id": "rs_nope"}]}
    status, _, found = await post(session, simulator, unknown)
    assert status == 400
    assert "not persisted" in found["error"]["message"]


async def test_a_conversation_keeps_its_items(simulator, session):
    """Turns of one conversation see each other without naming a response."""
    body = {"model": "gpt-5.2", "conversation": "conv_1"}
    for text in ("one", "two"):
        await post(session, simulator, {**body, "input": text})
    assert [i["content"] for i in simulator.journal[-1].context if i.get("role") == "user"] == [
        "one",
        "two",
    ]


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
async def test_compressed_bodies_are_read(simulator, session, encoding):
    """Bodies may come in any common content coding."""
    reply = await session.post(
        f"{simulator.base_url}/responses",
        data=_compressed(json.dumps({"model": "gpt-5.2", "input": "hi"}).encode(), encoding),
        headers={"Content-Encoding": encoding},
    )
    assert reply.status == 200
    reply.release()


def _compressed(data, encoding):
    import gzip
    import zlib

    import brotli
    from backports import zstd

    codecs = {
        "gzip": gzip.compress,
        "deflate": zlib.compress,
        "br": brotli.compress,
        "zstd": zstd.compress,
    }
    return codecs[encoding](data)


async def test_the_rest_of_the_api_is_there(simulator, session):
    """Models, embeddings and uploads answer; unknown paths are 404 in the API's shape."""
    async with session.get(f"{simulator.base_url}/models") as reply:
        assert len((await reply.json())["data"]) > 1
    async with session.get(f"{simulator.base_url}/models/gpt-x") as reply:
        assert (await reply.json())["id"] == "gpt-x"
    _, _, found = await post(session, simulator, {"model": "e", "input": ["a", "b"]}, "/embeddings")
    assert [each["index"] for each in found["data"]] == [0, 1]
    upload = io.BytesIO(b"x" * 3_000_000)
    async with session.post(f"{simulator.base_url}/files", data=upload) as reply:
        assert (await reply.json())["bytes"] == 3_000_000
    for path in ("/responses/compact", "/nowhere"):
        status, _, found = await post(session, simulator, {}, path)
        assert (status, set(found)) == (404, {"error"})


# Faults.


async def test_error_frames_take_the_place_of_an_answer(simulator):
    """In any shape; the connection stays, what it named is forgotten."""
    async with connected(simulator) as raw:
        first = await raw.response("one")
        simulator.faults.arm(
            previous_response_not_found(2),
            connection_limit_reached(),
            ErrorReply(status=429, message="slow", shape=Shape.LEGACY),
            ErrorReply(status=500, shape=Shape.TYPELESS, after_events=2),
        )
        (event,) = await raw.turn("x", previous_response_id=first["id"])
        assert event["error"]["code"] is None
        assert (await raw.error("x"))["code"] == "websocket_connection_limit_reached"
        (event,) = await raw.turn("x")
        assert event["status_code"] == 429
        events = await raw.turn("x")
        assert len(events) == 3
        assert "type" not in events[-1]
        error = await raw.error("x", previous_response_id=first["id"])
        assert error["code"] == "previous_response_not_found"


@pytest.mark.parametrize("code", [1001, 1008, 1009, 1011, 1012])
async def test_connections_close_with_a_code(simulator, code):
    """A close frame after some events, with the code that was asked for."""
    simulator.faults.arm(Break(end=End.CLOSE, code=code, after_events=1))
    async with connected(simulator) as raw:
        await raw.create("x")
        assert (await raw.event())["type"] == "response.created"
        message = await raw.ws.receive()
        assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, code)


@pytest.mark.parametrize("end", [End.ABORT, End.RESET])
async def test_connections_break_without_a_close_frame(simulator, end):
    """FIN or RST: nothing that WebSocket would call a close."""
    simulator.faults.arm(Break(end=end))
    async with connected(simulator) as raw:
        await raw.create("x")
        message = await raw.ws.receive()
        assert message.type in {aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR}
        assert raw.ws.close_code == 1006


async def test_too_large_a_message_closes_with_1009():
    """The limit of a message is the connection's end, without an event."""
    options = SimulatorOptions(max_message_bytes=10_000)
    async with Simulator(options) as simulator, connected(simulator) as raw:
        await raw.create("x" * 20_000)
        message = await raw.ws.receive()
        assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1009)


async def test_upgrades_can_be_refused(simulator):
    """With any status and headers, once; the next upgrade succeeds."""
    simulator.faults.arm(RefuseUpgrade(status=503, headers={"retry-after": "2"}))
    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        async with connected(simulator):
            pass
    assert caught.value.status == 503
    assert caught.value.headers["retry-after"] == "2"
    async with connected(simulator) as raw:
        await raw.response("x")
    assert simulator.journal.upgrades_refused == 1


async def test_http_errors_have_status_headers_and_any_body(simulator, session):
    """An API error with Retry-After, then the HTML of a middlebox."""
    simulator.faults.arm(
        ErrorReply(status=429, headers={"retry-after": "7"}),
        ErrorReply(status=502, raw_body="<html>Bad gateway</html>"),
    )
    body = {"model": "gpt-5.2", "input": "x"}
    status, headers, found = await post(session, simulator, body)
    assert (status, headers["retry-after"], set(found)) == (429, "7", {"error"})
    async with session.post(f"{simulator.base_url}/responses", json=body) as reply:
        assert (reply.status, reply.content_type) == (502, "text/html")


@pytest.mark.parametrize("streaming", [Streaming.ALWAYS, Streaming.NEVER])
@pytest.mark.parametrize("end", [End.ABORT, End.RESET])
async def test_http_replies_break(simulator, streaming, end):
    """The TCP connection ends inside the reply, streamed or not."""
    simulator.faults.arm(Break(end=end, after_events=3))
    async with Agent(simulator.base_url, streaming=streaming) as agent:
        with pytest.raises(aiohttp.ClientError):
            await agent.send([user("x")])


async def test_a_clean_end_without_a_terminal_event_is_a_stream_error(simulator):
    """The body ends well, the stream does not."""
    simulator.faults.arm(Break(end=End.CLOSE, after_events=-1))
    async with Agent(simulator.base_url) as agent:
        with pytest.raises(StreamError):
            await agent.send([user("x")])


async def test_a_stalled_turn_ends_with_its_client(simulator):
    """Nothing more is sent; when the client leaves, the connection is over here too."""
    simulator.faults.arm(Break(end=End.STALL, after_events=1))
    async with connected(simulator) as raw:
        await raw.create("x")
        assert (await raw.event())["type"] == "response.created"
        await raw.ws.close()
    async with connected(simulator) as raw:
        await raw.response("x")


@pytest.mark.parametrize("size", [1, 3, 1000, 10_000_000])
async def test_writes_can_be_sliced_and_merged(simulator, size):
    """However the stream is cut into writes, it is the same stream."""
    async with Agent(simulator.base_url, tools=[]) as agent:
        expected = await agent.send([user("[tokens=60] go")])
        simulator.faults.arm(SliceWrites(slice_bytes=size))
        found = await agent.send([user("[tokens=60] go")])
    assert found.answer == expected.answer


async def test_vendor_events_surround_an_answer(simulator):
    """They come before the first event and after the last."""
    extra = ({"type": "codex.rate_limits"}, {"type": "responsesapi.websocket_timing"})
    simulator.faults.arm(ExtraEvents(before=extra[:1], after=extra[1:]))
    async with connected(simulator) as raw:
        events = await raw.turn("x")
        assert events[0] == extra[0]
        assert events[-1]["type"] == "response.completed"
        assert await raw.event() == extra[1]


async def test_faults_and_journal_are_there_over_http(simulator, session):
    """Another process can arm faults and read what was seen."""
    control = simulator.base_url.removesuffix("/v1") + "/_sim"
    faults = [{"kind": "error_reply", "status": 503}, {"kind": "break", "times": 5}]
    async with session.post(f"{control}/faults", json=faults) as reply:
        assert (await reply.json())["armed"] == 2
    status, _, _ = await post(session, simulator, {"model": "m", "input": "x"})
    assert status == 503
    async with session.delete(f"{control}/faults") as reply:
        assert reply.status == 204
    async with session.get(f"{control}/faults") as reply:
        assert await reply.json() == {"armed": 0, "fired": 1}
    async with session.get(f"{control}/journal") as reply:
        found = await reply.json()
    assert found["counters"]["turns"] == {"http": 1}
    assert found["records"][0]["status"] == 503
    async with session.post(f"{control}/faults", json=[{"kind": "flood"}]) as reply:
        assert reply.status == 400
    async with session.delete(f"{control}/journal") as reply:
        assert len(simulator.journal) == 0


async def test_all_connections_can_be_ended(simulator):
    """Closed with a frame, or dropped without."""
    async with connected(simulator) as raw:
        await raw.response("x")
        simulator.drop_connections()
        assert (await raw.ws.receive()).type is aiohttp.WSMsgType.CLOSED
    async with connected(simulator) as raw:
        await raw.response("x")
        closing = raw.ws.receive()
        await simulator.close_connections(1012)
        assert (await closing).data == 1012
