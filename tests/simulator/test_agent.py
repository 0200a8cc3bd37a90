"""The agent: a stateless client, straight to the witness, in every style."""

import asyncio
import itertools

import pytest

from proxy.simulator import (
    Agent,
    AnswerOptions,
    EchoStyle,
    LatencyModel,
    ReplyError,
    Simulator,
    SimulatorOptions,
    Streaming,
    serve,
)
from proxy.simulator.agent import Transcript, tool_output, user
from proxy.simulator.events import CompletedOutput
from proxy.simulator.faults import ErrorReply
from proxy.simulator.streams import StreamError

PROMPTS = ["[calls=5] Tidy up.", "And now?"]


@pytest.fixture
async def simulator():
    """A simulator whose model spells arguments oddly."""
    options = SimulatorOptions(answers=AnswerOptions(odd_arguments=True))
    async with Simulator(options) as running:
        yield running


@pytest.mark.parametrize("streaming", Streaming)
@pytest.mark.parametrize("style", EchoStyle)
async def test_every_style_gets_the_same_answers(simulator, style, streaming):
    """Neither the form of the echo nor that of the reply changes a conversation."""
    expected = await Agent(simulator.base_url).run(PROMPTS)
    found = await Agent(simulator.base_url, style=style, streaming=streaming).run(PROMPTS)
    assert found.answers == expected.answers


async def test_a_changed_tool_output_changes_every_later_answer(simulator):
    """The same conversation until the output, another one after it."""
    outputs = iter(range(99))

    def other(name, arguments):
        number = next(outputs)
        return "something else" if number == 1 else tool_output(name, arguments)

    expected = await Agent(simulator.base_url).run(PROMPTS)
    found = await Agent(simulator.base_url, tool=other).run(PROMPTS)
    assert found.answers[:2] == expected.answers[:2]
    assert found.answers[2] != expected.answers[2]
    assert found.answers[-1] != expected.answers[-1]


async def test_histories_are_stable(simulator):
    """Each request repeats the one before it and appends."""
    await Agent(simulator.base_url, style=EchoStyle.MIXED).run(PROMPTS)
    contexts = [seen.context for seen in simulator.journal.turns]
    for earlier, later in itertools.pairwise(contexts):
        assert later[: len(earlier)] == earlier


async def test_single_steps_allow_a_fork(simulator):
    """Two branches from one history, each with its own answer."""
    async with Agent(simulator.base_url) as agent:
        start = Transcript(history=[user("[calls=1] go")])
        await agent.advance(start)
        replies = [await agent.send([*start.history, user(text)]) for text in ("left", "right")]
    assert replies[0].answer != replies[1].answer
    assert all(reply.status == 200 for reply in replies)


async def test_a_failed_turn_raises(simulator):
    """`run` stops at an error and gives the reply."""
    simulator.faults.arm(ErrorReply(status=429, code="rate_limit_exceeded"))
    with pytest.raises(ReplyError) as caught:
        await Agent(simulator.base_url).run(["go"])
    assert caught.value.reply.status == 429
    assert caught.value.reply.error["code"] == "rate_limit_exceeded"


async def test_an_error_inside_a_stream_raises(simulator):
    """So does an error event after some events."""
    simulator.faults.arm(ErrorReply(status=500, after_events=3))
    with pytest.raises(ReplyError):
        await Agent(simulator.base_url).run(["go"])


async def test_a_terminal_event_without_output_is_a_finding():
    """The API's terminal event is full; an empty one must have been filled on the way."""
    options = SimulatorOptions(completed_output=CompletedOutput.EMPTY)
    async with Simulator(options) as simulator:
        with pytest.raises(StreamError):
            await Agent(simulator.base_url).run(["go"])


async def test_a_long_history_can_be_sent(simulator):
    """Bodies beyond a megabyte go out like any other."""
    async with Agent(simulator.base_url) as agent:
        reply = await agent.send([user("x" * 3_000_000)])
    assert reply.status == 200
    assert reply.request_bytes > 3_000_000


async def test_a_transcript_adds_up(simulator):
    """Bytes, times and headers of every turn are there."""
    found = await Agent(simulator.base_url).run(PROMPTS)
    assert found.request_bytes == simulator.journal.bytes_by_transport["http"]
    assert found.modes == [None] * len(found.replies)
    assert found.reasons == found.modes
    assert found.duration_s >= sum(reply.first_event_s for reply in found.replies)
    assert all(reply.headers["x-request-id"] for reply in found.replies)


async def test_delays_follow_the_latency_model():
    """A reply is not there before the model says so, by more than the floor of a sleep."""
    model = LatencyModel(per_request_ms=10, first_token_ms=10, tokens_per_second=1000)
    async with Simulator(SimulatorOptions(latency=model)) as simulator:
        async with Agent(simulator.base_url) as agent:
            reply = await agent.send([user("[calls=0] go")])
        assert reply.first_event_s >= 0.009
        assert reply.duration_s >= 0.020 + reply.response["usage"]["output_tokens"] / 1000 - 0.002


async def test_serving_ends_when_cancelled():
    """`serve` says when it is ready and stops cleanly."""
    ready = asyncio.Event()
    found = []

    def on_ready(simulator):
        found.append(simulator)
        ready.set()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(serve(SimulatorOptions(), "127.0.0.1", 0, on_ready=on_ready))
        await ready.wait()
        transcript = await Agent(found[0].base_url).run(["[calls=1] go"])
        task.cancel()
    assert len(transcript.replies) == 2


@pytest.mark.parametrize("size", [16, 200, 5000])
def test_tool_outputs_are_deterministic(size):
    """The same call gives the same output, of the size that was asked for."""
    assert tool_output("f", "{}", size) == tool_output("f", "{}", size)
    assert len(tool_output("f", "{}", size)) == size
    assert tool_output("f", "{}", 200) != tool_output("f", "[]", 200)
