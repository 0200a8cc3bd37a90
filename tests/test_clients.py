"""
The openai Python SDK as a real client, unmodified: what it does straight it does here.

Its reader of streams, its exceptions and its retries are what most agents are built on. Each test
that can be is run both ways, and the two runs must agree.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import openai
import pytest
from harness import stack
from pydantic import BaseModel

from proxy.simulator.agent import tool_output
from proxy.simulator.faults import Break, ErrorReply
from proxy.simulator.validate import Transport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from harness import Stack

MODEL = "gpt-5.2"
TOOL: Any = {
    "type": "function",
    "name": "read_file",
    "description": "Read a file.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
        "required": ["path", "lines"],
        "additionalProperties": False,
    },
}
SHAPES = ["create", "create_stream", "stream_helper"]


@contextlib.asynccontextmanager
async def clients(**options: Any) -> AsyncIterator[tuple[Stack, Any, Any]]:
    """Run a stack with two SDK clients: one straight, one through the proxy."""
    settings = {"api_key": "sk-sdk", "max_retries": 0} | options
    async with (
        stack() as s,
        openai.AsyncOpenAI(base_url=s.straight_url, **settings) as straight,
        openai.AsyncOpenAI(base_url=s.base_url, **settings) as proxied,
    ):
        yield s, straight, proxied


async def ask(client: openai.AsyncOpenAI, shape: str, **body: Any) -> Any:
    """Send a turn in one of the SDK's ways; return the final response."""
    if shape == "create":
        return await client.responses.create(**body)
    if shape == "create_stream":
        async for event in await client.responses.create(stream=True, **body):
            if event.type == "response.completed":
                return event.response
        raise AssertionError("the stream had no end")
    async with client.responses.stream(**body) as stream:
        async for _ in stream:
            pass
        return await stream.get_final_response()


async def tool_loop(client: openai.AsyncOpenAI, shape: str, **settings: Any) -> list[str]:
    """Run a tool loop by hand, as the SDK's documentation shows it; return what was said."""
    history: list[Any] = [{"role": "user", "content": "[calls=5] Tidy up."}]
    said = []
    while True:
        response = await ask(client, shape, model=MODEL, input=history, tools=[TOOL], **settings)
        calls = [item for item in response.output if item.type == "function_call"]
        said += [call.arguments for call in calls] + [response.output_text]
        history += response.output
        history += [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": tool_output(call.name, call.arguments, 500),
            }
            for call in calls
        ]
        if not calls:
            return said


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("settings", [{}, {"store": False}, {"instructions": "Be brief."}])
async def test_a_tool_loop_by_hand_gives_the_same_answers_by_deltas(shape, settings):
    """All three ways to call agree with the straight run, and every later turn is a delta."""
    async with clients() as (s, straight, proxied):
        expected = await tool_loop(straight, shape, **settings)
        s.sim.journal.clear()

        assert await tool_loop(proxied, shape, **settings) == expected

        first, *later = s.sim.journal.turns
        assert (first.transport, first.previous_response_id) == (Transport.WS, None)
        assert len(later) >= 3
        assert all(seen.previous_response_id for seen in later)


def test_the_synchronous_client_works_from_a_thread():
    """The blocking client, in a thread of its own, streams a loop like the asynchronous one."""

    def loop(base_url: str) -> list[str]:
        with openai.OpenAI(base_url=base_url, api_key="sk-sync", max_retries=0) as client:
            history: list[Any] = []
            said = []
            for prompt in ("One?", "Two?", "Three?"):
                history.append({"role": "user", "content": prompt})
                stream = client.responses.create(model=MODEL, input=history, stream=True)
                *_, last = stream
                history += last.response.output
                said.append(last.response.output_text)
                assert client.responses.create(model=MODEL, input=history).output_text
            return said

    async def both() -> None:
        async with stack() as s:
            expected = await asyncio.to_thread(loop, s.straight_url)
            assert await asyncio.to_thread(loop, s.base_url) == expected

    asyncio.run(both())


class Verdict(BaseModel):
    """What the parse helper is to return."""

    title: str
    score: int


async def test_the_parse_helper_gets_its_object():
    """Structured output is parsed from the same text, streamed or not."""
    async with clients() as (_, straight, proxied):
        body: Any = {"model": MODEL, "input": "Judge.", "text_format": Verdict}

        expected = await straight.responses.parse(**body)
        reply = await proxied.responses.parse(**body)
        async with proxied.responses.stream(**body) as stream:
            streamed = await stream.get_final_response()

        assert isinstance(reply.output_parsed, Verdict)
        assert reply.output_parsed == expected.output_parsed == streamed.output_parsed


async def test_parsed_answers_are_echoed_by_a_delta():
    """The helper's own keys in an echoed answer (`parsed`) do not end the chain."""
    async with clients() as (s, _, proxied):
        history: list[Any] = [{"role": "user", "content": "Judge."}]
        for _turn in range(3):
            reply = await proxied.responses.parse(
                model=MODEL, input=history, tools=[TOOL], text_format=Verdict
            )
            history += reply.output
            calls = [item for item in reply.output if item.type == "function_call"]
            history += [
                {"type": "function_call_output", "call_id": call.call_id, "output": "ok"}
                for call in calls
            ]
            if not calls:
                history.append({"role": "user", "content": "Again."})

        assert [bool(seen.previous_response_id) for seen in s.sim.journal.turns] == [
            False,
            True,
            True,
        ]


RETRIED = [
    ErrorReply(status=429, code="rate_limit_exceeded", headers={"retry-after-ms": "1"}),
    ErrorReply(status=500, code="server_error", times=2),
    ErrorReply(status=503, code="server_is_overloaded", headers={"retry-after-ms": "1"}, times=2),
    Break(times=2),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fault", RETRIED, ids=["429", "500", "503", "closed"])
async def test_the_sdks_own_retries_heal_what_we_hand_on(shape, fault):
    """With its default of two retries the SDK gets its answer, and sees none of it."""
    async with clients(max_retries=2) as (s, straight, proxied):
        body: Any = {"model": MODEL, "input": "Hello.", "store": False}
        expected = await ask(straight, shape, **body)
        s.sim.faults.arm(replace(fault, transport=Transport.WS))

        reply = await ask(proxied, shape, **body)

        assert reply.output_text == expected.output_text
        assert not s.sim.faults.armed


ERRORS = {
    openai.BadRequestError: ErrorReply(
        status=400, code="invalid_value", param="input", message="Bad value."
    ),
    openai.AuthenticationError: ErrorReply(status=401, code="invalid_api_key"),
    openai.PermissionDeniedError: ErrorReply(status=403, code="not_allowed"),
    openai.NotFoundError: ErrorReply(status=404, code="model_not_found"),
    openai.RateLimitError: ErrorReply(
        status=429, code="rate_limit_exceeded", headers={"Retry-After": "9"}
    ),
    openai.InternalServerError: ErrorReply(status=500, code="server_error", times=2),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("expected", ERRORS, ids=lambda kind: kind.__name__)
async def test_errors_are_the_exceptions_that_they_are_straight(shape, expected):
    """Class, status, code, parameter, message and the time to wait: all as without the proxy."""
    async with clients() as (s, straight, proxied):
        body: Any = {"model": MODEL, "input": "Hello."}
        caught = []
        for client, transport in ((straight, Transport.HTTP), (proxied, Transport.WS)):
            s.sim.faults.clear()
            s.sim.faults.arm(replace(ERRORS[expected], transport=transport))
            with pytest.raises(expected) as info:
                await ask(client, shape, **body)
            caught.append(info.value)

        one, other = caught
        assert type(one) is type(other)
        for name in ("status_code", "code", "param", "type", "message", "body"):
            assert getattr(one, name) == getattr(other, name)
        waits = [error.response.headers.get("retry-after") for error in caught]
        assert waits[0] == waits[1]
        assert other.request_id


async def test_an_error_within_a_stream_is_raised():
    """An answer that breaks off raises an APIError from the SDK's iterator, not a short answer."""
    async with clients() as (s, _, proxied):
        s.sim.faults.arm(Break(after_events=4))
        with pytest.raises(openai.APIError) as info:
            await ask(proxied, "create_stream", model=MODEL, input="Hello.")
        assert "closed" in info.value.message


async def test_raw_responses_tell_how_a_turn_went():
    """`with_raw_response` shows the headers that are for people, and a request id of ours."""
    async with clients() as (_, _, proxied):
        create = proxied.responses.with_raw_response.create
        raw = await create(model=MODEL, input="Hello.")
        reply = raw.parse()
        history: Any = [{"role": "user", "content": "Hello."}, *reply.output]
        again = await create(model=MODEL, input=[*history, {"role": "user", "content": "On."}])

        assert raw.headers["turnwire-mode"] == "full"
        assert raw.headers["turnwire-reason"] == "new_conversation"
        assert again.headers["turnwire-mode"] == "delta"
        assert raw.headers["x-request-id"].startswith("req_")
        assert reply._request_id == raw.headers["x-request-id"]


async def test_responses_are_retrieved_and_deleted_over_http():
    """A stored response that was made on a WebSocket can be had by its id, and be deleted."""
    async with clients() as (_, _, proxied):
        made = await proxied.responses.create(model=MODEL, input="Hello.")

        found = await proxied.responses.retrieve(made.id)
        await proxied.responses.delete(made.id)

        assert found.output_text == made.output_text
        with pytest.raises(openai.NotFoundError):
            await proxied.responses.retrieve(made.id)


async def models(client: openai.AsyncOpenAI) -> Any:
    """List the models."""
    return [model.id async for model in client.models.list()]


async def embeddings(client: openai.AsyncOpenAI) -> Any:
    """Embed two texts."""
    reply = await client.embeddings.create(
        model="text-embedding-3-small", input=["one", "three"], encoding_format="float"
    )
    return [row.embedding for row in reply.data]


async def upload(client: openai.AsyncOpenAI) -> Any:
    """Upload a file of 300 KB."""
    reply = await client.files.create(file=("notes.txt", b"x" * 300_000), purpose="assistants")
    return reply.bytes > 300_000


@pytest.mark.parametrize("call", [models, embeddings, upload])
async def test_everything_else_is_as_it_is_straight(call: Callable[[Any], Any]):
    """Models, embeddings and files pass through; Chat Completions have tests of their own."""
    async with clients() as (s, straight, proxied):
        assert await call(proxied) == await call(straight)
        assert {seen.transport for seen in s.sim.journal} == {Transport.HTTP}


async def test_a_client_that_chains_by_itself_is_left_to_it():
    """A request with `previous_response_id` goes out as it is, and its answer is right."""
    async with clients() as (s, straight, proxied):
        texts = []
        for client in (straight, proxied):
            first = await client.responses.create(model=MODEL, input="Hello.")
            second = await client.responses.create(
                model=MODEL, input="And?", previous_response_id=first.id
            )
            assert second.previous_response_id == first.id
            texts.append((first.output_text, second.output_text))

        assert texts[0] == texts[1]
        last = s.sim.journal.turns[-1]
        assert json.loads(last.raw or b"")["previous_response_id"] == last.previous_response_id
        with pytest.raises(openai.BadRequestError) as info:
            await proxied.responses.create(
                model=MODEL, input="And?", previous_response_id="resp_unknown"
            )
        assert info.value.code == "previous_response_not_found"
