"""What tests of the simulator share: a raw WebSocket client, one frame at a time."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp

from proxy.simulator.streams import TERMINALS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proxy.simulator import Simulator

KEY = "sk-agent"


class RawConnection:
    """A WebSocket to the simulator that sends `response.create` and reads what comes."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        self.ws = ws

    async def create(self, given: object, **fields: Any) -> None:
        """Send one `response.create`, `store` false unless told otherwise."""
        frame = {"type": "response.create", "model": "gpt-5.2", "store": False, "input": given}
        await self.ws.send_str(json.dumps({**frame, **fields}))

    async def event(self) -> dict[str, Any]:
        """The next event; fails the test if the connection ends instead."""
        message = await self.ws.receive()
        assert message.type is aiohttp.WSMsgType.TEXT, message
        return json.loads(message.data)

    async def turn(self, given: object, **fields: Any) -> list[dict[str, Any]]:
        """Send one and read until its last event."""
        await self.create(given, **fields)
        return await self.rest()

    async def rest(self) -> list[dict[str, Any]]:
        """The events up to the last of a turn: a terminal one or an error."""
        events = [await self.event()]
        while events[-1].get("type") not in TERMINALS and "error" not in events[-1]:
            events.append(await self.event())
        return events

    async def response(self, given: object, **fields: Any) -> dict[str, Any]:
        """The completed response to one turn."""
        *_, last = await self.turn(given, **fields)
        assert last["type"] == "response.completed", last
        return last["response"]

    async def error(self, given: object, **fields: Any) -> dict[str, Any]:
        """The error that answers one turn."""
        (only,) = await self.turn(given, **fields)
        return {"status": only.get("status"), **only["error"]}


@asynccontextmanager
async def connected(simulator: Simulator, key: str = KEY) -> AsyncIterator[RawConnection]:
    """A raw connection to the simulator."""
    url = simulator.base_url.replace("http", "ws", 1) + "/responses"
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(url, headers=headers, max_msg_size=0) as ws,
    ):
        yield RawConnection(ws)
