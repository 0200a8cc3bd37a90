"""
Ports that stay what they are: nobody listens on them until somebody is told to.

A port that was free a moment ago may be anybody's now: the kernel gives it to the next who asks for
any, the one who is to be refused there included. So the port is kept, by a socket that is bound to
it and does not listen. The kernel refuses connections to it, and gives it neither to who binds to
port 0 nor to who connects from any.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """Keep a port of 127.0.0.1, on which connections are refused to the end of the context."""
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        port: int = keeper.getsockname()[1]
        yield port


@contextlib.contextmanager
def port_to_serve() -> Iterator[int]:
    """
    Keep a port for a server that must be told one: it may take it, and take it again.

    That is Linux's meaning of SO_REUSEADDR (socket(7)), which servers set as well: two sockets may
    have one address as long as none of them listens. Elsewhere the port is let go at once.
    """
    with contextlib.ExitStack() as kept:
        port = kept.enter_context(closed_port())
        if sys.platform != "linux":
            kept.close()
        yield port
