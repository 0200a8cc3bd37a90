"""How a reply opens: when there is something to show, and what is told before that."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from proxy.core.chat_reply import ChatReplyReader
from proxy.core.reply import ReplyReader
from proxy.downstream.stream import Opening

CREATED = {"type": "response.created", "response": {"id": "resp_1"}}
QUEUED = {"type": "response.queued", "response": {"id": "resp_1"}}
DELTA = {"type": "response.output_text.delta", "output_index": 0, "delta": "Hm."}


class Wire:
    """A connection that brings what a test says, a read at a time."""

    def __init__(self) -> None:
        self.sink: Any = None
        self.is_attached = asyncio.Event()

    def attach(self, sink: Any) -> None:
        """Take the sink."""
        self.sink = sink
        self.is_attached.set()

    def detach(self) -> None:
        """Let go of the sink."""
        self.sink = None

    def bring(self, *events: Any) -> None:
        """Bring these events in one read."""
        sink = self.sink
        sink.take_messages([json.dumps(event).encode() for event in events])
        sink.end_read()


async def opened(reader: Any, *reads: list[Any]) -> tuple[list[int], bytes]:
    """Open a reply by these reads; return after which of them it was told of work, and its SSE."""
    wire, heard, brought = Wire(), [], []
    opening = Opening(wire, reader, lambda: heard.append(len(brought)))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(opening.run())
        await wire.is_attached.wait()
        for events in reads:
            assert wire.sink is not None, "it is open already"
            brought.append(events)
            wire.bring(*events)
    return heard, task.result()


async def test_a_responses_reply_opens_with_its_first_event():
    """The beginning of a response is something to show."""
    reader = ReplyReader(stream=True, hide_previous_response_id=None, collect_output=False)
    heard, written = await opened(reader, [CREATED])

    assert heard == []
    assert written.startswith(b"event: response.created\n")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_chat_reply_opens_with_its_first_content(stream):
    """Upstream is at work from its first event on; the client sees nothing of that yet."""
    reader = ChatReplyReader(stream=stream, include_usage=False, created=1, model="m")
    heard, written = await opened(reader, [CREATED], [QUEUED], [DELTA])

    assert heard == [1, 2]
    assert (b'"content":"Hm."' in written) is stream
