"""
Opens the TCP connection under a WebSocket: to whichever address of the host answers first.

`websockets` leaves that to the event loop. uvloop's tries one address after the other, and where
the first is a black hole (a broken IPv6 route, a host that was taken away) it waits there until the
handshake's deadline; asyncio's can do better, but loses a socket when it is cancelled. So addresses
are tried as RFC 8305 says, Happy Eyeballs, by the library that does it for aiohttp: the next one
joins in after 250 ms, or at once if the one before it fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Final

import aiohappyeyeballs
from websockets.asyncio.client import connect
from websockets.proxy import get_proxy

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

ATTEMPT_DELAY_S: Final = 0.25  # RFC 8305 section 5


class Connect(connect):
    """The library's `connect`, but for how it gets its socket, and that it stays where it is."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        """Follow no redirect: the handshake carries credentials."""
        return exc

    async def open_tcp_connection(self) -> ClientConnection:
        """Connect, through a proxy if the environment names one; that is the library's business."""
        if get_proxy(self.ws_uri) is not None:
            return await super().open_tcp_connection()
        sock = await dial(self.ws_uri.host, self.ws_uri.port)
        self.create_connection_kwargs["sock"] = sock
        try:
            return await super().open_tcp_connection()
        except BaseException:
            with contextlib.suppress(OSError):
                sock.close()
            raise


async def dial(host: str, port: int) -> socket.socket:
    """
    Return a non-blocking socket that is connected to a host. None stays open when it is cancelled.

    Raises OSError: of the only address, or one that tells of all of them.
    """
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
    )
    try:
        return await aiohappyeyeballs.start_connection(
            addresses, happy_eyeballs_delay=ATTEMPT_DELAY_S
        )
    except RuntimeError as exc:  # what uvloop raises for an address that it can't parse
        raise OSError(str(exc)) from exc
