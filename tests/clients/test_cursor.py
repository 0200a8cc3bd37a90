"""
Cursor can't be run without a desktop and an account: its known request is replayed.

With a base URL of one's own it posts a Responses body (`input`, flat tools) to
`/chat/completions`, and reads a Chat Completions reply. Sent on to the Responses API it would be
billed for an answer that it shows as empty; translated, it would be an answer that its upstream
never gave. So it has what it would have without us: the upstream's own reply, whatever that is.
"""

import aiohttp
import pytest
from harness import stack

BODY = (
    b'{"model":"gpt-5.2","user":"someone","stream":true,"tool_choice":"auto",'
    b'"input":[{"role":"system","content":"You are an assistant in an editor."},'
    b'{"role":"user","content":[{"type":"input_text","text":"Rename this."}]}],'
    b'"tools":[{"type":"function","name":"edit_file","parameters":{"type":"object"}}],'
    b'"reasoning":{"effort":"medium","summary":"auto"},"store":false,'
    b'"include":["reasoning.encrypted_content"],"text":{"verbosity":"low"}}'
)
HEADERS = {"Authorization": "Bearer sk-agent", "Content-Type": "application/json"}


async def post(url):
    """The status and body of the reply to Cursor's request, and its headers."""
    async with (
        aiohttp.ClientSession(headers=HEADERS) as session,
        session.post(url, data=BODY) as reply,
    ):
        return reply.status, await reply.read(), reply.headers


@pytest.mark.parametrize("path", ["/chat/completions", "/chat/completions?api-version=1"])
async def test_a_responses_body_on_chat_completions_passes_untouched(path):
    """Upstream sees these very bytes on that very path, and its reply is what Cursor gets."""
    async with stack() as running:
        straight = await post(running.straight_url + path)
        through = await post(running.base_url + path)
        first, second = running.sim.journal.records

    assert through[:2] == straight[:2]
    assert first.raw == second.raw == BODY
    assert "turnwire-mode" not in through[2]
    assert running.sim.journal.connections_opened == 0
