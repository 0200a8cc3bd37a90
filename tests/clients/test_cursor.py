"""
Cursor can't be run without a desktop and an account: its known request is replayed.

With a base URL of one's own it posts a Responses body (`input`, flat tools) to
`/chat/completions`, and reads a Chat Completions reply. Sent on to the Responses API as it is, it
would be billed for an answer that it shows as empty. So it is a turn, answered in chunks; where
Chat Completions are left alone, it has the upstream's own reply, whatever that is.
"""

import json

import aiohttp
import pytest
from harness import stack

from proxy.simulator.answers import Context

BODY = (
    b'{"model":"gpt-5.2","user":"someone","stream":true,"tool_choice":"auto",'
    b'"input":[{"role":"system","content":"You are an assistant in an editor."},'
    b'{"role":"user","content":[{"type":"input_text","text":"Rename this."}]}],'
    b'"tools":[{"type":"function","name":"edit_file","parameters":{"type":"object"}}],'
    b'"reasoning":{"effort":"medium","summary":"auto"},"store":false,'
    b'"include":["reasoning.encrypted_content"],"text":{"verbosity":"low"}}'
)
HEADERS = {"Authorization": "Bearer sk-agent", "Content-Type": "application/json"}


async def post(url, data=BODY):
    """The status and body of the reply to Cursor's request, and its headers."""
    async with (
        aiohttp.ClientSession(headers=HEADERS) as session,
        session.post(url, data=data) as reply,
    ):
        return reply.status, await reply.read(), reply.headers


async def test_a_responses_body_on_chat_completions_is_answered_in_chunks():
    """Upstream gets Cursor's items and settings as they are; the call comes as Chat has it."""
    async with stack() as running:
        status, told, headers = await post(running.base_url + "/chat/completions")
        [seen] = running.sim.journal.turns
        chunks = [json.loads(each[6:]) for each in told.decode().split("\n\n")[:-2]]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]

    asked = json.loads(BODY)
    assert (status, headers["turnwire-mode"]) == (200, "full")
    assert told.endswith(b"data: [DONE]\n\n")
    assert calls[0]["function"]["name"] == "edit_file"
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert seen.digest == Context.of(asked, asked["input"]).digest.hex()
    assert json.loads(seen.raw) == {
        "type": "response.create",
        **{key: value for key, value in asked.items() if key != "stream"},
    }


async def test_what_cursor_sends_next_is_a_delta():
    """The answer comes back as items, with the output of its call."""
    async with stack() as running:
        _, told, _ = await post(running.base_url + "/chat/completions")
        deltas = [json.loads(each[6:]) for each in told.decode().split("\n\n")[:-2]]
        pieces = [
            call for chunk in deltas for call in chunk["choices"][0]["delta"].get("tool_calls", ())
        ]
        named = {"call_id": pieces[0]["id"], "name": pieces[0]["function"]["name"]}
        arguments = "".join(piece["function"]["arguments"] for piece in pieces)
        body = json.loads(BODY)
        body["input"] += [
            {"type": "function_call", **named, "arguments": arguments},
            {"type": "function_call_output", "call_id": named["call_id"], "output": "done"},
        ]
        _, _, headers = await post(
            running.base_url + "/chat/completions", json.dumps(body).encode()
        )
        first, second = running.sim.journal.turns

    assert headers["turnwire-mode"] == "delta"
    assert second.previous_response_id == first.response_id
    assert [item["type"] for item in second.given] == ["function_call_output"]


@pytest.mark.parametrize(
    ("path", "settings"),
    [
        ("/chat/completions", {"chat_completions": "passthrough"}),
        ("/chat/completions?api-version=1", {}),
    ],
)
async def test_left_alone_it_passes_untouched(path, settings):
    """Upstream sees these very bytes on that very path, and its reply is what Cursor gets."""
    async with stack(**settings) as running:
        straight = await post(running.straight_url + path)
        through = await post(running.base_url + path)
        first, second = running.sim.journal.records

    assert through[:2] == straight[:2]
    assert first.raw == second.raw == BODY
    assert "turnwire-mode" not in through[2]
    assert running.sim.journal.connections_opened == 0
