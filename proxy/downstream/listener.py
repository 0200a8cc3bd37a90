"""
A listener that closes without turning away who is already at the door.

A connection exists for its client as soon as the kernel has shaken hands, which is before the event
loop hears of it. If a listener just closes, those that wait in its queue are reset, and with them
requests that were sent: a load balancer may not send a POST a second time, so each is a failed turn
in every restart under load. Here, what waits in the queue is accepted when the listener closes.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Callable


class LastCallSite(web.TCPSite):
    """A TCPSite that accepts, when it stops, the connections that the kernel has accepted."""

    __slots__ = ()

    async def stop(self) -> None:
        """Stop listening. Connections that were waiting are made like any other."""
        listeners = [_twin(each) for each in _sockets(self._server)]
        try:
            await super().stop()
            protocol = self._runner.server
            if protocol is not None:
                for listener in listeners:
                    await _accept_waiting(listener, protocol)
        finally:
            for listener in listeners:
                listener.close()


def _sockets(server: asyncio.AbstractServer | None) -> tuple[socket.socket, ...]:
    return tuple(getattr(server, "sockets", None) or ())


def _twin(listener: socket.socket) -> socket.socket:
    """Return a descriptor of our own for a listener, which goes on after the loop's is closed."""
    # The loops give out stand-ins for sockets, of which only these are to be relied on.
    return socket.fromfd(listener.fileno(), listener.family, listener.type)


async def _accept_waiting(
    listener: socket.socket, protocol: Callable[[], asyncio.BaseProtocol]
) -> None:
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    while True:
        try:
            connection, _ = listener.accept()
        except ConnectionAbortedError:  # one that waited has gone
            continue
        except OSError:  # none is waiting any more, or there is no descriptor for it
            return
        connection.setblocking(False)
        await loop.connect_accepted_socket(protocol, connection)
