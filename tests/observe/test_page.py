"""The page's files and the address of its data, as the admin listener serves them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from harness import play, serving, stack

from proxy.observe import page as page_module
from proxy.simulator import Simulator
from proxy.simulator.agent import user

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SECRET = "sk-a-key-that-nobody-may-see"
WORDS = "a prompt that nobody may read"


@contextlib.asynccontextmanager
async def fetched(url: str, **headers: str) -> AsyncIterator[aiohttp.ClientResponse]:
    """Get something."""
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as reply:
        yield reply


async def events(reply: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Give the events of a stream: name and data."""
    while True:
        name = (await reply.content.readline()).decode().removeprefix("event: ").strip()
        data = (await reply.content.readline()).decode().removeprefix("data: ")
        assert await reply.content.readline() == b"\n"
        yield name, json.loads(data)


async def test_the_page_loads_nothing_from_elsewhere():
    """Every file that a page names is there, and the policy lets the browser load no other."""
    async with Simulator() as sim, serving(sim.base_url) as (proxy, _):
        async with fetched(f"{proxy.admin_url}/") as reply:
            html = await reply.text()
            policy = reply.headers["Content-Security-Policy"]
        names = re.findall(r'(?:src|href)="([^"#]+)"', html)
        for name in names:
            if not name.startswith("data:"):
                async with fetched(f"{proxy.admin_url}/{name}") as file:
                    assert file.status == 200
                    assert "//" not in name

    assert len(names) == 5
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


async def test_the_data_are_one_object_or_a_stream_of_them():
    """By what is asked for: JSON once, or a snapshot and then what has changed."""
    async with stack() as s:
        agent, history = s.agent(), []
        await play(agent, history, user("[calls=0] One."))
        async with fetched(f"{s.proxy.admin_url}/live") as reply:
            once = await reply.json()
        async with fetched(f"{s.proxy.admin_url}/live", Accept="text/event-stream") as reply:
            stream = events(reply)
            name, first = await anext(stream)
            await play(agent, history, user("[calls=0] Two."))
            update_name, second = await anext(stream)

    assert (name, update_name) == ("snapshot", "update")
    assert once["totals"]["turns"] == first["totals"]["turns"] == {"delta": 0, "full": 1, "http": 0}
    assert second["totals"]["turns"] == {"delta": 1, "full": 1, "http": 0}
    assert [row["turns"]["delta"] for row in second["conversations"]] == [1]
    assert first["reasons"]["continued"].startswith("the request continues")
    assert "reasons" not in second
    assert {each["state"] for each in second["connections"]} <= {"idle", "spare", "connecting"}
    assert once["base_url"] == s.base_url


async def test_neither_key_nor_prompt_is_in_it():
    """What clients send in secret is nowhere in the data, whatever they put where."""
    async with stack() as s:
        agent = s.agent(api_key=SECRET, model=WORDS, instructions=WORDS)
        await play(agent, [], user(f"[calls=1] {WORDS}"))
        async with fetched(f"{s.proxy.admin_url}/live") as reply:
            text = await reply.text()

    assert '"full":1' in text
    assert SECRET not in text
    assert WORDS not in text


@pytest.mark.parametrize("path", ["/", "/page.js", "/live"])
async def test_a_web_page_of_elsewhere_sees_nothing(path):
    """On loopback a foreign Host or Origin is refused, as on the data listener."""
    async with Simulator() as sim, serving(sim.base_url) as (proxy, _):
        async with fetched(f"{proxy.admin_url}{path}", Host="evil.example") as reply:
            assert reply.status == 403
        async with fetched(f"{proxy.admin_url}{path}", Origin="http://evil.example") as reply:
            assert reply.status == 403
        async with fetched(f"{proxy.admin_url}{path}", Host="localhost") as reply:
            assert reply.status == 200


async def test_viewers_are_limited_and_let_go(monkeypatch):
    """One too many is told to come back; when one leaves there is room again, without an error."""
    monkeypatch.setattr(page_module, "MAX_VIEWERS", 1)
    monkeypatch.setattr(page_module, "UPDATE_S", 0.01)
    async with Simulator() as sim, serving(sim.base_url) as (proxy, _):
        url = f"{proxy.admin_url}/live"
        async with fetched(url, Accept="text/event-stream") as first:
            await anext(events(first))
            async with fetched(url, Accept="text/event-stream") as second:
                assert second.status == 503

        async def there_is_room() -> bool:
            async with fetched(url, Accept="text/event-stream") as again:
                return again.status == 200

        async with asyncio.timeout(10):
            while not await there_is_room():  # noqa: ASYNC110  nobody tells
                await asyncio.sleep(0.01)


async def test_a_viewer_does_not_hold_up_the_end():
    """The stream ends with the process, as a stream should: to its last byte."""
    async with Simulator() as sim, contextlib.AsyncExitStack() as running:
        proxy, _ = await running.enter_async_context(serving(sim.base_url))
        async with fetched(f"{proxy.admin_url}/live", Accept="text/event-stream") as reply:
            stream = events(reply)
            await anext(stream)
            await running.aclose()
            assert await reply.content.read() is not None  # no broken body
