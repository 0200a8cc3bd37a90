"""
Chat Completions through the whole proxy: what is translated, what is not, and what goes wrong.

That the answers are the right ones is the business of `test_chat_oracle`. Here: that nothing of a
request is lost in silence, and that every failure looks to an SDK as it does straight.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import openai
import pytest
from chat_agent import TOOLS, ChatAgent
from harness import stack
from pydantic import BaseModel

from proxy.core.chat_fields import FIELDS, Fate
from proxy.simulator import AnswerOptions, SimulatorOptions
from proxy.simulator.agent import Streaming, user
from proxy.simulator.faults import Break, End, EndIncomplete, ErrorReply, FailResponse
from proxy.simulator.validate import Transport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from harness import Stack

MODEL = "gpt-5.2"
HELLO: Any = [{"role": "user", "content": "Hello."}]


@contextlib.asynccontextmanager
async def clients(
    sim: SimulatorOptions | None = None, **config: Any
) -> AsyncIterator[tuple[Stack, Any, Any]]:
    """Run a stack that translates, with two SDK clients: straight, and through the proxy."""
    settings: Any = {"api_key": "sk-sdk", "max_retries": 0}
    async with (
        stack(sim=sim, chat_completions="translate", **config) as s,
        openai.AsyncOpenAI(base_url=s.straight_url, **settings) as straight,
        openai.AsyncOpenAI(base_url=s.base_url, **settings) as proxied,
    ):
        yield s, straight, proxied


async def ask(client: openai.AsyncOpenAI, *, streamed: bool, **body: Any) -> Any:
    """Complete a chat in one of the SDK's ways; return content and finish reason."""
    body = {"model": MODEL, "messages": HELLO, **body}
    if not streamed:
        reply = await client.chat.completions.create(**body)
        return reply.choices[0].message.content, reply.choices[0].finish_reason
    text, reason = "", None
    async for chunk in await client.chat.completions.create(stream=True, **body):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return text, reason


STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["json", "stream"])


# --- Turns ---------------------------------------------------------------------------------------


@STREAMED
async def test_a_tool_loop_of_the_sdk_costs_only_what_is_new(*, streamed):
    """The SDK's own messages, dumped as it documents, are continued; upstream gets the outputs."""
    async with clients() as (s, straight, proxied):
        said = []
        for client in (straight, proxied):
            s.sim.journal.clear()
            said.append(await _loop(client, streamed=streamed))

        assert said[0] == said[1]
        first, *others = s.sim.journal.turns
        assert first.previous_response_id is None
        assert all(seen.previous_response_id for seen in others)
        assert all(len(seen.given) <= 2 for seen in others)
        assert [seen.transport for seen in s.sim.journal.turns] == [Transport.WS] * 5


async def _loop(client: openai.AsyncOpenAI, *, streamed: bool) -> list[Any]:
    messages: list[Any] = [{"role": "user", "content": "[calls=5] Tidy up."}]
    said = []
    while True:
        settings: Any = {"model": MODEL, "messages": messages, "tools": TOOLS[:3]}
        if streamed:
            async with client.chat.completions.stream(**settings) as stream:
                completion = await stream.get_final_completion()
        else:
            completion = await client.chat.completions.create(**settings)
        message = completion.choices[0].message
        said.append((message.content, [call.model_dump() for call in message.tool_calls or ()]))
        if not message.tool_calls:
            return said
        messages.append(message)
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": f"did {call.id}"}
            for call in message.tool_calls
        ]


class Verdict(BaseModel):
    """What a model is asked to decide."""

    guilty: bool
    years: int


async def test_the_parse_helper_gets_its_object_and_goes_on():
    """Structured output is parsed, and its echo, with the helper's own keys, is continued."""
    async with clients() as (s, straight, proxied):
        body: Any = {"model": MODEL, "messages": list(HELLO), "response_format": Verdict}
        expected = (await straight.chat.completions.parse(**body)).choices[0].message
        message = (await proxied.chat.completions.parse(**body)).choices[0].message
        echo = message.model_dump(exclude={"parsed"}) | {"parsed": message.parsed.model_dump()}
        body["messages"] += [echo, {"role": "user", "content": "Again."}]
        again = await proxied.chat.completions.with_raw_response.parse(**body)

        assert isinstance(message.parsed, Verdict)
        assert message.parsed == expected.parsed
        assert again.headers["turnwire-mode"] == "delta"
        assert s.sim.journal.turns[-1].given[0]["content"] == "Again."


async def test_a_cut_answer_ends_for_its_length_and_is_not_continued():
    """`max_completion_tokens` gives `length`; upstream can't continue what it did not complete."""
    async with clients() as (_, straight, proxied):
        limits = {"max_completion_tokens": 16, "messages": [user("[tokens=40] Tell.")]}
        for streamed in (False, True):
            expected = await ask(straight, streamed=streamed, **limits)
            assert await ask(proxied, streamed=streamed, **limits) == expected
            assert expected[1] == "length"
        messages = [*limits["messages"], {"role": "assistant", "content": expected[0]}, user("On.")]
        create = proxied.chat.completions.with_raw_response.create
        raw = await create(model=MODEL, messages=messages)
        assert raw.headers["turnwire-mode"] == "full"


@STREAMED
async def test_a_filtered_answer_says_so(*, streamed):
    """What upstream's filter cut off ends for that reason."""
    async with clients() as (s, straight, proxied):
        text, _ = await ask(straight, streamed=streamed)
        s.sim.faults.arm(EndIncomplete(transport=Transport.WS))

        assert await ask(proxied, streamed=streamed) == (text, "content_filter")


async def test_cursors_responses_body_gets_chunks_and_goes_on_by_a_delta():
    """A body shaped for Responses on the Chat path is answered as Chat Completions."""
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    body: dict[str, Any] = {"model": MODEL, "tools": tools, "stream": True, "tool_choice": "auto"}
    body |= {"reasoning": {"effort": "medium", "summary": "auto"}, "store": False}
    body |= {"stream_options": {"include_usage": True}, "text": {"verbosity": "low"}}
    async with clients() as (s, _, _):
        agent = ChatAgent(s.base_url)
        first = await agent.post(json.dumps({**body, "input": [user("[calls=1] Hi.")]}).encode())
        call = first.calls[0]
        echo = [
            {"type": "function_call", "call_id": call["id"], **call["function"]},
            {"type": "function_call_output", "call_id": call["id"], "output": "done"},
        ]
        history = [user("[calls=1] Hi."), *echo]
        second = await agent.post(json.dumps({**body, "input": history}).encode())
        await agent.close()

        assert (first.finish_reason, second.finish_reason) == ("tool_calls", "stop")
        assert (first.mode, second.mode) == ("full", "delta")
        assert [item["type"] for item in s.sim.journal.turns[-1].given] == ["function_call_output"]


# --- What is not translated ----------------------------------------------------------------------

_CALL = {"id": "call_1", "type": "function", "function": {"name": "ping", "arguments": "{}"}}
_DONE = {"role": "tool", "tool_call_id": "call_1", "content": "done"}


def _message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hello.", **fields}]}


def _assistant(**fields: Any) -> dict[str, Any]:
    return {"messages": [*HELLO, {"role": "assistant", "content": "Hm.", **fields}, *HELLO]}


def _part(**part: Any) -> dict[str, Any]:
    return _message(content=[{"type": "text", "text": "Hello."}, part])


# Per row of the table that can send a request over HTTP: bodies that have it.
UNTRANSLATABLE: dict[str, list[dict[str, Any]]] = {
    "store": [{"store": True}],
    "n": [{"n": 2}],
    "frequency_penalty": [{"frequency_penalty": 0.5}],
    "presence_penalty": [{"presence_penalty": -1}],
    "logit_bias": [{"logit_bias": {"5": 1}}],
    "logprobs": [{"logprobs": True}],
    "modalities": [{"modalities": ["text", "audio"]}],
    "top_logprobs": [{"top_logprobs": 2}],
    "stop": [{"stop": "x"}, {"stop": ["Observation:"]}],
    "seed": [{"seed": 7}],
    "audio": [{"audio": {"voice": "a", "format": "mp3"}}],
    "prediction": [{"prediction": {"type": "content", "content": "x"}}],
    "moderation": [{"moderation": {"model": "m"}}],
    "web_search_options": [{"web_search_options": {}}],
    "functions": [{"functions": [{"name": "f"}]}],
    "function_call": [{"function_call": "auto"}],
    "input": [{"input": "x"}],
    "other": [{"brand_new": 1}, {"top_k": 40}, {"extra_body": {}}],
    "tools": [{"tools": []}, {"tools": [{"type": "web_search"}]}],
    "tools.function": [{"tools": [{"type": "function", "function": {"name": "f", "new": 1}}]}],
    "tools.custom": [{"tools": [{"type": "custom", "custom": {"name": "f", "new": 1}}]}],
    "tool_choice": [{"tools": list(TOOLS), "tool_choice": {"type": "new"}}],
    "max_completion_tokens": [{"max_completion_tokens": 5}, {"max_completion_tokens": 1.5}],
    "max_tokens": [{"max_tokens": 15}],
    "response_format": [{"response_format": {"type": "grammar"}}],
    "stream_options": [{"stream": True, "stream_options": {"new": 1}}],
    "messages.role": [_message(role="function", name="f")],
    "messages.name": [_message(name="someone"), _assistant(name="helper")],
    "messages.audio": [_assistant(audio={"id": "a"})],
    "messages.function_call": [_assistant(function_call={"name": "f", "arguments": "{}"})],
    "messages.content": [_message(content=[])],
    "messages.content.input_audio": [_part(type="input_audio", input_audio={"data": ""})],
    "messages.content.other": [_part(type="video", url="x"), _part(type="text", text="a", new=1)],
    "messages.content.image_url": [_part(type="image_url", image_url={"url": "x", "new": 1})],
    "messages.content.file": [_part(type="file", file={"new": 1})],
    "messages.other": [_message(new=1), _assistant(weight=0)],
    "messages.tool_calls": [
        {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{**_CALL, "new": 1}]}, _DONE]}
    ],
}
CASES = [(field, body) for field, bodies in UNTRANSLATABLE.items() for body in bodies]


def test_every_field_that_is_refused_is_tried():
    """No row of the table says "over HTTP" that is not proved below to do so."""
    may_refuse = {row.name for row in FIELDS if row.fate in (Fate.REFUSED, Fate.NEUTRAL)}

    assert may_refuse - {"messages.content.other"} <= set(UNTRANSLATABLE)


@pytest.mark.parametrize(("field", "change"), CASES, ids=[name for name, _ in CASES])
async def test_what_has_no_equal_goes_over_http_untouched(field, change):
    """Upstream's Chat endpoint gets these very bytes; header, log and metric say why."""
    raw = json.dumps({"model": MODEL, "messages": HELLO, **change}).encode()
    async with stack(chat_completions="translate") as s, aiohttp.ClientSession() as session:
        headers = {"Authorization": "Bearer sk-a", "Content-Type": "application/json"}
        url = f"{s.base_url}/chat/completions"
        async with session.post(url, data=raw, headers=headers) as reply:
            await reply.read()

        [seen] = s.sim.journal
        assert (seen.raw, seen.path, seen.transport) == (
            raw,
            "/v1/chat/completions",
            Transport.HTTP,
        )
        assert reply.headers["turnwire-mode"] == "http"
        assert reply.headers["turnwire-reason"] == "untranslatable"
        assert [fact["field"] for fact in s.facts("untranslatable")] == [field]
        assert s.metric("turnwire_chat_untranslatable_total", field=field) == 1


@pytest.mark.parametrize("path", ["/chat/completions", "/chat/completions?api-version=1"])
async def test_with_passthrough_the_endpoint_is_not_looked_at(path):
    """Then upstream's own reply is what the client gets, whatever it is."""
    async with stack(chat_completions="passthrough") as s:
        agent = ChatAgent(s.base_url)
        reply = await agent.post(json.dumps({"model": MODEL, "messages": HELLO}).encode(), path)
        await agent.close()

        assert reply.message is not None
        assert reply.mode is None
        assert [seen.transport for seen in s.sim.journal] == [Transport.HTTP]


async def test_models_that_the_pattern_leaves_out_go_over_http():
    """`chat.models` says whose requests are translated."""
    async with clients(chat={"models": ["gpt-5*"]}) as (s, _, proxied):
        create = proxied.chat.completions.with_raw_response.create
        other = await create(model="o9", messages=HELLO)
        known = await create(model="gpt-5.2-mini", messages=HELLO)

        assert other.headers["turnwire-reason"] == "model_not_translated"
        assert known.headers["turnwire-mode"] == "full"
        assert [seen.transport for seen in s.sim.journal if seen.raw] == [
            Transport.HTTP,
            Transport.WS,
        ]


async def test_a_model_that_responses_refuses_is_asked_for_once():
    """The first request is answered over HTTP after all, the next ones go there at once."""
    refused = ErrorReply(
        status=404, code="model_not_found", message="No such model.", transport=Transport.WS
    )
    async with clients() as (s, straight, proxied):
        s.sim.faults.arm(replace(refused, times=1000))
        expected = await ask(straight, streamed=False)
        create = proxied.chat.completions.with_raw_response.create
        s.sim.journal.clear()
        replies = [await create(model=MODEL, messages=HELLO) for _ in range(3)]

        assert {raw.parse().choices[0].message.content for raw in replies} == {expected[0]}
        assert {raw.headers["turnwire-reason"] for raw in replies} == {"model_refused"}
        asked = [seen.transport for seen in s.sim.journal if seen.raw]
        assert asked == [Transport.WS] + [Transport.HTTP] * 3


# --- What goes wrong -----------------------------------------------------------------------------

ERRORS = {
    400: openai.BadRequestError,
    401: openai.AuthenticationError,
    403: openai.PermissionDeniedError,
    404: openai.NotFoundError,
    409: openai.ConflictError,
    429: openai.RateLimitError,
    500: openai.InternalServerError,
    503: openai.InternalServerError,
}


@STREAMED
@pytest.mark.parametrize("status", ERRORS)
async def test_errors_are_the_exceptions_that_they_are_straight(status, *, streamed):
    """Class, status, code, parameter, message and body: all as the Chat endpoint gives them."""
    fault = ErrorReply(
        status=status,
        code="some_code",
        param="messages",
        message="It went wrong.",
        headers={"Retry-After": "9"},
        times=1000,
    )
    async with clients() as (s, straight, proxied):
        s.sim.faults.arm(fault)
        caught = []
        for client in (straight, proxied):
            with pytest.raises(ERRORS[status]) as info:
                await ask(client, streamed=streamed)
            caught.append(info.value)

        one, other = caught
        assert type(one) is type(other)
        for name in ("status_code", "code", "param", "type", "message", "body"):
            assert getattr(one, name) == getattr(other, name)
        waits = [error.response.headers.get("retry-after") for error in caught]
        assert waits[0] == waits[1]


@STREAMED
@pytest.mark.parametrize("status", [400, 401, 403, 404, 409])
async def test_what_only_responses_refuses_is_answered_over_http(status, *, streamed):
    """A refusal of the translated request is no refusal of what the client asked."""
    fault = ErrorReply(status=status, code="some_code", transport=Transport.WS, times=1000)
    async with clients() as (s, straight, proxied):
        s.sim.faults.arm(fault)
        expected = await ask(straight, streamed=streamed)

        asked = [seen for seen in s.sim.journal if seen.raw]
        for _ in range(2):
            assert await ask(proxied, streamed=streamed) == expected
        assert await ask(proxied, streamed=streamed, temperature=0.5) is not None
        facts = [(fact["mode"], fact["reason"]) for fact in s.facts("turn")]
        assert facts == [("http", "translation_refused")] * 3
        more = [seen.transport for seen in s.sim.journal if seen.raw][len(asked) :]
        ws, http = Transport.WS, Transport.HTTP
        assert more == [ws, http, http, ws, http]  # asked once for each of the settings


@STREAMED
async def test_a_response_that_fails_before_it_says_anything_is_a_status(*, streamed):
    """Chat Completions has no failed response: a failure without content is an HTTP error."""
    failed = FailResponse(after_events=2, transport=Transport.WS, times=2)
    async with clients() as (s, _, proxied):
        s.sim.faults.arm(failed, ErrorReply(status=500, transport=Transport.HTTP))
        with pytest.raises(openai.InternalServerError):
            await ask(proxied, streamed=streamed)
        await s.idle()


@STREAMED
@pytest.mark.parametrize(
    "fault",
    [
        FailResponse(after_events=2),
        ErrorReply(status=503, code="server_is_overloaded"),
        Break(),
        Break(end=End.CLOSE, code=1008),
    ],
    ids=["failed", "overloaded", "cut off", "policy"],
)
async def test_where_only_responses_fails_chat_completions_answers(fault, *, streamed):
    """A client of the endpoint that works is no worse off for the one that does not."""
    async with clients() as (s, straight, proxied):
        expected = await ask(straight, streamed=streamed)
        s.sim.faults.arm(replace(fault, transport=Transport.WS, times=1000))

        assert await ask(proxied, streamed=streamed) == expected
        [fact] = s.facts("turn")
        assert fact["mode"] == "http"
        await s.idle()


@pytest.mark.parametrize(
    "fault",
    [
        FailResponse(after_events=25),
        ErrorReply(status=500, code="server_error", after_events=25),
        Break(after_events=25),
        Break(after_events=25, end=End.CLOSE, code=1011),
    ],
    ids=["failed", "error", "cut off", "closed"],
)
async def test_a_stream_that_breaks_is_raised_and_never_complete(fault):
    """After the first chunk there is an error chunk and a broken body, and no `[DONE]`."""
    async with stack(chat_completions="translate") as s:
        s.sim.faults.arm(replace(fault, transport=Transport.WS))
        async with openai.AsyncOpenAI(api_key="sk-a", base_url=s.base_url, max_retries=0) as client:
            with pytest.raises(openai.APIError):
                await ask(client, streamed=True)

        s.sim.faults.arm(replace(fault, transport=Transport.WS))
        text = await _read_broken(s)
        last = text.strip().split("\n\n")[-1].removeprefix("data: ")
        assert json.loads(last)["error"]["message"]
        assert "[DONE]" not in text
        await s.idle()


async def _read_broken(s: Stack) -> str:
    """Read a stream as far as it goes; it must not come to an end."""
    body = {"model": MODEL, "messages": HELLO, "stream": True}
    headers = {"Authorization": "Bearer sk-a"}
    told = b""
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{s.base_url}/chat/completions", json=body) as reply,
    ):
        try:
            async for block in reply.content.iter_any():
                told += block
        except aiohttp.ClientPayloadError:
            return told.decode()
    raise AssertionError("the stream came to an end")


@pytest.mark.parametrize("fault", [FailResponse(after_events=25), Break(after_events=25)])
async def test_an_answer_in_one_piece_that_breaks_is_a_status(fault):
    """Where nothing was streamed, nothing was seen: the client gets an error, and no half."""
    async with clients() as (s, _, proxied):
        s.sim.faults.arm(replace(fault, transport=Transport.WS))
        with pytest.raises(openai.InternalServerError):
            await ask(proxied, streamed=False)
        await s.idle()


async def test_a_lost_connection_costs_one_full_send_of_all_messages():
    """When the chain's connection is gone, what was not looked at this time is translated too."""
    async with stack(chat_completions="translate") as s:
        agent = ChatAgent(s.base_url, streaming=Streaming.NEVER)
        history = [user("[calls=1] Go.")]
        first = await agent.send(history)
        history += [*agent.echo(first.items), *agent.answer_calls(first.items)]
        s.sim.faults.arm(Break(transport=Transport.WS))
        second = await agent.send(history)
        await agent.close()

        assert (second.mode, second.reason) == ("full", "upstream_closed")
        assert second.message is not None
        assert len(s.sim.journal.turns[-1].given) == 4
        straight = ChatAgent(s.straight_url)
        assert (await straight.post(second.body)).answer == second.answer
        await straight.close()


async def test_without_websockets_chat_is_what_it_is_straight():
    """An upstream that refuses the upgrade is asked over HTTP, with the client's own body."""
    options = SimulatorOptions(websocket=False, answers=AnswerOptions(rounds=1))
    async with clients(sim=options) as (s, straight, proxied):
        for streamed in (False, True):
            assert await ask(proxied, streamed=streamed) == await ask(straight, streamed=streamed)
        assert {fact["mode"] for fact in s.facts("turn")} == {"http"}
