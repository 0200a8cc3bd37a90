"""What all tests need of the process they run in."""

from __future__ import annotations

import logging
import signal
import socket
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from proxy.bench import ports

if TYPE_CHECKING:
    from collections.abc import Iterator

# A shell starts what it runs in the background with SIGINT ignored, and every program started from
# there ignores it as well; the tests of Ctrl-C need programs that do not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """
    Give each worker of `-n` whole files, in the usual order.

    Some files share a proxy among their tests, and look at the end whether it is well after all
    that; and the files at the end of the order are short ones, so that no worker waits for long.
    """
    if config.option.dist != "load":  # somebody wants it otherwise
        return None
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Keep a port on which nobody listens, until the end of the test."""
    with ports.closed_port() as port:
        yield port


@pytest.fixture
def served_port() -> Iterator[int]:
    """Keep a port for a server of the test, which has to know it beforehand."""
    with ports.port_to_serve() as port:
        yield port


@pytest.fixture
def taken_port() -> Iterator[int]:
    """Listen on a port, so that nobody else can."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture(autouse=True)
def _unchanged_log() -> Iterator[None]:
    """Put the log's settings back, which are the process's: commands set them to their own."""
    settings, root = structlog.get_config(), logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    structlog.configure(**settings)
    root.setLevel(level)
    root.handlers[:] = handlers
