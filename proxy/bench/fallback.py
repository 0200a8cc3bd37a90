"""
The load programs in Python, for where there is no C compiler.

    python -m proxy.bench.fallback upstream TEMPLATES [CERTIFICATE]
    python -m proxy.bench.fallback client PORT STREAMS STREAMS_PER_KEY FOLDER

They take the same arguments, commands and plans as `c/upstream.c` and `c/client.c`, which say what
those are, and answer in the same JSON. Bare asyncio protocols keep them as fast as Python gets; a
burst is still limited by them, not by a good proxy.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import random
import re
import ssl
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from proxy.bench.bodies import (
    ITEM_MARK,
    NONCE_MARK,
    NUMBER_BASE,
    NUMBER_MARK,
    RESPONSE_MARK,
    STAMP_BASE,
    STAMP_MARK,
)
from proxy.bench.controls import loop_factory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_ACCEPT_KEY: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455 section 1.3
_HEAD_END: Final = b"\r\n\r\n"
_SSE_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
_PREVIOUS = re.compile(rb'"previous_response_id": *"resp_([0-9a-f]{16})"')
_NUMBER = re.compile(rb'"sequence_number": *(\d+)')
_STAMP = re.compile(rb'"ts": *(\d+)')
_START_BYTES = 256
_BURST_EVENTS = 64
_RANKS = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


class LoadFailed(Exception):
    """What came is not what the other end sends. The message says what it was."""


# --- the upstream --------------------------------------------------------------------------------


class Plan:
    """What turns are like, and what was received so far: shared by all connections."""

    def __init__(self, templates: Sequence[bytes]) -> None:
        self.templates = templates
        self.names = [json.loads(each)["type"].encode() for each in templates]
        self.events = 3
        self.rate = 0
        self.responses = 0
        counted = ("bytes", "turns", "deltas", "strays", "upgrades", "overlaps")
        self.stats = dict.fromkeys(counted, 0)

    def event(self, number: int, events: int, response: bytes, *, sse: bool) -> bytes:
        """Return one event of a turn, framed for the wire."""
        place = {0: 0, events - 2: 2, events - 1: 3}.get(number, 1)
        text = (
            self.templates[place]
            .replace(RESPONSE_MARK.encode(), b"resp_" + response)
            .replace(ITEM_MARK.encode(), b"msg_" + response)
            .replace(NUMBER_MARK.encode(), b"%d" % (NUMBER_BASE + number), 1)
            .replace(STAMP_MARK.encode(), b"%d" % (STAMP_BASE + time.monotonic_ns()), 1)
        )
        if not sse:
            return _frame(0x81, text)
        block = b"event: %b\ndata: %b\n\n" % (self.names[place], text)
        end = b"0\r\n\r\n" if number == events - 1 else b""
        return b"%x\r\n%b\r\n%b" % (len(block), block, end)


def _frame(first: int, payload: bytes) -> bytes:
    size = len(payload)
    if size < 126:
        return bytes((first, size)) + payload
    if size < 1 << 16:
        return bytes((first, 126)) + size.to_bytes(2) + payload
    return bytes((first, 127)) + size.to_bytes(8) + payload


class UpstreamProtocol(asyncio.Protocol):
    """One connection of the upstream: HTTP until it is upgraded, then WebSocket."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._data = bytearray()
        self._read: Callable[[], bool] = self._read_head
        self._left = 0
        self._sse = True
        self._start = b""
        self._response = b""
        self._turn: asyncio.Task[None] | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, _exc: Exception | None) -> None:
        """Stop answering."""
        if self._turn is not None:
            self._turn.cancel()

    def pause_writing(self) -> None:
        """Hold a burst back."""
        self._may_write.clear()

    def resume_writing(self) -> None:
        """Go on with it."""
        self._may_write.set()

    def data_received(self, data: bytes) -> None:
        """Read on, as far as it goes."""
        self._data += data
        while self._read():
            pass

    def _take(self, size: int) -> bytes:
        taken = bytes(self._data[:size])
        del self._data[:size]
        return taken

    def _read_head(self) -> bool:
        end = self._data.find(_HEAD_END)
        if end < 0:
            return False
        head = self._take(end + len(_HEAD_END))
        if key := re.search(rb"(?i)\nsec-websocket-key: *([^\r]+)", head):
            digest = hashlib.sha1(key[1] + _ACCEPT_KEY, usedforsecurity=False).digest()
            self._plan.stats["upgrades"] += 1
            self._sse, self._read = False, self._read_frame
            self._transport.write(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n"
                b"Connection: Upgrade\r\nSec-WebSocket-Accept: %b\r\n\r\n"
                % base64.b64encode(digest)
            )
        elif head.startswith(b"GET /plan"):
            values = dict(re.findall(rb"(events|rate)=(\d+)", head))
            self._plan.events = max(3, int(values[b"events"]))
            self._plan.rate = int(values[b"rate"])
            self._answer_json(b"{}")
        elif head.startswith(b"GET /stats"):
            self._answer_json(json.dumps(self._plan.stats).encode())
        else:
            length = re.search(rb"(?i)\ncontent-length: *(\d+)", head)
            self._left = int(length[1]) if length else 0
            self._read = self._read_body
        return True

    def _answer_json(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self._transport.write(head % len(body) + body)

    def _read_body(self) -> bool:
        taken = min(self._left, len(self._data))
        del self._data[:taken]
        self._plan.stats["bytes"] += taken
        self._left -= taken
        if self._left:
            return False
        self._read = self._read_head
        self._begin_turn()
        return True

    def _read_frame(self) -> bool:
        data = self._data
        if len(data) < 2:
            return False
        extra = {126: 2, 127: 8}.get(data[1] & 127, 0)
        head_size = 2 + extra + 4  # a client masks
        if len(data) < head_size:
            return False
        size = int.from_bytes(data[2 : 2 + extra]) if extra else data[1] & 127
        if len(data) < head_size + size:
            return False
        head, payload = self._take(head_size), self._take(size)
        mask = head[-4:]
        start = bytes(b ^ mask[i & 3] for i, b in enumerate(payload[:_START_BYTES]))
        self._take_frame(head[0] & 15, start, size, is_final=bool(head[0] & 128))
        return True

    def _take_frame(self, opcode: int, start: bytes, size: int, *, is_final: bool) -> None:
        if opcode == 8:
            self._transport.close()
        elif opcode == 9:
            self._transport.write(_frame(0x8A, start))
        elif opcode < 3:
            self._plan.stats["bytes"] += size
            self._start = start if opcode else self._start
            if is_final:
                if previous := _PREVIOUS.search(self._start):
                    kind = "deltas" if previous[1] == self._response else "strays"
                    self._plan.stats[kind] += 1
                self._begin_turn()

    def _begin_turn(self) -> None:
        plan = self._plan
        if self._turn is not None and not self._turn.done():
            plan.stats["overlaps"] += 1
            return
        plan.stats["turns"] += 1
        plan.responses += 1
        self._response = b"%016x" % plan.responses
        if self._sse:
            self._transport.write(_SSE_HEAD)
        if plan.events <= _BURST_EVENTS and not plan.rate:
            self._write_events(range(plan.events), plan.events)
        else:
            loop = asyncio.get_running_loop()
            self._turn = loop.create_task(self._answer(plan.events, plan.rate))

    def _write_events(self, numbers: range, events: int) -> None:
        event = self._plan.event
        self._transport.write(
            b"".join(event(i, events, self._response, sse=self._sse) for i in numbers)
        )

    async def _answer(self, events: int, rate: int) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        at = 0
        while True:
            await self._may_write.wait()
            count = 1 if rate else min(_BURST_EVENTS, events - at)
            self._write_events(range(at, at + count), events)
            at += count
            if at == events:
                return  # at once: the next request may be here already
            if not rate:
                await asyncio.sleep(0)
                continue
            # A random phase, so that streams which began together do not march in step.
            phase = random.uniform(0.5, 1.5) if at == 1 else 1.0  # noqa: S311  load, no secret
            due += phase / rate
            if (wait_s := due - loop.time()) > 0:
                await asyncio.sleep(wait_s)


async def serve_upstream(templates: bytes, certificate: Path | None) -> None:
    """Serve until cancelled; the port, and that behind TLS, are printed once they are open."""
    plan = Plan(templates.splitlines())
    loop = asyncio.get_running_loop()
    contexts: list[ssl.SSLContext | None] = [None]
    if certificate is not None:
        secured = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        secured.load_cert_chain(certificate)
        contexts.append(secured)
    servers = [
        await loop.create_server(
            lambda: UpstreamProtocol(plan), "127.0.0.1", 0, backlog=4096, ssl=context
        )
        for context in contexts
    ]
    for server in servers:
        sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


# --- the clients ---------------------------------------------------------------------------------


class Clients:
    """All streams, what they send, and what they saw since the last command."""

    def __init__(self, port: int, per_key: int, folder: Path, *, is_chat: bool = False) -> None:
        self.port = port
        self.is_chat = is_chat
        self.per_key = per_key
        self.prefix, self.suffix, self.echo, self.item = (
            (folder / name).read_bytes() for name in ("prefix", "suffix", "echo", "item")
        )
        self.streams: list[ClientProtocol] = []
        self.generation = 0
        self.skip = 0
        self.deltas = self.events = 0
        self.event_us: list[float] = []
        self.first_us: list[float] = []
        self.turn_us: list[float] = []
        self._running = 0
        self._done = asyncio.Event()

    async def open(self, streams: int) -> None:
        """Connect all streams."""
        loop = asyncio.get_running_loop()
        for number in range(streams):
            _, protocol = await loop.create_connection(
                lambda number=number: ClientProtocol(self, number),  # type: ignore[misc]
                "127.0.0.1",
                self.port,
            )
            self.streams.append(protocol)

    async def obey(self, command: str) -> str:
        """Do what a line says, and return the answer. Raises LoadFailed."""
        name, *numbers = command.split()
        turns, self.skip = [*map(int, numbers), 1, 0][:2] if name == "turns" else (1, 0)
        self.generation += name == "new"
        for stream in self.streams:
            stream.prepare(is_new=name == "new")
        self.event_us, self.first_us, self.turn_us = [], [], []
        self.deltas = self.events = 0
        self._running = len(self.streams)
        self._done.clear()
        began = time.perf_counter()
        for stream in self.streams:
            stream.begin(turns)
        await self._done.wait()
        return self._told(time.perf_counter() - began)

    def ended(self, failure: Exception | None = None) -> None:
        """Take note that a stream has played all its turns, or failed."""
        if failure is not None:
            sys.stderr.write(f"{failure}\n")
            sys.stderr.flush()
            os._exit(1)  # a measurement of wrong answers is none
        self._running -= 1
        if not self._running:
            self._done.set()

    def _told(self, wall_s: float) -> str:
        return json.dumps(
            {
                "turns": len(self.turn_us),
                "events": self.events,
                "deltas": self.deltas,
                "wall_s": wall_s,
                "body_bytes": len(self.streams[0].body),
                "turn_us": ranked(self.turn_us),
                "first_us": ranked(self.first_us),
                "event_us": ranked(self.event_us),
            }
        )


def ranked(values: Sequence[float]) -> dict[str, float]:
    """Return the values that stand at the ranks of a report. There must be one at least."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {name: ordered[min(last, int(rank * len(ordered)))] for name, rank in _RANKS.items()}


class ClientProtocol(asyncio.Protocol):
    """One stream: a keep-alive connection with a conversation of its own."""

    def __init__(self, clients: Clients, number: int) -> None:
        self._clients = clients
        self._number = number
        self.body = b""
        self._item_id = b""
        self._turns_left = 0
        self._began_ns = 0
        self._data = bytearray()
        self._stream = bytearray()
        self._in_head = True
        self._next = 0
        self._has_ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail, if a turn is under way."""
        if self._turns_left:
            self._clients.ended(LoadFailed(f"closed in a reply: {exc}"))

    def prepare(self, *, is_new: bool) -> None:
        """Make the body of the next turn: of a new conversation, or of the one there is."""
        clients = self._clients
        if is_new:
            value = os.getpid() << 44 ^ clients.generation << 24 ^ self._number
            nonce = b"nonce_%016x" % (value & (1 << 64) - 1)
            self.body = clients.prefix.replace(NONCE_MARK.encode(), nonce, 1) + clients.suffix
            return
        echo = clients.echo.replace(ITEM_MARK.encode(), b"msg_" + self._item_id)
        history = self.body[: -len(clients.suffix)]
        self.body = b"%b,%b,%b%b" % (history, echo, clients.item, clients.suffix)

    def begin(self, turns: int) -> None:
        """Play `turns` turns, the first with the body that was prepared."""
        self._turns_left = turns
        self._send()

    def _send(self) -> None:
        clients = self._clients
        key = f"{os.getpid()}-{clients.generation}-{self._number // clients.per_key}"
        path = "/v1/chat/completions" if clients.is_chat else "/v1/responses"
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{clients.port}\r\n"
            f"Authorization: Bearer sk-bench-{key}\r\nAccept: text/event-stream\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(self.body)}\r\n\r\n"
        )
        self._in_head, self._next, self._has_ended = True, 0, False
        self._stream.clear()
        self._began_ns = time.monotonic_ns()
        self._transport.write(head.encode())
        self._transport.write(self.body)

    def data_received(self, data: bytes) -> None:
        """Read on; a wrong answer ends the program."""
        self._data += data
        try:
            self._read(time.monotonic_ns())
        except LoadFailed as failure:
            self._clients.ended(failure)

    def _read(self, now_ns: int) -> None:
        if self._in_head and not self._read_head():
            return
        while (line_end := self._data.find(b"\r\n")) >= 0:
            size = int(self._data[:line_end].split(b";")[0], 16)
            chunk_end = line_end + 2 + size
            if len(self._data) < chunk_end + 2:
                break
            self._stream += self._data[line_end + 2 : chunk_end]
            del self._data[: chunk_end + 2]
            if not size:
                self._end_turn(now_ns)
                return
        self._read_events(now_ns)

    def _read_head(self) -> bool:
        end = self._data.find(_HEAD_END)
        if end < 0:
            return False
        head = bytes(self._data[:end]).lower()
        if not head.startswith(b"http/1.1 200") or b"\ntransfer-encoding: chunked" not in head:
            raise LoadFailed(f"refused: {bytes(self._data[:300])!r}")
        self._clients.deltas += b"\nturnwire-mode: delta" in head
        del self._data[: end + len(_HEAD_END)]
        self._in_head = False
        return True

    def _read_events(self, now_ns: int) -> None:
        *events, rest = bytes(self._stream).split(b"\n\n")
        self._stream[:] = rest
        take = self._take_chunk if self._clients.is_chat else self._take_event
        for event in events:
            take(event, now_ns)

    def _take_chunk(self, chunk: bytes, now_ns: int) -> None:
        """Chunks have no stamps: the latency of one is the time since its turn began."""
        clients, since_us = self._clients, (now_ns - self._began_ns) / 1e3
        if self._has_ended or not chunk.startswith(b"data: "):
            raise LoadFailed(f"not a chunk: {chunk[:300]!r}")
        if self._next >= clients.skip:
            clients.event_us.append(since_us)
        if not self._next:
            clients.first_us.append(since_us)
        self._next += 1
        clients.events += 1
        self._has_ended = chunk == b"data: [DONE]"

    def _take_event(self, event: bytes, now_ns: int) -> None:
        clients = self._clients
        number = _number_after(event, _NUMBER)
        if number != NUMBER_BASE + self._next:
            raise LoadFailed(f"an event out of order: {event[:300]!r}")
        if self._next >= clients.skip:
            sent_ns = _number_after(event, _STAMP) - STAMP_BASE
            clients.event_us.append((now_ns - sent_ns) / 1e3)
        if not self._next:
            clients.first_us.append((now_ns - self._began_ns) / 1e3)
        self._next += 1
        clients.events += 1
        if event.startswith(b"event: response.output_item.done"):
            at = event.index(b'"msg_') + 5
            self._item_id = event[at : at + 16]
        self._has_ended = event.startswith(b"event: response.completed")

    def _end_turn(self, now_ns: int) -> None:
        self._read_events(now_ns)
        if not self._has_ended or self._stream or self._data:
            raise LoadFailed(f"a reply ended early: {bytes(self._stream[:300])!r}")
        self._clients.turn_us.append((now_ns - self._began_ns) / 1e3)
        self._turns_left -= 1
        if self._turns_left:
            self.prepare(is_new=False)
            self._send()
        else:
            self._clients.ended()


def _number_after(event: bytes, pattern: re.Pattern[bytes]) -> int:
    found = pattern.search(event)
    if found is None:
        raise LoadFailed(f"an event lacks a field: {event[:300]!r}")
    return int(found[1])


async def run_clients(
    port: int, streams: int, per_key: int, folder: Path, *, is_chat: bool = False
) -> None:
    """Obey standard input until its end."""
    clients = Clients(port, per_key, folder, is_chat=is_chat)
    await clients.open(streams)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        sys.stdout.write(await clients.obey(line) + "\n")
        sys.stdout.flush()


def _main(arguments: Sequence[str]) -> None:
    name, *rest = arguments
    if name == "upstream":
        certificate = Path(rest[1]) if rest[1:] else None
        work = serve_upstream(Path(rest[0]).read_bytes(), certificate)
    else:
        numbers = (int(rest[0]), int(rest[1]), int(rest[2]))
        work = run_clients(*numbers, Path(rest[3]), is_chat=rest[4:] == ["chat"])
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=loop_factory()) as r:
        r.run(work)


if __name__ == "__main__":
    _main(sys.argv[1:])
