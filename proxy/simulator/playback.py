"""Scripts played to a client: how a step is written down, and how a connection ends."""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from proxy.simulator.faults import Action, Outcome, Script, Step

if TYPE_CHECKING:
    from aiohttp import web

    from proxy.simulator.engine import Turn
    from proxy.simulator.state import ConnectionMemory

_SLEEP_FLOOR_S = 0.001
_ABORTED = 1006


class Sink(Protocol):
    """Where a script is played to."""

    async def send(self, step: Step) -> None:
        """Write one event."""

    async def end(self, step: Step) -> None:
        """End the connection as the step says."""


@dataclass(frozen=True, slots=True, eq=False)
class Connection:
    """One WebSocket connection and what it remembers."""

    request: web.Request
    ws: web.WebSocketResponse
    memory: ConnectionMemory


@dataclass(frozen=True, slots=True)
class SocketSink:
    """Plays to a WebSocket: an event is a text frame."""

    conn: Connection

    async def send(self, step: Step) -> None:
        """Write one event."""
        if step.raw is None:
            await self.conn.ws.send_str(step.encoded())
        elif (transport := self.conn.request.transport) is not None:
            transport.write(step.raw)

    async def end(self, step: Step) -> None:
        """End the connection: close frame, silence, RST or a bare FIN."""
        match step.action:
            case Action.CLOSE if step.code != _ABORTED:
                await self.conn.ws.close(code=step.code, message=b"on purpose")
            case Action.STALL:
                await asyncio.Event().wait()
            case Action.RESET:
                reset(self.conn.request)
            case _:
                abort(self.conn.request)


@dataclass(slots=True)
class SseSink:
    """Plays to the body of an HTTP reply: a write an event, or writes of `slice_bytes`."""

    request: web.Request
    reply: web.StreamResponse
    slice_bytes: int | None
    _waiting: bytes = b""

    async def send(self, step: Step) -> None:
        """Write one event; when slicing, what fills no slice waits for the next or the last."""
        size = self.slice_bytes
        if size is None:
            await self.reply.write(sse_event(step))
            return
        self._waiting += sse_event(step)
        while len(self._waiting) >= size:
            block, self._waiting = self._waiting[:size], self._waiting[size:]
            await self.reply.write(block)
        if step.outcome is not Outcome.NOTHING:
            await self._flush()

    async def end(self, step: Step) -> None:
        """End the reply, or its connection."""
        await self._flush()
        await end_http(self.request, step.action)

    async def _flush(self) -> None:
        block, self._waiting = self._waiting, b""
        if block:
            await self.reply.write(block)


def sse_event(step: Step) -> bytes:
    """One event as the API writes it; several `data:` lines where the JSON has line breaks."""
    lines = "\n".join(f"data: {line}" for line in step.encoded().split("\n"))
    return f"event: {step.kind}\n{lines}\n\n".encode()


async def play(
    script: Script, sink: Sink, turn: Turn, memory: ConnectionMemory | None, started: float
) -> None:
    """Carry out a script. What is remembered is settled before the client can see the event."""
    for step in script.steps:
        if step.due_s:
            await sleep_until(started + step.due_s)
        settle(step.outcome, turn, memory)
        if step.action is not Action.SEND:
            await sink.end(step)
            return
        await sink.send(step)


def settle(outcome: Outcome, turn: Turn, memory: ConnectionMemory | None) -> None:
    """Remember the turn, or forget what the connection held, or neither."""
    match outcome:
        case Outcome.COMMIT:
            turn.commit()
        case Outcome.EVICT if memory is not None:
            memory.latest = None


def is_terminal(step: Step) -> bool:
    """Whether the step holds the response object at its end."""
    return step.outcome is not Outcome.NOTHING and "response" in step.body


async def sleep_until(due: float) -> None:
    """Sleep until a time of the loop's clock; not at all if it is as good as here."""
    left = due - asyncio.get_running_loop().time()
    if left > _SLEEP_FLOOR_S:
        await asyncio.sleep(left)


async def end_http(request: web.Request, action: Action) -> None:
    """End an HTTP reply without its rest; a CLOSE is left to the caller, who just returns."""
    match action:
        case Action.STALL:
            await asyncio.Event().wait()
        case Action.RESET:
            reset(request)
        case Action.ABORT:
            abort(request)


def abort(request: web.Request) -> None:
    """End the TCP connection at once."""
    if request.transport is not None:
        request.transport.abort()


def reset(request: web.Request) -> None:
    """End with RST: a linger time of 0 makes close() discard and reset."""
    transport = request.transport
    if transport is not None:
        raw = transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
