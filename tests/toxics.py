"""
A TCP proxy that spoils connections on purpose, with the toxics of toxiproxy.

Names, fields and units are toxiproxy's own (github.com/Shopify/toxiproxy, "Toxics"), so that a
story told here can be told to the real one: `from_json` reads what its HTTP API takes. `stream` is
the direction that a toxic works in: `upstream` from the client to the server, `downstream` back.
`toxicity` is the chance that a connection has the toxic at all.

    latency     latency and jitter, in milliseconds
    bandwidth   rate, in KB/s
    slow_close  delay, in milliseconds, before the end of a direction is passed on
    timeout     nothing gets through; closed after `timeout` milliseconds, 0: never (a black hole)
    reset_peer  RST `timeout` milliseconds after the first bytes, which do not get through
    slicer      pieces of average_size +- size_variation bytes, delay microseconds apart
    limit_data  the connection ends after so many bytes
    down        no toxic: `disable()` closes the listener and all connections, `enable()` opens it

A direction without toxics is a write within the read. One with toxics has a queue of what has
arrived, each piece with its time, and a task that carries the pieces through the toxics in order;
so latency delays and does not slow down. Back-pressure passes through: who does not read stops
the sender.

As in toxiproxy, toxics may be added and removed while connections are open. What `toxicity`
decides is drawn once for each connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from proxy.bench.ports import port_to_serve

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Forward = Callable[[bytes, float], Awaitable[None]]
"""Passes on bytes that arrived at a time of the loop's clock."""

HIGH_WATER_BYTES = 1 << 20
_TICKS_PER_S = 10  # a limited direction moves ten times a second, as toxiproxy's does


# --- The toxics -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Toxic:
    """What all toxics have."""

    stream: str = "downstream"
    toxicity: float = 1.0

    type: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if self.stream not in ("upstream", "downstream"):
            raise ValueError(f"no such stream: {self.stream}")

    def start(self, pipe: Pipe, onward: Forward) -> Forward:
        """Begin to work on one direction of one connection; return what takes its bytes."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency(Toxic):
    """All bytes arrive `latency` +- `jitter` milliseconds later, in their order."""

    latency: float = 0
    jitter: float = 0

    type: ClassVar[str] = "latency"

    def start(self, pipe: Pipe, onward: Forward) -> Forward:
        """See the class."""

        async def forward(data: bytes, arrived: float) -> None:
            pipe.bite(self)
            late_ms = self.latency + pipe.rng.uniform(-self.jitter, self.jitter)
            await pipe.sleep_until(arrived + late_ms / 1000)
            await onward(data, arrived)

        return forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth(Toxic):
    """No more than `rate` KB (1000 bytes) a second."""

    rate: float = 1

    type: ClassVar[str] = "bandwidth"

    def start(self, pipe: Pipe, onward: Forward) -> Forward:
        """See the class."""
        size = max(int(self.rate * 1000 / _TICKS_PER_S), 1)

        async def forward(data: bytes, arrived: float) -> None:
            pipe.bite(self)
            if not data:
                await onward(data, arrived)
            for start in range(0, len(data), size):
                piece = data[start : start + size]
                await asyncio.sleep(len(piece) / (self.rate * 1000))
                await onward(piece, arrived)

        return forward


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowClose(Toxic):
    """The end of the direction is passed on `delay` milliseconds late."""

    delay: float = 0

    type: ClassVar[str] = "slow_close"

    def start(self, pipe: Pipe, onward: Forward) -> Forward:
        """See the class."""

        async def forward(data: bytes, arrived: float) -> None:
            if not data:
                pipe.bite(self)
                await asyncio.sleep(self.delay / 1000)
            await onward(data, arrived)

        return forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeout(Toxic):
    """Nothing gets through, not even an end; closed after `timeout` milliseconds unless 0."""

    timeout: float = 0

    type: ClassVar[str] = "timeout"

    def start(self, pipe: Pipe, onward: Forward) -> Forward:
        """See the class."""
        if self.timeout:
            pipe.link.later(self.timeout / 1000, pipe.link.close)

        async def forward(_data: bytes, _arrived: float) -> None:
            pipe.bite(self)

        return forward


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetPeer(Toxic):
    """The connection is reset `timeout` milliseconds after the first bytes, which are lost."""

    timeout: float = 0

    type: ClassVar[str] = "reset_peer"

    def start(self, pipe: Pipe, onward: Forward) -> Forward:
        """See the class."""

        async def forward(_data: bytes, _arrived: float) -> None:
            pipe.bite(self)
            await asyncio.sleep(self.timeout / 1000)
            pipe.link.reset()

        return forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicer(Toxic):
    """Pieces of `average_size` +- `size_variation` bytes, `delay` microseconds apart."""

    average_size: int = 1
    size_variation: int = 0
    delay: float = 0

    type: ClassVar[str] = "slicer"

    def start(self, pipe: Pipe, onward: Forward) -> Forward:
        """See the class."""
        least = max(self.average_size - self.size_variation, 1)
        most = max(self.average_size + self.size_variation, least)

        async def forward(data: bytes, arrived: float) -> None:
            pipe.bite(self)
            if not data:
                await onward(data, arrived)
            start = 0
            while start < len(data):
                size = pipe.rng.randint(least, most)
                await onward(data[start : start + size], arrived)
                await asyncio.sleep(self.delay / 1e6)
                start += size

        return forward


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitData(Toxic):
    """The connection ends after `bytes` bytes of this direction."""

    bytes: int = 0

    type: ClassVar[str] = "limit_data"

    def start(self, pipe: Pipe, onward: Forward) -> Forward:
        """See the class."""
        left = self.bytes

        async def forward(data: bytes, arrived: float) -> None:
            nonlocal left
            within = data[:left]
            left -= len(within)
            if within or not data:
                await onward(within, arrived)
            if left <= 0:
                pipe.bite(self)
                pipe.link.close()

        return forward


TOXICS: Mapping[str, type[Toxic]] = {
    kind.type: kind
    for kind in (Latency, Bandwidth, SlowClose, Timeout, ResetPeer, Slicer, LimitData)
}
"""All toxics by the `type` that they have in toxiproxy."""


def from_json(value: Mapping[str, Any]) -> Toxic:
    """
    Return the toxic of toxiproxy's `{"type": ..., "stream": ..., "attributes": {...}}`.

    A name is ignored, as we have none. Raises ValueError for an unknown type or field.
    """
    kind = TOXICS.get(str(value.get("type")))
    if kind is None:
        raise ValueError(f"no such toxic: {value.get('type')}")
    given = {key: value[key] for key in ("stream", "toxicity") if key in value}
    attributes = dict(value.get("attributes", {}))
    if unknown := attributes.keys() - {each.name for each in fields(kind)}:
        raise ValueError(f"no such field: {', '.join(sorted(unknown))}")
    return kind(**given, **attributes)


# --- The proxy ------------------------------------------------------------------------------------


class Pipe:
    """One direction of one connection."""

    def __init__(self, link: Link, stream: str) -> None:
        self.link = link
        self.stream = stream
        self.rng = link.proxy.rng
        self.toxics: list[Toxic] = []
        self.source: asyncio.Transport | None = None
        self.target: asyncio.Transport | None = None
        self.target_has_room = True
        self.has_ended = False
        self._arrived: deque[tuple[bytes, float]] = deque()
        self._arrived_bytes = 0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._forward: Forward = self._write
        self._bitten: set[Toxic] = set()

    def bite(self, toxic: Toxic) -> None:
        """Count a toxic that does something here, once for each connection."""
        if toxic not in self._bitten:
            self._bitten.add(toxic)
            self.link.proxy.bites[toxic.type] += 1

    async def sleep_until(self, due: float) -> None:
        """Sleep until a time of the loop's clock."""
        await asyncio.sleep(max(due - self.link.loop.time(), 0))

    def set_toxics(self, toxics: list[Toxic]) -> None:
        """Work with these toxics from the next bytes on."""
        self.toxics = toxics
        self._bitten &= set(toxics)
        forward: Forward = self._write
        for toxic in reversed(toxics):
            forward = toxic.start(self, forward)
        self._forward = forward

    def feed(self, data: bytes) -> None:
        """Take what has arrived; no bytes are the end."""
        if not self.toxics and self._task is None:
            self._put(data)
            return
        self._arrived.append((data, self.link.loop.time()))
        self._arrived_bytes += len(data)
        if self._arrived_bytes > HIGH_WATER_BYTES:
            self.pause()
        self._wake.set()
        if self._task is None:
            self._task = self.link.loop.create_task(self._carry(), name="toxics")

    async def _carry(self) -> None:
        """Carry what has arrived through the toxics, until the connection ends."""
        while True:
            while self._arrived:
                data, arrived = self._arrived.popleft()
                self._arrived_bytes -= len(data)
                await self._forward(data, arrived)
            self.resume()
            if not self.toxics:
                self._task = None
                return
            self._wake.clear()
            await self._wake.wait()

    async def _write(self, data: bytes, _arrived: float) -> None:
        self._put(data)

    def _put(self, data: bytes) -> None:
        if self.target is None or self.target.is_closing():
            return
        if data:
            self.target.write(data)
        else:
            self.has_ended = True
            if self.target.can_write_eof():
                self.target.write_eof()
            self.link.close_if_ended()

    def pause(self) -> None:
        """Read no more for now."""
        if self.source is not None and not self.source.is_closing():
            self.source.pause_reading()

    def resume(self) -> None:
        """Read again, if there is room."""
        has_room = self.target_has_room and self._arrived_bytes <= HIGH_WATER_BYTES
        if has_room and self.source is not None and not self.source.is_closing():
            self.source.resume_reading()

    def cancel(self) -> None:
        """Drop what is on its way."""
        if self._task is not None:
            self._task.cancel()


class _End(asyncio.Protocol):
    """One of the two sockets of a connection: feeds one pipe, and is the target of the other."""

    def __init__(self, link: Link, into: Pipe, out_of: Pipe) -> None:
        self._link = link
        self._into = into
        self._out_of = out_of

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        opened = cast("asyncio.Transport", transport)  # uvloop's are no subclass
        self._into.source = self._out_of.target = opened
        self._link.proxy.transports.add(opened)
        self._link.joined(self)

    def data_received(self, data: bytes) -> None:
        self._link.began_with = self._link.began_with or data[:32]
        self._into.feed(data)

    def eof_received(self) -> bool:
        self._into.feed(b"")
        return True  # the other direction goes on

    def connection_lost(self, exc: Exception | None) -> None:
        if self._into.source is not None:
            self._link.proxy.transports.discard(self._into.source)
        if exc is None:
            self._link.close()
        else:
            self._link.reset()

    def pause_writing(self) -> None:
        self._out_of.target_has_room = False
        self._out_of.pause()

    def resume_writing(self) -> None:
        self._out_of.target_has_room = True
        self._out_of.resume()


class Link:
    """
    One connection through the proxy: two sockets, two pipes.

    `began_with` are the first bytes that passed, which tell what is spoken here.
    """

    def __init__(self, proxy: FaultProxy) -> None:
        self.proxy = proxy
        self.loop = asyncio.get_running_loop()
        self.pipes = {stream: Pipe(self, stream) for stream in ("upstream", "downstream")}
        self.luck: dict[Toxic, bool] = {}
        self.own_toxics: list[Toxic] = []
        self.began_with = b""
        self._connecting: asyncio.Task[None] | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._over = False

    def client_end(self) -> _End:
        """Return the protocol of the accepted socket."""
        return _End(self, self.pipes["upstream"], self.pipes["downstream"])

    def joined(self, end: _End) -> None:
        """Take note that a socket is there; the first one makes us connect the second."""
        if self._connecting is None:
            self.proxy.links.add(self)
            self.pipes["upstream"].pause()
            self.choose_toxics()
            self._connecting = self.loop.create_task(self._connect(), name="toxics-connect")

    async def _connect(self) -> None:
        host, port = self.proxy.upstream
        up, down = self.pipes["upstream"], self.pipes["downstream"]
        try:
            await self.loop.create_connection(lambda: _End(self, down, up), host, port)
        except OSError:
            self.close()
        else:
            up.resume()

    def choose_toxics(self) -> None:
        """Give each direction the toxics that this connection is to have."""
        for stream, pipe in self.pipes.items():
            shared = [each for each in self.proxy.toxics if self._has(each)]
            chosen = [each for each in (*shared, *self.own_toxics) if each.stream == stream]
            if chosen != pipe.toxics:
                pipe.set_toxics(chosen)

    def infect(self, *toxics: Toxic) -> None:
        """Add toxics to this connection alone, whatever their toxicity."""
        self.own_toxics += toxics
        self.choose_toxics()

    def _has(self, toxic: Toxic) -> bool:
        if toxic not in self.luck:
            self.luck[toxic] = self.proxy.rng.random() < toxic.toxicity
        return self.luck[toxic]

    def later(self, delay_s: float, do: Callable[[], None]) -> None:
        """Do something after a delay, unless the connection is over by then."""
        self._timers.append(self.loop.call_later(delay_s, do))

    def _transports(self) -> Iterator[asyncio.Transport]:
        for pipe in self.pipes.values():
            if pipe.source is not None:
                yield pipe.source

    def close_if_ended(self) -> None:
        """End both sockets once both directions have come to their ends."""
        if all(pipe.has_ended for pipe in self.pipes.values()):
            self.close()

    def close(self) -> None:
        """End both sockets; what was passed on already is delivered."""
        if self._end():
            for transport in self._transports():
                transport.close()

    def reset(self) -> None:
        """End both sockets with RST: a linger time of 0 makes close() discard and reset."""
        if self._end():
            for transport in self._transports():
                with contextlib.suppress(OSError):
                    raw = transport.get_extra_info("socket")
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                transport.abort()

    def _end(self) -> bool:
        """Stop everything; False if that was done before."""
        if self._over:
            return False
        self._over = True
        self.proxy.links.discard(self)
        if self._connecting is not None and self._connecting is not asyncio.current_task():
            self._connecting.cancel()
        for timer in self._timers:
            timer.cancel()
        for pipe in self.pipes.values():
            self.loop.call_soon(pipe.cancel)  # a toxic may be what ends us
        return True


@dataclass
class FaultProxy:
    """
    A proxy in front of `upstream` (host and port). An async context manager.

    `bites` counts, for each type of toxic, the connections that have felt it; `cuts` counts `down`
    and what the methods below end by hand.
    """

    upstream: tuple[str, int]
    rng: random.Random = field(default_factory=random.Random)
    toxics: list[Toxic] = field(default_factory=list)
    bites: Counter[str] = field(default_factory=Counter)
    links: set[Link] = field(default_factory=set)
    transports: set[asyncio.Transport] = field(default_factory=set)
    port: int = 0
    _server: asyncio.Server | None = None
    _kept: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    async def __aenter__(self) -> Self:
        self.port = self._kept.enter_context(port_to_serve())
        await self.enable()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.disable()
        self._kept.close()
        for transport in list(self.transports):
            transport.abort()  # some may wait for a peer that reads no more
        await asyncio.sleep(0)  # for their ends, and for what was cancelled

    @property
    def base_url(self) -> str:
        """The base URL of the API behind the proxy."""
        return f"http://127.0.0.1:{self.port}/v1"

    async def enable(self) -> None:
        """Listen on the port, which stays the same."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Link(self).client_end(), "127.0.0.1", self.port
        )

    def disable(self) -> None:
        """Be down: refuse connections, and close those that there are."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.bites["down"] += len(self.links)
        for link in list(self.links):
            link.close()

    def add(self, *toxics: Toxic) -> None:
        """Add toxics, for connections that are open as well."""
        self.toxics += toxics
        self._choose_again()

    def remove(self, *toxics: Toxic) -> None:
        """Remove toxics; what they hold back by now comes late."""
        for toxic in toxics:
            self.toxics.remove(toxic)
        self._choose_again()

    def _choose_again(self) -> None:
        for link in list(self.links):
            link.choose_toxics()
