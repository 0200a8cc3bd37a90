"""The ports that tests and benchmark rely on: closed ones stay closed, kept ones can be served."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import socket
import sys

import pytest

LOOPS = {"asyncio": asyncio.new_event_loop}
if importlib.util.find_spec("uvloop"):
    LOOPS["uvloop"] = importlib.import_module("uvloop").new_event_loop


def greeting(port: int) -> bytes:
    """Return the first that somebody on a port says. Raises ConnectionRefusedError."""
    with socket.create_connection(("127.0.0.1", port), 5) as client:
        return client.recv(100)


def test_a_closed_port_is_given_to_nobody_who_wants_it(closed_port: int):
    """Who names it without sharing is turned away, and so is who connects to it."""
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", closed_port))
    with pytest.raises(ConnectionRefusedError):
        greeting(closed_port)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_server_may_take_a_kept_port_again_and_again(loop: str, host: str, served_port: int):
    """While it serves it is reached there; after that nobody is, as long as the port is kept."""

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    async def serve() -> bytes:
        async with await asyncio.start_server(greet, host, served_port):
            return await asyncio.to_thread(greeting, served_port)

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        for _ in range(3):
            assert runner.run(serve()) == b"hello"
            if sys.platform == "linux":
                with pytest.raises(ConnectionRefusedError):
                    greeting(served_port)
