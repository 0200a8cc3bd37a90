"""The official SDK against the witness: what it takes for the real API."""

import openai
import pytest

from proxy.simulator import Simulator
from proxy.simulator.agent import DEFAULT_TOOLS, Agent
from proxy.simulator.faults import ErrorReply

CHAT_TOOLS = [
    {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
    for tool in DEFAULT_TOOLS[:2]
]


@pytest.fixture
async def simulator():
    """An instant simulator."""
    async with Simulator() as running:
        yield running


@pytest.fixture
async def client(simulator):
    """The SDK's client."""
    async with openai.AsyncOpenAI(
        api_key="sk-sdk", base_url=simulator.base_url, max_retries=0
    ) as opened:
        yield opened


async def test_responses_of_the_sdk(client):
    """Streamed and not, the SDK reads the same response."""
    settings = {"model": "gpt-5.2", "input": "go", "tools": list(DEFAULT_TOOLS)}
    whole = await client.responses.create(**settings)
    stream = await client.responses.create(**settings, stream=True)
    events = [event async for event in stream]
    assert events[-1].response.output[-1].call_id == whole.output[-1].call_id
    text = await client.responses.create(model="gpt-5.2", input="go")
    assert text.output_text.startswith("[")


async def test_errors_of_the_sdk(simulator, client):
    """The SDK raises what it raises for the real API."""
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="m", input="x", extra_body={"odd": 1})
    assert caught.value.code == "unknown_parameter"
    simulator.faults.arm(ErrorReply(status=429))
    with pytest.raises(openai.RateLimitError):
        await client.responses.create(model="m", input="x")
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="bad").responses.create(model="m", input="x")


async def test_websocket_mode_of_the_sdk(client):
    """The SDK's own WebSocket client can hold a chain."""
    settings = {"model": "gpt-5.2", "store": False, "tools": list(DEFAULT_TOOLS)}
    async with client.responses.connect() as connection:
        await connection.response.create(**settings, input="[calls=1] go")
        first = await _completed(connection)
        outputs = Agent("").answer_calls([item.to_dict() for item in first.output])
        await connection.response.create(**settings, input=outputs, previous_response_id=first.id)
        second = await _completed(connection)
    assert second.output_text


async def _completed(connection):
    async for event in connection:
        if event.type == "response.completed":
            return event.response
    raise AssertionError("the connection ended")


async def test_chat_completions_of_the_sdk(client):
    """A tool loop over Chat Completions, streamed and not, gives one answer."""
    texts = []
    for streamed in (False, True):
        messages = [{"role": "user", "content": "[calls=2] go"}]
        while True:
            message = await _chat(client, messages, streamed)
            messages.append(message)
            if not message.get("tool_calls"):
                texts.append(message["content"])
                break
            for call in message["tool_calls"]:
                output = {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
                messages.append(output)
    assert texts[0] == texts[1]


async def _chat(client, messages, streamed):
    settings = {"model": "gpt-5.2", "messages": messages, "tools": CHAT_TOOLS}
    if streamed:
        async with client.chat.completions.stream(**settings) as stream:
            found = await stream.get_final_completion()
    else:
        found = await client.chat.completions.create(**settings)
    message = found.choices[0].message
    dumped = message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
    for call in dumped.get("tool_calls") or []:
        call["function"].pop("parsed_arguments", None)
    return dumped


async def test_a_chat_request_that_is_none_is_refused(client):
    """Unpaired tool messages are a 400."""
    messages = [{"role": "tool", "tool_call_id": "call_x", "content": "ok"}]
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model="m", messages=messages)
